// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/device_mesh.hpp"

#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
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

std::int64_t world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

std::int64_t world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

// Every text that some rank has, on all ranks: one entry if they agree.
std::vector<std::string> by_rank(const std::string& text) {
  HostCommunicator host(MPI_COMM_WORLD, "test");
  std::vector<std::string> texts = host.all_gather(text);
  host.close();
  return texts;
}

std::vector<std::int64_t> members(Communicator& comm) {
  const ExecutionSpace exec;
  const Tensor all(exec, DType::i64, {comm.size()}, "test");
  const Transfer transfer{tensor_of(DType::i64, bytes_of(std::vector<std::int64_t>{world_rank()})), all};
  comm.all_gather(exec, {&transfer, 1}).wait();
  return values_of<std::int64_t>(all);
}

// Along every axis, the communicator reaches the ranks that differ in that coordinate only, in its order.
void check_axes(const DeviceMesh& mesh) {
  const MeshSpec& spec = mesh.spec();
  EXPECT_EQ(mesh.rank(), world_rank());
  EXPECT_EQ(mesh.size(), world_size());
  EXPECT_EQ(mesh.coordinate(), spec.coordinate_of(world_rank()));
  for (std::size_t axis = 0; axis < spec.dimensions(); ++axis) {
    Communicator& comm = mesh.communicator(axis);
    EXPECT_EQ(&comm, &mesh.communicator(spec.axes()[axis].name));
    EXPECT_EQ(comm.name(), spec.axes()[axis].name);
    EXPECT_EQ(comm.size(), spec.axes()[axis].size);
    EXPECT_EQ(comm.rank(), mesh.coordinate()[axis]);
    std::vector<std::int64_t> expected;
    for (std::int64_t i = 0; i < spec.axes()[axis].size; ++i) {
      Shape coordinate = mesh.coordinate();
      coordinate[axis] = i;
      expected.push_back(spec.rank_at(coordinate));
    }
    EXPECT_EQ(members(comm), expected) << spec.to_string() << " axis " << axis;
  }
}

// All factorisations of the world into two and three axes.
std::vector<std::vector<MeshAxis>> meshes_of_the_world() {
  const std::int64_t size = world_size();
  std::vector<std::vector<MeshAxis>> meshes{{{"dp", size}}};
  for (std::int64_t a = 1; a <= size; ++a) {
    if (size % a != 0) continue;
    meshes.push_back({{"replicate", a}, {"dp", size / a}});
    for (std::int64_t b = 1; a * b <= size; ++b)
      if (size / a % b == 0) meshes.push_back({{"pp", a}, {"dp", b}, {"tp", size / a / b}});
  }
  return meshes;
}

TEST(DeviceMesh, AxisCommunicatorsReachTheRightRanks) {
  for (const auto& axes : meshes_of_the_world())
    for (const bool shortcut : {true, false}) {
      DeviceMesh mesh(MPI_COMM_WORLD, axes, "mesh", {shortcut});
      check_axes(mesh);
      mesh.close();
    }
}

TEST(DeviceMesh, RankListPlacesRanks) {
  std::vector<std::int64_t> backwards(static_cast<std::size_t>(world_size()));
  std::iota(backwards.rbegin(), backwards.rend(), 0);
  for (const auto& axes : meshes_of_the_world()) {
    DeviceMesh mesh(MPI_COMM_WORLD, MeshSpec(axes, backwards));
    check_axes(mesh);
    mesh.close();
  }
}

// The message of the error that `make` throws; the same one on every rank.
template <class E, class Make>
std::string common_error(Make&& make) {
  std::string message;
  try {
    make();
  } catch (const E& error) {
    message = error.what();
  }
  EXPECT_NE(message, "") << "nothing was thrown";
  for (const std::string& other : by_rank(message)) EXPECT_EQ(other, message);
  return message;
}

