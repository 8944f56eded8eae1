// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// Every field of MixedPrecisionPolicy, and memory of the host.

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "fsdp2/error.hpp"
#include "fsdp2/model.hpp"
#include "fsdp2/optimizer.hpp"
#include "model_state.hpp"
#include "support/fsdp.hpp"

namespace fsdp2::test {
namespace {

class MixedPrecisionTest : public OnMesh {
 protected:
  /// Sharded and packed, sharded and direct, replicated.
  static std::vector<ParamSpec> specs() {
    return {{"packed", {5, 3}, make_tensor({5, 3}, third({5, 3}))},
            {"direct", {40, 9}, make_tensor({40, 9}, third({40, 9}))},
            {"small", {2}, make_tensor({2}, third({2}))}};
  }
  /// Numbers that bf16 and f16 round.
  static std::vector<float> third(const Shape& shape) { return ramp(shape, 1.0f / 3, 1.0f / 7); }

  Module& add(Model& model) const { return model.add("m", specs()); }
  Config config(const MixedPrecisionPolicy& policy) const {
    return {.mesh = mesh_, .mp_policy = policy, .min_shard_size = 4, .direct_bytes = 400};
  }

  /// Writes the same numbers to every element of every gradient.
  template <class T>
  static void run_backward(Module& module, float value) {
    BackwardScope scope = module.backward();
    for (const ShardedParam& param : module.params()) {
      const LentTensor lent = scope.grad_tensor(param.name());
      ASSERT_EQ(lent.tensor.dtype(), dtype_of<T>);
      std::vector<T> values = to_host<T>(lent.tensor);
      for (T& each : values) each = static_cast<T>((lent.beta == 0 ? 0.0f : static_cast<float>(each)) + value);
      fill(lent.tensor, values);
    }
    scope.reduce();
  }
};

template <class T>
std::vector<T> rounded(const std::vector<float>& values) {
  std::vector<T> result(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) result[i] = static_cast<T>(values[i]);
  return result;
}

template <class T>
std::vector<std::uint16_t> bits_of(const std::vector<T>& values) {
  std::vector<std::uint16_t> bits;
  for (const T& value : values) bits.push_back(value.bits);
  return bits;
}

TEST_F(MixedPrecisionTest, ParamDtypeIsWhatScopesShowAndShardsKeepTheirs) {
  Model model(config({.param_dtype = DType::bf16}));
  Module& module = add(model);
  for (int round = 0; round < 2; ++round) {
    const Scope scope = module.forward();
    for (const ShardedParam& param : module.params()) {
      EXPECT_EQ(bits_of(to_host<bfloat16>(scope.tensor(param.name()))),
                bits_of(rounded<bfloat16>(third(param.full_shape()))))
          << param.name();
      EXPECT_EQ(to_host(param.local_shard()), part_of(third(param.full_shape()), param, ranks_, rank_));
    }
  }
  EXPECT_FALSE(module.param("small").is_gathered());  // its view is a cast that the slot held
  EXPECT_THROW((void)module.param("small").full(), Error);
  // Half the bytes are gathered.
  Model plain(config({}));
  add(plain);
  EXPECT_LT(model.plan_memory().unsharded, plain.plan_memory().unsharded);
}

TEST_F(MixedPrecisionTest, F16ParametersAreRoundedAsWell) {
  Model model(config(MixedPrecisionPolicy::fp16()));
  Module& module = add(model);
  const Scope scope = module.forward();
  for (const ShardedParam& param : module.params())
    EXPECT_EQ(bits_of(to_host<float16>(scope.tensor(param.name()))),
              bits_of(rounded<float16>(third(param.full_shape()))));
}

TEST_F(MixedPrecisionTest, ReduceDtypeIsWhatIsLent) {
  Model model(config({.param_dtype = DType::bf16, .reduce_dtype = DType::bf16}));
  Module& module = add(model);
  run_backward<bfloat16>(module, 3);
  model.finish_backward();
  for (const ShardedParam& param : module.params()) {
    const DTensor gradient = *param.gradient();
    EXPECT_EQ(gradient.spec().dtype, DType::f32);
    for (const float value : to_host(gradient.local())) EXPECT_EQ(value, 3.0f);
  }
}

TEST_F(MixedPrecisionTest, WithoutReduceDtypeGradientsHaveTheParametersDtype) {
  Model model(config({.param_dtype = DType::bf16}));
  Module& module = add(model);
  run_backward<float>(module, 0.1f);
  model.finish_backward();
  for (const ShardedParam& param : module.params())
    for (const float value : to_host(param.gradient()->local())) EXPECT_NEAR(value, 0.1f, 1e-7);
}

TEST_F(MixedPrecisionTest, LowPrecisionGradientsAreKeptOnRequest) {
  Model model(config({.reduce_dtype = DType::bf16, .keep_low_precision_grads = true}));
  Module& module = add(model);
  Sgd optimizer(model, {.lr = 1});
  for (int pass = 0; pass < 2; ++pass) run_backward<bfloat16>(module, 2);
  model.finish_backward();
  Model widened(config({.reduce_dtype = DType::bf16}));
  Module& other = add(widened);
  run_backward<bfloat16>(other, 2);
  widened.finish_backward();
  EXPECT_LT(model.memory_stats().gradient_bytes, widened.memory_stats().gradient_bytes);
  for (const ShardedParam& param : module.params()) {
    ASSERT_EQ(param.gradient()->spec().dtype, DType::bf16);
    for (const bfloat16 value : to_host<bfloat16>(param.gradient()->local()))
      EXPECT_EQ(static_cast<float>(value), 4.0f);
  }
  optimizer.step();
  for (const ShardedParam& param : module.params()) {
    std::vector<float> expected = part_of(third(param.full_shape()), param, ranks_, rank_);
    for (float& value : expected) value -= 4;
    EXPECT_EQ(to_host(param.local_shard()), expected);
  }
}

/// Numbers of the rule: reference is PyTorch's _get_gradient_divide_factors.
TEST_F(MixedPrecisionTest, F16DividesBeforeAndAfterTheSum) {
  for (const auto& [factor, before, after] : std::vector<std::tuple<double, double, double>>{{1, 1, 1},
                                                                                             {2, 2, 1},
                                                                                             {3, 2, 1.5},
                                                                                             {4, 2, 2},
                                                                                             {6, 4, 1.5},
                                                                                             {8, 4, 2},
                                                                                             {12, 4, 3},
                                                                                             {64, 8, 8},
                                                                                             {128, 16, 8},
                                                                                             {300, 8, 37.5}}) {
    const detail::Divisors divisors = detail::split_divisor(DType::f16, factor);
    EXPECT_EQ(divisors.before, before) << factor;
    EXPECT_EQ(divisors.after, after) << factor;
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16})
      EXPECT_EQ(detail::split_divisor(dtype, factor).before, 1) << factor;
  }
  // 300 · 500 overflows f16 unless it is divided before.
  Model model(config({.param_dtype = DType::f16, .reduce_dtype = DType::f16}));
  Module& module = add(model);
  module.set_gradient_divide_factor(300);
  run_backward<float16>(module, 40000);
  model.finish_backward();
  for (const ShardedParam& param : module.params())
    for (const float value : to_host(param.gradient()->local()))
      EXPECT_NEAR(value, 40000.0f * static_cast<float>(ranks_) / 300, 0.001f * 40000) << param.name();
}

