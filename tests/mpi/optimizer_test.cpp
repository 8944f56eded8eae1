// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/optimizer.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "fsdp2/error.hpp"
#include "fsdp2/state_dict.hpp"
#include "support/fsdp.hpp"

namespace fsdp2::test {
namespace {

const std::vector<Shape> shapes = {{}, {0}, {1}, {3}, {5, 17}, {16, 4}, {300, 5}, {1030, 65}};

using Values = std::vector<float>;

/// What the optimizers should do, on whole tensors.
struct SerialAdamW {
  AdamWOptions options;
  Values m;
  Values v;
  int t = 0;

  void step(Values& p, const Values& g) {
    m.resize(p.size());
    v.resize(p.size());
    ++t;
    const auto beta2 = static_cast<float>(options.beta2);
    const auto rest1 = static_cast<float>(1 - options.beta1);
    const auto rest2 = static_cast<float>(1 - options.beta2);
    const auto rate = static_cast<float>(options.lr / (1 - std::pow(options.beta1, t)));
    const auto correction = static_cast<float>(std::sqrt(1 - std::pow(options.beta2, t)));
    const auto decay = static_cast<float>(1 - options.lr * options.weight_decay);
    for (std::size_t i = 0; i < p.size(); ++i) {
      m[i] = std::fma(rest1, g[i] - m[i], m[i]);
      v[i] = std::fma(rest2 * g[i], g[i], beta2 * v[i]);
      p[i] = p[i] * decay - rate * m[i] / (std::sqrt(v[i]) / correction + static_cast<float>(options.eps));
    }
  }
};

struct SerialSgd {
  SgdOptions options;
  Values m;

  void step(Values& p, const Values& g) {
    m.resize(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
      m[i] = static_cast<float>(options.momentum) * m[i] + (g[i] + static_cast<float>(options.weight_decay) * p[i]);
      p[i] -= static_cast<float>(options.lr) * m[i];
    }
  }
};

class OptimizerTest : public OnMesh {
 protected:
  static std::string name_of(std::size_t index) { return fmt::format("p{}", index); }
  static Values initial(std::size_t index) { return ramp(shapes[index], -3.0f, 0.125f); }
  static std::vector<ParamSpec> specs() {
    std::vector<ParamSpec> result;
    for (std::size_t i = 0; i < shapes.size(); ++i)
      result.push_back({name_of(i), shapes[i], make_tensor(shapes[i], initial(i))});
    return result;
  }
  /// Multiples of 1/8: sums over ranks are exact.
  static Values gradient(std::size_t index, std::int64_t rank, int step) {
    Values result(static_cast<std::size_t>(numel(shapes[index])));
    for (std::size_t i = 0; i < result.size(); ++i)
      result[i] =
          0.125f * static_cast<float>((static_cast<std::int64_t>(i * 7 + index * 3) + rank * 11 + step * 5) % 101 - 50);
    return result;
  }
  Values mean_gradient(std::size_t index, int step) const {
    Values mean(static_cast<std::size_t>(numel(shapes[index])));
    for (std::int64_t rank = 0; rank < ranks_; ++rank) {
      const Values part = gradient(index, rank, step);
      for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += part[i];
    }
    for (float& value : mean) value /= static_cast<float>(ranks_);
    return mean;
  }
  void backward(Module& module, int step) const {
    BackwardScope scope = module.backward();
    for (std::size_t i = 0; i < shapes.size(); ++i) write(scope.grad_tensor(name_of(i)), gradient(i, rank_, step));
    scope.reduce();
  }

