// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "support/layers.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace {

using fsdp2::ExecutionSpace;
using fsdp2::MemorySpace;

// A network of an embedding, a hidden layer with GELU and a last layer, of different extents everywhere.
constexpr std::size_t values = 7;
constexpr std::size_t width = 3;
constexpr std::size_t context = 2;
constexpr std::size_t hidden = 5;
constexpr std::size_t rows = 6;

template <class T>
using Array = Kokkos::View<T*, Kokkos::LayoutRight, MemorySpace>;

template <class T>
Array<T> to_device(const std::vector<T>& source) {
  Array<T> target("target", source.size());
  const auto mirror = Kokkos::create_mirror_view(target);
  for (std::size_t i = 0; i < source.size(); ++i) mirror(i) = source[i];
  Kokkos::deep_copy(target, mirror);
  return target;
}

std::vector<float> to_host(const Array<float>& source) {
  const auto mirror = Kokkos::create_mirror_view(source);
  Kokkos::deep_copy(mirror, source);
  return {mirror.data(), mirror.data() + mirror.extent(0)};
}

examples::Matrix matrix(const Array<float>& array, std::size_t row_count) {
  return examples::Matrix(array.data(), row_count, array.extent(0) / row_count);
}

enum Parameter { table, weight, bias, head_weight, head_bias, parameters };
constexpr std::size_t parameter_rows[] = {values, hidden, hidden, values, values};
constexpr std::size_t parameter_columns[] = {width, context* width, 1, hidden, 1};

using Parameters = std::vector<std::vector<double>>;

/// Values of f32, so that both computations begin with the same.
Parameters some_parameters() {
  Parameters result(parameters);
  for (int p = 0; p < parameters; ++p)
    for (std::size_t i = 0; i < parameter_rows[p] * parameter_columns[p]; ++i)
      result[p].push_back(static_cast<float>(std::sin(1.0 + 3.0 * static_cast<double>(i) + 100.0 * p)));
  return result;
}

// Some byte values occur several times, one never.
const std::vector<std::uint8_t> inputs = {0, 1, 2, 3, 4, 4, 1, 0, 3, 3, 5, 2};
const std::vector<std::uint8_t> targets = {6, 5, 0, 1, 1, 3};

/// Written plainly, in f64.
double reference_loss(const Parameters& p) {
  double loss = 0;
  for (std::size_t row = 0; row < rows; ++row) {
    std::vector<double> x;
    for (std::size_t place = 0; place < context; ++place)
      for (std::size_t i = 0; i < width; ++i) x.push_back(p[table][inputs[row * context + place] * width + i]);
    std::vector<double> h = p[bias];
    for (std::size_t j = 0; j < hidden; ++j) {
      for (std::size_t i = 0; i < x.size(); ++i) h[j] += p[weight][j * x.size() + i] * x[i];
      h[j] *= 0.5 * (1 + std::erf(h[j] / std::sqrt(2.0)));
    }
    std::vector<double> logits = p[head_bias];
    double sum = 0;
    for (std::size_t j = 0; j < values; ++j) {
      for (std::size_t i = 0; i < hidden; ++i) logits[j] += p[head_weight][j * hidden + i] * h[i];
      sum += std::exp(logits[j]);
    }
    loss += std::log(sum) - logits[targets[row]];
  }
  return loss / rows;
}

