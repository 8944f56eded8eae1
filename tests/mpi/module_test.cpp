// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/module.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fsdp2/error.hpp"
#include "fsdp2/log.hpp"
#include "fsdp2/model.hpp"
#include "fsdp2/optimizer.hpp"
#include "support/fsdp.hpp"

namespace fsdp2::test {
namespace {

const std::vector<Shape> shapes = {{},        {0},      {1},      {3},        {5, 17},     {16, 4},
                                   {3, 0, 5}, {4, 300}, {300, 5}, {1030, 65}, {2, 3, 2000}};

/// min_shard_size and direct_bytes of the matrix that most tests run through, and how many of `shapes` are then cut.
struct Setting {
  std::int64_t min_shard_size;
  std::int64_t direct_bytes;
  std::int64_t sharded;
};
const std::vector<Setting> settings = {
    {0, 0, 10}, {0, 256 * 1024, 10}, {0, 1 << 30, 10}, {1024, 256 * 1024, 4}, {1024, 0, 4}};

class ModuleTest : public OnMesh {
 protected:
  Config config(const Setting& setting) const {
    return {.mesh = mesh_, .min_shard_size = setting.min_shard_size, .direct_bytes = setting.direct_bytes};
  }
  static std::string name_of(std::size_t index) { return fmt::format("p{}", index); }

  /// One parameter of every shape, whose values tell their place.
  static std::vector<ParamSpec> specs() {
    std::vector<ParamSpec> result;
    for (std::size_t i = 0; i < shapes.size(); ++i)
      result.push_back({name_of(i), shapes[i], ramp_tensor(shapes[i], static_cast<float>(100 * i))});
    return result;
  }
  static std::vector<float> values(std::size_t index) { return ramp(shapes[index], static_cast<float>(100 * index)); }

  /// Whole numbers, so that sums over ranks are exact in any order.
  static std::vector<float> gradient(std::size_t index, std::int64_t rank, int step = 0) {
    std::vector<float> result(static_cast<std::size_t>(numel(shapes[index])));
    for (std::size_t i = 0; i < result.size(); ++i)
      result[i] = static_cast<float>((static_cast<std::int64_t>(i * 7 + index * 3) + rank * 11 + step * 5) % 101 - 50);
    return result;
  }
  std::vector<float> gradient_sum(std::size_t index, int step = 0) const {
    std::vector<float> sum(static_cast<std::size_t>(numel(shapes[index])));
    for (std::int64_t rank = 0; rank < ranks_; ++rank) {
      const std::vector<float> part = gradient(index, rank, step);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    return sum;
  }

  void backward(Module& module, int step = 0) const {
    BackwardScope scope = module.backward();
    write_gradients(scope, step);
    scope.reduce();
  }
  void write_gradients(BackwardScope& scope, int step = 0) const {
    for (std::size_t i = 0; i < shapes.size(); ++i) write(scope.grad_tensor(name_of(i)), gradient(i, rank_, step));
  }
  /// The rows of every gradient are those of `expected(index)`.
  template <class Expected>
  void expect_gradients(const Module& module, Expected&& expected) const {
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const ShardedParam param = module.param(name_of(i));
      const std::optional<DTensor> found = param.gradient();
      ASSERT_TRUE(found.has_value()) << to_string(shapes[i]);
      EXPECT_EQ(to_host(found->local()), part_of(expected(i), param, ranks_, rank_)) << to_string(shapes[i]);
    }
  }
  std::vector<float> divided(std::vector<float> sum, float divisor) const {
    for (float& value : sum) value /= divisor;
    return sum;
  }
};

TEST_F(ModuleTest, AGatherRestoresEveryShape) {
  for (const Setting& setting : settings) {
    Model model(config(setting));
    Module& module = model.add("m", specs());
    EXPECT_EQ(module.memory_stats().sharded_parameters, setting.sharded);
    for (const ShardedParam& param : module.params()) {
      Shape expected = param.full_shape();
      if (param.is_sharded()) expected[0] = chunk(expected[0], ranks_, rank_).size();
      EXPECT_EQ(param.local_shape(), expected);
      EXPECT_EQ(param.dtensor().spec().placements[0],
                param.is_sharded() ? Placement(Shard{0}) : Placement(Replicate{}));
    }
    for (int round = 0; round < 2; ++round) {  // the second finds used buffers
      const Scope scope = module.forward();
      for (std::size_t i = 0; i < shapes.size(); ++i) {
        EXPECT_EQ(scope.tensor(name_of(i)).shape(), shapes[i]);
        EXPECT_EQ(to_host(scope.tensor(name_of(i))), values(i)) << to_string(shapes[i]);
      }
      EXPECT_EQ(scope.view<const float**>("p9").extent(1), 65u);
    }
  }
}

TEST_F(ModuleTest, SlotsAndShardsAreAligned) {
  Model model({.mesh = mesh_, .min_shard_size = 0, .direct_bytes = 0});
  Module& module = model.add("m", specs());
  BackwardScope scope = module.backward();
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    if (numel(shapes[i]) == 0) continue;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(scope.tensor(name_of(i)).data()) % 64, 0u);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(scope.grad_tensor(name_of(i)).tensor.data()) % 64, 0u);
  }
  scope.reduce();
  model.finish_backward();
}

