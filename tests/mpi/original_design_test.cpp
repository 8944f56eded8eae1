// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// The behaviour that the library's first design asked for, item by item.

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "fsdp2/error.hpp"
#include "fsdp2/state_dict.hpp"
#include "support/fsdp.hpp"

namespace fsdp2::test {
namespace {

class OriginalDesignTest : public OnMesh {
 protected:
  Config config() const { return {.mesh = mesh_}; }
  static ParamSpec spec(const char* name, const Shape& shape, Initializer value = init::ones()) {
    return {name, shape, value};
  }
};

// ShardedParam

TEST_F(OriginalDesignTest, FewElementsAreNotSharded) {
  const Config config{.mesh = mesh_, .min_shard_size = 1000};
  const ShardedParam small = ShardedParam::from_tensor("small", ramp_tensor({10, 10}), config);
  EXPECT_FALSE(small.is_sharded());
  EXPECT_EQ(small.local_shape(), (Shape{10, 10}));
  EXPECT_TRUE(ShardedParam::from_tensor("limit", ramp_tensor({1000}), config).is_sharded());
  EXPECT_FALSE(ShardedParam::from_tensor("below", ramp_tensor({999}), config).is_sharded());
  const ShardedParam unless_asked =
      ShardedParam::from_tensor("small", ramp_tensor({10, 10}), {.mesh = mesh_, .min_shard_size = 100});
  EXPECT_TRUE(unless_asked.is_sharded());
}

TEST_F(OriginalDesignTest, RowsAreCutOverTheRanks) {
  const ShardedParam param = ShardedParam::from_tensor("weight", ramp_tensor({1024, 512}), config());
  EXPECT_TRUE(param.is_sharded());
  EXPECT_EQ(param.name(), "weight");
  EXPECT_EQ(param.key(), "weight");
  EXPECT_TRUE(param.requires_grad());
  EXPECT_EQ(param.full_shape(), (Shape{1024, 512}));
  EXPECT_EQ(param.local_shape(), (Shape{chunk(1024, ranks_, rank_).size(), 512}));
  if (ranks_ == 2) {
    EXPECT_EQ(param.local_shape(), (Shape{512, 512}));
  }
  EXPECT_EQ(to_host(param.local_shard()), part_of(ramp({1024, 512}), param, ranks_, rank_));
}

TEST_F(OriginalDesignTest, IdsAreUnique) {
  std::set<std::uint64_t> ids;
  std::uint64_t last = 0;
  for (int i = 0; i < 50; ++i) {
    const ShardedParam param = ShardedParam::from_tensor("same", ramp_tensor({3}), config());
    EXPECT_GT(param.id(), last);
    last = param.id();
    ids.insert(last);
  }
  EXPECT_EQ(ids.size(), 50u);
}

TEST_F(OriginalDesignTest, AnUpdateOfTheShardIsChecked) {
  ShardedParam param = ShardedParam::from_tensor("tensor", ramp_tensor({8, 4}), config());
  EXPECT_FALSE(param.is_sharded());
  param.update_local_shard(ramp_tensor({8, 4}, 1, 0));
  EXPECT_EQ(to_host(param.local_shard()), ramp({8, 4}, 1, 0));
  const std::string message = message_of<ShapeError>([&] { param.update_local_shard(ramp_tensor({4, 8})); });
  EXPECT_TRUE(contains(message, "\"tensor\"") && contains(message, "[4, 8]") && contains(message, "[8, 4]")) << message;
  EXPECT_EQ(to_host(param.local_shard()), ramp({8, 4}, 1, 0));
}

TEST_F(OriginalDesignTest, AGatherIsCachedUntilCleared) {
  ShardedParam param = ShardedParam::from_tensor("weight", ramp_tensor({37, 50}), config());
  EXPECT_FALSE(param.is_gathered());
  const Tensor first = param.all_gather();
  EXPECT_EQ(first.shape(), (Shape{37, 50}));  // without padding
  EXPECT_EQ(to_host(first), ramp({37, 50}));
  EXPECT_EQ(param.all_gather().data(), first.data());
  EXPECT_TRUE(param.is_gathered());
  param.clear_cache();
  EXPECT_FALSE(param.is_gathered());
  EXPECT_TRUE(contains(message_of<Error>([&] { param.full(); }), "\"weight\""));
  param.unshard();
  EXPECT_EQ(to_host(param.all_gather()), ramp({37, 50}));
  param.update_local_shard(ramp_tensor(param.local_shape(), 2, 0));
  EXPECT_EQ(to_host(param.all_gather()), ramp({37, 50}, 2, 0));

  ShardedParam replicated = ShardedParam::from_tensor("bias", ramp_tensor({3}), config());
  EXPECT_TRUE(replicated.is_gathered());
  EXPECT_EQ(replicated.all_gather().data(), replicated.local_shard().data());
}

TEST_F(OriginalDesignTest, AGradientIsReducedOverTheRanks) {
  for (const std::optional<double> factor : {std::optional<double>(), std::optional<double>(1)}) {
    const Config config{.mesh = mesh_, .gradient_divide_factor = factor};
    const auto divisor = static_cast<float>(factor.value_or(static_cast<double>(ranks_)));
    for (const Shape& shape : {Shape{37, 50}, Shape{3}, Shape{}}) {
      ShardedParam param = ShardedParam::from_tensor("weight", ramp_tensor(shape), config);
      const Tensor reduced = param.reduce_scatter_gradient(ramp_tensor(shape, static_cast<float>(rank_)));
      std::vector<float> expected(static_cast<std::size_t>(numel(shape)));
      for (std::int64_t rank = 0; rank < ranks_; ++rank)
        for (std::size_t i = 0; i < expected.size(); ++i)
          expected[i] += static_cast<float>(rank) + static_cast<float>(i);
      for (float& value : expected) value /= divisor;
      EXPECT_EQ(reduced.shape(), param.local_shape());
      EXPECT_EQ(to_host(reduced), part_of(expected, param, ranks_, rank_));
      EXPECT_FALSE(param.gradient().has_value());
      param.set_gradient(reduced);
      EXPECT_EQ(to_host(param.gradient()->local()), to_host(reduced));
      EXPECT_EQ(param.gradient()->spec(), param.dtensor().spec());
      param.zero_grad();
      EXPECT_FALSE(param.gradient().has_value());
    }
  }
  ShardedParam param = ShardedParam::from_tensor("weight", ramp_tensor({37, 50}), config());
  EXPECT_TRUE(contains(message_of<ShapeError>([&] {
                         param.reduce_scatter_gradient(ramp_tensor({50, 37}));
                       }),
                       "\"weight\""));
  EXPECT_TRUE(contains(message_of<ShapeError>([&] { param.set_gradient(ramp_tensor({50, 37})); }), "\"weight\""));
}

// Module

TEST_F(OriginalDesignTest, AModuleIsANamedListOfParameters) {
  Module module("layer", config());
  module.add_param(spec("weight", {1024, 512}));
  ShardedParam weight = module.param("weight");
  module.add_param(spec("bias", {512}, init::constant(2)));
  EXPECT_EQ(module.name(), "layer");
  ASSERT_EQ(module.params().size(), 2u);
  EXPECT_EQ(module.params()[0], weight);
  EXPECT_EQ(module.params()[1].key(), "layer.bias");
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { module.add_param(spec("bias", {1})); }), "\"bias\""));
  EXPECT_EQ(module.params().size(), 2u);
  EXPECT_EQ(to_host(weight.all_gather()), ramp({1024, 512}, 1, 0));  // it survived the second
  EXPECT_EQ(to_host(module.param("bias").all_gather()), ramp({512}, 2, 0));
  EXPECT_TRUE(module.is_training());
  module.eval();
  EXPECT_FALSE(module.is_training());
  module.train();
  EXPECT_TRUE(module.is_training());
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { Module("", config()); }), "name"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { Module("optim", config()); }), "optim"));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { Module("m", {}); }), "Config::mesh"));
}

