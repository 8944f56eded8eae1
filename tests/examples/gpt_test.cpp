// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "support/gpt.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "support/fsdp.hpp"

namespace {

using examples::Gpt;
using examples::GptShape;
using fsdp2::ExecutionSpace;
using fsdp2::MemorySpace;
using fsdp2::ShardedParam;

// Different extents everywhere; a width that column groups do not divide.
constexpr GptShape shape{.values = 7, .context = 5, .width = 6, .heads = 2, .layers = 2};
constexpr std::size_t samples = 3;
const std::vector<std::uint8_t> bytes = {0, 1, 2, 3, 4, 4, 1, 0, 3, 3, 6, 2, 2, 2, 1};
const std::vector<std::uint8_t> targets = {6, 5, 0, 1, 1, 3, 2, 2, 0, 4, 5, 1, 1, 3, 0};
constexpr double scale = 1.0 / 15;

using Values = std::vector<double>;
using Parameters = std::map<std::string, Values>;

std::vector<ShardedParam> params_of(Gpt& gpt) {
  std::vector<ShardedParam> result;
  for (fsdp2::Module* module : gpt.model().modules())
    for (const ShardedParam& param : module->params()) result.push_back(param);
  return result;
}

/// Gives every parameter values of its own, which f32 holds, and returns them.
Parameters set_parameters(Gpt& gpt) {
  Parameters result;
  double start = 0;
  for (const ShardedParam& param : params_of(gpt)) {
    std::vector<float> values(static_cast<std::size_t>(fsdp2::numel(param.full_shape())));
    const bool is_gain = param.name().ends_with("gain");
    for (float& value : values) value = static_cast<float>(std::sin(start += 3.7) * 0.7 + (is_gain ? 1 : 0));
    ShardedParam(param).update_local_shard(fsdp2::test::make_tensor(param.full_shape(), values));
    result[param.key()] = Values(values.begin(), values.end());
  }
  return result;
}

/// y = x · weightᵀ + bias for one row.
Values affine(const Values& x, const Values& weight, const Values& bias) {
  Values y = bias;
  for (std::size_t j = 0; j < y.size(); ++j)
    for (std::size_t i = 0; i < x.size(); ++i) y[j] += weight[j * x.size() + i] * x[i];
  return y;
}

Values normalise(const Values& x, const Values& gain, const Values& bias) {
  double mean = 0;
  double variance = 0;
  for (const double value : x) mean += value / static_cast<double>(x.size());
  for (const double value : x) variance += (value - mean) * (value - mean) / static_cast<double>(x.size());
  Values y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = (x[i] - mean) / std::sqrt(variance + 1e-5) * gain[i] + bias[i];
  return y;
}

/// Written plainly, in f64, one sample after another.
double reference_loss(const Parameters& p) {
  constexpr std::size_t context = shape.context;
  constexpr std::size_t width = shape.width;
  constexpr std::size_t length = width / shape.heads;
  double loss = 0;
  for (std::size_t sample = 0; sample < samples; ++sample) {
    std::vector<Values> x(context, Values(width));
    for (std::size_t t = 0; t < context; ++t)
      for (std::size_t i = 0; i < width; ++i)
        x[t][i] = p.at("root.tokens")[bytes[sample * context + t] * width + i] + p.at("root.positions")[t * width + i];
    for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
      const auto of = [&](const char* name) -> const Values& {
        return p.at("block" + std::to_string(layer) + "." + name);
      };
      std::vector<Values> qkv;
      for (const Values& row : x)
        qkv.push_back(affine(normalise(row, of("norm1.gain"), of("norm1.bias")), of("qkv.weight"), of("qkv.bias")));
      for (std::size_t t = 0; t < context; ++t) {
        Values attended(width);
        for (std::size_t head = 0; head < static_cast<std::size_t>(shape.heads); ++head) {
          const std::size_t query = 3 * head * length;
          Values weights;
          double total = 0;
          for (std::size_t s = 0; s <= t; ++s) {
            double score = 0;
            for (std::size_t i = 0; i < length; ++i) score += qkv[t][query + i] * qkv[s][query + length + i];
            weights.push_back(std::exp(score / std::sqrt(static_cast<double>(length))));
            total += weights.back();
          }
          for (std::size_t s = 0; s <= t; ++s)
            for (std::size_t i = 0; i < length; ++i)
              attended[head * length + i] += weights[s] / total * qkv[s][query + 2 * length + i];
        }
        const Values out = affine(attended, of("out.weight"), of("out.bias"));
        for (std::size_t i = 0; i < width; ++i) x[t][i] += out[i];
        Values hidden = affine(normalise(x[t], of("norm2.gain"), of("norm2.bias")), of("up.weight"), of("up.bias"));
        for (double& value : hidden) value *= 0.5 * (1 + std::erf(value / std::sqrt(2.0)));
        const Values down = affine(hidden, of("down.weight"), of("down.bias"));
        for (std::size_t i = 0; i < width; ++i) x[t][i] += down[i];
      }
    }
    for (std::size_t t = 0; t < context; ++t) {
      const Values logits = affine(normalise(x[t], p.at("root.norm.gain"), p.at("root.norm.bias")), p.at("root.tokens"),
                                   Values(shape.values));
      double total = 0;
      for (const double logit : logits) total += std::exp(logit);
      loss += scale * (std::log(total) - logits[targets[sample * context + t]]);
    }
  }
  return loss;
}

