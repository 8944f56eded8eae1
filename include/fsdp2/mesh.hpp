// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp2/shape.hpp"

namespace fsdp2 {

/// One dimension of a mesh of ranks.
struct MeshAxis {
  std::string name;
  std::int64_t size = 1;

  friend bool operator==(const MeshAxis&, const MeshAxis&) = default;
};

/// What FSDP does along a mesh axis: recorded in checkpoints, so that a reshard knows which axis to rescale. The
/// numeric values are part of the checkpoint format.
enum class AxisRole : std::uint8_t { none = 0, shard = 1, replicate = 2 };

/// Names and sizes of the axes along which ranks are laid out. Pure data, for any number of ranks: planners and the
/// tool use it without MPI. The rank at a coordinate is its row-major index, or ranks[index] where a rank list is
/// given.
class MeshSpec {
 public:
  /// Throws ConfigError for no axis, an empty or repeated name or one with ',', ':' or '=', a size < 1, a product that
  /// overflows, and a rank list that has another length, a negative or a repeated entry.
  explicit MeshSpec(std::vector<MeshAxis> axes, std::vector<std::int64_t> ranks = {});

  const std::vector<MeshAxis>& axes() const { return axes_; }
  /// Empty when ranks are row-major.
  const std::vector<std::int64_t>& ranks() const { return ranks_; }
  /// Number of ranks.
  std::int64_t size() const { return size_; }
  std::size_t dimensions() const { return axes_.size(); }

  bool has_axis(std::string_view name) const;
  /// Position of an axis. Throws ConfigError, which lists the axes, for an unknown name.
  std::size_t axis(std::string_view name) const;

  /// One index per axis of a rank. Throws ConfigError for a rank outside the mesh.
  Shape coordinate_of(std::int64_t rank) const;
  /// The inverse.
  std::int64_t rank_at(const Shape& coordinate) const;
  bool contains(std::int64_t rank) const;

  /// A new mesh in which the named, adjacent axes are one axis. Sharding over it is not the same as nested sharding
  /// over the old axes. Throws ConfigError for unknown or non-adjacent axes.
  MeshSpec flatten(const std::vector<std::string>& names, std::string flattened_name) const;

  /// "dp=4" or "dp=2,tp=2".
  std::string to_string() const;

  friend bool operator==(const MeshSpec&, const MeshSpec&) = default;

 private:
  std::vector<MeshAxis> axes_;
  std::vector<std::int64_t> ranks_;
  std::int64_t size_ = 1;
};

}  // namespace fsdp2