TEST_F(MixedPrecisionTest, InputsAndOutputsAreCastByPolicy) {
  Model model(config({.param_dtype = DType::bf16, .cast_inputs = true, .output_dtype = DType::f16}));
  Module& module = add(model);
  Module& other =
      model.add("other", {{"w", {4}, init::ones()}}, {.mp_policy = MixedPrecisionPolicy{.param_dtype = DType::bf16}});
  const Tensor x = make_tensor({2, 3}, third({2, 3}));
  const Tensor counts = Tensor(ExecutionSpace(), DType::i64, {2}, "counts");
  const std::byte* memory = nullptr;
  for (int round = 0; round < 2; ++round) {
    const Scope scope = module.forward();
    const Tensor input = scope.input(x);
    EXPECT_EQ(input.shape(), x.shape());
    EXPECT_EQ(bits_of(to_host<bfloat16>(input)), bits_of(rounded<bfloat16>(third({2, 3}))));
    EXPECT_EQ(scope.input(input).data(), input.data());
    EXPECT_EQ(scope.input(counts).data(), counts.data());
    const Tensor output = scope.output(x);
    EXPECT_EQ(bits_of(to_host<float16>(output)), bits_of(rounded<float16>(third({2, 3}))));
    EXPECT_NE(output.data(), input.data());
    EXPECT_TRUE(round == 0 || input.data() == memory);  // reused
    memory = input.data();
  }
  const Scope scope = other.forward();
  EXPECT_EQ(scope.input(x).data(), x.data());  // cast_inputs is off
  EXPECT_EQ(scope.output(x).data(), x.data());
}

