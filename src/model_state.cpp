// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "model_state.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "fsdp2/error.hpp"
#include "kernels.hpp"
#include "param_group.hpp"

namespace fsdp2::detail {

Tensor BufferPool::acquire(std::int64_t count) {
  if (count == 0) return {};
  reserve(count);
  // What is too small was made before a larger module was added.
  std::erase_if(free_, [&](const Tensor& buffer) { return buffer.numel() < count_; });
  Tensor buffer;
  if (free_.empty()) {
    free_.reserve(lent_ + 1);  // so that release cannot fail
    buffer = Tensor::uninitialized(DType::f32, {count_}, label_);
  } else {
    buffer = std::move(free_.back());
    free_.pop_back();
  }
  ++lent_;
  usage_->add(buffer.bytes());
  return buffer;
}

void BufferPool::release(Tensor& buffer) noexcept {
  if (buffer.numel() == 0) return;
  usage_->add(-buffer.bytes());
  --lent_;
  free_.push_back(std::move(buffer));
  buffer = {};
}

ModelState::ModelState(Config config) : config_(std::move(config)) {
  config_.validate();
  communicator_ = &mesh().communicator(config_.mesh_dim_name);
  mesh().set_axis_role(config_.mesh_dim_name, AxisRole::shard);
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

ParamGroup* ModelState::take_from_order(ParamGroup* group) {
  const auto found = std::find(order_.rbegin(), order_.rend(), group);
  if (found == order_.rend()) return nullptr;
  const auto position = order_.erase(std::next(found).base());
  return position == order_.begin() ? nullptr : *std::prev(position);
}

void ModelState::poke() {
  pending_.work.test();
  for (ParamGroup* group : ahead_) group->poke();
}

void ModelState::prepare_bucket(const ExecutionSpace& exec) {
  std::int64_t count = bucket_.numel();
  for (ParamGroup* group : groups_) count = group->place_in_bucket(count);
  if (count == bucket_.numel()) return;
  for (const ParamGroup* group : groups_)
    if (group->has_open_backward())
      throw Error(
          fmt::format("a module that was added after the first backward cannot begin its own while a backward scope of "
                      "module \"{}\" is open",
                      group->name()));
  const Tensor larger(exec, DType::f32, {count}, "fsdp2::replicated_gradients");
  kernels::copy(exec, larger.slice(0, {bucket_.numel()}), bucket_);
  reduction.add(larger.bytes() - bucket_.bytes());
  bucket_ = larger;
}

void ModelState::start_reduction(PendingReduction next, std::span<const Transfer> transfers,
                                 const ExecutionSpace& exec) {
  next.work = communicator_->reduce_scatter(exec, transfers, ReduceOp::sum);
  pending_ = std::move(next);
  trace(TraceEvent::Kind::reduce_issued, pending_.group->name());
}

void ModelState::complete_reduction(const ExecutionSpace& exec) {
  if (pending_.group == nullptr) return;
  PendingReduction done = std::move(pending_);
  pending_ = {};
  done.work.wait();
  done.group->take_reduction(done.slot, exec);
  reduce_slots.release(done.slot);
  reduce_packs.release(done.packed);
  trace(TraceEvent::Kind::reduce_completed, done.group->name());
}

void ModelState::drop_reduction(const ParamGroup* group) {
  if (pending_.group == nullptr || pending_.group != group) return;
  PendingReduction done = std::move(pending_);
  pending_ = {};
  done.work.wait();
  reduce_slots.release(done.slot);
  reduce_packs.release(done.packed);
}

void ModelState::finish_backward(const ExecutionSpace& exec) {
  std::string unfinished;
  for (const ParamGroup* group : groups_)
    if (const char* reason = group->unfinished())
      unfinished += fmt::format("\n  module \"{}\": {}", group->name(), reason);
  if (!unfinished.empty())
    throw Error("the backward cannot be finished, since gradients were not reduced:" + unfinished +
                "\nCall reduce() in the last backward scope of each module, or Model::reset() to drop the gradients");

  complete_reduction(exec);
  // All ranks mark the same groups, since all reduce the same modules.
  const bool is_bucket_used =
      std::any_of(groups_.begin(), groups_.end(), [](const ParamGroup* group) { return group->wants_bucket(); });
  if (is_bucket_used) {
    communicator_->all_reduce(exec, bucket_, ReduceOp::sum).wait();
    for (ParamGroup* group : groups_) group->take_bucket(exec);
    kernels::zero(exec, bucket_.buffer());
    trace(TraceEvent::Kind::bucket_reduced, "");
  }
  order_.clear();
  for (ParamGroup* group : groups_) group->drain(exec);
}

void ModelState::reset(const ExecutionSpace& exec) {
  if (pending_.group != nullptr) drop_reduction(pending_.group);
  for (ParamGroup* group : groups_) group->reset(exec);
  if (bucket_.numel() > 0) kernels::zero(exec, bucket_.buffer());
  order_.clear();
}

}  // namespace fsdp2::detail
