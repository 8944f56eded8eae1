// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/optimizer.hpp"

#include <fmt/format.h>

#include <cmath>
#include <set>

#include "fsdp2/error.hpp"
#include "kernels.hpp"
#include "kokkos_compat.hpp"
#include "module_access.hpp"

namespace fsdp2 {

namespace {

/// Written so that NaN is refused.
void require_nonnegative(const char* name, double value) {
  if (!(std::isfinite(value) && value >= 0))
    throw ConfigError(fmt::format("{} is {}: expected a number of at least 0", name, value));
}

void require_fraction(const char* name, double value) {
  if (!(value >= 0 && value < 1))
    throw ConfigError(fmt::format("{} is {}: expected at least 0, and less than 1", name, value));
}

const SgdOptions& checked(const SgdOptions& options) {
  require_nonnegative("SgdOptions::momentum", options.momentum);
  require_nonnegative("SgdOptions::weight_decay", options.weight_decay);
  return options;
}

const AdamWOptions& checked(const AdamWOptions& options) {
  require_fraction("AdamWOptions::beta1", options.beta1);
  require_fraction("AdamWOptions::beta2", options.beta2);
  require_nonnegative("AdamWOptions::weight_decay", options.weight_decay);
  // Padding has zero gradients: only with eps > 0 does it stay zero.
  if (!(std::isfinite(options.eps) && static_cast<float>(options.eps) > 0))
    throw ConfigError(fmt::format("AdamWOptions::eps is {}: expected a number above 0 in f32", options.eps));
  return options;
}

std::vector<std::string> buffers_of(const SgdOptions& options) {
  if (options.momentum == 0) return {};
  return {"momentum_buffer"};
}

}  // namespace

std::vector<std::shared_ptr<detail::ParamGroup>> detail::ModuleAccess::groups(const Optimizer& optimizer) {
  std::vector<std::shared_ptr<ParamGroup>> groups;
  for (const Optimizer::Entry& entry : optimizer.entries_) groups.push_back(entry.group);
  return groups;
}

Optimizer::Optimizer(const Model& model, std::vector<std::string> buffers, double lr)
    : Optimizer(detail::ModuleAccess::groups(model), std::move(buffers), lr) {
  model_ = detail::ModuleAccess::state(model);
}

Optimizer::Optimizer(std::span<Module* const> modules, std::vector<std::string> buffers, double lr)
    : Optimizer(detail::ModuleAccess::groups(modules), std::move(buffers), lr) {}

Optimizer::Optimizer(std::vector<std::shared_ptr<detail::ParamGroup>> groups, std::vector<std::string> buffers,
                     double lr)
    : names_(std::move(buffers)) {
  set_lr(lr);
  if (groups.empty()) throw ConfigError("an optimizer needs at least one module: add the modules before it is made");
  const ExecutionSpace exec;
  for (std::shared_ptr<detail::ParamGroup>& group : groups) {
    group->mark_used();
    Entry entry;
    for (std::size_t i = 0; i < names_.size(); ++i)
      entry.buffers.emplace_back(exec, DType::f32, Shape{group->trainable_count()}, "fsdp2::optimizer_state");
    entry.group = std::move(group);
    entries_.push_back(std::move(entry));
  }
  step_ = Tensor(exec, DType::i64, {}, "fsdp2::optimizer_step");
  compat::fence(exec, "fsdp2::optimizer_state");
}

Optimizer::~Optimizer() = default;

void Optimizer::set_lr(double lr) {
  require_nonnegative("the learning rate", lr);
  lr_ = lr;
}

void Optimizer::step(const ExecutionSpace& exec) {
  if (model_ && model_->groups().size() != entries_.size())
    throw Error("modules were added to the model after the optimizer was made: make it after them");
  std::set<detail::ModelState*> models;
  for (const Entry& entry : entries_)
    if (models.insert(&entry.group->model()).second) entry.group->model().finish_backward(exec);
  for (const Entry& entry : entries_) entry.group->require_no_scope("it cannot be updated");

  kernels::increment(exec, step_);
  begin_step(exec, step_);
  for (const Entry& entry : entries_) {
    if (!entry.group->has_gradient()) continue;
    entry.group->invalidate(exec);
    update(exec, entry.group->trainable_shards(), entry.group->trainable_gradients(exec), entry.buffers);
  }
}

void Optimizer::zero_grad(const ExecutionSpace& exec) {
  for (const Entry& entry : entries_) entry.group->require_finished();
  for (const Entry& entry : entries_) entry.group->zero_gradients(exec);
}

std::map<std::string, DTensor> Optimizer::state() const {
  std::map<std::string, DTensor> state;
  const DeviceMesh& mesh = entries_.front().group->model().mesh();
  const std::vector<Placement> replicated(mesh.spec().dimensions(), Replicate{});
  state.emplace("step", DTensor::from_local(step_, {DType::i64, {}, replicated, {}}, mesh));
  for (const Entry& entry : entries_)
    for (const detail::Param& param : entry.group->params()) {
      if (!param.requires_grad) continue;
      for (std::size_t i = 0; i < names_.size(); ++i) {
        const std::string key = names_[i] + "." + entry.group->key(param);
        if (!state.emplace(key, entry.group->trainable_part(entry.buffers[i], param)).second)
          throw ConfigError(
              fmt::format("two parameters have the key \"{}\": rename a module", entry.group->key(param)));
      }
    }
  return state;
}

Sgd::Sgd(const Model& model, SgdOptions options)
    : Optimizer(model, buffers_of(checked(options)), options.lr), options_(options) {}

Sgd::Sgd(std::span<Module* const> modules, SgdOptions options)
    : Optimizer(modules, buffers_of(checked(options)), options.lr), options_(options) {}

void Sgd::begin_step(const ExecutionSpace&, const Tensor&) {}

void Sgd::update(const ExecutionSpace& exec, const Tensor& parameters, const Tensor& gradients,
                 std::span<const Tensor> buffers) {
  if (buffers.empty())
    kernels::sgd(exec, parameters, gradients, lr(), options_.weight_decay);
  else
    kernels::sgd_momentum(exec, parameters, gradients, buffers[0], lr(), options_.momentum, options_.weight_decay);
}

AdamW::AdamW(const Model& model, AdamWOptions options)
    : Optimizer(model, {"exp_avg", "exp_avg_sq"}, options.lr), options_(checked(options)) {}

AdamW::AdamW(std::span<Module* const> modules, AdamWOptions options)
    : Optimizer(modules, {"exp_avg", "exp_avg_sq"}, options.lr), options_(checked(options)) {}

void AdamW::begin_step(const ExecutionSpace& exec, const Tensor& step) {
  if (scalars_.numel() == 0) scalars_ = Tensor::uninitialized(DType::f32, {2}, "fsdp2::adamw_scalars");
  kernels::adamw_scalars(exec, scalars_, step, lr(), options_.beta1, options_.beta2);
}

void AdamW::update(const ExecutionSpace& exec, const Tensor& parameters, const Tensor& gradients,
                   std::span<const Tensor> buffers) {
  kernels::adamw(exec, parameters, gradients, buffers[0], buffers[1], scalars_, 1 - lr() * options_.weight_decay,
                 options_.beta1, options_.beta2, options_.eps);
}

}  // namespace fsdp2