TEST_F(MixedPrecisionTest, HooksTakeGradientsInTheGatheredDtype) {
  Model model(config(MixedPrecisionPolicy::bf16()));
  Module& module = add(model);
  const Tensor gradient = Tensor::uninitialized(DType::bf16, {5, 3}, "g");
  fill(gradient, rounded<bfloat16>(ramp({5, 3})));
  module.post_backward({{"packed", gradient}});
  module.finish_backward();
  const ShardedParam packed = module.param("packed");
  EXPECT_EQ(to_host(packed.gradient()->local()), part_of(ramp({5, 3}), packed, ranks_, rank_));
  const Tensor wrong = Tensor(ExecutionSpace(), DType::f16, {5, 3}, "g");
  EXPECT_TRUE(contains(message_of<ShapeError>([&] { module.post_backward({{"packed", wrong}}); }), "f16"));
}

std::vector<std::string> labels;

/// Offloaded shards are copied for compute, on a host build too: what is gathered is not the shard.
TEST_F(MixedPrecisionTest, OffloadedShardsAreStaged) {
  for (const MixedPrecisionPolicy& policy : {MixedPrecisionPolicy::fp32(), MixedPrecisionPolicy::bf16()}) {
    std::vector<std::vector<float>> results;
    for (const bool offload : {false, true}) {
      labels.clear();
      Kokkos::Tools::Experimental::set_allocate_data_callback([](Kokkos::Tools::SpaceHandle, const char* label,
                                                                 const void*,
                                                                 std::uint64_t) { labels.emplace_back(label); });
      Config own = config(policy);
      own.offload_to_cpu = offload;
      Model model(own);
      Module& module = add(model);
      AdamW optimizer(model, {.lr = 0.1});
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        run_forward(module);
        run_backward<float>(module, static_cast<float>(rank_ + step));
        optimizer.step();
      }
      Kokkos::Tools::Experimental::set_allocate_data_callback(nullptr);
      for (const char* label : {"shards", "gradients", "optimizer_state"}) {
        EXPECT_EQ(std::count(labels.begin(), labels.end(), std::string("fsdp2::offloaded_") + label) > 0, offload)
            << label;
        EXPECT_EQ(std::count(labels.begin(), labels.end(), std::string("fsdp2::") + label) > 0, !offload) << label;
      }
      const Scope scope = module.unshard();
      const bool is_shared = scope.tensor("small").data() == module.param("small").local_shard().data();
      EXPECT_EQ(is_shared, !offload && policy == MixedPrecisionPolicy::fp32());
      std::vector<float> all;
      for (const ShardedParam& param : module.params())
        for (const float value : to_host(param.local_shard())) all.push_back(value);
      results.push_back(all);
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

}  // namespace
}  // namespace fsdp2::test