  /// Three steps, bitwise against the serial ones.
  template <class Serial, class MakeOptimizer>
  void compare(const Serial& fresh, MakeOptimizer&& make_optimizer) const {
    for (const std::int64_t min_shard_size : {0, 1024}) {
      Model model({.mesh = mesh_, .min_shard_size = min_shard_size});
      Module& module = model.add("m", specs());
      EXPECT_EQ(module.memory_stats().sharded_parameters, min_shard_size == 0 ? 7 : 2);
      auto optimizer = make_optimizer(model);
      std::vector<Serial> serial(shapes.size(), fresh);
      std::vector<Values> expected;
      for (std::size_t i = 0; i < shapes.size(); ++i) expected.push_back(initial(i));
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        backward(module, step);
        optimizer.step();
        for (std::size_t i = 0; i < shapes.size(); ++i) serial[i].step(expected[i], mean_gradient(i, step));
      }
      for (std::size_t i = 0; i < shapes.size(); ++i) {
        const ShardedParam param = module.param(name_of(i));
        EXPECT_EQ(to_host(param.local_shard()), part_of(expected[i], param, ranks_, rank_)) << to_string(shapes[i]);
        for (const auto& [key, tensor] : optimizer.state()) {
          const std::string suffix = "." + param.key();
          if (!key.ends_with(suffix)) continue;
          EXPECT_EQ(tensor.spec(), param.dtensor().spec()) << key;
          if constexpr (std::is_same_v<Serial, SerialAdamW>)
            EXPECT_EQ(to_host(tensor.local()),
                      part_of(key == "exp_avg" + suffix ? serial[i].m : serial[i].v, param, ranks_, rank_));
          else
            EXPECT_EQ(to_host(tensor.local()), part_of(serial[i].m, param, ranks_, rank_));
        }
      }
      EXPECT_EQ(to_host<std::int64_t>(optimizer.state().at("step").local()), std::vector<std::int64_t>{3});
    }
  }
};

TEST_F(OptimizerTest, AdamWIsBitwiseSerial) {
  for (const AdamWOptions& options :
       {AdamWOptions{}, AdamWOptions{.lr = 0.1, .beta1 = 0.5, .beta2 = 0.75, .eps = 1e-3, .weight_decay = 0.5}})
    compare(SerialAdamW{options, {}, {}}, [&](const Model& model) { return AdamW(model, options); });
}

TEST_F(OptimizerTest, SgdIsBitwiseSerial) {
  for (const SgdOptions& options :
       {SgdOptions{}, SgdOptions{.lr = 0.25, .momentum = 0.9}, SgdOptions{.lr = 0.25, .weight_decay = 0.5},
        SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1}})
    compare(SerialSgd{options, {}}, [&](const Model& model) { return Sgd(model, options); });
}

TEST_F(OptimizerTest, ModulesOutsideModelsAreOptimizedTogether) {
  const Config config{.mesh = mesh_};
  const std::unique_ptr<Module> a = make_module("a", {{"w", {64, 32}, init::ones()}, {"b", {3}, init::ones()}}, config);
  const std::unique_ptr<Module> b = make_module("b", {{"w", {64, 32}, init::ones()}}, config);
  const std::array<Module*, 2> modules = {a.get(), b.get()};
  Sgd optimizer(modules, {.lr = 0.5});
  for (Module* module : modules) {
    BackwardScope scope = module->backward();
    write(scope.grad_tensor("w"), ramp({64, 32}, 1, 0));
    scope.reduce();
  }
  optimizer.step();
  for (Module* module : modules) EXPECT_EQ(to_host(module->param("w").all_gather()), ramp({64, 32}, 0.5f, 0));
  EXPECT_EQ(to_host(a->param("b").local_shard()), ramp({3}, 1, 0));
  optimizer.zero_grad();
  EXPECT_FALSE(a->param("w").gradient().has_value());

  const std::array<Module*, 2> twice = {a.get(), a.get()};
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { Sgd(twice, {}); }), "\"a\" appears twice"));
  const std::array<Module*, 1> null = {nullptr};
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { Sgd(null, {}); }), "null"));
}

