// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fsdp2/device_mesh.hpp"
#include "fsdp2/model.hpp"
#include "fsdp2/optimizer.hpp"
#include "fsdp2/state_dict.hpp"

namespace fsdp2 {

struct ClipOptions {
  double norm_type = 2;             ///< 1, 2, or infinity
  bool error_if_nonfinite = false;  ///< throw where the norm is infinite or NaN
};

/// Finishes the backward, and multiplies all gradients by max_norm / (norm + 1e-6) where that is below 1. Returns the
/// norm before: of the gradients of all parameters, taken as one vector in which each element counts once, whether it
/// is sharded or replicated; summed in f64, module by module, then rank by rank, so that every rank has the same bits.
/// A norm that is infinite or NaN scales nothing. An infinite max_norm only measures.
///
/// Collective over the mesh: one all-reduce of a number per rank. Modules may have different meshes if one of them
/// covers the ranks of the others; parameters on different meshes are different parameters. Throws ConfigError for
/// another norm_type, a max_norm that is negative or NaN, no modules, and meshes that none covers; as
/// Model::finish_backward; and with error_if_nonfinite Error, the same on all ranks, which names the first rank and
/// module that have such a gradient. Gradients are unchanged then.
double clip_grad_norm(Model& model, double max_norm, const ClipOptions& options = {},
                      const ExecutionSpace& exec = ExecutionSpace());
double clip_grad_norm(std::span<Module* const> modules, double max_norm, const ClipOptions& options = {},
                      const ExecutionSpace& exec = ExecutionSpace());

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;             ///< above 1
  double backoff_factor = 0.5;          ///< above 0, below 1
  std::int64_t growth_interval = 2000;  ///< finite steps in a row before the scale grows
};

/// What a scaler remembers from step to step.
struct GradScalerState {
  float scale = 0;
  std::int64_t growth_tracker = 0;  ///< finite steps since the scale changed

  friend bool operator==(const GradScalerState&, const GradScalerState&) = default;
};

/// Dynamic loss scaling, for gradients that are computed in f16. In each iteration: multiply the gradient of the loss
/// by scale(), run the backward, call step(optimizer) in place of optimizer.step(), and then update(). Every rank
/// decides alike, before parameters, optimizer state or gradients are changed.
class GradScaler {
 public:
  /// Throws ConfigError for a number out of range.
  explicit GradScaler(const GradScalerOptions& options = {});

  float scale() const { return state_->values.scale; }

  /// Finishes the backward and divides the gradients by scale(), unless one of them is infinite or NaN on any rank:
  /// gradients are left alone then. Returns whether all were finite. For what looks at gradients before step does, such
  /// as clip_grad_norm, and for updates without an Optimizer. Collective, one all-reduce, as clip_grad_norm. Throws
  /// Error for gradients that were unscaled since the last update() already, and as clip_grad_norm.
  bool unscale(Optimizer& optimizer, const ExecutionSpace& exec = ExecutionSpace());
  bool unscale(Model& model, const ExecutionSpace& exec = ExecutionSpace());
  bool unscale(std::span<Module* const> modules, const ExecutionSpace& exec = ExecutionSpace());

  /// Unscales what was not unscaled yet; that needs one all-reduce, and none where unscale has done it all. Then calls
  /// optimizer.step(), or skips it on all ranks where a gradient was not finite: parameters and optimizer state keep
  /// their bits. Returns whether it stepped. Collective. Throws Error where the optimizer has stepped since the last
  /// update(), and as unscale and Optimizer::step.
  bool step(Optimizer& optimizer, const ExecutionSpace& exec = ExecutionSpace());

  /// Ends the iteration: where a gradient was not finite, scale() is multiplied by backoff_factor; after
  /// growth_interval iterations without one, by growth_factor. It stays as it is rather than leave the normal f32
  /// range. Local. Throws Error where nothing was unscaled since the last update().
  void update();

  GradScalerState state() const { return state_->values; }
  /// Throws ConfigError for a scale that is not a normal, positive number, and for a negative growth_tracker.
  void set_state(const GradScalerState& state);

  /// Adds "scaler.scale", f32, and "scaler.growth_tracker", i64, as replicated scalars on `mesh`: current after every
  /// update(), and what is loaded into them is used. Throws ConfigError where the dict has them already.
  void add_to(StateDict& dict, const DeviceMesh& mesh);

 private:
  struct State {
    GradScalerState values;
    Tensor scale;
    Tensor growth_tracker;

    void set(const GradScalerState& next);
    void store() const;
    void fetch();
  };
  /// A module whose gradients were looked at since the last update().
  struct Record {
    std::shared_ptr<detail::ParamGroup> group;
    bool is_finite = false;
    bool has_stepped = false;
  };

  Record* find(const detail::ParamGroup& group);
  bool unscale(const std::vector<std::shared_ptr<detail::ParamGroup>>& groups, const ExecutionSpace& exec);

  GradScalerOptions options_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::vector<Record> records_;
};

}  // namespace fsdp2
