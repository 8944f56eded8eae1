// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// Ranks that do not do the same, or do nothing: errors instead of hangs.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "comm/host_communicator.hpp"
#include "fsdp2/error.hpp"
#include "fsdp2/log.hpp"
#include "fsdp2/model.hpp"
#include "support/fsdp.hpp"

namespace {
std::atomic<int> messages_sent = 0;
std::atomic<int> tests_made = 0;
int pretended_thread_level = -1;
}  // namespace

// The linker prefers these to MPI's own.
extern "C" {
int MPI_Isend(const void* b, int n, MPI_Datatype t, int d, int g, MPI_Comm c, MPI_Request* r) {
  ++messages_sent;
  return PMPI_Isend(b, n, t, d, g, c, r);
}
int MPI_Testall(int n, MPI_Request* r, int* flag, MPI_Status* s) {
  ++tests_made;
  return PMPI_Testall(n, r, flag, s);
}
int MPI_Query_thread(int* provided) {
  const int code = PMPI_Query_thread(provided);
  if (pretended_thread_level >= 0) *provided = pretended_thread_level;
  return code;
}
}

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

  /// The message of the CommError that all ranks get.
  static std::string common_error(const std::function<void()>& call) {
    std::string message = message_of<CommError>(call);
    expect_common(message);
    return message;
  }
  static void expect_common(const std::string& message) {
    HostCommunicator host(MPI_COMM_WORLD, "test");
    for (const std::string& other : host.all_gather(message)) EXPECT_EQ(other, message);
    host.close();
  }

  Transfer gather(std::int64_t count, DType dtype = DType::f32) const {
    return {Tensor(exec_, dtype, {count}, "fsdp2::test"), Tensor(exec_, dtype, {count * ranks_}, "fsdp2::test")};
  }

  ExecutionSpace exec_;
  std::int64_t ranks_ = 1;
  std::int64_t rank_ = 0;
};

TEST_F(CheckedCommunicatorTest, RanksThatDisagreeAllSayWhoWantsWhat) {
  const auto communicator = make({.checked = true, .timeout_seconds = 20});
  std::vector<std::int64_t> others(static_cast<std::size_t>(ranks_ - 1));
  std::iota(others.begin(), others.end(), 0);
  const std::string all_others = fmt::format("{}", fmt::join(others, ", "));
  int operation = 0;
  const auto expect = [&](const std::string& odd, const std::function<void()>& odd_call, const std::string& common,
                          const std::function<void()>& common_call) {
    ++operation;
    const std::string message = common_error([&] { is_odd_one() ? odd_call() : common_call(); });
    for (const std::string& part :
         {std::string("\"group\""), fmt::format("rank(s) {}: operation {}{}", ranks_ - 1, operation, odd),
          fmt::format("rank(s) {}: operation {}{}", all_others, operation, common)})
      EXPECT_TRUE(contains(message, part)) << message << " lacks " << part;
  };
  const Transfer four = gather(4);
  const Transfer five = gather(5);
  const Transfer halves = gather(4, DType::bf16);
  const std::vector<Transfer> two{four, five};
  const Transfer square{four.receive, five.receive.slice(0, {four.receive.numel()})};
  const Transfer back{four.receive, four.send};
  const Tensor buffer(exec_, DType::f32, {4}, "fsdp2::test");
  const auto all_gather = [&](const Transfer& transfer) {
    return [&] { communicator->all_gather(exec_, {&transfer, 1}).wait(); };
  };
  const auto barrier = [&] { communicator->barrier(); };
  const auto all_reduce = [&](ReduceOp op) { return [&, op] { communicator->all_reduce(exec_, buffer, op).wait(); }; };
  const auto broadcast = [&](std::int64_t root) {
    return [&, root] { communicator->broadcast(exec_, buffer, root).wait(); };
  };
  const auto reduce_scatter = [&](ReduceOp op) {
    return [&, op] { communicator->reduce_scatter(exec_, {&back, 1}, op).wait(); };
  };
  expect(": all_gather 5 f32", all_gather(five), ": all_gather 4 f32", all_gather(four));
  expect(": all_gather 4 bf16", all_gather(halves), ": all_gather 4 f32", all_gather(four));
  expect(
      ": all_gather 4 f32 5 f32", [&] { communicator->all_gather(exec_, two).wait(); }, ": all_gather 4 f32",
      all_gather(four));
  expect(
      ": all_gather", [&] { communicator->all_gather(exec_, {}).wait(); }, ": all_gather 4 f32", all_gather(four));
  expect(": all_reduce (max) 4 f32", all_reduce(ReduceOp::max), ": all_reduce (sum) 4 f32", all_reduce(ReduceOp::sum));
  expect(
      ": all_reduce (sum) 0 f32", [&] { communicator->all_reduce(exec_, buffer.slice(0, {0}), ReduceOp::sum).wait(); },
      ": all_reduce (sum) 4 f32", all_reduce(ReduceOp::sum));
  expect(fmt::format(": reduce_scatter (min) {} f32", 4 * ranks_), reduce_scatter(ReduceOp::min),
         fmt::format(": reduce_scatter (sum) {} f32", 4 * ranks_), reduce_scatter(ReduceOp::sum));
  expect(": broadcast from 0: 4 f32", broadcast(0), ": broadcast from 1: 4 f32", broadcast(1));
  expect(
      fmt::format(": all_to_all {} f32", 4 * ranks_),
      [&] {
        communicator->all_to_all(exec_, {&square, 1}).wait();
      },
      ": broadcast from 1: 4 f32", broadcast(1));
  // two operations in another order
  expect(": barrier", barrier, ": all_gather 4 f32", all_gather(four));
  expect(": all_gather 4 f32", all_gather(four), ": barrier", barrier);
  expect(
      ": split", [&] { communicator->split(0, 0, "part"); }, ": barrier", barrier);
  communicator->set_context(is_odd_one() ? "layer2" : "layer1");
  expect(" for \"layer2\": all_gather 4 f32", all_gather(four), " for \"layer1\": all_gather 4 f32", all_gather(four));
  communicator->set_context("");
  // Nothing was started: what they agree on works.
  const Tensor number = make_tensor({1}, {static_cast<float>(rank_)});
  communicator->all_reduce(exec_, number, ReduceOp::sum).wait();
  EXPECT_EQ(to_host(number)[0], static_cast<float>(ranks_ * (ranks_ - 1) / 2));
  communicator->close();
}

