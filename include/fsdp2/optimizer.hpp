// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fsdp2/dtensor.hpp"
#include "fsdp2/model.hpp"

namespace fsdp2 {

/// Which parameters an optimizer treats by options of their own.
using ParamFilter = std::function<bool(const ShardedParam&)>;

/// Updates the shards of a model, or of modules outside models, on this rank; the state has the parameters' placement.
/// All arithmetic is f32, or f64 for f64 parameters, element by element: the result does not depend on the number of
/// ranks. Made after all parameters.
class Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Finishes the backward, then updates every module that has a gradient. Collective over the mesh axis. Throws as
  /// Model::finish_backward, and Error, before anything is changed, while a scope of a module is live or where
  /// parameters were added since the optimizer was made.
  void step(const ExecutionSpace& exec = ExecutionSpace());
  /// true: step throws Error, before anything is changed, where a parameter that requires a gradient has none; it lists
  /// them. Otherwise modules without gradients stay as they are, and in others a missing gradient counts as zeros.
  void set_strict(bool strict) { is_strict_ = strict; }
  /// Forgets reduced gradients. Local.
  void zero_grad(const ExecutionSpace& exec = ExecutionSpace());

  /// Of a parameter group: 0 is what no filter chose, others count from 1 on.
  double lr(std::size_t group = 0) const { return lrs_.at(group); }
  /// For schedules: from the next step on. Throws ConfigError for a negative rate or an unknown group.
  void set_lr(double lr, std::size_t group = 0);

  /// "step", the number of steps so far, a replicated scalar of i64; and the state of each parameter, such as
  /// "exp_avg.<module>.<parameter>", in f32, or f64 for f64 parameters. The tensors are the state itself: what a
  /// checkpoint writes into them is used. They are current until a parameter is unfrozen: ask again then.
  std::map<std::string, DTensor> state() const;

 protected:
  /// `buffers` names the arrays of state that each parameter has; they start as zeros. A parameter belongs to the group
  /// of the first filter that is true for it. One rate more than filters.
  Optimizer(const Model& model, std::vector<std::string> buffers, std::vector<double> lrs,
            std::vector<ParamFilter> filters);
  Optimizer(std::span<Module* const> modules, std::vector<std::string> buffers, std::vector<double> lrs,
            std::vector<ParamFilter> filters);

  /// Once a step, before the updates. `step` is the count in device memory, from 1 on.
  virtual void begin_step(const ExecutionSpace& exec, const Tensor& step) = 0;
  /// Updates consecutive elements of a parameter group, one kernel. All tensors have the same length.
  virtual void update(const ExecutionSpace& exec, std::size_t group, const Tensor& parameters, const Tensor& gradients,
                      std::span<const Tensor> buffers) = 0;

 private:
  friend struct detail::ModuleAccess;
  /// Consecutive elements of a section: in its shards, its gradients and its state.
  struct Run {
    std::size_t section = 0;
    std::size_t group = 0;
    std::int64_t start = 0;
    std::int64_t train_start = 0;
    std::int64_t state_start = 0;
    std::int64_t count = 0;
  };
  struct Entry {
    std::shared_ptr<detail::ParamGroup> group;
    std::vector<std::size_t> groups;          // by parameter
    std::int64_t layout_version = 0;          // of the group, when the rest was made
    std::vector<std::int64_t> starts;         // by parameter, in its section; -1: no state
    std::vector<std::int64_t> section_bytes;  // where each section begins
    std::vector<Run> runs;
    std::vector<Tensor> buffers;  // bytes

    DTensor part(const Tensor& buffer, std::size_t param) const;
    Tensor slice(const Tensor& buffer, std::size_t section, std::int64_t start, Shape shape) const;
  };

  Optimizer(std::vector<std::shared_ptr<detail::ParamGroup>> groups, std::vector<std::string> buffers,
            std::vector<double> lrs, const std::vector<ParamFilter>& filters);
  void lay_out(Entry& entry, const ExecutionSpace& exec) const;

  std::shared_ptr<detail::ModelState> model_;  // null: modules
  std::vector<Entry> entries_;
  std::vector<std::string> names_;
  Tensor step_;
  std::vector<double> lrs_;
  bool is_strict_ = false;
};

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double weight_decay = 0;  ///< added to the gradient
};

/// Options of the parameters that `filter` chooses.
struct SgdGroup {
  ParamFilter filter;
  SgdOptions options;
};

/// g' = g + weight_decay·p; m = momentum·m + g'; p -= lr·m. State "momentum_buffer", unless momentum is 0 everywhere.
class Sgd final : public Optimizer {
 public:
  /// Throws ConfigError for a number that is negative or not finite.
  Sgd(const Model& model, SgdOptions options, const std::vector<SgdGroup>& groups = {});
  Sgd(std::span<Module* const> modules, SgdOptions options, const std::vector<SgdGroup>& groups = {});

 private:
  void begin_step(const ExecutionSpace& exec, const Tensor& step) override;
  void update(const ExecutionSpace& exec, std::size_t group, const Tensor& parameters, const Tensor& gradients,
              std::span<const Tensor> buffers) override;

  std::vector<SgdOptions> options_;
};

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;  ///< decoupled: p is multiplied by 1 - lr·weight_decay
};

struct AdamWGroup {
  ParamFilter filter;
  AdamWOptions options;
};

/// Adam with decoupled weight decay and bias correction, as PyTorch's: m = beta1·m + (1−beta1)·g, v = beta2·v +
/// (1−beta2)·g², p = p·(1 − lr·weight_decay) − lr·m̂ / (√v̂ + eps). State "exp_avg" and "exp_avg_sq".
class AdamW final : public Optimizer {
 public:
  /// Throws ConfigError for a number out of range: lr and weight_decay ≥ 0, 0 ≤ beta < 1, eps > 0.
  AdamW(const Model& model, AdamWOptions options, const std::vector<AdamWGroup>& groups = {});
  AdamW(std::span<Module* const> modules, AdamWOptions options, const std::vector<AdamWGroup>& groups = {});

 private:
  void begin_step(const ExecutionSpace& exec, const Tensor& step) override;
  void update(const ExecutionSpace& exec, std::size_t group, const Tensor& parameters, const Tensor& gradients,
              std::span<const Tensor> buffers) override;

  std::vector<AdamWOptions> options_;
  Tensor scalars_;  // of the current step, for each group: lr / (1 - beta1^t), sqrt(1 - beta2^t)
};

}  // namespace fsdp2
