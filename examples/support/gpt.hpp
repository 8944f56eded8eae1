// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// A decoder-only transformer (GPT-2's: Radford et al. 2019) with its parameters sharded: each block is a Module, and
// the root, whose table embeds the bytes and scores them at the end, is another.

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fsdp2/error.hpp"
#include "fsdp2/model.hpp"
#include "support/gemm.hpp"
#include "support/layers.hpp"
#include "support/transformer.hpp"

namespace examples {

struct GptShape {
  std::int64_t values = 256;  ///< of a byte, all below this
  std::int64_t context = 64;  ///< bytes of a sample
  std::int64_t width = 128;
  std::int64_t heads = 4;
  std::int64_t layers = 2;
};

/// Tensor parallelism (Shoeybi et al. 2019): along the mesh axis "tp", where there is one, each rank has some of the
/// heads and of the hidden units. The layers that lead to them hold rows of their weights, the layers that lead back
/// hold columns, and their results are summed over the ranks. Ranks along the other axes have samples of their own.
class Gpt {
 public:
  /// For up to `samples` samples at a time on this rank. Throws fsdp2::Error where the heads do not divide the width,
  /// or cannot be shared out along "tp".
  Gpt(const fsdp2::Config& config, const GptShape& shape, std::int64_t samples, std::uint64_t seed)
      : shape_(shape), model_(config) {
    const fsdp2::DeviceMesh& mesh = *config.mesh;
    if (mesh.spec().has_axis("tp")) tp_ = &mesh.communicator("tp");
    const std::int64_t parts = tp_ == nullptr ? 1 : tp_->size();
    if (shape.width % shape.heads != 0)
      throw fsdp2::Error("a width of " + std::to_string(shape.width) + " cannot be cut into " +
                         std::to_string(shape.heads) + " heads of equal length: choose a multiple");
    if (shape.heads % parts != 0)
      throw fsdp2::Error(std::to_string(shape.heads) + " heads cannot be shared out among the " +
                         std::to_string(parts) + " ranks of mesh axis \"tp\": choose a multiple");
    add_modules(seed);
    allocate(samples, parts);
  }

  fsdp2::Model& model() { return model_; }

  /// Forward and backward of one batch [samples, context]: loss = scale · the sum over its targets
  /// [samples · context] of −log p. With `reduce`, starts the reduction of the gradients, which are those of scale ·
  /// the sum and of what earlier calls held; without, holds them. Collective over the mesh, also without samples.
  void forward_backward(const fsdp2::ExecutionSpace& exec, const ByteMatrix& bytes, const ByteVector& targets,
                        double scale, const Scalar& loss, bool reduce = true) {
    samples_ = bytes.extent(0);
    {
      const fsdp2::Scope scope = root_->forward(exec);
      const Weights w = weights(exec, scope);
      embed_places(exec, bytes, w.matrix("tokens"), w.matrix("positions"), input(0));
    }
    for (std::size_t i = 0; i < blocks_.size(); ++i) forward(exec, i);
    {
      const fsdp2::Scope scope = root_->forward(exec);
      const Weights w = weights(exec, scope);
      layer_norm(exec, input(blocks_.size()), w.vector("norm.gain"), w.vector("norm.bias"), rows(statistics_),
                 rows(normed_));
      gemm(exec, Transpose::no, rows(normed_), Transpose::yes, w.matrix("tokens"), 0, rows(logits_));
    }
    const Matrix dlogits = rows(logits_);
    cross_entropy(exec, dlogits, targets, scale, loss);

    // The root's backward ends after that of the embedding, which adds to the gradient of the same table.
    fsdp2::BackwardScope root = root_->backward(exec);
    {
      const Weights w = weights(exec, root);
      const fsdp2::LentView<Matrix> dtokens = root.grad<float**>("tokens");
      gemm(exec, Transpose::yes, dlogits, Transpose::no, rows(normed_), dtokens.beta, dtokens.view);
      gemm(exec, Transpose::no, dlogits, Transpose::no, w.matrix("tokens"), 0, rows(dnormed_));
      layer_norm_backward(exec, input(blocks_.size()), w.vector("norm.gain"), rows(statistics_), rows(dnormed_),
                          root.grad<float*>("norm.gain"), root.grad<float*>("norm.bias"), 0, rows(dx_));
    }
    for (std::size_t i = blocks_.size(); i-- > 0;) backward(exec, i, reduce);
    embed_places_backward(exec, bytes, rows(dx_), root.grad<float**>("tokens"), root.grad<float**>("positions"));
    end(root, reduce);
  }

 private:
  using Activations = Kokkos::View<float**, Kokkos::LayoutRight, fsdp2::MemorySpace>;
  using Exec = fsdp2::ExecutionSpace;

  /// A module, and what its backward needs.
  struct Block {
    fsdp2::Module* module = nullptr;
    Activations input;
    Activations statistics1;
    Activations normed1;
    Activations qkv;
    Activations weights;
    Activations attended;
    Activations middle;  // of the residual stream: after the attention
    Activations statistics2;
    Activations normed2;
    Activations slope;
    Activations hidden;
  };

