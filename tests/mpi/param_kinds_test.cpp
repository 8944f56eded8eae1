// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// Parameters of every kind in one group: dtypes, placements, tied, ignored, frozen, on meshes of their own.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "fsdp2/error.hpp"
#include "fsdp2/gradients.hpp"
#include "fsdp2/model.hpp"
#include "fsdp2/optimizer.hpp"
#include "fsdp2/state_dict.hpp"
#include "module_access.hpp"
#include "support/fsdp.hpp"

namespace fsdp2::test {
namespace {

template <class T>
Tensor tensor_of(const Shape& shape, const std::vector<T>& values) {
  const Tensor tensor = Tensor::uninitialized(dtype_of<T>, shape, "fsdp2::test");
  fill(tensor, values);
  return tensor;
}

/// The bits of global linear indices, shifted by `start`.
template <class T>
std::vector<T> indices(const Shape& shape, int start = 0) {
  std::vector<T> values(static_cast<std::size_t>(numel(shape)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto bits = static_cast<std::uint64_t>(i) + static_cast<std::uint64_t>(start);
    std::memcpy(&values[i], &bits, sizeof(T));
  }
  return values;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// The part of row-major values that a box holds.
template <class T>
std::vector<T> box_of(const std::vector<T>& values, const Shape& shape, const Box& box) {
  std::vector<T> part(static_cast<std::size_t>(box.numel()));
  for (RunCursor cursor = runs_of(shape, box); !cursor.is_done() && !part.empty(); cursor.next())
    std::copy_n(values.begin() + cursor.run().from, cursor.run().count, part.begin() + cursor.run().to);
  return part;
}

class ParamKindsTest : public OnMesh {
 protected:
  /// What every rank adds to gradients, so that the mean over ranks is 1.
  float weight() const { return static_cast<float>(2 * (rank_ + 1)) / static_cast<float>(ranks_ + 1); }

  /// A backward in which the gradient of `name` is `slope` times rank_ + 1; the serial mean is slope · (ranks + 1) / 2.
  void run_backward(Module& module, const std::vector<std::string>& names) const {
    BackwardScope scope = module.backward();
    for (const std::string& name : names) {
      const LentTensor lent = scope.grad_tensor(name);
      write(lent, ramp(lent.tensor.shape(), 0, static_cast<float>(2 * (rank_ + 1))));
    }
    scope.reduce();
  }
  std::vector<float> mean_gradient(const Shape& shape) const { return ramp(shape, 0, static_cast<float>(ranks_ + 1)); }

  static std::vector<float> local(const ShardedParam& param, const std::vector<float>& global) {
    return box_of(global, param.dtensor().spec().shape, param.dtensor().box());
  }
};

TEST_F(ParamKindsTest, EveryDtypeIsGatheredBitByBit) {
  for (const std::int64_t direct_bytes : {0, 1 << 20}) {
    Model model({.mesh = mesh_, .min_shard_size = 0, .direct_bytes = direct_bytes});
    std::vector<ParamSpec> specs;
    const Shape shape{7, 3};
    for (const DType dtype : all_dtypes) {
      const Tensor full = Tensor::uninitialized(dtype, shape, "fsdp2::test");
      std::vector<std::uint8_t> bytes(static_cast<std::size_t>(full.bytes()));
      for (std::size_t i = 0; i < bytes.size(); ++i)
        bytes[i] = static_cast<std::uint8_t>(dtype == DType::boolean ? i % 2 : i * 37 + specs.size());
      fill(full.as(DType::u8, {full.bytes()}), bytes);
      specs.push_back({std::string(to_string(dtype)), shape, full});
    }
    Module& module = model.add("m", specs);
    for (int round = 0; round < 2; ++round) {
      const Scope scope = module.forward();
      for (const ParamSpec& spec : specs) {
        const Tensor& full = std::get<Tensor>(spec.value);
        const Tensor gathered = scope.tensor(spec.name);
        EXPECT_EQ(gathered.dtype(), full.dtype());
        EXPECT_EQ(to_host<std::uint8_t>(gathered.as(DType::u8, {gathered.bytes()})),
                  to_host<std::uint8_t>(full.as(DType::u8, {full.bytes()})))
            << spec.name;
      }
    }
    for (const ShardedParam& param : module.params())
      EXPECT_EQ(param.requires_grad(), is_castable(param.dtype())) << param.name();
    EXPECT_THROW(module.param("u8").set_requires_grad(true), ConfigError);
  }
}

TEST_F(ParamKindsTest, DtypesOfOneGroupTrainSideBySide) {
  for (const std::int64_t direct_bytes : {0, 1 << 20}) {
    Model model({.mesh = mesh_, .min_shard_size = 4, .direct_bytes = direct_bytes});
    const Shape shape{5, 3};
    Module& module = model.add("m", {{"a", shape, tensor_of(shape, indices<float>(shape))},
                                     {"q", shape, tensor_of(shape, indices<std::uint8_t>(shape))},
                                     {"b", shape, tensor_of(shape, std::vector<double>(15, 3.0))},
                                     {"c", shape, tensor_of(shape, std::vector<bfloat16>(15, bfloat16(2.0f)))},
                                     {"d", {3}, tensor_of({3}, std::vector<double>(3, 5.0))}});
    Sgd optimizer(model, {.lr = 1});
    {
      BackwardScope scope = module.backward();
      write(scope.grad_tensor("a"), std::vector<float>(15, weight()));
      fill(scope.grad_tensor("b").tensor, std::vector<double>(15, static_cast<double>(rank_)));
      fill(scope.grad_tensor("c").tensor, std::vector<bfloat16>(15, bfloat16(1.0f)));
      fill(scope.grad_tensor("d").tensor, std::vector<double>(3, 1.0));
      scope.reduce();
    }
    optimizer.step();
    const Scope scope = module.unshard();
    EXPECT_EQ(to_host<double>(scope.tensor("b")), std::vector<double>(15, 3.0 - static_cast<double>(ranks_ - 1) / 2));
    EXPECT_TRUE(same_bits(to_host<bfloat16>(scope.tensor("c")), std::vector<bfloat16>(15, bfloat16(1.0f))));
    EXPECT_EQ(to_host<double>(scope.tensor("d")), std::vector<double>(3, 4.0));
    EXPECT_EQ(to_host<std::uint8_t>(scope.tensor("q")), indices<std::uint8_t>(shape));
  }
}

/// Placements on FSDP's axis, and what they make of a shape.
TEST_F(ParamKindsTest, AnyDimensionMayBeCutUnevenly) {
  for (const Shape& shape : {Shape{5, 7, 3}, Shape{2, 11, 4}, Shape{3, 1, 2}, Shape{4, 0, 3}}) {
    for (std::int64_t dim = 0; dim < 3; ++dim) {
      Model model({.mesh = mesh_});
      Module& module = model.add("m", {{"w", shape, ramp_tensor(shape), true, DType::f32, {{"dp", Shard{dim}}}},
                                       {"x", {3}, ramp_tensor({3})}});
      ShardedParam w = module.param("w");
      EXPECT_TRUE(w.is_sharded());
      EXPECT_EQ(w.local_shape()[static_cast<std::size_t>(dim)],
                chunk(shape[static_cast<std::size_t>(dim)], ranks_, rank_).size());
      EXPECT_EQ(to_host(w.local_shard()), local(w, ramp(shape)));
      {
        const Scope scope = module.forward();
        EXPECT_EQ(to_host(scope.tensor("w")), ramp(shape));
      }
      run_backward(module, {"w", "x"});
      model.finish_backward();
      EXPECT_EQ(to_host(w.gradient()->local()), local(w, mean_gradient(shape)));
      EXPECT_EQ(to_host(w.reduce_scatter_gradient(ramp_tensor(shape, 0, static_cast<float>(2 * (rank_ + 1))))),
                local(w, mean_gradient(shape)));
    }
  }
}

TEST_F(ParamKindsTest, RaggedPlacementsCutWhereTheyAreTold) {
  const Shape shape{3, 4 * ranks_ + 2, 2};
  for (std::int64_t dim = 0; dim < 2; ++dim) {
    const std::int64_t extent = shape[static_cast<std::size_t>(dim)];
    std::vector<std::int64_t> bounds(static_cast<std::size_t>(ranks_) + 1, 0);
    for (std::int64_t r = 1; r < ranks_; ++r)  // the first rank has nothing, the last one most
      bounds[static_cast<std::size_t>(r)] = std::min<std::int64_t>(extent, r - 1);
    bounds.back() = extent;
    Model model({.mesh = mesh_, .direct_bytes = 0});
    Module& module =
        model.add("m", {{"w", shape, ramp_tensor(shape), true, DType::f32, {{"dp", Ragged{dim, bounds}}}}});
    ShardedParam w = module.param("w");
    EXPECT_EQ(to_host(w.local_shard()), local(w, ramp(shape)));
    EXPECT_EQ(to_host(w.all_gather()), ramp(shape));
    w.clear_cache();
    AdamW optimizer(model, {.lr = 0.5});
    run_backward(module, {"w"});
    model.finish_backward();
    EXPECT_EQ(to_host(w.gradient()->local()), local(w, mean_gradient(shape)));
    optimizer.step();
    const std::vector<float> updated = to_host(w.all_gather());
    EXPECT_EQ(updated[0], 0.0f);  // a gradient of zero
    EXPECT_NE(updated[1], 1.0f);
    EXPECT_EQ(model.memory_stats().full_bytes, numel(shape) * 4);
  }
}

TEST_F(ParamKindsTest, PlacementsThatDoNotFitAreNamed) {
  Model model({.mesh = mesh_});
  const auto message = [&](std::map<std::string, Placement> placements) {
    try {
      model.add("m", {{"w", {4, 4}, init::ones(), true, DType::f32, std::move(placements)}});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const std::vector<std::int64_t> short_bounds{0};
  for (const auto& [placements, parts] :
       std::vector<std::pair<std::map<std::string, Placement>, std::vector<std::string>>>{
           {{{"dp", Shard{2}}}, {"\"w\"", "\"m\"", "Shard(2)", "\"dp\"", "[4, 4]"}},
           {{{"tp", Shard{0}}}, {"w", "\"tp\"", "dp="}},
           {{{"dp", Partial{}}}, {"w", "Partial(sum)", "\"dp\""}},
           {{{"dp", Ragged{0, {0, 1, 2, 3, 9, 4, 4, 4, 4}}}}, {"w", "bounds", "\"dp\""}}}) {
    const std::string found = message(placements);
    for (const std::string& part : parts) EXPECT_TRUE(contains(found, part)) << found << " lacks " << part;
  }
  EXPECT_TRUE(model.modules().empty());
  EXPECT_THROW(
      model.add(
          "m",
          {{.name = "w", .shape = {4}, .value = init::ones(), .placements = {{"dp", Shard{0}}}, .is_ignored = true}}),
      ConfigError);
}

TEST_F(ParamKindsTest, TiedParametersAreOneStorageWithTwoNames) {
  Model model({.mesh = mesh_, .min_shard_size = 0});
  Module& module = model.add("m", {{"embed", {6, 5}, ramp_tensor({6, 5})}, {"head", {}, Tied{"embed"}}});
  EXPECT_EQ(module.params().size(), 1u);
  EXPECT_EQ(module.param("head"), module.param("embed"));
  {
    const Scope scope = module.forward();
    EXPECT_EQ(scope.tensor("head").data(), scope.tensor("embed").data());
  }
  BackwardScope scope = module.backward();
  write(scope.grad_tensor("head"), std::vector<float>(30, 1));
  const LentTensor second = scope.grad_tensor("embed");
  EXPECT_EQ(second.beta, 1.0f);
  write(second, std::vector<float>(30, 2));
  scope.reduce();
  model.finish_backward();
  ShardedParam embed = module.param("embed");
  EXPECT_EQ(to_host(embed.gradient()->local()), local(embed, std::vector<float>(30, 3)));
  EXPECT_EQ(state_dict(model).tensors.size(), 1u);

  EXPECT_TRUE(contains(message_of<ConfigError>([&] { model.add("n", {{"head", {}, Tied{"embed"}}}); }), "one module"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] {
                         model.add("n", {{"a", {1}, init::ones()}, {"a", {}, Tied{"a"}}});
                       }),
                       "two parameters \"a\""));
}

TEST_F(ParamKindsTest, IgnoredParametersAreEachRanksOwn) {
  Model model({.mesh = mesh_, .min_shard_size = 0});
  Module& module = model.add("m", {{"w", {4}, init::ones()},
                                   {.name = "own",
                                    .shape = {3},
                                    .value = make_tensor({3}, std::vector<float>(3, static_cast<float>(rank_))),
                                    .is_ignored = true}});
  Sgd optimizer(model, {.lr = 1});
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    BackwardScope scope = module.backward();
    write(scope.grad_tensor("own"), std::vector<float>(3, static_cast<float>(rank_ + 1)));
    scope.reduce();
    optimizer.step();
  }
  EXPECT_EQ(to_host(module.param("own").local_shard()), std::vector<float>(3, static_cast<float>(-rank_ - 2)));
  EXPECT_FALSE(state_dict(model, optimizer).tensors.contains("m.own"));
  model.verify_replicas();  // nobody expects them to be equal
}

TEST_F(ParamKindsTest, ReplicationMayBeChosen) {
  Model model({.mesh = mesh_, .min_shard_size = 0});
  Module& module = model.add("m", {{"w", {4096}, init::ones(), true, DType::f32, {{"dp", Replicate{}}}}});
  EXPECT_FALSE(module.param("w").is_sharded());
  run_backward(module, {"w"});
  model.finish_backward();
  EXPECT_EQ(to_host(module.param("w").gradient()->local()), mean_gradient({4096}));
}

TEST_F(ParamKindsTest, ViewsOfOtherLayoutsArePacked) {
  const Kokkos::View<float**, Kokkos::LayoutLeft, MemorySpace> left("left", 5, 6);
  const auto mirror = Kokkos::create_mirror_view(left);
  for (std::size_t i = 0; i < 5; ++i)
    for (std::size_t j = 0; j < 6; ++j) mirror(i, j) = static_cast<float>(6 * i + j);
  Kokkos::deep_copy(left, mirror);
  const ExecutionSpace exec;
  Model model({.mesh = mesh_, .min_shard_size = 0});
  Module& module = model.add("m", {{"w", {5, 6}, pack(exec, left)}});
  ShardedParam w = module.param("w");
  EXPECT_EQ(to_host(w.all_gather()), ramp({5, 6}));
  w.clear_cache();
  module.post_backward({{"w", pack(exec, left)}});
  module.finish_backward();
  EXPECT_EQ(to_host(w.gradient()->local()), local(w, ramp({5, 6})));
  EXPECT_TRUE(contains(message_of<ShapeError>([&] { wrap(left); }), "LayoutLeft"));
}

TEST_F(ParamKindsTest, ABucketLimitSplitsCollectivesAndChangesNoResult) {
  std::vector<std::vector<float>> results;
  for (const std::int64_t limit : {0, 1, 100, 4096}) {
    Model model({.mesh = mesh_, .min_shard_size = 0, .direct_bytes = 1 << 20, .max_bucket_bytes = limit});
    std::vector<ParamSpec> specs;
    std::vector<std::string> names;
    for (int i = 0; i < 9; ++i) {
      names.push_back(fmt::format("w{}", i));
      const Shape shape{i + 1, 5};
      specs.push_back({names.back(), shape, ramp_tensor(shape, static_cast<float>(100 * i))});
    }
    Module& module = model.add("m", specs);
    {
      const Scope scope = module.forward();
      for (int i = 0; i < 9; ++i)
        EXPECT_EQ(to_host(scope.tensor(names[static_cast<std::size_t>(i)])),
                  ramp({i + 1, 5}, static_cast<float>(100 * i)));
    }
    run_backward(module, names);
    model.finish_backward();
    const detail::Section& section = detail::ModuleAccess::group(module)->layout().sections.front();
    const bool is_split = limit == 1 || limit == 100;
    EXPECT_EQ(section.buckets.size() > 2, is_split) << limit;
    EXPECT_EQ(section.buckets.size() == 1, !is_split) << limit;
    EXPECT_EQ(section.trainable_buckets.size(), section.buckets.size());
    std::vector<float> all;
    for (const ShardedParam& param : module.params()) {
      const std::vector<float> part = to_host(param.gradient()->local());
      EXPECT_EQ(part, local(param, mean_gradient(param.full_shape())));
      all.insert(all.end(), part.begin(), part.end());
    }
    results.push_back(all);
  }
  for (const std::vector<float>& result : results) EXPECT_EQ(result, results.front());
}

TEST_F(ParamKindsTest, FrozenGroupsStayResident) {
  Model model({.mesh = mesh_, .reshard_after_forward = false, .min_shard_size = 0});
  Module& frozen = model.add("frozen", {{"w", {8, 3}, init::ones(), false}});
  Module& trained = model.add("trained", {{"w", {8, 3}, init::ones()}});
  Sgd optimizer(model, {.lr = 0.1});
  Trace trace(model);
  std::vector<std::string> gathers;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    run_forward(frozen);
    run_forward(trained);
    run_backward(trained, {"w"});
    run_backward(frozen, {});
    optimizer.step();
  }
  const std::vector<std::string> events = trace.take();
  EXPECT_EQ(std::count(events.begin(), events.end(), "gather_issued frozen"), 1);
  EXPECT_EQ(std::count(events.begin(), events.end(), "gather_issued trained"), 3);
  EXPECT_EQ(std::count(events.begin(), events.end(), "reduce_issued frozen"), 0);
}

TEST_F(ParamKindsTest, ParametersFreezeAndUnfreeze) {
  for (const std::int64_t direct_bytes : {0, 1 << 20}) {
    Model model({.mesh = mesh_, .min_shard_size = 4, .direct_bytes = direct_bytes});
    Module& module =
        model.add("m", {{"a", {9, 3}, init::zeros()}, {"b", {7, 3}, init::zeros()}, {"s", {2}, init::zeros()}});
    AdamW optimizer(model, {.lr = 1, .eps = 1e-30, .weight_decay = 0});
    const auto step = [&](const std::vector<std::string>& names) {
      optimizer.zero_grad();
      BackwardScope scope = module.backward();
      for (const std::string& name : names) {
        const LentTensor lent = scope.grad_tensor(name);
        write(lent, std::vector<float>(static_cast<std::size_t>(lent.tensor.numel()),
                                       lent.beta == 0 || name == "s" ? weight() : 0));
      }
      scope.reduce();
      optimizer.step();
      optimizer.zero_grad();
    };
    const auto value = [&](const std::string& name) { return to_host(module.param(name).all_gather())[0]; };
    step({"a", "b", "s"});
    module.param("a").set_requires_grad(false);
    EXPECT_THROW(module.backward().grad_tensor("a"), Error);
    model.reset();
    step({"b", "s"});
    step({"b", "s"});
    EXPECT_NEAR(value("a"), -1, 1e-5);  // of one step: state and value of the frozen one are kept
    EXPECT_NEAR(value("b"), -3, 1e-5);
    EXPECT_TRUE(optimizer.state().contains("exp_avg.m.a"));
    module.param("s").set_requires_grad(false);
    module.param("a").set_requires_grad(true);
    step({"a", "b"});
    EXPECT_LT(value("a"), -1.5);
    EXPECT_NEAR(value("b"), -4, 1e-5);
    EXPECT_NEAR(value("s"), -3, 1e-5);
    {
      BackwardScope scope = module.backward();
      EXPECT_TRUE(contains(message_of<Error>([&] { module.param("b").set_requires_grad(false); }), "\"b\""));
      scope.reduce();
    }
    EXPECT_THROW(module.param("b").set_requires_grad(false), Error);  // its gradient is in flight
    model.finish_backward();
    EXPECT_THROW(module.param("b").set_requires_grad(false), Error);  // and here
  }
}

TEST_F(ParamKindsTest, BuffersAreKeptBesideParameters) {
  Model model({.mesh = mesh_, .mp_policy = MixedPrecisionPolicy::bf16()});
  Module& module = model.add("m", {{"w", {4}, init::ones()}});
  module.add_buffer("mean", ramp_tensor({3}, 1));
  module.add_buffer("count", tensor_of({}, std::vector<std::int64_t>{7}));
  EXPECT_EQ(module.buffer("mean").dtype(), DType::bf16);
  EXPECT_EQ(static_cast<float>(to_host<bfloat16>(module.buffer("mean"))[2]), 3.0f);
  EXPECT_EQ(to_host<std::int64_t>(module.buffer("count"))[0], 7);
  const StateDict dict = state_dict(model);
  EXPECT_EQ(dict.tensors.at("m.mean").local().data(), module.buffer("mean").data());
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { module.add_buffer("w", ramp_tensor({1})); }), "\"w\""));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { module.buffer("x"); }), "count, mean"));
}

