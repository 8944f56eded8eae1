// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// When parameters are gathered and dropped, and gradients reduced: settings of modules, and scopes of every kind.

#include <fmt/format.h>
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

using Events = std::vector<std::string>;

class ScheduleTest : public OnMesh {
 protected:
  std::vector<Module*> add_modules(Model& model, int count) const {
    std::vector<Module*> modules;
    for (int i = 0; i < count; ++i)
      modules.push_back(
          &model.add(fmt::format("m{}", i), {{"w", {6, 5}, ramp_tensor({6, 5})}, {"b", {2}, init::zeros()}}));
    return modules;
  }
  Config config() const { return {.mesh = mesh_, .min_shard_size = 4, .direct_bytes = 0}; }

  static void backward(Module& module, float value = 1) {
    BackwardScope scope = module.backward();
    write(scope.grad_tensor("w"), std::vector<float>(30, value));
    write(scope.grad_tensor("b"), std::vector<float>(2, value));
    scope.reduce();
  }
  static void expect_gradients(const Module& module, float value) {
    for (const ShardedParam& param : module.params()) {
      ASSERT_TRUE(param.gradient().has_value());
      for (const float found : to_host(param.gradient()->local())) EXPECT_EQ(found, value) << param.key();
    }
  }
};

TEST_F(ScheduleTest, ForwardPrefetchFollowsTheOrderOfTheLastIteration) {
  Config own = config();
  own.forward_prefetch = true;
  own.backward_prefetch = BackwardPrefetch::none;
  Model model(own);
  const std::vector<Module*> modules = add_modules(model, 3);
  const auto iterate = [&](const std::vector<std::size_t>& order) {
    for (const std::size_t i : order) run_forward(*modules[i]);
    for (auto i = order.rbegin(); i != order.rend(); ++i) backward(*modules[*i]);
    model.finish_backward();
  };
  iterate({0, 2, 1});
  Trace trace(model);
  for (const std::size_t i : {0u, 2u, 1u}) run_forward(*modules[i]);
  EXPECT_EQ(trace.take(), (Events{"gather_issued m0", "gather_completed m0", "prefetch_issued m2", "resharded m0",
                                  "gather_completed m2", "prefetch_issued m1", "resharded m2", "gather_completed m1",
                                  "resharded m1"}));
  for (const std::size_t i : {1u, 2u, 0u}) backward(*modules[i]);
  model.finish_backward();
  trace.take();
  run_forward(*modules[0]);
  run_forward(*modules[1]);  // another order: m2 was gathered in vain, and nothing more is prefetched
  EXPECT_EQ(trace.take(), (Events{"gather_issued m0", "gather_completed m0", "prefetch_issued m2", "resharded m0",
                                  "gather_completed m2", "gather_issued m1", "gather_completed m1", "resharded m1"}));
  backward(*modules[1]);
  backward(*modules[0]);
  model.finish_backward();
  EXPECT_EQ(model.memory_stats().unsharded_bytes, 0);
  iterate({0, 2, 1});
  trace.take();
  run_forward(*modules[1]);  // was not the first: nobody knows what follows
  EXPECT_EQ(trace.take(), (Events{"gather_issued m1", "gather_completed m1", "resharded m1"}));
  model.reset();
}

TEST_F(ScheduleTest, ListsReplaceThePolicyAndAreNotLimited) {
  Model model(config());
  const std::vector<Module*> modules = add_modules(model, 4);
  modules[0]->set_modules_to_forward_prefetch({modules[1], modules[2]});
  modules[3]->set_modules_to_backward_prefetch({modules[1], modules[0]});
  modules[2]->set_modules_to_backward_prefetch({});
  Trace trace(model);
  for (Module* module : modules) run_forward(*module);
  EXPECT_EQ(trace.take(), (Events{"gather_issued m0", "gather_completed m0", "prefetch_issued m1", "prefetch_issued m2",
                                  "resharded m0", "gather_completed m1", "resharded m1", "gather_completed m2",
                                  "resharded m2", "gather_issued m3", "gather_completed m3", "resharded m3"}));
  backward(*modules[3]);
  EXPECT_EQ(trace.take(), (Events{"gather_issued m3", "gather_completed m3", "prefetch_issued m1", "prefetch_issued m0",
                                  "resharded m3", "reduce_issued m3"}));
  backward(*modules[2]);
  EXPECT_EQ(trace.take(), (Events{"gather_issued m2", "gather_completed m2", "resharded m2", "reduce_completed m3",
                                  "reduce_issued m2"}));
  backward(*modules[1]);
  backward(*modules[0]);
  model.finish_backward();
  Model other(config());
  Module& stranger = other.add("x", {});
  EXPECT_TRUE(
      contains(message_of<ConfigError>([&] { modules[0]->set_modules_to_forward_prefetch({&stranger}); }), "\"x\""));
}

