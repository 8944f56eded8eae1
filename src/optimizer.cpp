// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/optimizer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

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

void check(const SgdOptions& options) {
  require_nonnegative("SgdOptions::momentum", options.momentum);
  require_nonnegative("SgdOptions::weight_decay", options.weight_decay);
}

void check(const AdamWOptions& options) {
  require_fraction("AdamWOptions::beta1", options.beta1);
  require_fraction("AdamWOptions::beta2", options.beta2);
  require_nonnegative("AdamWOptions::weight_decay", options.weight_decay);
  // Padding has zero gradients: only with eps > 0 does it stay zero.
  if (!(std::isfinite(options.eps) && static_cast<float>(options.eps) > 0))
    throw ConfigError(fmt::format("AdamWOptions::eps is {}: expected a number above 0 in f32", options.eps));
}

/// By parameter group, those of the rest in front.
template <class Options, class Group>
std::vector<Options> options_of(const Options& rest, const std::vector<Group>& groups) {
  std::vector<Options> options{rest};
  for (const Group& group : groups) options.push_back(group.options);
  for (const Options& each : options) check(each);
  return options;
}

template <class Options, class Group>
std::vector<double> rates_of(const Options& rest, const std::vector<Group>& groups) {
  std::vector<double> rates;
  for (const Options& options : options_of(rest, groups)) rates.push_back(options.lr);
  return rates;
}

template <class Group>
std::vector<ParamFilter> filters_of(const std::vector<Group>& groups) {
  std::vector<ParamFilter> filters;
  for (const Group& group : groups) {
    if (!group.filter) throw ConfigError("a parameter group of an optimizer has no filter");
    filters.push_back(group.filter);
  }
  return filters;
}

std::vector<std::string> buffers_of(const SgdOptions& rest, const std::vector<SgdGroup>& groups) {
  for (const SgdOptions& options : options_of(rest, groups))
    if (options.momentum != 0) return {"momentum_buffer"};
  return {};
}

DType state_dtype(DType parameter) {
  return parameter == DType::f64 ? DType::f64 : DType::f32;
}

}  // namespace

std::vector<std::shared_ptr<detail::ParamGroup>> detail::ModuleAccess::groups(const Optimizer& optimizer) {
  std::vector<std::shared_ptr<ParamGroup>> groups;
  for (const Optimizer::Entry& entry : optimizer.entries_) groups.push_back(entry.group);
  return groups;
}

Optimizer::Optimizer(const Model& model, std::vector<std::string> buffers, std::vector<double> lrs,
                     std::vector<ParamFilter> filters)
    : Optimizer(detail::ModuleAccess::groups(model), std::move(buffers), std::move(lrs), filters) {
  model_ = detail::ModuleAccess::state(model);
}

Optimizer::Optimizer(std::span<Module* const> modules, std::vector<std::string> buffers, std::vector<double> lrs,
                     std::vector<ParamFilter> filters)
    : Optimizer(detail::ModuleAccess::groups(modules), std::move(buffers), std::move(lrs), filters) {}

Optimizer::Optimizer(std::vector<std::shared_ptr<detail::ParamGroup>> groups, std::vector<std::string> buffers,
                     std::vector<double> lrs, const std::vector<ParamFilter>& filters)
    : names_(std::move(buffers)), lrs_(std::move(lrs)) {
  for (std::size_t group = 0; group < lrs_.size(); ++group) set_lr(lrs_[group], group);
  if (groups.empty()) throw ConfigError("an optimizer needs at least one module: add the modules before it is made");
  const ExecutionSpace exec;
  for (std::shared_ptr<detail::ParamGroup>& group : groups) {
    group->mark_used();
    Entry entry;
    entry.group = std::move(group);
    for (std::size_t i = 0; i < entry.group->params().size(); ++i) {
      const ShardedParam param = entry.group->handle(i);
      const auto first =
          std::find_if(filters.begin(), filters.end(), [&](const auto& filter) { return filter(param); });
      entry.groups.push_back(first == filters.end() ? 0 : static_cast<std::size_t>(first - filters.begin()) + 1);
    }
    lay_out(entry, exec);
    entries_.push_back(std::move(entry));
  }
  step_ = Tensor(exec, DType::i64, {}, "fsdp2::optimizer_step");
  compat::fence(exec, "fsdp2::optimizer_state");
}

