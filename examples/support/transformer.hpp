// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// The layers of a transformer, forward and backward, by the rules of layers.hpp. A row is one place of one sample; the
// places of a sample follow one another.

#include <Kokkos_Core.hpp>
#include <cmath>
#include <cstdint>

#include "fsdp2/module.hpp"
#include "support/gemm.hpp"
#include "support/layers.hpp"

namespace examples {

namespace detail {

struct EmbedPlaces {
  ByteMatrix bytes;
  ConstMatrix table;
  ConstMatrix positions;
  Matrix y;
  KOKKOS_FUNCTION void operator()(std::int64_t sample, std::int64_t place) const {
    const std::int64_t row = sample * static_cast<std::int64_t>(bytes.extent(1)) + place;
    const auto value = static_cast<std::int64_t>(bytes(sample, place));
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(y.extent(1)); ++i)
      y(row, i) = table(value, i) + positions(place, i);
  }
};

struct LayerNorm {
  static constexpr float epsilon = 1e-5f;
  ConstMatrix x;
  ConstVector gain;
  ConstVector bias;
  Matrix statistics;
  Matrix y;
  KOKKOS_FUNCTION void operator()(std::int64_t row) const {
    const auto width = static_cast<std::int64_t>(x.extent(1));
    float mean = 0;
    for (std::int64_t i = 0; i < width; ++i) mean += x(row, i);
    mean /= static_cast<float>(width);
    float variance = 0;
    for (std::int64_t i = 0; i < width; ++i) variance += (x(row, i) - mean) * (x(row, i) - mean);
    const float scale = 1 / std::sqrt(variance / static_cast<float>(width) + epsilon);
    statistics(row, 0) = mean;
    statistics(row, 1) = scale;
    for (std::int64_t i = 0; i < width; ++i) y(row, i) = (x(row, i) - mean) * scale * gain(i) + bias(i);
  }
};

struct LayerNormBackward {
  ConstMatrix x;
  ConstVector gain;
  ConstMatrix statistics;
  ConstMatrix dy;
  Matrix dx;
  float beta;
  KOKKOS_FUNCTION void operator()(std::int64_t row) const {
    const auto width = static_cast<std::int64_t>(x.extent(1));
    const float mean = statistics(row, 0);
    const float scale = statistics(row, 1);
    float sum = 0;         // of the gradient of the normalised values
    float projection = 0;  // of that on these values
    for (std::int64_t i = 0; i < width; ++i) {
      const float gradient = dy(row, i) * gain(i);
      sum += gradient;
      projection += gradient * (x(row, i) - mean) * scale;
    }
    sum /= static_cast<float>(width);
    projection /= static_cast<float>(width);
    for (std::int64_t i = 0; i < width; ++i) {
      const float normalised = (x(row, i) - mean) * scale;
      const float gradient = scale * (dy(row, i) * gain(i) - sum - normalised * projection);
      dx(row, i) = beta == 0 ? gradient : dx(row, i) + gradient;
    }
  }
};

struct LayerNormParameters {
  ConstMatrix x;
  ConstMatrix statistics;
  ConstMatrix dy;
  fsdp2::LentView<Vector> dgain;
  fsdp2::LentView<Vector> dbias;
  KOKKOS_FUNCTION void operator()(std::int64_t group) const {
    const std::int64_t begin = group * columns_at_once;
    const std::int64_t rest = static_cast<std::int64_t>(x.extent(1)) - begin;
    const std::int64_t count = rest < columns_at_once ? rest : columns_at_once;
    float gain[columns_at_once] = {};
    float bias[columns_at_once] = {};
    for (std::int64_t row = 0; row < static_cast<std::int64_t>(x.extent(0)); ++row) {
      const float mean = statistics(row, 0);
      const float scale = statistics(row, 1);
      for (std::int64_t i = 0; i < count; ++i) {
        gain[i] += dy(row, begin + i) * (x(row, begin + i) - mean) * scale;
        bias[i] += dy(row, begin + i);
      }
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t column = begin + i;
      dgain.view(column) = gain[i] + (dgain.beta == 0 ? 0 : dgain.beta * dgain.view(column));
      dbias.view(column) = bias[i] + (dbias.beta == 0 ? 0 : dbias.beta * dbias.view(column));
    }
  }
};

struct AddBias {
  ConstMatrix x;
  ConstVector bias;
  Matrix y;
  KOKKOS_FUNCTION void operator()(std::int64_t row) const {
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(y.extent(1)); ++i) y(row, i) = x(row, i) + bias(i);
  }
};

