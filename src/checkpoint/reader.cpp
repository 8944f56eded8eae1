// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <queue>
#include <tuple>

#include "checkpoint/digest.hpp"
#include "checkpoint/file.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::checkpoint {

namespace {

/// Which of the ranks that saved have what one rank gets.
Range sources_of(std::int64_t saved, std::int64_t rank, std::int64_t world_size, RankLocalPolicy policy) {
  if (saved == world_size) return {rank, rank + 1};
  switch (policy) {
    case RankLocalPolicy::error:
      return {0, saved};  // which must have none
    case RankLocalPolicy::first:
      return {0, 1};
    case RankLocalPolicy::each:
      return {std::min(rank, saved), std::min(rank + 1, saved)};
    case RankLocalPolicy::concatenate:
      return chunk(saved, world_size, rank);
  }
  return {0, 0};
}

}  // namespace

/// Bytes of one piece that one request wants.
struct CheckpointReader::Source {
  std::size_t file;
  DType dtype;
  std::int64_t piece_start;  // in the arena
  RunCursor runs;            // from the piece, to the request's box
  std::int64_t taken = 0;    // bytes of the current run
  std::byte* target;

  std::int64_t width() const { return size_of(dtype); }
  /// Of the next byte, in the arena.
  std::int64_t position() const { return piece_start + runs.run().from * width() + taken; }

  /// Bytes that follow one another both in the arena and at the target, from the next byte on.
  std::int64_t contiguous() const { return runs.run().count * width() - taken; }
  std::byte* next_target() const { return target + runs.run().to * width() + taken; }
  void skip(std::int64_t count) {
    taken += count;
    if (contiguous() != 0) return;
    runs.next();
    taken = 0;
  }

  /// Copies what lies in the block at `begin`.
  void copy_from(std::span<const std::byte> block, std::int64_t begin) {
    const std::int64_t end = begin + static_cast<std::int64_t>(block.size());
    while (!runs.is_done() && position() < end) {
      const std::int64_t count = std::min(contiguous(), end - position());
      std::memcpy(next_target(), block.data() + (position() - begin), static_cast<std::size_t>(count));
      skip(count);
    }
  }
};

void require_block(std::uint64_t found, const ShardTables& shard, DType dtype, std::int64_t block) {
  const std::uint64_t expected = shard.block_crcs[dtype][static_cast<std::size_t>(block)];
  if (found != expected)
    throw CorruptError(
        fmt::format("{}: block {} of the {} data has CRC {:016x}, but {:016x} was recorded: its bytes changed after "
                    "they were written; use another checkpoint",
                    shard.path.string(), block, to_string(dtype), found, expected));
}

CheckpointReader::CheckpointReader(std::filesystem::path directory)
    : directory_(std::move(directory)),
      index_(read_index(directory_)),
      file_of_rank_(static_cast<std::size_t>(index_.world_size)) {
  for (std::size_t f = 0; f < index_.files.size(); ++f)
    for (const std::int64_t rank : index_.files[f].ranks) file_of_rank_[static_cast<std::size_t>(rank)] = f;
}

const RankPlan& CheckpointReader::plan(std::int64_t rank) {
  auto it = plans_.find(rank);
  if (it == plans_.end()) it = plans_.emplace(rank, plan_rank(index_, rank)).first;
  return it->second;
}

const ShardTables& CheckpointReader::shard(std::size_t file) {
  auto it = shards_.find(file);
  if (it == shards_.end()) {
    std::vector<const RankPlan*> plans;
    for (const std::int64_t rank : index_.files[file].ranks) plans.push_back(&plan(rank));
    it = shards_.emplace(file, read_shard(directory_, index_, file, plans)).first;
  }
  return it->second;
}

const RankLocalValues& CheckpointReader::rank_local(std::int64_t rank) {
  const std::size_t file = file_of_rank_[static_cast<std::size_t>(rank)];
  const std::vector<std::int64_t>& ranks = index_.files[file].ranks;
  const auto position = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
  return shard(file).rank_local[static_cast<std::size_t>(position)];
}

RankLocalValues CheckpointReader::rank_local(std::int64_t rank, std::int64_t world_size, RankLocalPolicy policy) {
  RankLocalValues values;
  const Range sources = sources_of(index_.world_size, rank, world_size, policy);
  for (std::int64_t source = sources.begin; source < sources.end; ++source)
    for (const auto& [name, value] : rank_local(source)) {
      std::vector<std::byte>& all = values[name];
      all.insert(all.end(), value.begin(), value.end());
    }
  if (policy == RankLocalPolicy::error && index_.world_size != world_size && !values.empty())
    throw MismatchError(
        fmt::format("checkpoint {} has rank-local values of {} ranks (\"{}\"), but there are {} now: choose by a "
                    "RankLocalPolicy what each gets",
                    directory_.string(), index_.world_size, values.begin()->first, world_size));
  return values;
}