TEST_F(OptimizerTest, FrozenParametersAndModulesWithoutGradientStay) {
  Model model({.mesh = mesh_});
  Module& a = model.add("a", {{.name = "frozen", .shape = {64, 32}, .value = init::ones(), .requires_grad = false},
                              {"w", {64, 32}, init::ones()}});
  Module& b = model.add("b", {{"w", {64, 32}, init::ones()}});
  AdamW optimizer(model, {.lr = 0.5, .weight_decay = 0.5});
  EXPECT_FALSE(optimizer.state().contains("exp_avg.a.frozen"));
  EXPECT_TRUE(optimizer.state().contains("exp_avg.a.w"));
  {
    BackwardScope scope = a.backward();
    write(scope.grad_tensor("w"), ramp({64, 32}, 1, 0));
    scope.reduce();
  }
  optimizer.step();
  EXPECT_EQ(to_host(a.param("frozen").all_gather()), ramp({64, 32}, 1, 0));
  EXPECT_NE(to_host(a.param("w").all_gather()), ramp({64, 32}, 1, 0));
  EXPECT_EQ(to_host(b.param("w").all_gather()), ramp({64, 32}, 1, 0));
}

TEST_F(OptimizerTest, LoadedStateAndStepCountAreUsed) {
  const auto make_model = [&] {
    Model model({.mesh = mesh_});
    model.add("m", specs());
    return model;
  };
  Model first = make_model();
  Model second = make_model();
  AdamW first_optimizer(first, {.lr = 0.1});
  AdamW second_optimizer(second, {.lr = 0.1});
  const auto train = [&](Model& model, AdamW& optimizer, int step) {
    optimizer.zero_grad();
    backward(model.module("m"), step);
    optimizer.step();
  };
  train(first, first_optimizer, 0);
  train(first, first_optimizer, 1);
  const StateDict source = state_dict(first, first_optimizer);
  const StateDict target = state_dict(second, second_optimizer);
  EXPECT_EQ(source.tensors.size(), 3 * shapes.size() + 1);
  EXPECT_TRUE(source.tensors.contains("optim.exp_avg_sq.m.p0"));
  for (const auto& [key, tensor] : source.tensors)
    kernels::copy(ExecutionSpace(), target.tensors.at(key).local(), tensor.local());
  target.after_load();
  train(first, first_optimizer, 2);
  train(second, second_optimizer, 2);
  for (const auto& [key, tensor] : source.tensors)
    if (tensor.spec().dtype == DType::f32) {
      EXPECT_EQ(to_host(tensor.local()), to_host(target.tensors.at(key).local())) << key;
    }
  EXPECT_EQ(to_host<std::int64_t>(target.tensors.at("optim.step").local()), std::vector<std::int64_t>{3});
}

TEST_F(OptimizerTest, CachedParametersAreDroppedWhenTheyChange) {
  Model model({.mesh = mesh_});
  Module& module = model.add("m", {{"w", {64, 32}, init::ones()}});
  ShardedParam param = module.param("w");
  Sgd optimizer(model, {.lr = 0.25});
  const StateDict dict = state_dict(model);
  const auto expect = [&](float value) { EXPECT_EQ(to_host(param.all_gather()), ramp({64, 32}, value, 0)); };
  expect(1);
  param.set_gradient(ramp_tensor(param.local_shape(), 1, 0));
  optimizer.step();
  expect(0.75f);
  model.step([](const std::string&, const Tensor& shard, const Tensor&) { fill(shard, ramp(shard.shape(), 5, 0)); });
  expect(5);
  fill(dict.tensors.at("m.w").local(), ramp(param.local_shape(), 6, 0));
  dict.after_load();
  expect(6);
}