// Every run of adjacent axes as one: data goes to the ranks, in the order, that the spec says.
TEST(DeviceMesh, FlattenedAxesReachTheRightRanks) {
  std::vector<std::int64_t> backwards(static_cast<std::size_t>(world_size()));
  std::iota(backwards.rbegin(), backwards.rend(), 0);
  for (const auto& axes : meshes_of_the_world())
    for (const std::vector<std::int64_t>& ranks : {std::vector<std::int64_t>{}, backwards}) {
      DeviceMesh mesh(MPI_COMM_WORLD, MeshSpec(axes, ranks), "fields");
      for (std::size_t begin = 0; begin < axes.size(); ++begin) {
        std::vector<std::string> names;
        for (std::size_t end = begin; end < axes.size(); ++end) {
          names.push_back(axes[end].name);
          DeviceMesh flat = mesh.flatten(names, "flat");
          EXPECT_EQ(flat.spec(), mesh.spec().flatten(names, "flat"));
          EXPECT_EQ(flat.name(), "fields");
          EXPECT_EQ(flat.communicator("flat").size(), flat.spec().axes()[begin].size);
          check_axes(flat);
          flat.close();
        }
      }
      check_axes(mesh);
      mesh.close();
    }
}

TEST(DeviceMesh, FlattenRefusesAxesThatAreNotNeighbours) {
  DeviceMesh mesh(MPI_COMM_WORLD, {{"pp", 1}, {"dp", world_size()}, {"tp", 1}});
  for (const std::vector<std::string>& names :
       std::vector<std::vector<std::string>>{{}, {"pp", "tp"}, {"dp", "pp"}, {"dp", "dp"}, {"dp", "ep"}})
    common_error<ConfigError>([&] { mesh.flatten(names, "flat"); });
  common_error<ConfigError>([&] { mesh.flatten({"pp", "dp"}, "tp"); });
  mesh.close();
}

TEST(DeviceMesh, FlattenedMeshesKeepTheOptions) {
  for (const bool shortcut : {true, false}) {
    DeviceMesh mesh(MPI_COMM_WORLD, {{"pp", 1}, {"dp", 1}, {"tp", world_size()}}, "mesh", {shortcut});
    DeviceMesh flat = mesh.flatten({"pp", "dp"}, "one");
    const ExecutionSpace exec;
    const Tensor sum(exec, DType::i64, {1}, "test");
    for (Communicator* comm : {&flat.communicator("one"), &mesh.communicator(std::vector<std::size_t>{0, 1}),
                               &mesh.derived("dp again", mesh.communicator("dp"), 0)}) {
      Work work = comm->all_reduce(exec, sum, ReduceOp::sum);
      EXPECT_EQ(work.finished(), shortcut);
      work.wait();
    }
    flat.close();
    mesh.close();
  }
}

TEST(DeviceMesh, SeveralAxesReachTheirProduct) {
  for (const auto& axes : meshes_of_the_world()) {
    if (axes.size() < 3) continue;
    DeviceMesh mesh(MPI_COMM_WORLD, axes);
    for (const std::vector<std::size_t>& along :
         std::vector<std::vector<std::size_t>>{{0, 1}, {0, 2}, {1, 2}, {0, 1, 2}}) {
      std::vector<std::int64_t> expected;
      for (std::int64_t rank = 0; rank < world_size(); ++rank) {
        const Shape coordinate = mesh.spec().coordinate_of(rank);
        bool is_member = true;
        for (std::size_t i = 0; i < axes.size(); ++i)
          if (std::find(along.begin(), along.end(), i) == along.end())
            is_member = is_member && coordinate[i] == mesh.coordinate()[i];
        if (is_member) expected.push_back(rank);  // row-major, as the ranks are
      }
      Communicator& comm = mesh.communicator(along);
      EXPECT_EQ(members(comm), expected);
      EXPECT_EQ(&mesh.communicator(along), &comm);
    }
    for (const std::vector<std::size_t>& along :
         std::vector<std::vector<std::size_t>>{{}, {1, 0}, {1, 1}, {3}, {0, 3}, {0, 2, 1}})
      common_error<ConfigError>([&] { mesh.communicator(along); });
    Communicator& comm = mesh.communicator(std::vector<std::size_t>{0, 2});
    mesh.close();
    EXPECT_THROW(comm.barrier(), CommError);
  }
}

