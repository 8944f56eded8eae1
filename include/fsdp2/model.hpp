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
    reduce_completed,  ///< the gradients of the shards are there
    bucket_reduced,    ///< gradients of all replicated parameters; the module's name is empty
  };
  Kind kind;
  std::string module;
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
