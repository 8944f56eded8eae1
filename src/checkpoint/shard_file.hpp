// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/columns.hpp"
#include "fsdp2/checkpoint/layout.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2 {
class HostCommunicator;
struct MpioOptions;
}  // namespace fsdp2

namespace fsdp2::checkpoint {

/// The arena of a dtype: "/data/f32".
std::string data_path(DType dtype);

/// A tensor's name as one HDF5 link name: FORMAT.md §9.
std::string escape_name(std::string_view name);

/// Bytes of a piece that a writer asks for: from byte `begin` of the piece on, into `target`.
struct PieceRequest {
  const Piece* piece = nullptr;
  std::int64_t begin = 0;
  std::span<std::byte> target;
};
/// Where a writer gets the bytes of pieces.
struct PieceSource {
  /// Fills the targets of all requests.
  std::function<void(std::span<const PieceRequest>)> fill;
  /// The bytes of a piece, where they can be read in place and do not change during the write.
  std::function<const std::byte*(const Piece&)> view = {};

  PieceSource() = default;
  template <std::invocable<std::span<const PieceRequest>> Fill>
  PieceSource(Fill fill_requests, std::function<const std::byte*(const Piece&)> view_piece = {})  // NOLINT: a function
      : fill(std::move(fill_requests)), view(std::move(view_piece)) {}
};

/// How much one rank adds to a shard file: all that the others of that file need to know. Only integers of 64 bits.
struct RankCounts {
  std::int64_t rows = 0;
  std::int64_t name_bytes = 0;
  std::int64_t shape_entries = 0;
  std::int64_t local_rows = 0;
  std::int64_t local_name_bytes = 0;
  std::int64_t local_value_bytes = 0;
  PerDType<std::int64_t> used{};  ///< bytes of each segment up to the end of its last piece
  std::int64_t io = 0;            ///< how the rank writes: all alike, or they would wait for each other
};
RankCounts count_rank(const CheckpointIndex& index, const RankPlan& plan, const RankLocalValues& values);

/// Whose bytes a file holds, and which of them the writer is.
struct FilePlan {
  std::size_t file = 0;
  std::size_t files = 1;
  std::vector<std::int64_t> ranks;  ///< ascending
  std::vector<RankCounts> counts;   ///< by position in `ranks`
  std::size_t position = 0;
};

/// The segments of a file's ranks, which follow one another in each arena.
std::vector<PerDType<Segment>> lay_out_segments(const CheckpointIndex& index, std::span<const RankCounts> counts);

/// That a rank of the same file failed: not worth telling where that rank tells why.
class PeerFailed : public Error {
 public:
  using Error::Error;
};

/// Ranks of one file go on together, or none does: throws `error`, or PeerFailed where another rank has one. Collective
/// over `group`; null: one rank.
void agree_in_file(const HostCommunicator* group, const std::exception_ptr& error);

/// Writes one rank's part of a shard file: FORMAT.md §7. The first rank of the file also writes HDF5's own bytes. The
/// ranks of a file do not wait for each other.
class ShardWriter {
 public:
  /// Lets HDF5 lay out the file, so on the caller's thread. `index` and `plan` must outlive the writer. Throws IoError.
  ShardWriter(const std::filesystem::path& directory, const CheckpointIndex& index, const RankPlan& plan, FilePlan file,
              const RankLocalValues& values = {});

  /// Writes and fsyncs. Asks `source` for bytes in windows of at most `window_bytes` (a multiple of block_bytes) of one
  /// dtype, ascending; blocks inside one piece are written from where they are, if they can. Calls nothing but
  /// `source`, the system and digests: any thread may call it, once. Throws IoError.
  void write(std::int64_t window_bytes, const PieceSource& source);
  /// The same through parallel HDF5, collective over `group`, the ranks of the file; null: one rank. Throws PeerFailed
  /// too.
  void write(const MpioOptions& options, const HostCommunicator* group, const PieceSource& source);

  std::int64_t file_size() const { return skeleton_.file_size; }
  const PerDType<Segment>& segments() const { return segments_; }
  /// By piece of the plan: contributions. After write.
  const std::vector<std::uint64_t>& digests() const { return digests_; }

 private:
  /// Takes bytes from byte `start` of a dataset on.
  using Put = std::function<void(const std::string& dataset, std::int64_t start, std::span<const std::byte> bytes)>;
  class CollectivePut;

  void write_skeleton(File& file) const;
  /// This rank's part of each dataset, one dataset after another.
  void put_all(std::int64_t window_bytes, const PieceSource& source, const Put& put);

  std::filesystem::path path_;
  const CheckpointIndex& index_;
  const RankPlan& plan_;
  FilePlan file_;
  PerDType<Segment> segments_;
  Columns columns_;                             // this rank's part of each
  std::map<std::string, std::int64_t> firsts_;  // where it begins, in elements
  Skeleton skeleton_;
  std::vector<std::uint64_t> digests_;
};

/// Columns of /ranks.
inline constexpr std::size_t rank_fields = 9 + 3 * std::size(all_dtypes);

/// A shard file that has proved itself: what is needed to take tensor bytes out of it.
struct ShardTables {
  std::filesystem::path path;
  PerDType<std::int64_t> arena_offset{};            ///< in the file; 0 where there is none
  PerDType<std::vector<std::uint64_t>> block_crcs;  ///< by arena block
  std::vector<std::vector<std::uint64_t>> digests;  ///< by rank of the file, by piece: contributions
  std::vector<RankLocalValues> rank_local;          ///< by rank of the file
};

/// Reads the tables of shard file `file` of a checkpoint and checks them: size, /check, save id, and that its rows are
/// exactly the pieces in `plans` (one plan per rank of the file, in order). Throws IoError or CorruptError.
ShardTables read_shard(const std::filesystem::path& directory, const CheckpointIndex& index, std::size_t file,
                       std::span<const RankPlan* const> plans);

}  // namespace fsdp2::checkpoint
