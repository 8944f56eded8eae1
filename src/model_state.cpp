// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "model_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "comm/host_communicator.hpp"
#include "fsdp2/error.hpp"
#include "kernels.hpp"
#include "param_group.hpp"

namespace fsdp2::detail {

Tensor BufferPool::acquire(std::int64_t bytes) {
  if (bytes == 0) return {};
  reserve(bytes);
  // What is too small was made before a larger module was added.
  for (Tensor& buffer : free_)
    if (buffer.bytes() < bytes_) accounts_->add(use_, -std::exchange(buffer, {}).bytes());
  std::erase_if(free_, [&](const Tensor& buffer) { return buffer.bytes() == 0; });
  Tensor buffer;
  if (free_.empty()) {
    free_.reserve(lent_ + 1);  // so that release cannot fail
    buffer = Tensor::uninitialized(DType::u8, {bytes_}, label_);
    accounts_->add(use_, bytes_);
  } else {
    buffer = std::move(free_.back());
    free_.pop_back();
  }
  ++lent_;
  usage_->add(buffer.bytes());
  return buffer;
}

void BufferPool::release(Tensor& buffer) noexcept {
  if (buffer.bytes() == 0) return;
  usage_->add(-buffer.bytes());
  --lent_;
  free_.push_back(std::move(buffer));
  buffer = {};
}

Divisors split_divisor(DType dtype, double divisor) {
  if (dtype != DType::f16) return {1, divisor};
  double before = 1;
  while (std::fmod(divisor, before) == 0 && divisor / before > before) before *= 2;
  return {before, divisor / before};
}

ModelState::ModelState(Config config) : config_(std::move(config)) {
  config_.validate();
  bind(std::nullopt);
  mesh().set_axis_role(config_.mesh_dim_name, AxisRole::shard);
  if (config_.replicate_dim_name) mesh().set_axis_role(*config_.replicate_dim_name, AxisRole::replicate);
}

std::size_t ModelState::bind(const std::optional<ParamMesh>& given) {
  const ParamMesh own{mesh(), config_.mesh_dim_name, config_.replicate_dim_name, {}};
  const ParamMesh& wanted = given ? *given : own;
  Config checked{.mesh = wanted.mesh, .mesh_dim_name = wanted.mesh_dim_name};
  checked.replicate_dim_name = wanted.replicate_dim_name;
  checked.gradient_divide_factor = wanted.gradient_divide_factor;
  checked.validate();

  Binding binding;
  binding.mesh = wanted.mesh;
  binding.axis = wanted.mesh.spec().axis(wanted.mesh_dim_name);
  if (wanted.replicate_dim_name) binding.replicate_axis = wanted.mesh.spec().axis(*wanted.replicate_dim_name);
  binding.divide_factor = wanted.gradient_divide_factor;
  for (std::size_t i = 0; i < bindings_.size(); ++i)
    if (bindings_[i].mesh == binding.mesh && bindings_[i].axis == binding.axis &&
        bindings_[i].replicate_axis == binding.replicate_axis && bindings_[i].divide_factor == binding.divide_factor)
      return i;
  binding.shard = binding.reduce = &binding.mesh.communicator(binding.axis);
  if (config_.separate_reduce_communicator)
    binding.reduce = &binding.mesh.derived(wanted.mesh_dim_name + " (reduce)", *binding.shard, 0);
  if (binding.replicate_axis && binding.mesh.spec().axes()[*binding.replicate_axis].size > 1)
    binding.replicate = &binding.mesh.communicator(*binding.replicate_axis);
  bindings_.push_back(std::move(binding));
  return bindings_.size() - 1;
}

double ModelState::divisor(const Binding& binding) const {
  if (binding.divide_factor) return *binding.divide_factor;
  return config_.gradient_divide_factor.value_or(static_cast<double>(binding.ranks() * binding.replicas()));
}

Communicator& ModelState::neighbours(std::size_t index, std::int64_t slices) {
  const Binding& binding = bindings_[index];
  return binding.mesh.derived(fmt::format("{} (groups of {})", binding.mesh.spec().axes()[binding.axis].name, slices),
                              *binding.shard, binding.shard->rank() / slices);
}

void ModelState::add(ParamGroup* group) {
  for (const ParamGroup* other : groups_)
    if (other->name() == group->name())
      throw ConfigError(fmt::format("the model already has a module \"{}\"", group->name()));
  groups_.push_back(group);
}

void ModelState::remove(ParamGroup* group) noexcept {
  std::erase(groups_, group);
  std::erase(order_, group);
  std::erase(recorded_, group);
  std::erase(last_order_, group);
  std::erase(ahead_, group);
  if (pending_.group == group) pending_ = {};
}

void ModelState::reserve_keys(const std::vector<std::string>& keys) {
  for (const std::string& key : keys)
    if (keys_.contains(key))
      throw ConfigError(
          fmt::format("two parameters of the model would have the key \"{}\" in its state dict: rename one", key));
  keys_.insert(keys.begin(), keys.end());
}

void ModelState::record(ParamGroup* group) {
  order_.push_back(group);
  recorded_.push_back(group);
}

ParamGroup* ModelState::take_from_order(ParamGroup* group) {
  const auto found = std::find(order_.rbegin(), order_.rend(), group);
  if (found == order_.rend()) return nullptr;
  const auto position = order_.erase(std::next(found).base());
  return position == order_.begin() ? nullptr : *std::prev(position);
}

ParamGroup* ModelState::next_forward() const {
  const std::size_t next = recorded_.size();
  return next < last_order_.size() && last_order_[next - 1] == recorded_.back() ? last_order_[next] : nullptr;
}

void ModelState::complete_ahead(const ExecutionSpace& exec) {
  for (ParamGroup* group : ahead_)
    if (group->is_prefetched()) group->complete_gather(exec);
}

void ModelState::poke() {
  for (Work& work : pending_.works) work.test();
  for (ParamGroup* group : ahead_) group->poke();
}

std::pair<std::size_t, std::int64_t> ModelState::place_in_bucket(std::vector<ReplicatedBucket>& buckets,
                                                                 std::size_t binding, DType dtype, std::int64_t count) {
  const auto found = std::find_if(buckets.begin(), buckets.end(), [&](const ReplicatedBucket& bucket) {
    return bucket.binding == binding && bucket.dtype == dtype;
  });
  const auto index = static_cast<std::size_t>(found - buckets.begin());
  if (found == buckets.end()) buckets.push_back({binding, dtype, 0, {}});
  ReplicatedBucket& bucket = buckets[index];
  const std::int64_t start = bucket.count;
  bucket.count = align_up(checked_add(start, count), section_alignment);
  return {index, start};
}

void ModelState::prepare_buckets(const ExecutionSpace& exec) {
  for (ParamGroup* group : groups_) group->place_in_buckets(buckets_);
  for (ReplicatedBucket& bucket : buckets_) {
    if (bucket.gradients.numel() == bucket.count) continue;
    for (const ParamGroup* group : groups_)
      if (group->has_open_backward())
        throw Error(fmt::format(
            "a module that was added after the first backward cannot begin its own while a backward scope of "
            "module \"{}\" is open",
            group->name()));
    const Tensor larger(exec, bucket.dtype, {bucket.count}, "fsdp2::replicated_gradients");
    kernels::copy(exec, larger.slice(0, {bucket.gradients.numel()}), bucket.gradients);
    reduction.add(larger.bytes() - bucket.gradients.bytes());
    accounts.add(&MemoryPlan::replicated_gradients, larger.bytes() - bucket.gradients.bytes());
    bucket.gradients = larger;
  }
}

PendingReduction ModelState::take_pending() {
  PendingReduction done = std::move(pending_);
  pending_ = {};
  for (Work& work : done.works) work.wait();
  return done;
}

void ModelState::release(PendingReduction& done) noexcept {
  reduce_slots.release(done.slot);
  reduce_packs.release(done.packed);
}

void ModelState::start_reduction(PendingReduction next) {
  pending_ = std::move(next);
  trace(TraceEvent::Kind::reduce_issued, pending_.group->name());
}

void ModelState::complete_reduction(const ExecutionSpace& exec) {
  if (pending_.group == nullptr) return;
  PendingReduction done = take_pending();
  done.group->take_reduction(done.slot, done.all_reduces, exec);
  release(done);
  trace(TraceEvent::Kind::reduce_completed, done.group->name());
  if (done.all_reduces) done.group->report_gradients(true, exec);
}

void ModelState::drop_reduction(const ParamGroup* group) {
  if (pending_.group == nullptr || pending_.group != group) return;
  PendingReduction done = take_pending();
  release(done);
}

void ModelState::finish_backward(const ExecutionSpace& exec) {
  complete_reduction(exec);
  std::string unfinished;
  for (const ParamGroup* group : groups_)
    if (const char* reason = group->unfinished())
      unfinished += fmt::format("\n  module \"{}\": {}", group->name(), reason);
  if (!unfinished.empty())
    throw Error("the backward cannot be finished, since gradients were not reduced:" + unfinished +
                "\nCall reduce() in the last backward scope of each module, or Model::reset() to drop the gradients");

  // All ranks mark the same groups, since all reduce the same modules.
  const bool is_bucket_used =
      std::any_of(groups_.begin(), groups_.end(), [](const ParamGroup* group) { return group->wants_bucket(); });
  if (is_bucket_used) {
    for (const ParamGroup* group : groups_) group->divide_buckets(exec);
    for (const ReplicatedBucket& bucket : buckets_) {
      const Binding& binding = bindings_[bucket.binding];
      for (Communicator* const ranks : {binding.reduce, binding.replicate})
        if (ranks != nullptr) ranks->set_context("replicated gradients");
      binding.reduce->all_reduce(exec, bucket.gradients, ReduceOp::sum).wait();
      if (binding.replicate != nullptr) binding.replicate->all_reduce(exec, bucket.gradients, ReduceOp::sum).wait();
    }
    for (ParamGroup* group : groups_) group->take_buckets(exec);
    for (const ReplicatedBucket& bucket : buckets_) kernels::zero(exec, bucket.gradients.buffer());
    trace(TraceEvent::Kind::bucket_reduced, "");
    for (ParamGroup* group : groups_) group->report_gradients(false, exec);
  }
  order_.clear();
  if (!recorded_.empty()) last_order_ = std::exchange(recorded_, {});
  for (ParamGroup* group : groups_) group->drain(exec);
}

void ModelState::reset(const ExecutionSpace& exec) {
  if (pending_.group != nullptr) drop_reduction(pending_.group);
  for (ParamGroup* group : groups_) group->reset(exec);
  for (const ReplicatedBucket& bucket : buckets_) kernels::zero(exec, bucket.gradients.buffer());
  order_.clear();
  recorded_.clear();
}

namespace {

/// Every tensor of which axes of its mesh hold replicas.
template <class Visitor>
void for_each_replica(const std::vector<ParamGroup*>& groups, Visitor&& visit) {
  const auto visit_axes = [&](const std::string& key, const DTensor& tensor) {
    const std::vector<MeshAxis>& axes = tensor.mesh().spec().axes();
    for (std::size_t axis = 0; axis < axes.size(); ++axis)
      if (std::holds_alternative<Replicate>(tensor.spec().placements[axis]) && axes[axis].size > 1)
        visit(key, tensor, axes[axis], tensor.mesh().communicator(axis));
  };
  for (const ParamGroup* group : groups) {
    for (const Param& param : group->params())
      if (!param.is_ignored) visit_axes(group->key(param), param.shard);
    for (const auto& [name, buffer] : group->buffers()) visit_axes(group->key_of(name), buffer);
  }
}

}  // namespace

void ModelState::verify_replicas(const ExecutionSpace& exec) {
  std::string problems;
  for_each_replica(
      groups_, [&](const std::string& key, const DTensor& tensor, const MeshAxis& axis, Communicator& replicas) {
        const Tensor& local = tensor.local();
        const Tensor first = Tensor::uninitialized(local.dtype(), local.shape(), "fsdp2::replica");
        kernels::copy(exec, first, local);
        replicas.broadcast(exec, first, 0).wait();
        const std::int64_t differences = kernels::count_differences(exec, first, local);
        if (differences > 0)
          problems += fmt::format("\n  \"{}\": {} bytes on rank {} differ from those at index 0 of axis \"{}\"", key,
                                  differences, mesh().rank(), axis.name);
      });
  std::string all;
  for (const std::string& text : mesh().host().all_gather(problems)) all += text;
  if (!all.empty())
    throw Error("replicas differ:" + all +
                "\nMake them equal by Model::broadcast_from, or find what updates them apart");
}

void ModelState::broadcast_from(std::int64_t root, const ExecutionSpace& exec) {
  for (const ParamGroup* group : groups_) group->require_no_scope("its parameters cannot be replaced");
  for_each_replica(groups_, [&](const std::string& key, const DTensor&, const MeshAxis& axis, Communicator&) {
    if (root < 0 || root >= axis.size)
      throw ConfigError(fmt::format("\"{}\" cannot be broadcast from index {} of axis \"{}\", which has {} ranks", key,
                                    root, axis.name, axis.size));
  });
  for (ParamGroup* group : groups_) group->invalidate(exec);
  for_each_replica(groups_, [&](const std::string&, const DTensor& tensor, const MeshAxis&, Communicator& replicas) {
    replicas.broadcast(exec, tensor.local(), root).wait();
  });
}

}  // namespace fsdp2::detail
