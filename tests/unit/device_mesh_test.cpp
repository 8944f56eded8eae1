// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/device_mesh.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "comm/host_communicator.hpp"
#include "fsdp2/error.hpp"
#include "support/tensor_bytes.hpp"

namespace fsdp2 {
namespace {

using testing::bytes_of;
using testing::tensor_of;
using testing::values_of;

// The unit tests never call MPI_Init: a mesh of one rank must not need it.
TEST(DeviceMeshWithoutMpi, OneRankWorks) {
  int is_initialized = 1;
  MPI_Initialized(&is_initialized);
  ASSERT_EQ(is_initialized, 0);

  DeviceMesh mesh;
  EXPECT_EQ(mesh.spec(), MeshSpec({{"dp", 1}}));
  EXPECT_EQ(mesh.rank(), 0);
  EXPECT_EQ(mesh.size(), 1);
  EXPECT_EQ(mesh.coordinate(), Shape{0});
  EXPECT_THROW(mesh.communicator("tp"), ConfigError);
  EXPECT_EQ(mesh.next_save_id().size(), 32u);

  Communicator& comm = mesh.communicator("dp");
  const ExecutionSpace exec;
  const std::vector<float> values{1.5f, -2.0f, 0.25f};
  const Tensor send = tensor_of(DType::f32, bytes_of(values));
  const Tensor receive(exec, DType::f32, {3}, "test");
  const Transfer transfer{send, receive};
  comm.all_gather(exec, {&transfer, 1}).wait();
  EXPECT_EQ(values_of<float>(receive), values);
  comm.reduce_scatter(exec, {&transfer, 1}, ReduceOp::sum).wait();
  comm.all_to_all(exec, {&transfer, 1}).wait();
  comm.all_reduce(exec, receive, ReduceOp::max).wait();
  comm.broadcast(exec, receive, 0).wait();
  comm.barrier();
  EXPECT_EQ(values_of<float>(receive), values);
  const auto part = comm.split(0, 0, "part");
  EXPECT_EQ(part->size(), 1);
  part->close();

  mesh.host().barrier();
  EXPECT_EQ(mesh.host().all_gather("x"), std::vector<std::string>{"x"});
  EXPECT_THROW(mesh.host().collectively([] { throw ShapeError("as it was"); }), ShapeError);
  mesh.close();
  EXPECT_THROW(comm.barrier(), CommError);
}

TEST(DeviceMeshWithoutMpi, AnyNumberOfAxesOfSizeOne) {
  DeviceMesh mesh(MPI_COMM_NULL, {{"replicate", 1}, {"dp", 1}}, "net");
  EXPECT_EQ(mesh.coordinate(), (Shape{0, 0}));
  EXPECT_EQ(mesh.communicator("replicate").size(), 1);
  mesh.close();
}

TEST(DeviceMeshWithoutMpi, MoreRanksNeedMpi) {
  EXPECT_THROW(DeviceMesh(MPI_COMM_NULL, {{"dp", 2}}), ConfigError);
  try {
    DeviceMesh(MPI_COMM_WORLD, {{"dp", 1}});
    ADD_FAILURE() << "made a communicator without MPI";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("MPI_Init"), std::string::npos) << error.what();
  }
}

TEST(DeviceMeshWithoutMpi, BackendsThatWereNotBuiltAreNamed) {
  try {
    const DeviceMesh mesh(MPI_COMM_NULL, {{"dp", 1}}, "net", {.backend = Backend::nccl});
    GTEST_SKIP() << "this library has NCCL";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("FSDP2_ENABLE_NCCL=ON"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace fsdp2
