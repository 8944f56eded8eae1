// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
// Shard files as others might write them: sound in HDF5 and under a /check that matches, but not what the index
// implies.

#include "checkpoint/shard_file.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <limits>
#include <random>

#include "checkpoint/digest.hpp"
#include "checkpoint/reader.hpp"
#include "fsdp2/checkpoint/reshard.hpp"
#include "fsdp2/checkpoint/verify.hpp"
#include "support/forged_file.hpp"
#include "support/local_checkpoint.hpp"
#include "support/scratch_folder.hpp"

namespace fsdp2::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::Bytes;
using testing::element;
using testing::read_columns;
using testing::resize;
using testing::ScratchFolder;
using testing::set_element;
using testing::write_columns;
using testing::write_local_checkpoint;

constexpr std::uint64_t minus_one = std::numeric_limits<std::uint64_t>::max();

/// Two ranks; pieces of several blocks, and several in one.
CheckpointIndex two_ranks() {
  CheckpointIndex index;
  index.library = "test";
  index.save_id = "0123456789abcdeffedcba9876543210";
  index.step = 3;
  index.world_size = 2;
  index.sizes = {4096, 8192, 100};
  index.meshes.push_back({"mesh", MeshSpec({{"dp", 2}}), {AxisRole::shard}});
  index.tensors = {{"big", {DType::f32, {70, 61}, {Shard{0}}, {0}}, 0, 0},
                   {"columns", {DType::f32, {5, 9}, {Shard{1}}, {0}}, 0, 0},
                   {"replicated", {DType::i64, {40}, {Replicate{}}, {0}}, 0, 0}};
  return index;
}

std::string shard_name(int rank) {
  return shard_file_name(static_cast<std::size_t>(rank), 2);
}

/// All datasets of a shard file of two_ranks().
Columns shard_columns(const fs::path& path) {
  return read_columns(path, {{"/header", DType::u64},
                             {"/ranks", DType::u64},
                             {"/data/f32", DType::f32},
                             {"/data/i64", DType::i64},
                             {"/blocks/f32", DType::u64},
                             {"/blocks/i64", DType::u64},
                             {"/table/name_ptr", DType::u64},
                             {"/table/name_bytes", DType::u8},
                             {"/table/dtype", DType::u8},
                             {"/table/shape_ptr", DType::u64},
                             {"/table/shape", DType::i64},
                             {"/table/offset", DType::i64},
                             {"/table/extent", DType::i64},
                             {"/table/arena_start", DType::u64},
                             {"/table/bytes", DType::u64},
                             {"/table/digest", DType::u64},
                             {"/rank_local/name_ptr", DType::u64},
                             {"/rank_local/name_bytes", DType::u8},
                             {"/rank_local/value_ptr", DType::u64},
                             {"/rank_local/value_bytes", DType::u8}});
}

class ShardFile : public ::testing::Test {
 protected:
  ShardFile()
      : index(write_local_checkpoint(scratch.path(), two_ranks())), honest(shard_columns(scratch / shard_name(1))) {}

  /// Rewrites the second shard, and the index, which records its size.
  void rewrite(const Columns& columns) {
    index.files[1].size = write_columns(scratch / shard_name(1), columns);
    write_index(scratch.path(), index);
  }
  std::string problem() const {
    const VerifyReport report = verify(scratch.path());
    EXPECT_EQ(report.problems.size(), 1u);
    return report.problems.empty() ? "" : report.problems.front();
  }

  ScratchFolder scratch;
  CheckpointIndex index;
  const Columns honest;
};

TEST_F(ShardFile, HonestCheckpointsAreValid) {
  EXPECT_TRUE(verify(scratch.path()).is_valid());
  rewrite(honest);
  EXPECT_TRUE(verify(scratch.path()).is_valid()) << "rewritten by the test: " << problem();
}

TEST_F(ShardFile, RankLocalValuesOfOthersAreAccepted) {
  Columns columns = honest;
  ListBuilder names;
  ListBuilder values;
  for (const char* name : {"a", "rng"}) {
    names.add(name);
    values.add("some state");
  }
  names.store(columns, "/rank_local/name_ptr", "/rank_local/name_bytes");
  values.store(columns, "/rank_local/value_ptr", "/rank_local/value_bytes");
  set_element(columns["/ranks"], 6, 2);
  rewrite(columns);
  EXPECT_TRUE(verify(scratch.path()).is_valid()) << problem();
}

struct Forgery {
  std::string what;
  std::function<void(Columns&)> change;
  const char* message;
};

Forgery set(const char* path, std::size_t i, std::uint64_t value, const char* message) {
  return {fmt::format("{}[{}] = {}", path, i, value),
          [=](Columns& columns) { set_element(columns.at(path), i, value); }, message};
}

Forgery sized(const char* path, std::size_t size, const char* message) {
  return {fmt::format("{} of {}", path, size), [=](Columns& columns) { resize(columns.at(path), size); }, message};
}

