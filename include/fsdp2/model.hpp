// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp2/config.hpp"
#include "fsdp2/module.hpp"

namespace fsdp2 {

namespace detail {
class ModelState;
}

/// What the runtime does, in the order in which it does it.
struct TraceEvent {
  enum class Kind : std::uint8_t {
    gather_issued,     ///< for a scope that needs it now, or unshard_async
    prefetch_issued,   ///< a gather ahead of its use
    gather_completed,  ///< of either
    resharded,         ///< gathered parameters were dropped
    reduce_issued,
    all_reduced,       ///< over the replicas
    reduce_completed,  ///< the gradients of the shards are there
    bucket_reduced,    ///< gradients of all replicated parameters; the module's name is empty
  };
  Kind kind;
  std::string module;
};

/// Bytes that a model holds on a rank, by what they are for.
struct MemoryPlan {
  std::int64_t shards = 0;        ///< of parameters, with padding
  std::int64_t gradients = 0;     ///< of shards
  std::int64_t unsharded = 0;     ///< storage of gathered parameters: slots, those kept by policy, slices of them
  std::int64_t gather_packs = 0;  ///< temporaries of packed gathers
  std::int64_t reduce_slots = 0;  ///< unsharded gradients, with what is received for them
  std::int64_t reduce_packs = 0;  ///< temporaries of packed reductions
  std::int64_t replicated_gradients = 0;  ///< the bucket
  std::int64_t partials = 0;              ///< sums that wait for their all-reduce
  std::int64_t communication = 0;         ///< receive buffers of collectives
  std::int64_t tables = 0;                ///< of packing kernels

  std::int64_t total() const {
    return shards + gradients + unsharded + gather_packs + reduce_slots + reduce_packs + replicated_gradients +
           partials + communication + tables;
  }
  friend bool operator==(const MemoryPlan&, const MemoryPlan&) = default;
};

/// "gather_issued", …
std::string_view to_string(TraceEvent::Kind kind);

/// The root of a network: modules that share buffers, the recorded order and the reductions. Movable; modules keep
/// their addresses. Every member marked collective must be called by all ranks of the mesh axis in the same order.
class Model {
 public:
  /// Throws ConfigError as Config::validate.
  explicit Model(Config config);
  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;
  ~Model();

  /// Makes a module with its parameters, and logs their number and the memory before and after. Local; all ranks must
  /// make the same modules. Throws ConfigError for an empty or repeated name, two parameters with one key, or a name
  /// that state dicts reserve ("optim"); nothing is added then.
  Module& add(std::string name, std::vector<ParamSpec> params, const ConfigOverrides& overrides = {},
              const ExecutionSpace& exec = ExecutionSpace());

  const Config& config() const;
  /// In the order in which they were added.
  std::vector<Module*> modules() const;
  /// Throws ConfigError, which lists the names, for an unknown one.
  Module& module(std::string_view name) const;

  /// For all modules.
  void train();
  void eval();

  /// Completes all reductions, and reduces the gradients of replicated parameters in one all-reduce; drops prefetched
  /// parameters that nobody used. Afterwards ShardedParam::gradient is complete. Collective; optimizers and step call
  /// it. Throws Error, which names them, for modules whose backward was neither reduced nor dropped by reset(), or is
  /// held.
  void finish_backward(const ExecutionSpace& exec = ExecutionSpace());

  /// After an exception: completes what is in flight, ends all scopes, and forgets recorded order and all gradients, so
  /// that the next step starts afresh. Collective, and needs every rank to have issued the same collectives.
  void reset(const ExecutionSpace& exec = ExecutionSpace());

  /// As the setters of Module, for all modules.
  void set_reshard_after_backward(bool value);
  void set_requires_gradient_sync(bool value);
  void set_requires_all_reduce(bool value);
  void set_gradient_divide_factor(double factor);

  /// Called when a reduction has completed, for each parameter whose gradient it made; may write its shard and forget
  /// its gradient, as an optimizer in the backward does. An empty function turns it off. It must not call members of
  /// the model or its modules.
  void set_on_gradient_ready(std::function<void(ShardedParam&)> hook);

  /// Compares replicas of every parameter bitwise, along every axis over which it is replicated. Throws Error, the same
  /// on all ranks, which lists the parameters that differ and where. Collective over the meshes.
  void verify_replicas(const ExecutionSpace& exec = ExecutionSpace());
  /// Replaces every replica by that of index `root` along its axes. Collective. Throws Error while a scope is live,
  /// ConfigError where an axis has no such index.
  void broadcast_from(std::int64_t root, const ExecutionSpace& exec = ExecutionSpace());

  /// The most bytes that training takes, before it runs: for the canonical schedule, which is forward of every module
  /// in the order of addition, backward in reverse with reduce(), and step, exactly; for others that end every scope
  /// before the next begins, an upper bound. Optimizer state and what user code allocates are not in it. Local.
  MemoryPlan plan_memory() const;
  /// What is allocated at most so far, in the same classes. Local.
  const MemoryPlan& peak_memory() const;

  /// As Module::zero_grad, for all modules.
  void zero_grad(const ExecutionSpace& exec = ExecutionSpace());
  /// As Module::step, for all modules; names are "<module>.<parameter>".
  void step(const StepFunction& update, const ExecutionSpace& exec = ExecutionSpace());

  /// Sums over the modules, with the buffers of the model and their peaks. Local.
  MemoryStats memory_stats() const;

  /// Called for every event of this model; an empty function turns it off. It must not throw.
  void set_trace(std::function<void(const TraceEvent&)> trace);

 private:
  friend struct detail::ModuleAccess;
  std::shared_ptr<detail::ModelState> state_;
  std::vector<std::unique_ptr<Module>> modules_;
};

}  // namespace fsdp2
