// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/gradients.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include "comm/check_mpi.hpp"
#include "comm/host_communicator.hpp"
#include "fsdp2/error.hpp"
#include "kernels.hpp"
#include "module_access.hpp"

namespace fsdp2 {

namespace {

using Groups = std::vector<std::shared_ptr<detail::ParamGroup>>;
using kernels::Term;

constexpr double infinity = std::numeric_limits<double>::infinity();

Term term_of(double norm_type) {
  if (norm_type == 1) return Term::magnitude;
  if (norm_type == 2) return Term::square;
  if (norm_type == infinity) return Term::maximum;
  throw ConfigError(fmt::format("ClipOptions::norm_type is {}: expected 1, 2 or infinity", norm_type));
}

/// NaN, once there, stays.
double combine(Term term, double a, double b) {
  if (term != Term::maximum) return a + b;
  return std::isnan(a) || a >= b ? a : b;
}

class MpiGroup {
 public:
  explicit MpiGroup(const HostCommunicator& comm) {
    check_mpi(MPI_Comm_group(comm.mpi(), &group_), "MPI_Comm_group", comm.name());
  }
  MpiGroup(const MpiGroup&) = delete;
  MpiGroup& operator=(const MpiGroup&) = delete;
  ~MpiGroup() { MPI_Group_free(&group_); }

  MPI_Group get() const { return group_; }

