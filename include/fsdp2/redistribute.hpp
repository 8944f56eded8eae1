// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp2/dtensor.hpp"

namespace fsdp2 {

/// The same tensor with other placements on the same mesh, in new memory: any of Replicate, Shard, Ragged and Partial
/// into any other, on every axis at once, uneven too, cut in `split_order` (empty: 0, 1, 2, …). Copies are exact.
/// Partial contributions are combined in the order of ranks, as Communicator::all_reduce does; a target that is
/// Partial(sum) has the value on the first rank of the axis and zeros on the others (exact, unlike n equal parts), one
/// that is Partial(min or max) the value everywhere. Collective over the mesh; complete on return. Throws ConfigError
/// or ShapeError, which name axis, dimension and sizes, for placements that the mesh or the shape cannot carry.
DTensor redistribute(const DTensor& source, std::vector<Placement> placements,
                     const ExecutionSpace& exec = ExecutionSpace(), std::vector<std::int64_t> split_order = {});

/// The whole tensor on every rank: redistribute to Replicate everywhere.
Tensor full_tensor(const DTensor& source, const ExecutionSpace& exec = ExecutionSpace());

}  // namespace fsdp2
