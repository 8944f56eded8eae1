// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "checkpoint/shard_file.hpp"
#include "fsdp2/checkpoint/layout.hpp"

namespace fsdp2::checkpoint {

/// A box of one tensor that is wanted, densely packed, at `target`.
struct BoxRequest {
  std::size_t tensor = 0;
  Box box;
  std::byte* target = nullptr;
};

/// Takes tensor bytes out of a checkpoint, whatever ranks wrote them. Opens one file at a time; keeps the tables of
/// those it has used. Every byte it hands out lies in a block whose CRC was checked.
class CheckpointReader {
 public:
  /// Reads the index; throws as read_index.
  explicit CheckpointReader(std::filesystem::path directory);

  const std::filesystem::path& directory() const { return directory_; }
  const CheckpointIndex& index() const { return index_; }
  /// The same, for the last use of the reader.
  CheckpointIndex take_index() { return std::move(index_); }

  /// What a rank wrote.
  const RankPlan& plan(std::int64_t rank);
  /// The proved tables of a file. Throws as read_shard.
  const ShardTables& shard(std::size_t file);
  /// The opaque values that a rank saved.
  const RankLocalValues& rank_local(std::int64_t rank);
  /// Those that rank `rank` of `world_size` gets. Throws MismatchError where the policy does not allow it.
  RankLocalValues rank_local(std::int64_t rank, std::int64_t world_size, RankLocalPolicy policy);

  /// Fills all targets: files one after the other, each block read once, in ascending order. Throws IoError or
  /// CorruptError, with targets undefined.
  void read(std::span<const BoxRequest> requests);

  /// Tensor bytes read from files so far.
  std::int64_t bytes_read() const { return bytes_read_; }

 private:
  struct Source;
  class Block;
  std::vector<Source> find_sources(std::span<const BoxRequest> requests);
  void read_arena(std::size_t file, DType dtype, std::span<Source> sources);

  std::filesystem::path directory_;
  CheckpointIndex index_;
  std::vector<std::size_t> file_of_rank_;
  std::map<std::int64_t, RankPlan> plans_;
  std::map<std::size_t, ShardTables> shards_;
  std::int64_t bytes_read_ = 0;
};

/// Throws CorruptError, naming file, arena and block, unless the CRCs are equal.
void require_block(std::uint64_t found, const ShardTables& shard, DType dtype, std::int64_t block);

}  // namespace fsdp2::checkpoint
