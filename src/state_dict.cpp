// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/state_dict.hpp"

#include <fmt/format.h>

#include <cstring>
#include <string_view>

#include "comm/host_communicator.hpp"
#include "fsdp2/error.hpp"
#include "fsdp2/field.hpp"
#include "fsdp2/redistribute.hpp"
#include "kernels.hpp"
#include "kokkos_compat.hpp"
#include "module_access.hpp"

namespace fsdp2 {

namespace {

using Groups = std::vector<std::shared_ptr<detail::ParamGroup>>;

StateDict dict_of(Groups groups) {
  StateDict dict;
  const auto add = [&](const std::string& key, const DTensor& tensor) {
    if (!dict.tensors.emplace(key, tensor).second)
      throw ConfigError(fmt::format("two parameters have the key \"{}\": rename a module", key));
  };
  for (const auto& group : groups) {
    for (const detail::Param& param : group->params())
      if (!param.is_ignored) add(group->key(param), param.shard);
    for (const auto& [name, buffer] : group->buffers()) add(group->key_of(name), buffer);
  }
  dict.after_load = [groups] {
    for (const auto& group : groups) group->invalidate(ExecutionSpace());
  };
  std::vector<std::int64_t> additions;
  for (const auto& group : groups) additions.push_back(group->additions());
  dict.require_current = [groups = std::move(groups), additions = std::move(additions)] {
    for (std::size_t i = 0; i < groups.size(); ++i)
      if (groups[i]->additions() != additions[i])
        throw Error(
            fmt::format("a state dict is stale: parameters were added to module \"{}\" after it was taken. Take it "
                        "again",
                        groups[i]->name()));
  };
  return dict;
}

/// What a whole tensor is, without its values.
struct Declaration {
  DType dtype = DType::f32;
  Shape shape;
};
using Declarations = std::map<std::string, Declaration>;

void put(std::string& text, std::int64_t number) {
  text.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

std::int64_t get(std::string_view& text) {
  std::int64_t number = 0;
  std::memcpy(&number, text.data(), sizeof(number));
  text.remove_prefix(sizeof(number));
  return number;
}

std::string encode(const FullStateDict& source) {
  std::string text;
  for (const auto& [key, tensor] : source) {
    put(text, static_cast<std::int64_t>(key.size()));
    text += key;
    put(text, static_cast<std::int64_t>(tensor.dtype()));
    put(text, static_cast<std::int64_t>(tensor.shape().size()));
    for (const std::int64_t extent : tensor.shape()) put(text, extent);
  }
  return text;
}

Declarations decode(std::string_view text) {
  Declarations result;
  while (!text.empty()) {
    const auto length = static_cast<std::size_t>(get(text));
    Declaration& declaration = result[std::string(text.substr(0, length))];
    text.remove_prefix(length);
    declaration.dtype = static_cast<DType>(get(text));
    declaration.shape.resize(static_cast<std::size_t>(get(text)));
    for (std::int64_t& extent : declaration.shape) extent = get(text);
  }
  return result;
}

/// Throws MismatchError with all that keeps `source` from being loaded.
void require_match(const StateDict& target, const Declarations& source, bool is_strict) {
  std::string problems;
  for (const auto& [key, tensor] : target.tensors) {
    const auto found = source.find(key);
    if (found == source.end()) {
      if (is_strict) problems += fmt::format("\n  \"{}\": missing", key);
      continue;
    }
    const TensorSpec& expected = tensor.spec();
    if (found->second.shape != expected.shape)
      problems += fmt::format("\n  \"{}\": shape {}, expected {}", key, to_string(found->second.shape),
                              to_string(expected.shape));
    if (found->second.dtype != expected.dtype)
      problems +=
          fmt::format("\n  \"{}\": {}, expected {}", key, to_string(found->second.dtype), to_string(expected.dtype));
  }
  for (const auto& [key, declaration] : source)
    if (is_strict && !target.tensors.contains(key)) problems += fmt::format("\n  \"{}\": unexpected", key);
  if (!problems.empty()) throw MismatchError("the full state dict does not fit; nothing was loaded:" + problems);
}

StateDict with_optimizer(StateDict dict, const Optimizer& optimizer) {
  for (auto& [name, tensor] : optimizer.state()) dict.tensors.emplace("optim." + name, tensor);
  return dict;
}

/// What keeps `source` from being copied into `target`; empty: nothing.
std::string mismatch(const std::string& key, const DTensor& source, const DTensor& target) {
  if (source.spec().shape != target.spec().shape)
    return fmt::format("\n  \"{}\": shape {}, expected {}", key, to_string(source.spec().shape),
                       to_string(target.spec().shape));
  if (source.spec().dtype != target.spec().dtype)
    return fmt::format("\n  \"{}\": {}, expected {}", key, to_string(source.spec().dtype),
                       to_string(target.spec().dtype));
  if (source.box() != target.box())
    return fmt::format("\n  \"{}\": this rank's part is {} at {}, expected {} at {}", key,
                       to_string(source.box().extent), to_string(source.box().offset), to_string(target.box().extent),
                       to_string(target.box().offset));
  return {};
}

}  // namespace

StateDict state_dict(const Model& model) {
  return dict_of(detail::ModuleAccess::groups(model));
}

StateDict state_dict(const Model& model, const Optimizer& optimizer) {
  return with_optimizer(state_dict(model), optimizer);
}

StateDict state_dict(std::span<Module* const> modules) {
  return dict_of(detail::ModuleAccess::groups(modules));
}

StateDict state_dict(std::span<Module* const> modules, const Optimizer& optimizer) {
  return with_optimizer(state_dict(modules), optimizer);
}

StateDict get_sharded_state_dict(std::span<Module* const> modules) {
  return state_dict(modules);
}

void load_sharded_state_dict(std::span<Module* const> modules, const StateDict& source, bool strict,
                             const ExecutionSpace& exec) {
  const Groups groups = detail::ModuleAccess::groups(modules);
  const StateDict target = dict_of(groups);
  std::string problems;
  for (const auto& [key, tensor] : target.tensors) {
    const auto found = source.tensors.find(key);
    if (found != source.tensors.end())
      problems += mismatch(key, found->second, tensor);
    else if (strict)
      problems += fmt::format("\n  \"{}\": missing", key);
  }
  if (strict)
    for (const auto& [key, tensor] : source.tensors)
      if (!target.tensors.contains(key)) problems += fmt::format("\n  \"{}\": unexpected", key);
  if (!problems.empty()) throw MismatchError("the state dict does not fit the modules; nothing was loaded:" + problems);

  for (const auto& group : groups) group->require_no_scope("its parameters cannot be loaded");
  for (const auto& group : groups) group->invalidate(exec);
  for (const auto& [key, tensor] : target.tensors)
    if (const auto found = source.tensors.find(key); found != source.tensors.end())
      kernels::copy(exec, tensor.local(), found->second.local());
}

void merge(StateDict& dict, StateDict other) {
  for (const auto& [key, tensor] : other.tensors)
    if (dict.tensors.contains(key)) throw ConfigError(fmt::format("the state dict has a \"{}\" already", key));
  dict.tensors.merge(other.tensors);
  const auto both = [](std::function<void()> first, std::function<void()> second) -> std::function<void()> {
    if (!first || !second) return first ? first : second;
    return [first = std::move(first), second = std::move(second)] {
      first();
      second();
    };
  };
  dict.after_load = both(std::move(dict.after_load), std::move(other.after_load));
  dict.require_current = both(std::move(dict.require_current), std::move(other.require_current));
}

void add(StateDict& dict, const std::string& prefix, StateDict other) {
  std::map<std::string, DTensor> prefixed;
  for (auto& [key, tensor] : other.tensors) prefixed.emplace(fmt::format("{}.{}", prefix, key), std::move(tensor));
  other.tensors = std::move(prefixed);
  merge(dict, std::move(other));
}

void detail::check_ghosts(const std::string& name, const Shape& extents, const std::vector<std::int64_t>& ghosts) {
  bool fits = ghosts.size() == extents.size();
  for (std::size_t d = 0; fits && d < extents.size(); ++d) fits = ghosts[d] >= 0 && 2 * ghosts[d] <= extents[d];
  if (!fits)
    throw ShapeError(fmt::format("field \"{}\": {} ghost layers at both ends do not fit a View of {}", name,
                                 to_string(ghosts), to_string(extents)));
}

FullStateDict get_full_state_dict(const StateDict& state, bool rank0_only, const ExecutionSpace& exec) {
  if (state.require_current) state.require_current();
  FullStateDict result;
  for (const auto& [key, tensor] : state.tensors) {
    const Tensor full = full_tensor(tensor, exec);
    if (rank0_only && tensor.mesh().rank() != 0) continue;
    HostTensor host = HostTensor::uninitialized(full.dtype(), full.shape(), "fsdp2::full_state_dict");
    kernels::copy_to_host(exec, host.data(), full);
    result.emplace(key, std::move(host));
  }
  return result;
}

void load_full_state_dict(const StateDict& state, const FullStateDict& source, const LoadFullOptions& options,
                          const ExecutionSpace& exec) {
  if (state.require_current) state.require_current();
  if (state.tensors.empty()) throw ConfigError("the state dict has no tensors");
  const HostCommunicator& host = state.tensors.begin()->second.mesh().host();
  std::string text = encode(source);
  if (options.broadcast_from_rank0) host.broadcast(text, 0);
  const Declarations declarations = decode(text);
  host.collectively([&] { require_match(state, declarations, options.strict); });
  for (const auto& [key, tensor] : state.tensors) {
    const auto declared = declarations.find(key);
    if (declared == declarations.end()) continue;
    const auto& [dtype, shape] = declared->second;
    const Tensor full = Tensor::uninitialized(dtype, shape, "fsdp2::full_tensor");
    const DeviceMesh& mesh = tensor.mesh();
    const bool is_source = !options.broadcast_from_rank0 || mesh.rank() == 0;
    if (is_source) kernels::copy_from_host(exec, full, source.at(key).data());
    // From the origin of the mesh along the first axis, from there along the second, and so on.
    for (std::size_t axis = 0; axis < mesh.spec().dimensions() && options.broadcast_from_rank0; ++axis)
      mesh.communicator(axis).broadcast(exec, full, 0).wait();
    kernels::extract_box(exec, tensor.local(), full, tensor.box());
    compat::fence(exec, "fsdp2::load_full_state_dict");
  }
  if (state.after_load) state.after_load();
}

}  // namespace fsdp2