TEST_F(ModuleTest, InitialValuesDoNotDependOnTheNumberOfRanks) {
  const std::vector<ParamSpec> params = {{"uniform", {13, 200}, init::uniform(-1, 2, 7)},
                                         {"normal", {13, 200}, init::normal(1, 3, 7)},
                                         {"same", {13, 200}, init::normal(1, 3, 7)},
                                         {"seed", {13, 200}, init::normal(1, 3, 8)},
                                         {"kaiming", {50, 64}, init::kaiming(7)},
                                         {"ones", {77, 20}, init::ones()},
                                         {"half", {5}, init::constant(0.5)},
                                         {"zeros", {2000}, init::zeros()}};
  Model sharded({.mesh = mesh_, .min_shard_size = 0});
  Model serial({.mesh = DeviceMesh()});
  Module& a = sharded.add("m", params);
  Module& b = serial.add("m", params);
  for (const ParamSpec& spec : params)
    EXPECT_EQ(to_host(a.param(spec.name).all_gather()), to_host(b.param(spec.name).all_gather())) << spec.name;
  const std::vector<float> normal = to_host(b.param("normal").all_gather());
  EXPECT_NE(normal, to_host(b.param("same").all_gather()));
  EXPECT_NE(normal, to_host(b.param("seed").all_gather()));
  EXPECT_NE(to_host(b.param("same").all_gather()), to_host(b.param("seed").all_gather()));
  double sum = 0;
  double squares = 0;
  for (const float value : normal) sum += value, squares += static_cast<double>(value) * value;
  const auto count = static_cast<double>(normal.size());
  EXPECT_NEAR(sum / count, 1, 0.25);
  EXPECT_NEAR(std::sqrt(squares / count - sum / count * sum / count), 3, 0.25);
  squares = 0;
  for (const float value : to_host(b.param("kaiming").all_gather())) squares += static_cast<double>(value) * value;
  EXPECT_NEAR(squares / 3200, 2.0 / 64, 0.004);
  for (const float value : to_host(b.param("uniform").all_gather())) EXPECT_TRUE(value >= -1 && value <= 2);
}

TEST_F(ModuleTest, ReducedGradientsAreTheSerialMean) {
  for (const Setting& setting : settings) {
    Model model(config(setting));
    Module& module = model.add("m", specs());
    backward(module);
    model.finish_backward();
    expect_gradients(module, [&](std::size_t i) { return divided(gradient_sum(i), static_cast<float>(ranks_)); });
  }
}

TEST_F(ModuleTest, TheDivideFactorIsUsedForShardedAndReplicatedParameters) {
  for (const double factor : {1.0, 300.0}) {
    Model model({.mesh = mesh_, .gradient_divide_factor = factor});
    Module& module = model.add("m", specs());
    backward(module);
    model.finish_backward();
    expect_gradients(module, [&](std::size_t i) { return divided(gradient_sum(i), static_cast<float>(factor)); });
  }
}

TEST_F(ModuleTest, ReductionsAddUpUntilZeroGrad) {
  for (const Setting& setting : settings) {
    Model model(config(setting));
    Module& module = model.add("m", specs());
    backward(module, 1);
    model.zero_grad();  // the reduction in flight is forgotten as well
    for (const ShardedParam& param : module.params()) EXPECT_FALSE(param.gradient().has_value());
    backward(module, 2);
    backward(module, 3);
    model.finish_backward();
    backward(module, 4);
    model.finish_backward();
    model.finish_backward();  // changes nothing
    const auto divisor = static_cast<float>(ranks_);
    // The bucket adds the second and third before it is reduced; sharded ones are added one by one.
    expect_gradients(module, [&](std::size_t i) {
      std::vector<float> sum = gradient_sum(i, 2);
      const std::vector<float> third = gradient_sum(i, 3);
      const std::vector<float> fourth = divided(gradient_sum(i, 4), divisor);
      const bool is_sharded = module.param(name_of(i)).is_sharded();
      for (std::size_t k = 0; k < sum.size(); ++k) {
        sum[k] = is_sharded ? sum[k] / divisor + third[k] / divisor : (sum[k] + third[k]) / divisor;
        sum[k] += fourth[k];
      }
      return sum;
    });
  }
}

