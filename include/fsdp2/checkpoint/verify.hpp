// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "fsdp2/checkpoint/layout.hpp"

namespace fsdp2 {

struct VerifyOptions {
  /// Only tables, names and sizes: no tensor bytes are read.
  bool quick = false;
  /// Called now and then with the bytes read so far and in all.
  std::function<void(std::int64_t done, std::int64_t total)> progress = {};
};

/// What verify found.
struct VerifyReport {
  CheckpointIndex index;
  std::int64_t files = 0;             ///< whose tables were checked
  std::int64_t tensors = 0;           ///< whose content digests were computed from their bytes
  std::int64_t bytes = 0;             ///< tensor bytes whose digests were checked, padding included
  std::vector<std::string> problems;  ///< empty: valid

  bool is_valid() const { return problems.empty(); }
};

/// Checks a checkpoint, as far as `options` say: files present and of the recorded size, one save id, tables that agree
/// with the index, pieces that tile each tensor, the CRC of every block, and every tensor's content digest. No MPI.
/// Goes on after a problem of one file with the next. Throws as read_index where there is nothing to check: IoError
/// where `checkpoint` is no checkpoint or cannot be read, CorruptError where its index is damaged.
VerifyReport verify(const std::filesystem::path& checkpoint, const VerifyOptions& options = {});

}  // namespace fsdp2
