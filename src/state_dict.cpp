// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/state_dict.hpp"

#include <fmt/format.h>

#include "fsdp2/error.hpp"
#include "kernels.hpp"
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
  dict.after_load = [groups = std::move(groups)] {
    for (const auto& group : groups) group->invalidate(ExecutionSpace());
  };
  return dict;
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

}  // namespace fsdp2
