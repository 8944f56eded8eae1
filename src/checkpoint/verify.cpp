// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/verify.hpp"

#include <fmt/format.h>

#include "checkpoint/file.hpp"
#include "checkpoint/reader.hpp"
#include "checkpoint/segment_digest.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2 {

namespace checkpoint {

namespace {

/// Reads every block of one rank; returns the contributions of its pieces. The first bad block ends it.
std::vector<std::uint64_t> read_rank(CheckpointReader& reader, const ShardTables& shard, const File& file,
                                     std::int64_t rank, std::int64_t& bytes) {
  const CheckpointIndex& index = reader.index();
  const RankPlan& plan = reader.plan(rank);
  std::vector<std::uint64_t> digests(plan.pieces.size(), 0);
  std::vector<std::byte> block;
  for (const DType dtype : all_dtypes) {
    const Segment& segment = index.segments[static_cast<std::size_t>(rank)][dtype];
    if (segment.length == 0) continue;
    if (block.empty()) block = buffer_for(shard.path, index.sizes.block_bytes);  // no more than the segment, or file
    SegmentDigest digest(index, plan, dtype);
    for (std::int64_t at = segment.start; at < segment.start + segment.length; at += index.sizes.block_bytes) {
      file.read(block, shard.arena_offset[dtype] + at);
      require_block(digest.add_block(block), shard, dtype, at / index.sizes.block_bytes);
      bytes += index.sizes.block_bytes;
    }
    digest.store(digests);
  }
  return digests;
}

/// The plan is what the files were checked against; this checks the plan.
void check_tiling(CheckpointReader& reader, std::vector<std::string>& problems) {
  const CheckpointIndex& index = reader.index();
  std::vector<std::int64_t> covered(index.tensors.size(), 0);
  std::vector<std::vector<const Box*>> boxes(index.tensors.size());
  for (std::int64_t rank = 0; rank < index.world_size; ++rank)
    for (const Piece& piece : reader.plan(rank).pieces) {
      covered[piece.tensor] += piece.bytes;
      boxes[piece.tensor].push_back(&piece.box);
    }
  for (std::size_t t = 0; t < index.tensors.size(); ++t) {
    bool is_tiled = covered[t] == index.tensors[t].bytes();
    for (std::size_t i = 0; is_tiled && i < boxes[t].size(); ++i)
      for (std::size_t j = 0; is_tiled && j < i; ++j) is_tiled = intersect(*boxes[t][i], *boxes[t][j]).numel() == 0;
    if (!is_tiled) problems.push_back(fmt::format("tensor \"{}\": its pieces do not tile it", index.tensors[t].name));
  }
}

}  // namespace

}  // namespace checkpoint

VerifyReport verify(const std::filesystem::path& directory, const VerifyOptions& options) {
  using namespace checkpoint;
  CheckpointReader reader(directory);
  const CheckpointIndex& index = reader.index();
  VerifyReport report;
  report.index = index;
  check_tiling(reader, report.problems);
  std::vector<std::uint64_t> digests(index.tensors.size(), 0);
  const auto check_file = [&](std::size_t number) {
    const ShardTables& shard = reader.shard(number);
    ++report.files;
    const File file = File::open(shard.path);
    const std::vector<std::int64_t>& ranks = index.files[number].ranks;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const std::vector<std::uint64_t>& recorded = shard.digests[r];
      const std::vector<std::uint64_t> found =
          options.quick ? recorded : read_rank(reader, shard, file, ranks[r], report.bytes);
      const std::vector<Piece>& pieces = reader.plan(ranks[r]).pieces;
      for (std::size_t p = 0; p < pieces.size(); ++p) {
        digests[pieces[p].tensor] ^= found[p];
        if (found[p] != recorded[p])
          throw CorruptError(
              fmt::format("{}: tensor \"{}\" contributes {:016x} to its digest, but {:016x} was recorded",
                          shard.path.string(), index.tensors[pieces[p].tensor].name, found[p], recorded[p]));
      }
    }
  };
  std::vector<bool> is_whole(index.tensors.size(), true);  // else digests lack what the bad files hold
  for (std::size_t f = 0; f < index.files.size(); ++f) {
    try {
      check_file(f);
    } catch (const CheckpointError& error) {
      report.problems.push_back(error.what());
      for (const std::int64_t rank : index.files[f].ranks)
        for (const Piece& piece : reader.plan(rank).pieces) is_whole[piece.tensor] = false;
    }
  }
  for (std::size_t t = 0; t < index.tensors.size(); ++t) {
    if (!is_whole[t]) continue;
    if (!options.quick) ++report.tensors;
    if (digests[t] != index.tensors[t].digest)
      report.problems.push_back(fmt::format("tensor \"{}\" has content digest {:016x}, but the index says {:016x}",
                                            index.tensors[t].name, digests[t], index.tensors[t].digest));
  }
  return report;
}

}  // namespace fsdp2