TEST_F(ModuleTest, HeldGradientsAreReducedOnce) {
  for (const Setting& setting : settings) {
    Model model(config(setting));
    Module& module = model.add("m", specs());
    Trace trace(model);
    {
      BackwardScope scope = module.backward();
      EXPECT_EQ(scope.grad_tensor("p9").beta, 0);
      EXPECT_EQ(scope.grad_tensor("p9").beta, 1);
      fill(scope.grad_tensor("p9").tensor, std::vector<float>(static_cast<std::size_t>(numel(shapes[9]))));
      for (std::size_t i = 0; i < shapes.size(); ++i)
        if (i != 4) write(scope.grad_tensor(name_of(i)), gradient(i, rank_, 1));
      scope.hold();
    }
    EXPECT_TRUE(contains(message_of<Error>([&] { model.finish_backward(); }), "\"m\": its gradients are held"));
    {
      BackwardScope scope = module.backward();
      EXPECT_EQ(scope.grad_tensor("p4").beta, 1);
      EXPECT_EQ(scope.grad_tensor("p9").beta, 1);
      write_gradients(scope, 2);
      scope.reduce();
    }
    int reductions = 0;
    for (const std::string& event : trace.take()) reductions += event == "reduce_issued m" ? 1 : 0;
    EXPECT_EQ(reductions, 1);
    model.finish_backward();
    expect_gradients(module, [&](std::size_t i) {
      std::vector<float> sum = gradient_sum(i, 2);
      const std::vector<float> held = gradient_sum(i, 1);
      for (std::size_t k = 0; k < sum.size() && i != 4; ++k) sum[k] += held[k];
      return divided(sum, static_cast<float>(ranks_));
    });
    BackwardScope next = module.backward();
    EXPECT_EQ(next.grad_tensor("p9").beta, 0);
    next.reduce();
    model.finish_backward();
  }
}

TEST_F(ModuleTest, GradientsThatNobodyAsksForAreZeros) {
  for (const Setting& setting : settings) {
    Model model(config(setting));
    Module& module = model.add("m", specs());
    backward(module, 1);  // leaves values in the buffers
    model.finish_backward();
    model.zero_grad();
    BackwardScope scope = module.backward();
    if (rank_ == 0) {  // the others have none
      write(scope.grad_tensor("p9"), gradient(9, 0));
      write(scope.grad_tensor("p3"), gradient(3, 0));
    }
    scope.reduce();
    model.finish_backward();
    expect_gradients(module, [&](std::size_t i) {
      const bool was_written = i == 9 || i == 3;
      return was_written ? divided(gradient(i, 0), static_cast<float>(ranks_))
                         : std::vector<float>(static_cast<std::size_t>(numel(shapes[i])));
    });
  }
}

/// The elements that belong to none of the parts of one buffer, from the first part's start to the last one's end.
std::vector<float> between(const std::vector<Tensor>& parts) {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  for (const Tensor& part : parts) {
    if (begin == nullptr || part.data() < begin) begin = part.data();
    if (end == nullptr || part.data() + part.bytes() > end) end = part.data() + part.bytes();
  }
  std::vector<float> all(static_cast<std::size_t>(end - begin) / sizeof(float));
  const Tensor::Bytes bytes(const_cast<std::byte*>(begin), static_cast<std::size_t>(end - begin));
  kernels::copy_to_host(ExecutionSpace(), reinterpret_cast<std::byte*>(all.data()),
                        Tensor::over(bytes, DType::f32, {static_cast<std::int64_t>(all.size())}));
  std::vector<bool> is_part(all.size());
  for (const Tensor& part : parts) std::fill_n(is_part.begin() + (part.data() - begin) / 4, part.numel(), true);
  std::vector<float> rest;
  for (std::size_t i = 0; i < all.size(); ++i)
    if (!is_part[i]) rest.push_back(all[i]);
  return rest;
}