TEST_F(ShardFile, ForgeriesAreRefused) {
  std::vector<Forgery> all{
      set("/header", 0, 2, "header"),
      set("/header", 1, 3, "header"),
      set("/header", 2, 0, "header"),
      set("/header", 3, minus_one, "header"),
      set("/header", 5, 4, "header"),
      set("/header", 6, 0, "header"),
      set("/header", 7, 3, "header"),
      set("/header", 8, minus_one, "header"),
      set("/header", 10, 1, "mixed"),
      set("/header", 11, 1, "header"),
      sized("/header", 11, "header"),
      sized("/header", 0, "header"),
      {"/ranks of no rank",
       [](Columns& columns) {
         columns["/ranks"].bytes.clear();
         columns["/ranks"].shape = {0, 60};
       },
       "/ranks has another shape"},
      {"/ranks of two ranks",
       [](Columns& columns) {
         columns["/ranks"].bytes.resize(2 * 60 * 8);
         columns["/ranks"].shape = {2, 60};
       },
       "/ranks has another shape"},
      {"/ranks of other columns",
       [](Columns& columns) {
         columns["/ranks"].shape = {2, 30};
       },
       "/ranks has another shape"},
      set("/ranks", 0, 0, "column 0"),
      set("/ranks", 1, 1, "column 1"),
      set("/ranks", 2, minus_one, "column 2"),
      set("/ranks", 3, minus_one, "column 3"),
      set("/ranks", 4, minus_one, "column 4"),
      set("/ranks", 5, 1, "rank_local"),
      set("/ranks", 5, minus_one, "rank_local"),
      set("/ranks", 6, 1, "rank_local"),
      set("/ranks", 6, minus_one, "rank_local"),
      set("/ranks", 7, 1, "rank_local"),
      set("/ranks", 8, minus_one, "rank_local"),
      set("/ranks", 12, 8192, "column 12"),       // f32: start
      set("/ranks", 13, 1, "column 13"),          // used
      set("/ranks", 14, minus_one, "column 14"),  // length
      sized("/rank_local/name_ptr", 0, "name_ptr"),
      sized("/rank_local/name_ptr", 2, "value_ptr"),
      sized("/rank_local/value_ptr", 0, "value_ptr"),
      sized("/rank_local/name_bytes", 1, "name_ptr"),
      sized("/rank_local/value_bytes", 1, "value_ptr"),
      set("/rank_local/name_ptr", 0, minus_one, "name_ptr"),
      sized("/table/name_ptr", 0, "name_ptr"),
      sized("/table/name_bytes", 0, "name_bytes"),
      sized("/table/digest", 2, "/table/digest"),
      sized("/table/digest", 4, "/table/digest"),
      sized("/table/dtype", 4, "/table/dtype"),
      set("/table/name_bytes", 0, 'x', "name_bytes"),
      set("/table/name_ptr", 1, minus_one, "name_ptr"),
      set("/table/dtype", 0, 255, "dtype"),
      set("/table/shape_ptr", 1, minus_one, "shape_ptr"),
      set("/table/shape", 0, minus_one, "shape"),
      set("/table/offset", 0, minus_one, "offset"),
      set("/table/extent", 0, minus_one, "extent"),
      set("/table/arena_start", 1, minus_one, "arena_start"),
      set("/table/bytes", 1, minus_one, "bytes"),
      set("/table/digest", 0, 1, "tensor \"big\" contributes"),
      set("/blocks/f32", 0, 1, "block 0 of the f32 data"),
      sized("/blocks/f32", 1, "/blocks/f32 has another shape than expected: [1], not [4]"),
      sized("/blocks/f32", 0, "/blocks/f32 has another shape than expected: [0], not [4]"),
      sized("/data/f32", 2048, "/data/f32 has 8192 bytes"),
      sized("/data/f32", 8192, "/data/f32 has 32768 bytes"),
      {"data of another type", [](Columns& columns) { columns["/data/f32"].type = DType::i32; },
       "another type than f32"},
      {"data that nobody expects",
       [](Columns& columns) {
         columns["/data/u16"] = columns["/data/f32"], columns["/data/u16"].type = DType::u16,
         columns["/data/u16"].shape = {8192};
       },
       "/data/u16 has 16384 bytes"},
  };
  for (const auto& [path, column] : honest)
    all.push_back({"without " + path, [path = path](Columns& columns) { columns.erase(path); },
                   path.starts_with("/data") ? "has 0 bytes" : "has no dataset"});
  for (const Forgery& forgery : all) {
    SCOPED_TRACE(forgery.what + ": expected \"" + forgery.message + "\"");
    Columns columns = honest;
    forgery.change(columns);
    rewrite(columns);
    const std::string message = problem();
    EXPECT_NE(message.find(forgery.message), std::string::npos) << message;
    EXPECT_NE(message.find(shard_name(1)), std::string::npos) << message;
  }
}

