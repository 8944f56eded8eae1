// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/gradients.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "comm/host_communicator.hpp"
#include "fsdp2/error.hpp"
#include "module_access.hpp"
#include "support/fsdp.hpp"
#include "support/mpi_calls.hpp"

namespace fsdp2::test {
namespace {

using Values = std::vector<float>;
using Calls = std::vector<std::string>;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

const std::vector<Shape> shapes = {{}, {0}, {1}, {3}, {5, 17}, {16, 4}, {300, 5}, {131, 65}};
const std::array<const char*, 2> module_names = {"a", "b"};

std::string name_of(std::size_t index) {
  return fmt::format("p{}", index);
}

std::vector<std::uint32_t> bits_of(const Tensor& tensor) {
  std::vector<std::uint32_t> bits;
  for (const float value : to_host(tensor)) bits.push_back(std::bit_cast<std::uint32_t>(value));
  return bits;
}

/// Multiples of 1/8, so that sums over ranks, of magnitudes and of squares are exact.
Values local_gradient(std::size_t module, std::size_t index, std::int64_t rank) {
  Values values(static_cast<std::size_t>(numel(shapes[index])));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = 0.125f *
                static_cast<float>((static_cast<std::int64_t>(i * 7 + index * 3 + module * 31) + rank * 11) % 101 - 50);
  return values;
}

double serial_norm(const std::vector<Values>& gradients, double norm_type) {
  double sum = 0;
  for (const Values& gradient : gradients)
    for (const float value : gradient) {
      const double magnitude = std::abs(static_cast<double>(value));
      if (norm_type == 1) sum += magnitude;
      if (norm_type == 2) sum += magnitude * magnitude;
      if (norm_type == infinity) sum = std::max(sum, magnitude);
    }
  return norm_type == 2 ? std::sqrt(sum) : sum;
}

class GradientsTest : public OnMesh {
 protected:
  /// Modules "a" and "b" with every shape, a frozen parameter, and "unused".
  Model make_model(std::int64_t min_shard_size) const {
    Model model({.mesh = mesh_, .min_shard_size = min_shard_size, .gradient_divide_factor = 1.0, .direct_bytes = 4096});
    for (const char* name : module_names) {
      std::vector<ParamSpec> specs;
      for (std::size_t i = 0; i < shapes.size(); ++i) specs.push_back({name_of(i), shapes[i], init::ones()});
      specs.push_back({.name = "frozen", .shape = {7, 9}, .value = init::ones(), .requires_grad = false});
      model.add(name, specs);
    }
    model.add("unused", {{"w", {11, 3}, init::ones()}});
    return model;
  }

  /// Gradients times `factor`, with `planted` in the middle of parameter `where` of "b" on the last rank.
  void backward(Model& model, float factor = 1, std::size_t where = 0, float planted = 0) const {
    for (std::size_t m = module_names.size(); m-- > 0;) {
      BackwardScope scope = model.module(module_names[m]).backward();
      for (std::size_t i = 0; i < shapes.size(); ++i) {
        Values values = local_gradient(m, i, rank_);
        for (float& value : values) value *= factor;
        if (planted != 0 && m == 1 && i == where && rank_ == ranks_ - 1) values[values.size() / 2] = planted;
        write(scope.grad_tensor(name_of(i)), values);
      }
      scope.reduce();
    }
  }

  /// The sums over ranks, module by module.
  std::vector<Values> serial_gradients() const {
    std::vector<Values> gradients;
    for (std::size_t m = 0; m < module_names.size(); ++m)
      for (std::size_t i = 0; i < shapes.size(); ++i) {
        Values& sum = gradients.emplace_back(static_cast<std::size_t>(numel(shapes[i])));
        for (std::int64_t rank = 0; rank < ranks_; ++rank) {
          const Values part = local_gradient(m, i, rank);
          for (std::size_t k = 0; k < sum.size(); ++k) sum[k] += part[k];
        }
      }
    return gradients;
  }

  void expect_gradients(const Model& model, std::vector<Values> full, float factor) const {
    for (std::size_t m = 0; m < module_names.size(); ++m)
      for (std::size_t i = 0; i < shapes.size(); ++i) {
        Values& values = full[m * shapes.size() + i];
        for (float& value : values) value *= factor;
        const ShardedParam param = model.module(module_names[m]).param(name_of(i));
        ASSERT_TRUE(param.gradient().has_value());
        EXPECT_EQ(to_host(param.gradient()->local()), part_of(values, param, ranks_, rank_)) << param.key();
      }
  }

