// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/load.hpp"

#include <fmt/format.h>

#include <optional>

#include "checkpoint/reader.hpp"
#include "comm/host_communicator.hpp"
#include "fsdp2/error.hpp"
#include "kernels.hpp"
#include "kokkos_compat.hpp"

namespace fsdp2 {

namespace checkpoint {

namespace {

/// Throws MismatchError with every way in which the dict and the checkpoint differ.
void require_match(const CheckpointReader& reader, const StateDict& state, bool is_strict) {
  const CheckpointIndex& index = reader.index();
  std::string problems;
  for (const auto& [name, tensor] : state.tensors) {
    const std::size_t t = index.find(name);
    if (t == index.tensors.size()) {
      if (is_strict) problems += fmt::format("\n  missing in the checkpoint: \"{}\"", name);
      continue;
    }
    const TensorSpec& found = index.tensors[t].spec;
    const TensorSpec& expected = tensor.spec();
    if (found.shape != expected.shape)
      problems += fmt::format("\n  \"{}\": the checkpoint has shape {}, expected {}", name, to_string(found.shape),
                              to_string(expected.shape));
    if (found.dtype != expected.dtype)
      problems += fmt::format("\n  \"{}\": the checkpoint has dtype {}, expected {}", name, to_string(found.dtype),
                              to_string(expected.dtype));
    for (const Placement& placement : expected.placements)
      if (std::holds_alternative<Partial>(placement))
        problems += fmt::format("\n  \"{}\": cannot load into a {} tensor", name, to_string(placement));
  }
  for (const TensorEntry& tensor : index.tensors)
    if (is_strict && !state.tensors.contains(tensor.name))
      problems += fmt::format("\n  unexpected in the checkpoint: \"{}\" {} {}", tensor.name,
                              to_string(tensor.spec.dtype), to_string(tensor.spec.shape));
  if (!problems.empty())
    throw MismatchError(fmt::format("checkpoint {} does not match the state dict; nothing was changed:{}",
                                    reader.directory().string(), problems));
}

/// Bytes of host staging that one read may fill, where tensors are in device memory.
constexpr std::int64_t staging_bytes = std::int64_t{256} << 20;

void read_tensors(CheckpointReader& reader, const StateDict& state) {
  const ExecutionSpace exec;
  std::vector<BoxRequest> requests;
  std::vector<std::pair<Tensor, std::vector<std::byte>>> staged;
  std::int64_t waiting = 0;
  const auto flush = [&] {
    reader.read(requests);
    for (const auto& [tensor, bytes] : staged) kernels::copy_from_host(exec, tensor, bytes.data());
    requests.clear();
    staged.clear();
    waiting = 0;
  };
  for (const auto& [name, tensor] : state.tensors) {
    const std::size_t number = reader.index().find(name);
    const Tensor& local = tensor.local();
    if (number == reader.index().tensors.size() || local.bytes() == 0) continue;
    if constexpr (compat::host_accessible<MemorySpace>) {
      requests.push_back({number, tensor.box(), local.data()});
    } else {
      if (waiting + local.bytes() > staging_bytes) flush();
      staged.emplace_back(local, std::vector<std::byte>(static_cast<std::size_t>(local.bytes())));
      requests.push_back({number, tensor.box(), staged.back().second.data()});
      waiting += local.bytes();
    }
  }
  flush();
}

}  // namespace

}  // namespace checkpoint

CheckpointIndex load(const std::filesystem::path& directory, const StateDict& state, const LoadOptions& options) {
  using namespace checkpoint;
  if (state.tensors.empty())
    throw ConfigError(fmt::format("checkpoint {}: the state dict has no tensors", directory.string()));
  const HostCommunicator& host = state.tensors.begin()->second.mesh().host();
  std::optional<CheckpointReader> reader;
  host.collectively([&] {
    if (state.require_current) state.require_current();
    reader.emplace(directory);
    require_match(*reader, state, options.strict);
  });
  Kokkos::fence();
  host.collectively([&] {
    try {
      read_tensors(*reader, state);
    } catch (const CorruptError& error) {
      throw CorruptError(fmt::format("{}; the tensors being loaded are undefined now", error.what()));
    } catch (const IoError& error) {
      throw IoError(fmt::format("{}; the tensors being loaded are undefined now", error.what()));
    }
  });
  if (state.after_load) state.after_load();
  return reader->index();
}

}  // namespace fsdp2
