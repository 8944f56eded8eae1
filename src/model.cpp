// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/model.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "fsdp2/error.hpp"
#include "module_access.hpp"

namespace fsdp2 {

namespace detail {

std::vector<std::shared_ptr<ParamGroup>> ModuleAccess::groups(const Model& model) {
  std::vector<std::shared_ptr<ParamGroup>> groups;
  for (const auto& module : model.modules_) groups.push_back(module->group_);
  return groups;
}

std::vector<std::shared_ptr<ParamGroup>> ModuleAccess::groups(std::span<Module* const> modules) {
  std::vector<std::shared_ptr<ParamGroup>> groups;
  for (const Module* module : modules) {
    if (module == nullptr) throw ConfigError("a null pointer is among the modules");
    if (std::find(groups.begin(), groups.end(), module->group_) != groups.end())
      throw ConfigError(fmt::format("module \"{}\" appears twice among the modules", module->name()));
    groups.push_back(module->group_);
  }
  return groups;
}

}  // namespace detail

std::string_view to_string(TraceEvent::Kind kind) {
  switch (kind) {
    case TraceEvent::Kind::gather_issued:
      return "gather_issued";
    case TraceEvent::Kind::prefetch_issued:
      return "prefetch_issued";
    case TraceEvent::Kind::gather_completed:
      return "gather_completed";
    case TraceEvent::Kind::resharded:
      return "resharded";
    case TraceEvent::Kind::reduce_issued:
      return "reduce_issued";
    case TraceEvent::Kind::all_reduced:
      return "all_reduced";
    case TraceEvent::Kind::reduce_completed:
      return "reduce_completed";
    case TraceEvent::Kind::bucket_reduced:
      return "bucket_reduced";
  }
  return "unknown";
}

Model::Model(Config config) : state_(std::make_shared<detail::ModelState>(std::move(config))) {}

Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;
Model::~Model() = default;

Module& Model::add(std::string name, std::vector<ParamSpec> params, const ConfigOverrides& overrides,
                   const ExecutionSpace& exec) {
  Config config = state_->config();
  if (overrides.mp_policy) config.mp_policy = *overrides.mp_policy;
  if (overrides.reshard_after_forward) config.reshard_after_forward = *overrides.reshard_after_forward;
  if (overrides.min_shard_size) config.min_shard_size = *overrides.min_shard_size;
  if (overrides.direct_bytes) config.direct_bytes = *overrides.direct_bytes;
  if (overrides.max_bucket_bytes) config.max_bucket_bytes = *overrides.max_bucket_bytes;
  if (overrides.keep_unsharded_in_eval) config.keep_unsharded_in_eval = *overrides.keep_unsharded_in_eval;
  auto group =
      std::make_shared<detail::ParamGroup>(state_, detail::checked_module_name(std::move(name)), std::move(config));
  std::unique_ptr<Module> module(new Module(std::move(group)));
  fully_shard(*module, std::move(params), exec);
  return *modules_.emplace_back(std::move(module));
}

const Config& Model::config() const {
  return state_->config();
}

std::vector<Module*> Model::modules() const {
  std::vector<Module*> modules;
  for (const auto& module : modules_) modules.push_back(module.get());
  return modules;
}

Module& Model::module(std::string_view name) const {
  std::string names;
  for (const auto& module : modules_) {
    if (module->name() == name) return *module;
    names += (names.empty() ? "" : ", ") + module->name();
  }
  throw ConfigError(fmt::format("the model has no module \"{}\": it has {}", name, names.empty() ? "none" : names));
}

void Model::train() {
  for (const auto& module : modules_) module->train();
}

void Model::eval() {
  for (const auto& module : modules_) module->eval();
}

void Model::finish_backward(const ExecutionSpace& exec) {
  state_->finish_backward(exec);
}

void Model::reset(const ExecutionSpace& exec) {
  state_->reset(exec);
}

void Model::set_reshard_after_backward(bool value) {
  for (detail::ParamGroup* group : state_->groups()) group->set_reshard_after_backward(value);
}

void Model::set_requires_gradient_sync(bool value) {
  for (detail::ParamGroup* group : state_->groups()) group->set_requires_gradient_sync(value);
}

void Model::set_requires_all_reduce(bool value) {
  for (detail::ParamGroup* group : state_->groups()) group->set_requires_all_reduce(value);
}

void Model::set_gradient_divide_factor(double factor) {
  for (detail::ParamGroup* group : state_->groups()) group->set_gradient_divide_factor(factor);
}

void Model::set_on_gradient_ready(std::function<void(ShardedParam&)> hook) {
  state_->on_gradient_ready = std::move(hook);
}

void Model::verify_replicas(const ExecutionSpace& exec) {
  state_->verify_replicas(exec);
}

void Model::broadcast_from(std::int64_t root, const ExecutionSpace& exec) {
  state_->broadcast_from(root, exec);
}

MemoryPlan Model::plan_memory() const {
  return state_->plan();
}

const MemoryPlan& Model::peak_memory() const {
  return state_->accounts.peak;
}

void Model::zero_grad(const ExecutionSpace& exec) {
  for (const detail::ParamGroup* group : state_->groups()) group->require_finished();
  for (detail::ParamGroup* group : state_->groups()) group->zero_gradients(exec);
}

void Model::step(const StepFunction& update, const ExecutionSpace& exec) {
  finish_backward(exec);
  for (detail::ParamGroup* group : state_->groups()) group->require_no_scope("it cannot be updated");
  for (detail::ParamGroup* group : state_->groups()) group->step(update, true, exec);
}

MemoryStats Model::memory_stats() const {
  MemoryStats stats;
  for (const auto& module : modules_) {
    const MemoryStats part = module->memory_stats();
    stats.parameters += part.parameters;
    stats.sharded_parameters += part.sharded_parameters;
    stats.full_bytes += part.full_bytes;
    stats.local_bytes += part.local_bytes;
    stats.padding_bytes += part.padding_bytes;
    stats.gradient_bytes += part.gradient_bytes;
    stats.partial_bytes += part.partial_bytes;
  }
  stats.unsharded_bytes = state_->unsharded.now;
  stats.peak_unsharded_bytes = state_->unsharded.peak;
  stats.reduction_bytes = state_->reduction.now;
  stats.peak_reduction_bytes = state_->reduction.peak;
  return stats;
}

void Model::set_trace(std::function<void(const TraceEvent&)> trace) {
  state_->set_trace(std::move(trace));
}

}  // namespace fsdp2
