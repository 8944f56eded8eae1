// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace fsdp2::checkpoint {

/// The way of a checkpoint from a hidden directory to its final name. Local: ranks agree elsewhere.
class Publication {
 public:
  /// Throws ConfigError for a name that is empty or begins with '.'.
  Publication(const std::filesystem::path& target, const std::string& save_id);

  /// Where files are written until then.
  const std::filesystem::path& partial() const { return partial_; }

  /// Makes the hidden directory, and the target's parents; every rank may call it, in any order. Throws IoError where
  /// the target exists, unless it may be overwritten, or cannot be made.
  void prepare(bool overwrites = false) const;
  /// One rank: leaves a note of who is writing.
  void note_owner() const;
  /// One rank, when all files are durable: gives the directory its final name, durably. Replaces what has that name
  /// only if it may: readers see the one or the other, or, where directories cannot be exchanged, for a moment neither.
  void publish(bool overwrites = false) const;
  /// One rank, when nobody writes any more: removes what was written. Best effort.
  void discard() const noexcept;

 private:
  std::filesystem::path hidden(const char* kind) const;

  std::filesystem::path target_;
  std::filesystem::path partial_;
  std::string save_id_;
};

/// A directory that a writer has left, or still uses, beside the checkpoint that it wrote.
struct HiddenDirectory {
  std::filesystem::path path;
  std::string kind;  ///< partial, old or trash
  std::string save_id;
  std::filesystem::path target;  ///< the final name
};
/// Those in a directory; none where it does not exist. Throws IoError.
std::vector<HiddenDirectory> hidden_directories(const std::filesystem::path& parent);
/// Whether the process that made a partial directory is known to be gone: it ran on this host since it booted.
bool is_owner_dead(const std::filesystem::path& partial);
/// Whether an old checkpoint has no successor under its name.
bool is_replacement_interrupted(const HiddenDirectory& old);

/// Removes one, under a name that nobody loads. Best effort.
void remove_hidden(const HiddenDirectory& hidden);

/// Puts a checkpoint back whose replacement was interrupted when it had no name. Harmless otherwise; any rank may call
/// it. Best effort.
void restore_replaced(const std::filesystem::path& target);

/// Removes a directory tree, under a name that nobody loads. Throws IoError where it cannot be renamed.
void remove_checkpoint(const std::filesystem::path& checkpoint, const std::string& id);

}  // namespace fsdp2::checkpoint
