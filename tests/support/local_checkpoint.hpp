// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// A checkpoint of any number of ranks, written by one process without MPI.

#include <cstring>
#include <filesystem>
#include <map>

#include "checkpoint/index_file.hpp"
#include "checkpoint/shard_file.hpp"
#include "support/checkpoint.hpp"

namespace fsdp2::testing {

/// Writes files for all ranks of the index, with the values that tensors of those names have (box_bytes), into a
/// directory that exists. Returns the index with files, segments and digests.
inline CheckpointIndex write_local_checkpoint(const std::filesystem::path& directory, CheckpointIndex index) {
  validate(index);
  for (std::int64_t rank = 0; rank < index.world_size; ++rank) {
    const RankPlan plan = plan_rank(index, rank);
    const auto source = [&](std::span<const checkpoint::PieceRequest> requests) {
      for (const checkpoint::PieceRequest& request : requests) {
        const TensorEntry& tensor = index.tensors[request.piece->tensor];
        const Bytes bytes = box_bytes(tensor.name, tensor.spec.dtype, tensor.spec.shape, request.piece->box);
        std::memcpy(request.target.data(), bytes.data() + request.begin, request.target.size());
      }
    };
    checkpoint::ShardWriter writer(directory, index, plan,
                                   {static_cast<std::size_t>(rank),
                                    static_cast<std::size_t>(index.world_size),
                                    {rank},
                                    {checkpoint::count_rank(index, plan, {})},
                                    0});
    writer.write(index.sizes.block_bytes, source);
    for (std::size_t p = 0; p < plan.pieces.size(); ++p)
      index.tensors[plan.pieces[p].tensor].digest ^= writer.digests()[p];
    index.files.push_back({writer.file_size(), {rank}});
    index.segments.push_back(writer.segments());
  }
  checkpoint::write_index(directory, index);
  return index;
}

}  // namespace fsdp2::testing
