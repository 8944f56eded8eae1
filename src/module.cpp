// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/module.hpp"

#include <fmt/format.h>

#include <limits>

#include "fsdp2/error.hpp"
#include "fsdp2/log.hpp"
#include "kernels.hpp"
#include "module_access.hpp"

namespace fsdp2 {

namespace {

std::vector<detail::ParamGroup*> prefetch_list(const detail::ParamGroup& group, const std::vector<Module*>& modules) {
  std::vector<detail::ParamGroup*> list;
  for (const auto& other : detail::ModuleAccess::groups(modules)) {
    if (&other->model() != &group.model())
      throw ConfigError(fmt::format("module \"{}\" cannot prefetch module \"{}\", which is not of its model",
                                    group.name(), other->name()));
    list.push_back(other.get());
  }
  return list;
}

}  // namespace

double MemoryStats::reduction_percent() const {
  return full_bytes == 0 ? 0.0 : 100.0 * static_cast<double>(saved_bytes()) / static_cast<double>(full_bytes);
}

double MemoryStats::ratio() const {
  if (full_bytes == 0) return 1.0;
  if (local_bytes == 0) return std::numeric_limits<double>::infinity();
  return static_cast<double>(full_bytes) / static_cast<double>(local_bytes);
}

// Scopes.

Scope::Scope(std::shared_ptr<detail::ParamGroup> group, const ExecutionSpace& exec, std::uint64_t lease)
    : group_(std::move(group)), exec_(exec), lease_(lease) {}

Scope::Scope(Scope&& other) noexcept
    : group_(std::move(other.group_)), exec_(other.exec_), lease_(std::exchange(other.lease_, 0)) {}

Scope& Scope::operator=(Scope&& other) noexcept {
  if (this == &other) return *this;
  end();
  group_ = std::move(other.group_);
  exec_ = other.exec_;
  lease_ = std::exchange(other.lease_, 0);
  return *this;
}

Scope::~Scope() {
  end();
}

void Scope::end() noexcept {
  if (lease_ != 0) group_->end(std::exchange(lease_, 0), exec_);
}

void Scope::require_live() const {
  if (group_ == nullptr) throw Error("this scope was moved from");
  if (!group_->is_live(lease_))
    throw Error(
        fmt::format("this scope of module \"{}\" has ended: parameters and gradients are lent until reduce(), hold(), "
                    "end(), Model::reset() or the scope's destructor",
                    group_->name()));
}

Tensor Scope::tensor(std::string_view name) const {
  require_live();
  const detail::Param& param = group_->param(group_->find(name));
  group_->use_gather(exec_);
  return group_->full(param);
}

Tensor Scope::input(const Tensor& tensor) const {
  require_live();
  const MixedPrecisionPolicy& policy = group_->config().mp_policy;
  return group_->cast_for_scope(tensor, policy.cast_inputs ? policy.param_dtype : std::nullopt, exec_);
}

Tensor Scope::output(const Tensor& tensor) const {
  require_live();
  return group_->cast_for_scope(tensor, group_->config().mp_policy.output_dtype, exec_);
}

LentTensor BackwardScope::grad_tensor(std::string_view name) {
  require_live();
  return group_->lend(group_->find(name), exec_);
}

void BackwardScope::reduce() {
  require_live();
  group_->reduce(exec_);
  lease_ = 0;
}

void BackwardScope::hold() {
  require_live();
  group_->hold(exec_);
  lease_ = 0;
}

// Modules.

Module::Module(std::string name, const Config& config)
    : Module(std::make_shared<detail::ParamGroup>(std::make_shared<detail::ModelState>(config),
                                                  detail::checked_module_name(std::move(name)), config)) {}

Module::Module(std::shared_ptr<detail::ParamGroup> group) : group_(std::move(group)) {}

Module::~Module() = default;

const std::string& Module::name() const {
  return group_->name();
}

const Config& Module::config() const {
  return group_->config();
}

ShardedParam Module::add_param(ParamSpec spec, const ExecutionSpace& exec) {
  const std::string name = spec.name;
  group_->add({std::move(spec)}, exec);
  return {group_, group_->find(name)};
}

std::vector<ShardedParam> Module::params() const {
  std::vector<ShardedParam> handles;
  for (std::size_t i = 0; i < group_->params().size(); ++i) handles.push_back(ShardedParam(group_, i));
  return handles;
}

ShardedParam Module::param(std::string_view name) const {
  return {group_, group_->find(name)};
}

void Module::train() {
  group_->set_training(true);
}

void Module::eval() {
  group_->set_training(false);
}

bool Module::is_training() const {
  return group_->is_training();
}

std::int64_t Module::forward_count() const {
  return group_->forward_count();
}

Scope Module::forward(const ExecutionSpace& exec) {
  return {group_, exec, group_->begin_forward(exec)};
}

BackwardScope Module::backward(const ExecutionSpace& exec) {
  return {group_, exec, group_->begin_backward(exec, true)};
}

Scope Module::unshard(const ExecutionSpace& exec) {
  return {group_, exec, group_->begin_unshard(exec, false)};
}

Scope Module::unshard(const UnshardOptions& options, const ExecutionSpace& exec) {
  return {group_, exec, options.writeback ? group_->begin_writeback(exec) : group_->begin_unshard(exec, false)};
}

Scope Module::unshard_async(const ExecutionSpace& exec) {
  return {group_, exec, group_->begin_unshard(exec, true)};
}

void Module::pre_forward(const ExecutionSpace& exec) {
  forward_hook_ = forward(exec);
}

void Module::post_forward() {
  forward_hook_.reset();
}

void Module::pre_backward(const ExecutionSpace& exec) {
  backward_hook_ = backward(exec);
}

void Module::post_backward(const std::map<std::string, Tensor>& gradients, const ExecutionSpace& exec) {
  for (const auto& [name, gradient] : gradients)
    group_->check_full_gradient(group_->param(group_->find(name)), gradient);
  // Who has the gradients already needs no parameters for them.
  if (!backward_hook_) backward_hook_ = BackwardScope(group_, exec, group_->begin_backward(exec, false));
  for (const auto& [name, gradient] : gradients) {
    const LentTensor lent = backward_hook_->grad_tensor(name);
    const Tensor flat = lent.tensor.slice(0, {gradient.numel()});
    kernels::accumulate(exec, flat, gradient, 1.0, lent.beta != 0);
  }
  backward_hook_->reduce();
  backward_hook_.reset();
}

void Module::set_reshard_after_forward(ReshardAfterForward value) {
  group_->set_reshard_after_forward(value);
}

void Module::set_reshard_after_backward(bool value) {
  group_->set_reshard_after_backward(value);
}

void Module::set_unshard_in_backward(bool value) {
  group_->set_unshard_in_backward(value);
}

void Module::set_requires_gradient_sync(bool value) {
  group_->set_requires_gradient_sync(value);
}

void Module::set_requires_all_reduce(bool value) {
  group_->set_requires_all_reduce(value);
}

void Module::set_gradient_divide_factor(double factor) {
  group_->set_gradient_divide_factor(factor);
}

void Module::set_modules_to_forward_prefetch(const std::vector<Module*>& modules) {
  group_->set_forward_prefetch(prefetch_list(*group_, modules));
}

void Module::set_modules_to_backward_prefetch(const std::vector<Module*>& modules) {
  group_->set_backward_prefetch(prefetch_list(*group_, modules));
}

void Module::add_buffer(std::string name, const Tensor& value, const ExecutionSpace& exec) {
  group_->add_buffer(std::move(name), value, exec);
}

const Tensor& Module::buffer(std::string_view name) const {
  return group_->buffer(name);
}

void Module::finish_backward(const ExecutionSpace& exec) {
  group_->model().finish_backward(exec);
}

void Module::step(const StepFunction& update, const ExecutionSpace& exec) {
  finish_backward(exec);
  group_->step(update, false, exec);
}

void Module::zero_grad(const ExecutionSpace& exec) {
  group_->zero_gradients(exec);
}

MemoryStats Module::memory_stats() const {
  return group_->memory_stats();
}

void fully_shard(Module& module, std::vector<ParamSpec> params, const ExecutionSpace& exec) {
  const std::shared_ptr<detail::ParamGroup>& group = detail::ModuleAccess::group(module);
  group->add(params, exec);
  log(LogLevel::info, group->summary());
}

std::unique_ptr<Module> make_module(std::string name, std::vector<ParamSpec> params, const Config& config,
                                    const ExecutionSpace& exec) {
  auto module = std::make_unique<Module>(std::move(name), config);
  fully_shard(*module, std::move(params), exec);
  return module;
}

}  // namespace fsdp2