std::vector<CheckpointReader::Source> CheckpointReader::find_sources(std::span<const BoxRequest> requests) {
  std::vector<Source> sources;
  for (const BoxRequest& request : requests) {
    const TensorEntry& tensor = index_.tensors[request.tensor];
    const MeshSpec& mesh = index_.meshes[tensor.mesh].spec;
    for (std::int64_t rank = 0; rank < index_.world_size; ++rank) {
      if (!mesh.contains(rank)) continue;
      // A plan says it all, but costs as much as the box of every tensor.
      if (!plans_.contains(rank) &&
          intersect(local_box(tensor.spec, mesh, mesh.coordinate_of(rank)), request.box).numel() == 0)
        continue;
      const std::vector<Piece>& pieces = plan(rank).pieces;
      const auto piece = std::lower_bound(pieces.begin(), pieces.end(), request.tensor,
                                          [](const Piece& a, std::size_t number) { return a.tensor < number; });
      if (piece == pieces.end() || piece->tensor != request.tensor) continue;
      const Box common = intersect(piece->box, request.box);
      if (common.numel() == 0) continue;
      Shape in_piece = common.offset;
      Shape in_request = common.offset;
      for (std::size_t d = 0; d < common.offset.size(); ++d) {
        in_piece[d] -= piece->box.offset[d];
        in_request[d] -= request.box.offset[d];
      }
      const DType dtype = tensor.spec.dtype;
      sources.push_back({file_of_rank_[static_cast<std::size_t>(rank)], dtype,
                         index_.segments[static_cast<std::size_t>(rank)][dtype].start + piece->start,
                         RunCursor(common.extent, piece->box.extent, in_piece, request.box.extent, in_request), 0,
                         request.target});
    }
  }
  return sources;
}

void CheckpointReader::read(std::span<const BoxRequest> requests) {
  std::vector<Source> sources = find_sources(requests);
  const auto arena = [](const Source& source) { return std::tuple(source.file, source.dtype); };
  std::stable_sort(sources.begin(), sources.end(),
                   [&](const Source& a, const Source& b) { return arena(a) < arena(b); });
  for (auto begin = sources.begin(); begin != sources.end();) {
    const auto end =
        std::find_if(begin, sources.end(), [&](const Source& source) { return arena(source) != arena(*begin); });
    read_arena(begin->file, begin->dtype, {begin, end});
    begin = end;
  }
}

void CheckpointReader::read_elements(std::size_t tensor, std::int64_t begin, std::int64_t count, std::byte* target) {
  const TensorSpec& spec = index_.tensors[tensor].spec;
  std::vector<BoxRequest> requests;
  for_each_box(spec.shape, begin, begin + count, [&](Box box, std::int64_t first) {
    requests.push_back({tensor, std::move(box), target + (first - begin) * size_of(spec.dtype)});
  });
  read(requests);
}

void CheckpointReader::read_arena(std::size_t file_number, DType dtype, std::span<Source> sources) {
  const ShardTables& tables = shard(file_number);
  const File file = File::open(tables.path);
  const std::int64_t block_bytes = index_.sizes.block_bytes;
  std::vector<std::byte> block = buffer_for(tables.path, block_bytes);
  std::int64_t loaded = -1;
  const auto is_later = [](const Source* a, const Source* b) { return a->position() > b->position(); };
  std::priority_queue<Source*, std::vector<Source*>, decltype(is_later)> next(is_later);
  for (Source& source : sources) next.push(&source);
  const auto read_block = [&](std::int64_t number, std::span<std::byte> bytes) {
    file.read(bytes, tables.arena_offset[dtype] + number * block_bytes);
    bytes_read_ += block_bytes;
    require_block(crc64(bytes), tables, dtype, number);
  };
  while (!next.empty()) {
    Source& source = *next.top();
    next.pop();
    const std::int64_t number = source.position() / block_bytes;
    if (source.position() % block_bytes == 0 && source.contiguous() >= block_bytes && number != loaded) {
      // The target wants the whole block, and nobody else does: a byte of an arena is one element of one tensor.
      read_block(number, {source.next_target(), block.size()});
      source.skip(block_bytes);
    } else {
      if (number != loaded) read_block(number, block);
      loaded = number;
      source.copy_from(block, number * block_bytes);
    }
    if (!source.runs.is_done()) next.push(&source);
  }
}

}  // namespace fsdp2::checkpoint
