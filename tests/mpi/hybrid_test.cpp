// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// Replicas of shards: hybrid sharding, partial sums, and keeping replicas equal.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fsdp2/error.hpp"
#include "fsdp2/gradients.hpp"
#include "fsdp2/model.hpp"
#include "fsdp2/optimizer.hpp"
#include "support/fsdp.hpp"

namespace fsdp2::test {
namespace {

class HybridTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    ranks_ = size;
  }

  /// Calls body(mesh, replicas, shards) for every factorisation of the world.
  template <class Body>
  void for_each_mesh(Body&& body) const {
    for (std::int64_t replicas = 1; replicas <= ranks_; ++replicas) {
      if (ranks_ % replicas != 0) continue;
      DeviceMesh mesh(MPI_COMM_WORLD, {{"replicate", replicas}, {"dp", ranks_ / replicas}});
      body(mesh, replicas, ranks_ / replicas);
      mesh.close();
    }
  }
  static Config config(const DeviceMesh& mesh) {
    return {.mesh = mesh, .replicate_dim_name = "replicate", .min_shard_size = 4, .direct_bytes = 400};
  }
  static std::vector<ParamSpec> specs() {
    return {{"packed", {5, 3}, ramp_tensor({5, 3})},
            {"direct", {40, 9}, ramp_tensor({40, 9})},
            {"small", {3}, ramp_tensor({3})}};
  }
  /// slope · (rank + 1) at index 1, and so on; whole numbers.
  static void run_backward(Module& module, std::int64_t rank, float slope) {
    BackwardScope scope = module.backward();
    for (const ShardedParam& param : module.params()) {
      const LentTensor lent = scope.grad_tensor(param.name());
      write(lent, ramp(param.full_shape(), 0, slope * static_cast<float>(rank + 1)));
    }
    scope.reduce();
  }
  /// The sum over ranks, divided.
  std::vector<float> expected(const ShardedParam& param, const DeviceMesh& mesh, float slope, double factor) const {
    std::vector<float> full = ramp(param.full_shape(), 0, slope * static_cast<float>(ranks_ * (ranks_ + 1) / 2));
    for (float& value : full) value = value / static_cast<float>(factor);
    return part_of(full, param, mesh.spec().axes()[1].size, mesh.coordinate()[1]);
  }

  std::int64_t ranks_ = 1;
};

TEST_F(HybridTest, EveryFactorisationGivesTheSerialMean) {
  for (const std::optional<double> factor :
       {std::optional<double>(), std::optional<double>(1), std::optional<double>(8)})
    for_each_mesh([&](const DeviceMesh& mesh, std::int64_t, std::int64_t shards) {
      Config own = config(mesh);
      own.gradient_divide_factor = factor;
      Model model(own);
      Module& module = model.add("m", specs());
      EXPECT_EQ(mesh.axis_roles(), (std::vector<AxisRole>{AxisRole::replicate, AxisRole::shard}));
      for (int pass = 0; pass < 2; ++pass) run_backward(module, mesh.rank(), 2);
      model.finish_backward();
      for (const ShardedParam& param : module.params()) {
        std::vector<float> twice = expected(param, mesh, 2, factor.value_or(static_cast<double>(ranks_)));
        for (float& value : twice) value *= 2;
        EXPECT_EQ(to_host(param.gradient()->local()), twice) << param.name() << " on " << mesh.spec().to_string();
        if (!param.is_sharded()) continue;
        EXPECT_EQ(param.local_shape()[0], chunk(param.full_shape()[0], shards, mesh.coordinate()[1]).size());
      }
      const ShardedParam direct = module.param("direct");
      EXPECT_EQ(to_host(module.param("direct").reduce_scatter_gradient(
                    ramp_tensor({40, 9}, 0, static_cast<float>(2 * (mesh.rank() + 1))))),
                expected(direct, mesh, 2, factor.value_or(static_cast<double>(ranks_))));
      model.verify_replicas();
    });
}

TEST_F(HybridTest, PartialSumsWaitForTheAllReduce) {
  for_each_mesh([&](const DeviceMesh& mesh, std::int64_t replicas, std::int64_t) {
    Model model(config(mesh));
    Module& module = model.add("m", specs());
    Trace trace(model);
    model.set_requires_all_reduce(false);
    run_backward(module, mesh.rank(), 1);
    run_backward(module, mesh.rank(), 2);
    EXPECT_TRUE(contains(message_of<Error>([&] { model.finish_backward(); }), "set_requires_all_reduce(true)"));
    EXPECT_GT(model.memory_stats().partial_bytes, 0);
    EXPECT_FALSE(module.param("direct").gradient().has_value());
    model.set_requires_all_reduce(true);
    run_backward(module, mesh.rank(), 4);
    model.finish_backward();
    for (const ShardedParam& param : module.params())
      EXPECT_EQ(to_host(param.gradient()->local()), expected(param, mesh, 7, static_cast<double>(ranks_)))
          << param.name();
    const std::vector<std::string> events = trace.take();
    EXPECT_EQ(std::count(events.begin(), events.end(), "all_reduced m"), replicas > 1 ? 1 : 0);
    EXPECT_EQ(std::count(events.begin(), events.end(), "reduce_completed m"), 3);
  });
}

TEST_F(HybridTest, ReplicasThatDifferAreFoundAndMadeEqual) {
  for_each_mesh([&](const DeviceMesh& mesh, std::int64_t replicas, std::int64_t shards) {
    Model model(config(mesh));
    Module& module = model.add("m", specs());
    model.verify_replicas();
    ShardedParam direct = module.param("direct");
    ShardedParam small = module.param("small");
    if (mesh.rank() == ranks_ - 1) {
      direct.update_local_shard(make_tensor(
          direct.local_shape(), std::vector<float>(static_cast<std::size_t>(numel(direct.local_shape())), 7)));
      small.update_local_shard(make_tensor({3}, {7, 8, 9}));
    }
    if (replicas == 1 && shards == 1) return model.verify_replicas();
    const std::string message = message_of<Error>([&] { model.verify_replicas(); });
    EXPECT_EQ(contains(message, "\"m.direct\""), replicas > 1) << message;
    EXPECT_TRUE(contains(message, "\"m.small\"")) << message;
    EXPECT_TRUE(contains(message, "broadcast_from"));
    EXPECT_FALSE(contains(message, "m.packed"));
    model.broadcast_from(0);
    model.verify_replicas();
    EXPECT_EQ(to_host(small.local_shard()), ramp({3}));
    const bool is_restored = replicas > 1 || mesh.rank() != ranks_ - 1;
    EXPECT_EQ(to_host(direct.local_shard()) == part_of(ramp({40, 9}), direct, shards, mesh.coordinate()[1]),
              is_restored);
    EXPECT_TRUE(contains(message_of<ConfigError>([&] { model.broadcast_from(99); }), "99"));
  });
}

TEST_F(HybridTest, NormsCountEveryElementOnce) {
  std::vector<double> norms;
  for_each_mesh([&](const DeviceMesh& mesh, std::int64_t, std::int64_t) {
    Model model(config(mesh));
    Module& module = model.add("m", specs());
    run_backward(module, mesh.rank(), 2);
    norms.push_back(clip_grad_norm(model, 1e9));
  });
  double square = 0;
  for (const Shape& shape : {Shape{5, 3}, Shape{40, 9}, Shape{3}})
    for (const float value : ramp(shape, 0, static_cast<float>(ranks_ + 1)))
      square += static_cast<double>(value) * value;
  for (const double norm : norms) EXPECT_DOUBLE_EQ(norm, std::sqrt(square));
}

}  // namespace
}  // namespace fsdp2::test
