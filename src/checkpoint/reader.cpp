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

  /// Gives `block` what it has of the bytes that are wanted.
  template <class Block>
  void take_from(Block& block) {
    while (!runs.is_done() && position() < block.end()) {
      const std::int64_t count = std::min(runs.run().count * width() - taken, block.end() - position());
      block.take(position(), count, target + runs.run().to * width() + taken);
      taken += count;
      if (taken != runs.run().count * width()) continue;
      runs.next();
      taken = 0;
    }
  }
};

/// One block of an arena, read to where its bytes are wanted: straight, or by way of a buffer where they are scattered
/// more finely than the kernel copies well.
class CheckpointReader::Block {
 public:
  Block(const ShardTables& tables, DType dtype, std::int64_t bytes)
      : tables_(tables),
        dtype_(dtype),
        bytes_(bytes),
        file_(File::open(tables.path)),
        buffer_(buffer_for(tables.path, bytes)) {}

  void begin(std::int64_t number) {
    number_ = number;
    is_read_ = false;
    known_ = 0;
    parts_.clear();
  }
  std::int64_t end() const { return (number_ + 1) * bytes_; }

  /// Bytes wanted at `target`, from position `from` of the arena on.
  void take(std::int64_t from, std::int64_t count, std::byte* target) {
    from -= number_ * bytes_;
    const bool is_fine = static_cast<std::int64_t>(parts_.size()) * min_part_bytes > bytes_;
    if (!is_read_ && (is_fine || from < known_)) read_to_buffer();
    if (is_read_) {
      std::memcpy(target, buffer_.data() + from, static_cast<std::size_t>(count));
      return;
    }
    skip_to(from);
    parts_.emplace_back(target, static_cast<std::size_t>(count));
    known_ = from + count;
  }

  /// All that is wanted is known: reads it.
  void finish() {
    if (is_read_) return;
    skip_to(bytes_);
    read(parts_);
  }

 private:
  static constexpr std::int64_t min_part_bytes = 2048;  // on average; 2 KiB by the kernel cost as much as a copy more

  void skip_to(std::int64_t position) {
    if (position > known_) parts_.emplace_back(buffer_.data() + known_, static_cast<std::size_t>(position - known_));
    known_ = position;
  }

  void read_to_buffer() {
    const std::span<std::byte> whole(buffer_);
    read({&whole, 1});
    is_read_ = true;
    const std::byte* next = buffer_.data();
    for (const std::span<std::byte> part : parts_) {
      if (part.data() != next) std::memcpy(part.data(), next, part.size());
      next += part.size();
    }
  }

  void read(std::span<const std::span<std::byte>> parts) const {
    file_.read(parts, tables_.arena_offset[dtype_] + number_ * bytes_);
    std::uint64_t crc = 0;
    for (const std::span<std::byte> part : parts) crc = crc64(part, crc);
    require_block(crc, tables_, dtype_, number_);
  }

  const ShardTables& tables_;
  DType dtype_;
  std::int64_t bytes_;
  File file_;
  std::vector<std::byte> buffer_;
  std::int64_t number_ = 0;
  bool is_read_ = false;
  std::int64_t known_ = 0;  // where each byte before it goes
  std::vector<std::span<std::byte>> parts_;
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
    for_each_holder(tensor.spec, mesh, request.box, [&](const Shape& coordinate) {
      const std::int64_t rank = mesh.rank_at(coordinate);
      const std::vector<Piece>& pieces = plan(rank).pieces;
      const auto piece = std::lower_bound(pieces.begin(), pieces.end(), request.tensor,
                                          [](const Piece& a, std::size_t number) { return a.tensor < number; });
      if (piece == pieces.end() || piece->tensor != request.tensor) return;
      const Box common = intersect(piece->box, request.box);
      if (common.numel() == 0) return;
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
    });
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

void CheckpointReader::read_arena(std::size_t file, DType dtype, std::span<Source> sources) {
  const std::int64_t block_bytes = index_.sizes.block_bytes;
  Block block(shard(file), dtype, block_bytes);
  const auto is_later = [](const Source* a, const Source* b) { return a->position() > b->position(); };
  std::priority_queue<Source*, std::vector<Source*>, decltype(is_later)> next(is_later);
  for (Source& source : sources) next.push(&source);
  while (!next.empty()) {
    block.begin(next.top()->position() / block_bytes);
    while (!next.empty() && next.top()->position() < block.end()) {
      Source& source = *next.top();
      next.pop();
      source.take_from(block);
      if (!source.runs.is_done()) next.push(&source);
    }
    block.finish();
    bytes_read_ += block_bytes;
  }
}

}  // namespace fsdp2::checkpoint
