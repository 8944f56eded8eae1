// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/save.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <type_traits>

#include "checkpoint/digest.hpp"
#include "checkpoint/index_file.hpp"
#include "checkpoint/publication.hpp"
#include "checkpoint/shard_file.hpp"
#include "comm/host_communicator.hpp"
#include "fsdp2/error.hpp"
#include "fsdp2/version.hpp"
#include "kernels.hpp"
#include "kokkos_compat.hpp"

namespace fsdp2 {

namespace checkpoint {

namespace {

std::int64_t step_of(const StateDict& state, const SaveOptions& options) {
  if (options.step) return *options.step;
  const auto it = state.tensors.find("optim.step");
  std::int64_t step = 0;
  if (it != state.tensors.end() && it->second.spec().dtype == DType::i64 && it->second.local().numel() == 1)
    kernels::copy_to_host(ExecutionSpace(), reinterpret_cast<std::byte*>(&step), it->second.local());
  return step;
}

/// What will be saved: everything of the index that is known before a byte is written.
CheckpointIndex describe(const StateDict& state, const SaveOptions& options, std::int64_t world_size,
                         std::string save_id) {
  if (!options.metadata.empty() && !nlohmann::json::accept(options.metadata))
    throw ConfigError("the checkpoint's metadata is not JSON text");
  CheckpointIndex index;
  index.library = fmt::format("fsdp2 {}", version());
  index.save_id = std::move(save_id);
  index.step = step_of(state, options);
  index.world_size = world_size;
  index.sizes = options.sizes;
  index.metadata = options.metadata;
  std::vector<DeviceMesh> meshes;
  for (const auto& [name, tensor] : state.tensors) {
    auto it = std::find(meshes.begin(), meshes.end(), tensor.mesh());
    if (it == meshes.end()) {
      const DeviceMesh& mesh = tensor.mesh();
      if (mesh.size() != world_size)
        throw ConfigError(
            fmt::format("tensor \"{}\" lies on a mesh of {} ranks ({}), but the checkpoint is saved by {}: all meshes "
                        "of a state dict must span the same ranks",
                        name, mesh.size(), mesh.spec().to_string(), world_size));
      index.meshes.push_back({mesh.name(), mesh.spec(), mesh.axis_roles()});
      it = meshes.insert(meshes.end(), mesh);
    }
    TensorSpec spec = tensor.spec();
    spec.split_order = split_order(spec);
    index.tensors.push_back({name, std::move(spec), static_cast<std::size_t>(it - meshes.begin()), 0});
  }
  validate(index);
  return index;
}

/// Copies a range of a piece out of this rank's tensors. A piece is whole rows of the first dimension of the local box
/// that has more than one, so it is contiguous there.
void fetch(const CheckpointIndex& index, const StateDict& state, const ExecutionSpace& exec,
           std::span<const PieceRequest> requests) {
  for (const PieceRequest& request : requests) {
    const DTensor& tensor = state.tensors.at(index.tensors[request.piece->tensor].name);
    const Box& box = tensor.box();
    std::int64_t start = 0;
    for (std::size_t d = 0; d < box.extent.size(); ++d)
      start = start * box.extent[d] + request.piece->box.offset[d] - box.offset[d];
    const std::int64_t begin = start * size_of(tensor.spec().dtype) + request.begin;
    if constexpr (compat::host_accessible<MemorySpace>) {
      std::memcpy(request.target.data(), tensor.local().data() + begin, request.target.size());
    } else {
      const auto from = static_cast<std::size_t>(begin);
      const auto bytes = Kokkos::subview(tensor.local().buffer(), std::pair(from, from + request.target.size()));
      kernels::copy_to_host(exec, request.target.data(),
                            Tensor::over(bytes, DType::u8, {static_cast<std::int64_t>(request.target.size())}));
    }
  }
}

/// One line per tensor: what ranks must agree on.
std::vector<std::string> lines_of(const CheckpointIndex& index) {
  std::vector<std::string> lines;
  for (const TensorEntry& tensor : index.tensors) {
    std::string line = fmt::format("\"{}\" {} {} on mesh \"{}\" ({}):", tensor.name, to_string(tensor.spec.dtype),
                                   to_string(tensor.spec.shape), index.meshes[tensor.mesh].name,
                                   index.meshes[tensor.mesh].spec.to_string());
    for (const Placement& placement : tensor.spec.placements) {
      line += " " + to_string(placement);
      if (const auto* ragged = std::get_if<Ragged>(&placement)) line += " " + to_string(ragged->bounds);
    }
    lines.push_back(line + " order " + to_string(tensor.spec.split_order));
  }
  return lines;
}

/// Finds out who differs from rank 0, and where first; throws MismatchError on every rank.
[[noreturn]] void raise_disagreement(const HostCommunicator& host, const CheckpointIndex& index) {
  const std::vector<std::string> mine = lines_of(index);
  std::string text;
  for (const std::string& line : mine) text += line + '\n';
  host.broadcast(text, 0);
  std::istringstream stream(text);
  std::vector<std::string> first;
  for (std::string line; std::getline(stream, line);) first.push_back(line);
  std::string difference;
  const auto [a, b] = std::mismatch(first.begin(), first.end(), mine.begin(), mine.end());
  if (a != first.end() || b != mine.end())
    difference = fmt::format("rank 0 has {}, rank {} has {}", a == first.end() ? "no more tensors" : *a, host.rank(),
                             b == mine.end() ? "no more tensors" : *b);
  for (const std::string& found : host.all_gather(difference))
    if (!found.empty()) throw MismatchError("ranks disagree about what to save: " + found);
  throw MismatchError("ranks disagree about what to save: their step, metadata, block sizes or save counts differ");
}

/// That a rank of the same file failed: not worth telling where that rank tells why.
class PeerFailed : public Error {
 public:
  using Error::Error;
};

/// Agreement 1: the same status and the same plan everywhere.
void agree_on_plan(const HostCommunicator& host, const std::exception_ptr& error, bool is_own_error,
                   const CheckpointIndex& index) {
  const std::uint64_t hash = error ? 0 : check_of(encode_index(index));
  const auto world = static_cast<std::uint64_t>(host.size());
  const auto rank = static_cast<std::uint64_t>(host.rank());
  const std::uint64_t clean = 2 * world;
  std::uint64_t lowest[] = {!error ? clean : is_own_error ? rank : world + rank, hash, ~hash};
  host.all_reduce(lowest, MPI_MIN);
  if (lowest[0] != clean) host.agree_with(static_cast<std::int64_t>(lowest[0] % world), error);
  if (lowest[1] != ~lowest[2]) raise_disagreement(host, index);
}

/// Which ranks write the file of this one.
struct FileGroup {
  std::string name;                        ///< of the grouping
  std::vector<std::int64_t> file_of_rank;  ///< by rank of the world
};

FileGroup group_files(const HostCommunicator& host, const SaveOptions& options) {
  FileGroup group;
  group.file_of_rank.resize(static_cast<std::size_t>(host.size()));
  const auto* count = std::get_if<std::int64_t>(&options.ranks_per_file);
  if (count != nullptr && *count < 1)
    throw ConfigError(fmt::format("SaveOptions::ranks_per_file is {}: expected at least 1", *count));
  if (count == nullptr && std::get<FileGroups>(options.ranks_per_file) == FileGroups::node) {
    group.name = "node";
    std::vector<std::uint64_t> leaders(group.file_of_rank.size(), 0);
    leaders[static_cast<std::size_t>(host.rank())] = static_cast<std::uint64_t>(host.node_leader());
    host.all_reduce(leaders, MPI_SUM);
    std::map<std::uint64_t, std::int64_t> files;  // by lowest rank
    for (const std::uint64_t leader : leaders) files.emplace(leader, 0);
    std::int64_t next = 0;
    for (auto& [leader, file] : files) file = next++;
    for (std::size_t r = 0; r < leaders.size(); ++r) group.file_of_rank[r] = files[leaders[r]];
    return group;
  }
  const std::int64_t k = count != nullptr ? std::min(*count, host.size()) : host.size();
  group.name = fmt::format("{} ranks a file", k);
  for (std::size_t r = 0; r < group.file_of_rank.size(); ++r) group.file_of_rank[r] = static_cast<std::int64_t>(r) / k;
  return group;
}

/// What the ranks of this rank's file add to it, from one all-gather among them. A rank that has failed (null) tells
/// the others, and all of them throw PeerFailed.
FilePlan plan_file(const HostCommunicator& host, const FileGroup& group, const RankCounts* own) {
  FilePlan plan;
  const std::int64_t file = group.file_of_rank[static_cast<std::size_t>(host.rank())];
  plan.file = static_cast<std::size_t>(file);
  plan.files = static_cast<std::size_t>(*std::max_element(group.file_of_rank.begin(), group.file_of_rank.end())) + 1;
  for (std::size_t r = 0; r < group.file_of_rank.size(); ++r)
    if (group.file_of_rank[r] == file) plan.ranks.push_back(static_cast<std::int64_t>(r));
  plan.position =
      static_cast<std::size_t>(std::find(plan.ranks.begin(), plan.ranks.end(), host.rank()) - plan.ranks.begin());
  std::vector<std::string> texts;
  const std::string text = own == nullptr ? "" : std::string(reinterpret_cast<const char*>(own), sizeof(RankCounts));
  if (plan.files == group.file_of_rank.size())
    texts.push_back(text);  // every rank has a file of its own
  else
    texts = host.subgroup(group.name, file).all_gather(text);
  static_assert(std::is_trivially_copyable_v<RankCounts>);
  for (std::size_t r = 0; r < texts.size(); ++r) {
    if (texts[r].empty())
      throw PeerFailed(fmt::format("rank {}, which writes the same file, has failed", plan.ranks[r]));
    std::memcpy(&plan.counts.emplace_back(), texts[r].data(), sizeof(RankCounts));
  }
  return plan;
}

/// Then everybody's part of what the index still lacks, in one xor: a rank contributes to the digests of its pieces,
/// the length of its segments, and, if it leads a file, that file's size.
void exchange_results(const HostCommunicator& host, const RankPlan& plan, const FileGroup& group, const FilePlan& file,
                      const ShardWriter& writer, CheckpointIndex& index) {
  constexpr std::size_t per_rank = 1 + std::size(all_dtypes);
  const std::size_t tensors = index.tensors.size();
  const auto world = static_cast<std::size_t>(host.size());
  std::vector<std::uint64_t> values(tensors + world * per_rank, 0);
  for (std::size_t p = 0; p < plan.pieces.size(); ++p) values[plan.pieces[p].tensor] ^= writer.digests()[p];
  std::uint64_t* own = values.data() + tensors + static_cast<std::size_t>(host.rank()) * per_rank;
  *own = file.position == 0 ? static_cast<std::uint64_t>(writer.file_size()) : 0;
  for (const Segment& segment : writer.segments()) *++own = static_cast<std::uint64_t>(segment.length);
  host.all_reduce(values, MPI_BXOR);

  for (std::size_t t = 0; t < tensors; ++t) index.tensors[t].digest = values[t];
  index.files.assign(file.files, {});
  std::vector<PerDType<std::int64_t>> ends(file.files, PerDType<std::int64_t>{});
  const std::uint64_t* next = values.data() + tensors;
  for (std::size_t r = 0; r < world; ++r) {
    const auto f = static_cast<std::size_t>(group.file_of_rank[r]);
    index.files[f].size += static_cast<std::int64_t>(*next++);
    index.files[f].ranks.push_back(static_cast<std::int64_t>(r));
    PerDType<Segment>& segments = index.segments.emplace_back();
    for (const DType dtype : all_dtypes) {
      segments[dtype] = {ends[f][dtype], static_cast<std::int64_t>(*next++)};
      ends[f][dtype] += segments[dtype].length;
    }
  }
}

}  // namespace

}  // namespace checkpoint

void save(const std::filesystem::path& target, const StateDict& state, const SaveOptions& options) {
  using namespace checkpoint;
  if (state.tensors.empty())
    throw ConfigError(fmt::format("checkpoint {}: the state dict has no tensors", target.string()));
  const DeviceMesh& mesh = state.tensors.begin()->second.mesh();
  const HostCommunicator& host = mesh.host();
  const std::string save_id = mesh.next_save_id();
  std::optional<Publication> publication;
  CheckpointIndex index;
  RankPlan plan;
  FileGroup group;
  FilePlan file;
  std::optional<ShardWriter> writer;
  std::exception_ptr error;
  bool is_own_error = true;
  const auto attempt = [&](auto&& body) {
    try {
      body();
    } catch (const PeerFailed&) {
      error = std::current_exception();
      is_own_error = false;
    } catch (...) {
      error = std::current_exception();
    }
  };
  std::optional<RankCounts> counts;
  attempt([&] {
    if (state.require_current) state.require_current();
    group = group_files(host, options);
    publication.emplace(target, save_id);
    Kokkos::fence();
    index = describe(state, options, host.size(), save_id);
    plan = plan_rank(index, host.rank());
    publication->prepare(options.overwrite);
    if (host.rank() == 0) publication->note_owner();
    counts = count_rank(index, plan, options.rank_local);
  });
  const std::exception_ptr planning_error = error;
  attempt([&] {
    if (group.file_of_rank.empty()) return;  // on all ranks
    file = plan_file(host, group, counts ? &*counts : nullptr);
    writer.emplace(publication->partial(), index, plan, file, options.rank_local);
    const ExecutionSpace exec;
    // One block at a time stays in cache between copy, digest and write.
    writer->write(index.sizes.block_bytes,
                  [&](std::span<const PieceRequest> requests) { fetch(index, state, exec, requests); });
  });
  if (planning_error) {
    error = planning_error;
    is_own_error = true;
  }
  try {
    agree_on_plan(host, error, is_own_error, index);
    exchange_results(host, plan, group, file, *writer, index);
    std::exception_ptr publication_error;
    if (host.rank() == 0) {
      try {
        write_index(publication->partial(), index);
        publication->publish(options.overwrite);
      } catch (...) {
        publication_error = std::current_exception();
      }
    }
    host.agree_with(0, publication_error);
  } catch (...) {
    // After an agreement nobody writes any more.
    if (host.rank() == 0 && publication) publication->discard();
    throw;
  }
}

}  // namespace fsdp2