Tensor Optimizer::Entry::slice(const Tensor& buffer, std::size_t section, std::int64_t start, Shape shape) const {
  const DType dtype = state_dtype(group->layout().sections[section].dtype);
  const std::int64_t size = size_of(dtype);
  const Tensor bytes = buffer.slice(section_bytes[section] + start * size, {numel(shape) * size});
  return bytes.as(dtype, std::move(shape));
}

DTensor Optimizer::Entry::part(const Tensor& buffer, std::size_t param) const {
  const detail::Param& of = group->param(param);
  TensorSpec spec = of.spec;
  spec.dtype = state_dtype(of.dtype);
  return DTensor::from_local(slice(buffer, of.section, starts[param], of.shard.local().shape()), std::move(spec),
                             of.shard.mesh());
}

void Optimizer::lay_out(Entry& entry, const ExecutionSpace& exec) const {
  detail::ParamGroup& group = *entry.group;
  const std::vector<detail::Param>& params = group.params();
  const Entry old = entry;
  entry.layout_version = group.layout_version();
  entry.runs.clear();
  entry.starts.assign(params.size(), -1);
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < params.size(); ++i)  // what was trained once keeps its state
    if (params[i].requires_grad || (!old.starts.empty() && old.starts[i] >= 0)) order.push_back(i);
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::tuple(params[a].section, params[a].start, a) < std::tuple(params[b].section, params[b].start, b);
  });

  std::vector<std::int64_t> counts(group.layout().sections.size(), 0);
  for (const std::size_t i : order) {
    const detail::Param& param = params[i];
    std::int64_t& count = counts[param.section];
    const bool is_packed = param.is_sharded && !param.is_direct;
    entry.starts[i] = is_packed ? count : align_up(count, detail::section_alignment);
    count = entry.starts[i] + param.shard_count;
    if (!param.requires_grad || param.shard_count == 0) continue;
    Run* const last = entry.runs.empty() ? nullptr : &entry.runs.back();
    if (last != nullptr && last->section == param.section && last->group == entry.groups[i] &&
        last->start - last->train_start == param.start - param.train_start &&
        last->start - last->state_start == param.start - entry.starts[i])
      last->count = param.start + param.shard_count - last->start;
    else
      entry.runs.push_back(
          {param.section, entry.groups[i], param.start, param.train_start, entry.starts[i], param.shard_count});
  }
  std::int64_t bytes = 0;
  entry.section_bytes.clear();
  for (std::size_t s = 0; s < counts.size(); ++s) {
    entry.section_bytes.push_back(align_up(bytes, detail::buffer_alignment));
    bytes = entry.section_bytes.back() + counts[s] * size_of(state_dtype(group.layout().sections[s].dtype));
  }
  entry.buffers.clear();
  for (std::size_t b = 0; b < names_.size(); ++b) {
    entry.buffers.push_back(group.allocate_state(exec, bytes));
    for (std::size_t i = 0; i < old.starts.size(); ++i)
      if (old.starts[i] >= 0)
        kernels::copy(exec, entry.part(entry.buffers[b], i).local(), old.part(old.buffers[b], i).local());
  }
}

Optimizer::~Optimizer() = default;

void Optimizer::set_lr(double lr, std::size_t group) {
  require_nonnegative("the learning rate", lr);
  if (group >= lrs_.size())
    throw ConfigError(fmt::format("there is no parameter group {}: the optimizer has {}", group, lrs_.size()));
  lrs_[group] = lr;
}