TEST_F(ModuleTest, PaddingIsZeroAndStaysSo) {
  Model model({.mesh = mesh_, .min_shard_size = 0, .direct_bytes = 300});
  Module& module = model.add("m", specs());
  Module& other = model.add("other", {{"w", {200000}, init::ones()}});
  AdamW optimizer(model, {});
  for (int step = 0; step < 3; ++step) {
    {  // leaves large numbers in the buffers, also where the next module has its padding
      BackwardScope scope = other.backward();
      fill(scope.grad_tensor("w").tensor, std::vector<float>(200000, 1e30f));
      scope.reduce();
    }
    BackwardScope scope = module.backward();
    for (std::size_t i = 0; i < shapes.size(); ++i)
      fill(scope.grad_tensor(name_of(i)).tensor, std::vector<float>(static_cast<std::size_t>(numel(shapes[i])), 1));
    scope.reduce();
    optimizer.step();
    std::vector<Tensor> shards;
    std::vector<Tensor> gradients;
    std::vector<Tensor> moments;
    for (const ShardedParam& param : module.params()) {
      shards.push_back(param.local_shard());
      gradients.push_back(param.gradient()->local());
      moments.push_back(optimizer.state().at("exp_avg." + param.key()).local());
    }
    for (const std::vector<Tensor>& parts : {shards, gradients, moments}) {
      const std::vector<float> rest = between(parts);
      EXPECT_GT(rest.size(), 0u);
      EXPECT_EQ(rest, std::vector<float>(rest.size()));
    }
  }
}

TEST_F(ModuleTest, FrozenParametersAreGatheredButNotReduced) {
  for (const Setting& setting : settings) {
    std::vector<ParamSpec> params = specs();
    for (std::size_t i = 0; i < params.size(); i += 2) params[i].requires_grad = false;
    Model model(config(setting));
    Module& module = model.add("m", params);
    BackwardScope scope = module.backward();
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      EXPECT_EQ(to_host(scope.tensor(name_of(i))), values(i));
      EXPECT_EQ(module.param(name_of(i)).requires_grad(), i % 2 == 1);
      if (i % 2 == 1) write(scope.grad_tensor(name_of(i)), gradient(i, rank_));
    }
    const std::string message = message_of<Error>([&] { scope.grad_tensor("p8"); });
    EXPECT_TRUE(contains(message, "\"p8\"") && contains(message, "does not require a gradient")) << message;
    scope.reduce();
    model.finish_backward();
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const ShardedParam param = module.param(name_of(i));
      ASSERT_EQ(param.gradient().has_value(), i % 2 == 1);
      if (i % 2 == 1) {
        EXPECT_EQ(to_host(param.gradient()->local()),
                  part_of(divided(gradient_sum(i), static_cast<float>(ranks_)), param, ranks_, rank_));
      }
    }
    for (Module* each : model.modules())
      for (const ShardedParam& param : each->params())
        EXPECT_EQ(to_host(param.local_shard()),
                  part_of(values(std::stoul(param.name().substr(1))), param, ranks_, rank_));
  }
}

TEST_F(ModuleTest, ModulesOfDifferentSizesShareBuffers) {
  Model model({.mesh = mesh_, .min_shard_size = 0, .direct_bytes = 0});
  const auto shape = [](std::size_t i) { return Shape{static_cast<std::int64_t>(10 * (i + 1)), 7}; };
  const auto weight = [&](std::size_t i) { return ramp(shape(i), static_cast<float>(1000 * i)); };
  const auto slope = [&](std::size_t i) { return ramp(shape(i), static_cast<float>(i)); };
  std::vector<Module*> modules;
  for (std::size_t i = 0; i < 4; ++i)
    modules.push_back(&model.add(fmt::format("m{}", i), {{"w", shape(i), make_tensor(shape(i), weight(i))}}));
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    for (std::size_t i = 0; i < 4; ++i) {
      const Scope scope = modules[i]->forward();
      EXPECT_EQ(to_host(scope.tensor("w")), weight(i));
    }
    for (std::size_t i = 4; i-- > 0;) {
      BackwardScope scope = modules[i]->backward();
      EXPECT_EQ(to_host(scope.tensor("w")), weight(i));
      write(scope.grad_tensor("w"), slope(i));
      scope.reduce();
    }
    model.finish_backward();
    for (std::size_t i = 0; i < 4; ++i) {
      const ShardedParam param = modules[i]->param("w");
      EXPECT_EQ(to_host(param.gradient()->local()), part_of(slope(i), param, ranks_, rank_));
    }
  }
  const std::int64_t slot = align_up(chunk_size(40, ranks_) * ranks_ * 7 * 4, 64);
  EXPECT_EQ(model.memory_stats().unsharded_bytes, 0);
  EXPECT_EQ(model.memory_stats().reduction_bytes, 0);
  EXPECT_EQ(model.memory_stats().peak_unsharded_bytes, 2 * slot);  // one live, one prefetched
  const std::int64_t reduce_slot = align_up(slot + chunk_size(40, ranks_) * 7 * 4, 64);
  EXPECT_EQ(model.memory_stats().peak_reduction_bytes, 2 * reduce_slot);  // one lent, one in flight
}

