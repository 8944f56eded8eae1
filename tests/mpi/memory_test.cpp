// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// The memory contract: what is allocated, seen from outside, is what plan_memory says. A binary of its own, for it
// replaces operator new and watches all of Kokkos' allocations.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "fsdp2/model.hpp"
#include "fsdp2/optimizer.hpp"
#include "support/fsdp.hpp"

namespace {

constexpr std::size_t large = 16384;
std::atomic<std::size_t> large_news{0};

void* allocate(std::size_t size) {
  if (size >= large) ++large_news;
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}

}  // namespace

#if defined(__CUDACC__)
#pragma nv_diag_suppress 20011  // nvcc takes them for functions of the device, too
#endif
void* operator new(std::size_t size) {
  return allocate(size);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace fsdp2::test {
namespace {

/// Bytes of Views by what their labels say, and the most there were of each, and of all.
struct Watch {
  std::map<std::string, std::int64_t> now;
  std::map<std::string, std::int64_t> peak;
  std::int64_t total = 0;
  std::int64_t total_peak = 0;
  std::int64_t allocations = 0;
};
Watch* watch = nullptr;

bool is_watched(const std::string& label) {
  return label.starts_with("fsdp2::") && !label.ends_with("optimizer_state") && label != "fsdp2::optimizer_step" &&
         label != "fsdp2::adamw_scalars" && label != "fsdp2::test";
}

void on_allocate(Kokkos::Tools::SpaceHandle, const char* name, const void*, std::uint64_t bytes) {
  const std::string label = name;
  if (watch == nullptr || !is_watched(label)) return;
  const auto size = static_cast<std::int64_t>(bytes);
  watch->peak[label] = std::max(watch->peak[label], watch->now[label] += size);
  watch->total_peak = std::max(watch->total_peak, watch->total += size);
  ++watch->allocations;
}

void on_free(Kokkos::Tools::SpaceHandle, const char* name, const void* memory, std::uint64_t bytes) {
  const std::string label = name;
  if (watch == nullptr || !is_watched(label)) return;
  watch->now[label] -= static_cast<std::int64_t>(bytes);
  watch->total -= static_cast<std::int64_t>(bytes);
  // Who reads freed memory finds NaN.
  if constexpr (Kokkos::SpaceAccessibility<Kokkos::HostSpace, MemorySpace>::accessible)
    std::memset(const_cast<void*>(memory), 0xff, bytes);
}

/// What the labels say about each class of the plan.
MemoryPlan measured(const std::map<std::string, std::int64_t>& bytes) {
  const auto of = [&](const char* label) {
    const auto found = bytes.find(label);
    return found == bytes.end() ? 0 : found->second;
  };
  MemoryPlan plan;
  plan.shards = of("fsdp2::shards") + of("fsdp2::offloaded_shards");
  plan.gradients = of("fsdp2::gradients") + of("fsdp2::offloaded_gradients");
  plan.unsharded = of("fsdp2::gather_slot") + of("fsdp2::unsharded") + of("fsdp2::unsharded_slice");
  plan.gather_packs = of("fsdp2::gather_pack");
  plan.reduce_slots = of("fsdp2::reduce_slot");
  plan.reduce_packs = of("fsdp2::reduce_pack");
  plan.replicated_gradients = of("fsdp2::replicated_gradients");
  plan.partials = of("fsdp2::partial_gradients");
  plan.communication = of("fsdp2::communicator_scratch");
  plan.tables = of("fsdp2::segments");
  return plan;
}

std::string describe(const MemoryPlan& plan) {
  return fmt::format(
      "shards {}, gradients {}, unsharded {}, gather packs {}, reduce slots {}, reduce packs {}, bucket {}, partials "
      "{}, "
      "communication {}, tables {}",
      plan.shards, plan.gradients, plan.unsharded, plan.gather_packs, plan.reduce_slots, plan.reduce_packs,
      plan.replicated_gradients, plan.partials, plan.communication, plan.tables);
}

class MemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    ranks_ = size;
    Kokkos::Tools::Experimental::set_allocate_data_callback(on_allocate);
    Kokkos::Tools::Experimental::set_deallocate_data_callback(on_free);
    watch = &watch_;
  }
  void TearDown() override {
    watch = nullptr;
    Kokkos::Tools::Experimental::set_allocate_data_callback(nullptr);
    Kokkos::Tools::Experimental::set_deallocate_data_callback(nullptr);
  }

  /// A layer whose size depends on its index: direct, packed and replicated parameters, some frozen.
  static std::vector<ParamSpec> specs(int layer) {
    const std::int64_t width = 20 + 7 * (layer % 4);
    return {{"w", {width, 30}, init::uniform(-1, 1, 3)},
            {"v", {width / 2, 5}, init::uniform(-1, 1, 4)},
            {"frozen", {9, 5}, init::ones(), false},
            {"b", {width % 5 + 1}, init::zeros()}};
  }

  static void forward(Model& model) {
    for (Module* module : model.modules()) run_forward(*module);
  }
  static void backward(Model& model) {
    const std::vector<Module*> modules = model.modules();
    for (auto module = modules.rbegin(); module != modules.rend(); ++module) {
      BackwardScope scope = (*module)->backward();
      for (const ShardedParam& param : (*module)->params())
        if (param.requires_grad()) {
          const LentTensor lent = scope.grad_tensor(param.name());
          if (lent.beta == 0) kernels::zero(ExecutionSpace(), lent.tensor.buffer());
        }
      scope.reduce();
    }
  }

  /// Trains by the canonical schedule, and compares.
  void check(Config config, const DeviceMesh& mesh, int depth, const std::string& what) {
    config.mesh = mesh;
    config.min_shard_size = 20;
    config.direct_bytes = 1500;
    watch_ = {};
    const std::size_t news = large_news;
    {
      Model model(config);
      for (int layer = 0; layer < depth; ++layer) model.add(fmt::format("m{}", layer), specs(layer));
      AdamW optimizer(model, {});
      const MemoryPlan plan = model.plan_memory();
      for (int step = 0; step < 4; ++step) {
        if (step == 2) watch_.allocations = 0;
        optimizer.zero_grad();
        forward(model);
        backward(model);
        optimizer.step();
      }
      EXPECT_EQ(watch_.allocations, 0) << what << ": the steady state allocates";
      const MemoryPlan found = measured(watch_.peak);
      EXPECT_TRUE(found == plan) << what << "\nplanned:  " << describe(plan) << "\nmeasured: " << describe(found);
      EXPECT_EQ(watch_.total_peak, plan.total()) << what;
      MemoryPlan own = model.peak_memory();
      EXPECT_EQ(own.communication, 0);
      own.communication = plan.communication;
      EXPECT_TRUE(own == plan) << what << "\nplanned:  " << describe(plan) << "\ncounted:  " << describe(own);
      for (const ShardedParam& param : model.modules().front()->params())
        for (const float value : to_host(param.local_shard())) EXPECT_FALSE(std::isnan(value)) << what;
    }
    EXPECT_EQ(large_news, news) << what << ": memory outside the plan";
    std::int64_t left = watch_.total;
    left -= watch_.now["fsdp2::communicator_scratch"];  // the mesh's
    EXPECT_EQ(left, 0) << what << ": not returned";
  }

  Watch watch_;
  std::int64_t ranks_ = 1;
};

TEST_F(MemoryTest, ThePlanIsWhatTheCanonicalScheduleTakes) {
  struct Case {
    std::string name;
    Config config;
  };
  std::vector<Case> cases;
  for (const bool limits : {true, false})
    for (const bool forward_prefetch : {false, true})
      for (const BackwardPrefetch prefetch : {BackwardPrefetch::none, BackwardPrefetch::pre, BackwardPrefetch::post})
        cases.push_back(
            {fmt::format("limit {} forward {} backward {}", limits, forward_prefetch, static_cast<int>(prefetch)),
             {.backward_prefetch = prefetch, .forward_prefetch = forward_prefetch, .limit_all_gathers = limits}});
  cases.push_back({"no reshard", {.reshard_after_forward = false}});
  for (std::int64_t n = 1; n <= ranks_; ++n)
    if (ranks_ % n == 0) cases.push_back({fmt::format("slices {}", n), {.reshard_after_forward = n}});
  cases.push_back({"offload", {.offload_to_cpu = true}});
  cases.push_back({"bf16", {.mp_policy = MixedPrecisionPolicy::bf16()}});
  cases.push_back(
      {"bf16 gradients",
       {.mp_policy = {.param_dtype = DType::bf16, .reduce_dtype = DType::bf16, .keep_low_precision_grads = true}}});
  cases.push_back({"buckets", {.max_bucket_bytes = 500}});
  cases.push_back({"separate", {.forward_prefetch = true, .separate_reduce_communicator = true}});
  for (const Case& each : cases)
    for (int depth = 1; depth <= 12; ++depth) {
      DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", ranks_}});  // its receive buffers are new
      check(each.config, mesh, depth, fmt::format("{}, depth {}", each.name, depth));
      mesh.close();
    }
}

TEST_F(MemoryTest, ThePlanKnowsReplicas) {
  for (std::int64_t replicas = 1; replicas <= ranks_; ++replicas) {
    if (ranks_ % replicas != 0) continue;
    DeviceMesh mesh(MPI_COMM_WORLD, {{"replicate", replicas}, {"dp", ranks_ / replicas}});
    check({.replicate_dim_name = "replicate"}, mesh, 3, mesh.spec().to_string());
    mesh.close();
  }
}

/// Orders, skipped and repeated modules, accumulation: whatever it is, it takes no more.
TEST_F(MemoryTest, OtherSchedulesTakeNoMore) {
  std::uint32_t state = 7;
  const auto random = [&](std::uint32_t below) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % below;
  };
  for (int round = 0; round < 40; ++round) {
    DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", ranks_}});
    watch_ = {};
    {
      Config config{.mesh = mesh, .reshard_after_forward = random(3) > 0, .min_shard_size = 20};
      config.backward_prefetch = static_cast<BackwardPrefetch>(random(3));
      config.forward_prefetch = random(2) == 0;
      config.direct_bytes = 1500;
      Model model(config);
      for (int layer = 0; layer < 5; ++layer) model.add(fmt::format("m{}", layer), specs(layer));
      const std::vector<Module*> modules = model.modules();
      const MemoryPlan plan = model.plan_memory();
      for (int step = 0; step < 4; ++step) {
        std::vector<std::size_t> order;
        for (int i = 0; i < 7; ++i) order.push_back(random(5));
        for (const std::size_t i : order) run_forward(*modules[i]);
        for (auto i = order.rbegin(); i != order.rend(); ++i) {
          BackwardScope scope = modules[*i]->backward();
          scope.reduce();
        }
        model.finish_backward();
        model.zero_grad();
      }
      const MemoryPlan found = measured(watch_.peak);
      for (const auto use :
           {&MemoryPlan::shards, &MemoryPlan::gradients, &MemoryPlan::unsharded, &MemoryPlan::gather_packs,
            &MemoryPlan::reduce_slots, &MemoryPlan::reduce_packs, &MemoryPlan::communication,
            &MemoryPlan::replicated_gradients, &MemoryPlan::partials, &MemoryPlan::tables})
        EXPECT_LE(found.*use, plan.*use) << "planned:  " << describe(plan) << "\nmeasured: " << describe(found);
    }
    mesh.close();
  }
}

}  // namespace
}  // namespace fsdp2::test