// Descriptions that are too long for MPI to send before somebody receives, and for an error.
TEST_F(CheckedCommunicatorTest, LargeGroupsAreComparedToTheEnd) {
  const auto communicator = make({.checked = true, .timeout_seconds = 20});
  std::vector<Transfer> transfers(3000, gather(0));
  communicator->all_gather(exec_, transfers).wait();
  if (is_odd_one()) transfers[2900] = gather(5, DType::i16);
  const std::string message = common_error([&] { communicator->all_gather(exec_, transfers).wait(); });
  EXPECT_LT(message.size(), 1000u);
  for (const char* part : {"operation 2: all_gather 0 f32", "0 f32 5 i16 0 f32"})
    EXPECT_TRUE(contains(message, part)) << message << " lacks " << part;
  communicator->close();
}

TEST_F(CheckedCommunicatorTest, WhoDoesNotComeIsNamed) {
  for (const std::size_t count : {1u, 3000u}) {
    const auto communicator = make({.checked = true, .timeout_seconds = 2});
    const std::vector<Transfer> transfers(count, gather(0));
    communicator->set_context("layer3");
    std::string message;
    const auto call = [&] { message = message_of<CommError>([&] { communicator->all_gather(exec_, transfers); }); };
    if (!is_odd_one()) call();
    MPI_Barrier(MPI_COMM_WORLD);
    if (is_odd_one()) call();  // too late: it learns what the others know
    expect_common(message);
    for (const std::string& part :
         {fmt::format("rank(s) {} did not come", ranks_ - 1), std::string("for \"layer3\": all_gather 0 f32")})
      EXPECT_TRUE(contains(message, part)) << message << " lacks " << part;
    EXPECT_LT(message.size(), 1000u);
    EXPECT_EQ(message_of<CommError>([&] { communicator->barrier(); }), message);  // it is dead, and says so
    MPI_Barrier(MPI_COMM_WORLD);
    communicator->close();
  }
}

