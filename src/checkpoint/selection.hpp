// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "checkpoint/reader.hpp"

namespace fsdp2::checkpoint {

/// The tensors of a checkpoint that are copied.
struct Selection {
  std::vector<TensorEntry> tensors;  ///< with their new dtypes, without digests
  std::vector<std::size_t> sources;  ///< their numbers in the checkpoint
};

/// All tensors, or those that `select` takes, as they are, or as `dtype` says. Throws ConfigError where none is left of
/// some, and for a cast that is not among f64, f32, f16 and bf16.
Selection select_tensors(const CheckpointIndex& source, const std::function<bool(const TensorEntry&)>& select,
                         const std::function<DType(const TensorEntry&)>& dtype);

/// Elements [begin, begin + count), row-major, of a box of a tensor, wanted at `target` as dtype `to`.
struct ElementRequest {
  std::size_t tensor = 0;
  Box box;
  std::int64_t begin = 0;
  std::int64_t count = 0;
  DType to = DType::f32;
  std::byte* target = nullptr;
};

/// Fills all targets. What is cast is held a second time meanwhile, as it is in the checkpoint. Throws as
/// CheckpointReader::read.
void read_elements(CheckpointReader& reader, std::span<const ElementRequest> requests);

}  // namespace fsdp2::checkpoint