std::vector<std::string> allocations;

TEST_F(ModuleTest, TheSteadyStateAllocatesNothing) {
  Model model({.mesh = mesh_, .min_shard_size = 0, .direct_bytes = 1000});
  for (int i = 0; i < 3; ++i) model.add(fmt::format("m{}", i), specs());
  AdamW optimizer(model, {});
  const auto train = [&] {
    optimizer.zero_grad();
    for (Module* module : model.modules()) run_forward(*module);
    for (std::size_t i = 3; i-- > 0;) {
      BackwardScope scope = model.modules()[i]->backward();
      write_gradients(scope);
      scope.reduce();
    }
    optimizer.step();
  };
  train();
  train();
  allocations.clear();
  Kokkos::Tools::Experimental::set_allocate_data_callback([](Kokkos::Profiling::SpaceHandle, const char* label,
                                                             const void*,
                                                             std::uint64_t) { allocations.emplace_back(label); });
  train();
  Kokkos::Tools::Experimental::set_allocate_data_callback(nullptr);
  EXPECT_EQ(allocations, std::vector<std::string>{});
}

TEST_F(ModuleTest, DirectParametersNeedNoTemporary) {
  const std::vector<ParamSpec> params = {{"a", {64 * ranks_, 16}, init::ones()},
                                         {"b", {64 * ranks_, 16}, init::ones()}};
  const std::int64_t full = 2 * 64 * ranks_ * 16 * 4;
  const auto peak = [&](std::int64_t direct_bytes) {
    Model model({.mesh = mesh_, .direct_bytes = direct_bytes});
    Module& module = model.add("m", params);
    run_forward(module);
    return model.memory_stats().peak_unsharded_bytes;
  };
  EXPECT_EQ(peak(full / 2), full);
  EXPECT_EQ(peak(full / 2 + 1), 2 * full);
}

TEST_F(ModuleTest, ReshardAfterForwardDecidesWhatForwardLeaves) {
  const std::int64_t bytes = 64 * ranks_ * 32 * 4;
  for (const bool reshards : {true, false}) {
    Model model({.mesh = mesh_, .reshard_after_forward = reshards, .direct_bytes = 0});
    Module& module = model.add("m", {{"w", {64 * ranks_, 32}, init::ones()}});
    Trace trace(model);
    run_forward(module);
    EXPECT_EQ(model.memory_stats().unsharded_bytes, reshards ? 0 : bytes);
    EXPECT_EQ(module.param("w").is_gathered(), !reshards);
    trace.take();
    {
      BackwardScope scope = module.backward();
      EXPECT_EQ(trace.take().empty(), !reshards);  // the kept parameters are used
      EXPECT_EQ(model.memory_stats().unsharded_bytes, bytes);
      scope.reduce();
      EXPECT_EQ(model.memory_stats().unsharded_bytes, 0);
      EXPECT_TRUE(contains(message_of<Error>([&] { scope.tensor("w"); }), "has ended"));
    }
    model.finish_backward();
    EXPECT_EQ(model.memory_stats().unsharded_bytes, 0);
  }
}

TEST_F(ModuleTest, AModuleMayHaveAnotherPolicy) {
  Model model({.mesh = mesh_, .direct_bytes = 0});
  model.add("large", {{"w", {1024, 32}, init::ones()}});
  Module& keeps = model.add("keeps", {{"w", {64 * ranks_, 32}, init::ones()}}, {.reshard_after_forward = false});
  Module& small = model.add("small", {{"w", {64, 32}, init::ones()}}, {.min_shard_size = 4096});
  Module& packs = model.add("packs", {{"w", {64, 32}, init::ones()}}, {.direct_bytes = 1 << 20});
  run_forward(keeps);
  EXPECT_TRUE(keeps.param("w").is_gathered());
  EXPECT_EQ(model.memory_stats().unsharded_bytes, 64 * ranks_ * 32 * 4);  // its own storage, not one for the largest
  EXPECT_FALSE(small.param("w").is_sharded());
  const Scope scope = packs.unshard_async();
  const std::int64_t packed = chunk_size(64, ranks_) * ranks_ * 32 * 4;
  EXPECT_EQ(packs.memory_stats().unsharded_bytes, chunk_size(1024, ranks_) * ranks_ * 32 * 4 + packed);
  scope.tensor("w");
}