TEST_F(ScheduleTest, ASliceIsKeptBetweenForwardAndBackward) {
  for (std::int64_t slices = 1; slices <= ranks_; ++slices) {
    if (ranks_ % slices != 0) continue;
    Config own = config();
    own.direct_bytes = 64;
    own.reshard_after_forward = slices;
    own.backward_prefetch = BackwardPrefetch::none;
    Model model(own);
    std::vector<Module*> modules;
    for (const char* name : {"a", "b"}) modules.push_back(&model.add(name, {{"w", {60, 5}, ramp_tensor({60, 5})}}));
    for (int step = 0; step < 3; ++step) {
      for (Module* module : modules) run_forward(*module);
      const bool keeps_all = slices == 1;
      EXPECT_EQ(modules[0]->param("w").is_gathered(), keeps_all);
      for (std::size_t i = 2; i-- > 0;) {
        BackwardScope scope = modules[i]->backward();
        std::vector<float> values = ramp({60, 5});
        for (float& value : values) value -= static_cast<float>(step);
        EXPECT_EQ(to_host(scope.tensor("w")), values);
        write(scope.grad_tensor("w"), std::vector<float>(300, 1));
        scope.reduce();
      }
      model.step([](const std::string&, const Tensor& shard, const Tensor& gradient) {
        std::vector<float> values = to_host(shard);
        const std::vector<float> slope = to_host(gradient);
        for (std::size_t i = 0; i < values.size(); ++i) values[i] -= slope[i];
        fill(shard, values);
      });
      model.zero_grad();
    }
    const MemoryPlan plan = model.plan_memory();
    const MemoryPlan peak = model.peak_memory();
    EXPECT_EQ(peak.unsharded, plan.unsharded) << slices;
    modules[0]->set_reshard_after_forward(true);
    run_forward(*modules[0]);
    EXPECT_FALSE(modules[0]->param("w").is_gathered());
    EXPECT_THROW(modules[0]->set_reshard_after_forward(ranks_ + 1), ConfigError);
    model.reset();
  }
}

TEST_F(ScheduleTest, ThePolicyMayChangeWhileSlicesAreKept) {
  if (ranks_ % 2 != 0 || ranks_ == 2) GTEST_SKIP() << "needs a number between 1 and the ranks that divides them";
  for (const bool in_scope : {false, true})
    for (const ReshardAfterForward& next : {ReshardAfterForward(true), ReshardAfterForward(false)}) {
      Config own = config();
      own.reshard_after_forward = ranks_ / 2;
      Model model(own);
      Module& module = model.add("m", {{"w", {60, 5}, ramp_tensor({60, 5})}});
      {
        const Scope scope = module.forward();
        if (in_scope) module.set_reshard_after_forward(next);
      }
      module.set_reshard_after_forward(next);
      BackwardScope scope = module.backward();
      EXPECT_EQ(to_host(scope.tensor("w")), ramp({60, 5}));
      scope.reduce();
      model.finish_backward();
    }
}

TEST_F(ScheduleTest, ReshardAfterBackwardFalseSavesTheNextGather) {
  Config own = config();
  own.reshard_after_forward = false;
  Model model(own);
  const std::vector<Module*> modules = add_modules(model, 2);
  Trace trace(model);
  model.set_reshard_after_backward(false);
  for (int micro = 0; micro < 3; ++micro) {
    if (micro == 2) model.set_reshard_after_backward(true);
    for (Module* module : modules) run_forward(*module);
    for (std::size_t i = 2; i-- > 0;) backward(*modules[i]);
  }
  model.finish_backward();
  const Events events = trace.take();
  for (const char* name : {"m0", "m1"}) {
    EXPECT_EQ(std::count(events.begin(), events.end(), fmt::format("gather_issued {}", name)), 1);
    EXPECT_EQ(std::count(events.begin(), events.end(), fmt::format("resharded {}", name)), 1);
  }
  for (Module* module : modules) expect_gradients(*module, 3);
  EXPECT_EQ(model.memory_stats().unsharded_bytes, 0);
  model.set_reshard_after_backward(false);
  backward(*modules[0]);
  EXPECT_TRUE(modules[0]->param("w").is_gathered());
  model.step([](const std::string&, const Tensor&, const Tensor&) {});
  EXPECT_FALSE(modules[0]->param("w").is_gathered());  // the shards may have changed
}