  static std::vector<std::vector<std::uint32_t>> gradient_bits(const Model& model) {
    std::vector<std::vector<std::uint32_t>> bits;
    for (const Module* module : model.modules())
      for (const ShardedParam& param : module->params())
        if (const auto gradient = param.gradient()) bits.push_back(bits_of(gradient->local()));
    return bits;
  }

  static std::vector<std::vector<std::uint32_t>> parameter_bits(const Model& model) {
    std::vector<std::vector<std::uint32_t>> bits;
    for (const Module* module : model.modules())
      for (const ShardedParam& param : module->params()) bits.push_back(bits_of(param.local_shard()));
    return bits;
  }

  void expect_same_on_all_ranks(const std::string& text) const {
    for (const std::string& other : mesh_.host().all_gather(text)) EXPECT_EQ(other, text);
  }
  void expect_same_on_all_ranks(double value) const {
    expect_same_on_all_ranks(std::to_string(std::bit_cast<std::uint64_t>(value)));
  }

  /// One all-reduce each; a single rank needs none.
  Calls all_reduces(std::size_t count) const { return Calls(ranks_ == 1 ? 0 : count, "Allreduce"); }

  /// Writes NaN to every element of gradient buffers that belongs to no parameter; returns how many there were.
  static std::size_t poison_pads(const Model& model) {
    std::size_t count = 0;
    for (const auto& group : detail::ModuleAccess::groups(model)) {
      if (!group->has_gradient()) continue;
      group->make_gradients(ExecutionSpace());
      for (const detail::Section& section : group->layout().sections) {
        const Tensor buffer = group->section_gradients(section);
        Values values = to_host(buffer);
        std::vector<bool> is_element(values.size());
        for (const detail::Param& param : group->params()) {
          if (!param.requires_grad || &group->layout().sections[param.section] != &section) continue;
          const auto begin = is_element.begin() + param.train_start;
          std::fill(begin, begin + param.shard.local().numel(), true);
        }
        for (std::size_t i = 0; i < values.size(); ++i)
          if (!is_element[i]) values[i] = nan;
        count += static_cast<std::size_t>(std::count(is_element.begin(), is_element.end(), false));
        fill(buffer, values);
      }
    }
    return count;
  }
};

using ClipGradNorm = GradientsTest;

TEST_F(ClipGradNorm, IsTheSerialNormOfShardedAndReplicatedParameters) {
  const std::vector<Values> serial = serial_gradients();
  for (const std::int64_t min_shard_size : {0, 1024})
    for (const double norm_type : {1.0, 2.0, infinity}) {
      Model model = make_model(min_shard_size);
      EXPECT_EQ(model.module("a").memory_stats().sharded_parameters, min_shard_size == 0 ? 8 : 2);
      backward(model);
      const double norm = clip_grad_norm(model, infinity, {.norm_type = norm_type});
      EXPECT_EQ(norm, serial_norm(serial, norm_type));
      EXPECT_GT(norm, 1);
      expect_same_on_all_ranks(norm);
      expect_gradients(model, serial, 1);
    }
}

TEST_F(ClipGradNorm, ScalesByPyTorchsRule) {
  const std::vector<Values> serial = serial_gradients();
  for (const double norm_type : {1.0, 2.0, infinity}) {
    const double norm = serial_norm(serial, norm_type);
    for (const double max_norm : {0.0, 1.0, norm, 1.5 * norm}) {
      Model model = make_model(1024);
      backward(model);
      EXPECT_EQ(clip_grad_norm(model, max_norm, {.norm_type = norm_type}), norm);
      expect_gradients(model, serial, static_cast<float>(std::min(1.0, max_norm / (norm + 1e-6))));
    }
  }
  // What is as large as allowed is scaled by 1 / (1 + 1e-6).
  Model model({.mesh = mesh_});
  ShardedParam param = model.add("m", {{"w", {1}, init::ones()}}).param("w");
  param.set_gradient(ramp_tensor({1}, 1, 0));
  EXPECT_EQ(clip_grad_norm(model, 1), 1);
  EXPECT_EQ(to_host(param.gradient()->local()), (Values{static_cast<float>(1 / (1 + 1e-6))}));
  EXPECT_LT(to_host(param.gradient()->local())[0], 1);
}

TEST_F(ClipGradNorm, PaddingIsNotCounted) {
  const std::vector<Values> serial = serial_gradients();
  for (const std::int64_t min_shard_size : {0, 1024})
    for (const double norm_type : {1.0, 2.0, infinity}) {
      Model model = make_model(min_shard_size);
      backward(model);
      model.finish_backward();
      const std::size_t poisoned = poison_pads(model);
      EXPECT_TRUE(min_shard_size != 0 || poisoned > 0);
      const double norm = serial_norm(serial, norm_type);
      EXPECT_EQ(clip_grad_norm(model, 1, {.norm_type = norm_type}), norm);
      expect_gradients(model, serial, static_cast<float>(1 / (norm + 1e-6)));
    }
}

TEST_F(ClipGradNorm, IsOneAllReduce) {
  Model model = make_model(1024);
  for (const bool has_gradients : {true, false}) {
    if (has_gradients) backward(model);
    model.finish_backward();
    EXPECT_EQ(calls_of([&] { clip_grad_norm(model, 1); }), all_reduces(1));
    model.zero_grad();
  }
  backward(model);
  Model other = make_model(1024);
  backward(other);
  Calls expected = calls_of([&] { other.finish_backward(); });
  for (const std::string& call : all_reduces(1)) expected.push_back(call);
  EXPECT_EQ(calls_of([&] { clip_grad_norm(model, 1); }), expected);
}

TEST_F(ClipGradNorm, ANormThatIsNotFiniteScalesNothing) {
  for (const std::size_t where : {0, 3, 4, 7})
    for (const float planted : {nan, -std::numeric_limits<float>::infinity()})
      for (const double norm_type : {1.0, 2.0, infinity})
        for (const std::int64_t min_shard_size : {0, 1024}) {
          Model model = make_model(min_shard_size);
          backward(model, 1, where, planted);
          model.finish_backward();
          const auto before = gradient_bits(model);
          const double norm = clip_grad_norm(model, 1, {.norm_type = norm_type});
          EXPECT_EQ(std::isnan(norm), std::isnan(planted));
          EXPECT_FALSE(std::isfinite(norm));
          const std::string message = message_of<Error>(
              [&] { clip_grad_norm(model, 1, {.norm_type = norm_type, .error_if_nonfinite = true}); });
          EXPECT_TRUE(contains(message, "module \"b\" has a gradient that is not finite")) << message;
          expect_same_on_all_ranks(message);
          EXPECT_EQ(gradient_bits(model), before);
        }
}

TEST_F(ClipGradNorm, TakesModulesOfSeveralModels) {
  const Config config{.mesh = mesh_};
  const auto a = make_module("a", {{"w", {64, 32}, init::ones()}, {"b", {3}, init::ones()}}, config);
  const auto b = make_module("b", {{"w", {64, 32}, init::ones()}}, config);
  const std::array<Module*, 2> modules = {a.get(), b.get()};
  for (Module* module : modules) {
    BackwardScope scope = module->backward();
    write(scope.grad_tensor("w"), ramp({64, 32}, 2, 0));
    scope.reduce();
  }
  EXPECT_EQ(clip_grad_norm(modules, 16), 128);
  for (const Module* module : modules)
    EXPECT_EQ(to_host(module->param("w").gradient()->local()),
              ramp(module->param("w").local_shape(), 2 * static_cast<float>(16 / (128 + 1e-6)), 0));
}

TEST_F(ClipGradNorm, MeshesMayDifferWhereOneCoversTheOthers) {
  const auto mesh_of = [&](std::int64_t color) {
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, static_cast<int>(color), 0, &part);
    int size = 0;
    MPI_Comm_size(part, &size);
    DeviceMesh mesh(part, {{"dp", size}});
    MPI_Comm_free(&part);
    return mesh;
  };
  DeviceMesh odd_or_even = mesh_of(rank_ % 2);
  const auto dense = make_module("dense", {{"w", {64, 32}, init::ones()}, {"b", {3}, init::ones()}}, {.mesh = mesh_});
  const auto expert =
      make_module("expert", {{"w", {64, 32}, init::ones()}, {"b", {4}, init::ones()}}, {.mesh = odd_or_even});
  const std::array<Module*, 2> modules = {expert.get(), dense.get()};
  for (Module* module : modules) {
    BackwardScope scope = module->backward();
    write(scope.grad_tensor("w"), ramp({64, 32}, 2, 0));
    write(scope.grad_tensor("b"), ramp(module->param("b").full_shape(), 3, 0));
    scope.reduce();
  }
  const double experts = ranks_ == 1 ? 1 : 2;
  EXPECT_EQ(clip_grad_norm(modules, infinity, {.norm_type = 1}), 4096 * (1 + experts) + 9 + 12 * experts);
  GradScaler scaler({.init_scale = 2});
  EXPECT_TRUE(scaler.unscale(modules));
  if (ranks_ == 4) {
    DeviceMesh halves = mesh_of(rank_ / 2);
    const auto other = make_module("other", {{"w", {64, 32}, init::ones()}}, {.mesh = halves});
    const std::array<Module*, 2> apart = {expert.get(), other.get()};
    EXPECT_TRUE(contains(message_of<ConfigError>([&] { clip_grad_norm(apart, 1); }),
                         "\"other\" has ranks that are not among the 2 of \"expert\""));
    EXPECT_TRUE(contains(message_of<ConfigError>([&] { GradScaler().unscale(apart); }), "cannot be summed"));
    halves.close();
  }
  odd_or_even.close();
}

TEST_F(ClipGradNorm, WrongUseIsRefused) {
  Model model({.mesh = mesh_});
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { clip_grad_norm(model, 1); }), "at least one"));
  Module& module = model.add("m", {{"w", {64, 32}, init::ones()}});
  EXPECT_EQ(clip_grad_norm(model, 1), 0);
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { clip_grad_norm(model, 1, {.norm_type = 3}); }), "norm_type is 3"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { clip_grad_norm(model, 1, {.norm_type = nan}); }), "norm_type"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { clip_grad_norm(model, -1); }), "max_norm is -1"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { clip_grad_norm(model, nan); }), "max_norm"));
  BackwardScope scope = module.backward();
  scope.hold();
  EXPECT_TRUE(contains(message_of<Error>([&] { clip_grad_norm(model, 1); }), "\"m\": its gradients are held"));
  model.reset();
}

