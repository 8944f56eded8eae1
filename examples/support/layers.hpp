// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// The layers of a small network, forward and backward. All are ordered on `exec`; a row is a sample. Gradients of
// parameters are lent by fsdp2: each is written as gradient + beta · (what is there). No sum depends on timing.

#include <Kokkos_Core.hpp>
#include <cmath>
#include <cstdint>

#include "fsdp2/module.hpp"
#include "support/gemm.hpp"

namespace examples {

using Vector = Kokkos::View<float*, Kokkos::LayoutRight, fsdp2::MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
using ConstVector =
    Kokkos::View<const float*, Kokkos::LayoutRight, fsdp2::MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
using Scalar = Kokkos::View<double, Kokkos::LayoutRight, fsdp2::MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
using ByteMatrix = Kokkos::View<const std::uint8_t**, Kokkos::LayoutRight, fsdp2::MemorySpace>;
using ByteVector = Kokkos::View<const std::uint8_t*, Kokkos::LayoutRight, fsdp2::MemorySpace>;

namespace detail {

using Index = Kokkos::IndexType<std::int64_t>;
using RowPolicy = Kokkos::RangePolicy<fsdp2::ExecutionSpace, Index>;
using ElementPolicy = Kokkos::MDRangePolicy<fsdp2::ExecutionSpace,
                                            Kokkos::Rank<2, Kokkos::Iterate::Right, Kokkos::Iterate::Right>, Index>;

/// One index for each of `count`.
inline RowPolicy each(const fsdp2::ExecutionSpace& exec, std::size_t count) {
  return {exec, 0, static_cast<std::int64_t>(count)};
}
/// Two indices for each element of a matrix.
template <class View>
ElementPolicy each_element(const fsdp2::ExecutionSpace& exec, const View& matrix) {
  return {exec, {0, 0}, {static_cast<std::int64_t>(matrix.extent(0)), static_cast<std::int64_t>(matrix.extent(1))}};
}

struct Embed {
  ByteMatrix bytes;
  ConstMatrix table;
  Matrix y;
  KOKKOS_FUNCTION void operator()(std::int64_t row, std::int64_t place) const {
    const auto width = static_cast<std::int64_t>(table.extent(1));
    for (std::int64_t i = 0; i < width; ++i) y(row, place * width + i) = table(bytes(row, place), i);
  }
};

/// For one byte value, whose row of the table nobody else touches: no atomics.
struct EmbedBackward {
  ByteMatrix bytes;
  ConstMatrix dy;
  fsdp2::LentView<Matrix> dtable;
  KOKKOS_FUNCTION void operator()(std::int64_t value) const {
    const Matrix& sum = dtable.view;
    const auto width = static_cast<std::int64_t>(sum.extent(1));
    for (std::int64_t i = 0; i < width; ++i) sum(value, i) = dtable.beta == 0 ? 0 : dtable.beta * sum(value, i);
    for (std::int64_t row = 0; row < static_cast<std::int64_t>(bytes.extent(0)); ++row)
      for (std::int64_t place = 0; place < static_cast<std::int64_t>(bytes.extent(1)); ++place)
        if (bytes(row, place) == value)
          for (std::int64_t i = 0; i < width; ++i) sum(value, i) += dy(row, place * width + i);
  }
};

struct Broadcast {
  ConstVector row;
  Matrix y;
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t j) const { y(i, j) = row(j); }
};

/// For a few neighbouring columns at once, so that what is read together lies together.
constexpr std::int64_t columns_at_once = 16;

inline RowPolicy each_column_group(const fsdp2::ExecutionSpace& exec, std::size_t columns) {
  return {exec, 0, (static_cast<std::int64_t>(columns) + columns_at_once - 1) / columns_at_once};
}

struct SumRows {
  ConstMatrix dy;
  fsdp2::LentView<Vector> sum;
  KOKKOS_FUNCTION void operator()(std::int64_t group) const {
    const std::int64_t begin = group * columns_at_once;
    const std::int64_t rest = static_cast<std::int64_t>(dy.extent(1)) - begin;
    const std::int64_t count = rest < columns_at_once ? rest : columns_at_once;
    float total[columns_at_once] = {};
    for (std::int64_t row = 0; row < static_cast<std::int64_t>(dy.extent(0)); ++row)
      for (std::int64_t i = 0; i < count; ++i) total[i] += dy(row, begin + i);
    for (std::int64_t i = 0; i < count; ++i)
      sum.view(begin + i) = total[i] + (sum.beta == 0 ? 0 : sum.beta * sum.view(begin + i));
  }
};

/// Φ(x), the standard normal distribution.
KOKKOS_INLINE_FUNCTION float normal_cdf(float x) {
  return 0.5f * (1.0f + std::erf(x * 0.70710678f));
}

struct Gelu {
  ConstMatrix x;
  Matrix y;
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t j) const { y(i, j) = x(i, j) * normal_cdf(x(i, j)); }
};

