// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
// Files of released versions, read by this one.

#include "golden/golden.hpp"

#include <gtest/gtest.h>

#include "fsdp2/checkpoint/load.hpp"
#include "fsdp2/checkpoint/reshard.hpp"
#include "fsdp2/checkpoint/verify.hpp"
#include "support/local_checkpoint.hpp"
#include "support/scratch_folder.hpp"

namespace fsdp2 {
namespace {

using testing::Bytes;
using testing::golden_index;
using testing::ScratchFolder;

const std::filesystem::path golden = FSDP2_GOLDEN_DIR;

/// Loads all tensors of golden_index() in one process, and compares every bit.
void expect_golden_values(const std::filesystem::path& checkpoint) {
  const DeviceMesh mesh;
  StateDict state;
  for (const TensorEntry& tensor : golden_index().tensors)
    testing::add_tensor(state, mesh, tensor.name, tensor.spec.dtype, tensor.spec.shape, {Replicate{}}, false);
  const CheckpointIndex index = load(checkpoint, state);
  testing::expect_values(state);
  for (const TensorEntry& tensor : index.tensors) {
    const Bytes bytes =
        testing::box_bytes(tensor.name, tensor.spec.dtype, tensor.spec.shape, Box::whole(tensor.spec.shape));
    EXPECT_EQ(tensor.digest, checkpoint::crc64(bytes)) << tensor.name;
  }
}

TEST(Golden, EveryFileIsValid) {
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator(golden)) {
    const VerifyReport report = verify(entry.path());
    EXPECT_TRUE(report.is_valid()) << entry.path() << ": " << report.problems.front();
    ++found;
  }
  EXPECT_GE(found, 1);
}

TEST(Golden, SaysWhatWasSaved) {
  const CheckpointIndex index = read_index(golden / "dp3-uneven");
  EXPECT_EQ(index.library, "fsdp2 0.1.0");
  EXPECT_EQ(index.save_id, "00112233445566778899aabbccddeeff");
  EXPECT_EQ(index.step, 100);
  EXPECT_EQ(index.world_size, 3);
  EXPECT_EQ(index.metadata, R"({"note": "written once, read for ever"})");
  EXPECT_EQ(index.sizes, (FormatSizes{4096, 4096, 256}));
  const CheckpointIndex expected = golden_index();
  ASSERT_EQ(index.tensors.size(), expected.tensors.size());
  for (std::size_t t = 0; t < index.tensors.size(); ++t) {
    EXPECT_EQ(index.tensors[t].name, expected.tensors[t].name);
    EXPECT_EQ(index.tensors[t].spec, expected.tensors[t].spec) << index.tensors[t].name;
  }
  // As read_checkpoint.py computes it from the bytes of the tensor.
  EXPECT_EQ(index.tensors[index.find("rows")].digest, 0xcc8c69e77935572fu);
}

TEST(Golden, IsReadByOneRank) {
  expect_golden_values(golden / "dp3-uneven");
}

TEST(Golden, IsReshardedToAnyNumberOfRanks) {
  const ScratchFolder scratch;
  for (const std::int64_t ranks : {1, 2, 8}) {
    const std::filesystem::path target = scratch / std::to_string(ranks);
    reshard(golden / "dp3-uneven", target, {.world_size = ranks, .memory_bytes = 4096, .progress = {}});
    expect_golden_values(target);
  }
}

/// Changing what is written changes the format: it needs a new version and a new golden file.
TEST(Golden, IsWhatThisVersionWrites) {
  const ScratchFolder scratch;
  testing::write_local_checkpoint(scratch.path(), golden_index());
  checkpoint::Columns written = checkpoint::encode_index(read_index(scratch.path()));
  checkpoint::Columns kept = checkpoint::encode_index(read_index(golden / "dp3-uneven"));
  for (const char* path : {"/library", "/files/size"}) {  // versions of the library, and of HDF5
    written.erase(path);
    kept.erase(path);
  }
  ASSERT_EQ(written.size(), kept.size());
  for (const auto& [path, column] : written) EXPECT_EQ(column.bytes, kept.at(path).bytes) << path;
}

}  // namespace
}  // namespace fsdp2
