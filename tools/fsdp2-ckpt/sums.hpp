// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp2/checkpoint/layout.hpp"

namespace fsdp2::tool {

/// Tensor bytes that each rank wrote: what the files hold without padding.
std::vector<std::int64_t> bytes_of_ranks(const CheckpointIndex& index);

/// Number of the file that each rank wrote.
std::vector<std::size_t> files_of_ranks(const CheckpointIndex& index);

/// Of all tensors, each counted once.
std::int64_t tensor_bytes(const CheckpointIndex& index);

/// Of all shard files.
std::int64_t file_bytes(const CheckpointIndex& index);

}  // namespace fsdp2::tool
