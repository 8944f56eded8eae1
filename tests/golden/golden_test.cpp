// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
// Files of released versions, read by this one.

#include "golden/golden.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "fsdp2/checkpoint/load.hpp"
#include "fsdp2/checkpoint/reshard.hpp"
#include "fsdp2/checkpoint/verify.hpp"
#include "support/local_checkpoint.hpp"
#include "support/scratch_folder.hpp"

namespace fsdp2 {
namespace {

using testing::Bytes;
using testing::golden_checkpoints;
using testing::GoldenCheckpoint;
using testing::ScratchFolder;

const std::filesystem::path golden = FSDP2_GOLDEN_DIR;

/// Loads all tensors in one process, and compares every bit.
void expect_values(const std::filesystem::path& checkpoint, const GoldenCheckpoint& expected) {
  const DeviceMesh mesh;
  StateDict state;
  for (const TensorEntry& tensor : expected.index.tensors)
    testing::add_tensor(state, mesh, tensor.name, tensor.spec.dtype, tensor.spec.shape, {Replicate{}}, false);
  const CheckpointIndex index = load(checkpoint, state);
  testing::expect_values(state);
  for (const TensorEntry& tensor : index.tensors) {
    const Bytes bytes =
        testing::box_bytes(tensor.name, tensor.spec.dtype, tensor.spec.shape, Box::whole(tensor.spec.shape));
    EXPECT_EQ(tensor.digest, checkpoint::crc64(bytes)) << tensor.name;
  }
}

TEST(Golden, AreAllThereAndSmall) {
  std::set<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(golden)) found.insert(entry.path().filename());
  std::set<std::string> expected;
  for (const GoldenCheckpoint& checkpoint : golden_checkpoints()) expected.insert(checkpoint.name);
  EXPECT_EQ(found, expected);
  std::uintmax_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(golden))
    if (entry.is_regular_file()) bytes += entry.file_size();
  EXPECT_LT(bytes, 1u << 20);
}

TEST(Golden, AreValid) {
  for (const GoldenCheckpoint& checkpoint : golden_checkpoints()) {
    const VerifyReport report = verify(golden / checkpoint.name);
    EXPECT_TRUE(report.is_valid()) << checkpoint.name << ": " << report.problems.front();
    EXPECT_EQ(report.tensors, static_cast<std::int64_t>(checkpoint.index.tensors.size())) << checkpoint.name;
  }
}

TEST(Golden, SayWhatWasSaved) {
  for (const auto& [name, expected, ranks_per_file, rank_local] : golden_checkpoints()) {
    SCOPED_TRACE(name);
    const CheckpointIndex index = read_index(golden / name);
    EXPECT_EQ(index.library, "fsdp2 0.1.0");
    EXPECT_EQ(index.save_id, expected.save_id);
    EXPECT_EQ(index.step, expected.step);
    EXPECT_EQ(index.world_size, expected.world_size);
    EXPECT_EQ(index.metadata, expected.metadata);
    EXPECT_EQ(index.sizes, expected.sizes);
    EXPECT_EQ(static_cast<std::int64_t>(index.files.size()) * ranks_per_file, index.world_size);
    ASSERT_EQ(index.meshes.size(), expected.meshes.size());
    for (std::size_t m = 0; m < index.meshes.size(); ++m) {
      EXPECT_EQ(index.meshes[m].name, expected.meshes[m].name);
      EXPECT_EQ(index.meshes[m].spec, expected.meshes[m].spec);
      EXPECT_EQ(index.meshes[m].roles, expected.meshes[m].roles);
    }
    ASSERT_EQ(index.tensors.size(), expected.tensors.size());
    for (std::size_t t = 0; t < index.tensors.size(); ++t) {
      EXPECT_EQ(index.tensors[t].name, expected.tensors[t].name);
      EXPECT_EQ(index.tensors[t].mesh, expected.tensors[t].mesh);
      EXPECT_EQ(index.tensors[t].spec, expected.tensors[t].spec) << index.tensors[t].name;
    }
    for (std::int64_t rank = 0; rank < index.world_size; ++rank) {
      const auto it = rank_local.find(rank);
      EXPECT_EQ(read_rank_local(golden / name, rank, index.world_size, RankLocalPolicy::error),
                it == rank_local.end() ? RankLocalValues{} : it->second);
    }
  }
  // As read_checkpoint.py computes it from the bytes of the tensor.
  const CheckpointIndex uneven = read_index(golden / "dp3-uneven");
  EXPECT_EQ(uneven.tensors[uneven.find("rows")].digest, 0xcc8c69e77935572fu);
}

TEST(Golden, AreReadByOneRank) {
  for (const GoldenCheckpoint& checkpoint : golden_checkpoints()) expect_values(golden / checkpoint.name, checkpoint);
}

TEST(Golden, AreReshardedToAnyNumberOfRanks) {
  const ScratchFolder scratch;
  for (const GoldenCheckpoint& checkpoint : golden_checkpoints())
    for (const std::int64_t ranks : {1, 2, 8}) {
      SCOPED_TRACE(fmt::format("{} to {}", checkpoint.name, ranks));
      const std::filesystem::path target = scratch / fmt::format("{}-{}", checkpoint.name, ranks);
      ReshardOptions options{.memory_bytes = 4096, .rank_local = RankLocalPolicy::concatenate};
      for (const MeshEntry& mesh : checkpoint.index.meshes) {
        std::vector<MeshAxis> axes = mesh.spec.axes();
        for (MeshAxis& axis : axes) axis.size = 1;
        axes.front().size = ranks;
        options.meshes.emplace(mesh.name, MeshSpec(axes));
      }
      reshard(golden / checkpoint.name, target, options);
      expect_values(target, checkpoint);
    }
}

/// Changing what is written changes the format: it needs a new version and new golden files.
TEST(Golden, AreWhatThisVersionWrites) {
  const ScratchFolder scratch;
  for (const auto& [name, index, ranks_per_file, rank_local] : golden_checkpoints()) {
    SCOPED_TRACE(name);
    std::filesystem::create_directory(scratch / name);
    testing::write_local_checkpoint(scratch / name, index, ranks_per_file, rank_local);
    checkpoint::Columns written = checkpoint::encode_index(read_index(scratch / name));
    checkpoint::Columns kept = checkpoint::encode_index(read_index(golden / name));
    for (const char* path : {"/library", "/files/size"}) {  // versions of the library, and of HDF5
      written.erase(path);
      kept.erase(path);
    }
    ASSERT_EQ(written.size(), kept.size());
    for (const auto& [path, column] : written) EXPECT_EQ(column.bytes, kept.at(path).bytes) << path;
  }
}

}  // namespace
}  // namespace fsdp2
