// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp2/communicator.hpp"
#include "fsdp2/dtensor.hpp"
#include "fsdp2/module.hpp"
#include "model_state.hpp"
#include "param_layout.hpp"

namespace fsdp2::detail {

/// The name itself. Throws ConfigError for one that is empty, unprintable, or reserved by state dicts.
std::string checked_module_name(std::string name);

/// A module's parameters: their shards, the gather and the reduction of all of them.
class ParamGroup : public std::enable_shared_from_this<ParamGroup> {
 public:
  /// Throws ConfigError for a bad config, a bad or repeated name.
  ParamGroup(std::shared_ptr<ModelState> model, std::string name, Config config);
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;
  ~ParamGroup();

  /// Throws ConfigError or ShapeError, with nothing added.
  void add(const std::vector<ParamSpec>& specs, const ExecutionSpace& exec);
  void add_buffer(std::string name, const Tensor& value, const ExecutionSpace& exec);

  ModelState& model() const { return *model_; }
  const std::string& name() const { return name_; }
  const Config& config() const { return config_; }
  const std::vector<Param>& params() const { return params_; }
  const Param& param(std::size_t index) const { return params_[index]; }
  ShardedParam handle(std::size_t index) { return {shared_from_this(), index}; }
  const Layout& layout() const { return layout_; }
  /// Counts the calls of add, which move shards.
  std::int64_t additions() const { return additions_; }
  /// Counts the changes of requires_grad, which move gradients.
  std::int64_t layout_version() const { return layout_version_; }
  const std::map<std::string, DTensor, std::less<>>& buffers() const { return buffers_; }
  const Tensor& buffer(std::string_view name) const;
  std::string key(const Param& param) const { return key_of(param.name); }
  std::string key_of(const std::string& name) const;
  /// Throws ConfigError, which lists the names.
  std::size_t find(std::string_view name) const;
  bool is_training() const { return is_training_; }
  void set_training(bool is_training);
  std::int64_t forward_count() const { return forward_count_; }
  MemoryStats memory_stats() const;
  std::string summary() const;

  // Settings.
  void set_requires_grad(std::size_t index, bool requires_grad, const ExecutionSpace& exec);
  void set_reshard_after_forward(ReshardAfterForward value);
  void set_reshard_after_backward(bool value) { reshards_after_backward_ = value; }
  void set_unshard_in_backward(bool value) { unshards_in_backward_ = value; }
  void set_requires_gradient_sync(bool value) { requires_gradient_sync_ = value; }
  void set_requires_all_reduce(bool value) { requires_all_reduce_ = value; }
  void set_gradient_divide_factor(double factor);
  void set_forward_prefetch(std::vector<ParamGroup*> groups) { forward_prefetch_ = std::move(groups); }
  void set_backward_prefetch(std::vector<ParamGroup*> groups) { backward_prefetch_ = std::move(groups); }

  // Phases. A lease is a number that stands for a scope: while there is one, the parameters stay gathered.
  std::uint64_t begin_forward(const ExecutionSpace& exec);
  std::uint64_t begin_backward(const ExecutionSpace& exec, bool gathers);
  std::uint64_t begin_unshard(const ExecutionSpace& exec, bool is_async);
  std::uint64_t begin_writeback(const ExecutionSpace& exec);
  bool is_live(std::uint64_t lease) const;
  void end(std::uint64_t lease, const ExecutionSpace& exec) noexcept;
  LentTensor lend(std::size_t index, const ExecutionSpace& exec);
  /// The tensor itself, or a copy in memory that is valid until the last scope ends.
  Tensor cast_for_scope(const Tensor& tensor, std::optional<DType> dtype, const ExecutionSpace& exec);
  void reduce(const ExecutionSpace& exec);
  void hold(const ExecutionSpace& exec);

  /// Local: nothing, unless a gather is in flight.
  void complete_gather(const ExecutionSpace& exec);
  /// The same, by who needs the parameters now.
  void use_gather(const ExecutionSpace& exec) {
    model_->remove_ahead(this);
    complete_gather(exec);
  }
  bool is_gathered(const Param& param) const { return param.slot_offset < 0 || gather_ == Gather::gathered; }
  Tensor full(const Param& param) const;
  void cache(const ExecutionSpace& exec, bool is_async);
  void clear_cache(const ExecutionSpace& exec);
  /// Lets go of what was gathered ahead and not used.
  void drain(const ExecutionSpace& exec);

