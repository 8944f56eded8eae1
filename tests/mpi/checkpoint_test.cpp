// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
// Saving at one number of ranks and loading at another, bit by bit. The matrix runs on sub-communicators of one mpirun.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <memory>
#include <optional>

#include "fsdp2/checkpoint/reshard.hpp"
#include "fsdp2/checkpoint/verify.hpp"
#include "fsdp2/model.hpp"
#include "support/checkpoint.hpp"

namespace fsdp2 {
namespace {

using testing::add_tensor;
using testing::Bytes;
using testing::expect_values;
using testing::ScratchDirectory;
using testing::small_blocks;

int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// A mesh over the first ranks of the world; nothing on the others. Collective over the world.
class FirstRanks {
 public:
  explicit FirstRanks(std::vector<MeshAxis> axes) {
    const MeshSpec spec(axes);
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, world_rank() < spec.size() ? 0 : MPI_UNDEFINED, 0, &part);
    if (part == MPI_COMM_NULL) return;
    mesh_.emplace(part, std::move(axes));
    MPI_Comm_free(&part);
  }
  FirstRanks(const FirstRanks&) = delete;
  FirstRanks& operator=(const FirstRanks&) = delete;
  ~FirstRanks() {
    if (mesh_) mesh_->close();
  }
  const std::optional<DeviceMesh>& mesh() const { return mesh_; }

