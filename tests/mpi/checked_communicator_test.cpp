// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// Ranks that do not do the same, or do nothing: errors instead of hangs.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "fsdp2/error.hpp"
#include "fsdp2/model.hpp"
#include "support/fsdp.hpp"

namespace fsdp2::test {
namespace {

class CheckedCommunicatorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int size = 0;
    int rank = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    ranks_ = size;
    rank_ = rank;
    if (ranks_ == 1) GTEST_SKIP() << "needs ranks to differ";
  }
  static std::unique_ptr<Communicator> make(const CommunicatorOptions& options) {
    return make_mpi_communicator(MPI_COMM_WORLD, "group", options);
  }
  bool is_odd_one() const { return rank_ == ranks_ - 1; }

  Transfer gather(std::int64_t count, DType dtype = DType::f32) const {
    return {Tensor(exec_, dtype, {count}, "fsdp2::test"), Tensor(exec_, dtype, {count * ranks_}, "fsdp2::test")};
  }

  ExecutionSpace exec_;
  std::int64_t ranks_ = 1;
  std::int64_t rank_ = 0;
};

TEST_F(CheckedCommunicatorTest, RanksThatDisagreeAllSayWhoWantsWhat) {
  const auto communicator = make({.checked = true, .timeout_seconds = 20});
  const auto expect = [&](const std::function<void()>& call, const std::vector<std::string>& parts) {
    const std::string message = message_of<CommError>(call);
    for (const std::string& part : parts) EXPECT_TRUE(contains(message, part)) << message << " lacks " << part;
    EXPECT_TRUE(contains(message, "\"group\"") && contains(message, "rank 0:") &&
                contains(message, fmt::format("rank {}:", ranks_ - 1)))
        << message;
  };
  const Transfer four = gather(4);
  const Transfer five = gather(5);
  const Transfer halves = gather(4, DType::bf16);
  const Tensor buffer(exec_, DType::f32, {4}, "fsdp2::test");
  expect(
      [&] {
        communicator->all_gather(exec_, {is_odd_one() ? &five : &four, 1}).wait();
      },
      {"all_gather 4 f32", "all_gather 5 f32"});
  expect([&] { communicator->all_gather(exec_, {is_odd_one() ? &halves : &four, 1}).wait(); }, {"4 f32", "4 bf16"});
  expect([&] { communicator->all_reduce(exec_, buffer, is_odd_one() ? ReduceOp::max : ReduceOp::sum).wait(); },
         {"all_reduce (max)", "all_reduce (sum)"});
  expect([&] { communicator->broadcast(exec_, buffer, is_odd_one() ? 0 : 1).wait(); },
         {"broadcast from 0", "broadcast from 1"});
  expect(
      [&] {
        if (is_odd_one())
          communicator->barrier();
        else
          communicator->all_gather(exec_, {&four, 1}).wait();
      },
      {"barrier", "all_gather"});
  communicator->set_context(is_odd_one() ? "layer2" : "layer1");
  expect([&] { communicator->all_gather(exec_, {&four, 1}).wait(); }, {"\"layer1\"", "\"layer2\""});
  communicator->set_context("");
  // Nothing was started: what they agree on works.
  const Tensor number = make_tensor({1}, {static_cast<float>(rank_)});
  communicator->all_reduce(exec_, number, ReduceOp::sum).wait();
  EXPECT_EQ(to_host(number)[0], static_cast<float>(ranks_ * (ranks_ - 1) / 2));
  communicator->close();
}