void Optimizer::step(const ExecutionSpace& exec) {
  if (model_ && model_->groups().size() != entries_.size())
    throw Error("modules were added to the model after the optimizer was made: make it after them");
  std::set<detail::ModelState*> models;
  for (const Entry& entry : entries_)
    if (models.insert(&entry.group->model()).second) entry.group->model().finish_backward(exec);
  for (const Entry& entry : entries_) entry.group->require_no_scope("it cannot be updated");

  if (is_strict_) {
    std::string missing;
    for (const Entry& entry : entries_)
      for (const detail::Param& param : entry.group->params())
        if (param.requires_grad && !param.has_gradient) missing += "\n  " + entry.group->key(param);
    if (!missing.empty())
      throw Error("these parameters have no gradient; run their backward, or freeze them:" + missing);
  }

  kernels::increment(exec, step_);
  begin_step(exec, step_);
  for (Entry& entry : entries_) {
    detail::ParamGroup& group = *entry.group;
    if (!group.has_gradient()) continue;
    if (entry.layout_version != group.layout_version()) lay_out(entry, exec);
    group.invalidate(exec);
    group.make_gradients(exec);
    std::vector<Tensor> buffers(entry.buffers.size());
    for (const Run& run : entry.runs) {
      for (std::size_t b = 0; b < buffers.size(); ++b)
        buffers[b] = entry.slice(entry.buffers[b], run.section, run.state_start, {run.count});
      const detail::Section& section = group.layout().sections[run.section];
      update(exec, run.group, group.shards_of(section, {run.start, run.start + run.count}),
             group.section_gradients(section).slice(run.train_start, {run.count}), buffers);
    }
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
    for (std::size_t p = 0; p < entry.starts.size(); ++p) {
      const detail::Param& param = entry.group->param(p);
      if (entry.starts[p] < 0 || param.is_ignored) continue;
      for (std::size_t i = 0; i < names_.size(); ++i) {
        const std::string key = names_[i] + "." + entry.group->key(param);
        if (!state.emplace(key, entry.part(entry.buffers[i], p)).second)
          throw ConfigError(
              fmt::format("two parameters have the key \"{}\": rename a module", entry.group->key(param)));
      }
    }
  return state;
}

Sgd::Sgd(const Model& model, SgdOptions options, const std::vector<SgdGroup>& groups)
    : Optimizer(model, buffers_of(options, groups), rates_of(options, groups), filters_of(groups)),
      options_(options_of(options, groups)) {}

Sgd::Sgd(std::span<Module* const> modules, SgdOptions options, const std::vector<SgdGroup>& groups)
    : Optimizer(modules, buffers_of(options, groups), rates_of(options, groups), filters_of(groups)),
      options_(options_of(options, groups)) {}

void Sgd::begin_step(const ExecutionSpace&, const Tensor&) {}

void Sgd::update(const ExecutionSpace& exec, std::size_t group, const Tensor& parameters, const Tensor& gradients,
                 std::span<const Tensor> buffers) {
  const SgdOptions& options = options_[group];
  if (options.momentum == 0)
    kernels::sgd(exec, parameters, gradients, lr(group), options.weight_decay);
  else
    kernels::sgd_momentum(exec, parameters, gradients, buffers[0], lr(group), options.momentum, options.weight_decay);
}

AdamW::AdamW(const Model& model, AdamWOptions options, const std::vector<AdamWGroup>& groups)
    : Optimizer(model, {"exp_avg", "exp_avg_sq"}, rates_of(options, groups), filters_of(groups)),
      options_(options_of(options, groups)) {}

AdamW::AdamW(std::span<Module* const> modules, AdamWOptions options, const std::vector<AdamWGroup>& groups)
    : Optimizer(modules, {"exp_avg", "exp_avg_sq"}, rates_of(options, groups), filters_of(groups)),
      options_(options_of(options, groups)) {}

void AdamW::begin_step(const ExecutionSpace& exec, const Tensor& step) {
  const auto groups = static_cast<std::int64_t>(options_.size());
  if (scalars_.numel() == 0) scalars_ = Tensor::uninitialized(DType::f64, {2 * groups}, "fsdp2::adamw_scalars");
  for (std::int64_t group = 0; group < groups; ++group) {
    const auto index = static_cast<std::size_t>(group);
    kernels::adamw_scalars(exec, scalars_.slice(2 * group, {2}), step, lr(index), options_[index].beta1,
                           options_[index].beta2);
  }
}

void AdamW::update(const ExecutionSpace& exec, std::size_t group, const Tensor& parameters, const Tensor& gradients,
                   std::span<const Tensor> buffers) {
  const AdamWOptions& options = options_[group];
  kernels::adamw(exec, parameters, gradients, buffers[0], buffers[1],
                 scalars_.slice(2 * static_cast<std::int64_t>(group), {2}), 1 - lr(group) * options.weight_decay,
                 options.beta1, options.beta2, options.eps);
}

}  // namespace fsdp2
