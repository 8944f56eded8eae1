// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp2/communicator.hpp"
#include "fsdp2/config.hpp"
#include "fsdp2/model.hpp"
#include "fsdp2/tensor.hpp"

namespace fsdp2::detail {

class ParamGroup;

/// Where parameters begin in buffers, in f32 elements: 64 bytes.
inline constexpr std::int64_t buffer_alignment = 16;

/// Bytes in use, and the most there have been.
struct Usage {
  std::int64_t now = 0;
  std::int64_t peak = 0;

  void add(std::int64_t bytes) {
    now += bytes;
    if (now > peak) peak = now;
  }
};

/// f32 buffers of one size, large enough for every group: they are allocated when first needed, and then reused.
class BufferPool {
 public:
  BufferPool(std::string label, Usage& usage) : label_(std::move(label)), usage_(&usage) {}

  /// Later buffers have at least `count` elements.
  void reserve(std::int64_t count) { count_ = std::max(count_, count); }
  /// Contents are undefined. Empty for count 0.
  Tensor acquire(std::int64_t count);
  /// What reads and writes the buffer must be queued on the execution space already.
  void release(Tensor& buffer) noexcept;

 private:
  std::string label_;
  Usage* usage_;
  std::int64_t count_ = 0;
  std::size_t lent_ = 0;
  std::vector<Tensor> free_;
};

/// A reduction in flight: at most one at a time.
struct PendingReduction {
  ParamGroup* group = nullptr;
  Work work;
  Tensor slot;
  Tensor packed;
};

/// What the modules of a model share: buffers, recorded order, reductions.
class ModelState {
 public:
  /// Throws ConfigError.
  explicit ModelState(Config config);
  ModelState(const ModelState&) = delete;
  ModelState& operator=(const ModelState&) = delete;

  const Config& config() const { return config_; }
  const DeviceMesh& mesh() const { return *config_.mesh; }
  Communicator& communicator() const { return *communicator_; }
  std::int64_t ranks() const { return communicator_->size(); }
  double divisor() const { return config_.gradient_divide_factor.value_or(static_cast<double>(ranks())); }
  const std::vector<ParamGroup*>& groups() const { return groups_; }

  void add(ParamGroup* group);
  void remove(ParamGroup* group) noexcept;
  /// Keys of state dicts. Throws ConfigError, and reserves none, where one is taken.
  void reserve_keys(const std::vector<std::string>& keys);

  void record(ParamGroup* group) { order_.push_back(group); }
  /// Takes the last forward of the group off the order, and returns the one before it: null if there is none.
  ParamGroup* take_from_order(ParamGroup* group);

  /// Whether policy allows one more gather ahead of its use.
  bool may_prefetch() const { return !config_.limit_all_gathers || ahead_.empty(); }
  void add_ahead(ParamGroup* group) { ahead_.push_back(group); }
  void remove_ahead(ParamGroup* group) noexcept { std::erase(ahead_, group); }
  /// Gives operations in flight a chance to progress.
  void poke();

  /// Gives every group a part of the bucket of replicated gradients. Must be called at the same place on all ranks.
  void prepare_bucket(const ExecutionSpace& exec);
  /// Zero where nothing was added since the last reduction.
  const Tensor& bucket() const { return bucket_; }

  /// The reduction in flight must have been completed.
  void start_reduction(PendingReduction reduction, std::span<const Transfer> transfers, const ExecutionSpace& exec);
  void complete_reduction(const ExecutionSpace& exec);
  /// Completes the reduction in flight, if it is the group's, without using its result.
  void drop_reduction(const ParamGroup* group);
  void finish_backward(const ExecutionSpace& exec);
  void reset(const ExecutionSpace& exec);

  void set_trace(std::function<void(const TraceEvent&)> trace) { trace_ = std::move(trace); }
  void trace(TraceEvent::Kind kind, const std::string& module) const {
    if (trace_) trace_({kind, module});
  }

  Usage unsharded;
  Usage reduction;
  BufferPool gather_slots{"fsdp2::gather_slot", unsharded};
  BufferPool gather_packs{"fsdp2::gather_pack", unsharded};
  BufferPool reduce_slots{"fsdp2::reduce_slot", reduction};
  BufferPool reduce_packs{"fsdp2::reduce_pack", reduction};
  Tensor norm_parts;  // scratch of norms of gradients

 private:
  Config config_;
  Communicator* communicator_;
  std::vector<ParamGroup*> groups_;
  std::set<std::string> keys_;
  std::vector<ParamGroup*> order_;
  std::vector<ParamGroup*> ahead_;
  PendingReduction pending_;
  Tensor bucket_;
  std::function<void(const TraceEvent&)> trace_;
};

}  // namespace fsdp2::detail