TEST_F(CheckedCommunicatorTest, WhoDoesNotComeIsNamed) {
  const auto communicator = make({.checked = true, .timeout_seconds = 2});
  if (!is_odd_one()) {
    const Transfer transfer = gather(4);
    const std::string message = message_of<CommError>([&] { communicator->all_gather(exec_, {&transfer, 1}).wait(); });
    EXPECT_TRUE(contains(message, fmt::format("rank(s) {} did not come", ranks_ - 1))) << message;
    EXPECT_EQ(message_of<CommError>([&] { communicator->barrier(); }), message);  // it is dead, and says so
  }
  communicator->close();
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST_F(CheckedCommunicatorTest, WithoutChecksAnOperationThatDoesNotEndIsAnError) {
  const auto communicator = make({.checked = false, .timeout_seconds = 0.3});
  if (!is_odd_one()) {
    const Transfer transfer = gather(100000);
    Work work = communicator->all_gather(exec_, {&transfer, 1});
    const std::string message = message_of<CommError>([&] { work.wait(); });
    EXPECT_TRUE(contains(message, "all_gather") && contains(message, "0.3 s") && contains(message, "checked"))
        << message;
    EXPECT_EQ(message_of<CommError>([&] { communicator->all_gather(exec_, {&transfer, 1}).wait(); }), message);
  }
  communicator->close();
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST_F(CheckedCommunicatorTest, ModulesInAnotherOrderAreNamed) {
  DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", ranks_}}, "mesh", {.checked = true, .timeout_seconds = 20});
  {
    Model model({.mesh = mesh, .min_shard_size = 0});
    Module& a = model.add("a", {{"w", {6, 5}, init::ones()}});
    Module& b = model.add("b", {{"w", {6, 5}, init::ones()}});
    const std::string message = message_of<CommError>([&] { run_forward(is_odd_one() ? a : b); });
    EXPECT_TRUE(contains(message, "\"a\"") && contains(message, "\"b\"")) << message;
    model.reset();
    run_forward(a);
  }
  mesh.close();
}

TEST_F(CheckedCommunicatorTest, AProgressThreadMovesDataWhileNobodyCalls) {
  const auto communicator = make({.checked = false, .timeout_seconds = 60, .progress_thread = true});
  constexpr std::int64_t count = 1 << 20;  // far above what MPI sends at once
  for (int round = 0; round < 3; ++round) {
    const Transfer transfer{make_tensor({count}, std::vector<float>(count, static_cast<float>(rank_ + 1 + round))),
                            Tensor(exec_, DType::f32, {count * ranks_}, "fsdp2::test")};
    Work work = communicator->all_gather(exec_, {&transfer, 1});
    if constexpr (Kokkos::SpaceAccessibility<Kokkos::HostSpace, MemorySpace>::accessible) {
      auto* const data = reinterpret_cast<float*>(transfer.receive.data());
      const auto has_come = [&](std::int64_t rank) {
        const std::atomic_ref<float> last(data[count * (rank + 1) - 1]);
        return last.load() == static_cast<float>(rank + 1 + round);
      };
      const auto start = std::chrono::steady_clock::now();
      bool is_there = false;
      while (!is_there && std::chrono::steady_clock::now() - start < std::chrono::seconds(30)) {
        is_there = true;
        for (std::int64_t rank = 0; rank < ranks_; ++rank) is_there = is_there && has_come(rank);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      EXPECT_TRUE(is_there);
    }
    work.wait();
  }
  communicator->close();
}

TEST_F(CheckedCommunicatorTest, ProgressThreadsAndCallersShareOperations) {
  const auto communicator = make({.checked = true, .timeout_seconds = 60, .progress_thread = true});
  std::uint32_t state = 11 + static_cast<std::uint32_t>(rank_);
  for (int round = 0; round < 100; ++round) {
    const std::int64_t count = 1 + round * 97 % 5000;
    const Transfer transfer{make_tensor({count * ranks_}, std::vector<float>(static_cast<std::size_t>(count * ranks_),
                                                                             static_cast<float>(rank_ + round))),
                            Tensor(exec_, DType::f32, {count}, "fsdp2::test")};
    Work work = communicator->reduce_scatter(exec_, {&transfer, 1}, ReduceOp::sum);
    state = state * 1664525u + 1013904223u;
    if (state % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(state % 300));
    if (state % 2 == 0) work.test();
    work.wait();
    EXPECT_EQ(to_host(transfer.receive),
              std::vector<float>(static_cast<std::size_t>(count),
                                 static_cast<float>(ranks_ * (ranks_ - 1) / 2 + ranks_ * round)));
  }
  communicator->close();
}

}  // namespace
}  // namespace fsdp2::test