TEST_F(ShardFile, CheckIsOverEverything) {
  for (const auto& [path, column] : honest) {
    // Those that the index foretells are compared with it first.
    if (path != "/table/digest" && !path.starts_with("/blocks/")) continue;
    Columns columns = honest;
    set_element(columns[path], 0, element(column, 0) ^ 1);
    const std::uint64_t check = testing::check_of_file(honest);
    const std::int64_t size = write_columns(scratch / shard_name(1), columns);
    const Hdf5Structure structure(scratch / shard_name(1));
    File file = File::create(scratch / shard_name(1));
    file.write(std::as_bytes(std::span(&check, 1)), structure.require("/check", DType::u64, 1).offset);
    index.files[1].size = size;
    write_index(scratch.path(), index);
    EXPECT_NE(problem().find("contradict their /check digest"), std::string::npos) << path << ": " << problem();
  }
}

/// Tables in a hole of the file, which costs nothing on disk: nobody reads them, or makes room for them.
TEST_F(ShardFile, TablesLargerThanForetoldAreNotRead) {
  const std::int64_t hole = std::int64_t{1} << 38;
  for (const char* path : {"/header", "/ranks", "/table/digest", "/table/name_bytes", "/blocks/f32", "/check"}) {
    SCOPED_TRACE(path);
    std::map<std::string, DatasetSpec> datasets;
    for (const auto& [name, column] : honest) datasets[name] = {column.type, column.shape};
    datasets["/check"] = {DType::u64, {1}};
    datasets[path].shape.back() = hole / size_of(datasets[path].type);
    const Skeleton skeleton = build_skeleton(datasets, {}, {});
    fs::remove(scratch / shard_name(1));
    File file = File::create(scratch / shard_name(1));
    for (const auto& [offset, bytes] : skeleton.metadata) file.write(bytes, offset);
    for (const auto& [name, column] : honest) file.write(column.bytes, skeleton.places.at(name).offset);
    file.close();
    fs::resize_file(scratch / shard_name(1), static_cast<std::uintmax_t>(skeleton.file_size));
    index.files[1].size = skeleton.file_size;
    write_index(scratch.path(), index);
    EXPECT_NE(problem().find(path + std::string(" has another shape")), std::string::npos) << problem();
  }
}

/// An index and a shard that agree that there is no room for the pieces.
TEST_F(ShardFile, SegmentsWithoutRoomForTheirPiecesAreRefused) {
  Columns columns = honest;
  columns.erase("/data/f32");
  columns.erase("/blocks/f32");
  set_element(columns["/ranks"], 14, 0);
  index.segments[1][DType::f32].length = 0;
  rewrite(columns);
  EXPECT_NE(problem().find("f32 segment of 0 bytes"), std::string::npos) << problem();
  Bytes target(70 * 61 * 4);
  CheckpointReader reader(scratch.path());
  const BoxRequest request{0, Box::whole({70, 61}), target.data()};
  EXPECT_THROW(reader.read({&request, 1}), CorruptError);
}

/// Any number anywhere, under digests that match: nothing but the errors of a bad checkpoint, and never other values.
TEST_F(ShardFile, NoNumberMakesAReaderFail) {
  const Columns index_columns = encode_index(index);
  std::mt19937_64 random(9);
  const int trials = std::getenv("FSDP2_TEST_LONG") != nullptr ? 20000 : 150;
  int valid = 0;
  for (int trial = 0; trial < trials; ++trial) {
    SCOPED_TRACE(fmt::format("trial {}", trial));
    const bool is_index = random() % 2 == 0;
    Columns columns = is_index ? index_columns : honest;
    auto it = std::next(columns.begin(), static_cast<std::ptrdiff_t>(random() % columns.size()));
    if (it->second.size() == 0 || it->first.starts_with("/data/")) continue;
    const std::size_t i = random() % it->second.size();
    const std::uint64_t old = element(it->second, i);
    const std::uint64_t values[] = {
        0,          1,         old + 1, old - 1,         old ^ (std::uint64_t{1} << random() % 64),
        old + 4096, minus_one, 1 << 13, minus_one << 62, minus_one << 13,
        old << 1};
    set_element(it->second, i, values[random() % std::size(values)]);
    if (is_index) {
      rewrite(honest);
      columns["/files/size"].set_u64(1, static_cast<std::uint64_t>(index.files[1].size));
      write_columns(scratch / "index.h5", columns);
    } else {
      rewrite(columns);
    }
    try {
      valid += verify(scratch.path()).is_valid() ? 1 : 0;
      CheckpointReader reader(scratch.path());
      for (std::size_t t = 0; t < reader.index().tensors.size(); ++t) {
        const TensorEntry& tensor = reader.index().tensors[t];
        if (tensor.bytes() > 1 << 20) continue;
        Bytes bytes(static_cast<std::size_t>(tensor.bytes()));
        const BoxRequest request{t, Box::whole(tensor.spec.shape), bytes.data()};
        reader.read({&request, 1});
      }
    } catch (const CheckpointError&) {
    }
  }
  EXPECT_LT(valid, trials / 2);
}

}  // namespace
}  // namespace fsdp2::checkpoint
