// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
// Every mesh × every mesh × ranks in a file × the way of writing: what is saved on the one is loaded on the other, bit
// by bit, with the same digests. All in one mpirun, on its first ranks. matrix_check.py reads the same checkpoints.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <filesystem>
#include <functional>
#include <optional>

#include "support/checkpoint.hpp"

namespace fsdp2 {
namespace {

/// How tensors lie on a mesh.
struct Layout {
  std::string name;
  std::vector<MeshAxis> axes;
  /// Of a tensor with this shape.
  std::function<std::vector<Placement>(const Shape& shape)> placements;
  std::vector<std::int64_t> split_order = {};
  bool is_flattened = false;

  std::int64_t ranks() const { return MeshSpec(axes).size(); }
};

std::vector<Placement> by_rows(const Shape& shape) {
  return {shape.empty() ? Placement(Replicate{}) : Placement(Shard{0})};
}

std::vector<Placement> replicated_by_rows(const Shape& shape) {
  return {Replicate{}, by_rows(shape)[0]};
}

std::vector<Placement> by_rows_twice(const Shape& shape) {
  return {by_rows(shape)[0], by_rows(shape)[0]};
}

std::vector<Placement> by_rows_and_columns(const Shape& shape) {
  return {by_rows(shape)[0], shape.size() < 2 ? Placement(Replicate{}) : Placement(Shard{1})};
}

/// One row for the first of three ranks, none for the second, the rest for the third.
std::vector<Placement> ragged(const Shape& shape) {
  if (shape.empty()) return {Replicate{}};
  const std::int64_t first = std::min<std::int64_t>(1, shape[0]);
  return {Ragged{0, {0, first, first, shape[0]}}};
}

std::vector<Layout> layouts() {
  return {{"dp1", {{"dp", 1}}, by_rows},
          {"dp2", {{"dp", 2}}, by_rows},
          {"dp3", {{"dp", 3}}, by_rows},
          {"dp4", {{"dp", 4}}, by_rows},
          {"dp5", {{"dp", 5}}, by_rows},
          {"hybrid2x2", {{"replicate", 2}, {"dp", 2}}, replicated_by_rows},
          {"hybrid2x1", {{"replicate", 2}, {"dp", 1}}, replicated_by_rows},
          // FSDP cuts what tensor parallelism has left.
          {"tp-rows", {{"dp", 2}, {"tp", 2}}, by_rows_twice, {1, 0}},
          {"tp-columns", {{"dp", 2}, {"tp", 2}}, by_rows_and_columns, {1, 0}},
          {"flattened", {{"replicate", 2}, {"dp", 2}}, by_rows, {}, true},
          {"ragged", {{"dp", 3}}, ragged}};
}

/// A layout's mesh over the first ranks of the world; nothing on the others. Collective over the world.
class LayoutMesh {
 public:
  explicit LayoutMesh(const Layout& layout) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, rank < layout.ranks() ? 0 : MPI_UNDEFINED, 0, &part);
    if (part == MPI_COMM_NULL) return;
    mesh_.emplace(part, layout.axes);
    MPI_Comm_free(&part);
    if (layout.is_flattened) flattened_.emplace(mesh_->flatten({"replicate", "dp"}, "all"));
  }
  LayoutMesh(const LayoutMesh&) = delete;
  LayoutMesh& operator=(const LayoutMesh&) = delete;
  ~LayoutMesh() {
    if (flattened_) flattened_->close();
    if (mesh_) mesh_->close();
  }

  bool holds_this_rank() const { return mesh_.has_value(); }
  const DeviceMesh& mesh() const { return flattened_ ? *flattened_ : *mesh_; }

 private:
  std::optional<DeviceMesh> mesh_;
  std::optional<DeviceMesh> flattened_;
};

StateDict dict(const LayoutMesh& mesh, const Layout& layout, bool has_values) {
  struct Kind {
    const char* name;
    DType dtype;
    Shape shape;
    bool is_replicated = false;
  };
  const Kind kinds[] = {{"matrix", DType::f32, {37, 53}},       {"vector", DType::bf16, {19}},
                        {"cube", DType::complex128, {3, 4, 5}}, {"scalar", DType::i64, {}},
                        {"empty", DType::f64, {0, 3}},          {"table", DType::u8, {7, 1500}, true}};
  StateDict state;
  for (const Kind& kind : kinds) {
    std::vector<Placement> placements = layout.placements(kind.shape);
    if (kind.is_replicated) placements.assign(placements.size(), Replicate{});
    testing::add_tensor(state, mesh.mesh(), kind.name, kind.dtype, kind.shape, std::move(placements), has_values,
                        layout.split_order);
  }
  return state;
}

struct Way {
  std::string name;
  SaveOptions options;
};

std::vector<Way> ways() {
  FormatSizes sizes = testing::small_blocks();
  sizes.split_bytes = 4096;  // the replicated table is cut among its replicas
  std::vector<Way> all;
  for (const Io io : {Io::direct, Io::mpio})
    for (const auto& [name, ranks] : std::map<std::string, std::variant<std::int64_t, FileGroups>>{
             {"1", std::int64_t{1}}, {"2", std::int64_t{2}}, {"world", FileGroups::world}})
      all.push_back({fmt::format("{}-{}", io == Io::direct ? "direct" : "mpio", name),
                     {.sizes = sizes, .ranks_per_file = ranks, .io = io}});
  return all;
}

std::filesystem::path path_of(const Layout& layout, const Way& way) {
  return std::filesystem::path(FSDP2_MATRIX_FOLDER) / fmt::format("{}-{}", layout.name, way.name);
}

void expect_plain_digests(const CheckpointIndex& index) {
  for (const TensorEntry& tensor : index.tensors)
    EXPECT_EQ(tensor.digest, checkpoint::crc64(testing::box_bytes(tensor.name, tensor.spec.dtype, tensor.spec.shape,
                                                                  Box::whole(tensor.spec.shape))))
        << tensor.name;
}

TEST(Matrix, SavedOnAnyMeshLoadsOnAnyOther) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank == 0) std::filesystem::remove_all(FSDP2_MATRIX_FOLDER);
  MPI_Barrier(MPI_COMM_WORLD);
  for (const Layout& saved : layouts()) {
    const LayoutMesh mesh(saved);
    for (const Way& way : ways())
      if (mesh.holds_this_rank()) save(path_of(saved, way), dict(mesh, saved, true), way.options);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  int loads = 0;
  for (const Layout& loaded : layouts()) {
    const LayoutMesh mesh(loaded);
    if (!mesh.holds_this_rank()) continue;
    for (const Layout& saved : layouts())
      for (const Way& way : ways()) {
        SCOPED_TRACE(fmt::format("{} loaded on {}", path_of(saved, way).filename().string(), loaded.name));
        const StateDict state = dict(mesh, loaded, false);
        const CheckpointIndex index = load(path_of(saved, way), state);
        testing::expect_values(state);
        expect_plain_digests(index);
        const std::int64_t k = way.name.ends_with("1") ? 1 : way.name.ends_with("2") ? 2 : saved.ranks();
        EXPECT_EQ(static_cast<std::int64_t>(index.files.size()), (saved.ranks() + k - 1) / k);
        ++loads;
      }
  }
  if (rank == 0) {
    EXPECT_EQ(loads, 11 * 11 * 3 * 2);
  }
}

}  // namespace
}  // namespace fsdp2
