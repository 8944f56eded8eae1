// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <vector>

#include "checkpoint/columns.hpp"
#include "fsdp2/checkpoint/layout.hpp"

namespace fsdp2::checkpoint {

/// Bytes of a piece that a writer asks for: from byte `begin` of the piece on, into `target`.
struct PieceRequest {
  const Piece* piece = nullptr;
  std::int64_t begin = 0;
  std::span<std::byte> target;
};
/// Fills the targets of all requests.
using PieceSource = std::function<void(std::span<const PieceRequest>)>;

/// What a rank knows after it wrote its file.
struct WrittenShard {
  std::int64_t file_size = 0;
  PerDType<Segment> segments;
  std::vector<std::uint64_t> digests;  ///< by piece of the plan: contributions
};

/// Writes and fsyncs the shard file of one rank, number `file` of `files`, into `directory`: FORMAT.md §7. Asks
/// `source` for bytes in windows of at most `window_bytes` (a multiple of block_bytes) of one dtype, ascending.
/// Communicates with nobody. Throws IoError.
WrittenShard write_shard(const std::filesystem::path& directory, const CheckpointIndex& index, const RankPlan& plan,
                         std::int64_t rank, std::int64_t window_bytes, const PieceSource& source);

/// Columns of /ranks.
inline constexpr std::size_t rank_fields = 9 + 3 * std::size(all_dtypes);

/// A shard file that has proved itself: what is needed to take tensor bytes out of it.
struct ShardTables {
  std::filesystem::path path;
  PerDType<std::int64_t> arena_offset;              ///< in the file
  PerDType<std::vector<std::uint64_t>> block_crcs;  ///< by arena block
  std::vector<std::vector<std::uint64_t>> digests;  ///< by rank of the file, by piece: contributions
};

/// Reads the tables of shard file `file` of a checkpoint and checks them: size, /check, save id, and that its rows are
/// exactly the pieces in `plans` (one plan per rank of the file, in order). Throws IoError or CorruptError.
ShardTables read_shard(const std::filesystem::path& directory, const CheckpointIndex& index, std::size_t file,
                       std::span<const RankPlan* const> plans);

}  // namespace fsdp2::checkpoint