using GradScalerTest = GradientsTest;

TEST_F(GradScalerTest, StepsAsWithoutScale) {
  for (const double max_norm : {infinity, 1.0}) {
    Model plain = make_model(1024);
    Model scaled = make_model(1024);
    AdamW plain_optimizer(plain, {.lr = 0.25});
    AdamW optimizer(scaled, {.lr = 0.25});
    GradScaler scaler({.init_scale = 1024});
    for (int step = 0; step < 3; ++step) {
      plain_optimizer.zero_grad();
      optimizer.zero_grad();
      backward(plain);
      backward(scaled, scaler.scale());
      if (max_norm != infinity) {
        clip_grad_norm(plain, max_norm);
        EXPECT_TRUE(scaler.unscale(optimizer));
        clip_grad_norm(scaled, max_norm);
      }
      plain_optimizer.step();
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
      EXPECT_EQ(parameter_bits(scaled), parameter_bits(plain));
      EXPECT_EQ(gradient_bits(scaled), gradient_bits(plain));
    }
  }
}

TEST_F(GradScalerTest, AllRanksSkipWhatIsNotFiniteOnOne) {
  for (const std::size_t where : {0, 3, 4, 7})
    for (const float planted : {nan, std::numeric_limits<float>::infinity()})
      for (const bool unscales_first : {false, true}) {
        Model model = make_model(1024);
        Sgd optimizer(model, {.lr = 0.25, .momentum = 0.5});
        GradScaler scaler;
        backward(model, 1, where, planted);
        model.finish_backward();
        const auto parameters = parameter_bits(model);
        const auto gradients = gradient_bits(model);
        EXPECT_FALSE(unscales_first && scaler.unscale(model));
        EXPECT_FALSE(scaler.step(optimizer));
        EXPECT_EQ(parameter_bits(model), parameters);
        EXPECT_EQ(gradient_bits(model), gradients);
        EXPECT_EQ(to_host<std::int64_t>(optimizer.state().at("step").local()), std::vector<std::int64_t>{0});
        scaler.update();
        EXPECT_EQ(scaler.state(), (GradScalerState{32768, 0}));

        optimizer.zero_grad();
        backward(model);
        EXPECT_TRUE(scaler.step(optimizer));
        EXPECT_NE(parameter_bits(model), parameters);
      }
}