TEST_F(ScheduleTest, WithoutGradientSyncReduceHolds) {
  Model model(config());
  const std::vector<Module*> modules = add_modules(model, 2);
  Trace trace(model);
  model.set_requires_gradient_sync(false);
  for (int micro = 0; micro < 3; ++micro)
    for (std::size_t i = 2; i-- > 0;) backward(*modules[i]);
  EXPECT_TRUE(contains(message_of<Error>([&] { model.finish_backward(); }), "held"));
  model.set_requires_gradient_sync(true);
  for (std::size_t i = 2; i-- > 0;) backward(*modules[i]);
  model.finish_backward();
  for (Module* module : modules) expect_gradients(*module, 4);
  const Events events = trace.take();
  EXPECT_EQ(std::count(events.begin(), events.end(), "reduce_issued m0"), 1);
  EXPECT_EQ(std::count(events.begin(), events.end(), "bucket_reduced"), 1);
}

TEST_F(ScheduleTest, ABackwardThatNeedsNoParametersGathersNone) {
  Model model(config());
  const std::vector<Module*> modules = add_modules(model, 2);
  modules[0]->set_unshard_in_backward(false);
  Trace trace(model);
  for (Module* module : modules) run_forward(*module);
  backward(*modules[1]);
  {
    BackwardScope scope = modules[0]->backward();
    EXPECT_TRUE(contains(message_of<Error>([&] { (void)scope.tensor("w"); }), "not gathered"));
    write(scope.grad_tensor("w"), std::vector<float>(30, 1));
    write(scope.grad_tensor("b"), std::vector<float>(2, 1));
    scope.reduce();
  }
  model.finish_backward();
  for (Module* module : modules) expect_gradients(*module, 1);
  const Events events = trace.take();
  EXPECT_EQ(std::count(events.begin(), events.end(), "gather_issued m0"), 1);
  EXPECT_EQ(std::count(events.begin(), events.end(), "prefetch_issued m0"), 0);
}

TEST_F(ScheduleTest, WritebackPutsFullParametersIntoShards) {
  for (const std::int64_t direct_bytes : {0, 1 << 20}) {
    Config own = config();
    own.direct_bytes = direct_bytes;
    Model model(own);
    const std::vector<Module*> modules = add_modules(model, 1);
    Module& module = *modules[0];
    {
      const Scope scope = module.unshard({.writeback = true});
      EXPECT_THROW((void)module.unshard({.writeback = true}), Error);
      fill(scope.tensor("w"), ramp({6, 5}, 50));
      fill(scope.tensor("b"), ramp({2}, 9));
    }
    const ShardedParam w = module.param("w");
    EXPECT_EQ(to_host(w.local_shard()), part_of(ramp({6, 5}, 50), w, ranks_, rank_));
    EXPECT_EQ(to_host(module.param("b").local_shard()), ramp({2}, 9));
    {
      const Scope scope = module.unshard();
      fill(scope.tensor("w"), ramp({6, 5}));  // not written back
    }
    EXPECT_EQ(to_host(w.local_shard()), part_of(ramp({6, 5}, 50), w, ranks_, rank_));
    const Scope scope = module.forward();
    EXPECT_EQ(to_host(scope.tensor("w")), ramp({6, 5}, 50));
  }
  Config own = config();
  own.mp_policy = MixedPrecisionPolicy::bf16();
  Model model(own);
  Module& module = *add_modules(model, 1)[0];
  EXPECT_TRUE(contains(message_of<Error>([&] { (void)module.unshard({.writeback = true}); }), "bf16"));
}

TEST_F(ScheduleTest, GradientsAreHandedOutAsTheyBecomeReady) {
  Model model(config());
  const std::vector<Module*> modules = add_modules(model, 3);
  std::vector<std::string> ready;
  model.set_on_gradient_ready([&](ShardedParam& param) {  // an optimizer in the backward
    ready.push_back(param.key());
    std::vector<float> values = to_host(param.local_shard());
    const std::vector<float> gradient = to_host(param.gradient()->local());
    for (std::size_t i = 0; i < values.size(); ++i) values[i] -= gradient[i];
    fill(param.local_shard(), values);
    param.zero_grad();
  });
  for (int step = 0; step < 2; ++step) {
    ready.clear();
    for (Module* module : modules) run_forward(*module);
    for (std::size_t i = 3; i-- > 0;) {
      backward(*modules[i], 2);
      EXPECT_EQ(ready.size(), 2 - i);  // one is in flight
    }
    model.finish_backward();
    EXPECT_EQ(ready, (Events{"m2.w", "m1.w", "m0.w", "m0.b", "m1.b", "m2.b"}));
  }
  model.set_reshard_after_backward(false);  // what is kept must not be what was
  for (std::size_t i = 3; i-- > 0;) backward(*modules[i], 2);
  model.finish_backward();
  for (Module* module : modules) {
    const Scope scope = module->unshard();
    EXPECT_EQ(to_host(scope.tensor("w")), ramp({6, 5}, -6));
    EXPECT_EQ(to_host(scope.tensor("b")), std::vector<float>(2, -6));
    EXPECT_FALSE(module->param("w").gradient().has_value());
  }
}