TEST_F(OriginalDesignTest, HooksGatherAndDrop) {
  Module module("layer", config());
  fully_shard(module, {spec("weight", {1024, 64}), spec("bias", {64})});
  const auto all_gathered = [&] {
    for (const ShardedParam& param : module.params())
      if (!param.is_gathered()) return false;
    return true;
  };
  EXPECT_FALSE(all_gathered());
  module.pre_forward();
  EXPECT_TRUE(all_gathered());
  EXPECT_EQ(module.forward_count(), 1);
  EXPECT_EQ(to_host(module.param("weight").full()), ramp({1024, 64}, 1, 0));
  module.post_forward();
  EXPECT_FALSE(module.param("weight").is_gathered());

  module.pre_backward();
  EXPECT_TRUE(all_gathered());
  module.post_backward({{"weight", ramp_tensor({1024, 64}, static_cast<float>(rank_))}});
  EXPECT_FALSE(module.param("weight").is_gathered());
  module.finish_backward();
  const float mean_rank = static_cast<float>(ranks_ - 1) / 2;
  EXPECT_EQ(to_host(module.param("weight").gradient()->local()),
            part_of(ramp({1024, 64}, mean_rank), module.param("weight"), ranks_, rank_));
  EXPECT_EQ(to_host(module.param("bias").gradient()->local()), std::vector<float>(64));  // absent: zeros

  // Gradients may come without a gather for backward, and add up.
  module.post_backward({{"bias", ramp_tensor({64})}});
  module.post_backward({{"bias", ramp_tensor({64}, 1, 0)}});
  module.finish_backward();
  EXPECT_EQ(to_host(module.param("bias").gradient()->local()), ramp({64}, 1));
  EXPECT_EQ(to_host(module.param("weight").gradient()->local()),
            part_of(ramp({1024, 64}, mean_rank), module.param("weight"), ranks_, rank_));
  module.zero_grad();
  EXPECT_FALSE(module.param("weight").gradient().has_value());

  EXPECT_TRUE(contains(message_of<ConfigError>([&] {
                         module.post_backward({{"w", ramp_tensor({64})}});
                       }),
                       "weight, bias"));
  EXPECT_TRUE(contains(message_of<ShapeError>([&] { module.post_backward({{"bias", ramp_tensor({65})}}); }), "[65]"));
  module.finish_backward();  // nothing was begun
}

