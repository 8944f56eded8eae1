// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// Loading that is not one to one: other names and dtypes, replicas that are broadcast, rank-local values, one tensor.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <fstream>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "support/checkpoint.hpp"

namespace fsdp2::testing {
namespace {

class LoadOptionsTest : public ::testing::Test {
 public:
  void SetUp() override {
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    mesh_ = DeviceMesh(MPI_COMM_WORLD, {{"dp", size_}});
  }
  void TearDown() override { mesh_.close(); }

  /// Values that all castable types hold exactly.
  static std::vector<float> small_numbers(std::int64_t begin, std::int64_t count) {
    std::vector<float> values;
    for (std::int64_t i = begin; i < begin + count; ++i) values.push_back(static_cast<float>(i % 100) / 4);
    return values;
  }
  DTensor numbers(DType dtype, std::int64_t rows, bool has_values) const {
    const TensorSpec spec{dtype, {rows, 7}, {Shard{0}}, {}};
    const Box box = local_box(spec, mesh_.spec(), mesh_.coordinate());
    const ExecutionSpace exec;
    const Tensor wide = tensor_of(DType::f32, bytes_of(small_numbers(box.offset[0] * 7, box.numel())));
    const Tensor local(exec, dtype, box.extent, "numbers");
    if (has_values) kernels::cast(exec, local, wide);
    return DTensor::from_local(local, spec, mesh_);
  }

