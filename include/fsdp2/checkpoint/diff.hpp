// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "fsdp2/checkpoint/layout.hpp"

namespace fsdp2 {

struct DiffOptions {
  /// Elements x of a and y of b, both finite, may differ by absolute_tolerance + relative_tolerance·|y|. Where both are
  /// 0, elements are equal only if all their bits are.
  double relative_tolerance = 0;
  double absolute_tolerance = 0;
  /// Most bytes of tensor data held in memory at a time; at least some blocks.
  std::int64_t memory_bytes = std::int64_t{64} << 20;
};

enum class DifferenceKind : std::uint8_t { only_in_a, only_in_b, dtype, shape, values };

/// How one tensor differs. A tensor of another dtype and another shape is there twice.
struct TensorDifference {
  std::string name;
  DifferenceKind kind = DifferenceKind::values;
  // Of values:
  std::int64_t count = 0;       ///< elements that differ
  std::int64_t not_finite = 0;  ///< those of them where one is infinite or NaN; the others have the maxima
  double max_absolute = 0;      ///< |x - y|
  double max_relative = 0;      ///< |x - y| / |y|, infinite where y is 0
  Shape first;                  ///< index of the first in row-major order
};

struct DiffReport {
  CheckpointIndex a;
  CheckpointIndex b;
  std::int64_t equal = 0;                     ///< tensors with all bits equal
  std::int64_t close = 0;                     ///< tensors with differences inside the tolerance only
  std::int64_t bytes = 0;                     ///< tensor bytes read of both
  std::vector<TensorDifference> differences;  ///< in name order

  bool is_equal() const { return differences.empty(); }
};

/// Compares the tensors of two checkpoints, whatever ranks and meshes wrote them. Equal content digests are equal
/// tensors, of which no byte is read. NaNs are equal if their bits are. No MPI. Throws as read_index, ConfigError for a
/// tolerance that is negative or NaN, and IoError or CorruptError where bytes cannot be read.
DiffReport diff(const std::filesystem::path& a, const std::filesystem::path& b, const DiffOptions& options = {});

}  // namespace fsdp2
