// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp2/config.hpp"
#include "fsdp2/sharded_param.hpp"
#include "fsdp2/tensor.hpp"

namespace fsdp2 {

namespace detail {
struct ModuleAccess;
}

/// What parameters occupy on this rank, in bytes, and the buffers around them.
struct MemoryStats {
  std::int64_t parameters = 0;            ///< how many
  std::int64_t sharded_parameters = 0;    ///< how many of them are cut; the others are replicated
  std::int64_t full_bytes = 0;            ///< of all parameters, whole
  std::int64_t local_bytes = 0;           ///< of the parts held here
  std::int64_t padding_bytes = 0;         ///< allocated beside local_bytes, so that all ranks send the same
  std::int64_t gradient_bytes = 0;        ///< of reduced gradients
  std::int64_t unsharded_bytes = 0;       ///< of storage that holds gathered parameters now, temporaries included
  std::int64_t reduction_bytes = 0;       ///< of storage that holds gradients lent, held or being reduced now
  std::int64_t partial_bytes = 0;         ///< of gradients that are not reduced over replicas yet
  std::int64_t peak_unsharded_bytes = 0;  ///< the most there has been; 0 for a module
  std::int64_t peak_reduction_bytes = 0;

  std::int64_t saved_bytes() const { return full_bytes - local_bytes; }
  /// Of full_bytes; 0 without parameters.
  double reduction_percent() const;
  /// full_bytes / local_bytes; 1 without parameters.
  double ratio() const;
};

/// A lent gradient. The caller writes gradient + beta · (what is there) to every element.
struct LentTensor {
  Tensor tensor;
  float beta = 0;
};
template <class View>
struct LentView {
  View view;
  float beta = 0;  ///< 0: the memory holds nothing yet, 1: it holds a gradient to add to
};

/// While it lives, the full parameters of a module are there. Move-only. Its end releases memory by policy, and neither
/// communicates nor throws. Scopes of one module may overlap: they share the storage.
class Scope {
 public:
  Scope(Scope&& other) noexcept;
  Scope& operator=(Scope&& other) noexcept;
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope();

  /// A full parameter, such as view<float**>("weight"): valid until the scope ends. Throws ConfigError for an unknown
  /// name, ShapeError for another element type or rank, Error where the scope has ended. Waits for unshard_async.
  template <class DataType>
  auto view(std::string_view name) const {
    return tensor(name).view<DataType>();
  }
  Tensor tensor(std::string_view name) const;

  /// What enters or leaves the module, cast by the policy: input to param_dtype where cast_inputs is set, output to
  /// output_dtype. The tensor itself where there is nothing to cast, and for other dtypes than f64, f32, f16 and bf16;
  /// else memory of the module that is valid until its last scope ends.
  Tensor input(const Tensor& tensor) const;
  Tensor output(const Tensor& tensor) const;

  /// Ends the scope before its destructor does. With UnshardOptions::writeback this rank's part of the full parameters
  /// replaces its shard.
  void end() noexcept;

 protected:
  friend class Module;
  Scope(std::shared_ptr<detail::ParamGroup> group, const ExecutionSpace& exec, std::uint64_t lease);
  void require_live() const;

  std::shared_ptr<detail::ParamGroup> group_;
  ExecutionSpace exec_;
  std::uint64_t lease_ = 0;  // 0: ended
};

/// The backward of a module: full parameters, and gradients to write. Ends by reduce() or hold(); left without either,
/// the module counts as not reduced, and Model::finish_backward throws.
class BackwardScope : public Scope {
 public:
  BackwardScope(BackwardScope&&) noexcept = default;
  BackwardScope& operator=(BackwardScope&&) noexcept = default;

  /// The unsharded gradient of a parameter, of its full shape: memory that is sent as it is. Valid until reduce(),
  /// hold() or the scope's end. Every element must be written, see LentView::beta; one never asked for counts as zeros.
  /// Throws Error for a parameter without requires_grad and where the scope has ended.
  template <class DataType>
  auto grad(std::string_view name) {
    const LentTensor lent = grad_tensor(name);
    auto view = lent.tensor.view<DataType>();
    return LentView<decltype(view)>{view, lent.beta};
  }
  LentTensor grad_tensor(std::string_view name);

  /// Drops the full parameters and starts the reduction of the gradients, which the next reduce() or finish_backward
  /// completes: it adds the mean over ranks (Config::gradient_divide_factor) to the parameters' gradients. Collective
  /// over the mesh axis, also where this rank wrote no gradient. Ends the scope.
  void reduce();

  /// Drops the full parameters and keeps the unsharded gradients, without communication: the module's next backward
  /// adds to them, and one of them must reduce. Ends the scope.
  void hold();

 private:
  friend class Module;
  using Scope::Scope;
};

struct UnshardOptions {
  bool writeback = false;  ///< what the caller writes to full parameters goes into the shards at the scope's end
};

/// Called with a parameter's name, its local shard and its reduced gradient, which have the same shape; writes the
/// shard.
using StepFunction = std::function<void(const std::string& name, const Tensor& shard, const Tensor& gradient)>;

/// Parameters that are gathered and reduced together, such as those of one layer. Every member marked collective must
/// be called by all ranks of the mesh axis in the same order.
class Module {
 public:
  /// A module outside any Model, still without parameters: see add_param and fully_shard. Throws ConfigError.
  Module(std::string name, const Config& config);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  const std::string& name() const;
  /// With the module's overrides in place.
  const Config& config() const;

