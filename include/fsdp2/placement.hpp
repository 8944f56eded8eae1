// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "fsdp2/dtype.hpp"
#include "fsdp2/mesh.hpp"
#include "fsdp2/shape.hpp"

namespace fsdp2 {

/// How values of several ranks combine. The numeric values are part of the checkpoint format.
enum class ReduceOp : std::uint8_t { sum = 0, min = 1, max = 2 };

/// What the ranks along one mesh axis hold of a tensor.
struct Replicate {  ///< every rank the same
  friend bool operator==(const Replicate&, const Replicate&) = default;
};
struct Shard {  ///< rank i the i-th chunk of dimension `dim`
  std::int64_t dim = 0;
  friend bool operator==(const Shard&, const Shard&) = default;
};
/// Rank i holds rows [bounds[i], bounds[i+1]) of dimension `dim`, in global indices. `bounds` has one entry more than
/// the axis has ranks, ascends, and runs from 0 to the extent. Must be the first cut of its dimension.
struct Ragged {
  std::int64_t dim = 0;
  std::vector<std::int64_t> bounds;
  friend bool operator==(const Ragged&, const Ragged&) = default;
};
struct Partial {  ///< every rank a full-size contribution, still to be combined with `op`
  ReduceOp op = ReduceOp::sum;
  friend bool operator==(const Partial&, const Partial&) = default;
};
using Placement = std::variant<Replicate, Shard, Ragged, Partial>;

/// "Replicate", "Shard(0)", "Ragged(0)", "Partial(sum)".
std::string to_string(const Placement& placement);

/// A tensor as the mesh sees it: the global shape is always carried, never inferred from shards.
struct TensorSpec {
  DType dtype = DType::f32;
  Shape shape;                            ///< global
  std::vector<Placement> placements;      ///< one per mesh axis
  std::vector<std::int64_t> split_order;  ///< mesh axes in the order in which they cut; empty: 0, 1, 2, …

  /// Bytes of the whole tensor. Throws ShapeError on overflow.
  std::int64_t bytes() const { return checked_multiply(numel(shape), size_of(dtype)); }

  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

/// Throws ShapeError or ConfigError, naming `name`, where the spec does not fit the mesh: another number of placements,
/// a dimension that does not exist, a split order that is no permutation, bad ragged bounds, an overflowing shape.
void validate(const TensorSpec& spec, const MeshSpec& mesh, const std::string& name);

/// The mesh axes in the order in which they cut this tensor.
std::vector<std::int64_t> split_order(const TensorSpec& spec);

/// The part of the tensor that the rank at `coordinate` holds. Axes cut in split order, each one the result of those
/// before it; Replicate and Partial axes do not cut. The boxes of one replica set tile the tensor exactly.
/// The spec must be valid and the coordinate inside the mesh.
Box local_box(const TensorSpec& spec, const MeshSpec& mesh, const Shape& coordinate);

/// Calls `found` with each coordinate whose local box has elements in common with `wanted`, a box of the tensor, once.
/// Takes time for those found, not for the mesh. The spec must be valid.
void for_each_holder(const TensorSpec& spec, const MeshSpec& mesh, const Box& wanted,
                     const std::function<void(const Shape& coordinate)>& found);

}  // namespace fsdp2