TEST_F(ModuleTest, EvaluationDropsParametersUnlessToldOtherwise) {
  for (const bool keeps : {false, true})
    for (const bool reshards : {false, true}) {
      Model model({.mesh = mesh_, .reshard_after_forward = reshards, .keep_unsharded_in_eval = keeps});
      Module& module = model.add("m", {{"w", {64, 32}, init::ones()}});
      model.eval();
      EXPECT_FALSE(module.is_training());
      run_forward(module);
      EXPECT_EQ(module.param("w").is_gathered(), keeps);
      // A new value is seen although the old one was kept.
      const Shape local = module.param("w").local_shape();
      module.param("w").update_local_shard(ramp_tensor(local, 5, 0));
      EXPECT_FALSE(module.param("w").is_gathered());
      {
        const Scope scope = module.forward();
        EXPECT_EQ(to_host(scope.tensor("w")), ramp({64, 32}, 5, 0));
      }
      model.train();
      EXPECT_FALSE(module.param("w").is_gathered());
      EXPECT_EQ(model.memory_stats().unsharded_bytes, 0);
      EXPECT_EQ(module.forward_count(), 2);
    }
}

std::vector<std::string> deallocations;

TEST_F(ModuleTest, StorageKeptForEvaluationIsFreedForTraining) {
  Model model({.mesh = mesh_, .keep_unsharded_in_eval = true});
  Module& module = model.add("m", {{"w", {64, 32}, init::ones()}});
  model.eval();
  run_forward(module);
  deallocations.clear();
  Kokkos::Tools::Experimental::set_deallocate_data_callback([](Kokkos::Profiling::SpaceHandle, const char* label,
                                                               const void*,
                                                               std::uint64_t) { deallocations.emplace_back(label); });
  model.train();
  Kokkos::Tools::Experimental::set_deallocate_data_callback(nullptr);
  EXPECT_EQ(deallocations, std::vector<std::string>{"fsdp2::unsharded"});
}

TEST_F(ModuleTest, ACacheOutlivesScopes) {
  Model model({.mesh = mesh_});
  Module& module = model.add("m", {{"w", {64, 32}, init::ones()}});
  ShardedParam param = module.param("w");
  param.all_gather();
  run_forward(module);
  EXPECT_TRUE(param.is_gathered());
  param.clear_cache();
  EXPECT_FALSE(param.is_gathered());
}

TEST_F(ModuleTest, ScopesOfOneModuleShareItsParameters) {
  Model model({.mesh = mesh_});
  Module& module = model.add("m", {{"w", {64, 32}, ramp_tensor({64, 32})}});
  Trace trace(model);
  {
    Scope outer = module.unshard();
    const Scope inner = module.forward();
    EXPECT_EQ(outer.tensor("w").data(), inner.tensor("w").data());
    Scope moved = std::move(outer);
    EXPECT_TRUE(contains(message_of<Error>([&] { outer.tensor("w"); }), "moved from"));
    moved.end();
    moved.end();
    EXPECT_TRUE(contains(message_of<Error>([&] { moved.tensor("w"); }), "has ended"));
    EXPECT_EQ(to_host(inner.tensor("w")), ramp({64, 32}));
  }
  {
    BackwardScope backward = module.backward();
    const Scope recomputation = module.forward();
    EXPECT_EQ(module.forward_count(), 1);
    backward.reduce();
    EXPECT_EQ(to_host(recomputation.tensor("w")), ramp({64, 32}));
  }
  model.finish_backward();
  const std::vector<std::string> expected = {"gather_issued m", "gather_completed m", "resharded m",
                                             "gather_issued m", "gather_completed m", "reduce_issued m",
                                             "resharded m",     "reduce_completed m"};
  EXPECT_EQ(trace.take(), expected);
}

