// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/write_files.hpp"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "checkpoint/index_file.hpp"

namespace fsdp2::checkpoint {

namespace {

/// One file, and what the index says of it.
void write_file(const std::filesystem::path& directory, CheckpointIndex& index, std::size_t number,
                std::int64_t window_bytes, const std::function<RankLocalValues(std::int64_t rank)>& rank_local,
                const PieceSource& source) {
  FilePlan file;
  file.file = number;
  file.files = index.files.size();
  file.ranks = index.files[number].ranks;
  std::vector<RankPlan> plans;
  std::vector<RankLocalValues> values;
  for (const std::int64_t rank : file.ranks) {
    plans.push_back(plan_rank(index, rank));
    values.push_back(rank_local(rank));
    file.counts.push_back(count_rank(index, plans.back(), values.back()));
  }
  for (file.position = 0; file.position < file.ranks.size(); ++file.position) {
    const RankPlan& plan = plans[file.position];
    ShardWriter writer(directory, index, plan, file, values[file.position]);
    index.files[number].size = writer.file_size();
    index.segments[static_cast<std::size_t>(file.ranks[file.position])] = writer.segments();
    if (!source.fill) continue;
    writer.write(window_bytes, source);
    for (std::size_t p = 0; p < plan.pieces.size(); ++p)
      index.tensors[plan.pieces[p].tensor].digest ^= writer.digests()[p];
  }
}

/// Everybody knows what only the process that wrote a file knows: elsewhere it is 0.
void exchange_results(const HostCommunicator& host, CheckpointIndex& index) {
  std::vector<std::uint64_t> numbers;
  for (const FileEntry& file : index.files) numbers.push_back(static_cast<std::uint64_t>(file.size));
  for (const PerDType<Segment>& segments : index.segments)
    for (const Segment& segment : segments) {
      numbers.push_back(static_cast<std::uint64_t>(segment.start));
      numbers.push_back(static_cast<std::uint64_t>(segment.length));
    }
  for (const TensorEntry& tensor : index.tensors) numbers.push_back(tensor.digest);
  host.all_reduce(numbers, MPI_BXOR);
  auto next = numbers.begin();
  for (FileEntry& file : index.files) file.size = static_cast<std::int64_t>(*next++);
  for (PerDType<Segment>& segments : index.segments)
    for (Segment& segment : segments) {
      segment.start = static_cast<std::int64_t>(*next++);
      segment.length = static_cast<std::int64_t>(*next++);
    }
  for (TensorEntry& tensor : index.tensors) tensor.digest = *next++;
}

}  // namespace

void write_files(const HostCommunicator& host, const std::filesystem::path& directory, CheckpointIndex& index,
                 std::int64_t ranks_per_file, std::int64_t window_bytes,
                 const std::function<RankLocalValues(std::int64_t rank)>& rank_local, const PieceSource& source) {
  for (std::int64_t rank = 0; rank < index.world_size; ++rank) {
    if (rank % std::min(ranks_per_file, index.world_size) == 0) index.files.emplace_back();
    index.files.back().ranks.push_back(rank);
  }
  index.segments.resize(static_cast<std::size_t>(index.world_size));
  host.collectively([&] {
    for (std::size_t file = 0; file < index.files.size(); ++file)
      if (static_cast<std::int64_t>(file) % host.size() == host.rank())
        write_file(directory, index, file, window_bytes, rank_local, source);
  });
  exchange_results(host, index);
}

std::string random_save_id() {
  std::random_device device;
  const auto word = [&] { return (static_cast<std::uint64_t>(device()) << 32) | device(); };
  const std::uint64_t high = word();
  return save_id_text(high, word());
}

}  // namespace fsdp2::checkpoint
