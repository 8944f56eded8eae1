// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "fsdp2/checkpoint/load.hpp"
#include "fsdp2/checkpoint/save.hpp"

namespace fsdp2 {

/// A checkpoint of a root: a directory "step-00000100" in it, whose name has at least 8 digits, with an index.
struct NamedCheckpoint {
  std::int64_t step = 0;  ///< by its name
  std::filesystem::path path;

  friend bool operator==(const NamedCheckpoint&, const NamedCheckpoint&) = default;
};

/// The checkpoints of a root, oldest first; none where there is no such directory. Everything else in it is ignored. No
/// MPI. Throws IoError.
std::vector<NamedCheckpoint> list_checkpoints(const std::filesystem::path& root);

/// Which checkpoints stay.
struct Retention {
  std::int64_t keep_last = 0;   ///< the newest; 0: all
  std::int64_t keep_every = 0;  ///< besides, those whose step is a multiple of this; 0: none
};

/// What prune finds to remove.
struct PruneReport {
  std::vector<std::filesystem::path> checkpoints;  ///< oldest first
  std::vector<std::filesystem::path> leftovers;    ///< hidden directories: partial, replaced or discarded checkpoints
};

/// Removes the checkpoints of a root that need not stay, and hidden leftovers: discarded ones, replaced ones, and
/// partial ones whose writer is gone: a process of this host and boot that does not run. `all_partials` removes those
/// of other hosts as well. A checkpoint that was being replaced when its writer died gets its name back. Checkpoints
/// whose tables do not verify do not count as kept, and are never removed; so the last good one stays. With `dry_run`
/// nothing is changed. One process; no MPI. Throws IoError, ConfigError for negative numbers.
PruneReport prune(const std::filesystem::path& root, const Retention& retention, bool all_partials = false,
                  bool dry_run = false);

struct ManagerOptions {
  Retention retention = {};
  /// Saves go on in the background, see AsyncSaver.
  bool asynchronous = false;
};

/// The checkpoints of one training run, in a directory of their own.
class CheckpointManager {
 public:
  /// Makes the root if it is not there, and clears what a killed run has left in it, as prune does. Collective over the
  /// mesh, of which the manager keeps a handle; so is every other member but request_save. Throws IoError and
  /// ConfigError, the same on every rank.
  CheckpointManager(std::filesystem::path root, const DeviceMesh& mesh, const ManagerOptions& options = {});

  /// Saves as "step-<step>", see fsdp2::save and AsyncSaver::save; waits for the save before. When a checkpoint is
  /// complete, those that need not stay are removed.
  void save(std::int64_t step, const StateDict& state, SaveOptions options = {});
  /// As AsyncSaver's; both are at once at their end where saves are not asynchronous.
  bool poll();
  void wait();

  /// Where the checkpoint of a step is, or would be. Local.
  std::filesystem::path path_of(std::int64_t step) const;

  /// The newest checkpoint by its name.
  std::optional<NamedCheckpoint> latest() const;

  /// Loads the newest checkpoint whose every needed byte is as it was written; the log sink hears of those that are
  /// not. Nothing if there is no checkpoint at all. Throws as load, without a further try, for a dict that does not
  /// match; CorruptError or IoError, with the tensors undefined, where no checkpoint is good.
  std::optional<CheckpointIndex> restore(const StateDict& state, const LoadOptions& options = {});

  /// Whether to save now: because some rank was asked to by request_save, or because the job ends in `seconds_left` (of
  /// any rank), and a save may take as long as half as much again as the longest so far, or a minute if there was none.
  /// True once for each reason.
  bool save_due(std::optional<double> seconds_left = {});

  /// Asks for a save at the next save_due. May be called by a signal handler or another thread; local.
  static void request_save() noexcept;

 private:
  void finish();

  std::filesystem::path root_;
  DeviceMesh mesh_;
  ManagerOptions options_;
  AsyncSaver saver_;
  double begin_ = 0;
  double longest_save_ = 40;  // seconds; half as much again is a minute
  bool has_saved_ = false;
  bool has_saved_for_the_end_ = false;
};

}  // namespace fsdp2