  /// Adds a parameter. Earlier tensors of the module's other parameters are then detached: ask for them again. Throws
  /// ConfigError for an empty or repeated name, and once a scope, a gradient or an optimizer has used the module.
  ShardedParam add_param(ParamSpec spec, const ExecutionSpace& exec = ExecutionSpace());
  /// In the order in which they were added; a Tied one is not a second time there.
  std::vector<ShardedParam> params() const;
  /// Throws ConfigError, which lists the names, for an unknown one.
  ShardedParam param(std::string_view name) const;

  /// A new module trains.
  void train();
  /// Evaluation: forward records nothing, and keep_unsharded_in_eval decides what remains afterwards.
  void eval();
  bool is_training() const;
  /// Scopes and hooks of forward so far; a recomputation inside the module's backward is not counted.
  std::int64_t forward_count() const;

  /// Gathers the parameters for forward, and records the order for the backward's prefetch. Collective.
  [[nodiscard]] Scope forward(const ExecutionSpace& exec = ExecutionSpace());
  /// Gathers the parameters, unless they are there, and prefetches by policy. Collective.
  [[nodiscard]] BackwardScope backward(const ExecutionSpace& exec = ExecutionSpace());
  /// Gathers the parameters for anything else; recorded nowhere. Collective.
  [[nodiscard]] Scope unshard(const ExecutionSpace& exec = ExecutionSpace());
  /// With writeback, all ranks must write the same. Throws Error where the parameters are gathered in another dtype
  /// than they are kept in, or another scope is live.
  [[nodiscard]] Scope unshard(const UnshardOptions& options, const ExecutionSpace& exec = ExecutionSpace());
  /// Starts the gather; the scope's first view completes it. Collective.
  [[nodiscard]] Scope unshard_async(const ExecutionSpace& exec = ExecutionSpace());

  /// The same phases for codes that cannot hold scopes: pre_forward and pre_backward gather, post_forward drops by
  /// policy, and full tensors come from ShardedParam::full. Collective, except post_forward.
  void pre_forward(const ExecutionSpace& exec = ExecutionSpace());
  void post_forward();
  void pre_backward(const ExecutionSpace& exec = ExecutionSpace());
  /// Copies the full gradients, by parameter name (absent ones count as zeros), and does what BackwardScope::reduce
  /// does. Throws, before anything is changed, ConfigError for an unknown name and ShapeError for another shape or
  /// dtype.
  void post_backward(const std::map<std::string, Tensor>& gradients, const ExecutionSpace& exec = ExecutionSpace());

  // Settings, the same calls on all ranks.

  /// As Config::reshard_after_forward, from the next forward on. Throws ConfigError for a number that does not divide
  /// the ranks, or with parameters on several meshes.
  void set_reshard_after_forward(ReshardAfterForward value);
  /// false: reduce() and hold() keep the parameters gathered, for the next forward of an accumulation. They are dropped
  /// when the shards change, or by the first reduce() after it is true again.
  void set_reshard_after_backward(bool value);
  /// false: backward shows no parameters, and gathers none; for an embedding, whose gradient needs no weights.
  void set_unshard_in_backward(bool value);
  /// false: reduce() does what hold() does.
  void set_requires_gradient_sync(bool value);
  /// false, with replicas: reduce() sums over the shards' axis only, and adds to a partial sum that the next reduction
  /// with true includes; 1/S of the memory that hold() takes.
  void set_requires_all_reduce(bool value);
  /// Of this module, see Config. Throws ConfigError unless it is positive.
  void set_gradient_divide_factor(double factor);
  /// What to gather when a forward (backward) of this module has begun, instead of what policy and recorded order say.
  /// Modules of the same model, at any number; limit_all_gathers does not bound them. Empty: nothing. Throws
  /// ConfigError.
  void set_modules_to_forward_prefetch(const std::vector<Module*>& modules);
  void set_modules_to_backward_prefetch(const std::vector<Module*>& modules);

  /// A replicated tensor that is no parameter, such as a running mean: kept in the policy's buffer_dtype where it can
  /// be cast, and in state dicts as "<module>.<name>". Copies `value`. Throws as add_param.
  void add_buffer(std::string name, const Tensor& value, const ExecutionSpace& exec = ExecutionSpace());
  /// Throws ConfigError for an unknown name.
  const Tensor& buffer(std::string_view name) const;

  /// Model::finish_backward of the model that owns the module. Collective.
  void finish_backward(const ExecutionSpace& exec = ExecutionSpace());
  /// Finishes the backward, then calls `update` for every parameter that has a gradient. Collective. Throws as
  /// Model::finish_backward, and Error while a scope of the module is live.
  void step(const StepFunction& update, const ExecutionSpace& exec = ExecutionSpace());
  /// Forgets reduced gradients, those in flight included. Local. Throws Error while a backward is open or held.
  void zero_grad(const ExecutionSpace& exec = ExecutionSpace());

  /// Local.
  MemoryStats memory_stats() const;

 private:
  friend class Model;
  friend struct detail::ModuleAccess;
  explicit Module(std::shared_ptr<detail::ParamGroup> group);

  std::shared_ptr<detail::ParamGroup> group_;
  std::optional<Scope> forward_hook_;
  std::optional<BackwardScope> backward_hook_;
};

/// Adds parameters to a module, with one layout for all, and logs their number and the memory before and after. Throws
/// as Module::add_param; nothing is added then.
void fully_shard(Module& module, std::vector<ParamSpec> params, const ExecutionSpace& exec = ExecutionSpace());

/// A module outside any Model, with its parameters.
std::unique_ptr<Module> make_module(std::string name, std::vector<ParamSpec> params, const Config& config,
                                    const ExecutionSpace& exec = ExecutionSpace());

}  // namespace fsdp2
