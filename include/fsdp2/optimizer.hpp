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

/// Updates the shards of a model, or of modules outside models, on this rank; the state has the parameters' placement.
/// All arithmetic is f32, element by element: the result does not depend on the number of ranks. Made after all
/// parameters.
class Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Finishes the backward, then updates every module that has a gradient. Collective over the mesh axis. Throws as
  /// Model::finish_backward, and Error, before anything is changed, while a scope of a module is live or where
  /// parameters were added since the optimizer was made.
  void step(const ExecutionSpace& exec = ExecutionSpace());
  /// Forgets reduced gradients. Local.
  void zero_grad(const ExecutionSpace& exec = ExecutionSpace());

  double lr() const { return lr_; }
  /// For schedules: from the next step on.
  void set_lr(double lr);

  /// "step", the number of steps so far, a replicated scalar of i64; and the state of each parameter, such as
  /// "exp_avg.<module>.<parameter>". The tensors are the state itself: what a checkpoint writes into them is used.
  std::map<std::string, DTensor> state() const;

 protected:
  /// `buffers` names the f32 arrays of state that each parameter has; they start as zeros.
  Optimizer(const Model& model, std::vector<std::string> buffers, double lr);
  Optimizer(std::span<Module* const> modules, std::vector<std::string> buffers, double lr);

  /// Once a step, before the updates. `step` is the count in device memory, from 1 on.
  virtual void begin_step(const ExecutionSpace& exec, const Tensor& step) = 0;
  /// Updates consecutive elements, one kernel. All tensors have the same length.
  virtual void update(const ExecutionSpace& exec, const Tensor& parameters, const Tensor& gradients,
                      std::span<const Tensor> buffers) = 0;

 private:
  friend struct detail::ModuleAccess;
  struct Entry {
    std::shared_ptr<detail::ParamGroup> group;
    std::vector<Tensor> buffers;  // laid out as the group's gradients
  };

  Optimizer(std::vector<std::shared_ptr<detail::ParamGroup>> groups, std::vector<std::string> buffers, double lr);

  std::shared_ptr<detail::ModelState> model_;  // null: modules
  std::vector<Entry> entries_;
  std::vector<std::string> names_;
  Tensor step_;
  double lr_ = 0;
};

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double weight_decay = 0;  ///< added to the gradient
};

/// g' = g + weight_decay·p; m = momentum·m + g'; p -= lr·m. State "momentum_buffer", unless momentum is 0.
class Sgd final : public Optimizer {
 public:
  /// Throws ConfigError for a number that is negative or not finite.
  Sgd(const Model& model, SgdOptions options);
  Sgd(std::span<Module* const> modules, SgdOptions options);

 private:
  void begin_step(const ExecutionSpace& exec, const Tensor& step) override;
  void update(const ExecutionSpace& exec, const Tensor& parameters, const Tensor& gradients,
              std::span<const Tensor> buffers) override;

  SgdOptions options_;
};

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;  ///< decoupled: p is multiplied by 1 - lr·weight_decay
};

/// Adam with decoupled weight decay and bias correction, as PyTorch's: m = beta1·m + (1−beta1)·g, v = beta2·v +
/// (1−beta2)·g², p = p·(1 − lr·weight_decay) − lr·m̂ / (√v̂ + eps). State "exp_avg" and "exp_avg_sq".
class AdamW final : public Optimizer {
 public:
  /// Throws ConfigError for a number out of range: lr and weight_decay ≥ 0, 0 ≤ beta < 1, eps > 0.
  AdamW(const Model& model, AdamWOptions options);
  AdamW(std::span<Module* const> modules, AdamWOptions options);

 private:
  void begin_step(const ExecutionSpace& exec, const Tensor& step) override;
  void update(const ExecutionSpace& exec, const Tensor& parameters, const Tensor& gradients,
              std::span<const Tensor> buffers) override;

  AdamWOptions options_;
  Tensor scalars_;  // of the current step: lr / (1 - beta1^t), sqrt(1 - beta2^t)
};

}  // namespace fsdp2
