// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/verify.hpp"

#include <fmt/format.h>

#include "checkpoint/file.hpp"
#include "checkpoint/reader.hpp"
#include "checkpoint/segment_digest.hpp"
#include "checkpoint/tiling.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2 {

namespace checkpoint {

namespace {

/// Reads every block of one rank; returns the contributions of its pieces. The first bad block ends it.
std::vector<std::uint64_t> read_rank(const CheckpointIndex& index, const ShardTables& shard, const File& file,
                                     std::int64_t rank, const RankPlan& plan,
                                     const std::function<void(std::int64_t bytes)>& count) {
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
      count(index.sizes.block_bytes);
    }
    digest.store(digests);
  }
  return digests;
}

/// What is known of a tensor from the files seen so far.
struct TensorFindings {
  std::uint64_t digest = 0;
  bool is_whole = true;  ///< else the digest lacks what the bad files hold
  Tiling tiling;         ///< the plan is what the files are checked against; this checks the plan
};

/// One file, and with it the plans of its ranks only: those of all ranks may not fit into memory.
void check_file(const std::filesystem::path& directory, std::size_t number, const VerifyOptions& options,
                std::int64_t total, VerifyReport& report, std::vector<TensorFindings>& tensors) {
  const CheckpointIndex& index = report.index;
  const std::vector<std::int64_t>& ranks = index.files[number].ranks;
  const auto count = [&](std::int64_t bytes) {
    report.bytes += bytes;
    if (options.progress) options.progress(report.bytes, total);
  };
  std::vector<RankPlan> plans;
  plans.reserve(ranks.size());
  for (const std::int64_t rank : ranks) plans.push_back(plan_rank(index, rank));
  std::vector<const RankPlan*> pointers;
  for (const RankPlan& plan : plans) {
    pointers.push_back(&plan);
    for (const Piece& piece : plan.pieces) tensors[piece.tensor].tiling.add(piece.box);
  }
  try {
    const ShardTables shard = read_shard(directory, index, number, pointers);
    ++report.files;
    const File file = File::open(shard.path);
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const std::vector<std::uint64_t>& recorded = shard.digests[r];
      const std::vector<std::uint64_t> found =
          options.quick ? recorded : read_rank(index, shard, file, ranks[r], plans[r], count);
      for (std::size_t p = 0; p < found.size(); ++p) {
        const std::size_t tensor = plans[r].pieces[p].tensor;
        tensors[tensor].digest ^= found[p];
        if (found[p] != recorded[p])
          throw CorruptError(
              fmt::format("{}: tensor \"{}\" contributes {:016x} to its digest, but {:016x} was recorded",
                          shard.path.string(), index.tensors[tensor].name, found[p], recorded[p]));
      }
    }
  } catch (const CheckpointError& error) {
    report.problems.push_back(error.what());
    for (const RankPlan& plan : plans)
      for (const Piece& piece : plan.pieces) tensors[piece.tensor].is_whole = false;
  }
}

}  // namespace

}  // namespace checkpoint

VerifyReport verify(const std::filesystem::path& directory, const VerifyOptions& options) {
  using namespace checkpoint;
  VerifyReport report;
  report.index = read_index(directory);
  const CheckpointIndex& index = report.index;
  std::vector<TensorFindings> tensors(index.tensors.size());
  std::int64_t total = 0;
  for (const PerDType<Segment>& segments : index.segments)
    for (const Segment& segment : segments) total += segment.length;
  for (std::size_t f = 0; f < index.files.size(); ++f) check_file(directory, f, options, total, report, tensors);
  for (std::size_t t = 0; t < index.tensors.size(); ++t) {
    const TensorEntry& tensor = index.tensors[t];
    const TensorFindings& found = tensors[t];
    if (!found.tiling.is_exact(tensor.spec.shape))
      report.problems.push_back(fmt::format("tensor \"{}\": its pieces do not tile it", tensor.name));
    if (!found.is_whole) continue;
    if (!options.quick) ++report.tensors;
    if (found.digest != tensor.digest)
      report.problems.push_back(fmt::format("tensor \"{}\" has content digest {:016x}, but the index says {:016x}",
                                            tensor.name, found.digest, tensor.digest));
  }
  return report;
}

}  // namespace fsdp2