TEST_F(ModuleTest, AnAsynchronousUnshardWaitsAtItsFirstUse) {
  Model model({.mesh = mesh_});
  Module& module = model.add("m", {{"w", {64, 32}, ramp_tensor({64, 32})}});
  Trace trace(model);
  {
    const Scope scope = module.unshard_async();
    EXPECT_EQ(trace.take(), std::vector<std::string>{"gather_issued m"});
    EXPECT_EQ(to_host(scope.tensor("w")), ramp({64, 32}));
    EXPECT_EQ(trace.take(), std::vector<std::string>{"gather_completed m"});
  }
  EXPECT_EQ(trace.take(), std::vector<std::string>{"resharded m"});
  { const Scope scope = module.unshard_async(); }  // never used: the next scope takes it over
  trace.take();
  {
    const Scope scope = module.forward();
    EXPECT_EQ(to_host(scope.tensor("w")), ramp({64, 32}));
  }
  const std::vector<std::string> expected = {"gather_completed m", "resharded m"};
  EXPECT_EQ(trace.take(), expected);
}

TEST_F(ModuleTest, AnUnfinishedBackwardIsNamed) {
  Model model({.mesh = mesh_});
  Module& left = model.add("left", {{"w", {64, 32}, init::ones()}, {"b", {3}, init::ones()}});
  Module& held = model.add("held", {{"w", {64, 32}, init::ones()}});
  Module& open = model.add("open", {{"w", {64, 32}, init::ones()}});
  Module& fine = model.add("fine", {{"w", {64, 32}, init::ones()}});
  {
    BackwardScope scope = left.backward();
    fill(scope.grad_tensor("b").tensor, std::vector<float>{1, 2, 3});
  }
  {
    BackwardScope scope = held.backward();
    scope.hold();
  }
  {
    BackwardScope scope = fine.backward();
    scope.reduce();
  }
  BackwardScope scope = open.backward();
  std::string message = message_of<Error>([&] { model.finish_backward(); });
  EXPECT_TRUE(contains(message, "\"left\": its backward scope ended without reduce() or hold()")) << message;
  EXPECT_TRUE(contains(message, "\"held\": its gradients are held")) << message;
  EXPECT_TRUE(contains(message, "\"open\": its backward scope is still open")) << message;
  EXPECT_FALSE(contains(message, "\"fine\"")) << message;
  EXPECT_TRUE(contains(message_of<Error>([&] { const BackwardScope again = left.backward(); }), "\"left\""));
  EXPECT_TRUE(contains(message_of<Error>([&] { const BackwardScope again = open.backward(); }), "open already"));
  EXPECT_TRUE(contains(message_of<Error>([&] { left.zero_grad(); }), "\"left\""));

  model.reset();
  EXPECT_TRUE(contains(message_of<Error>([&] { scope.tensor("w"); }), "has ended"));
  EXPECT_EQ(model.memory_stats().unsharded_bytes, 0);
  for (Module* module : model.modules()) {
    BackwardScope again = module->backward();
    const LentTensor lent = again.grad_tensor("w");
    EXPECT_EQ(lent.beta, 0);
    write(lent, ramp({64, 32}));
    again.reduce();
  }
  model.finish_backward();
  for (Module* module : model.modules())
    EXPECT_EQ(to_host(module->param("w").gradient()->local()),
              part_of(ramp({64, 32}), module->param("w"), ranks_, rank_));
  EXPECT_EQ(to_host(left.param("b").gradient()->local()), std::vector<float>(3));  // what was written before is gone
  scope.end();
}

TEST_F(ModuleTest, ShardsDoNotChangeUnderAScope) {
  Model model({.mesh = mesh_});
  Module& module = model.add("m", {{"w", {64, 32}, init::ones()}});
  ShardedParam param = module.param("w");
  {
    BackwardScope scope = module.backward();
    scope.reduce();
  }
  const Scope scope = module.unshard();
  EXPECT_TRUE(
      contains(message_of<Error>([&] { param.update_local_shard(param.local_shard()); }), "\"m\" is unsharded"));
  EXPECT_TRUE(contains(message_of<Error>([&] { model.step([](const auto&, const Tensor&, const Tensor&) {}); }),
                       "\"m\" is unsharded"));
}

