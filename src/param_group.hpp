// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp2/communicator.hpp"
#include "fsdp2/dtensor.hpp"
#include "fsdp2/module.hpp"
#include "model_state.hpp"

namespace fsdp2::detail {

/// The name itself. Throws ConfigError for one that is empty, unprintable, or reserved by state dicts.
std::string checked_module_name(std::string name);

/// A parameter, and its place in the buffers of its group. Places are in elements.
struct Param {
  std::string name;
  Shape shape;
  bool requires_grad = true;
  std::uint64_t id = 0;
  bool is_sharded = false;
  bool is_direct = false;
  std::int64_t count = 0;        ///< of the full tensor
  std::int64_t shard_count = 0;  ///< of a rank's shard, padded to equal rows; count, if replicated
  std::int64_t shard_start = 0;
  std::int64_t slot_start = 0;  ///< in the gather slot, if sharded
  std::int64_t lent_start = 0;  ///< in the reduce slot, or in the group's part of the bucket, if it requires a gradient
  DTensor shard;
  DTensor gradient;
  bool has_gradient = false;
  bool is_written = false;  ///< the lent gradient holds something to add to

  /// Over the mesh of `config`.
  TensorSpec spec(const Config& config) const;
};

/// Where a group's parameters lie. The shard buffer is: packed frozen, packed trainable, direct trainable, replicated
/// trainable, replicated frozen, direct frozen parameters. So the packed ones are one send buffer, what has a gradient
/// is one range, and what is reduce-scattered is its front. Gradients and optimizer state are laid out as that range.
struct Layout {
  std::int64_t shards = 0;
  std::int64_t packed = 0;             ///< packed parameters are [0, packed)
  Range packed_trainable;              ///< in the shard buffer
  Range trainable;                     ///< in the shard buffer
  std::int64_t trainable_sharded = 0;  ///< the front of `trainable` that is reduce-scattered
  Range replicated;                    ///< in the shard buffer: the trainable replicated ones
  std::int64_t gather_slot = 0;
  std::int64_t lent = 0;         ///< the reduce slot begins with the unsharded gradients …
  std::int64_t reduce_slot = 0;  ///< … and ends with what is received, laid out as trainable_sharded
};

/// A module's parameters: their shards, the gather and the reduction of all of them.
class ParamGroup {
 public:
  /// Throws ConfigError for a bad config, a bad or repeated name.
  ParamGroup(std::shared_ptr<ModelState> model, std::string name, Config config);
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;
  ~ParamGroup();

  /// Throws ConfigError or ShapeError, with nothing added.
  void add(const std::vector<ParamSpec>& specs, const ExecutionSpace& exec);

  ModelState& model() const { return *model_; }
  const std::shared_ptr<ModelState>& shared_model() const { return model_; }
  const std::string& name() const { return name_; }
  const Config& config() const { return config_; }
  const std::vector<Param>& params() const { return params_; }
  const Param& param(std::size_t index) const { return params_[index]; }
  std::string key(const Param& param) const { return key_of(param.name); }
  /// Throws ConfigError, which lists the names.
  std::size_t find(std::string_view name) const;
  bool is_training() const { return is_training_; }
  void set_training(bool is_training);
  std::int64_t forward_count() const { return forward_count_; }
  MemoryStats memory_stats() const;
  std::string summary() const;

  // Phases. A lease is a number that stands for a scope: while there is one, the parameters stay gathered.
  std::uint64_t begin_forward(const ExecutionSpace& exec);
  std::uint64_t begin_backward(const ExecutionSpace& exec, bool gathers);
  std::uint64_t begin_unshard(const ExecutionSpace& exec, bool is_async);
  bool is_live(std::uint64_t lease) const;
  void end(std::uint64_t lease) noexcept;
  LentTensor lend(std::size_t index, const ExecutionSpace& exec);
  void reduce(const ExecutionSpace& exec);
  void hold(const ExecutionSpace& exec);

  /// Local: nothing, unless a gather is in flight.
  void complete_gather(const ExecutionSpace& exec);
  bool is_gathered(const Param& param) const { return !param.is_sharded || gather_ == Gather::gathered; }
  Tensor full(const Param& param) const;
  void cache(const ExecutionSpace& exec, bool is_async);
  void clear_cache();
  /// Lets go of what was gathered ahead and not used.
  void drain(const ExecutionSpace& exec);