 private:
  std::optional<DeviceMesh> mesh_;
};

/// Every dtype in every shape, cut along each of its first two dimensions, and replicated.
StateDict all_kinds(const DeviceMesh& mesh, bool has_values) {
  StateDict state;
  const Shape shapes[] = {{}, {0}, {1}, {3}, {5, 17}, {16, 4}, {3, 0, 5}};
  for (const DType dtype : all_dtypes)
    for (const Shape& shape : shapes) {
      const std::string name = fmt::format("{}.{}", to_string(dtype), to_string(shape));
      add_tensor(state, mesh, name + ".replicated", dtype, shape, {Replicate{}}, has_values);
      for (std::size_t dim = 0; dim < std::min<std::size_t>(shape.size(), 2); ++dim)
        add_tensor(state, mesh, fmt::format("{}.shard{}", name, dim), dtype, shape,
                   {Shard{static_cast<std::int64_t>(dim)}}, has_values);
    }
  return state;
}

/// The content digests, computed without the checkpoint's code but for the CRC.
void expect_plain_digests(const CheckpointIndex& index) {
  for (const TensorEntry& tensor : index.tensors) {
    const Bytes bytes =
        testing::box_bytes(tensor.name, tensor.spec.dtype, tensor.spec.shape, Box::whole(tensor.spec.shape));
    EXPECT_EQ(tensor.digest, checkpoint::crc64(bytes)) << tensor.name;
  }
}

TEST(Checkpoint, SavedAtAnyWorldSizeLoadsAtAnyOther) {
  const ScratchDirectory scratch;
  for (int saved = 1; saved <= world_size(); ++saved) {
    const FirstRanks ranks({{"dp", saved}});
    if (ranks.mesh())
      save(scratch / fmt::format("w{}", saved), all_kinds(*ranks.mesh(), true), {.sizes = small_blocks()});
  }
  for (int loaded = 1; loaded <= world_size(); ++loaded) {
    const FirstRanks ranks({{"dp", loaded}});
    if (!ranks.mesh()) continue;
    for (int saved = 1; saved <= world_size(); ++saved) {
      SCOPED_TRACE(fmt::format("saved by {}, loaded by {}", saved, loaded));
      const StateDict state = all_kinds(*ranks.mesh(), false);
      const CheckpointIndex index = load(scratch / fmt::format("w{}", saved), state);
      expect_values(state);
      EXPECT_EQ(index.world_size, saved);
      expect_plain_digests(index);
    }
  }
}

TEST(Checkpoint, SeveralRanksMayWriteOneFile) {
  const ScratchDirectory scratch;
  const FirstRanks all({{"dp", world_size()}});
  const std::pair<std::variant<std::int64_t, FileGroups>, std::int64_t> groupings[] = {
      {std::int64_t{2}, 2},
      {std::int64_t{3}, 3},
      {std::int64_t{99}, world_size()},
      {FileGroups::world, world_size()},
      {FileGroups::node, world_size()}};  // all ranks of the test share memory
  for (std::size_t g = 0; g < std::size(groupings); ++g)
    for (int saved = 1; saved <= world_size(); ++saved) {
      SCOPED_TRACE(fmt::format("grouping {}, saved by {}", g, saved));
      const auto& [grouping, ranks_per_file] = groupings[g];
      const std::filesystem::path path = scratch / fmt::format("g{}-w{}", g, saved);
      const FirstRanks ranks({{"dp", saved}});
      if (ranks.mesh())
        save(path, all_kinds(*ranks.mesh(), true), {.sizes = small_blocks(), .ranks_per_file = grouping});
      MPI_Barrier(MPI_COMM_WORLD);
      const StateDict state = all_kinds(*all.mesh(), false);
      const CheckpointIndex index = load(path, state);
      expect_values(state);
      expect_plain_digests(index);
      const std::int64_t most = std::min<std::int64_t>(ranks_per_file, saved);
      EXPECT_EQ(static_cast<std::int64_t>(index.files.size()), (saved + most - 1) / most);
      for (const FileEntry& file : index.files) EXPECT_LE(static_cast<std::int64_t>(file.ranks.size()), most);
      if (world_rank() != 0 || saved != world_size()) continue;
      const VerifyReport report = verify(path);
      EXPECT_TRUE(report.is_valid()) << report.problems.front();
    }
}

TEST(Checkpoint, OverwritingIsAskedForAndLeavesNothingBehind) {
  const ScratchDirectory scratch;
  const FirstRanks ranks({{"dp", world_size()}});
  const auto dict = [&](const std::string& name, bool has_values) {
    StateDict state;
    add_tensor(state, *ranks.mesh(), name, DType::f32, {10, 3}, {Shard{0}}, has_values);
    return state;
  };
  save(scratch / "step", dict("first", true), {.sizes = small_blocks()});
  EXPECT_THROW(save(scratch / "step", dict("second", true), {.sizes = small_blocks()}), IoError);
  EXPECT_EQ(read_index(scratch / "step").tensors[0].name, "first");
  save(scratch / "step", dict("second", true), {.sizes = small_blocks(), .overwrite = true});
  EXPECT_EQ(read_index(scratch / "step").tensors[0].name, "second");
  save(scratch / "new", dict("third", true), {.sizes = small_blocks(), .overwrite = true});
  const StateDict state = dict("second", false);
  load(scratch / "step", state);
  expect_values(state);
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_EQ(testing::names_in(scratch.path()), (std::vector<std::string>{"new", "step"}));
  MPI_Barrier(MPI_COMM_WORLD);
  // A replacement that was interrupted while nothing had the name: the next save of that name finds the old one.
  if (world_rank() == 0) std::filesystem::rename(scratch / "step", scratch / (".step.old-" + std::string(32, '7')));
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_THROW(save(scratch / "step", dict("fourth", true), {.sizes = small_blocks()}), IoError);
  EXPECT_EQ(read_index(scratch / "step").tensors[0].name, "second");
}

TEST(Checkpoint, VerifiesAndReshardsToAnyWorldSize) {
  const ScratchDirectory scratch;
  const FirstRanks all({{"dp", world_size()}});
  save(scratch / "saved", all_kinds(*all.mesh(), true), {.step = 7, .metadata = R"({"a":1})", .sizes = small_blocks()});
  if (world_rank() == 0) {
    const VerifyReport saved = verify(scratch / "saved");
    EXPECT_TRUE(saved.is_valid()) << saved.problems.front();
    for (int ranks = 1; ranks <= 12; ranks = ranks * 2 + 1) {
      // A window of one block cuts rows anywhere.
      for (const std::int64_t memory : {std::int64_t{1}, std::int64_t{1} << 20}) {
        SCOPED_TRACE(fmt::format("to {} ranks with {} bytes", ranks, memory));
        const std::filesystem::path target = scratch / fmt::format("to{}-{}", ranks, memory);
        const ReshardReport report =
            reshard(scratch / "saved", target, {.world_size = ranks, .memory_bytes = memory, .progress = {}});
        expect_plain_digests(report.target);
        const VerifyReport verified = verify(target);
        EXPECT_TRUE(verified.is_valid()) << verified.problems.front();
        EXPECT_EQ(verified.index.world_size, ranks);
        EXPECT_EQ(verified.index.step, 7);
        EXPECT_EQ(verified.index.metadata, R"({"a":1})");
        EXPECT_NE(verified.index.save_id, saved.index.save_id);
      }
    }
  }
  MPI_Barrier(MPI_COMM_WORLD);
  const StateDict state = all_kinds(*all.mesh(), false);
  load(scratch / "to7-1", state);
  expect_values(state);
}

/// Larger than blocks, so that pieces, runs and blocks cut each other everywhere; on 2-D meshes, with both split
/// orders.
StateDict large_kinds(const DeviceMesh& mesh, bool has_values) {
  StateDict state;
  const Placement cuts[] = {Replicate{}, Shard{0}, Shard{1}};
  const Shape shape = {37, 211};
  for (const DType dtype : {DType::f32, DType::bf16, DType::u8, DType::complex128})
    for (const Placement& first : cuts)
      for (const Placement& second : cuts)
        for (const std::vector<std::int64_t>& order :
             {std::vector<std::int64_t>{0, 1}, std::vector<std::int64_t>{1, 0}})
          add_tensor(
              state, mesh,
              fmt::format("{} {} {} {}", to_string(dtype), to_string(first), to_string(second), to_string(order)),
              dtype, shape, {first, second}, has_values, order);
  return state;
}

TEST(Checkpoint, TwoDimensionalMeshesAndSplitOrders) {
  const ScratchDirectory scratch;
  std::vector<std::vector<MeshAxis>> meshes;
  for (int a = 1; a <= world_size(); ++a)
    for (int b = 1; a * b <= world_size(); ++b) meshes.push_back({{"a", a}, {"b", b}});
  // Boxes above SPLIT are cut among their replicas by rows, those below go whole.
  for (const std::int64_t split : {std::int64_t{0}, std::int64_t{1} << 20}) {
    FormatSizes sizes = small_blocks();
    sizes.split_bytes = split;
    for (std::size_t m = 0; m < meshes.size(); ++m) {
      const FirstRanks ranks(meshes[m]);
      if (ranks.mesh())
        save(scratch / fmt::format("{}-{}", split, m), large_kinds(*ranks.mesh(), true), {.sizes = sizes});
    }
    const FirstRanks loaders(meshes.back());
    for (std::size_t m = 0; m < meshes.size(); ++m) {
      if (!loaders.mesh()) continue;
      SCOPED_TRACE(fmt::format("mesh {}x{}", meshes[m][0].size, meshes[m][1].size));
      const StateDict state = large_kinds(*loaders.mesh(), false);
      const CheckpointIndex index = load(scratch / fmt::format("{}-{}", split, m), state);
      expect_values(state);
      expect_plain_digests(index);
      if (world_rank() == 0) {
        const VerifyReport report = verify(scratch / fmt::format("{}-{}", split, m));
        EXPECT_TRUE(report.is_valid()) << report.problems.front();
      }
    }
  }
}

TEST(Checkpoint, RaggedBoundsAreKept) {
  const ScratchDirectory scratch;
  const FirstRanks ranks({{"x", world_size()}});
  const std::int64_t rows = 10 * world_size();
  std::vector<std::int64_t> bounds{0};
  for (int r = 0; r < world_size(); ++r) bounds.push_back(r + 1 == world_size() ? rows : bounds.back() + 2 * r);
  StateDict state;
  add_tensor(state, *ranks.mesh(), "particles", DType::f64, {rows, 3}, {Ragged{0, bounds}}, true);
  add_tensor(state, *ranks.mesh(), "more particles", DType::f64, {rows, 3}, {Ragged{0, bounds}}, true);
  save(scratch / "ragged", state, {.sizes = small_blocks()});
  StateDict other;
  add_tensor(other, *ranks.mesh(), "particles", DType::f64, {rows, 3}, {Shard{0}}, false);
  add_tensor(other, *ranks.mesh(), "more particles", DType::f64, {rows, 3}, {Shard{1}}, false);
  const CheckpointIndex index = load(scratch / "ragged", other);
  expect_values(other);
  EXPECT_EQ(std::get<Ragged>(index.tensors[0].spec.placements[0]).bounds, bounds);
}

TEST(Checkpoint, ReplicatedBytesAreWrittenOnceAndEvenly) {
  const ScratchDirectory scratch;
  const FirstRanks ranks({{"dp", world_size()}});
  StateDict state;
  constexpr int tensors = 40;
  constexpr std::int64_t elements = 5000;
  for (int i = 0; i < tensors; ++i)
    add_tensor(state, *ranks.mesh(), fmt::format("t{:02}", i), DType::f32, {elements}, {Replicate{}}, true);
  save(scratch / "replicated", state, {.sizes = small_blocks()});
  const CheckpointIndex index = read_index(scratch / "replicated");
  const std::int64_t share = tensors * elements * 4 / world_size();
  std::int64_t total = 0;
  for (int r = 0; r < world_size(); ++r) {
    std::int64_t mine = 0;
    for (const Piece& piece : plan_rank(index, r).pieces) mine += piece.bytes;
    total += mine;
    EXPECT_LE(std::abs(mine - share), elements * 4) << "rank " << r << " may be one granule off the even share";
  }
  EXPECT_EQ(total, tensors * elements * 4);
}

TEST(Checkpoint, PadRowsNeverReachAFile) {
  const ScratchDirectory scratch;
  const FirstRanks ranks({{"dp", world_size()}});
  Model model({.mesh = *ranks.mesh(), .min_shard_size = 0});
  // One row more than divides evenly: the last shards have pad rows behind them.
  model.add("layer", {{"weight", {4 * world_size() + 1, 16}, init::constant(1.0)}});
  const StateDict state = state_dict(model);
  const DTensor& weight = state.tensors.at("layer.weight");
  const std::int64_t pad = chunk_size(4 * world_size() + 1, world_size()) * 16 * 4 - weight.local().bytes();
  const Bytes poison(static_cast<std::size_t>(pad), std::byte{0xa5});
  using Raw = Kokkos::View<std::byte*, MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  using Host = Kokkos::View<const std::byte*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  if (pad > 0)
    Kokkos::deep_copy(Raw(weight.local().data() + weight.local().bytes(), poison.size()),
                      Host(poison.data(), poison.size()));
  save(scratch / "padded", state, {.sizes = small_blocks()});
  if (world_size() > 1) {
    int is_padded = pad > 0 ? 1 : 0;
    MPI_Allreduce(MPI_IN_PLACE, &is_padded, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    EXPECT_EQ(is_padded, 1) << "the test must have a pad to poison";
  }
  const Bytes file = testing::file_bytes(
      scratch / "padded" /
      shard_file_name(static_cast<std::size_t>(world_rank()), static_cast<std::size_t>(world_size())));
  const Bytes needle(8, std::byte{0xa5});
  EXPECT_EQ(std::search(file.begin(), file.end(), needle.begin(), needle.end()), file.end());
}

TEST(Checkpoint, WorksWithoutMpiOnAMeshOfOneRank) {
  const ScratchDirectory scratch;
  if (world_rank() != 0) return;
  const DeviceMesh mesh;
  save(scratch / "alone", all_kinds(mesh, true), {.sizes = small_blocks()});
  const StateDict state = all_kinds(mesh, false);
  load(scratch / "alone", state);
  expect_values(state);
}

TEST(Checkpoint, NamesOfAllKinds) {
  const ScratchDirectory scratch;
  const FirstRanks ranks({{"dp", world_size()}});
  const std::string names[] = {"a/b",
                               ".",
                               "..",
                               "./c",
                               "/abs",
                               "trail/",
                               "a%2Fb",
                               std::string("nul\0inside", 10),
                               "gr\xc3\xbc\xc3\x9f",
                               "bad\xff utf8",
                               "line\nbreak",
                               std::string(300, 'n')};
  const auto dict = [&](bool has_values) {
    StateDict state;
    for (const std::string& name : names)
      add_tensor(state, *ranks.mesh(), name, DType::i32, {5}, {Shard{0}}, has_values);
    return state;
  };
  save(scratch / "names", dict(true), {.sizes = small_blocks()});
  const StateDict state = dict(false);
  load(scratch / "names", state);
  expect_values(state);
}

}  // namespace
}  // namespace fsdp2