/// dp × tp: parameters that are cut over "tp" already.
TEST_F(ParamKindsTest, ParametersCutByTensorParallelismAreCutFurther) {
  for (std::int64_t tp = 1; tp <= ranks_; ++tp) {
    if (ranks_ % tp != 0) continue;
    DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", ranks_ / tp}, {"tp", tp}});
    {
      Model model({.mesh = mesh, .min_shard_size = 0});
      const Shape shape{11, 7};
      Module& module =
          model.add("m", {{"rows", shape, ramp_tensor(shape), true, DType::f32, {{"tp", Shard{0}}}},
                          {"columns", shape, ramp_tensor(shape), true, DType::f32, {{"tp", Shard{1}}}},
                          {"both", shape, ramp_tensor(shape), true, DType::f32, {{"tp", Shard{0}}, {"dp", Shard{1}}}},
                          {"whole", shape, ramp_tensor(shape)}});
      const Shape& coordinate = mesh.coordinate();
      const auto part = [&](std::int64_t dim) {
        Box box = Box::whole(shape);
        const Range range = chunk(shape[static_cast<std::size_t>(dim)], tp, coordinate[1]);
        box.offset[static_cast<std::size_t>(dim)] = range.begin;
        box.extent[static_cast<std::size_t>(dim)] = range.size();
        return box;
      };
      const std::map<std::string, Box> full{
          {"rows", part(0)}, {"columns", part(1)}, {"both", part(0)}, {"whole", Box::whole(shape)}};
      {
        const Scope scope = module.forward();
        for (const auto& [name, box] : full) {
          EXPECT_EQ(module.param(name).full_shape(), box.extent);
          EXPECT_EQ(to_host(scope.tensor(name)), box_of(ramp(shape), shape, box)) << name;
        }
      }
      BackwardScope scope = module.backward();
      for (const auto& [name, box] : full) {
        std::vector<float> gradient = box_of(ramp(shape), shape, box);
        for (float& g : gradient) g *= static_cast<float>(2 * (coordinate[0] + 1));
        write(scope.grad_tensor(name), gradient);
      }
      scope.reduce();
      model.finish_backward();
      std::vector<float> mean = ramp(shape);
      for (float& g : mean) g *= static_cast<float>(mesh.spec().axes()[0].size + 1);
      for (const ShardedParam& param : module.params())
        EXPECT_EQ(to_host(param.gradient()->local()), local(param, mean)) << param.name();
      double square = 0;
      for (const float g : mean) square += 4 * static_cast<double>(g) * g;
      EXPECT_DOUBLE_EQ(clip_grad_norm(model, 1e9), std::sqrt(square));
      model.verify_replicas();
    }
    mesh.close();
  }
}