  // Gradients.
  Tensor reduce_scatter_gradient(std::size_t index, const Tensor& full_gradient, const ExecutionSpace& exec);
  void set_gradient(std::size_t index, const Tensor& gradient, const ExecutionSpace& exec);
  void zero_gradient(std::size_t index, const ExecutionSpace& exec);
  /// Throws Error while a backward is open, held or abandoned.
  void require_finished() const;
  void zero_gradients(const ExecutionSpace& exec);
  void check_full_gradient(const Param& param, const Tensor& gradient) const;
  bool has_gradient() const;
  std::optional<DTensor> gradient(const Param& param) const;
  /// A range of a section's shards.
  Tensor shards_of(const Section& section, const Range& range) const;
  /// All gradients of a section, zeros where there are none. Valid after make_gradients.
  Tensor section_gradients(const Section& section) const;
  /// Zeros for an optimizer, in the kind of memory that the shards are in.
  Tensor allocate_state(const ExecutionSpace& exec, std::int64_t bytes) const;
  /// Sets gradients that are not there to zero.
  void make_gradients(const ExecutionSpace& exec);
  /// Segments of a section's gradients that are elements of parameters, not padding: all of them, and those that this
  /// rank contributes to sums over the mesh, so that every element is counted once.
  const Tensor& held_elements(std::size_t section) const { return held_tables_[section]; }
  const Tensor& counted_elements(std::size_t section) const { return counted_tables_[section]; }

  /// What finish_backward has to say about the group: null, or why it is not finished.
  const char* unfinished() const;
  bool has_open_backward() const { return backward_ == Backward::open; }
  /// Whether policy started the gather, not the user.
  bool is_prefetched() const { return is_prefetched_; }
  void poke();
  /// Adds what a reduction has left in its slot to the gradients of the shards, or to the partial sums.
  void take_reduction(const Tensor& slot, bool all_reduces, const ExecutionSpace& exec);
  /// Hands the gradients that a reduction has made to Model::set_on_gradient_ready's hook.
  void report_gradients(bool is_sharded, const ExecutionSpace& exec);
  /// Takes its parts of the buckets, if it has none.
  void place_in_buckets(std::vector<ReplicatedBucket>& buckets);
  bool wants_bucket() const { return wants_bucket_; }
  /// What f16 sums need before they are made, see Divisors.
  void divide_buckets(const ExecutionSpace& exec) const;
  void take_buckets(const ExecutionSpace& exec);
  void reset(const ExecutionSpace& exec);

  // Changes of the shards.
  void update_local_shard(std::size_t index, const Tensor& shard, const ExecutionSpace& exec);
  /// Calls `update` for what has a gradient, by key or by name.
  void step(const StepFunction& update, bool by_key, const ExecutionSpace& exec);
  /// Throws Error while a scope is live.
  void require_no_scope(std::string_view action) const;
  /// Forgets gathered copies, after the shards have changed.
  void invalidate(const ExecutionSpace& exec);
  void mark_used() { is_used_ = true; }

  // For the plan.
  bool keeps_unsharded() const;
  /// Parts that reshard_after_forward keeps one of; 0: none.
  std::int64_t slices() const;
  /// Of the gather slot that is asked for.
  std::int64_t slot_bytes() const;
  bool has_trainable() const;
  bool has_reduction() const { return layout_.reduce_slot > layout_.receive_start; }
  std::int64_t table_bytes() const;
  /// Bytes of every transfer of a reduction, in their order, by binding.
  std::vector<std::vector<std::int64_t>> reduction_transfers() const;

 private:
  enum class Gather : std::uint8_t { none, in_flight, gathered };
  enum class Backward : std::uint8_t { idle, open, abandoned, held };
  /// A part of one of the model's buckets.
  struct BucketPart {
    std::size_t bucket = 0;
    std::int64_t start = -1;  // -1: none yet
  };

  void check_new(const std::vector<ParamSpec>& specs) const;
  Param make_param(const ParamSpec& spec) const;
  /// Throws ConfigError where slices are to be kept of parameters of several meshes.
  void require_one_mesh(const std::vector<Param>& params, const ReshardAfterForward& reshard) const;
  void fill(const Param& param, const ParamSpec& spec, const ExecutionSpace& exec) const;
  void adopt_gradient_layout(const ExecutionSpace& exec);
  Tensor allocate(MemoryUse use, std::int64_t bytes, const char* label) const;
  void free_memory(MemoryUse use, Tensor& memory) const noexcept;

  double divisor(const Section& section) const;
  Tensor gradient_of(const Param& param) const;

