// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
// What must be refused: with the same error on every rank, without a hang, and with nothing under the final name.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <filesystem>

#include "fsdp2/checkpoint/verify.hpp"
#include "support/checkpoint.hpp"

namespace fsdp2 {
namespace {

namespace fs = std::filesystem;
using testing::add_tensor;
using testing::Bytes;
using testing::file_bytes;
using testing::names_in;
using testing::same_error;
using testing::ScratchDirectory;
using testing::small_blocks;
using testing::write_file;

class CheckpointErrors : public ::testing::Test {
 protected:
  CheckpointErrors() : mesh(MPI_COMM_WORLD, {{"dp", size()}}) {}
  ~CheckpointErrors() override { mesh.close(); }

  static std::int64_t size() {
    int value = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &value);
    return value;
  }
  const HostCommunicator& host() const { return mesh.host(); }
  std::int64_t rank() const { return mesh.rank(); }

  StateDict weights(bool has_values = true) const {
    StateDict state;
    add_tensor(state, mesh, "a.weight", DType::f32, {64, 33}, {Shard{0}}, has_values);
    add_tensor(state, mesh, "b.bias", DType::i64, {9}, {Replicate{}}, has_values);
    return state;
  }
  void save_weights(const fs::path& target) const { save(target, weights(), {.sizes = small_blocks()}); }

  template <class ErrorType>
  std::string save_error(const fs::path& target, const StateDict& state, SaveOptions options = {}) const {
    const std::string message = same_error<ErrorType>(host(), [&] { save(target, state, options); });
    host().barrier();
    return message;
  }
  template <class ErrorType>
  std::string load_error(const fs::path& source, const StateDict& state) const {
    return same_error<ErrorType>(host(), [&] { load(source, state); });
  }
  static std::string shard(std::int64_t file) {
    return shard_file_name(static_cast<std::size_t>(file), static_cast<std::size_t>(size()));
  }
  /// One rank changes files; the others wait.
  template <class Change>
  void on_rank_0(Change&& change) const {
    if (rank() == 0) change();
    host().barrier();
  }

  DeviceMesh mesh;
  ScratchDirectory scratch;
};

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST_F(CheckpointErrors, TargetExists) {
  save_weights(scratch / "there");
  const std::string message = save_error<IoError>(scratch / "there", weights());
  EXPECT_CONTAINS(message, "already exists");
  EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>{"there"}) << "no partial directory is left";
  const StateDict state = weights(false);
  load(scratch / "there", state);
  testing::expect_values(state);
}

TEST_F(CheckpointErrors, ParentIsAFile) {
  on_rank_0([&] { write_file(scratch / "file", Bytes(3)); });
  const std::string message = save_error<IoError>(scratch / "file" / "step-1", weights());
  EXPECT_CONTAINS(message, (scratch / "file").string());
}

TEST_F(CheckpointErrors, NamesThatAreNeverLoaded) {
  EXPECT_CONTAINS(save_error<ConfigError>(scratch / ".hidden", weights()), "begins with '.'");
  EXPECT_CONTAINS(save_error<ConfigError>("/", weights()), "empty");
  EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>{});
}

TEST_F(CheckpointErrors, WhatCannotBeSaved) {
  StateDict partial = weights();
  add_tensor(partial, mesh, "c.sum", DType::f32, {2}, {Partial{}}, true);
  const std::string message = save_error<ConfigError>(scratch / "partial", partial);
  EXPECT_CONTAINS(message, "c.sum");
  EXPECT_CONTAINS(message, "redistribute");
  StateDict nameless = weights();
  add_tensor(nameless, mesh, "", DType::f32, {2}, {Replicate{}}, true);
  save_error<ConfigError>(scratch / "nameless", nameless);
  EXPECT_CONTAINS(save_error<ConfigError>(scratch / "json", weights(), {.metadata = "{not json"}), "JSON");
  EXPECT_CONTAINS(save_error<ConfigError>(scratch / "sizes", weights(), {.sizes = {4096, 1000, 0}}), "powers of two");
  EXPECT_THROW(save(scratch / "empty", StateDict{}), ConfigError);
  EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>{});
}

TEST_F(CheckpointErrors, FailureOfOneRankIsEverybodys) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  StateDict state = weights();
  if (rank() == size() - 1) add_tensor(state, mesh, "", DType::f32, {2}, {Replicate{}}, true);
  const std::string message = save_error<ConfigError>(scratch / "target", state);
  EXPECT_CONTAINS(message, fmt::format("rank {}: ", size() - 1));
  EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>{});
  host().barrier();
  save_weights(scratch / "target");
}

TEST_F(CheckpointErrors, RanksThatDisagree) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const bool is_last = rank() == size() - 1;
  StateDict keys = weights();
  if (is_last) add_tensor(keys, mesh, "extra", DType::f32, {2}, {Replicate{}}, true);
  std::string message = save_error<MismatchError>(scratch / "keys", keys);
  EXPECT_CONTAINS(message, "extra");
  EXPECT_CONTAINS(message, fmt::format("rank {} ", size() - 1));

  StateDict shapes;
  add_tensor(shapes, mesh, "w", DType::f32, {is_last ? 8 : 9}, {Replicate{}}, true);
  message = save_error<MismatchError>(scratch / "shapes", shapes);
  EXPECT_CONTAINS(message, "[8]");
  EXPECT_CONTAINS(message, "[9]");

  StateDict dtypes;
  add_tensor(dtypes, mesh, "w", is_last ? DType::f32 : DType::i32, {8}, {Replicate{}}, true);
  message = save_error<MismatchError>(scratch / "dtypes", dtypes);
  EXPECT_CONTAINS(message, "i32");

  message =
      save_error<MismatchError>(scratch / "steps", weights(), {.step = is_last ? 1 : 2, .metadata = {}, .sizes = {}});
  EXPECT_CONTAINS(message, "step");
  EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>{});
}