/// Experts on an axis of their own, dense parameters on the flattened mesh.
TEST_F(ParamKindsTest, AParameterMayHaveAnotherMesh) {
  if (ranks_ % 2 != 0) GTEST_SKIP() << "needs an even number of ranks";
  DeviceMesh experts(MPI_COMM_WORLD, {{"ep", 2}, {"edp", ranks_ / 2}}, "experts");
  {
    Model model({.mesh = mesh_, .min_shard_size = 0});
    const Shape shape{10, 3};
    Module& module = model.add("m", {{"dense", shape, ramp_tensor(shape)},
                                     {.name = "expert",
                                      .shape = shape,
                                      .value = ramp_tensor(shape, 100),
                                      .placements = {{"ep", Shard{0}}},
                                      .mesh = ParamMesh{experts, "edp", {}, 1.0}}});
    ShardedParam expert = module.param("expert");
    EXPECT_EQ(expert.full_shape(), (Shape{5, 3}));
    const std::int64_t which = experts.coordinate()[0];
    {
      const Scope scope = module.forward();
      EXPECT_EQ(to_host(scope.tensor("dense")), ramp(shape));
      EXPECT_EQ(to_host(scope.tensor("expert")), ramp({5, 3}, static_cast<float>(100 + 15 * which)));
    }
    BackwardScope scope = module.backward();
    write(scope.grad_tensor("dense"), ramp(shape, 0, static_cast<float>(2 * (rank_ + 1))));
    write(scope.grad_tensor("expert"), std::vector<float>(15, 1));
    scope.reduce();
    model.finish_backward();
    EXPECT_EQ(to_host(module.param("dense").gradient()->local()), local(module.param("dense"), mean_gradient(shape)));
    EXPECT_EQ(to_host(expert.gradient()->local()),  // its factor is 1: a sum over "edp"
              local(expert, std::vector<float>(30, static_cast<float>(ranks_ / 2))));
    EXPECT_TRUE(contains(message_of<ConfigError>([&] { module.set_reshard_after_forward(ranks_); }), "several meshes"));
  }
  experts.close();
}

