// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// Saves that go on in the background.

#include <gtest/gtest.h>
#include <hdf5.h>
#include <mpi.h>

#include <filesystem>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "fsdp2/checkpoint/verify.hpp"
#include "support/checkpoint.hpp"

namespace fsdp2::testing {
namespace {

class AsyncSave : public ::testing::Test {
 public:
  void SetUp() override {
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    mesh_ = DeviceMesh(MPI_COMM_WORLD, {{"dp", size_}});
  }
  void TearDown() override { mesh_.close(); }

  StateDict make(bool has_values, std::int64_t rows = 300) const {
    StateDict state;
    add_tensor(state, mesh_, "cut", DType::f32, {rows, 50}, {Shard{0}}, has_values);
    add_tensor(state, mesh_, "empty", DType::f32, {0, 3}, {Shard{0}}, has_values);
    add_tensor(state, mesh_, "half", DType::bf16, {17, 5}, {Shard{0}}, has_values);
    add_tensor(state, mesh_, "whole", DType::f64, {rows}, {Replicate{}}, has_values);
    return state;
  }
  static void overwrite(const StateDict& state) {
    for (const auto& [name, tensor] : state.tensors)
      set_bytes(tensor.local(), Bytes(static_cast<std::size_t>(tensor.local().bytes()), std::byte{0xee}));
  }
  void expect_saved(const std::filesystem::path& path, std::int64_t rows = 300) const {
    const StateDict loaded = make(false, rows);
    load(path, loaded);
    expect_values(loaded);
    if (rank_ == 0) {
      EXPECT_TRUE(verify(path).is_valid());
    }
  }
  bool exists(const std::filesystem::path& path) const {
    MPI_Barrier(MPI_COMM_WORLD);
    const bool is_there = std::filesystem::exists(path);
    MPI_Barrier(MPI_COMM_WORLD);
    return is_there;
  }