TEST_F(ScheduleTest, ScopesNestAndAForwardInsideABackwardIsRecomputation) {
  Model model(config());
  const std::vector<Module*> modules = add_modules(model, 2);
  Trace trace(model);
  {
    const Scope outer = modules[0]->forward();
    const Scope inner = modules[1]->forward();
    EXPECT_EQ(to_host(outer.tensor("w")), to_host(inner.tensor("w")));
  }
  EXPECT_EQ(trace.take(), (Events{"gather_issued m0", "gather_completed m0", "gather_issued m1", "gather_completed m1",
                                  "resharded m1", "resharded m0"}));
  for (std::size_t i = 2; i-- > 0;) {
    BackwardScope scope = modules[i]->backward();
    {
      const Scope again = modules[i]->forward();
      EXPECT_EQ(again.tensor("w").data(), scope.tensor("w").data());
    }
    EXPECT_EQ(modules[i]->forward_count(), 1);
    write(scope.grad_tensor("w"), std::vector<float>(30, 1));
    write(scope.grad_tensor("b"), std::vector<float>(2, 1));
    scope.reduce();
  }
  model.finish_backward();
  EXPECT_EQ(trace.take(), (Events{"gather_issued m1", "gather_completed m1", "prefetch_issued m0", "resharded m1",
                                  "reduce_issued m1", "gather_completed m0", "resharded m0", "reduce_completed m1",
                                  "reduce_issued m0", "reduce_completed m0", "bucket_reduced"}));
  for (Module* module : modules) expect_gradients(*module, 1);
}

TEST_F(ScheduleTest, AModuleUsedTwiceOrNeverOrWithoutGradientsOnSomeRanks) {
  Model model(config());
  const std::vector<Module*> modules = add_modules(model, 3);
  run_forward(*modules[0]);
  run_forward(*modules[1]);
  run_forward(*modules[0]);
  backward(*modules[0], 1);
  {
    BackwardScope scope = modules[1]->backward();
    if (rank_ == 0) {  // the others have nothing to add
      write(scope.grad_tensor("w"), std::vector<float>(30, static_cast<float>(ranks_)));
      write(scope.grad_tensor("b"), std::vector<float>(2, static_cast<float>(ranks_)));
    }
    scope.reduce();
  }
  backward(*modules[0], 2);
  model.finish_backward();
  expect_gradients(*modules[0], 3);
  expect_gradients(*modules[1], 1);
  EXPECT_FALSE(modules[2]->param("w").gradient().has_value());
  Sgd optimizer(model, {.lr = 1});
  optimizer.step();
  EXPECT_EQ(to_host(modules[2]->param("w").all_gather()), ramp({6, 5}));
}

TEST_F(ScheduleTest, ReductionsMayHaveACommunicatorOfTheirOwn) {
  Config own = config();
  own.separate_reduce_communicator = true;
  Model model(own);
  const auto& binding = detail::ModelState(own).bindings().front();
  EXPECT_NE(binding.reduce, binding.shard);
  EXPECT_EQ(binding.reduce->size(), ranks_);
  EXPECT_EQ(binding.reduce->rank(), binding.shard->rank());
  const std::vector<Module*> modules = add_modules(model, 2);
  for (int step = 0; step < 2; ++step) {
    model.zero_grad();
    for (Module* module : modules) run_forward(*module);
    for (std::size_t i = 2; i-- > 0;) backward(*modules[i], static_cast<float>(step + 1));
    model.finish_backward();
    for (Module* module : modules) expect_gradients(*module, static_cast<float>(step + 1));
  }
  EXPECT_EQ(detail::ModelState(config()).bindings().front().reduce,
            detail::ModelState(config()).bindings().front().shard);
}