template <class T>
struct Widen {
  Kokkos::View<const T*, Kokkos::LayoutRight, fsdp2::MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>> source;
  Vector target;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const { target(i) = static_cast<float>(source(i)); }
};

struct GeluAndSlope {
  Matrix x;
  Matrix y;
  KOKKOS_FUNCTION void operator()(std::int64_t row) const {
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(x.extent(1)); ++i) {
      const float value = x(row, i);
      const float probability = normal_cdf(value);
      y(row, i) = value * probability;
      x(row, i) = probability + value * 0.39894228f * std::exp(-0.5f * value * value);
    }
  }
};

struct Multiply {
  ConstMatrix factor;
  Matrix y;
  KOKKOS_FUNCTION void operator()(std::int64_t row) const {
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(y.extent(1)); ++i) y(row, i) *= factor(row, i);
  }
};

/// Row i of a square matrix looks at its columns up to i.
struct CausalSoftmax {
  Matrix scores;
  KOKKOS_FUNCTION void operator()(std::int64_t row) const {
    const auto places = static_cast<std::int64_t>(scores.extent(1));
    const std::int64_t seen = row % places + 1;
    float largest = scores(row, 0);
    for (std::int64_t j = 1; j < seen; ++j) largest = scores(row, j) > largest ? scores(row, j) : largest;
    float total = 0;
    for (std::int64_t j = 0; j < seen; ++j) total += scores(row, j) = std::exp(scores(row, j) - largest);
    for (std::int64_t j = 0; j < seen; ++j) scores(row, j) /= total;
    for (std::int64_t j = seen; j < places; ++j) scores(row, j) = 0;
  }
};

struct CausalSoftmaxBackward {
  ConstMatrix weights;
  Matrix dweights;
  KOKKOS_FUNCTION void operator()(std::int64_t row) const {
    const auto places = static_cast<std::int64_t>(weights.extent(1));
    const std::int64_t seen = row % places + 1;
    float projection = 0;
    for (std::int64_t j = 0; j < seen; ++j) projection += weights(row, j) * dweights(row, j);
    for (std::int64_t j = 0; j < seen; ++j) dweights(row, j) = weights(row, j) * (dweights(row, j) - projection);
    for (std::int64_t j = seen; j < places; ++j) dweights(row, j) = 0;
  }
};

}  // namespace detail

/// f32 copies of bf16 parameters: BLAS computes in f32. What is f32 already is not copied.
class Widened {
 public:
  /// With room for `elements` at a time, beyond those that were f32 before.
  explicit Widened(std::int64_t elements) : buffer_("widened", static_cast<std::size_t>(elements)) {}

  /// Makes the room free again: earlier views are invalid.
  void clear() { used_ = 0; }
  Matrix matrix(const fsdp2::ExecutionSpace& exec, const fsdp2::Tensor& tensor) {
    if (tensor.dtype() == fsdp2::DType::f32) return tensor.view<float**>();
    return Matrix(widen(exec, tensor), static_cast<std::size_t>(tensor.shape().at(0)),
                  static_cast<std::size_t>(tensor.shape().at(1)));
  }
  Vector vector(const fsdp2::ExecutionSpace& exec, const fsdp2::Tensor& tensor) {
    if (tensor.dtype() == fsdp2::DType::f32) return tensor.view<float*>();
    return Vector(widen(exec, tensor), static_cast<std::size_t>(tensor.numel()));
  }

