// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// A checkpoint of any number of ranks, written by one process without MPI.

#include <cstring>
#include <filesystem>
#include <map>

#include "checkpoint/index_file.hpp"
#include "checkpoint/write_files.hpp"
#include "support/checkpoint.hpp"

namespace fsdp2::testing {

/// Writes files for all ranks of the index, with the values that tensors of those names have (box_bytes), into a
/// directory that exists. Returns the index with files, segments and digests.
inline CheckpointIndex write_local_checkpoint(const std::filesystem::path& directory, CheckpointIndex index,
                                              std::int64_t ranks_per_file = 1,
                                              const std::map<std::int64_t, RankLocalValues>& rank_local = {}) {
  validate(index);
  const auto values = [&](std::int64_t rank) {
    const auto it = rank_local.find(rank);
    return it == rank_local.end() ? RankLocalValues{} : it->second;
  };
  const auto source = [&](std::span<const checkpoint::PieceRequest> requests) {
    for (const checkpoint::PieceRequest& request : requests) {
      const TensorEntry& tensor = index.tensors[request.piece->tensor];
      const Bytes bytes = box_bytes(tensor.name, tensor.spec.dtype, tensor.spec.shape, request.piece->box);
      std::memcpy(request.target.data(), bytes.data() + request.begin, request.target.size());
    }
  };
  const HostCommunicator alone(MPI_COMM_NULL, "local_checkpoint");
  checkpoint::write_files(alone, directory, index, ranks_per_file, index.sizes.block_bytes, values, source);
  checkpoint::write_index(directory, index);
  return index;
}

}  // namespace fsdp2::testing