TEST_F(OptimizerTest, AGradientThatIsSetMakesTheOthersZero) {
  Model model({.mesh = mesh_});
  Module& module =
      model.add("m", {{"a", {64, 32}, init::ones()}, {"b", {64, 32}, init::ones()}, {"c", {3}, init::ones()}});
  Sgd optimizer(model, {.lr = 0.25});
  {
    BackwardScope scope = module.backward();
    for (const char* name : {"a", "b"}) write(scope.grad_tensor(name), ramp({64, 32}));
    write(scope.grad_tensor("c"), ramp({3}));
    scope.reduce();
  }
  model.finish_backward();
  optimizer.zero_grad();
  ShardedParam a = module.param("a");
  a.set_gradient(ramp_tensor(a.local_shape(), 1, 0));
  EXPECT_FALSE(module.param("b").gradient().has_value());
  optimizer.step();
  EXPECT_EQ(to_host(a.all_gather()), ramp({64, 32}, 0.75f, 0));
  EXPECT_EQ(to_host(module.param("b").all_gather()), ramp({64, 32}, 1, 0));
  EXPECT_EQ(to_host(module.param("c").all_gather()), ramp({3}, 1, 0));
  a.zero_grad();
  optimizer.step();
  EXPECT_EQ(to_host(a.all_gather()), ramp({64, 32}, 0.75f, 0));
}

TEST_F(OptimizerTest, StateIsAsLargeAsTheShard) {
  Model model({.mesh = mesh_});
  Module& module = model.add("m", {{"w", {64 * ranks_, 32}, init::ones()}});
  AdamW optimizer(model, {});
  for (const auto& [key, tensor] : optimizer.state())
    if (key != "step") {
      EXPECT_EQ(tensor.local().bytes(), 64 * 32 * 4) << key;
    }
  EXPECT_EQ(module.memory_stats().local_bytes, 64 * 32 * 4);
}

TEST_F(OptimizerTest, TheLearningRateMayChange) {
  Model model({.mesh = mesh_});
  Module& module = model.add("m", {{"w", {64, 32}, init::ones()}});
  Sgd optimizer(model, {.lr = 0.25});
  for (const double lr : {0.25, 0.5}) {
    optimizer.set_lr(lr);
    EXPECT_EQ(optimizer.lr(), lr);
    optimizer.zero_grad();
    BackwardScope scope = module.backward();
    write(scope.grad_tensor("w"), ramp({64, 32}, 1, 0));
    scope.reduce();
    optimizer.step();
  }
  EXPECT_EQ(to_host(module.param("w").all_gather()), ramp({64, 32}, 0.25f, 0));
}

TEST_F(OptimizerTest, WrongUseIsRefused) {
  Model model({.mesh = mesh_});
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { Sgd(model, {}); }), "at least one module"));
  Module& module = model.add("m", {{"w", {64, 32}, init::ones()}});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { Sgd(model, {.lr = -1}); }), "learning rate is -1"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { Sgd(model, {.momentum = nan}); }), "momentum"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { Sgd(model, {.weight_decay = -1}); }), "weight_decay"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { AdamW(model, {.beta1 = 1}); }), "beta1 is 1"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { AdamW(model, {.beta2 = nan}); }), "beta2"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { AdamW(model, {.eps = 0}); }), "eps is 0"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { AdamW(model, {.weight_decay = -1}); }), "weight_decay"));

  Sgd optimizer(model, {});
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { fully_shard(module, {{"v", {1}, init::ones()}}); }), "optimizer"));
  {
    BackwardScope scope = module.backward();
    scope.hold();
  }
  EXPECT_TRUE(contains(message_of<Error>([&] { optimizer.step(); }), "\"m\": its gradients are held"));
  {
    BackwardScope scope = module.backward();
    scope.reduce();
  }
  {
    const Scope scope = module.unshard();
    EXPECT_TRUE(contains(message_of<Error>([&] { optimizer.step(); }), "\"m\" is unsharded"));
  }
  optimizer.step();
  EXPECT_EQ(to_host<std::int64_t>(optimizer.state().at("step").local()), std::vector<std::int64_t>{1});
  model.add("late", {{"w", {1}, init::ones()}});
  EXPECT_TRUE(contains(message_of<Error>([&] { optimizer.step(); }), "were added"));
}

}  // namespace
}  // namespace fsdp2::test
