// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/config.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "fsdp2/error.hpp"
#include "fsdp2/model.hpp"

namespace fsdp2 {
namespace {

/// The message of the ConfigError that the config meets in validate, and in a Model.
std::string refusal(const Config& config) {
  std::string message;
  try {
    config.validate();
    return "accepted";
  } catch (const ConfigError& error) {
    message = error.what();
  }
  EXPECT_THROW(Model{config}, ConfigError);
  EXPECT_THROW(Module("m", config), ConfigError);
  EXPECT_THROW(ShardedParam::from_tensor("p", Tensor(), config), ConfigError);
  return message;
}

void expect_refusal(const Config& config, const std::string& field) {
  EXPECT_TRUE(refusal(config).starts_with("Config::"));
  const std::string message = refusal(config);
  EXPECT_NE(message.find(field), std::string::npos) << message;
}

TEST(ConfigTest, DefaultsAreTheOnesOfTheDesign) {
  const Config config;
  EXPECT_EQ(config.mesh_dim_name, "dp");
  EXPECT_EQ(config.mp_policy, MixedPrecisionPolicy::fp32());
  EXPECT_EQ(config.reshard_after_forward, ReshardAfterForward(true));
  EXPECT_EQ(config.min_shard_size, 1024);
  EXPECT_FALSE(config.offload_to_cpu);
  EXPECT_EQ(config.backward_prefetch, BackwardPrefetch::pre);
  EXPECT_FALSE(config.forward_prefetch);
  EXPECT_TRUE(config.limit_all_gathers);
  EXPECT_FALSE(config.gradient_divide_factor.has_value());
  EXPECT_FALSE(config.keep_unsharded_in_eval);
}

TEST(ConfigTest, PoliciesAreTheOnesOfTheDesign) {
  const MixedPrecisionPolicy none;
  EXPECT_FALSE(none.param_dtype || none.reduce_dtype || none.buffer_dtype || none.output_dtype);
  EXPECT_FALSE(none.cast_inputs || none.keep_low_precision_grads);
  EXPECT_EQ(MixedPrecisionPolicy::fp32(), none);
  EXPECT_EQ(MixedPrecisionPolicy::bf16(), (MixedPrecisionPolicy{DType::bf16, DType::f32, DType::bf16, true}));
  EXPECT_EQ(MixedPrecisionPolicy::fp16(), (MixedPrecisionPolicy{DType::f16, DType::f32, DType::f16, true}));
}

TEST(ConfigTest, AMeshIsRequired) {
  expect_refusal({}, "mesh is not set");
  EXPECT_THROW(Config::builder().build(), ConfigError);
  EXPECT_EQ(refusal({.mesh = DeviceMesh()}), "accepted");
}

TEST(ConfigTest, TheBuilderSetsEveryField) {
  const Config config = Config::builder()
                            .mesh(DeviceMesh())
                            .mesh_dim_name("dp")
                            .reshard_after_forward(false)
                            .min_shard_size(7)
                            .backward_prefetch(BackwardPrefetch::post)
                            .limit_all_gathers(false)
                            .gradient_divide_factor(3)
                            .direct_bytes(9)
                            .keep_unsharded_in_eval(true)
                            .mp_policy(MixedPrecisionPolicy::bf16())
                            .offload_to_cpu(true)
                            .forward_prefetch(true)
                            .max_bucket_bytes(11)
                            .separate_reduce_communicator(true)
                            .checked(true)
                            .build();
  EXPECT_EQ(config.reshard_after_forward, ReshardAfterForward(false));
  EXPECT_EQ(config.min_shard_size, 7);
  EXPECT_EQ(config.backward_prefetch, BackwardPrefetch::post);
  EXPECT_FALSE(config.limit_all_gathers);
  EXPECT_EQ(config.gradient_divide_factor, 3.0);
  EXPECT_EQ(config.direct_bytes, 9);
  EXPECT_TRUE(config.keep_unsharded_in_eval);
  EXPECT_THROW(Config::builder().mesh(DeviceMesh()).mesh_dim_name("tp").build(), ConfigError);
  EXPECT_THROW(Config::builder().mesh(DeviceMesh()).replicate_dim_name("dp").build(), ConfigError);
  EXPECT_EQ(config.mp_policy, MixedPrecisionPolicy::bf16());
  EXPECT_TRUE(config.offload_to_cpu);
  EXPECT_TRUE(config.forward_prefetch);
  EXPECT_EQ(config.max_bucket_bytes, 11);
  EXPECT_TRUE(config.separate_reduce_communicator);
  EXPECT_TRUE(config.checked);
}

TEST(ConfigTest, ValuesOutOfRangeAreRefusedByName) {
  const DeviceMesh mesh;
  expect_refusal({.mesh = mesh, .mesh_dim_name = "tp"}, "mesh_dim_name is \"tp\"");
  expect_refusal({.mesh = mesh, .min_shard_size = -1}, "min_shard_size is -1");
  expect_refusal({.mesh = mesh, .direct_bytes = -1}, "direct_bytes is -1");
  expect_refusal({.mesh = mesh, .max_bucket_bytes = -1}, "max_bucket_bytes is -1");
  expect_refusal({.mesh = mesh, .replicate_dim_name = "replicate"}, "replicate_dim_name is \"replicate\"");
  expect_refusal({.mesh = mesh, .replicate_dim_name = "dp"}, "replicate_dim_name is \"dp\"");
  expect_refusal({.mesh = mesh, .reshard_after_forward = 2}, "reshard_after_forward is 2");
  expect_refusal({.mesh = mesh, .reshard_after_forward = 0}, "reshard_after_forward is 0");
  for (const double factor :
       {0.0, -1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    expect_refusal({.mesh = mesh, .gradient_divide_factor = factor}, "gradient_divide_factor is ");
  const std::pair<MixedPrecisionPolicy, const char*> policies[] = {
      {{.param_dtype = DType::i32}, "param_dtype is i32"},
      {{.reduce_dtype = DType::f8_e5m2}, "reduce_dtype is f8"},
      {{.buffer_dtype = DType::u8}, "buffer_dtype is u8"},
      {{.output_dtype = DType::i8}, "output_dtype is i8"}};
  for (const auto& [policy, message] : policies)
    EXPECT_NE(refusal({.mesh = mesh, .mp_policy = policy}).find(message), std::string::npos);
}

TEST(ConfigTest, OverridesOfAModuleAreChecked) {
  Model model({.mesh = DeviceMesh()});
  EXPECT_THROW(model.add("m", {}, {.min_shard_size = -1}), ConfigError);
  EXPECT_THROW(model.add("m", {}, {.reshard_after_forward = 2}), ConfigError);
  EXPECT_TRUE(model.modules().empty());
}

}  // namespace
}  // namespace fsdp2
