// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <vector>

#include "model_state.hpp"
#include "param_group.hpp"

namespace fsdp2::detail {

namespace {

/// How many buffers of a pool are lent at once.
struct Count {
  std::int64_t now = 0;
  std::int64_t peak = 0;

  void add(std::int64_t number) {
    now += number;
    peak = std::max(peak, now);
  }
};

/// The receive buffers of a host communicator: the i-th is as large as the i-th largest that any operation takes at
/// once.
class Scratch {
 public:
  explicit Scratch(const Communicator& communicator) : ranks_(communicator.size()) {}

  /// One reduce-scatter of some transfers, given by the bytes they send: the other ranks' parts of each are received.
  void take_reduce_scatter(std::vector<std::int64_t> transfers) {
    for (std::int64_t& bytes : transfers) bytes -= bytes / ranks_;
    take(std::move(transfers));
  }
  /// An all-reduce is a reduce-scatter and an all-gather of a padded copy.
  void take_all_reduce(std::int64_t count, DType dtype) {
    if (count == 0) return;
    const std::int64_t bytes = chunk_size(count, ranks_) * ranks_ * size_of(dtype);
    take({bytes, bytes - bytes / ranks_});
  }
  std::int64_t total() const { return std::accumulate(buffers_.begin(), buffers_.end(), std::int64_t{0}); }

 private:
  /// One operation's buffers.
  void take(std::vector<std::int64_t> sizes) {
    if (ranks_ == 1) return;  // what is copied needs none
    std::sort(sizes.begin(), sizes.end(), std::greater<>());
    if (buffers_.size() < sizes.size()) buffers_.resize(sizes.size(), 0);
    for (std::size_t i = 0; i < sizes.size(); ++i)
      buffers_[i] = std::max(buffers_[i], align_up(sizes[i], buffer_alignment));
  }

  std::int64_t ranks_;
  std::vector<std::int64_t> buffers_;
};

/// Two iterations of the canonical schedule, on counts only: the second has an order to prefetch by.
class Rehearsal {
 public:
  Rehearsal(const Config& config, const std::vector<ParamGroup*>& groups) : config_(config) {
    for (const ParamGroup* group : groups) states_.push_back({group});
    for (int iteration = 0; iteration < 2; ++iteration) {
      for (std::size_t i = 0; i < states_.size(); ++i) forward(i, iteration > 0);
      for (std::size_t i = states_.size(); i-- > 0;) backward(i);
      if (is_reducing_) slots_reduced_.add(-1);
      is_reducing_ = false;
      for (State& state : states_) drop(state);
    }
  }

  std::int64_t gather_slots() const { return slots_.peak; }
  std::int64_t gather_packs() const { return packs_.peak; }
  std::int64_t reduce_slots() const { return slots_reduced_.peak; }

 private:
  struct State {
    const ParamGroup* group;
    bool is_gathered = false;
    bool has_pack = false;
    bool has_slice = false;
    bool is_ahead = false;
  };

  void issue(State& state, bool is_ahead) {
    if (state.is_gathered || state.group->layout().gather_slot == 0) return;
    state.is_gathered = true;
    state.is_ahead = is_ahead;
    state.has_pack = !state.has_slice && state.group->layout().gather_pack > 0;
    if (!state.group->keeps_unsharded()) slots_.add(1);
    if (state.has_pack) packs_.add(1);
  }
  void complete(State& state) {
    if (state.has_pack) packs_.add(-1);
    state.has_pack = state.has_slice = state.is_ahead = false;
  }
  void drop(State& state) {
    complete(state);
    if (state.is_gathered && !state.group->keeps_unsharded()) slots_.add(-1);
    state.is_gathered = false;
  }
  void prefetch(State& state) {
    const bool is_one_ahead = std::any_of(states_.begin(), states_.end(), [](const State& s) { return s.is_ahead; });
    if (!config_.limit_all_gathers || !is_one_ahead) issue(state, true);
  }
  void forward(std::size_t i, bool has_order) {
    issue(states_[i], false);
    complete(states_[i]);
    if (states_[i].group->config().forward_prefetch && has_order && i + 1 < states_.size()) prefetch(states_[i + 1]);
    if (states_[i].group->keeps_unsharded()) return;
    drop(states_[i]);
    states_[i].has_slice = states_[i].group->slices() > 0;
  }
  void backward(std::size_t i) {
    const BackwardPrefetch policy = states_[i].group->config().backward_prefetch;
    issue(states_[i], false);
    complete(states_[i]);
    if (policy == BackwardPrefetch::pre && i > 0) prefetch(states_[i - 1]);
    const bool reduces = states_[i].group->has_reduction();
    if (reduces) slots_reduced_.add(1);
    if (!states_[i].group->keeps_unsharded() || states_[i].group->has_trainable()) drop(states_[i]);
    if (reduces && is_reducing_) slots_reduced_.add(-1);
    is_reducing_ = is_reducing_ || reduces;
    if (policy == BackwardPrefetch::post && i > 0) prefetch(states_[i - 1]);
  }

