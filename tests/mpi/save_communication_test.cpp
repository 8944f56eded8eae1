// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
// Promise 3, seen from outside: every communicating MPI call of the process is recorded.

#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "support/checkpoint.hpp"
#include "support/mpi_calls.hpp"

namespace fsdp2 {
namespace {

using test::at_first_call;
using test::calls;

TEST(SaveCommunication, NoneUntilEveryByteIsWrittenThenTheAgreements) {
  const testing::ScratchDirectory scratch;
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", size}});
  StateDict state;
  testing::add_tensor(state, mesh, "w", DType::f32, {100, 100}, {Shard{0}}, true);
  testing::add_tensor(state, mesh, "r", DType::bf16, {100, 100}, {Replicate{}}, true);

  std::vector<std::string> seen;
  std::int64_t size_at_first_call = -1;
  const std::string shard = shard_file_name(static_cast<std::size_t>(mesh.rank()), static_cast<std::size_t>(size));
  at_first_call = [&] {
    for (const std::string& name : testing::names_in(scratch.path()))
      if (std::filesystem::exists(scratch / name / shard))
        size_at_first_call = static_cast<std::int64_t>(testing::file_bytes(scratch / name / shard).size());
  };
  calls = &seen;
  save(scratch / "saved", state, {.sizes = testing::small_blocks()});
  calls = nullptr;
  at_first_call = nullptr;

  if (size == 1) {
    EXPECT_TRUE(seen.empty());
  } else {
    EXPECT_EQ(seen, (std::vector<std::string>{"Allreduce", "Allreduce", "Bcast"}));
    EXPECT_EQ(size_at_first_call, static_cast<std::int64_t>(std::filesystem::file_size(scratch / "saved" / shard)));
  }
  mesh.close();
}

/// Ranks of one file exchange counts while they plan, and nothing more.
TEST(SaveCommunication, RanksOfOneFileDoNotWaitForEachOther) {
  const testing::ScratchDirectory scratch;
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", size}});
  StateDict state;
  testing::add_tensor(state, mesh, "w", DType::f32, {100, 100}, {Shard{0}}, true);
  const SaveOptions options{.sizes = testing::small_blocks(), .ranks_per_file = FileGroups::world};
  save(scratch / "first", state, options);  // makes the communicator of the file
  const std::vector<std::string> seen = test::calls_of([&] { save(scratch / "second", state, options); });
  if (size == 1)
    EXPECT_TRUE(seen.empty());
  else
    EXPECT_EQ(seen, (std::vector<std::string>{"Allgather", "Allgatherv", "Allreduce", "Allreduce", "Bcast"}));
  mesh.close();
}

/// What ranks must agree on is known before the tensors are copied; while they are written nobody communicates.
TEST(SaveCommunication, AsynchronousSavesAgreeWhenTheyAreAskedHowTheyAre) {
  const testing::ScratchDirectory scratch;
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", size}});
  StateDict state;
  testing::add_tensor(state, mesh, "w", DType::f32, {100, 100}, {Shard{0}}, true);
  AsyncSaver saver;
  saver.save(scratch / "first", state, {.sizes = testing::small_blocks()});  // makes the communicator
  saver.wait();
  const std::vector<std::string> begin =
      test::calls_of([&] { saver.save(scratch / "second", state, {.sizes = testing::small_blocks()}); });
  const std::string shard = shard_file_name(static_cast<std::size_t>(mesh.rank()), static_cast<std::size_t>(size));
  const std::vector<std::string> meanwhile =
      test::calls_of([&] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
  const std::vector<std::string> end = test::calls_of([&] { saver.wait(); });
  EXPECT_TRUE(std::filesystem::exists(scratch / "second" / shard));
  EXPECT_TRUE(meanwhile.empty());
  EXPECT_EQ(begin, size == 1 ? std::vector<std::string>() : (std::vector<std::string>{"Allreduce", "Allreduce"}));
  EXPECT_EQ(end,
            size == 1 ? std::vector<std::string>() : (std::vector<std::string>{"Iallreduce", "Iallreduce", "Ibcast"}));
  mesh.close();
}

TEST(SaveCommunication, TheWrappersSeeCalls) {
  std::vector<std::string> seen;
  calls = &seen;
  int value = 1;
  MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  calls = nullptr;
  EXPECT_EQ(seen, std::vector<std::string>{"Allreduce"});
}

}  // namespace
}  // namespace fsdp2
