// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "fsdp2/device_mesh.hpp"
#include "fsdp2/dtype.hpp"

namespace fsdp2 {

/// In which dtypes floating-point parameters are gathered and their gradients reduced; none is the parameter's own. The
/// shards always keep their dtype, so an f32 master copy costs nothing. The default casts nothing.
struct MixedPrecisionPolicy {
  std::optional<DType> param_dtype = {};   ///< of gathered parameters
  std::optional<DType> reduce_dtype = {};  ///< of unsharded gradients and their reduction: f64, f32, bf16 or f16
  std::optional<DType> buffer_dtype = {};  ///< of Module::add_buffer
  bool cast_inputs = false;                ///< Scope::input casts to param_dtype
  bool keep_low_precision_grads = false;   ///< sharded gradients stay in reduce_dtype
  std::optional<DType> output_dtype = {};  ///< Scope::output casts to it

  /// bf16 parameters, f32 reduction, bf16 buffers, inputs cast.
  static MixedPrecisionPolicy bf16();
  /// f16 parameters, f32 reduction, f16 buffers, inputs cast.
  static MixedPrecisionPolicy fp16();
  /// The default.
  static MixedPrecisionPolicy fp32() { return {}; }

  friend bool operator==(const MixedPrecisionPolicy&, const MixedPrecisionPolicy&) = default;
};

/// When a backward gathers the module that backward will need next, which is the previous one of the recorded forward
/// order.
enum class BackwardPrefetch : std::uint8_t {
  none,  ///< each module is gathered when its own backward begins
  pre,   ///< when a backward begins, before it reduces: one more module is unsharded, and most is overlapped
  post,  ///< when a backward has started its reduction and has freed its own parameters
};

/// true: gathered parameters are dropped after forward and gathered again for backward. false: they are kept until the
/// backward reduces. An integer n, which divides the ranks of the axis: every rank keeps one n-th of them, and the
/// backward gathers over groups of n neighbours; 1 means false, the number of ranks true.
using ReshardAfterForward = std::variant<bool, std::int64_t>;

class ConfigBuilder;

/// How modules are sharded. An aggregate for designated initialisers, Config{.mesh = mesh, .min_shard_size = 0}, or see
/// builder(). Must be the same on all ranks.
struct Config {
  std::optional<DeviceMesh> mesh = {};  ///< required; parameters are replicated over axes that are not named here
  std::string mesh_dim_name = "dp";     ///< the axis over which parameters are sharded
  std::optional<std::string> replicate_dim_name = {};  ///< an axis of replicas makes it hybrid sharding (HSDP)
  MixedPrecisionPolicy mp_policy = {};
  ReshardAfterForward reshard_after_forward = true;
  std::int64_t min_shard_size = 1024;  ///< elements; smaller parameters stay replicated
  bool offload_to_cpu = false;         ///< shards, gradients and optimizer state live in (pinned) host memory
  BackwardPrefetch backward_prefetch = BackwardPrefetch::pre;
  bool forward_prefetch = false;  ///< forward gathers the next module of the last iteration's order ahead
  bool limit_all_gathers =
      true;  ///< at most one gather that policy started ahead of its use; explicit scopes and lists always gather
  std::optional<double> gradient_divide_factor =
      {};  ///< reduced gradient = sum over ranks / factor; default: number of data-parallel ranks, 1 sums
  std::int64_t direct_bytes = 256 * 1024;  ///< parameters of at least this size are communicated without a packing copy
  std::int64_t max_bucket_bytes = 0;       ///< of the smaller ones packed into one collective; 0: no limit
  bool keep_unsharded_in_eval = false;     ///< in evaluation, keep parameters gathered after forward
  bool separate_reduce_communicator = false;  ///< gathers and reductions use communicators of their own
  /// Before a module's first gather, all ranks compare its parameters; dropped parameters become NaN, so that who reads
  /// a view after its scope notices. By default in debug builds.
  bool checked = checked_by_default;

  static ConfigBuilder builder();

  /// Throws ConfigError, which names the field, for a missing mesh, an unknown axis, a number out of range, and dtypes
  /// that cannot be reduced.
  void validate() const;
};

/// Settings that one module may have differently from its model. What is not set is the model's.
struct ConfigOverrides {
  std::optional<MixedPrecisionPolicy> mp_policy = {};
  std::optional<ReshardAfterForward> reshard_after_forward = {};
  std::optional<std::int64_t> min_shard_size = {};
  std::optional<std::int64_t> direct_bytes = {};
  std::optional<std::int64_t> max_bucket_bytes = {};
  std::optional<bool> keep_unsharded_in_eval = {};
};

/// Config::builder().mesh(mesh).min_shard_size(0).build().
class ConfigBuilder {
 public:
  ConfigBuilder& mesh(DeviceMesh value) { return set(config_.mesh, std::move(value)); }
  ConfigBuilder& mesh_dim_name(std::string value) { return set(config_.mesh_dim_name, std::move(value)); }
  ConfigBuilder& replicate_dim_name(std::string value) { return set(config_.replicate_dim_name, std::move(value)); }
  ConfigBuilder& mp_policy(MixedPrecisionPolicy value) { return set(config_.mp_policy, value); }
  ConfigBuilder& reshard_after_forward(ReshardAfterForward value) { return set(config_.reshard_after_forward, value); }
  ConfigBuilder& min_shard_size(std::int64_t value) { return set(config_.min_shard_size, value); }
  ConfigBuilder& offload_to_cpu(bool value) { return set(config_.offload_to_cpu, value); }
  ConfigBuilder& backward_prefetch(BackwardPrefetch value) { return set(config_.backward_prefetch, value); }
  ConfigBuilder& forward_prefetch(bool value) { return set(config_.forward_prefetch, value); }
  ConfigBuilder& limit_all_gathers(bool value) { return set(config_.limit_all_gathers, value); }
  ConfigBuilder& gradient_divide_factor(double value) { return set(config_.gradient_divide_factor, value); }
  ConfigBuilder& direct_bytes(std::int64_t value) { return set(config_.direct_bytes, value); }
  ConfigBuilder& max_bucket_bytes(std::int64_t value) { return set(config_.max_bucket_bytes, value); }
  ConfigBuilder& keep_unsharded_in_eval(bool value) { return set(config_.keep_unsharded_in_eval, value); }
  ConfigBuilder& checked(bool value) { return set(config_.checked, value); }
  ConfigBuilder& separate_reduce_communicator(bool value) { return set(config_.separate_reduce_communicator, value); }

  /// Throws ConfigError as Config::validate does.
  Config build() const;

 private:
  template <class Field, class Value>
  ConfigBuilder& set(Field& field, Value&& value) {
    field = std::forward<Value>(value);
    return *this;
  }

  Config config_;
};

}  // namespace fsdp2
