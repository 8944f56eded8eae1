// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/save_job.hpp"

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

namespace fsdp2::checkpoint {

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

void check_mpio(const HostCommunicator& host, const MpioOptions& options) {
  constexpr std::int64_t page = 4096;
  constexpr std::int64_t most = std::int64_t{1} << 30;
  if (host.mpi() == MPI_COMM_NULL)
    throw ConfigError("SaveOptions::io is Io::mpio, but the mesh works without MPI: save with Io::direct");
  if (options.call_bytes < page || options.call_bytes > most || options.call_bytes % page != 0)
    throw ConfigError(fmt::format("MpioOptions::call_bytes is {}: expected a multiple of {} up to {}",
                                  options.call_bytes, page, most));
  for (const auto& [name, value] : options.hints)
    if (name.empty() || value.empty() || name.size() >= MPI_MAX_INFO_KEY || value.size() >= MPI_MAX_INFO_VAL)
      throw ConfigError(
          fmt::format("MPI-IO hint \"{}\" = \"{}\": name or value is empty or too long for MPI", name, value));
}

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
    if (plan.counts[r].io != plan.counts[0].io)
      throw MismatchError(fmt::format("ranks {} and {}, which write the same file, have different SaveOptions::io",
                                      plan.ranks[0], plan.ranks[r]));
  }
  return plan;
}

}  // namespace

namespace {

/// Where a piece begins in this rank's tensor, in bytes. It is whole rows of the first dimension of the local box that
/// has more than one, so it is contiguous there.
std::int64_t start_of(const Piece& piece, const DTensor& tensor) {
  const Box& box = tensor.box();
  std::int64_t start = 0;
  for (std::size_t d = 0; d < box.extent.size(); ++d)
    start = start * box.extent[d] + piece.box.offset[d] - box.offset[d];
  return start * size_of(tensor.spec().dtype);
}

}  // namespace

PieceSource source_of(const StateDict& state) {
  std::vector<const DTensor*> tensors;  // by number: index and dict have one order
  for (const auto& [name, tensor] : state.tensors) tensors.push_back(&tensor);
  const auto tensor_of = [tensors](const Piece& piece) -> const DTensor& { return *tensors[piece.tensor]; };
  if constexpr (compat::host_accessible<MemorySpace>) {
    const auto view = [tensor_of](const Piece& piece) {
      const DTensor& tensor = tensor_of(piece);
      return tensor.local().data() + start_of(piece, tensor);
    };
    const auto fill = [view](std::span<const PieceRequest> requests) {
      for (const PieceRequest& request : requests)
        std::memcpy(request.target.data(), view(*request.piece) + request.begin, request.target.size());
    };
    return {fill, view};
  } else {
    return [tensor_of, exec = ExecutionSpace()](std::span<const PieceRequest> requests) {
      for (const PieceRequest& request : requests) {
        const DTensor& tensor = tensor_of(*request.piece);
        const auto from = static_cast<std::size_t>(start_of(*request.piece, tensor) + request.begin);
        const auto bytes = Kokkos::subview(tensor.local().buffer(), std::pair(from, from + request.target.size()));
        kernels::copy_to_host(exec, request.target.data(),
                              Tensor::over(bytes, DType::u8, {static_cast<std::int64_t>(request.target.size())}));
      }
    };
  }
}

SaveJob::SaveJob(const std::filesystem::path& target, const StateDict& state, SaveOptions options)
    : target_(target), options_(std::move(options)) {
  if (state.tensors.empty())
    throw ConfigError(fmt::format("checkpoint {}: the state dict has no tensors", target.string()));
  const DeviceMesh& mesh = state.tensors.begin()->second.mesh();
  host_ = &mesh.host();
  save_id_ = mesh.next_save_id();
}

template <class Body>
void SaveJob::attempt(Body&& body) noexcept {
  if (error_) return;
  try {
    body();
  } catch (const PeerFailed&) {
    error_ = std::current_exception();
    is_own_error_ = false;
  } catch (...) {
    error_ = std::current_exception();
  }
}

const HostCommunicator* SaveJob::file_group() const {
  const std::int64_t last = *std::max_element(group_.file_of_rank.begin(), group_.file_of_rank.end());
  if (last + 1 == host_->size()) return nullptr;
  return &host_->subgroup(group_.name, group_.file_of_rank[static_cast<std::size_t>(host_->rank())]);
}