 private:
  float* widen(const fsdp2::ExecutionSpace& exec, const fsdp2::Tensor& tensor) {
    const auto count = static_cast<std::size_t>(tensor.numel());
    const auto source = tensor.slice(0, {tensor.numel()}).view<const fsdp2::bfloat16*>();
    const Vector target(buffer_.data() + used_, count);
    used_ += count;
    Kokkos::parallel_for("widen", detail::each(exec, count), detail::Widen<fsdp2::bfloat16>{source, target});
    return target.data();
  }

  Kokkos::View<float*, Kokkos::LayoutRight, fsdp2::MemorySpace> buffer_;
  std::size_t used_ = 0;
};

/// y [samples · places, width] = the byte's row of `table` [values, width] + the place's of `positions`
/// [places, width], with bytes [samples, places].
inline void embed_places(const fsdp2::ExecutionSpace& exec, const ByteMatrix& bytes, const ConstMatrix& table,
                         const ConstMatrix& positions, const Matrix& y) {
  Kokkos::parallel_for("embed_places", detail::each_element(exec, bytes),
                       detail::EmbedPlaces{bytes, table, positions, y});
}

inline void embed_places_backward(const fsdp2::ExecutionSpace& exec, const ByteMatrix& bytes, const ConstMatrix& dy,
                                  const fsdp2::LentView<Matrix>& dtable, const fsdp2::LentView<Matrix>& dpositions) {
  // A sample's places side by side are one long row.
  const ConstMatrix samples(dy.data(), bytes.extent(0), bytes.extent(1) * dy.extent(1));
  embed_backward(exec, bytes, samples, dtable);
  const fsdp2::LentView<Vector> sum{Vector(dpositions.view.data(), dpositions.view.size()), dpositions.beta};
  Kokkos::parallel_for("positions_backward", detail::each_column_group(exec, sum.view.extent(0)),
                       detail::SumRows{samples, sum});
}

/// y = (x − mean) / √(variance + 1e-5) · gain + bias, over each row. `statistics` [rows, 2] is for the backward.
inline void layer_norm(const fsdp2::ExecutionSpace& exec, const ConstMatrix& x, const ConstVector& gain,
                       const ConstVector& bias, const Matrix& statistics, const Matrix& y) {
  Kokkos::parallel_for("layer_norm", detail::each(exec, x.extent(0)), detail::LayerNorm{x, gain, bias, statistics, y});
}

/// dx = its gradient + beta · dx, with beta 0 or 1.
inline void layer_norm_backward(const fsdp2::ExecutionSpace& exec, const ConstMatrix& x, const ConstVector& gain,
                                const ConstMatrix& statistics, const ConstMatrix& dy,
                                const fsdp2::LentView<Vector>& dgain, const fsdp2::LentView<Vector>& dbias, float beta,
                                const Matrix& dx) {
  Kokkos::parallel_for("layer_norm_parameters", detail::each_column_group(exec, x.extent(1)),
                       detail::LayerNormParameters{x, statistics, dy, dgain, dbias});
  Kokkos::parallel_for("layer_norm_backward", detail::each(exec, x.extent(0)),
                       detail::LayerNormBackward{x, gain, statistics, dy, dx, beta});
}

/// y [rows, out] = x [rows, in] · weightᵀ + bias + residual [rows, out].
inline void linear_residual(const fsdp2::ExecutionSpace& exec, const ConstMatrix& x, const ConstMatrix& weight,
                            const ConstVector& bias, const ConstMatrix& residual, const Matrix& y) {
  Kokkos::parallel_for("bias_residual", detail::each(exec, y.extent(0)), detail::AddBias{residual, bias, y});
  gemm(exec, Transpose::no, x, Transpose::yes, weight, 1, y);
}

