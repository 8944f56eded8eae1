// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

#include "fsdp2/checkpoint/layout.hpp"

namespace fsdp2 {

struct ReshardOptions {
  /// Number of ranks of the new checkpoint. The axis over which FSDP shards (on a one-axis mesh without roles, that
  /// axis) is rescaled; the others keep their sizes.
  std::int64_t world_size = 0;
  /// Most bytes of tensor data held in memory at a time; at least one block.
  std::int64_t memory_bytes = std::int64_t{256} << 20;
  /// Called now and then with the tensor bytes written so far and in all.
  std::function<void(std::int64_t done, std::int64_t total)> progress = {};
};

struct ReshardReport {
  CheckpointIndex source;
  CheckpointIndex target;  ///< its digests were computed from the bytes written, and equal the source's
};

/// Copies a checkpoint to another number of ranks, bit by bit, with bounded memory: a new save id, the same step and
/// metadata. Every source block is checked; nothing is published unless every content digest of the target equals the
/// source's. No MPI: one process. Throws ConfigError where a mesh cannot have that many ranks, IoError and CorruptError
/// as reading and writing do; `target`, which must not exist, is then not there.
ReshardReport reshard(const std::filesystem::path& source, const std::filesystem::path& target,
                      const ReshardOptions& options);

}  // namespace fsdp2