TEST_F(GradScalerTest, SeesAReplicaThatDiffers) {
  Model model = make_model(1024);
  Sgd optimizer(model, {.lr = 0.25});
  const auto parameters = parameter_bits(model);
  GradScaler scaler;
  model.module("a").param("p3").set_gradient(ramp_tensor({3}, rank_ == ranks_ - 1 ? nan : 1.0f, 0));
  EXPECT_FALSE(scaler.step(optimizer));
  EXPECT_EQ(parameter_bits(model), parameters);
}

TEST_F(GradScalerTest, SeesWhatUnscalingWouldOverflow) {
  Model model({.mesh = mesh_});
  ShardedParam param = model.add("m", {{"w", {1}, init::ones()}}).param("w");
  GradScaler scaler({.init_scale = 0.25});
  param.set_gradient(ramp_tensor({1}, 0x1p126f, 0));
  EXPECT_FALSE(scaler.unscale(model));
  EXPECT_EQ(to_host(param.gradient()->local()), Values{0x1p126f});
  scaler.update();
  scaler.set_state({0.5f, 0});
  EXPECT_TRUE(scaler.unscale(model));
  EXPECT_EQ(to_host(param.gradient()->local()), Values{0x1p127f});
}

TEST_F(GradScalerTest, DecidesByOneAllReduce) {
  Model model = make_model(1024);
  Sgd optimizer(model, {.lr = 0.25});
  GradScaler scaler;
  const auto prepare = [&] {
    optimizer.zero_grad();
    backward(model);
    model.finish_backward();
  };
  prepare();
  EXPECT_EQ(calls_of([&] { scaler.step(optimizer); }), all_reduces(1));
  EXPECT_EQ(calls_of([&] { scaler.update(); }), Calls{});
  prepare();
  EXPECT_EQ(calls_of([&] {
              scaler.unscale(optimizer);
              clip_grad_norm(model, 1);
              scaler.step(optimizer);
              scaler.update();
            }),
            all_reduces(2));
}