/// Some of the samples, from one on.
double forward_backward(Gpt& gpt, std::size_t begin, std::size_t count, bool reduce) {
  const ExecutionSpace exec;
  const auto place = static_cast<std::size_t>(shape.context);
  const Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace> inputs("inputs", count, place);
  const Kokkos::View<std::uint8_t*, Kokkos::LayoutRight, MemorySpace> outputs("outputs", count * place);
  const auto host_inputs = Kokkos::create_mirror_view(inputs);
  const auto host_outputs = Kokkos::create_mirror_view(outputs);
  for (std::size_t i = 0; i < count * place; ++i) {
    host_inputs(i / place, i % place) = bytes[begin * place + i];
    host_outputs(i) = targets[begin * place + i];
  }
  Kokkos::deep_copy(inputs, host_inputs);
  Kokkos::deep_copy(outputs, host_outputs);
  const Kokkos::View<double, MemorySpace> loss("loss");
  gpt.forward_backward(exec, inputs, outputs, scale, loss, reduce);
  exec.fence();
  double result = 0;
  Kokkos::deep_copy(result, loss);
  return result;
}

std::map<std::string, std::vector<float>> gradients(Gpt& gpt) {
  gpt.model().finish_backward();
  std::map<std::string, std::vector<float>> result;
  for (const ShardedParam& param : params_of(gpt))
    result[param.key()] = fsdp2::test::to_host(param.gradient().value().local());
  return result;
}

TEST(Gpt, GradientsAreThoseOfFiniteDifferences) {
  Gpt gpt({.mesh = fsdp2::DeviceMesh()}, shape, samples, 1);
  Parameters p = set_parameters(gpt);
  ASSERT_EQ(p.size(), 4u + 12u * shape.layers);
  EXPECT_NEAR(forward_backward(gpt, 0, samples, true), reference_loss(p), 1e-6);
  const auto found = gradients(gpt);
  for (auto& [name, values] : p) {
    Values expected;
    double largest = 0;
    for (double& value : values) {
      const double center = value;
      const double step = 1e-5;
      value = center + step;
      const double above = reference_loss(p);
      value = center - step;
      const double below = reference_loss(p);
      value = center;
      expected.push_back((above - below) / (2 * step));
      largest = std::max(largest, std::abs(expected.back()));
    }
    ASSERT_GT(largest, 1e-3) << name;
    for (std::size_t k = 0; k < expected.size(); ++k)
      EXPECT_NEAR(found.at(name)[k], expected[k], 1e-5 * largest + 1e-6) << name << ", element " << k;
  }
}

TEST(Gpt, PartsOfABatchAddUpToTheWhole) {
  Gpt gpt({.mesh = fsdp2::DeviceMesh()}, shape, samples, 1);
  set_parameters(gpt);
  const double loss = forward_backward(gpt, 0, samples, true);
  const auto whole = gradients(gpt);
  gpt.model().zero_grad();
  const double parts = forward_backward(gpt, 0, 1, false) + forward_backward(gpt, 1, 0, false) +
                       forward_backward(gpt, 1, samples - 1, true);
  EXPECT_NEAR(parts, loss, 1e-6);
  for (const auto& [name, values] : gradients(gpt))
    for (std::size_t k = 0; k < values.size(); ++k)
      EXPECT_NEAR(values[k], whole.at(name)[k], 1e-6) << name << ", element " << k;
}

TEST(Gpt, WithoutSamplesTheGradientsAreZero) {
  Gpt gpt({.mesh = fsdp2::DeviceMesh()}, shape, samples, 1);
  EXPECT_EQ(forward_backward(gpt, 0, 0, true), 0);
  for (const auto& [name, values] : gradients(gpt))
    for (const float value : values) EXPECT_EQ(value, 0) << name;
}

TEST(Gpt, Bf16ParametersGiveNearlyTheSame) {
  Gpt exact({.mesh = fsdp2::DeviceMesh()}, shape, samples, 1);
  Gpt rounded({.mesh = fsdp2::DeviceMesh(), .mp_policy = fsdp2::MixedPrecisionPolicy::bf16()}, shape, samples, 1);
  set_parameters(exact);
  set_parameters(rounded);
  const double loss = forward_backward(exact, 0, samples, true);
  const double rounded_loss = forward_backward(rounded, 0, samples, true);
  EXPECT_NE(rounded_loss, loss);
  EXPECT_NEAR(rounded_loss, loss, 0.02 * loss);
  const auto expected = gradients(exact);
  for (const auto& [name, values] : gradients(rounded)) {
    double error = 0;
    double norm = 0;
    for (std::size_t k = 0; k < values.size(); ++k) {
      error += std::pow(values[k] - expected.at(name)[k], 2);
      norm += std::pow(expected.at(name)[k], 2);
    }
    EXPECT_LT(std::sqrt(error), 0.1 * std::sqrt(norm)) << name;
  }
}

TEST(Gpt, RefusesHeadsThatDoNotDivideTheWidth) {
  const std::string message = fsdp2::test::message_of<fsdp2::Error>(
      [] { Gpt({.mesh = fsdp2::DeviceMesh()}, {.width = 10, .heads = 3}, 1, 1); });
  EXPECT_NE(message.find("10"), std::string::npos) << message;
  EXPECT_NE(message.find("3 heads"), std::string::npos) << message;
}

}  // namespace
