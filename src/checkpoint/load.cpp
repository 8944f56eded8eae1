// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/load.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "checkpoint/reader.hpp"
#include "comm/host_communicator.hpp"
#include "fsdp2/communicator.hpp"
#include "fsdp2/error.hpp"
#include "kernels.hpp"
#include "kokkos_compat.hpp"

namespace fsdp2 {

namespace checkpoint {

namespace {

/// A tensor of the dict and its number in the checkpoint.
struct Match {
  const DTensor* tensor;
  std::size_t number;
};

/// The tensors to be loaded. Throws MismatchError with every way in which the dict and the checkpoint differ.
std::vector<Match> match(const CheckpointReader& reader, const StateDict& state, const LoadOptions& options) {
  const CheckpointIndex& index = reader.index();
  std::vector<Match> matches;
  std::vector<const std::string*> key_of(index.tensors.size(), nullptr);
  std::string problems;
  std::size_t next = 0;  // both are in order of names
  for (const auto& [key, tensor] : state.tensors) {
    const std::string name = options.rename ? options.rename(key) : key;
    const std::size_t number =
        next < index.tensors.size() && index.tensors[next].name == name ? next : index.find(name);
    next = number + 1;
    if (number == index.tensors.size()) {
      if (options.strict) problems += fmt::format("\n  missing in the checkpoint: \"{}\"", name);
      continue;
    }
    if (const std::string* other = std::exchange(key_of[number], &key))
      problems += fmt::format("\n  \"{}\" and \"{}\" are both renamed to \"{}\"", *other, key, name);
    const TensorSpec& found = index.tensors[number].spec;
    const TensorSpec& expected = tensor.spec();
    if (found.shape != expected.shape)
      problems += fmt::format("\n  \"{}\": the checkpoint has shape {}, expected {}", name, to_string(found.shape),
                              to_string(expected.shape));
    if (found.dtype != expected.dtype && !(options.cast && is_castable(found.dtype) && is_castable(expected.dtype)))
      problems += fmt::format("\n  \"{}\": the checkpoint has dtype {}, expected {}", name, to_string(found.dtype),
                              to_string(expected.dtype));
    for (const Placement& placement : expected.placements)
      if (std::holds_alternative<Partial>(placement))
        problems += fmt::format("\n  \"{}\": cannot load into a {} tensor", name, to_string(placement));
    matches.push_back({&tensor, number});
  }
  for (std::size_t t = 0; t < index.tensors.size(); ++t)
    if (options.strict && key_of[t] == nullptr)
      problems += fmt::format("\n  unexpected in the checkpoint: \"{}\" {} {}", index.tensors[t].name,
                              to_string(index.tensors[t].spec.dtype), to_string(index.tensors[t].spec.shape));
  if (!problems.empty())
    throw MismatchError(fmt::format("checkpoint {} does not match the state dict; nothing was changed:{}",
                                    reader.directory().string(), problems));
  return matches;
}

/// The axes along which ranks hold the same part of a tensor.
std::vector<std::size_t> replica_axes(const DTensor& tensor) {
  std::vector<std::size_t> axes;
  for (std::size_t axis = 0; axis < tensor.spec().placements.size(); ++axis)
    if (std::holds_alternative<Replicate>(tensor.spec().placements[axis]) && tensor.mesh().spec().axes()[axis].size > 1)
      axes.push_back(axis);
  return axes;
}
bool is_first_replica(const DTensor& tensor) {
  const std::vector<std::size_t> axes = replica_axes(tensor);
  return std::all_of(axes.begin(), axes.end(), [&](std::size_t axis) { return tensor.mesh().coordinate()[axis] == 0; });
}

/// Bytes of staging that one read may fill, for tensors in device memory or of another dtype.
constexpr std::int64_t staging_bytes = std::int64_t{256} << 20;

void read_tensors(CheckpointReader& reader, std::span<const Match> matches, bool broadcasts) {
  const ExecutionSpace exec;
  struct Staged {
    const Tensor* target;
    HostTensor bytes;
  };
  std::vector<BoxRequest> requests;
  std::vector<Staged> staged;
  std::int64_t waiting = 0;
  const auto flush = [&] {
    reader.read(requests);
    for (const auto& [target, bytes] : staged) {
      Tensor found = Tensor::uninitialized(bytes.dtype(), bytes.shape(), "fsdp2::loaded");
      kernels::copy_from_host(exec, found, bytes.data());
      kernels::cast(exec, *target, found);
      compat::fence(exec, "fsdp2::load");
    }
    requests.clear();
    staged.clear();
    waiting = 0;
  };
  for (const auto& [tensor, number] : matches) {
    const Tensor& local = tensor->local();
    if (local.bytes() == 0 || (broadcasts && !is_first_replica(*tensor))) continue;
    const DType dtype = reader.index().tensors[number].spec.dtype;
    if (compat::host_accessible<MemorySpace> && dtype == local.dtype()) {
      requests.push_back({number, tensor->box(), local.data()});
      continue;
    }
    const std::int64_t bytes = local.numel() * size_of(dtype);
    if (waiting + bytes > staging_bytes) flush();
    staged.push_back({&local, HostTensor::uninitialized(dtype, local.shape(), "fsdp2::load_staging")});
    requests.push_back({number, tensor->box(), staged.back().bytes.data()});
    waiting += bytes;
  }
  flush();
}

void broadcast_to_replicas(std::span<const Match> matches) {
  const ExecutionSpace exec;
  for (const auto& [tensor, number] : matches)
    if (const std::vector<std::size_t> axes = replica_axes(*tensor); !axes.empty())
      tensor->mesh().communicator(axes).broadcast(exec, tensor->local(), 0).wait();
}

}  // namespace

}  // namespace checkpoint

CheckpointIndex load(const std::filesystem::path& directory, const StateDict& state, const LoadOptions& options) {
  using namespace checkpoint;
  if (state.tensors.empty())
    throw ConfigError(fmt::format("checkpoint {}: the state dict has no tensors", directory.string()));
  const HostCommunicator& host = state.tensors.begin()->second.mesh().host();
  std::optional<CheckpointReader> reader;
  std::vector<Match> matches;
  RankLocalValues values;
  host.collectively([&] {
    if (state.require_current) state.require_current();
    reader.emplace(directory);
    matches = match(*reader, state, options);
    if (options.rank_local != nullptr) values = reader->rank_local(host.rank(), host.size(), options.rank_local_policy);
  });
  Kokkos::fence();
  host.collectively([&] {
    try {
      read_tensors(*reader, matches, options.broadcast_replicas);
    } catch (const CorruptError& error) {
      throw CorruptError(fmt::format("{}; the tensors being loaded are undefined now", error.what()));
    } catch (const IoError& error) {
      throw IoError(fmt::format("{}; the tensors being loaded are undefined now", error.what()));
    }
  });
  if (options.broadcast_replicas) broadcast_to_replicas(matches);
  if (options.rank_local != nullptr) *options.rank_local = std::move(values);
  if (state.after_load) state.after_load();
  return reader->take_index();
}

RankLocalValues read_rank_local(const std::filesystem::path& directory, std::int64_t rank, std::int64_t world_size,
                                RankLocalPolicy policy) {
  if (world_size < 1 || rank < 0 || rank >= world_size)
    throw ConfigError(fmt::format("there is no rank {} among {}", rank, world_size));
  checkpoint::CheckpointReader reader(directory);
  return reader.rank_local(rank, world_size, policy);
}

HostTensor read_tensor(const std::filesystem::path& directory, const std::string& name, const std::optional<Box>& box) {
  checkpoint::CheckpointReader reader(directory);
  const CheckpointIndex& index = reader.index();
  const std::size_t number = index.find(name);
  if (number == index.tensors.size())
    throw MismatchError(fmt::format("checkpoint {} has no tensor \"{}\"", directory.string(), name));
  const TensorSpec& spec = index.tensors[number].spec;
  const Box whole = Box::whole(spec.shape);
  const Box wanted = box.value_or(whole);
  if (wanted.offset.size() != spec.shape.size() || wanted.extent.size() != spec.shape.size() ||
      intersect(wanted, whole) != wanted)
    throw ShapeError(fmt::format("tensor \"{}\" has shape {}: there is no box at {} of extent {} in it", name,
                                 to_string(spec.shape), to_string(wanted.offset), to_string(wanted.extent)));
  HostTensor values = HostTensor::uninitialized(spec.dtype, wanted.extent, name);
  const checkpoint::BoxRequest request{number, wanted, values.data()};
  if (values.bytes() > 0) reader.read({&request, 1});
  return values;
}

}  // namespace fsdp2