TEST_F(OriginalDesignTest, PostForwardKeepsWhatPolicySays) {
  Module module("layer", {.mesh = mesh_, .reshard_after_forward = false});
  fully_shard(module, {spec("weight", {1024, 64})});
  module.pre_forward();
  module.post_forward();
  EXPECT_TRUE(module.param("weight").is_gathered());
  module.post_backward({});
  EXPECT_FALSE(module.param("weight").is_gathered());
  module.finish_backward();
}

TEST_F(OriginalDesignTest, AUserSteps) {
  const std::unique_ptr<Module> module =
      make_module("layer", {spec("weight", {16, 8}), spec("bias", {8, 4})}, config());
  module->pre_forward();
  module->post_forward();
  module->post_backward({{"weight", ramp_tensor({16, 8}, 1, 0)}, {"bias", ramp_tensor({8, 4}, 1, 0)}});
  std::vector<std::string> names;
  module->step([&](const std::string& name, const Tensor& shard, const Tensor& gradient) {
    names.push_back(name);
    EXPECT_EQ(shard.shape(), gradient.shape());
    std::vector<float> values = to_host(shard);
    const std::vector<float> slope = to_host(gradient);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] -= 0.1f * slope[i];
    fill(shard, values);
  });
  EXPECT_EQ(names, (std::vector<std::string>{"weight", "bias"}));
  for (const ShardedParam& param : module->params())
    for (const float value : to_host(param.local_shard())) EXPECT_EQ(value, 0.9f);
  module->zero_grad();
  module->step(
      [&](const std::string& name, const Tensor&, const Tensor&) { ADD_FAILURE() << name << " has no gradient"; });

  Model model(config());
  model.add("a", {spec("w", {64, 32})});
  model.add("b", {spec("w", {64, 32})});
  BackwardScope scope = model.module("b").backward();
  scope.reduce();
  names.clear();
  model.step([&](const std::string& name, const Tensor&, const Tensor&) { names.push_back(name); });
  EXPECT_EQ(names, (std::vector<std::string>{"b.w"}));
}

TEST_F(OriginalDesignTest, MemoryStats) {
  const std::unique_ptr<Module> none = make_module("none", {}, config());
  EXPECT_EQ(none->memory_stats().ratio(), 1.0);
  EXPECT_EQ(none->memory_stats().reduction_percent(), 0.0);

  const std::unique_ptr<Module> square = make_module("square", {spec("weight", {4096, 4096})}, config());
  const MemoryStats stats = square->memory_stats();
  EXPECT_EQ(stats.full_bytes, std::int64_t{4096} * 4096 * 4);
  EXPECT_EQ(stats.local_bytes, chunk(4096, ranks_, rank_).size() * 4096 * 4);
  EXPECT_EQ(stats.saved_bytes(), stats.full_bytes - stats.local_bytes);
  if (ranks_ == 4) {
    EXPECT_EQ(stats.reduction_percent(), 75.0);
  }

  const std::unique_ptr<Module> column = make_module("column", {spec("weight", {4096, 1})}, config());
  if (ranks_ == 4) {
    EXPECT_GE(column->memory_stats().ratio(), 3.5);
    EXPECT_LT(column->memory_stats().local_bytes, column->memory_stats().full_bytes);
  }

  const std::unique_ptr<Module> mixed =
      make_module("mixed", {spec("weight", {1024, 512}), spec("bias", {512})}, config());
  EXPECT_EQ(mixed->params().size(), 2u);
  EXPECT_EQ(mixed->memory_stats().parameters, 2);
  EXPECT_EQ(mixed->memory_stats().sharded_parameters, 1);
  EXPECT_EQ(mixed->memory_stats().gradient_bytes, 0);

  const std::unique_ptr<Module> padded = make_module("padded", {spec("weight", {5, 1000})}, config());
  EXPECT_EQ(padded->memory_stats().local_bytes + padded->memory_stats().padding_bytes,
            align_up(chunk_size(5, ranks_) * 1000 * 4, 64));
  if (ranks_ == 4 && rank_ == 3) {
    EXPECT_EQ(padded->memory_stats().ratio(), std::numeric_limits<double>::infinity());
  }
}