TEST_F(ParamKindsTest, TruncatedNormalNumbersDoNotDependOnTheMesh) {
  const Shape shape{37, 29};
  const auto initializer = init::truncated_normal(1, 2, 0, 2, 5);
  const auto values = [&](std::map<std::string, Placement> placements) {
    Model model({.mesh = mesh_, .min_shard_size = 0});
    Module& module = model.add("m", {{"w", shape, initializer, true, DType::f32, std::move(placements)}});
    return to_host(module.param("w").all_gather());
  };
  const std::vector<float> rows = values({});
  EXPECT_EQ(values({{"dp", Replicate{}}}), rows);
  EXPECT_EQ(values({{"dp", Shard{1}}}), rows);
  double mean = 0;
  for (const float value : rows) {
    EXPECT_TRUE(value >= 0 && value <= 2);
    mean += value / static_cast<double>(rows.size());
  }
  EXPECT_NEAR(mean, 1, 0.1);
  EXPECT_GT(*std::max_element(rows.begin(), rows.end()), 1.95f);
  EXPECT_LT(*std::min_element(rows.begin(), rows.end()), 0.05f);
  EXPECT_THROW(init::truncated_normal(0, 1, 8, 9, 1), ConfigError);
  EXPECT_THROW(init::truncated_normal(0, 0, -1, 1, 1), ConfigError);
}

}  // namespace
}  // namespace fsdp2::test