 private:
  MPI_Group group_ = MPI_GROUP_NULL;
};

/// Whether every rank of `part` is one of `whole`. Local.
bool covers(const DeviceMesh& whole, const DeviceMesh& part) {
  if (whole == part || part.size() == 1) return true;
  if (whole.size() < part.size()) return false;
  const MpiGroup all(whole.host());
  const MpiGroup some(part.host());
  MPI_Group missing = MPI_GROUP_NULL;
  check_mpi(MPI_Group_difference(some.get(), all.get(), &missing), "MPI_Group_difference", part.name());
  const bool is_covered = missing == MPI_GROUP_EMPTY;
  if (!is_covered) check_mpi(MPI_Group_free(&missing), "MPI_Group_free", part.name());
  return is_covered;
}

/// The mesh whose ranks include those of all the others.
const DeviceMesh& widest_mesh(const Groups& groups) {
  if (groups.empty()) throw ConfigError("there are no modules whose gradients could be looked at: give at least one");
  const DeviceMesh* widest = &groups.front()->model().mesh();
  const detail::ParamGroup* owner = groups.front().get();
  const auto for_each_mesh = [&](auto&& visit) {
    for (const auto& group : groups)
      for (const detail::Binding& binding : group->model().bindings()) visit(*group, binding.mesh);
  };
  for_each_mesh([&](const detail::ParamGroup& group, const DeviceMesh& mesh) {
    if (mesh.size() <= widest->size()) return;
    widest = &mesh;
    owner = &group;
  });
  for_each_mesh([&](const detail::ParamGroup& group, const DeviceMesh& mesh) {
    if (!covers(*widest, mesh))
      throw ConfigError(
          fmt::format("gradients of modules on meshes that do not cover each other cannot be summed: \"{}\" has ranks "
                      "that are not among the {} of \"{}\". Put one module on a mesh of all ranks",
                      group.name(), widest->size(), owner->name()));
  });
  return *widest;
}

void finish_backward(const Groups& groups, const ExecutionSpace& exec) {
  std::set<detail::ModelState*> models;
  for (const auto& group : groups)
    if (models.insert(&group->model()).second) group->model().finish_backward(exec);
}

/// What each group contributes on this rank.
std::vector<double> contributions(const Groups& groups, Term term, const ExecutionSpace& exec) {
  Tensor& parts = groups.front()->model().norm_parts;
  std::int64_t count = 0;
  for (const auto& group : groups) count += static_cast<std::int64_t>(group->layout().sections.size());
  if (parts.numel() < count) parts = Tensor::uninitialized(DType::u64, {count}, "fsdp2::norm_parts");
  const Tensor used = parts.slice(0, {count});
  kernels::zero(exec, used.buffer());
  std::int64_t next = 0;
  for (const auto& group : groups) {
    if (group->has_gradient()) group->make_gradients(exec);
    for (std::size_t s = 0; s < group->layout().sections.size(); ++s, ++next) {
      if (!group->has_gradient()) continue;
      // A maximum may look at replicas too, and finds what is not finite on one of them only.
      const Tensor& elements = term == Term::maximum ? group->held_elements(s) : group->counted_elements(s);
      kernels::reduce_segments(exec, used.slice(next, {}), group->section_gradients(group->layout().sections[s]),
                               elements, term);
    }
  }
  std::vector<double> by_section(static_cast<std::size_t>(count));
  kernels::copy_to_host(exec, reinterpret_cast<std::byte*>(by_section.data()), used);
  std::vector<double> values;
  values.reserve(groups.size());
  auto section = by_section.begin();
  for (const auto& group : groups) {
    double value = 0;
    for (std::size_t s = 0; s < group->layout().sections.size(); ++s) value = combine(term, value, *section++);
    values.push_back(value);
  }
  return values;
}

/// Throws on all ranks. Sums of f32 in f64 cannot overflow: a total that is not finite has an element that is not.
void throw_nonfinite(const HostCommunicator& host, const Groups& groups, double total, const std::vector<double>& own,
                     const std::vector<std::uint64_t>& by_rank) {
  const auto is_bad = [](double value) { return !std::isfinite(value); };
  const auto first = std::find_if(by_rank.begin(), by_rank.end(),
                                  [&](std::uint64_t bits) { return is_bad(std::bit_cast<double>(bits)); });
  const auto bad = std::find_if(own.begin(), own.end(), is_bad);
  const std::string module = bad == own.end() ? "" : groups[static_cast<std::size_t>(bad - own.begin())]->name();
  const Error error(fmt::format(
      "the norm of the gradients is {}: module \"{}\" has a gradient that is not finite. No gradient was changed; skip "
      "this step, or find what overflowed in the backward",
      total, module));
  host.agree_with(first - by_rank.begin(), std::make_exception_ptr(error));
}

/// The norm over all ranks, of finished gradients.
double global_norm(const Groups& groups, Term term, bool error_if_nonfinite, const ExecutionSpace& exec) {
  const HostCommunicator& host = widest_mesh(groups).host();
  finish_backward(groups, exec);
  const std::vector<double> own = contributions(groups, term, exec);
  double sum = 0;
  for (const double value : own) sum = combine(term, sum, value);
  // A sum of bits with zeros gathers the ranks' numbers, to be added in their order.
  std::vector<std::uint64_t> by_rank(static_cast<std::size_t>(host.size()));
  by_rank[static_cast<std::size_t>(host.rank())] = std::bit_cast<std::uint64_t>(sum);
  host.all_reduce(by_rank, MPI_SUM);
  double total = 0;
  for (const std::uint64_t bits : by_rank) total = combine(term, total, std::bit_cast<double>(bits));
  if (error_if_nonfinite && !std::isfinite(total)) throw_nonfinite(host, groups, total, own, by_rank);
  return term == Term::square ? std::sqrt(total) : total;
}

void scale_gradients(const Groups& groups, double factor, const ExecutionSpace& exec) {
  for (const auto& group : groups) {
    if (!group->has_gradient()) continue;
    group->make_gradients(exec);
    for (const detail::Section& section : group->layout().sections)
      if (section.trainable > 0) kernels::scale(exec, group->section_gradients(section), factor);
  }
}

double clip(const Groups& groups, double max_norm, const ClipOptions& options, const ExecutionSpace& exec) {
  const Term term = term_of(options.norm_type);
  if (!(max_norm >= 0)) throw ConfigError(fmt::format("max_norm is {}: expected a number of at least 0", max_norm));
  const double norm = global_norm(groups, term, options.error_if_nonfinite, exec);
  const double factor = max_norm / (norm + 1e-6);
  if (std::isfinite(norm) && factor < 1) scale_gradients(groups, factor, exec);
  return norm;
}

void require(bool condition, const char* name, double value, const char* expected) {
  if (!condition) throw ConfigError(fmt::format("GradScalerOptions::{} is {}: expected {}", name, value, expected));
}

}  // namespace

double clip_grad_norm(Model& model, double max_norm, const ClipOptions& options, const ExecutionSpace& exec) {
  return clip(detail::ModuleAccess::groups(model), max_norm, options, exec);
}

double clip_grad_norm(std::span<Module* const> modules, double max_norm, const ClipOptions& options,
                      const ExecutionSpace& exec) {
  return clip(detail::ModuleAccess::groups(modules), max_norm, options, exec);
}

void GradScaler::State::set(const GradScalerState& next) {
  if (!(std::isnormal(next.scale) && next.scale > 0))
    throw ConfigError(
        fmt::format("the scale of a GradScaler cannot be {}: expected a normal, positive f32 number", next.scale));
  if (next.growth_tracker < 0)
    throw ConfigError(
        fmt::format("the growth tracker of a GradScaler cannot be {}: expected at least 0", next.growth_tracker));
  values = next;
}

void GradScaler::State::store() const {
  const ExecutionSpace exec;
  kernels::copy_from_host(exec, scale, reinterpret_cast<const std::byte*>(&values.scale));
  kernels::copy_from_host(exec, growth_tracker, reinterpret_cast<const std::byte*>(&values.growth_tracker));
}

void GradScaler::State::fetch() {
  const ExecutionSpace exec;
  GradScalerState loaded;
  kernels::copy_to_host(exec, reinterpret_cast<std::byte*>(&loaded.scale), scale);
  kernels::copy_to_host(exec, reinterpret_cast<std::byte*>(&loaded.growth_tracker), growth_tracker);
  set(loaded);
}

GradScaler::GradScaler(const GradScalerOptions& options) : options_(options) {
  const auto init_scale = static_cast<float>(options.init_scale);
  require(std::isnormal(init_scale) && init_scale > 0, "init_scale", options.init_scale,
          "a normal, positive f32 number");
  require(std::isfinite(options.growth_factor) && options.growth_factor > 1, "growth_factor", options.growth_factor,
          "a number above 1");
  require(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor", options.backoff_factor,
          "a number above 0 and below 1");
  require(options.growth_interval > 0, "growth_interval", static_cast<double>(options.growth_interval), "at least 1");
  state_->values.scale = init_scale;
  state_->scale = Tensor::uninitialized(DType::f32, {}, "fsdp2::scaler_scale");
  state_->growth_tracker = Tensor::uninitialized(DType::i64, {}, "fsdp2::scaler_growth_tracker");
  state_->store();
}

GradScaler::Record* GradScaler::find(const detail::ParamGroup& group) {
  const auto found = std::find_if(records_.begin(), records_.end(),
                                  [&](const Record& record) { return record.group.get() == &group; });
  return found == records_.end() ? nullptr : &*found;
}

bool GradScaler::unscale(const Groups& groups, const ExecutionSpace& exec) {
  for (const auto& group : groups)
    if (find(*group) != nullptr)
      throw Error(
          fmt::format("the gradients of module \"{}\" were unscaled already: unscale them once, then call "
                      "update()",
                      group->name()));
  const double largest = global_norm(groups, Term::maximum, false, exec);
  // A scale below 1 can push what is finite out of range.
  const bool is_finite = std::isfinite(static_cast<float>(largest / scale()));
  if (is_finite) scale_gradients(groups, 1.0 / scale(), exec);
  for (const auto& group : groups) records_.push_back({group, is_finite, false});
  return is_finite;
}

bool GradScaler::unscale(Optimizer& optimizer, const ExecutionSpace& exec) {
  return unscale(detail::ModuleAccess::groups(optimizer), exec);
}

bool GradScaler::unscale(Model& model, const ExecutionSpace& exec) {
  return unscale(detail::ModuleAccess::groups(model), exec);
}

bool GradScaler::unscale(std::span<Module* const> modules, const ExecutionSpace& exec) {
  return unscale(detail::ModuleAccess::groups(modules), exec);
}

bool GradScaler::step(Optimizer& optimizer, const ExecutionSpace& exec) {
  const Groups groups = detail::ModuleAccess::groups(optimizer);
  Groups rest;
  for (const auto& group : groups) {
    const Record* record = find(*group);
    if (record == nullptr) {
      rest.push_back(group);
    } else if (record->has_stepped) {
      throw Error(fmt::format("module \"{}\" was stepped already: call update() after every step of the scaler",
                              group->name()));
    }
  }
  if (!rest.empty()) unscale(rest, exec);
  const bool is_finite = std::all_of(groups.begin(), groups.end(), [&](const auto& g) { return find(*g)->is_finite; });
  if (is_finite) optimizer.step(exec);
  for (const auto& group : groups) find(*group)->has_stepped = true;
  return is_finite;
}

void GradScaler::update() {
  if (records_.empty())
    throw Error("there is nothing to update the scale from: call step() or unscale() before update()");
  const bool is_finite = std::all_of(records_.begin(), records_.end(), [](const Record& r) { return r.is_finite; });
  records_.clear();
  auto [scale, tracker] = state_->values;
  tracker = is_finite ? tracker + 1 : 0;
  double factor = is_finite ? 1.0 : options_.backoff_factor;
  if (tracker >= options_.growth_interval) {
    factor = options_.growth_factor;
    tracker = 0;
  }
  const auto next = static_cast<float>(scale * factor);
  state_->set({std::isnormal(next) ? next : scale, tracker});
  state_->store();
}

void GradScaler::set_state(const GradScalerState& state) {
  state_->set(state);
  state_->store();
}

void GradScaler::add_to(StateDict& dict, const DeviceMesh& mesh) {
  const std::vector<Placement> replicated(mesh.spec().dimensions(), Replicate{});
  for (const auto& [key, tensor] :
       {std::pair{"scaler.scale", state_->scale}, std::pair{"scaler.growth_tracker", state_->growth_tracker}})
    if (!dict.tensors.emplace(key, DTensor::from_local(tensor, {tensor.dtype(), {}, replicated, {}}, mesh)).second)
      throw ConfigError(fmt::format("the state dict has a \"{}\" already", key));
  dict.after_load = [before = std::move(dict.after_load), state = state_] {
    if (before) before();
    state->fetch();
  };
}

}  // namespace fsdp2