 protected:
  ScratchDirectory scratch_;
  int size_ = 1;
  int rank_ = 0;
  DeviceMesh mesh_;
};

TEST_F(LoadOptionsTest, KeysAreRenamed) {
  StateDict saved;
  add_tensor(saved, mesh_, "old.a", DType::f32, {30, 3}, {Shard{0}}, true);
  add_tensor(saved, mesh_, "old.b", DType::f32, {30, 3}, {Shard{0}}, true);
  save(scratch_ / "saved", saved, {.sizes = small_blocks()});
  StateDict state;
  add_tensor(state, mesh_, "a", DType::f32, {30, 3}, {Shard{0}}, false);
  add_tensor(state, mesh_, "b", DType::f32, {30, 3}, {Shard{0}}, false);
  load(scratch_ / "saved", state, {.rename = [](const std::string& key) { return "old." + key; }});
  for (const char* key : {"a", "b"}) {
    const DTensor& tensor = state.tensors.at(key);
    EXPECT_EQ(bytes_of(tensor.local()), box_bytes(std::string("old.") + key, DType::f32, {30, 3}, tensor.box()));
  }
  const std::string message = same_error<MismatchError>(
      mesh_.host(), [&] { load(scratch_ / "saved", state, {.rename = [](const std::string&) { return "old.a"; }}); });
  EXPECT_NE(message.find("both renamed to \"old.a\""), std::string::npos) << message;
  EXPECT_NE(message.find("unexpected in the checkpoint: \"old.b\""), std::string::npos) << message;
}

TEST_F(LoadOptionsTest, CastsAreAskedFor) {
  for (const DType from : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    StateDict saved;
    saved.tensors["x"] = numbers(from, 50, true);
    const std::string name = std::string(to_string(from));
    save(scratch_ / name, saved, {.sizes = small_blocks()});
    for (const DType to : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
      StateDict state;
      state.tensors["x"] = numbers(to, 50, false);
      if (from != to) {
        same_error<MismatchError>(mesh_.host(), [&] { load(scratch_ / name, state); });
      }
      load(scratch_ / name, state, {.cast = true});
      EXPECT_EQ(bytes_of(state.tensors["x"].local()), bytes_of(numbers(to, 50, true).local())) << name;
    }
    StateDict integers;
    add_tensor(integers, mesh_, "x", DType::i64, {50, 7}, {Shard{0}}, false);
    same_error<MismatchError>(mesh_.host(), [&] { load(scratch_ / name, integers, {.cast = true}); });
  }
}

/// Bytes that this process has read so far, from files and elsewhere.
std::int64_t bytes_read() {
  std::ifstream file("/proc/self/io");
  std::string key;
  std::int64_t value = 0;
  file >> key >> value;
  return value;
}

TEST_F(LoadOptionsTest, ReplicasAreReadOnceAndBroadcast) {
  const std::vector<MeshAxis> axes = size_ % 2 == 0 ? std::vector<MeshAxis>{{"replicate", 2}, {"dp", size_ / 2}}
                                                    : std::vector<MeshAxis>{{"dp", size_}};
  DeviceMesh mesh(MPI_COMM_WORLD, axes);
  const std::vector<Placement> everywhere(axes.size(), Replicate{});
  std::vector<Placement> cut(axes.size(), Replicate{});
  cut.back() = Shard{0};
  constexpr std::int64_t rows = 4000;
  const auto make = [&](bool has_values) {
    StateDict state;
    add_tensor(state, mesh, "cut", DType::f32, {rows, 50}, cut, has_values);
    add_tensor(state, mesh, "replicated", DType::f32, {rows, 50}, everywhere, has_values);
    return state;
  };
  save(scratch_ / "saved", make(true), {.sizes = small_blocks()});
  const StateDict state = make(false);
  MPI_Barrier(MPI_COMM_WORLD);
  const std::int64_t before = bytes_read();
  load(scratch_ / "saved", state, {.broadcast_replicas = true});
  const std::int64_t read = bytes_read() - before;
  expect_values(state);
  // Tables come on top of tensors.
  const std::int64_t whole = rows * 50 * 4;
  const bool reads_cut = axes.size() == 1 || mesh.coordinate()[0] == 0;
  const std::int64_t needed = (rank_ == 0 ? whole : 0) + (reads_cut ? state.tensors.at("cut").local().bytes() : 0);
  EXPECT_GE(read, needed);
  EXPECT_LT(read, needed + needed / 20 + 200000);
  mesh.close();
}

TEST_F(LoadOptionsTest, RankLocalValuesFollowAPolicy) {
  const auto bytes = [](const std::string& text) {
    const auto view = std::as_bytes(std::span(text));
    return std::vector<std::byte>(view.begin(), view.end());
  };
  const auto value = [&](std::int64_t rank) { return fmt::format("<{}>", rank); };
  StateDict state;
  add_tensor(state, mesh_, "x", DType::f32, {5}, {Shard{0}}, true);
  RankLocalValues own{{"generator", bytes(value(rank_))}, {"", {}}, {std::string("a\0/b", 4), bytes("same")}};
  for (const std::variant<std::int64_t, FileGroups> ranks_per_file :
       {std::variant<std::int64_t, FileGroups>(std::int64_t{1}), {std::int64_t{2}}, {FileGroups::world}}) {
    const std::filesystem::path path = scratch_ / "saved";
    save(path, state,
         {.sizes = small_blocks(), .ranks_per_file = ranks_per_file, .rank_local = own, .overwrite = true});
    RankLocalValues found;
    load(path, state, {.rank_local = &found});
    EXPECT_EQ(found, own);
    for (std::int64_t world = 1; world < 9; ++world)
      for (std::int64_t rank = 0; rank < world; ++rank) {
        const auto get = [&](RankLocalPolicy policy) { return read_rank_local(path, rank, world, policy); };
        if (world == size_) {
          EXPECT_EQ(get(RankLocalPolicy::error).at("generator"), bytes(value(rank)));
          continue;
        }
        EXPECT_THROW(get(RankLocalPolicy::error), MismatchError);
        EXPECT_EQ(get(RankLocalPolicy::first).at("generator"), bytes(value(0)));
        const RankLocalValues each = get(RankLocalPolicy::each);
        EXPECT_EQ(each.contains("generator"), rank < size_);
        if (rank < size_) {
          EXPECT_EQ(each.at("generator"), bytes(value(rank)));
        }
        std::string expected;
        const Range sources = chunk(size_, world, rank);
        for (std::int64_t source = sources.begin; source < sources.end; ++source) expected += value(source);
        const RankLocalValues joined = get(RankLocalPolicy::concatenate);
        EXPECT_EQ(joined.contains("generator") ? joined.at("generator") : bytes(""), bytes(expected));
      }
  }
  EXPECT_THROW(read_rank_local(scratch_ / "saved", 2, 2), ConfigError);
}

TEST_F(LoadOptionsTest, OneProcessReadsAnyBoxOfATensor) {
  StateDict state;
  add_tensor(state, mesh_, "rows", DType::bf16, {40, 30}, {Shard{0}}, true);
  add_tensor(state, mesh_, "columns", DType::f64, {40, 30}, {Shard{1}}, true);
  add_tensor(state, mesh_, "empty", DType::f64, {0, 30}, {Shard{0}}, true);
  add_tensor(state, mesh_, "scalar", DType::i64, {}, {Replicate{}}, true);
  save(scratch_ / "saved", state, {.sizes = small_blocks()});
  for (const auto& [name, tensor] : state.tensors) {
    const TensorSpec& spec = tensor.spec();
    const HostTensor whole = read_tensor(scratch_ / "saved", name);
    EXPECT_EQ(whole.shape(), spec.shape);
    EXPECT_EQ(Bytes(whole.data(), whole.data() + whole.bytes()),
              box_bytes(name, spec.dtype, spec.shape, Box::whole(spec.shape)));
  }
  const Box box{{7, 11}, {20, 13}};
  const HostTensor part = read_tensor(scratch_ / "saved", "columns", box);
  EXPECT_EQ(Bytes(part.data(), part.data() + part.bytes()), box_bytes("columns", DType::f64, {40, 30}, box));
  EXPECT_EQ(read_tensor(scratch_ / "saved", "columns", Box{{3, 3}, {0, 5}}).bytes(), 0);
  for (const Box& outside : {Box{{7, 11}, {34, 1}}, Box{{-1, 0}, {2, 2}}, Box{{0}, {1}}, Box{{5, 5}, {-1, 2}}})
    EXPECT_THROW(read_tensor(scratch_ / "saved", "columns", outside), ShapeError);
  EXPECT_THROW(read_tensor(scratch_ / "saved", "row"), MismatchError);
  MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace
}  // namespace fsdp2::testing
