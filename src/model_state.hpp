// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fsdp2/communicator.hpp"
#include "fsdp2/config.hpp"
#include "fsdp2/model.hpp"
#include "fsdp2/tensor.hpp"
#include "param_layout.hpp"

namespace fsdp2::detail {

class ParamGroup;

/// Bytes in use, and the most there have been.
struct Usage {
  std::int64_t now = 0;
  std::int64_t peak = 0;

  void add(std::int64_t bytes) {
    now += bytes;
    if (now > peak) peak = now;
  }
};

/// One of a plan's numbers.
using MemoryUse = std::int64_t MemoryPlan::*;

/// Bytes allocated by a model, by what they are for, and the most there have been.
struct Accounts {
  MemoryPlan now;
  MemoryPlan peak;

  void add(MemoryUse use, std::int64_t bytes) {
    now.*use += bytes;
    peak.*use = std::max(peak.*use, now.*use);
  }
};

/// Buffers of one size, large enough for every group: they are allocated when first needed, and then reused.
class BufferPool {
 public:
  BufferPool(std::string label, Usage& usage, Accounts& accounts, MemoryUse use)
      : label_(std::move(label)), usage_(&usage), accounts_(&accounts), use_(use) {}

  /// Later buffers have at least `bytes`.
  void reserve(std::int64_t bytes) { bytes_ = std::max(bytes_, bytes); }
  std::int64_t bytes() const { return bytes_; }
  /// Contents are undefined. Empty for 0 bytes.
  Tensor acquire(std::int64_t bytes);
  /// What reads and writes the buffer must be queued on the execution space already.
  void release(Tensor& buffer) noexcept;

 private:
  std::string label_;
  Usage* usage_;
  Accounts* accounts_;
  MemoryUse use_;
  std::int64_t bytes_ = 0;
  std::size_t lent_ = 0;
  std::vector<Tensor> free_;
};

/// A reduction in flight: at most one at a time.
struct PendingReduction {
  ParamGroup* group = nullptr;
  bool all_reduces = true;
  std::vector<Work> works;
  Tensor slot;
  Tensor packed;
};

/// The unsharded gradients of replicated parameters of one dtype, which the same ranks reduce. Zero where nothing was
/// added since the last reduction.
struct ReplicatedBucket {
  std::size_t binding = 0;
  DType dtype = DType::f32;
  std::int64_t count = 0;
  Tensor gradients;
};

/// What f16 gradients are divided by before they are added up, so that the sum does not overflow, and afterwards. Other
/// dtypes are divided once, at the end. The rule is PyTorch's: powers of two, while the first is the smaller one.
struct Divisors {
  double before = 1;
  double after = 1;
};
Divisors split_divisor(DType dtype, double divisor);

/// What the modules of a model share: buffers, recorded order, reductions.
class ModelState {
 public:
  /// Throws ConfigError.
  explicit ModelState(Config config);
  ModelState(const ModelState&) = delete;
  ModelState& operator=(const ModelState&) = delete;

  const Config& config() const { return config_; }
  const DeviceMesh& mesh() const { return *config_.mesh; }
  const std::vector<ParamGroup*>& groups() const { return groups_; }

  /// The ranks of a parameter. Collective where a reduce communicator is made.
  std::size_t bind(const std::optional<ParamMesh>& mesh);
  const std::vector<Binding>& bindings() const { return bindings_; }
  double divisor(const Binding& binding) const;
  /// Groups of `slices` neighbours on FSDP's axis. Collective when first called.
  Communicator& neighbours(std::size_t binding, std::int64_t slices);

  void add(ParamGroup* group);
  void remove(ParamGroup* group) noexcept;
  /// Keys of state dicts. Throws ConfigError, and reserves none, where one is taken.
  void reserve_keys(const std::vector<std::string>& keys);

  void record(ParamGroup* group);
  /// Takes the last forward of the group off the order, and returns the one before it: null if there is none.
  ParamGroup* take_from_order(ParamGroup* group);
  /// What followed the forward that was recorded last in the order of the last iteration: null if that differs.
  ParamGroup* next_forward() const;

  /// Whether policy allows one more gather ahead of its use.
  bool may_prefetch() const { return !config_.limit_all_gathers || ahead_.empty(); }
  void add_ahead(ParamGroup* group) { ahead_.push_back(group); }
  void remove_ahead(ParamGroup* group) noexcept { std::erase(ahead_, group); }
  /// Completes the gathers that policy started ahead; they stay there for their use.
  void complete_ahead(const ExecutionSpace& exec);
  /// Gives operations in flight a chance to progress.
  void poke();

  /// A place for `count` elements in one of the buckets, which grow later.
  static std::pair<std::size_t, std::int64_t> place_in_bucket(std::vector<ReplicatedBucket>& buckets,
                                                              std::size_t binding, DType dtype, std::int64_t count);
  /// Gives every group its parts. Must be called at the same place on all ranks.
  void prepare_buckets(const ExecutionSpace& exec);
  const ReplicatedBucket& bucket(std::size_t index) const { return buckets_[index]; }
  const std::vector<ReplicatedBucket>& buckets() const { return buckets_; }

  /// The reduction in flight must have been completed.
  void start_reduction(PendingReduction reduction);
  void complete_reduction(const ExecutionSpace& exec);
  /// Completes the reduction in flight, if it is the group's, without using its result.
  void drop_reduction(const ParamGroup* group);
  bool is_reducing(const ParamGroup* group) const { return pending_.group == group; }
  void finish_backward(const ExecutionSpace& exec);
  void reset(const ExecutionSpace& exec);

  void verify_replicas(const ExecutionSpace& exec);
  void broadcast_from(std::int64_t root, const ExecutionSpace& exec);
  MemoryPlan plan() const;

  void set_trace(std::function<void(const TraceEvent&)> trace) { trace_ = std::move(trace); }
  void trace(TraceEvent::Kind kind, const std::string& module) const {
    if (trace_) trace_({kind, module});
  }

  Usage unsharded;
  Usage reduction;
  Accounts accounts;
  BufferPool gather_slots{"fsdp2::gather_slot", unsharded, accounts, &MemoryPlan::unsharded};
  BufferPool gather_packs{"fsdp2::gather_pack", unsharded, accounts, &MemoryPlan::gather_packs};
  BufferPool reduce_slots{"fsdp2::reduce_slot", reduction, accounts, &MemoryPlan::reduce_slots};
  BufferPool reduce_packs{"fsdp2::reduce_pack", reduction, accounts, &MemoryPlan::reduce_packs};
  Tensor norm_parts;  // scratch of norms of gradients
  std::function<void(ShardedParam&)> on_gradient_ready;

 private:
  std::vector<ReplicatedBucket> plan_buckets() const;
  PendingReduction take_pending();
  void release(PendingReduction& done) noexcept;

  Config config_;
  std::vector<Binding> bindings_;
  std::vector<ParamGroup*> groups_;
  std::set<std::string> keys_;
  std::vector<ParamGroup*> order_;       // of the forwards whose backward is to come
  std::vector<ParamGroup*> recorded_;    // of all forwards since the last finish_backward
  std::vector<ParamGroup*> last_order_;  // of the iteration before
  std::vector<ParamGroup*> ahead_;
  PendingReduction pending_;
  std::vector<ReplicatedBucket> buckets_;
  std::function<void(const TraceEvent&)> trace_;
};

}  // namespace fsdp2::detail