/// The examples' layers on the first `count` rows: adds beta · (what is there) to the gradients. Returns the loss.
double forward_and_backward(std::size_t count, const Parameters& p, float beta, std::vector<Array<float>>& gradients) {
  const ExecutionSpace exec;
  std::vector<Array<float>> device;
  for (const std::vector<double>& parameter : p)
    device.push_back(to_device(std::vector<float>(parameter.begin(), parameter.end())));
  const Array<std::uint8_t> all_bytes = to_device(inputs);
  const Array<std::uint8_t> all_targets = to_device(targets);
  const Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace> bytes(all_bytes.data(), count, context);
  const Kokkos::View<std::uint8_t*, Kokkos::LayoutRight, MemorySpace> row_targets(all_targets.data(), count);
  const auto activations = [count](std::size_t columns) {
    return Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>("activations", count, columns);
  };
  const auto x = activations(context * width);
  const auto dx = activations(context * width);
  const auto z = activations(hidden);
  const auto h = activations(hidden);
  const auto dh = activations(hidden);
  const auto logits = activations(values);
  const Kokkos::View<double, MemorySpace> loss("loss");

  examples::embed(exec, bytes, matrix(device[table], values), x);
  examples::linear(exec, x, matrix(device[weight], hidden), device[bias], z);
  examples::gelu(exec, z, h);
  examples::linear(exec, h, matrix(device[head_weight], values), device[head_bias], logits);
  examples::cross_entropy(exec, logits, row_targets, 1.0 / rows, loss);

  const auto lent_matrix = [&](Parameter i) {
    return fsdp2::LentView<examples::Matrix>{matrix(gradients[i], parameter_rows[i]), beta};
  };
  const auto lent_vector = [&](Parameter i) { return fsdp2::LentView<examples::Vector>{gradients[i], beta}; };
  examples::linear_backward(exec, h, matrix(device[head_weight], values), logits, lent_matrix(head_weight),
                            lent_vector(head_bias), dh);
  examples::gelu_backward(exec, z, dh);
  examples::linear_backward(exec, x, matrix(device[weight], hidden), dh, lent_matrix(weight), lent_vector(bias), dx);
  examples::embed_backward(exec, bytes, dx, lent_matrix(table));
  exec.fence();
  double result = 0;
  Kokkos::deep_copy(result, loss);
  return result;
}

/// Not numbers: whoever reads them is found out.
std::vector<Array<float>> unwritten_gradients() {
  std::vector<Array<float>> gradients;
  gradients.reserve(parameters);
  for (int p = 0; p < parameters; ++p)
    gradients.push_back(to_device(
        std::vector<float>(parameter_rows[p] * parameter_columns[p], std::numeric_limits<float>::quiet_NaN())));
  return gradients;
}

TEST(Layers, GradientsAreThoseOfFiniteDifferences) {
  Parameters p = some_parameters();
  std::vector<Array<float>> gradients = unwritten_gradients();
  EXPECT_NEAR(forward_and_backward(rows, p, 0, gradients), reference_loss(p), 1e-6);
  for (int i = 0; i < parameters; ++i) {
    std::vector<double> expected;
    double largest = 0;
    for (double& value : p[i]) {
      const double center = value;
      const double step = 1e-6;
      value = center + step;
      const double above = reference_loss(p);
      value = center - step;
      const double below = reference_loss(p);
      value = center;
      expected.push_back((above - below) / (2 * step));
      largest = std::max(largest, std::abs(expected.back()));
    }
    ASSERT_GT(largest, 1e-3);
    const std::vector<float> found = to_host(gradients[i]);
    for (std::size_t k = 0; k < expected.size(); ++k)
      EXPECT_NEAR(found[k], expected[k], 3e-6 * largest) << "parameter " << i << ", element " << k;
  }
}

TEST(Layers, ASecondBackwardAddsToTheFirst) {
  const Parameters p = some_parameters();
  std::vector<Array<float>> gradients = unwritten_gradients();
  forward_and_backward(rows, p, 0, gradients);
  std::vector<std::vector<float>> once;
  once.reserve(parameters);
  for (const Array<float>& gradient : gradients) once.push_back(to_host(gradient));
  forward_and_backward(rows, p, 1, gradients);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const std::vector<float> twice = to_host(gradients[i]);
    for (std::size_t k = 0; k < twice.size(); ++k)
      EXPECT_NEAR(twice[k], 2 * once[i][k], 1e-6) << "parameter " << i << ", element " << k;
  }
}

TEST(Layers, WithoutRowsTheGradientsAreZero) {
  std::vector<Array<float>> gradients = unwritten_gradients();
  EXPECT_EQ(forward_and_backward(0, some_parameters(), 0, gradients), 0);
  for (const Array<float>& gradient : gradients)
    for (const float element : to_host(gradient)) EXPECT_EQ(element, 0);
}

}  // namespace
