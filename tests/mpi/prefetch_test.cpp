// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fsdp2/error.hpp"
#include "fsdp2/model.hpp"
#include "support/fsdp.hpp"

namespace fsdp2::test {
namespace {

using Events = std::vector<std::string>;

/// Three modules a, b, c with one sharded parameter each.
class PrefetchTest : public OnMesh {
 protected:
  Model model(BackwardPrefetch prefetch, bool limits = true, bool reshards = true) const {
    Model result(
        {.mesh = mesh_, .reshard_after_forward = reshards, .backward_prefetch = prefetch, .limit_all_gathers = limits});
    for (const char* name : {"a", "b", "c"}) result.add(name, {{"w", {40, 50}, ramp_tensor({40, 50})}});
    return result;
  }
  static void forward(Model& model) {
    for (Module* module : model.modules()) run_forward(*module);
  }
  static void backward(Module& module) {
    BackwardScope scope = module.backward();
    EXPECT_EQ(to_host(scope.tensor("w")), ramp({40, 50}));
    scope.reduce();
  }
  static void backward(Model& model) {
    for (const char* name : {"c", "b", "a"}) backward(model.module(name));
  }
};

TEST_F(PrefetchTest, NoneGathersEachModuleWhenItsBackwardBegins) {
  Model model = this->model(BackwardPrefetch::none);
  Trace trace(model);
  forward(model);
  const Events in_forward = {"gather_issued a", "gather_completed a", "resharded a",
                             "gather_issued b", "gather_completed b", "resharded b",
                             "gather_issued c", "gather_completed c", "resharded c"};
  EXPECT_EQ(trace.take(), in_forward);
  backward(model);
  model.finish_backward();
  const Events in_backward = {
      "gather_issued c",   "gather_completed c", "resharded c", "reduce_issued c",                        //
      "gather_issued b",   "gather_completed b", "resharded b", "reduce_completed c", "reduce_issued b",  //
      "gather_issued a",   "gather_completed a", "resharded a", "reduce_completed b", "reduce_issued a",  //
      "reduce_completed a"};
  EXPECT_EQ(trace.take(), in_backward);
}

TEST_F(PrefetchTest, PreGathersTheNextModuleBeforeTheReduction) {
  Model model = this->model(BackwardPrefetch::pre);
  Trace trace(model);
  for (int step = 0; step < 2; ++step) {
    forward(model);
    trace.take();
    backward(model);
    model.finish_backward();
    const Events expected = {
        "gather_issued c",    "gather_completed c", "prefetch_issued b",  "resharded c",        "reduce_issued c",  //
        "gather_completed b", "prefetch_issued a",  "resharded b",        "reduce_completed c", "reduce_issued b",  //
        "gather_completed a", "resharded a",        "reduce_completed b", "reduce_issued a",                        //
        "reduce_completed a"};
    EXPECT_EQ(trace.take(), expected);
  }
}

TEST_F(PrefetchTest, PostGathersTheNextModuleAfterTheReductionHasStarted) {
  Model model = this->model(BackwardPrefetch::post);
  Trace trace(model);
  forward(model);
  trace.take();
  backward(model);
  model.finish_backward();
  const Events expected = {"gather_issued c",    "gather_completed c", "resharded c",        "reduce_issued c",
                           "prefetch_issued b",  //
                           "gather_completed b", "resharded b",        "reduce_completed c", "reduce_issued b",
                           "prefetch_issued a",  //
                           "gather_completed a", "resharded a",        "reduce_completed b", "reduce_issued a",
                           "reduce_completed a"};
  EXPECT_EQ(trace.take(), expected);
  EXPECT_EQ(model.memory_stats().peak_unsharded_bytes % 2, 0);
}

TEST_F(PrefetchTest, PostNeedsOneSlotLessThanPre) {
  const auto peak = [&](BackwardPrefetch prefetch) {
    Model model({.mesh = mesh_, .backward_prefetch = prefetch, .direct_bytes = 0});
    for (const char* name : {"a", "b", "c"})
      model.add(name, {{"w", {40 * ranks_, 50}, ramp_tensor({40 * ranks_, 50})}});
    for (Module* module : model.modules()) run_forward(*module);
    for (const char* name : {"c", "b", "a"}) {
      BackwardScope scope = model.module(name).backward();
      scope.reduce();
    }
    model.finish_backward();
    return model.memory_stats().peak_unsharded_bytes;
  };
  const std::int64_t slot = 40 * ranks_ * 50 * 4;
  EXPECT_EQ(peak(BackwardPrefetch::none), slot);
  EXPECT_EQ(peak(BackwardPrefetch::post), slot);
  EXPECT_EQ(peak(BackwardPrefetch::pre), 2 * slot);
}

TEST_F(PrefetchTest, TheOrderIsTheOneOfThisForward) {
  Model model = this->model(BackwardPrefetch::pre);
  Trace trace(model);
  for (const char* name : {"b", "a", "c"}) run_forward(model.module(name));
  trace.take();
  BackwardScope scope = model.module("c").backward();
  const Events expected = {"gather_issued c", "gather_completed c", "prefetch_issued a"};
  EXPECT_EQ(trace.take(), expected);
  scope.reduce();
  backward(model.module("a"));
  backward(model.module("b"));
  model.finish_backward();
}

TEST_F(PrefetchTest, ABackwardOutOfOrderPrefetchesWhatRanBeforeIt) {
  Model model = this->model(BackwardPrefetch::pre);
  forward(model);
  Trace trace(model);
  backward(model.module("b"));
  EXPECT_EQ(trace.take()[2], "prefetch_issued a");
  backward(model.module("a"));
  trace.take();
  backward(model.module("c"));  // nobody is left before it
  EXPECT_EQ(trace.take()[2], "resharded c");
  model.finish_backward();
}

TEST_F(PrefetchTest, AModuleUsedTwiceIsPrefetchedTwice) {
  Model model = this->model(BackwardPrefetch::pre);
  Trace trace(model);
  for (const char* name : {"a", "b", "a", "c"}) run_forward(model.module(name));
  trace.take();
  for (const char* name : {"c", "a", "b", "a"}) backward(model.module(name));
  Events prefetches;
  for (const std::string& event : trace.take())
    if (event.starts_with("prefetch")) prefetches.push_back(event);
  const Events expected = {"prefetch_issued a", "prefetch_issued b", "prefetch_issued a"};
  EXPECT_EQ(prefetches, expected);
  model.finish_backward();
}

TEST_F(PrefetchTest, EvaluationAndUnshardAreNotRecorded) {
  Model model = this->model(BackwardPrefetch::pre);
  Trace trace(model);
  run_forward(model.module("a"));
  model.module("b").eval();
  run_forward(model.module("b"));
  model.module("b").train();
  { const Scope scope = model.module("b").unshard(); }
  run_forward(model.module("c"));
  trace.take();
  backward(model.module("c"));
  EXPECT_EQ(trace.take()[2], "prefetch_issued a");
  backward(model.module("a"));
  model.finish_backward();
}

TEST_F(PrefetchTest, WithAccumulationEveryBackwardFollowsItsOwnForward) {
  Model model = this->model(BackwardPrefetch::pre);
  Trace trace(model);
  for (int micro = 0; micro < 2; ++micro) {
    forward(model);
    trace.take();
    backward(model);
    int prefetches = 0;
    for (const std::string& event : trace.take()) prefetches += event.starts_with("prefetch") ? 1 : 0;
    EXPECT_EQ(prefetches, 2);
  }
  model.finish_backward();
  EXPECT_EQ(model.memory_stats().unsharded_bytes, 0);
}

TEST_F(PrefetchTest, KeptParametersNeedNoPrefetch) {
  Model model = this->model(BackwardPrefetch::pre, true, false);
  forward(model);
  Trace trace(model);
  backward(model);
  model.finish_backward();
  const Events expected = {"resharded c",        "reduce_issued c", "resharded b",
                           "reduce_completed c", "reduce_issued b", "resharded a",
                           "reduce_completed b", "reduce_issued a", "reduce_completed a"};
  EXPECT_EQ(trace.take(), expected);
}

TEST_F(PrefetchTest, AGatherThatIsNotUsedIsDrained) {
  Model model = this->model(BackwardPrefetch::pre);
  forward(model);
  Trace trace(model);
  backward(model.module("c"));
  EXPECT_GT(model.memory_stats().unsharded_bytes, 0);
  trace.take();
  model.finish_backward();
  const Events expected = {"reduce_completed c", "gather_completed b", "resharded b"};
  EXPECT_EQ(trace.take(), expected);
  EXPECT_EQ(model.memory_stats().unsharded_bytes, 0);
  forward(model);  // and the recorded order is gone
  trace.take();
  backward(model);
  int prefetches = 0;
  for (const std::string& event : trace.take()) prefetches += event.starts_with("prefetch") ? 1 : 0;
  EXPECT_EQ(prefetches, 2);
  model.finish_backward();
}

TEST_F(PrefetchTest, AChangeOfTheShardsReachesAPrefetchedModule) {
  Model model = this->model(BackwardPrefetch::pre);
  forward(model);
  backward(model.module("c"));
  ShardedParam param = model.module("b").param("w");
  param.update_local_shard(ramp_tensor(param.local_shape(), 5, 0));
  {
    BackwardScope scope = model.module("b").backward();
    EXPECT_EQ(to_host(scope.tensor("w")), ramp({40, 50}, 5, 0));
    scope.reduce();
  }
  model.finish_backward();
}

TEST_F(PrefetchTest, LimitAllGathersBoundsGathersAheadOfTheirUse) {
  for (const bool limits : {true, false}) {
    Model model = this->model(BackwardPrefetch::pre, limits);
    forward(model);
    Trace trace(model);
    const Scope ahead = model.module("a").unshard_async();
    EXPECT_EQ(trace.take(), Events{"gather_issued a"});
    BackwardScope scope = model.module("c").backward();
    Events expected = {"gather_issued c", "gather_completed c"};  // an explicit scope always gathers
    if (!limits) expected.push_back("prefetch_issued b");
    EXPECT_EQ(trace.take(), expected);
    EXPECT_EQ(to_host(ahead.tensor("w")), ramp({40, 50}));  // used: it no longer counts
    scope.reduce();
    trace.take();
    BackwardScope next = model.module("b").backward();
    expected = limits ? Events{"gather_issued b", "gather_completed b"} : Events{"gather_completed b"};
    EXPECT_EQ(trace.take(), expected);
    next.reduce();
    model.finish_backward();
  }
}

TEST_F(PrefetchTest, ReplicatedGradientsAreReducedInOneBucket) {
  Model model({.mesh = mesh_});
  for (const char* name : {"a", "b"}) model.add(name, {{"bias", {7}, init::ones()}});
  Trace trace(model);
  for (const char* name : {"b", "a"}) {
    BackwardScope scope = model.module(name).backward();
    write(scope.grad_tensor("bias"), ramp({7}));
    scope.reduce();
  }
  EXPECT_EQ(trace.take(), Events{});
  model.finish_backward();
  EXPECT_EQ(trace.take(), Events{"bucket_reduced"});
  model.finish_backward();
  EXPECT_EQ(trace.take(), Events{});
}

}  // namespace
}  // namespace fsdp2::test
