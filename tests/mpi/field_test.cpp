// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// Fields of simulations: blocks with ghost layers on meshes of their own, particles, beside a network.

#include "fsdp2/field.hpp"

#include <gtest/gtest.h>
#include <mpi.h>

#include <string>
#include <vector>

#include "support/checkpoint.hpp"

namespace fsdp2::testing {
namespace {

constexpr double ghost = -1;

int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// A block of cells, each worth its global index and an offset, inside ghost layers.
template <class Layout>
struct Block {
  using View = Kokkos::View<double***, Layout, MemorySpace>;

  Block(const DeviceMesh& mesh, Shape global_shape, std::vector<Placement> placement_of,
        std::vector<std::int64_t> layers)
      : shape(std::move(global_shape)), placements(std::move(placement_of)), ghosts(std::move(layers)) {
    box = local_box({DType::f64, shape, placements, {}}, mesh.spec(), mesh.coordinate());
    const auto extent = [&](std::size_t d) { return static_cast<std::size_t>(box.extent[d] + 2 * ghosts[d]); };
    view = View("block", extent(0), extent(1), extent(2));
    fill(0);
  }

  double value_at(std::size_t i, std::size_t j, std::size_t k, double offset) const {
    const std::size_t at[] = {i, j, k};
    double index = 0;
    for (std::size_t d = 0; d < 3; ++d) {
      const std::int64_t cell = static_cast<std::int64_t>(at[d]) - ghosts[d];
      if (cell < 0 || cell >= box.extent[d]) return ghost;
      index = index * static_cast<double>(shape[d]) + static_cast<double>(box.offset[d] + cell);
    }
    return index + offset;
  }
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (std::size_t i = 0; i < view.extent(0); ++i)
      for (std::size_t j = 0; j < view.extent(1); ++j)
        for (std::size_t k = 0; k < view.extent(2); ++k) visit(i, j, k);
  }
  void fill(double offset) const {
    const auto host = Kokkos::create_mirror_view(view);
    for_each([&](auto i, auto j, auto k) { host(i, j, k) = value_at(i, j, k, offset); });
    Kokkos::deep_copy(view, host);
  }
  void fill_with(double value) const { Kokkos::deep_copy(view, value); }
  /// Whether all cells are as filled, and ghosts are `ghost_value`.
  void expect(double offset, double ghost_value) const {
    const auto host = Kokkos::create_mirror_view(view);
    Kokkos::deep_copy(host, view);
    for_each([&](auto i, auto j, auto k) {
      const double value = value_at(i, j, k, offset);
      ASSERT_EQ(host(i, j, k), value == ghost ? ghost_value : value) << i << ' ' << j << ' ' << k;
    });
  }
  void add_to(StateDict& dict, const DeviceMesh& mesh) const {
    add_field(dict, "pressure", view, shape, placements, mesh, ghosts);
  }

