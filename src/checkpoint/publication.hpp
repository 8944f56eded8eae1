// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <filesystem>
#include <string>

namespace fsdp2::checkpoint {

/// The way of a checkpoint from a hidden directory to its final name. Local: ranks agree elsewhere.
class Publication {
 public:
  /// Throws ConfigError for a name that is empty or begins with '.'.
  Publication(const std::filesystem::path& target, const std::string& save_id);

  /// Where files are written until then.
  const std::filesystem::path& partial() const { return partial_; }

  /// Makes the hidden directory, and the target's parents; every rank may call it, in any order. Throws IoError where
  /// the target exists or cannot be made.
  void prepare() const;
  /// One rank: leaves a note of who is writing.
  void note_owner() const;
  /// One rank, when all files are durable: gives the directory its final name, durably, never replacing anything.
  void publish() const;
  /// One rank, when nobody writes any more: removes what was written. Best effort.
  void discard() const noexcept;

 private:
  std::filesystem::path target_;
  std::filesystem::path partial_;
};

}  // namespace fsdp2::checkpoint