// Gathers and reductions need not wait for each other.
TEST(DeviceMesh, DerivedCommunicatorsAreOnTheirOwn) {
  DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", world_size()}}, "mesh", {.checked = false});
  Communicator& first = mesh.communicator("dp");
  Communicator& second = mesh.derived("dp (reduce)", first, 0);
  EXPECT_NE(&first, &second);
  EXPECT_EQ(&mesh.derived("dp (reduce)", first, 0), &second);
  EXPECT_EQ(second.name(), "dp (reduce)");
  EXPECT_EQ(second.rank(), first.rank());
  EXPECT_EQ(members(second), members(first));
  const ExecutionSpace exec;
  const Tensor one = tensor_of(DType::i64, bytes_of(std::vector<std::int64_t>{world_rank() + 1}));
  const Tensor all(exec, DType::i64, {world_size()}, "test");
  const Tensor sum(exec, DType::i64, {1}, "test");
  const Transfer gather{one, all};
  const Transfer scatter{
      tensor_of(DType::i64, bytes_of(std::vector<std::int64_t>(static_cast<std::size_t>(world_size()), 5))), sum};
  Work gathering;
  Work summing;
  if (world_rank() % 2 == 0) gathering = first.all_gather(exec, {&gather, 1});
  summing = second.reduce_scatter(exec, {&scatter, 1}, ReduceOp::sum);
  if (world_rank() % 2 != 0) gathering = first.all_gather(exec, {&gather, 1});
  summing.wait();
  gathering.wait();
  EXPECT_EQ(values_of<std::int64_t>(sum)[0], 5 * world_size());
  EXPECT_EQ(values_of<std::int64_t>(all).back(), world_size());
  mesh.close();
  EXPECT_THROW(second.barrier(), CommError);
}

TEST(DeviceMesh, SumsAlongOneAxisOnly) {
  if (world_size() != 4) GTEST_SKIP() << "needs 4 ranks";
  DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", 2}, {"tp", 2}});
  const ExecutionSpace exec;
  const auto sum_along = [&](const char* axis) {
    const Tensor sum =
        tensor_of(DType::i64, bytes_of(std::vector<std::int64_t>{std::int64_t{1} << (8 * world_rank())}));
    mesh.communicator(axis).all_reduce(exec, sum, ReduceOp::sum).wait();
    return values_of<std::int64_t>(sum)[0];
  };
  EXPECT_EQ(sum_along("dp"), world_rank() % 2 == 0 ? 0x00010001 : 0x01000100);
  EXPECT_EQ(sum_along("tp"), world_rank() < 2 ? 0x00000101 : 0x01010000);
  mesh.close();
}

TEST(DeviceMesh, WrongSizeIsTheSameErrorOnAllRanks) {
  for (const std::int64_t wrong : {world_size() + 1, 2 * world_size(), std::int64_t{1} << 40}) {
    const std::string message = common_error<ConfigError>([&] {
      DeviceMesh(MPI_COMM_WORLD, {{"dp", wrong}, {"tp", 1}}, "net");
    });
    for (const std::string& part :
         {std::string("\"net\""), "dp=" + std::to_string(wrong) + ",tp=1", "has " + std::to_string(world_size())})
      EXPECT_NE(message.find(part), std::string::npos) << message << " lacks " << part;
  }
  if (world_size() > 1) common_error<ConfigError>([] { DeviceMesh(MPI_COMM_WORLD, {{"dp", 1}}); });
  common_error<ConfigError>([] { DeviceMesh(MPI_COMM_WORLD, {{"dp", 0}}); });
  common_error<ConfigError>([] { DeviceMesh(MPI_COMM_WORLD, std::vector<MeshAxis>{}); });
}