/// y = gelu(x); x becomes the derivative there, by which gelu_slope_backward multiplies.
inline void gelu_and_slope(const fsdp2::ExecutionSpace& exec, const Matrix& x, const Matrix& y) {
  Kokkos::parallel_for("gelu_and_slope", detail::each(exec, x.extent(0)), detail::GeluAndSlope{x, y});
}

/// Turns the gradient of y into that of x, in place.
inline void gelu_slope_backward(const fsdp2::ExecutionSpace& exec, const ConstMatrix& slope, const Matrix& dy) {
  Kokkos::parallel_for("gelu_slope_backward", detail::each(exec, dy.extent(0)), detail::Multiply{slope, dy});
}

/// Causal attention of several heads. A row of `qkv` has three stretches for each head, one head after another: query,
/// key and value, of equal length. y [rows, heads · length]; weights [samples · heads · places, places] is for the
/// backward.
struct Attention {
  std::int64_t samples = 0;
  std::int64_t places = 0;
  std::int64_t heads = 0;
  std::int64_t length = 0;  ///< of a query, a key and a value

  void forward(const fsdp2::ExecutionSpace& exec, const Matrix& qkv, const Matrix& weights, const Matrix& y) const {
    for (std::int64_t head = 0; head < heads; ++head)
      gemm_each(exec, samples, {places, places, length}, scale(), Transpose::no, part(qkv, head, 0), Transpose::yes,
                part(qkv, head, 1), square(weights, head));
    Kokkos::parallel_for("causal_softmax", detail::each(exec, weights.extent(0)), detail::CausalSoftmax{weights});
    for (std::int64_t head = 0; head < heads; ++head)
      gemm_each(exec, samples, {places, length, places}, 1, Transpose::no, square(weights, head), Transpose::no,
                part(qkv, head, 2), columns(y, head));
  }

  /// Writes dqkv; dweights is for its own use.
  void backward(const fsdp2::ExecutionSpace& exec, const Matrix& qkv, const Matrix& weights, const Matrix& dy,
                const Matrix& dweights, const Matrix& dqkv) const {
    for (std::int64_t head = 0; head < heads; ++head) {
      gemm_each(exec, samples, {places, places, length}, 1, Transpose::no, columns(dy, head), Transpose::yes,
                part(qkv, head, 2), square(dweights, head));
      gemm_each(exec, samples, {places, length, places}, 1, Transpose::yes, square(weights, head), Transpose::no,
                columns(dy, head), part(dqkv, head, 2));
    }
    Kokkos::parallel_for("causal_softmax_backward", detail::each(exec, weights.extent(0)),
                         detail::CausalSoftmaxBackward{weights, dweights});
    for (std::int64_t head = 0; head < heads; ++head) {
      gemm_each(exec, samples, {places, length, places}, scale(), Transpose::no, square(dweights, head), Transpose::no,
                part(qkv, head, 1), part(dqkv, head, 0));
      gemm_each(exec, samples, {places, length, places}, scale(), Transpose::yes, square(dweights, head), Transpose::no,
                part(qkv, head, 0), part(dqkv, head, 1));
    }
  }

 private:
  float scale() const { return 1 / std::sqrt(static_cast<float>(length)); }
  /// The queries (0), keys (1) or values (2) of a head, one matrix for each sample.
  Strided part(const Matrix& qkv, std::int64_t head, std::int64_t which) const {
    const std::int64_t width = 3 * heads * length;
    return {qkv.data() + (3 * head + which) * length, width, places * width};
  }
  Strided columns(const Matrix& y, std::int64_t head) const {
    return {y.data() + head * length, heads * length, places * heads * length};
  }
  Strided square(const Matrix& weights, std::int64_t head) const {
    return {weights.data() + head * places * places, places, heads * places * places};
  }
};

}  // namespace examples