  static std::size_t size(std::int64_t extent) { return static_cast<std::size_t>(extent); }
  static Activations matrix(std::int64_t row_count, std::int64_t columns) {
    return Activations(Kokkos::view_alloc(Kokkos::WithoutInitializing, "activations"), size(row_count), size(columns));
  }

  void add_modules(std::uint64_t seed) {
    using fsdp2::init::normal;
    using fsdp2::init::ones;
    using fsdp2::init::zeros;
    const std::int64_t width = shape_.width;
    // GPT-2's: what is added to the residual stream is smaller, so that the sum keeps its variance.
    const auto inner = normal(0, 0.02, seed);
    const auto residual = normal(0, 0.02 / std::sqrt(2.0 * static_cast<double>(shape_.layers)), seed);
    root_ = &model_.add("root",
                        {{"tokens", {shape_.values, width}, inner},
                         {"positions", {shape_.context, width}, inner},
                         {"norm.gain", {width}, ones()},
                         {"norm.bias", {width}, zeros()}},
                        {.reshard_after_forward = fsdp2::ReshardAfterForward(false)});
    // A parameter that tensor parallelism cuts, along one dimension.
    const auto cut = [this](std::int64_t dim, fsdp2::ParamSpec spec) {
      if (tp_ != nullptr) spec.placements["tp"] = fsdp2::Shard{dim};
      return spec;
    };
    blocks_.resize(size(shape_.layers));
    for (std::size_t i = 0; i < blocks_.size(); ++i)
      blocks_[i].module =
          &model_.add("block" + std::to_string(i), {{"norm1.gain", {width}, ones()},
                                                    {"norm1.bias", {width}, zeros()},
                                                    cut(0, {"qkv.weight", {3 * width, width}, inner}),
                                                    cut(0, {"qkv.bias", {3 * width}, zeros()}),
                                                    cut(1, {"out.weight", {width, width}, residual}),
                                                    {"out.bias", {width}, zeros()},
                                                    {"norm2.gain", {width}, ones()},
                                                    {"norm2.bias", {width}, zeros()},
                                                    cut(0, {"up.weight", {4 * width, width}, inner}),
                                                    cut(0, {"up.bias", {4 * width}, zeros()}),
                                                    cut(1, {"down.weight", {width, 4 * width}, residual}),
                                                    {"down.bias", {width}, zeros()}});
  }

  void allocate(std::int64_t samples, std::int64_t parts) {
    const std::int64_t width = shape_.width;
    const std::int64_t part = width / parts;
    const std::int64_t rows = samples * shape_.context;
    heads_ = shape_.heads / parts;
    for (Block& block : blocks_) {
      block.input = matrix(rows, width);
      block.statistics1 = matrix(rows, 2);
      block.normed1 = matrix(rows, width);
      block.qkv = matrix(rows, 3 * part);
      block.weights = matrix(rows * heads_, shape_.context);
      block.attended = matrix(rows, part);
      block.middle = matrix(rows, width);
      block.statistics2 = matrix(rows, 2);
      block.normed2 = matrix(rows, width);
      block.slope = matrix(rows, 4 * part);
      block.hidden = matrix(rows, 4 * part);
    }
    x_ = matrix(rows, width);
    statistics_ = matrix(rows, 2);
    normed_ = matrix(rows, width);
    logits_ = matrix(rows, shape_.values);
    dx_ = matrix(rows, width);
    dnormed_ = matrix(rows, width);
    dattended_ = matrix(rows, part);
    dhidden_ = matrix(rows, 4 * part);
    dqkv_ = matrix(rows, 3 * part);
    dweights_ = matrix(rows * heads_, shape_.context);
    std::int64_t most = 0;
    for (const fsdp2::Module* module : model_.modules()) {
      std::int64_t elements = 0;
      for (const fsdp2::ShardedParam& param : module->params()) elements += fsdp2::numel(param.full_shape());
      most = std::max(most, elements);
    }
    const auto dtype = model_.config().mp_policy.param_dtype;
    widened_ = Widened(dtype.value_or(fsdp2::DType::f32) == fsdp2::DType::f32 ? 0 : most);
  }

  /// Those of the current batch.
  Matrix rows(const Activations& all) const {
    return Matrix(all.data(), samples_ * size(shape_.context), all.extent(1));
  }
  /// The residual stream before block i, or after the last.
  Matrix input(std::size_t i) const { return rows(i < blocks_.size() ? blocks_[i].input : x_); }
  Attention attention() const {
    return {static_cast<std::int64_t>(samples_), shape_.context, heads_, shape_.width / shape_.heads};
  }
  Matrix squares(const Activations& all) const {
    return Matrix(all.data(), samples_ * size(heads_ * shape_.context), all.extent(1));
  }
  static void end(fsdp2::BackwardScope& scope, bool reduce) {
    if (reduce)
      scope.reduce();
    else
      scope.hold();
  }

