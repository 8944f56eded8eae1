// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// The runtime in one process that never calls MPI_Init.

#include <gtest/gtest.h>
#include <mpi.h>

#include <string>
#include <vector>

#include "fsdp2/optimizer.hpp"
#include "fsdp2/state_dict.hpp"
#include "support/fsdp.hpp"

namespace fsdp2::test {
namespace {

TEST(SingleProcessTest, ANetworkTrainsWithoutMpi) {
  int is_initialized = 1;
  MPI_Initialized(&is_initialized);
  ASSERT_EQ(is_initialized, 0);

  Model model({.mesh = DeviceMesh()});
  Module& module = model.add("layer", {{"weight", {64, 32}, init::ones()}, {"bias", {3}, init::ones()}});
  EXPECT_TRUE(module.param("weight").is_sharded());
  Sgd optimizer(model, {.lr = 0.5});
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    {
      const Scope scope = module.forward();
      EXPECT_EQ(scope.view<float**>("weight").extent(0), 64u);
      EXPECT_EQ(scope.view<const float*>("bias").extent(0), 3u);
    }
    BackwardScope scope = module.backward();
    EXPECT_EQ(scope.grad<float**>("weight").beta, 0);
    fill(scope.grad_tensor("weight").tensor, std::vector<float>(2048, 1));
    write(scope.grad_tensor("bias"), {1, 2, 3});
    scope.reduce();
    optimizer.step();
  }
  EXPECT_EQ(to_host(module.param("weight").all_gather()), std::vector<float>(2048, 0));
  EXPECT_EQ(to_host(module.param("bias").all_gather()), (std::vector<float>{0, -1, -2}));
  EXPECT_EQ(state_dict(model, optimizer).tensors.size(), 3u);
}

}  // namespace
}  // namespace fsdp2::test
