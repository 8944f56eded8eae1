// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "sums.hpp"

#include <numeric>

namespace fsdp2::tool {

std::vector<std::int64_t> bytes_of_ranks(const CheckpointIndex& index) {
  std::vector<std::int64_t> bytes;
  for (std::int64_t rank = 0; rank < index.world_size; ++rank) {
    const RankPlan plan = plan_rank(index, rank);
    bytes.push_back(std::accumulate(plan.pieces.begin(), plan.pieces.end(), std::int64_t{0},
                                    [](std::int64_t sum, const Piece& piece) { return sum + piece.bytes; }));
  }
  return bytes;
}

std::vector<std::size_t> files_of_ranks(const CheckpointIndex& index) {
  std::vector<std::size_t> files(static_cast<std::size_t>(index.world_size));
  for (std::size_t f = 0; f < index.files.size(); ++f)
    for (const std::int64_t rank : index.files[f].ranks) files[static_cast<std::size_t>(rank)] = f;
  return files;
}

std::int64_t tensor_bytes(const CheckpointIndex& index) {
  return std::accumulate(index.tensors.begin(), index.tensors.end(), std::int64_t{0},
                         [](std::int64_t sum, const TensorEntry& tensor) { return sum + tensor.bytes(); });
}

std::int64_t file_bytes(const CheckpointIndex& index) {
  return std::accumulate(index.files.begin(), index.files.end(), std::int64_t{0},
                         [](std::int64_t sum, const FileEntry& file) { return sum + file.size; });
}

}  // namespace fsdp2::tool