  Shape shape;
  std::vector<Placement> placements;
  std::vector<std::int64_t> ghosts;
  Box box;
  View view;
};

std::vector<MeshAxis> grid(std::int64_t ranks, std::int64_t rows) {
  return {{"x", rows}, {"y", ranks / rows}};
}

template <class Layout>
class FieldTest : public ::testing::Test {};
using Layouts = ::testing::Types<Kokkos::LayoutLeft, Kokkos::LayoutRight>;
TYPED_TEST_SUITE(FieldTest, Layouts);

TYPED_TEST(FieldTest, BlocksLoadOnOtherMeshesWithOtherGhosts) {
  const ScratchDirectory scratch;
  const std::int64_t ranks = world_size();
  const Shape shape{7, 9, 4};
  int saves = 0;
  for (std::int64_t rows = 1; rows <= ranks; ++rows) {
    if (ranks % rows != 0) continue;
    DeviceMesh mesh(MPI_COMM_WORLD, grid(ranks, rows), "domain");
    const Block<TypeParam> block(mesh, shape, {Shard{0}, Shard{1}}, {1, 2, 0});
    StateDict dict;
    block.add_to(dict, mesh);
    block.fill(0.5);  // later than it was added
    const std::string name = "saved" + std::to_string(saves++);
    save(scratch / name, dict, {.sizes = small_blocks()});
    if (mesh.rank() == 0) {
      const HostTensor whole = read_tensor(scratch / name, "pressure");
      for (std::int64_t i = 0; i < numel(shape); ++i)
        ASSERT_EQ(reinterpret_cast<const double*>(whole.data())[i], static_cast<double>(i) + 0.5);
    }
    for (std::int64_t other_rows = 1; other_rows <= ranks; ++other_rows) {
      if (ranks % other_rows != 0) continue;
      DeviceMesh other(MPI_COMM_WORLD, grid(ranks, other_rows), "domain");
      const Block<TypeParam> loaded(other, shape, {Shard{2}, Shard{0}}, {0, 3, 1});
      loaded.fill_with(-7);
      StateDict target;
      loaded.add_to(target, other);
      load(scratch / name, target);
      loaded.expect(0.5, -7);
      other.close();
    }
    mesh.close();
  }
}

// Particles, a field and a network, each on a mesh of its own, in one checkpoint.
TEST(Field, SeveralMeshesShareACheckpoint) {
  const ScratchDirectory scratch;
  const std::int64_t ranks = world_size();
  DeviceMesh domain(MPI_COMM_WORLD, {{"x", ranks}, {"y", 1}}, "domain");
  DeviceMesh particles(MPI_COMM_WORLD, {{"owner", ranks}}, "particles");
  DeviceMesh network(MPI_COMM_WORLD, {{"dp", ranks}}, "network");
  std::vector<std::int64_t> bounds{0};  // rank r has 3 r particles
  for (std::int64_t r = 0; r < ranks; ++r) bounds.push_back(bounds.back() + 3 * r);
  const auto make = [&](bool has_values, Kokkos::View<float**, Kokkos::LayoutLeft, MemorySpace>& positions,
                        std::vector<Block<Kokkos::LayoutLeft>>& blocks) {
    StateDict dict;
    add_tensor(dict, network, "weight", DType::bf16, {11, 3}, {Shard{0}}, has_values);
    blocks.emplace_back(domain, Shape{7, 9, 4}, std::vector<Placement>{Shard{0}, Shard{1}},
                        std::vector<std::int64_t>{1, 1, 1});
    if (!has_values) blocks.back().fill_with(-7);
    blocks.back().add_to(dict, domain);
    const std::int64_t own = 3 * particles.rank();
    positions = Kokkos::View<float**, Kokkos::LayoutLeft, MemorySpace>("positions", static_cast<std::size_t>(own), 3);
    const auto host = Kokkos::create_mirror_view(positions);
    for (std::int64_t p = 0; p < own; ++p)
      for (std::int64_t c = 0; c < 3; ++c)
        host(static_cast<std::size_t>(p), static_cast<std::size_t>(c)) =
            has_values ? static_cast<float>((bounds[static_cast<std::size_t>(particles.rank())] + p) * 3 + c) : 0;
    Kokkos::deep_copy(positions, host);
    add_field(dict, "positions", positions, {bounds.back(), 3}, {Ragged{0, bounds}}, particles);
    return dict;
  };
  Kokkos::View<float**, Kokkos::LayoutLeft, MemorySpace> positions;
  std::vector<Block<Kokkos::LayoutLeft>> blocks;
  const CheckpointIndex index = [&] {
    save(scratch / "saved", make(true, positions, blocks), {.sizes = small_blocks()});
    return read_index(scratch / "saved");
  }();
  ASSERT_EQ(index.meshes.size(), 3u);
  Kokkos::View<float**, Kokkos::LayoutLeft, MemorySpace> loaded;
  StateDict target = make(false, loaded, blocks);
  load(scratch / "saved", target);
  blocks.back().expect(0, -7);
  EXPECT_EQ(bytes_of(target.tensors.at("weight").local()),
            box_bytes("weight", DType::bf16, {11, 3}, target.tensors.at("weight").box()));
  const auto expected = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), positions);
  const auto found = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), loaded);
  for (std::size_t p = 0; p < expected.extent(0); ++p)
    for (std::size_t c = 0; c < 3; ++c) EXPECT_EQ(found(p, c), expected(p, c));
  network.close();
  particles.close();
  domain.close();
}

TEST(Field, RefusesWhatDoesNotFit) {
  DeviceMesh mesh(MPI_COMM_WORLD, {{"x", world_size()}});
  const Kokkos::View<float**, Kokkos::LayoutLeft, MemorySpace> view("field", 4, 6);
  StateDict dict;
  const Shape shape{4 * world_size(), 6};
  EXPECT_THROW(add_field(dict, "f", view, shape, {Shard{0}}, mesh, {1, 0}), ShapeError);  // cells are missing
  EXPECT_THROW(add_field(dict, "f", view, shape, {Shard{0}}, mesh, {3, 0}), ShapeError);
  EXPECT_THROW(add_field(dict, "f", view, shape, {Shard{0}}, mesh, {-1, 0}), ShapeError);
  EXPECT_THROW(add_field(dict, "f", view, shape, {Shard{0}}, mesh, {0}), ShapeError);
  EXPECT_THROW(add_field(dict, "f", view, shape, {}, mesh), ConfigError);
  EXPECT_TRUE(dict.tensors.empty());
  add_field(dict, "f", view, shape, {Shard{0}}, mesh);
  EXPECT_THROW(add_field(dict, "f", view, shape, {Shard{0}}, mesh), ConfigError);
  mesh.close();
}

}  // namespace
}  // namespace fsdp2::testing
