// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/publication.hpp"
#include "checkpoint/shard_file.hpp"
#include "comm/host_communicator.hpp"
#include "fsdp2/checkpoint/save.hpp"

namespace fsdp2::checkpoint {

/// This rank's tensors as a source of its pieces. The dict must outlive it.
PieceSource source_of(const StateDict& state);

/// Which ranks write one file.
struct FileGroup {
  std::string name;                        ///< of the grouping
  std::vector<std::int64_t> file_of_rank;  ///< by rank of the world
};

/// One save, step by step: prepare, write, agree, all-reduce of results, complete, publish on rank 0. What fails before
/// the agreement is kept for it, and what follows a failure does nothing. The object must not move.
class SaveJob {
 public:
  /// Takes a save id. Throws ConfigError for a dict without tensors.
  SaveJob(const std::filesystem::path& target, const StateDict& state, SaveOptions options);
  SaveJob(const SaveJob&) = delete;
  SaveJob& operator=(const SaveJob&) = delete;
  ~SaveJob() = default;

  const HostCommunicator& host() const { return *host_; }
  const CheckpointIndex& index() const { return index_; }
  const RankPlan& plan() const { return plan_; }
  const std::exception_ptr& error() const { return error_; }

  /// All that comes before the first byte, on the caller's thread. The ranks of one file communicate, others do not.
  void prepare(const StateDict& state);
  /// Writes this rank's part; any thread, unless by Io::mpio, which is collective. `source` as for ShardWriter.
  void write(const PieceSource& source) noexcept;

  /// The same status and the same plan everywhere, or the same error. Collective.
  void agree() const;
  /// This rank's part of that: the minimum over the ranks tells whether all are well, or which of them is not.
  std::uint64_t status() const;
  std::uint64_t clean_status() const { return 2 * static_cast<std::uint64_t>(host_->size()); }
  std::int64_t culprit(std::uint64_t status) const {
    return static_cast<std::int64_t>(status % static_cast<std::uint64_t>(host_->size()));
  }

  /// This rank's part of what the index still lacks: it contributes to the digests of its pieces, the length of its
  /// segments, and, if it leads a file, that file's size. To be combined by exclusive or.
  std::vector<std::uint64_t> results() const;
  /// Takes everybody's.
  void complete(std::span<const std::uint64_t> results);
  /// Rank 0: the index, and the final name.
  void publish() noexcept;
  /// When nobody writes any more: removes what was written.
  void discard() const noexcept;

 private:
  static constexpr std::size_t results_per_rank = 1 + std::size(all_dtypes);

  template <class Body>
  void attempt(Body&& body) noexcept;
  /// The ranks of this rank's file; null where each rank has one of its own.
  const HostCommunicator* file_group() const;

  std::filesystem::path target_;
  SaveOptions options_;
  const HostCommunicator* host_ = nullptr;
  std::string save_id_;
  std::optional<Publication> publication_;
  CheckpointIndex index_;
  RankPlan plan_;
  FileGroup group_;
  FilePlan file_;
  std::optional<ShardWriter> writer_;
  std::exception_ptr error_;
  bool is_own_error_ = true;  // not that of another rank of the same file, which tells it
};

}  // namespace fsdp2::checkpoint