// Both forms, and state dicts

TEST_F(OriginalDesignTest, TheFactoryShards) {
  const std::unique_ptr<Module> module =
      make_module("layer", {{"weight", {512, 256}, ramp_tensor({512, 256})}}, config());
  EXPECT_TRUE(module->param("weight").is_sharded());
  EXPECT_EQ(to_host(module->param("weight").all_gather()), ramp({512, 256}));
}

TEST_F(OriginalDesignTest, StateDictsHoldLocalShards) {
  const std::unique_ptr<Module> a = make_module("a", {spec("weight", {64, 32}), spec("bias", {3})}, config());
  const std::unique_ptr<Module> b = make_module("b", {spec("weight", {64, 32})}, config());
  const std::array<Module*, 2> modules = {a.get(), b.get()};
  const StateDict dict = get_sharded_state_dict(modules);
  std::vector<std::string> keys;
  for (const auto& [key, tensor] : dict.tensors) keys.push_back(key);
  EXPECT_EQ(keys, (std::vector<std::string>{"a.bias", "a.weight", "b.weight"}));
  EXPECT_EQ(dict.tensors.at("a.weight").local().data(), a->param("weight").local_shard().data());

  const std::unique_ptr<Module> other =
      make_module("a", {spec("weight", {64, 32}, init::constant(5)), spec("bias", {3})}, config());
  const std::array<Module*, 1> target = {other.get()};
  const std::array<Module*, 1> only_a = {a.get()};
  const Tensor old = other->param("weight").all_gather();
  load_sharded_state_dict(target, get_sharded_state_dict(only_a));
  EXPECT_EQ(to_host(other->param("weight").all_gather()), ramp({64, 32}, 1, 0));
  const std::array<Module*, 2> clash = {a.get(), other.get()};
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { get_sharded_state_dict(clash); }), "\"a.weight\""));
}

TEST_F(OriginalDesignTest, LoadingListsEveryProblem) {
  const std::unique_ptr<Module> module =
      make_module("m", {spec("a", {64, 32}), spec("b", {3}), spec("c", {3}), spec("d", {4})}, config());
  const std::array<Module*, 1> modules = {module.get()};
  StateDict source;
  const std::vector<Placement> replicated(1, Replicate{});
  const auto add = [&](const char* key, const Tensor& full, const Placement& placement) {
    source.tensors.insert_or_assign(key, DTensor::distribute(ExecutionSpace(), full, {placement}, mesh_));
  };
  add("m.a", ramp_tensor({32, 64}), Shard{0});
  add("m.b", Tensor(ExecutionSpace(), DType::f64, {3}, "b"), Replicate{});
  add("m.d", ramp_tensor({4}, 9), Replicate{});
  add("m.e", ramp_tensor({3}), Replicate{});
  const std::string message = message_of<MismatchError>([&] { load_sharded_state_dict(modules, source); });
  EXPECT_TRUE(contains(message, "\"m.a\": shape [32, 64], expected [64, 32]")) << message;
  EXPECT_TRUE(contains(message, "\"m.b\": f64, expected f32")) << message;
  EXPECT_TRUE(contains(message, "\"m.c\": missing")) << message;
  EXPECT_TRUE(contains(message, "\"m.e\": unexpected")) << message;
  EXPECT_FALSE(contains(message, "\"m.d\"")) << message;
  const std::string loose = message_of<MismatchError>([&] { load_sharded_state_dict(modules, source, false); });
  EXPECT_TRUE(contains(loose, "\"m.a\"") && contains(loose, "\"m.b\"") && !contains(loose, "\"m.c\"")) << loose;
  EXPECT_EQ(to_host(module->param("d").local_shard()), ramp({4}, 1, 0));  // nothing was changed

  add("m.a", ramp_tensor({64, 32}), Replicate{});
  if (ranks_ > 1) {
    EXPECT_TRUE(contains(message_of<MismatchError>([&] { load_sharded_state_dict(modules, source, false); }),
                         "this rank's part"));
  }
  source.tensors.erase("m.a");
  source.tensors.erase("m.b");
  load_sharded_state_dict(modules, source, false);
  EXPECT_EQ(to_host(module->param("d").local_shard()), ramp({4}, 9));

  const Scope scope = module->unshard();
  EXPECT_TRUE(contains(message_of<Error>([&] { load_sharded_state_dict(modules, source, false); }), "\"m\""));
}

}  // namespace
}  // namespace fsdp2::test
