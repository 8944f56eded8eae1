// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/segment_digest.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "support/checkpoint.hpp"

namespace fsdp2::checkpoint {
namespace {

using testing::box_bytes;
using testing::Bytes;

MeshEntry mesh_of(std::vector<MeshAxis> axes) {
  const std::size_t count = axes.size();
  return {"mesh", MeshSpec(std::move(axes)), std::vector<AxisRole>(count, AxisRole::none)};
}

/// Tensors cut by rows and by columns, in one or both ways: runs shorter and longer than blocks, gaps between pieces.
CheckpointIndex index_of(std::int64_t block_bytes) {
  CheckpointIndex index;
  index.world_size = 6;
  index.sizes = {block_bytes, block_bytes, 1000};
  index.meshes.push_back(mesh_of({{"a", 3}, {"b", 2}}));
  const Placement cuts[] = {Replicate{}, Shard{0}, Shard{1}, Shard{2}};
  for (const DType dtype : {DType::u8, DType::bf16, DType::complex128})
    for (const Shape& shape : {Shape{5, 3, 7}, Shape{3, 700, 2}, Shape{1, 2, 5003}})
      for (std::size_t a = 0; a < std::size(cuts); ++a)
        for (std::size_t b = 0; b < std::size(cuts); ++b)
          index.tensors.push_back({fmt::format("{}{}{}{}", to_string(dtype), to_string(shape), a, b),
                                   {dtype, shape, {cuts[a], cuts[b]}, {1, 0}},
                                   0,
                                   0});
  index.tensors.push_back({"z.scalar", {DType::u8, {}, {Replicate{}, Replicate{}}, {0, 1}}, 0, 0});
  std::sort(index.tensors.begin(), index.tensors.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  validate(index);
  return index;
}

Bytes segment_bytes(const CheckpointIndex& index, const RankPlan& plan, DType dtype) {
  Bytes segment(static_cast<std::size_t>(align_up(plan.used[dtype], index.sizes.segment_align)));
  for (const Piece& piece : plan.pieces) {
    const TensorEntry& tensor = index.tensors[piece.tensor];
    if (tensor.spec.dtype != dtype) continue;
    const Bytes bytes = box_bytes(tensor.name, dtype, tensor.spec.shape, piece.box);
    EXPECT_EQ(bytes.size(), static_cast<std::size_t>(piece.bytes));
    std::memcpy(segment.data() + piece.start, bytes.data(), bytes.size());
  }
  return segment;
}

TEST(SegmentDigest, GivesThePlainCrcsOfBlocksAndTensors) {
  for (const std::int64_t block_bytes : {4096, 1 << 16}) {
    const CheckpointIndex index = index_of(block_bytes);
    std::vector<std::uint64_t> digests(index.tensors.size(), 0);
    std::map<std::size_t, int> pieces_of;
    for (std::int64_t rank = 0; rank < index.world_size; ++rank) {
      const RankPlan plan = plan_rank(index, rank);
      std::vector<std::uint64_t> contributions(plan.pieces.size(), 0);
      for (const DType dtype : all_dtypes) {
        const Bytes segment = segment_bytes(index, plan, dtype);
        SegmentDigest digest(index, plan, dtype);
        for (std::size_t at = 0; at < segment.size(); at += static_cast<std::size_t>(block_bytes)) {
          const auto block = std::span(segment).subspan(at, static_cast<std::size_t>(block_bytes));
          ASSERT_EQ(digest.add_block(block), crc64(block))
              << to_string(dtype) << " block at " << at << " of rank " << rank;
        }
        digest.store(contributions);
      }
      for (std::size_t p = 0; p < plan.pieces.size(); ++p) {
        digests[plan.pieces[p].tensor] ^= contributions[p];
        ++pieces_of[plan.pieces[p].tensor];
      }
    }
    for (std::size_t t = 0; t < index.tensors.size(); ++t) {
      const TensorEntry& tensor = index.tensors[t];
      const Box whole = Box::whole(tensor.spec.shape);
      EXPECT_EQ(digests[t], crc64(box_bytes(tensor.name, tensor.spec.dtype, tensor.spec.shape, whole)))
          << tensor.name << " in " << pieces_of[t] << " pieces, blocks of " << block_bytes;
    }
  }
}

TEST(SegmentDigest, OneFlippedBitChangesItsPieceAndItsBlockAlone) {
  const CheckpointIndex index = index_of(4096);
  const RankPlan plan = plan_rank(index, 0);
  const DType dtype = DType::bf16;
  const auto digest = [&](const Bytes& segment, std::vector<std::uint64_t>& contributions) {
    contributions.assign(plan.pieces.size(), 0);
    SegmentDigest all(index, plan, dtype);
    std::vector<std::uint64_t> blocks;
    for (std::size_t at = 0; at < segment.size(); at += 4096)
      blocks.push_back(all.add_block(std::span(segment).subspan(at, 4096)));
    all.store(contributions);
    return blocks;
  };
  Bytes segment = segment_bytes(index, plan, dtype);
  std::vector<std::uint64_t> contributions_before;
  const std::vector<std::uint64_t> blocks_before = digest(segment, contributions_before);
  for (std::size_t p = 0; p < plan.pieces.size(); ++p) {
    if (index.tensors[plan.pieces[p].tensor].spec.dtype != dtype) continue;
    const auto at = static_cast<std::size_t>(plan.pieces[p].start + plan.pieces[p].bytes / 2);
    segment[at] ^= std::byte{8};
    std::vector<std::uint64_t> contributions;
    const std::vector<std::uint64_t> blocks = digest(segment, contributions);
    segment[at] ^= std::byte{8};
    for (std::size_t i = 0; i < contributions.size(); ++i)
      EXPECT_EQ(contributions[i] != contributions_before[i], i == p) << "piece " << i << ", flipped in " << p;
    for (std::size_t b = 0; b < blocks.size(); ++b)
      EXPECT_EQ(blocks[b] != blocks_before[b], b == at / 4096) << "block " << b << ", flipped in piece " << p;
  }
}

}  // namespace
}  // namespace fsdp2::checkpoint