TEST_F(GradScalerTest, TheScaleGrowsAfterFiniteStepsInARow) {
  Model model = make_model(1024);
  Sgd optimizer(model, {.lr = 0.25});
  GradScaler scaler({.init_scale = 8, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3});
  const auto iterate = [&](bool is_finite) {
    optimizer.zero_grad();
    backward(model, 1, 7, is_finite ? 0 : nan);
    EXPECT_EQ(scaler.step(optimizer), is_finite);
    scaler.update();
    expect_same_on_all_ranks(scaler.scale());
    return scaler.state();
  };
  EXPECT_EQ(iterate(true), (GradScalerState{8, 1}));
  EXPECT_EQ(iterate(true), (GradScalerState{8, 2}));
  EXPECT_EQ(iterate(false), (GradScalerState{2, 0}));
  EXPECT_EQ(iterate(true), (GradScalerState{2, 1}));
  EXPECT_EQ(iterate(true), (GradScalerState{2, 2}));
  EXPECT_EQ(iterate(true), (GradScalerState{8, 0}));
  // It stays a normal number.
  scaler.set_state({0x1p127f, 2});
  EXPECT_EQ(iterate(true), (GradScalerState{0x1p127f, 0}));
  scaler.set_state({0x1p-125f, 1});
  EXPECT_EQ(iterate(false), (GradScalerState{0x1p-125f, 0}));
}

TEST_F(GradScalerTest, SeveralOptimizersShareAScale) {
  Model first = make_model(1024);
  Model second = make_model(1024);
  Sgd first_optimizer(first, {.lr = 0.25});
  Sgd second_optimizer(second, {.lr = 0.25});
  GradScaler scaler;
  backward(first, 1, 7, nan);
  backward(second);
  EXPECT_FALSE(scaler.step(first_optimizer));
  EXPECT_TRUE(scaler.step(second_optimizer));
  scaler.update();
  EXPECT_EQ(scaler.scale(), 32768);
}