  // Gradients.
  Tensor reduce_scatter_gradient(std::size_t index, const Tensor& full_gradient, const ExecutionSpace& exec);
  void set_gradient(std::size_t index, const Tensor& gradient, const ExecutionSpace& exec);
  void zero_gradient(std::size_t index, const ExecutionSpace& exec);
  /// Throws Error while a backward is open, held or abandoned.
  void require_finished() const;
  void zero_gradients(const ExecutionSpace& exec);
  void check_full_gradient(const Param& param, const Tensor& gradient) const {
    check_gradient(param, gradient, param.shape, "full");
  }
  bool has_gradient() const;
  std::optional<DTensor> gradient(const Param& param) const;
  /// The range of all that requires a gradient.
  Tensor trainable_shards() const;
  std::int64_t trainable_count() const { return layout_.trainable.size(); }
  /// Zeros where there is no gradient.
  const Tensor& trainable_gradients(const ExecutionSpace& exec);
  /// Segments of trainable_gradients that are elements of parameters, not padding: all of them, and those that this
  /// rank contributes to sums over the mesh, so that every element is counted once.
  const Tensor& held_elements() const { return held_table_; }
  const Tensor& counted_elements() const { return counted_table_; }
  /// A part of a buffer that is laid out as the gradients.
  DTensor trainable_part(const Tensor& buffer, const Param& param) const;

  /// What finish_backward has to say about the group: null, or why it is not finished.
  const char* unfinished() const;
  bool has_open_backward() const { return backward_ == Backward::open; }
  void poke() { gather_work_.test(); }
  /// Adds what a reduction has left in its slot to the gradients of the shards.
  void take_reduction(const Tensor& slot, const ExecutionSpace& exec);
  /// Takes its part behind the first `used` elements, if it has none; returns the new end.
  std::int64_t place_in_bucket(std::int64_t used);
  bool wants_bucket() const { return wants_bucket_; }
  void take_bucket(const ExecutionSpace& exec);
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

 private:
  enum class Gather : std::uint8_t { none, in_flight, gathered };
  enum class Backward : std::uint8_t { idle, open, abandoned, held };

  std::string key_of(const std::string& param_name) const;
  void check_new(const std::vector<ParamSpec>& specs) const;
  static Layout lay_out(std::vector<Param>& params, std::int64_t ranks);
  void make_tables(const ExecutionSpace& exec);
  void fill(const Param& param, const ParamSpec& spec, const ExecutionSpace& exec) const;

  bool keeps_unsharded() const;
  std::uint64_t new_lease();
  void issue_gather(const ExecutionSpace& exec, TraceEvent::Kind kind);
  void gather(const ExecutionSpace& exec);
  void gather_ahead(const ExecutionSpace& exec, TraceEvent::Kind kind);
  void prefetch(const ExecutionSpace& exec);
  void drop_unused() noexcept;
  void release_storage() noexcept;
  void borrow_reduce_slot(const ExecutionSpace& exec);
  void zero_unwritten(const ExecutionSpace& exec);
  void start_reduction(const ExecutionSpace& exec);
  void end_backward(Backward next) noexcept;
  void release_reduce_slot() noexcept;
  void make_gradients(const ExecutionSpace& exec);
  void check_gradient(const Param& param, const Tensor& gradient, const Shape& expected, const char* what) const;
  void forget_gradients() noexcept;
  void mark_gradients(bool is_sharded);
  Tensor sharded_gradients() const;
  Tensor replicated_gradients() const;
  Tensor bucket_part() const;

  std::shared_ptr<ModelState> model_;
  std::string name_;
  Config config_;
  bool is_training_ = true;
  bool is_used_ = false;  // the layout may not change any more
  std::int64_t forward_count_ = 0;

  std::vector<Param> params_;
  Layout layout_;
  Tensor shards_;
  Tensor gradients_;
  bool sharded_gradients_valid_ = false;
  bool replicated_gradients_valid_ = false;
  Tensor scatter_table_;  // packed gather, rank-major → gather slot
  Tensor pack_table_;     // lent gradients → rank-major
  Tensor zero_table_;     // pad rows and gaps of the reduce slot
  Tensor held_table_;
  Tensor counted_table_;

  Gather gather_ = Gather::none;
  Tensor storage_;
  bool storage_is_own_ = false;
  Tensor own_storage_;  // of a group that keeps its parameters gathered
  Tensor gather_pack_;
  Work gather_work_;
  std::vector<std::uint64_t> leases_;
  bool is_kept_ = false;    // by reshard_after_forward = false, or keep_unsharded_in_eval
  bool is_cached_ = false;  // by ShardedParam::all_gather

  Backward backward_ = Backward::idle;
  std::uint64_t backward_lease_ = 0;
  ParamGroup* prefetch_after_ = nullptr;
  Tensor reduce_slot_;
  bool has_reduce_slot_ = false;
  std::int64_t bucket_start_ = -1;
  bool wants_bucket_ = false;  // the bucket holds gradients of the group that are to be reduced
};

}  // namespace fsdp2::detail