TEST(DeviceMesh, RankListOfOtherRanksIsTheSameErrorOnAllRanks) {
  std::vector<std::int64_t> shifted(static_cast<std::size_t>(world_size()));
  std::iota(shifted.begin(), shifted.end(), 1);
  common_error<ConfigError>([&] { DeviceMesh(MPI_COMM_WORLD, MeshSpec({{"dp", world_size()}}, shifted)); });
}

TEST(DeviceMesh, UnknownAxisListsTheAxes) {
  DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", world_size()}, {"tp", 1}});
  const std::string message = common_error<ConfigError>([&] { mesh.communicator("pp"); });
  EXPECT_NE(message.find("\"pp\""), std::string::npos) << message;
  EXPECT_NE(message.find("dp=" + std::to_string(world_size()) + ",tp=1"), std::string::npos) << message;
  mesh.close();
}

TEST(DeviceMesh, CallersCommunicatorMayBeFreed) {
  MPI_Comm own = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &own);
  DeviceMesh mesh(own, {{"dp", world_size()}});
  MPI_Comm_free(&own);
  check_axes(mesh);
  mesh.host().barrier();
  mesh.close();
}

TEST(DeviceMesh, WorksOnPartOfTheWorld) {
  MPI_Comm half = MPI_COMM_NULL;
  const bool is_even = world_rank() % 2 == 0;
  MPI_Comm_split(MPI_COMM_WORLD, is_even ? 0 : 1, 0, &half);
  int size = 0;
  MPI_Comm_size(half, &size);
  DeviceMesh mesh(half, {{"dp", size}});
  EXPECT_EQ(mesh.size(), size);
  EXPECT_EQ(mesh.rank(), world_rank() / 2);
  std::vector<std::int64_t> expected;
  for (std::int64_t r = is_even ? 0 : 1; r < world_size(); r += 2) expected.push_back(r);
  EXPECT_EQ(members(mesh.communicator("dp")), expected);
  mesh.close();
  MPI_Comm_free(&half);
}

TEST(DeviceMesh, HandlesShareOneMesh) {
  DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", world_size()}}, "fields");
  const DeviceMesh copy = mesh;
  EXPECT_TRUE(copy == mesh);
  EXPECT_EQ(copy.name(), "fields");
  EXPECT_EQ(&copy.communicator("dp"), &mesh.communicator("dp"));
  DeviceMesh other(MPI_COMM_WORLD, {{"dp", world_size()}}, "fields");
  EXPECT_FALSE(other == mesh);
  other.close();
  mesh.close();
}

TEST(DeviceMesh, ClosedMeansClosed) {
  DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", world_size()}});
  Communicator& comm = mesh.communicator("dp");
  mesh.close();
  EXPECT_THROW(comm.barrier(), CommError);
}

TEST(DeviceMesh, SaveIdsAgreeOnAllRanksAndNeverRepeat) {
  DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", world_size()}});
  DeviceMesh other(MPI_COMM_WORLD, {{"dp", world_size()}});
  const std::string first = mesh.next_save_id();
  const std::string second = mesh.next_save_id();
  EXPECT_EQ(first.size(), 32u);
  EXPECT_EQ(first.find_first_not_of("0123456789abcdef"), std::string::npos) << first;
  EXPECT_EQ(first.substr(0, 16), second.substr(0, 16));
  EXPECT_EQ(first.substr(16), "0000000000000000");
  EXPECT_EQ(second.substr(16), "0000000000000001");
  EXPECT_NE(other.next_save_id().substr(0, 16), first.substr(0, 16));
  for (const std::string& text : by_rank(second)) EXPECT_EQ(text, second);
  other.close();
  mesh.close();
}

}  // namespace
}  // namespace fsdp2