TEST_F(GradScalerTest, UnscalesTheRestOfAnOptimizer) {
  Model model = make_model(1024);
  Sgd optimizer(model, {.lr = 0.25});
  GradScaler scaler({.init_scale = 4});
  backward(model, 4);
  const std::array<Module*, 1> one = {&model.module("a")};
  EXPECT_TRUE(scaler.unscale(one));
  EXPECT_TRUE(scaler.step(optimizer));
  expect_gradients(model, serial_gradients(), 1);
}

TEST_F(GradScalerTest, StateGoesThroughAStateDict) {
  Model model = make_model(1024);
  GradScaler scaler({.init_scale = 8, .growth_interval = 3});
  StateDict source = state_dict(model);
  scaler.add_to(source, mesh_);
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { scaler.add_to(source, mesh_); }), "\"scaler."));
  EXPECT_TRUE(scaler.unscale(model));
  scaler.update();  // the dict follows
  EXPECT_EQ(to_host(source.tensors.at("scaler.scale").local()), Values{8});
  EXPECT_EQ(to_host<std::int64_t>(source.tensors.at("scaler.growth_tracker").local()), std::vector<std::int64_t>{1});
  EXPECT_EQ(source.tensors.at("scaler.scale").spec(), (TensorSpec{DType::f32, {}, {Replicate{}}, {}}));

  StateDict target;
  bool is_called = false;
  target.after_load = [&] { is_called = true; };
  GradScaler loaded;
  loaded.add_to(target, mesh_);
  const auto copy_all = [&] {
    for (const auto& [key, tensor] : target.tensors)
      kernels::copy(ExecutionSpace(), tensor.local(), source.tensors.at(key).local());
    target.after_load();
  };
  copy_all();
  EXPECT_TRUE(is_called);
  EXPECT_EQ(loaded.state(), (GradScalerState{8, 1}));
  GradScaler moved = std::move(loaded);
  scaler.set_state({16, 2});
  copy_all();
  EXPECT_EQ(moved.state(), (GradScalerState{16, 2}));
  fill(source.tensors.at("scaler.scale").local(), Values{0});
  EXPECT_TRUE(contains(message_of<ConfigError>(copy_all), "cannot be 0"));
  EXPECT_EQ(moved.state(), (GradScalerState{16, 2}));
}

TEST_F(GradScalerTest, WrongUseIsRefused) {
  const auto refused = [](const GradScalerOptions& options, const char* what) {
    EXPECT_TRUE(contains(message_of<ConfigError>([&] { GradScaler scaler(options); }), what)) << what;
  };
  refused({.init_scale = 0}, "init_scale is 0");
  refused({.init_scale = 1e39}, "init_scale");
  refused({.init_scale = nan}, "init_scale");
  refused({.growth_factor = 1}, "growth_factor is 1");
  refused({.growth_factor = infinity}, "growth_factor");
  refused({.backoff_factor = 1}, "backoff_factor is 1");
  refused({.backoff_factor = 0}, "backoff_factor is 0");
  refused({.growth_interval = 0}, "growth_interval is 0");

  Model model = make_model(1024);
  Sgd optimizer(model, {.lr = 0.25});
  GradScaler scaler;
  EXPECT_TRUE(contains(message_of<Error>([&] { scaler.update(); }), "nothing to update"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { scaler.set_state({nan, 0}); }), "scale"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { scaler.set_state({1, -1}); }), "growth tracker"));
  backward(model);
  EXPECT_TRUE(scaler.unscale(optimizer));
  EXPECT_TRUE(contains(message_of<Error>([&] { scaler.unscale(model); }), "\"a\" were unscaled already"));
  {
    const Scope scope = model.module("b").unshard();
    EXPECT_TRUE(contains(message_of<Error>([&] { scaler.step(optimizer); }), "\"b\" is unsharded"));
  }
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_TRUE(contains(message_of<Error>([&] { scaler.step(optimizer); }), "\"a\" was stepped already"));
}

}  // namespace
}  // namespace fsdp2::test