TEST_F(ScheduleTest, OptimizersTreatGroupsOfParametersByTheirOwnOptions) {
  Config own = config();
  own.min_shard_size = 0;  // both parameters in one range
  Model model(own);
  const std::vector<Module*> modules = add_modules(model, 2);
  const auto is_bias = [](const ShardedParam& param) { return param.name() == "b"; };
  Sgd optimizer(model, {.lr = 1}, {{is_bias, {.lr = 10}}, {[](const ShardedParam&) { return true; }, {.lr = 100}}});
  backward(*modules[0]);
  optimizer.set_lr(20, 1);
  optimizer.step();
  EXPECT_EQ(to_host(modules[0]->param("b").all_gather()), std::vector<float>(2, -20));
  EXPECT_EQ(to_host(modules[0]->param("w").all_gather()), ramp({6, 5}, -100));
  EXPECT_EQ(optimizer.lr(2), 100);
  EXPECT_THROW(optimizer.set_lr(1, 3), ConfigError);
  AdamW adam(model, {.lr = 1, .weight_decay = 0.5}, {{is_bias, {.lr = 1, .weight_decay = 0}}});
  optimizer.zero_grad();
  fill(modules[1]->param("b").local_shard(),
       std::vector<float>(static_cast<std::size_t>(modules[1]->param("b").local_shard().numel()), 8));
  ShardedParam b = modules[1]->param("b");
  b.set_gradient(Tensor(ExecutionSpace(), DType::f32, b.local_shape(), "zeros"));
  adam.step();
  EXPECT_EQ(to_host(b.all_gather()), std::vector<float>(2, 8));  // no decay
  EXPECT_EQ(to_host(modules[1]->param("w").all_gather()), ramp({6, 5}, 0, 0.5f));
}

TEST_F(ScheduleTest, CheckedModelsPoisonWhatTheyDrop) {
  for (const bool reshards : {true, false})
    for (const bool checked : {false, true}) {
      Config own = config();
      own.checked = checked;
      own.reshard_after_forward = reshards;
      Model model(own);
      Module& module = *add_modules(model, 1)[0];
      Tensor view;
      {
        const Scope scope = module.unshard();
        view = scope.tensor("w");
        EXPECT_EQ(to_host(view), ramp({6, 5}));
      }
      for (const float value : to_host(view)) EXPECT_EQ(std::isnan(value), checked);
      EXPECT_EQ(to_host(module.param("w").all_gather()), ramp({6, 5}));
    }
}

TEST_F(ScheduleTest, CheckedModelsCompareTheirRanks) {
  if (ranks_ == 1) GTEST_SKIP() << "needs ranks to differ";
  Config own = config();
  own.checked = true;
  Model model(own);
  Module& module = model.add("layer", {{"w", {rank_ == ranks_ - 1 ? 8 : 6, 5}, init::ones()}});
  const std::string message = message_of<ConfigError>([&] { (void)module.forward(); });
  for (const char* part : {"\"layer\"", "\"w\"", "[6, 5]", "[8, 5]", "rank 0"})
    EXPECT_TRUE(contains(message, part)) << message;
  EXPECT_TRUE(contains(message, fmt::format("rank {}", ranks_ - 1)));
}

TEST_F(ScheduleTest, StrictOptimizersWantEveryGradient) {
  Model model(config());
  const std::vector<Module*> modules = add_modules(model, 2);
  Sgd optimizer(model, {.lr = 1});
  backward(*modules[1]);
  optimizer.set_strict(true);
  const std::string message = message_of<Error>([&] { optimizer.step(); });
  EXPECT_TRUE(contains(message, "m0.w") && contains(message, "m0.b") && !contains(message, "m1.w")) << message;
  EXPECT_EQ(to_host(modules[1]->param("w").all_gather()), ramp({6, 5}));
  backward(*modules[0]);
  optimizer.step();
  EXPECT_EQ(to_host(modules[1]->param("w").all_gather()), ramp({6, 5}, -1));
}

TEST_F(ScheduleTest, LoadingIntoAFreshOptimizerChangesNoParameter) {
  Model model(config());
  const std::vector<Module*> modules = add_modules(model, 1);
  const auto train = [&](Optimizer& optimizer) {
    optimizer.zero_grad();
    backward(*modules[0], 3);
    optimizer.step();
    return to_host(modules[0]->param("w").local_shard());
  };
  AdamW first(model, {.lr = 0.1});
  const std::vector<float> before = train(first);
  AdamW second(model, {.lr = 0.1});
  for (const auto& [name, tensor] : second.state())
    kernels::copy(ExecutionSpace(), tensor.local(), first.state().at(name).local());
  EXPECT_EQ(to_host(modules[0]->param("w").local_shard()), before);
  const std::vector<float> continued = train(second);
  modules[0]->param("w").update_local_shard(make_tensor(modules[0]->param("w").local_shape(), before));
  EXPECT_EQ(train(first), continued);
}

}  // namespace
}  // namespace fsdp2::test