TEST_F(CheckedCommunicatorTest, TheFirstRankIsMissedToo) {
  for (const std::size_t count : {1u, 3000u}) {
    const auto communicator = make({.checked = true, .timeout_seconds = 0.3});
    const std::vector<Transfer> transfers(count, gather(0));
    if (rank_ != 0) {
      const std::string message = message_of<CommError>([&] { communicator->all_gather(exec_, transfers); });
      EXPECT_TRUE(contains(message, "rank 0 did not come")) << message;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    communicator->close();
  }
}

TEST_F(CheckedCommunicatorTest, NobodyWaitsForEverInASplit) {
  for (const bool is_checked : {false, true}) {
    const auto communicator = make({.checked = is_checked, .timeout_seconds = 0.3});
    if (!is_odd_one()) {
      const std::string message = message_of<CommError>([&] { communicator->split(0, 0, "part"); });
      EXPECT_TRUE(contains(message, "split")) << message;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    communicator->close();
  }
}

TEST_F(CheckedCommunicatorTest, ADeadCommunicatorSaysSoInEveryCall) {
  const auto communicator = make({.checked = false, .timeout_seconds = 0.3, .progress_thread = true});
  if (!is_odd_one()) {
    const Transfer gathering = gather(100000);
    const Transfer back{gathering.receive, gathering.send};
    Work work = communicator->all_gather(exec_, {&gathering, 1});
    Work other = communicator->all_gather(exec_, {&gathering, 1});
    { const Work dropped = communicator->all_gather(exec_, {&gathering, 1}); }
    const std::string message = message_of<CommError>([&] { work.wait(); });
    EXPECT_TRUE(work.finished());
    for (const std::function<void()>& call : std::vector<std::function<void()>>{
             [&] { other.test(); }, [&] { other.wait(); },
             [&] {
               communicator->all_gather(exec_, {&gathering, 1});
             },
             [&] {
               communicator->reduce_scatter(exec_, {&back, 1}, ReduceOp::sum);
             },
             [&] { communicator->all_reduce(exec_, gathering.send, ReduceOp::sum); },
             [&] { communicator->broadcast(exec_, gathering.send, 0); }, [&] { communicator->all_to_all(exec_, {}); },
             [&] { communicator->barrier(); }, [&] { communicator->split(0, 0, "part"); }})
      EXPECT_EQ(message_of<CommError>(call), message);
    communicator->close();
    communicator->close();
    EXPECT_EQ(message_of<CommError>([&] { communicator->barrier(); }), message);
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST_F(CheckedCommunicatorTest, ADeadCommunicatorCanBeDestroyed) {
  std::vector<std::string> messages;
  set_log_sink([&](LogLevel, std::string_view message) { messages.emplace_back(message); });
  {
    const auto communicator = make({.checked = false, .timeout_seconds = 0.2, .progress_thread = true});
    const Transfer gathering = gather(100000);
    if (!is_odd_one()) {
      EXPECT_THROW(communicator->all_gather(exec_, {&gathering, 1}).wait(), CommError);
    }
  }
  set_log_sink({});
  EXPECT_EQ(messages.size(), 1u);
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST_F(CheckedCommunicatorTest, OnlyChecksSendMessages) {
  const auto sent_by_all_operations = [&](bool is_checked) {
    const auto communicator = make({.checked = is_checked});
    const Transfer gathering = gather(4);
    const Transfer back{gathering.receive, gathering.send};
    const int before = messages_sent;
    communicator->all_gather(exec_, {&gathering, 1}).wait();
    communicator->reduce_scatter(exec_, {&back, 1}, ReduceOp::sum).wait();
    communicator->broadcast(exec_, gathering.send, 0).wait();
    communicator->all_to_all(exec_, {}).wait();
    communicator->barrier();
    communicator->split(0, 0, "part")->close();
    const int sent = messages_sent - before;
    communicator->close();
    return sent;
  };
  EXPECT_EQ(sent_by_all_operations(false), 0);
  EXPECT_EQ(sent_by_all_operations(true), 6 * (rank_ == 0 ? ranks_ - 1 : 1));
}

// A second communicator over the same ranks, as reductions have it beside gathers.
TEST_F(CheckedCommunicatorTest, APartInheritsTheOptionsAndLivesOnItsOwn) {
  const auto communicator = make({.checked = true, .timeout_seconds = 2});
  const auto part = communicator->split(0, communicator->rank(), "part");
  EXPECT_EQ(part->rank(), rank_);
  communicator->close();
  const Transfer transfer = gather(is_odd_one() ? 4 : 5);
  EXPECT_TRUE(contains(common_error([&] { part->all_gather(exec_, {&transfer, 1}); }), "\"part\""));
  if (!is_odd_one()) {
    EXPECT_TRUE(contains(message_of<CommError>([&] { part->barrier(); }), "within 2 s"));
  }
  MPI_Barrier(MPI_COMM_WORLD);
  part->close();
}

TEST_F(CheckedCommunicatorTest, TimeOutsAreNumbersFromZero) {
  for (const double seconds : {-1.0, std::numeric_limits<double>::quiet_NaN()})
    EXPECT_TRUE(contains(message_of<ConfigError>([&] { make({.timeout_seconds = seconds}); }), "time-out"));
  const auto communicator = make({.timeout_seconds = 0});
  communicator->barrier();
  communicator->close();
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
    communicator->close();
  }
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
  const CommunicatorOptions options{.checked = false, .timeout_seconds = 60, .progress_thread = true};
  const auto gathers = make(options);
  const auto sums = gathers->split(0, gathers->rank(), "sums");
  std::uint32_t state = 11 + static_cast<std::uint32_t>(rank_);
  const auto random = [&](std::uint32_t below) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % below;
  };
  const auto pause = [&] {
    if (random(3) == 0) std::this_thread::sleep_for(std::chrono::microseconds(random(300)));
  };
  for (int round = 0; round < 200; ++round) {
    const std::int64_t count = 1 + round * 97 % 5000;
    const auto length = static_cast<std::size_t>(count);
    const Transfer gathering{make_tensor({count}, std::vector<float>(length, static_cast<float>(rank_ + round))),
                             Tensor(exec_, DType::f32, {count * ranks_}, "fsdp2::test")};
    const Transfer summing{make_tensor({count * ranks_}, ramp({count * ranks_}, static_cast<float>(rank_ + round))),
                           Tensor(exec_, DType::f32, {count}, "fsdp2::test")};
    std::vector<Work> works;
    if (random(2) == 0) works.push_back(sums->reduce_scatter(exec_, {&summing, 1}, ReduceOp::sum));
    pause();
    works.push_back(gathers->all_gather(exec_, {&gathering, 1}));
    if (works.size() == 1) works.push_back(sums->reduce_scatter(exec_, {&summing, 1}, ReduceOp::sum));
    pause();
    if (random(2) == 0) std::swap(works[0], works[1]);
    for (Work& work : works) {
      if (random(2) == 0) work.test();
      pause();
      work.wait();
    }
    std::vector<float> all;
    for (std::int64_t rank = 0; rank < ranks_; ++rank) all.insert(all.end(), length, static_cast<float>(rank + round));
    EXPECT_EQ(to_host(gathering.receive), all);
    EXPECT_EQ(to_host(summing.receive),
              ramp({count}, static_cast<float>(ranks_ * (ranks_ - 1) / 2 + ranks_ * round + ranks_ * count * rank_),
                   static_cast<float>(ranks_)));
    if (random(4) == 0) std::this_thread::sleep_for(std::chrono::microseconds(random(500)));
  }
  sums->close();
  gathers->close();
}

// Dropped operations are finished at the end, by whoever is first.
TEST_F(CheckedCommunicatorTest, CloseEndsTheProgressThread) {
  for (int round = 0; round < 20; ++round) {
    const auto communicator = make({.progress_thread = true});
    const Transfer transfer{make_tensor({20000}, std::vector<float>(20000, static_cast<float>(rank_))),
                            Tensor(exec_, DType::f32, {20000 * ranks_}, "fsdp2::test")};
    communicator->all_gather(exec_, {&transfer, 1});
    communicator->close();
    const std::vector<float> values = to_host(transfer.receive);
    for (std::int64_t rank = 0; rank < ranks_; ++rank)
      EXPECT_EQ(values[static_cast<std::size_t>(20000 * rank + 19999)], static_cast<float>(rank));
  }
}

TEST_F(CheckedCommunicatorTest, AnIdleProgressThreadLeavesMpiAlone) {
  const auto communicator = make({.progress_thread = true});
  communicator->barrier();
  bool is_idle = false;
  for (int i = 0; i < 200 && !is_idle; ++i) {
    const int before = tests_made;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    is_idle = tests_made == before;
  }
  EXPECT_TRUE(is_idle);
  communicator->close();
}

TEST_F(CheckedCommunicatorTest, AProgressThreadNeedsAnMpiForThreads) {
  const auto communicator = make({.progress_thread = true});
  pretended_thread_level = MPI_THREAD_FUNNELED;
  const auto expect = [](const std::function<void()>& call) {
    const std::string message = message_of<ConfigError>(call);
    for (const char* part : {"progress thread", "MPI_THREAD_FUNNELED", "MPI_THREAD_MULTIPLE", "MPI_Init_thread"})
      EXPECT_TRUE(contains(message, part)) << message << " lacks " << part;
  };
  expect([&] { make({.progress_thread = true}); });
  expect([&] { communicator->split(0, 0, "part"); });
  expect([&] { DeviceMesh(MPI_COMM_WORLD, {{"dp", ranks_}}, "mesh", {.progress_thread = true}); });
  make({.progress_thread = false})->close();
  pretended_thread_level = -1;
  communicator->barrier();
  communicator->close();
}

}  // namespace
}  // namespace fsdp2::test
