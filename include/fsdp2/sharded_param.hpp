// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "fsdp2/config.hpp"
#include "fsdp2/dtensor.hpp"
#include "fsdp2/initializer.hpp"
#include "fsdp2/tensor.hpp"

namespace fsdp2 {

namespace detail {
class ParamGroup;
}

/// A parameter that is another one of its module under a second name: one storage, one gradient, one entry in state
/// dicts, that of `name`. Parameters cannot be tied across modules: put both into one.
struct Tied {
  std::string name;
};

/// Over which ranks one parameter is sharded, where these are not its module's: experts, say. The mesh must stay open
/// as long as the parameter is used.
struct ParamMesh {
  DeviceMesh mesh;
  std::string mesh_dim_name = "dp";
  std::optional<std::string> replicate_dim_name = {};
  std::optional<double> gradient_divide_factor = {};  ///< default: the ranks of the two axes
};

/// A parameter to be made: {"weight", {D, D}, init::kaiming(seed)}, or {"weight", full.shape(), full} with a full
/// tensor of any dtype that every rank holds and from which each copies its part.
struct ParamSpec {
  std::string name;
  Shape shape;  ///< global; of no importance where it is Tied
  std::variant<Initializer, Tensor, Tied> value;
  bool requires_grad = true;  ///< false: gathered, but neither reduced nor optimized; so is what cannot be cast
  DType dtype = DType::f32;   ///< of what an Initializer makes: f64, f32, f16 or bf16
  /// By mesh axis. On the axis of FSDP: Shard of any dimension, Ragged, or Replicate; by default Shard{0}, or Replicate
  /// for less than Config::min_shard_size elements. On others, how the parameter is cut before FSDP cuts it, such as
  /// {"tp", Shard{0}}: scopes then show this rank's part of it. Default there: Replicate, and its gradients are equal.
  std::map<std::string, Placement> placements = {};
  bool is_ignored = false;  ///< every rank has its own: never communicated, its gradient neither, not in state dicts
  std::optional<ParamMesh> mesh = {};
};

/// One parameter of a module, whose shards lie on the ranks: by default chunks of dimension 0, or the whole tensor on
/// every rank where it has fewer than Config::min_shard_size elements or no dimension. A cheap handle: copies are the
/// same parameter, and keep it alive.
class ShardedParam {
 public:
  /// A parameter of its own, outside any model: shards `full`, the same on every rank. Throws ConfigError for a bad
  /// config or an empty name.
  static ShardedParam from_tensor(std::string name, const Tensor& full, const Config& config,
                                  const ExecutionSpace& exec = ExecutionSpace());

  const std::string& name() const;
  /// "<module>.<name>", the key in state dicts.
  std::string key() const;
  /// Unlike that of any other parameter of this process, now or earlier; the same on all ranks that make the same
  /// parameters in the same order.
  std::uint64_t id() const;
  /// Of what scopes show: the global shape, but for axes that cut before FSDP does.
  const Shape& full_shape() const;
  /// Of this rank's rows: short or empty on the last ranks.
  const Shape& local_shape() const;
  /// Of the shard.
  DType dtype() const;
  bool is_sharded() const;
  bool requires_grad() const;
  /// Freezes or unfreezes, from the next backward on; the same call on all ranks. A frozen parameter's gradient is
  /// forgotten. Throws Error while the module has a scope, or gradients that are held, in flight or reduced (zero_grad
  /// forgets those); ConfigError for a dtype that has no gradient.
  void set_requires_grad(bool requires_grad, const ExecutionSpace& exec = ExecutionSpace());

  /// This rank's rows. Shares the memory of the parameter. Who writes into it must do so while the module is not
  /// unsharded; update_local_shard and step check that.
  const Tensor& local_shard() const;
  /// local_shard with its placement.
  const DTensor& dtensor() const;
  /// Copies `shard` into local_shard; gathered copies are dropped. Throws ShapeError for another shape or dtype, Error
  /// while a scope of the module is live. Local.
  void update_local_shard(const Tensor& shard, const ExecutionSpace& exec = ExecutionSpace());

  /// The full tensor, without padding: valid, and cached, until clear_cache or until the parameters change. Gathers all
  /// parameters of the module; a replicated parameter is its local tensor. Collective over the mesh axis unless cached.
  Tensor all_gather(const ExecutionSpace& exec = ExecutionSpace());
  /// Starts what all_gather completes. Collective.
  void unshard(const ExecutionSpace& exec = ExecutionSpace());
  /// Lets go of what all_gather and unshard cached for the module. Local.
  void clear_cache(const ExecutionSpace& exec = ExecutionSpace());
  /// Whether full() is there: a scope, a hook, the cache or the policy holds it. Always so for a replicated parameter.
  bool is_gathered() const;
  /// The gathered tensor, without communication. Throws Error unless is_gathered().
  Tensor full() const;

  /// This rank's rows of the sum over ranks of `full_gradient` (of full_shape, in the reduction's dtype), divided by
  /// the gradient divide factor; a replicated parameter's is whole. Collective over the mesh axis, complete on return.
  /// Stores nothing: see set_gradient.
  Tensor reduce_scatter_gradient(const Tensor& full_gradient, const ExecutionSpace& exec = ExecutionSpace());
  /// Copies a gradient of local_shape. Throws ShapeError for another shape or dtype, Error without requires_grad.
  void set_gradient(const Tensor& gradient, const ExecutionSpace& exec = ExecutionSpace());
  /// The reduced gradient of the rows held here; none since zero_grad if nothing was reduced or set. Complete after
  /// Model::finish_backward. Shares memory, and is overwritten by the next reduction.
  std::optional<DTensor> gradient() const;
  /// Forgets the gradient. An optimizer takes it for zero while another parameter of the module has one.
  void zero_grad(const ExecutionSpace& exec = ExecutionSpace());

  friend bool operator==(const ShardedParam& a, const ShardedParam& b) {
    return a.group_ == b.group_ && a.index_ == b.index_;
  }

 private:
  friend class Module;
  friend class detail::ParamGroup;
  ShardedParam(std::shared_ptr<detail::ParamGroup> group, std::size_t index)
      : group_(std::move(group)), index_(index) {}

  std::shared_ptr<detail::ParamGroup> group_;
  std::size_t index_;
};

}  // namespace fsdp2