struct GeluBackward {
  ConstMatrix x;
  Matrix dy;
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t j) const {
    const float value = x(i, j);
    const float density = 0.39894228f * std::exp(-0.5f * value * value);
    dy(i, j) *= normal_cdf(value) + value * density;
  }
};

struct CrossEntropy {
  ByteVector targets;
  Matrix logits;
  double scale;
  KOKKOS_FUNCTION void operator()(std::int64_t row, double& loss) const {
    const auto classes = static_cast<std::int64_t>(logits.extent(1));
    float largest = logits(row, 0);
    for (std::int64_t j = 1; j < classes; ++j) largest = logits(row, j) > largest ? logits(row, j) : largest;
    float total = 0;
    for (std::int64_t j = 0; j < classes; ++j) total += std::exp(logits(row, j) - largest);
    const std::int64_t target = targets(row);
    loss += scale * static_cast<double>(std::log(total) + largest - logits(row, target));
    for (std::int64_t j = 0; j < classes; ++j) {
      const float probability = std::exp(logits(row, j) - largest) / total;
      logits(row, j) = static_cast<float>(scale) * (probability - (j == target ? 1.0f : 0.0f));
    }
  }
};

}  // namespace detail

/// y [rows, places · width]: the rows of `table` [256, width] that the bytes [rows, places] select, one after another.
inline void embed(const fsdp2::ExecutionSpace& exec, const ByteMatrix& bytes, const ConstMatrix& table,
                  const Matrix& y) {
  Kokkos::parallel_for("embed", detail::each_element(exec, bytes), detail::Embed{bytes, table, y});
}

inline void embed_backward(const fsdp2::ExecutionSpace& exec, const ByteMatrix& bytes, const ConstMatrix& dy,
                           const fsdp2::LentView<Matrix>& dtable) {
  Kokkos::parallel_for("embed_backward", detail::each(exec, dtable.view.extent(0)),
                       detail::EmbedBackward{bytes, dy, dtable});
}

/// y [rows, out] = x [rows, in] · weightᵀ + bias, with weight [out, in] and bias [out].
inline void linear(const fsdp2::ExecutionSpace& exec, const ConstMatrix& x, const ConstMatrix& weight,
                   const ConstVector& bias, const Matrix& y) {
  Kokkos::parallel_for("bias", detail::each_element(exec, y), detail::Broadcast{bias, y});
  gemm(exec, Transpose::no, x, Transpose::yes, weight, 1, y);
}

/// Writes dx, and the gradients of weight and bias.
inline void linear_backward(const fsdp2::ExecutionSpace& exec, const ConstMatrix& x, const ConstMatrix& weight,
                            const ConstMatrix& dy, const fsdp2::LentView<Matrix>& dweight,
                            const fsdp2::LentView<Vector>& dbias, const Matrix& dx) {
  gemm(exec, Transpose::yes, dy, Transpose::no, x, dweight.beta, dweight.view);
  Kokkos::parallel_for("bias_backward", detail::each_column_group(exec, dbias.view.extent(0)),
                       detail::SumRows{dy, dbias});
  gemm(exec, Transpose::no, dy, Transpose::no, weight, 0, dx);
}

/// y = x · Φ(x).
inline void gelu(const fsdp2::ExecutionSpace& exec, const ConstMatrix& x, const Matrix& y) {
  Kokkos::parallel_for("gelu", detail::each_element(exec, y), detail::Gelu{x, y});
}

/// Turns the gradient of y into that of x, in place.
inline void gelu_backward(const fsdp2::ExecutionSpace& exec, const ConstMatrix& x, const Matrix& dy) {
  Kokkos::parallel_for("gelu_backward", detail::each_element(exec, x), detail::GeluBackward{x, dy});
}

/// loss = scale · the sum over rows of −log softmax(logits)[target]. The logits become their gradient.
inline void cross_entropy(const fsdp2::ExecutionSpace& exec, const Matrix& logits, const ByteVector& targets,
                          double scale, const Scalar& loss) {
  Kokkos::parallel_reduce("cross_entropy", detail::each(exec, logits.extent(0)),
                          detail::CrossEntropy{targets, logits, scale}, loss);
}

}  // namespace examples