  const Config& config_;
  std::vector<State> states_;
  Count slots_;
  Count packs_;
  Count slots_reduced_;
  bool is_reducing_ = false;
};

}  // namespace

std::vector<ReplicatedBucket> ModelState::plan_buckets() const {
  std::vector<ReplicatedBucket> buckets;
  for (const ParamGroup* group : groups_)
    for (const Section& section : group->layout().sections)
      if (section.is_bucketed()) place_in_bucket(buckets, section.binding, section.reduce_dtype, section.trainable);
  return buckets;
}

MemoryPlan ModelState::plan() const {
  MemoryPlan plan;
  std::int64_t gather_slot = 0;
  std::int64_t gather_pack = 0;
  std::int64_t reduce_slot = 0;
  std::int64_t reduce_pack = 0;
  for (const ParamGroup* group : groups_) {
    const Layout& layout = group->layout();
    plan.shards += layout.shards;
    plan.tables += group->table_bytes();
    if (group->has_trainable()) plan.gradients += layout.gradients;
    if (group->keeps_unsharded())
      plan.unsharded += layout.gather_slot == 0 ? 0 : group->slot_bytes();
    else
      gather_slot = std::max(gather_slot, group->slot_bytes());
    if (group->slices() > 0) plan.unsharded += group->slot_bytes() / group->slices();
    gather_pack = std::max(gather_pack, layout.gather_pack);
    reduce_slot = std::max(reduce_slot, layout.reduce_slot);
    reduce_pack = std::max(reduce_pack, layout.reduce_pack);
  }
  const Rehearsal rehearsal(config_, groups_);
  plan.unsharded += rehearsal.gather_slots() * gather_slot;
  plan.gather_packs = rehearsal.gather_packs() * gather_pack;
  plan.reduce_slots = rehearsal.reduce_slots() * reduce_slot;
  plan.reduce_packs = reduce_pack;
  const std::vector<ReplicatedBucket> buckets = plan_buckets();
  for (const ReplicatedBucket& bucket : buckets) plan.replicated_gradients += bucket.count * size_of(bucket.dtype);

  std::map<const Communicator*, Scratch> scratch;
  const auto scratch_of = [&](const Communicator& communicator) -> Scratch& {
    return scratch.try_emplace(&communicator, communicator).first->second;
  };
  for (auto group = groups_.rbegin(); group != groups_.rend(); ++group) {
    const auto transfers = (*group)->reduction_transfers();
    for (std::size_t binding = 0; binding < transfers.size(); ++binding)
      scratch_of(*bindings_[binding].reduce).take_reduce_scatter(transfers[binding]);
    for (const Section& section : (*group)->layout().sections)
      if (section.is_sharded && bindings_[section.binding].replicate != nullptr)
        scratch_of(*bindings_[section.binding].replicate).take_all_reduce(section.trainable, section.reduce_dtype);
  }
  for (const ReplicatedBucket& bucket : buckets) {
    const Binding& binding = bindings_[bucket.binding];
    scratch_of(*binding.reduce).take_all_reduce(bucket.count, bucket.dtype);
    if (binding.replicate != nullptr) scratch_of(*binding.replicate).take_all_reduce(bucket.count, bucket.dtype);
  }
  for (const auto& [communicator, buffers] : scratch) plan.communication += buffers.total();
  return plan;
}

}  // namespace fsdp2::detail