void SaveJob::prepare(const StateDict& state) {
  std::optional<RankCounts> counts;
  attempt([&] { group_ = group_files(*host_, options_); });  // first: ranks may communicate
  attempt([&] {
    if (options_.io == Io::mpio) check_mpio(*host_, options_.mpio);
    if (state.require_current) state.require_current();
    publication_.emplace(target_, save_id_);
    Kokkos::fence();
    index_ = describe(state, options_, host_->size(), save_id_);
    plan_ = plan_rank(index_, host_->rank());
    publication_->prepare(options_.overwrite);
    if (host_->rank() == 0) publication_->note_owner();
    counts = count_rank(index_, plan_, options_.rank_local);
    counts->io = options_.io == Io::direct ? 0 : options_.mpio.collective ? 2 : 1;
  });
  if (group_.file_of_rank.empty()) return;  // on all ranks
  // A rank that has failed tells those of its file, who would wait for its counts.
  const std::exception_ptr planning_error = std::exchange(error_, nullptr);
  attempt([&] { file_ = plan_file(*host_, group_, counts ? &*counts : nullptr); });
  if (planning_error) {
    error_ = planning_error;
    is_own_error_ = true;
  }
  attempt([&] { writer_.emplace(publication_->partial(), index_, plan_, file_, options_.rank_local); });
  if (options_.io == Io::direct || file_.counts.empty()) return;  // without a plan on no rank of the file
  const std::exception_ptr error = std::exchange(error_, nullptr);
  attempt([&] { agree_in_file(file_group(), error); });  // write is collective
}

void SaveJob::write(const PieceSource& source) noexcept {
  attempt([&] {
    if (options_.io == Io::mpio)
      writer_->write(options_.mpio, file_group(), source);
    else  // one block at a time stays in cache between copy, digest and write
      writer_->write(index_.sizes.block_bytes, source);
  });
}

std::uint64_t SaveJob::status() const {
  const auto world = static_cast<std::uint64_t>(host_->size());
  const auto rank = static_cast<std::uint64_t>(host_->rank());
  return !error_ ? clean_status() : is_own_error_ ? rank : world + rank;
}

void SaveJob::agree() const {
  const std::uint64_t hash = error_ ? 0 : check_of(encode_index(index_));
  std::uint64_t lowest[] = {status(), hash, ~hash};
  host_->all_reduce(lowest, MPI_MIN);
  if (lowest[0] != clean_status()) host_->agree_with(culprit(lowest[0]), error_);
  if (lowest[1] != ~lowest[2]) raise_disagreement(*host_, index_);
}

std::vector<std::uint64_t> SaveJob::results() const {
  const std::size_t tensors = index_.tensors.size();
  std::vector<std::uint64_t> values(tensors + static_cast<std::size_t>(host_->size()) * results_per_rank, 0);
  for (std::size_t p = 0; p < plan_.pieces.size(); ++p) values[plan_.pieces[p].tensor] ^= writer_->digests()[p];
  std::uint64_t* own = values.data() + tensors + static_cast<std::size_t>(host_->rank()) * results_per_rank;
  *own = file_.position == 0 ? static_cast<std::uint64_t>(writer_->file_size()) : 0;
  for (const Segment& segment : writer_->segments()) *++own = static_cast<std::uint64_t>(segment.length);
  return values;
}

void SaveJob::complete(std::span<const std::uint64_t> results) {
  const std::size_t tensors = index_.tensors.size();
  for (std::size_t t = 0; t < tensors; ++t) index_.tensors[t].digest = results[t];
  index_.files.assign(file_.files, {});
  std::vector<PerDType<std::int64_t>> ends(file_.files, PerDType<std::int64_t>{});
  const std::uint64_t* next = results.data() + tensors;
  for (const std::int64_t file : group_.file_of_rank) {
    const auto f = static_cast<std::size_t>(file);
    index_.files[f].size += static_cast<std::int64_t>(*next++);
    index_.files[f].ranks.push_back(static_cast<std::int64_t>(index_.segments.size()));
    PerDType<Segment>& segments = index_.segments.emplace_back();
    for (const DType dtype : all_dtypes) {
      segments[dtype] = {ends[f][dtype], static_cast<std::int64_t>(*next++)};
      ends[f][dtype] += segments[dtype].length;
    }
  }
}

void SaveJob::publish() noexcept {
  attempt([&] {
    write_index(publication_->partial(), index_);
    publication_->publish(options_.overwrite);
  });
}

void SaveJob::discard() const noexcept {
  if (host_->rank() == 0 && publication_) publication_->discard();
}

}  // namespace fsdp2::checkpoint
