// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/write_files.hpp"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "checkpoint/index_file.hpp"

namespace fsdp2::checkpoint {

void write_files(const std::filesystem::path& directory, CheckpointIndex& index, std::int64_t ranks_per_file,
                 std::int64_t window_bytes, const std::function<RankLocalValues(std::int64_t rank)>& rank_local,
                 const PieceSource& source) {
  const std::int64_t per_file = std::min(ranks_per_file, index.world_size);
  const std::int64_t files = (index.world_size - 1) / per_file + 1;
  for (std::int64_t number = 0; number < files; ++number) {
    FilePlan file;
    file.file = static_cast<std::size_t>(number);
    file.files = static_cast<std::size_t>(files);
    std::vector<RankPlan> plans;
    std::vector<RankLocalValues> values;
    for (std::int64_t rank = number * per_file; rank < index.world_size && rank < (number + 1) * per_file; ++rank) {
      file.ranks.push_back(rank);
      plans.push_back(plan_rank(index, rank));
      values.push_back(rank_local(rank));
      file.counts.push_back(count_rank(index, plans.back(), values.back()));
    }
    index.files.push_back({0, file.ranks});
    for (file.position = 0; file.position < file.ranks.size(); ++file.position) {
      const RankPlan& plan = plans[file.position];
      ShardWriter writer(directory, index, plan, file, values[file.position]);
      index.files.back().size = writer.file_size();
      index.segments.push_back(writer.segments());
      if (!source.fill) continue;
      writer.write(window_bytes, source);
      for (std::size_t p = 0; p < plan.pieces.size(); ++p)
        index.tensors[plan.pieces[p].tensor].digest ^= writer.digests()[p];
    }
  }
}

std::string random_save_id() {
  std::random_device device;
  const auto word = [&] { return (static_cast<std::uint64_t>(device()) << 32) | device(); };
  const std::uint64_t high = word();
  return save_id_text(high, word());
}

}  // namespace fsdp2::checkpoint