TEST_F(CheckpointErrors, AllMismatchesAreListedAndNothingChanges) {
  save_weights(scratch / "saved");
  StateDict state;
  add_tensor(state, mesh, "a.weight", DType::f64, {64, 34}, {Shard{0}}, true);
  add_tensor(state, mesh, "missing", DType::f32, {3}, {Replicate{}}, true);
  const std::string message = load_error<MismatchError>(scratch / "saved", state);
  for (const char* part :
       {"a.weight", "[64, 33]", "[64, 34]", "f32", "f64", "missing", "b.bias", "nothing was changed"})
    EXPECT_CONTAINS(message, part);
  testing::expect_values(state);
}

TEST_F(CheckpointErrors, NotStrictLoadsWhatIsCommon) {
  save_weights(scratch / "saved");
  StateDict state;
  add_tensor(state, mesh, "b.bias", DType::i64, {9}, {Replicate{}}, false);
  add_tensor(state, mesh, "missing", DType::i64, {9}, {Replicate{}}, true);
  load(scratch / "saved", state, {.strict = false});
  testing::expect_values(state);
}

TEST_F(CheckpointErrors, NoCheckpoint) {
  EXPECT_CONTAINS(load_error<IoError>(scratch / "absent", weights()), "not a directory");
  on_rank_0([&] { fs::create_directory(scratch / "empty"); });
  EXPECT_CONTAINS(load_error<IoError>(scratch / "empty", weights()), "not a checkpoint");
}

TEST_F(CheckpointErrors, MissingShard) {
  save_weights(scratch / "saved");
  on_rank_0([&] { fs::remove(scratch / "saved" / shard(0)); });
  EXPECT_CONTAINS(load_error<IoError>(scratch / "saved", weights()), shard(0));
  on_rank_0([&] { EXPECT_FALSE(verify(scratch / "saved").is_valid()); });
}

TEST_F(CheckpointErrors, TruncatedFiles) {
  save_weights(scratch / "saved");
  for (const std::string& name : {shard(0), std::string("index.h5")})
    for (const double part : {0.0, 0.3, 0.999}) {
      const Bytes whole = file_bytes(scratch / "saved" / name);
      host().barrier();
      on_rank_0([&] {
        fs::resize_file(scratch / "saved" / name,
                        static_cast<std::uintmax_t>(part * static_cast<double>(whole.size())));
      });
      const std::string message = load_error<CorruptError>(scratch / "saved", weights());
      EXPECT_CONTAINS(message, name);
      on_rank_0([&] { write_file(scratch / "saved" / name, whole); });
    }
  load(scratch / "saved", weights());
}

TEST_F(CheckpointErrors, SwappedAndMixedShards) {
  save_weights(scratch / "one");
  save_weights(scratch / "two");
  on_rank_0([&] {
    fs::copy_file(scratch / "one" / shard(0), scratch / "two" / shard(0), fs::copy_options::overwrite_existing);
  });
  EXPECT_CONTAINS(load_error<CorruptError>(scratch / "two", weights()), "mixed");
  if (size() == 1) return;
  on_rank_0([&] {
    fs::rename(scratch / "one" / shard(0), scratch / "one" / "aside");
    fs::rename(scratch / "one" / shard(1), scratch / "one" / shard(0));
    fs::rename(scratch / "one" / "aside", scratch / "one" / shard(1));
  });
  load_error<CorruptError>(scratch / "one", weights());
  on_rank_0([&] { EXPECT_EQ(verify(scratch / "one").problems.size(), 2u); });
}

TEST_F(CheckpointErrors, EveryFlippedBitIsFoundOrHarmless) {
  save_weights(scratch / "saved");
  int found = 0;
  for (int trial = 0; trial < 60; ++trial) {
    const std::string name = trial % 3 == 0 ? "index.h5" : shard(trial % size());
    const Bytes whole = file_bytes(scratch / "saved" / name);
    host().barrier();
    const std::uint64_t bit = testing::mix(static_cast<std::uint64_t>(trial)) % (8 * whole.size());
    on_rank_0([&] {
      Bytes damaged = whole;
      damaged[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
      write_file(scratch / "saved" / name, damaged);
    });
    const StateDict state = weights(false);
    bool is_refused = false;
    try {
      load(scratch / "saved", state);
    } catch (const CorruptError&) {
      is_refused = true;
    }
    if (!is_refused) testing::expect_values(state);
    found += is_refused ? 1 : 0;
    on_rank_0([&] { write_file(scratch / "saved" / name, whole); });
  }
  EXPECT_GT(found, 10) << "flips in data and tables must be found";
}

TEST_F(CheckpointErrors, FlippedDataNamesFileAndBlock) {
  save_weights(scratch / "saved");
  const Bytes values = testing::box_bytes("a.weight", DType::f32, {64, 33}, Box{{0, 0}, {1, 33}});
  on_rank_0([&] {
    Bytes bytes = file_bytes(scratch / "saved" / shard(0));
    const auto at = std::search(bytes.begin(), bytes.end(), values.begin(), values.end());
    ASSERT_NE(at, bytes.end());
    *at ^= std::byte{1};
    write_file(scratch / "saved" / shard(0), bytes);
  });
  const std::string message = load_error<CorruptError>(scratch / "saved", weights());
  for (const std::string& part : {shard(0), std::string("block 0 of the f32 data"), std::string("undefined")})
    EXPECT_CONTAINS(message, part);
  on_rank_0([&] { EXPECT_EQ(verify(scratch / "saved").problems.size(), 1u); });
}

}  // namespace
}  // namespace fsdp2