  /// The parameters of a scope in f32, until weights() is called for the next.
  struct Weights {
    const Exec& exec;
    const fsdp2::Scope& scope;
    Widened& widened;
    Matrix matrix(const char* name) const { return widened.matrix(exec, scope.tensor(name)); }
    Vector vector(const char* name) const { return widened.vector(exec, scope.tensor(name)); }
  };
  Weights weights(const Exec& exec, const fsdp2::Scope& scope) {
    widened_.clear();
    return {exec, scope, widened_};
  }

  /// Sums what the ranks of "tp" have computed of the same rows.
  void sum_parts(const Exec& exec, const Matrix& partial) const {
    if (tp_ != nullptr) tp_->all_reduce(exec, fsdp2::wrap(partial), fsdp2::ReduceOp::sum).wait();
  }
  /// y = x · weightᵀ + bias + residual, where x and weight are this rank's columns of all.
  void row_parallel(const Exec& exec, const ConstMatrix& x, const ConstMatrix& weight, const ConstVector& bias,
                    const ConstMatrix& residual, const Matrix& y) const {
    if (tp_ == nullptr || tp_->rank() == 0)
      linear_residual(exec, x, weight, bias, residual, y);
    else
      gemm(exec, Transpose::no, x, Transpose::yes, weight, 0, y);
    sum_parts(exec, y);
  }

  void forward(const Exec& exec, std::size_t i) {
    const Block& block = blocks_[i];
    const fsdp2::Scope scope = block.module->forward(exec);
    const Weights w = weights(exec, scope);
    layer_norm(exec, input(i), w.vector("norm1.gain"), w.vector("norm1.bias"), rows(block.statistics1),
               rows(block.normed1));
    linear(exec, rows(block.normed1), w.matrix("qkv.weight"), w.vector("qkv.bias"), rows(block.qkv));
    attention().forward(exec, rows(block.qkv), squares(block.weights), rows(block.attended));
    row_parallel(exec, rows(block.attended), w.matrix("out.weight"), w.vector("out.bias"), input(i),
                 rows(block.middle));
    layer_norm(exec, rows(block.middle), w.vector("norm2.gain"), w.vector("norm2.bias"), rows(block.statistics2),
               rows(block.normed2));
    linear(exec, rows(block.normed2), w.matrix("up.weight"), w.vector("up.bias"), rows(block.slope));
    gelu_and_slope(exec, rows(block.slope), rows(block.hidden));
    row_parallel(exec, rows(block.hidden), w.matrix("down.weight"), w.vector("down.bias"), rows(block.middle),
                 input(i + 1));
  }

  /// dx_, the gradient of the block's output, becomes that of its input. The residual stream passes it on as it is.
  void backward(const Exec& exec, std::size_t i, bool reduce) {
    const Block& block = blocks_[i];
    fsdp2::BackwardScope scope = block.module->backward(exec);
    const Weights w = weights(exec, scope);
    linear_backward(exec, rows(block.hidden), w.matrix("down.weight"), rows(dx_), scope.grad<float**>("down.weight"),
                    scope.grad<float*>("down.bias"), rows(dhidden_));
    gelu_slope_backward(exec, rows(block.slope), rows(dhidden_));
    linear_backward(exec, rows(block.normed2), w.matrix("up.weight"), rows(dhidden_), scope.grad<float**>("up.weight"),
                    scope.grad<float*>("up.bias"), rows(dnormed_));
    sum_parts(exec, rows(dnormed_));
    layer_norm_backward(exec, rows(block.middle), w.vector("norm2.gain"), rows(block.statistics2), rows(dnormed_),
                        scope.grad<float*>("norm2.gain"), scope.grad<float*>("norm2.bias"), 1, rows(dx_));
    linear_backward(exec, rows(block.attended), w.matrix("out.weight"), rows(dx_), scope.grad<float**>("out.weight"),
                    scope.grad<float*>("out.bias"), rows(dattended_));
    attention().backward(exec, rows(block.qkv), squares(block.weights), rows(dattended_), squares(dweights_),
                         rows(dqkv_));
    linear_backward(exec, rows(block.normed1), w.matrix("qkv.weight"), rows(dqkv_), scope.grad<float**>("qkv.weight"),
                    scope.grad<float*>("qkv.bias"), rows(dnormed_));
    sum_parts(exec, rows(dnormed_));
    layer_norm_backward(exec, input(i), w.vector("norm1.gain"), rows(block.statistics1), rows(dnormed_),
                        scope.grad<float*>("norm1.gain"), scope.grad<float*>("norm1.bias"), 1, rows(dx_));
    end(scope, reduce);
  }

  GptShape shape_;
  fsdp2::Model model_;
  fsdp2::Communicator* tp_ = nullptr;
  std::int64_t heads_ = 0;  // of this rank
  fsdp2::Module* root_ = nullptr;
  std::vector<Block> blocks_;
  std::size_t samples_ = 0;  // of the current batch
  Activations x_;            // after the last block
  Activations statistics_;
  Activations normed_;
  Activations logits_;
  Activations dx_;
  Activations dnormed_;
  Activations dattended_;
  Activations dhidden_;
  Activations dqkv_;
  Activations dweights_;
  Widened widened_{0};
};

}  // namespace examples