TEST_F(ModuleTest, WrongNamesAndShapesAreRefused) {
  Model model({.mesh = mesh_});
  Module& module = model.add("m", {{"w", {64, 32}, init::ones()}, {"b", {3}, init::ones()}});
  BackwardScope scope = module.backward();
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { scope.tensor("v"); }),
                       "module \"m\" has no parameter \"v\": it has w, b"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { scope.grad_tensor("v"); }), "\"v\""));
  EXPECT_TRUE(contains(message_of<ShapeError>([&] { scope.view<double**>("w"); }), "f64"));
  EXPECT_TRUE(contains(message_of<ShapeError>([&] { scope.grad<float*>("w"); }), "[64, 32]"));
  scope.reduce();
  EXPECT_TRUE(contains(message_of<Error>([&] { scope.grad_tensor("w"); }), "has ended"));
  EXPECT_TRUE(contains(message_of<Error>([&] { scope.reduce(); }), "has ended"));
  EXPECT_TRUE(contains(message_of<Error>([&] { module.param("w").full(); }), "is not gathered"));

  EXPECT_TRUE(contains(message_of<ConfigError>([&] { model.add("", {}); }), "needs a name"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { model.add("optim", {}); }), "\"optim\""));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { model.add("optim.exp_avg", {}); }), "\"optim.exp_avg\""));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { model.add("m", {}); }), "\"m\""));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { model.add("n", {{"", {1}, init::ones()}}); }), "needs a name"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] {
                         model.add("n", {{"a", {1}, init::ones()}, {"a", {1}, init::ones()}});
                       }),
                       "two parameters \"a\""));
  EXPECT_TRUE(contains(message_of<ShapeError>([&] { model.add("n", {{"a", {-1}, init::ones()}}); }), "\"a\""));
  EXPECT_TRUE(contains(message_of<ShapeError>([&] {
                         model.add("n", {{"a", {std::int64_t{1} << 40, std::int64_t{1} << 40}, init::ones()}});
                       }),
                       "\"a\""));
  EXPECT_TRUE(contains(message_of<ShapeError>([&] { model.add("n", {{"a", {3}, ramp_tensor({4})}}); }), "[4]"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] {
                         model.add("n", {{"a", {3}, init::ones(), true, DType::i32}});
                       }),
                       "i32"));
  model.add("n.a", {{"b", {1}, init::ones()}});
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { model.add("n", {{"a.b", {1}, init::ones()}}); }), "\"n.a.b\""));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { module.add_param({"late", {1}, init::ones()}); }), "any more"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { model.module("x"); }), "m, n.a"));
  EXPECT_EQ(model.modules().size(), 2u);
  model.finish_backward();
}

TEST_F(ModuleTest, AModelMoves) {
  Model first({.mesh = mesh_});
  Module& module = first.add("m", {{"w", {64, 32}, ramp_tensor({64, 32})}});
  Model second = std::move(first);
  EXPECT_EQ(&second.module("m"), &module);
  const Scope scope = module.forward();
  EXPECT_EQ(to_host(scope.tensor("w")), ramp({64, 32}));
}

TEST_F(ModuleTest, AModuleAddedLaterJoinsTheBucket) {
  Model model({.mesh = mesh_});
  const auto train = [&](Module& module, float value) {
    BackwardScope scope = module.backward();
    write(scope.grad_tensor("b"), ramp({3}, value));
    scope.reduce();
  };
  Module& a = model.add("a", {{"b", {3}, init::ones()}});
  train(a, 10);
  Module& b = model.add("b", {{"b", {3}, init::ones()}});
  train(b, 20);
  train(a, 30);
  model.finish_backward();
  EXPECT_EQ(to_host(a.param("b").gradient()->local()), ramp({3}, 40, 2));
  EXPECT_EQ(to_host(b.param("b").gradient()->local()), ramp({3}, 20));
}

TEST_F(ModuleTest, ParametersLiveOnAnAxisOfAnyName) {
  DeviceMesh mesh(MPI_COMM_WORLD, {{"one", 1}, {"data", ranks_}});
  Model model({.mesh = mesh, .mesh_dim_name = "data"});
  Module& module = model.add("m", {{"w", {64, 32}, ramp_tensor({64, 32})}});
  const std::vector<Placement> expected = {Replicate{}, Shard{0}};
  EXPECT_EQ(module.param("w").dtensor().spec().placements, expected);
  EXPECT_EQ(to_host(module.param("w").all_gather()), ramp({64, 32}));
  mesh.close();
}

TEST_F(ModuleTest, OneLineIsLoggedForEachModule) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  Model model({.mesh = mesh_});
  model.add("m", {{"w", {256 * ranks_, 1000}, init::ones()}, {"b", {3}, init::ones()}});
  set_log_sink({});
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_TRUE(contains(lines[0], fmt::format("\"m\": 2 parameters, 1 sharded over {} ranks", ranks_))) << lines[0];
  EXPECT_TRUE(contains(lines[0], "-> 1.02 MB")) << lines[0];
}

}  // namespace
}  // namespace fsdp2::test