  bool wants_own_storage() const { return keeps_unsharded() || (is_training_ && !reshards_after_backward_); }
  std::uint64_t new_lease();
  void issue_gather(const ExecutionSpace& exec, TraceEvent::Kind kind);
  void start_gather(const ExecutionSpace& exec);
  /// Throws ConfigError, on all ranks, where the group is not the same on all of them. Collective.
  void compare_ranks();
  void gather(const ExecutionSpace& exec);
  void gather_ahead(const ExecutionSpace& exec, TraceEvent::Kind kind);
  void prefetch(const ExecutionSpace& exec);
  void drop_unused(const ExecutionSpace& exec) noexcept;
  void keep_slice(const ExecutionSpace& exec) noexcept;
  void release_storage() noexcept;
  void write_back(const ExecutionSpace& exec) noexcept;
  void borrow_reduce_slot(const ExecutionSpace& exec);
  void zero_unwritten(const ExecutionSpace& exec);
  /// Visits what a reduction sends, in its order: buckets of packed gradients, and direct parameters.
  template <class VisitBucket, class VisitDirect>
  void for_each_reduced(VisitBucket&& visit_bucket, VisitDirect&& visit_direct) const;
  void start_reduction(const ExecutionSpace& exec);
  void end_backward(Backward next, const ExecutionSpace& exec) noexcept;
  void release_reduce_slot() noexcept;
  void allocate_gradients(const ExecutionSpace& exec);
  void check_gradient(const Param& param, const Tensor& gradient, const Shape& expected, DType dtype,
                      const char* what) const;
  void forget_gradients() noexcept;
  void mark_gradients(std::size_t section);
  /// What a reduction receives for a section, in a reduce slot or in the partial sums.
  Tensor received(const Tensor& slot, std::int64_t slot_start, const Section& section) const;
  Tensor bucket_part(std::size_t section) const;

  std::shared_ptr<ModelState> model_;
  std::string name_;
  Config config_;
  bool is_training_ = true;
  bool reshards_after_backward_ = true;
  bool unshards_in_backward_ = true;
  bool requires_gradient_sync_ = true;
  bool requires_all_reduce_ = true;
  std::optional<double> divide_factor_;
  std::optional<std::vector<ParamGroup*>> forward_prefetch_;
  std::optional<std::vector<ParamGroup*>> backward_prefetch_;
  bool is_compared_ = false;  // with the other ranks
  bool is_used_ = false;      // the layout may not change any more
  std::int64_t forward_count_ = 0;
  std::int64_t layout_version_ = 0;
  std::int64_t additions_ = 0;

  std::vector<Param> params_;
  std::map<std::string, std::size_t, std::less<>> indices_;  // by name, tied ones too
  std::map<std::string, DTensor, std::less<>> buffers_;
  Layout layout_;
  Tensor shards_;
  Tensor gradients_;
  std::vector<bool> has_gradients_;  // by section: what is there is not garbage
  Tensor scatter_table_;
  Tensor pack_table_;
  Tensor zero_table_;
  Tensor pack_zero_table_;
  std::vector<Tensor> held_tables_;  // by section
  std::vector<Tensor> counted_tables_;

  Gather gather_ = Gather::none;
  bool is_prefetched_ = false;
  Tensor storage_;
  bool storage_is_own_ = false;
  Tensor own_storage_;  // of a group that keeps its parameters gathered
  Tensor gather_pack_;
  std::vector<Work> gather_works_;
  Tensor slice_;  // by reshard_after_forward = n
  bool has_slice_ = false;
  bool wants_slice_ = false;
  std::vector<std::uint64_t> leases_;
  std::uint64_t writeback_lease_ = 0;
  bool is_kept_ = false;    // by reshard_after_forward = false, or keep_unsharded_in_eval
  bool is_cached_ = false;  // by ShardedParam::all_gather
  std::vector<Tensor> casts_;
  std::size_t casts_used_ = 0;

  Backward backward_ = Backward::idle;
  std::uint64_t backward_lease_ = 0;
  ParamGroup* prefetch_after_ = nullptr;
  Tensor reduce_slot_;
  bool has_reduce_slot_ = false;
  Tensor partials_;
  bool has_partials_ = false;
  std::vector<BucketPart> bucket_parts_;  // by section
  bool needs_bucket_ = false;             // some have no part yet
  bool wants_bucket_ = false;             // the buckets hold gradients of the group that are to be reduced
};

}  // namespace fsdp2::detail