 protected:
  ScratchDirectory scratch_;
  int size_ = 1;
  int rank_ = 0;
  DeviceMesh mesh_;
};

TEST_F(AsyncSave, KeepsTheValuesOfItsBeginning) {
  AsyncSaver saver;
  for (const std::variant<std::int64_t, FileGroups> ranks_per_file :
       {std::variant<std::int64_t, FileGroups>(std::int64_t{1}), {std::int64_t{2}}, {FileGroups::world}})
    for (const std::int64_t rows : {300, 20, 500}) {  // the image shrinks and grows
      const StateDict state = make(true, rows);
      saver.save(scratch_ / "step", state,
                 {.sizes = small_blocks(), .ranks_per_file = ranks_per_file, .overwrite = true});
      overwrite(state);
      EXPECT_TRUE(saver.is_saving());
      saver.wait();
      EXPECT_FALSE(saver.is_saving());
      expect_saved(scratch_ / "step", rows);
    }
}

// Between two polls the ranks meet in collectives of their own, as training does: a poll that waited would hang.
TEST_F(AsyncSave, PollWaitsForNobody) {
  AsyncSaver saver;
  const StateDict state = make(true);
  saver.save(scratch_ / "step", state, {.sizes = small_blocks()});
  bool is_over = false;
  const double begin = MPI_Wtime();
  for (int turn = 0; !is_over; ++turn) {
    ASSERT_LT(MPI_Wtime() - begin, 60.0);
    // One rank polls while the others are on their way to the barrier.
    if (turn % size_ == rank_) (void)saver.poll();
    int is_done = saver.poll() ? 1 : 0;
    MPI_Allreduce(MPI_IN_PLACE, &is_done, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    is_over = is_done != 0;
  }
  EXPECT_TRUE(std::filesystem::exists(scratch_ / "step"));
  EXPECT_TRUE(saver.is_saving());
  saver.wait();
  EXPECT_TRUE(saver.poll());
  expect_saved(scratch_ / "step");
}

TEST_F(AsyncSave, OneAtATime) {
  AsyncSaver saver;
  const StateDict state = make(true);
  saver.wait();  // nothing to wait for
  EXPECT_TRUE(saver.poll());
  saver.save(scratch_ / "first", state, {.sizes = small_blocks()});
  const std::string message = same_error<Error>(mesh_.host(), [&] { saver.save(scratch_ / "second", state); });
  EXPECT_NE(message.find("wait()"), std::string::npos) << message;
  AsyncSaver other = std::move(saver);
  other.wait();
  expect_saved(scratch_ / "first");
  EXPECT_FALSE(exists(scratch_ / "second"));
}

TEST_F(AsyncSave, WhatIsKnownAtTheBeginningIsThrownThen) {
  AsyncSaver saver;
  const StateDict state = make(true);
  std::filesystem::create_directories(scratch_ / "taken");
  MPI_Barrier(MPI_COMM_WORLD);
  same_error<IoError>(mesh_.host(), [&] { saver.save(scratch_ / "taken", state); });
  EXPECT_FALSE(saver.is_saving());
  same_error<ConfigError>(mesh_.host(), [&] { saver.save(scratch_ / "json", state, {.metadata = "{"}); });
  if (size_ > 1) {
    StateDict odd = make(true, rank_ == size_ - 1 ? 301 : 300);
    same_error<MismatchError>(mesh_.host(), [&] { saver.save(scratch_ / "odd", odd); });
  }
  saver.save(scratch_ / "good", state, {.sizes = small_blocks()});
  saver.wait();
  expect_saved(scratch_ / "good");
  MPI_Barrier(MPI_COMM_WORLD);
  for (const std::string& name : names_in(scratch_.path())) EXPECT_TRUE(name == "good" || name == "taken") << name;
}

// A directory is in the way of the last rank's file: only its thread meets it.
TEST_F(AsyncSave, AFailureOfOneRankIsEverybodysInWait) {
  std::string id = mesh_.next_save_id();
  id.back() = static_cast<char>(id.back() + 1);  // of the next save
  const std::string file = shard_file_name(static_cast<std::size_t>(size_ - 1), static_cast<std::size_t>(size_));
  std::filesystem::create_directories(scratch_ / (".step.partial-" + id) / file);
  MPI_Barrier(MPI_COMM_WORLD);
  AsyncSaver saver;
  const StateDict state = make(true);
  saver.save(scratch_ / "step", state, {.sizes = small_blocks()});
  const std::string message = same_error<IoError>(mesh_.host(), [&] { saver.wait(); });
  EXPECT_NE(message.find(file), std::string::npos) << message;
  EXPECT_NE(message.find("rank " + std::to_string(size_ - 1)), std::string::npos) << message;
  EXPECT_FALSE(exists(scratch_ / "step"));
  saver.save(scratch_ / "step", state, {.sizes = small_blocks()});
  saver.wait();
  expect_saved(scratch_ / "step");
}

TEST_F(AsyncSave, ADroppedOneIsNeverPublished) {
  const StateDict state = make(true);
  {
    AsyncSaver saver;
    saver.save(scratch_ / "step", state, {.sizes = small_blocks()});
  }
  EXPECT_FALSE(exists(scratch_ / "step"));
  {
    AsyncSaver saver;
    saver.save(scratch_ / "step", state, {.sizes = small_blocks()});
    if (rank_ == 0) (void)saver.poll();
    saver = AsyncSaver();
  }
  EXPECT_FALSE(exists(scratch_ / "step"));
}

// HDF5's library is not thread-safe: a simulation that uses it meanwhile must not notice.
TEST_F(AsyncSave, LeavesHdf5ToTheProgram) {
  AsyncSaver saver;
  const StateDict state = make(true, 20000);
  const std::string own = (scratch_ / ("own" + std::to_string(rank_) + ".h5")).string();
  for (int round = 0; round < 3; ++round) {
    saver.save(scratch_ / ("step" + std::to_string(round)), state, {.sizes = small_blocks()});
    int files = 0;
    while (!saver.poll() || files == 0) {
      const hid_t file = H5Fcreate(own.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
      ASSERT_GE(file, 0);
      const hsize_t extent = 1000;
      const hid_t space = H5Screate_simple(1, &extent, nullptr);
      const hid_t data = H5Dcreate2(file, "x", H5T_NATIVE_INT, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
      const std::vector<int> values(extent, files);
      ASSERT_GE(H5Dwrite(data, H5T_NATIVE_INT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()), 0);
      std::vector<int> back(extent);
      ASSERT_GE(H5Dread(data, H5T_NATIVE_INT, H5S_ALL, H5S_ALL, H5P_DEFAULT, back.data()), 0);
      ASSERT_EQ(back, values);
      H5Dclose(data);
      H5Sclose(space);
      ASSERT_GE(H5Fclose(file), 0);
      ++files;
    }
    saver.wait();
    expect_saved(scratch_ / ("step" + std::to_string(round)), 20000);
  }
}

}  // namespace
}  // namespace fsdp2::testing
