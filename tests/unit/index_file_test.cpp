// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/index_file.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <functional>
#include <limits>
#include <random>

#include "fsdp2/error.hpp"
#include "support/forged_file.hpp"
#include "support/scratch_folder.hpp"

namespace fsdp2::checkpoint {
namespace {

using namespace std::string_literals;
using testing::resize;
using testing::ScratchFolder;
using testing::set_element;
using testing::write_columns;

/// Something of everything. Messages end at a NUL in a name: `separator` can be another byte.
CheckpointIndex rich_index(char separator = '\0') {
  CheckpointIndex index;
  index.library = "some writer 1.2";
  index.save_id = "0123456789abcdeffedcba9876543210";
  index.step = -7;
  index.world_size = 6;
  index.sizes = {4096, 8192, 1000};
  index.metadata = "{\"text\": \"\xc3\xa4 \xe2\x9c\x93\"}\0more"s;
  index.meshes.push_back({std::string("row") + separator + "mesh",
                          MeshSpec({{"dp", 3}, {"tp", 2}}),
                          {AxisRole::shard, AxisRole::replicate}});
  index.meshes.push_back({"list", MeshSpec({{"x", 5}}, {4, 0, 5, 2, 3}), {AxisRole::none}});
  const std::vector<std::int64_t> bounds{0, 3, 3, 17};
  const Placement replicate = Replicate{};
  index.tensors = {
      {"\x01", {DType::f64, {}, {replicate, replicate}, {0, 1}}, 0, 1},
      {std::string("a") + separator + "b", {DType::bf16, {0}, {Shard{0}, Shard{0}}, {1, 0}}, 0, 0},
      {"a.weight", {DType::f32, {5, 17}, {Ragged{1, bounds}, Shard{1}}, {0, 1}}, 0, 0xfedcba9876543210},
      {"a/weight", {DType::f32, {17, 5}, {Ragged{0, bounds}, replicate}, {0, 1}}, 0, 5},
      {"other", {DType::complex128, {2, 3}, {replicate, Ragged{0, {0, 2, 2}}}, {1, 0}}, 0, 9},
      {"\xc3\xa4", {DType::boolean, {7, 3}, {Shard{0}}, {0}}, 1, 6},
      {"\xff\xfe", {DType::u8, {3, 0, 5}, {Shard{2}}, {0}}, 1, 0},
  };
  index.files = {{1 << 20, {0, 3, 1}}, {std::int64_t{1} << 40, {5, 4, 2}}};
  index.segments.assign(6, {});
  for (const FileEntry& file : index.files)
    for (const DType dtype : all_dtypes) {
      std::int64_t end = 0;
      for (const std::int64_t rank : file.ranks) {
        const std::int64_t length = 8192 * ((rank + static_cast<std::int64_t>(dtype)) % 3);
        index.segments[static_cast<std::size_t>(rank)][dtype] = {end, length};
        end += length;
      }
    }
  return index;
}

void expect_equal(const CheckpointIndex& a, const CheckpointIndex& b) {
  EXPECT_EQ(a.library, b.library);
  EXPECT_EQ(a.save_id, b.save_id);
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.world_size, b.world_size);
  EXPECT_EQ(a.sizes, b.sizes);
  EXPECT_EQ(a.metadata, b.metadata);
  ASSERT_EQ(a.meshes.size(), b.meshes.size());
  for (std::size_t m = 0; m < a.meshes.size(); ++m) {
    EXPECT_EQ(a.meshes[m].name, b.meshes[m].name);
    EXPECT_EQ(a.meshes[m].spec, b.meshes[m].spec);
    EXPECT_EQ(a.meshes[m].roles, b.meshes[m].roles);
  }
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (std::size_t t = 0; t < a.tensors.size(); ++t) {
    EXPECT_EQ(a.tensors[t].name, b.tensors[t].name);
    EXPECT_EQ(a.tensors[t].spec, b.tensors[t].spec) << a.tensors[t].name;
    EXPECT_EQ(a.tensors[t].mesh, b.tensors[t].mesh);
    EXPECT_EQ(a.tensors[t].digest, b.tensors[t].digest);
  }
  ASSERT_EQ(a.files.size(), b.files.size());
  for (std::size_t f = 0; f < a.files.size(); ++f) {
    EXPECT_EQ(a.files[f].size, b.files[f].size);
    EXPECT_EQ(a.files[f].ranks, b.files[f].ranks);
  }
  EXPECT_EQ(a.segments, b.segments);
}

TEST(IndexFile, EverythingComesBack) {
  const ScratchFolder scratch;
  const CheckpointIndex index = rich_index();
  write_index(scratch.path(), index);
  expect_equal(read_index(scratch.path()), index);
}

TEST(IndexFile, NothingComesBackToo) {
  const ScratchFolder scratch;
  CheckpointIndex index;
  index.save_id = std::string(32, '0');
  index.files = {{1000, {0}}};
  index.segments.assign(1, {});
  write_index(scratch.path(), index);
  expect_equal(read_index(scratch.path()), index);
}

TEST(IndexFile, KeepsEachListOfBoundsOnce) {
  const Columns columns = encode_index(rich_index());
  EXPECT_EQ(columns.at("/ragged/bounds_ptr").size(), 3u);
  EXPECT_EQ(columns.at("/ragged/bounds").size(), 7u);
}

TEST(IndexFile, SaveIdsAreTextAndHalves) {
  EXPECT_EQ(save_id_text(0x123456789abcdef, 0xfedcba9876543210), "0123456789abcdeffedcba9876543210");
  EXPECT_EQ(save_id_halves("0123456789abcdeffedcba9876543210"), std::pair(0x123456789abcdefu, 0xfedcba9876543210u));
  for (const char* text : {"", "0123", "0123456789abcdeffedcba987654321g", "0123456789abcdef-edcba9876543210",
                           "0123456789abcdeffedcba98765432100"})
    EXPECT_THROW(save_id_halves(text), ConfigError) << text;
}

template <class ErrorType>
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const ErrorType& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another type of error: " << error.what();
    return "";
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(IndexFile, IsFoundInACheckpointOnly) {
  const ScratchFolder scratch;
  const auto error = [&](const std::string& name) { return error_of<IoError>([&] { read_index(scratch / name); }); };
  EXPECT_NE(error("absent").find("not a directory"), std::string::npos);
  std::filesystem::create_directory(scratch / "empty");
  EXPECT_NE(error("empty").find("not a checkpoint"), std::string::npos);
  std::filesystem::create_directory(scratch / ".step-1.partial-0");
  write_index(scratch / ".step-1.partial-0", rich_index());
  EXPECT_NE(error(".step-1.partial-0").find("unfinished"), std::string::npos);
  std::filesystem::create_directory_symlink(".step-1.partial-0", scratch / "link");
  EXPECT_NE(error("link").find("unfinished"), std::string::npos);
  EXPECT_NE(error("link/.").find("unfinished"), std::string::npos);
  std::filesystem::rename(scratch / ".step-1.partial-0", scratch / "step-1");
  EXPECT_NO_THROW(read_index(scratch / "step-1/."));
}

TEST(IndexFile, OtherVersionsAreNamed) {
  const ScratchFolder scratch;
  Columns columns = encode_index(rich_index());
  set_element(columns["/header"], 0, 2);
  resize(columns["/header"], 20);  // a later version may say more
  columns.erase("/ragged/bounds");
  write_columns(scratch / "index.h5", columns);
  const std::string message = error_of<MismatchError>([&] { read_index(scratch.path()); });
  EXPECT_NE(message.find("format version 2"), std::string::npos) << message;
  EXPECT_NE(message.find("reads version 1"), std::string::npos) << message;
}

TEST(IndexFile, ChangesUnderTheDigestAreNoticed) {
  const ScratchFolder scratch;
  write_index(scratch.path(), rich_index());
  const Hdf5Structure structure(scratch / "index.h5");
  const Columns columns = encode_index(rich_index());
  File file = File::create(scratch / "index.h5");
  for (const auto& [path, column] : columns) {
    if (column.bytes.empty() || path == "/header") continue;  // the version is looked at first
    const DatasetPlace place = structure.require(path, column.type, column.shape.size());
    for (const std::int64_t at : {place.offset, place.offset + place.bytes - 1}) {
      std::byte byte{};
      file.read({&byte, 1}, at);
      const std::byte changed = byte ^ std::byte{0x10};
      file.write({&changed, 1}, at);
      const std::string message = error_of<CorruptError>([&] { read_index(scratch.path()); });
      EXPECT_NE(message.find("/check"), std::string::npos) << path << ": " << message;
      file.write({&byte, 1}, at);
    }
  }
  EXPECT_NO_THROW(read_index(scratch.path()));
}

/// ---- Files whose digests match, by a hostile writer ----

struct Forgery {
  const char* what;
  std::function<void(Columns&)> change;
  const char* message;  // part of it
};

Forgery set(const char* path, std::size_t i, std::uint64_t value, const char* message) {
  return {path, [=](Columns& columns) { set_element(columns.at(path), i, value); }, message};
}

Forgery sized(const char* path, std::size_t size, const char* message) {
  return {path, [=](Columns& columns) { resize(columns.at(path), size); }, message};
}

constexpr std::uint64_t minus_one = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t huge = std::uint64_t{1} << 62;

/// Where rank's segment of a dtype begins in /segments.
std::size_t segment_at(std::size_t rank, DType dtype) {
  return (rank * std::size(all_dtypes) + static_cast<std::size_t>(dtype) - 1) * 2;
}

std::vector<Forgery> forgeries() {
  std::vector<Forgery> all{
      // Numbers of the header.
      sized("/header", 11, "11 fields"),
      sized("/header", 13, "13 fields"),
      sized("/header", 0, "is empty"),
      set("/header", 1, 0, "world size 0"),
      set("/header", 1, 5, "each of the 5 ranks once"),
      set("/header", 1, 7, "each of the 7 ranks once"),
      set("/header", 1, huge, "ranks once"),
      set("/header", 1, huge + 1, "out of range"),
      set("/header", 1, minus_one, "out of range"),
      set("/header", 2, 1, "rank_ptr"),
      set("/header", 2, minus_one, "number of files"),
      set("/header", 4, 0, "block_bytes 0"),
      set("/header", 4, 2048, "block_bytes 2048"),
      set("/header", 4, 5000, "powers of two"),
      set("/header", 4, 16384, "block_bytes 16384"),
      set("/header", 4, minus_one, "out of range"),
      set("/header", 5, 0, "segment_align 0"),
      set("/header", 5, 4096 * 3, "does not fit"),
      set("/header", 5, huge, "does not fit"),
      set("/header", 6, minus_one, "split_bytes -1"),
      set("/header", 9, 6, "name_ptr"),
      set("/header", 9, 8, "number of tensors"),
      set("/header", 9, minus_one, "number of tensors"),
      set("/header", 10, 1, "name_ptr"),
      set("/header", 10, 3, "name_ptr"),
      set("/header", 10, minus_one, "number of meshes"),
      // Meshes.
      set("/mesh/axis_size", 0, 0, "axis size 0"),
      set("/mesh/axis_size", 0, minus_one, "out of range"),
      set("/mesh/axis_size", 0, huge, "overflows"),
      set("/mesh/axis_size", 0, 4, "rank 7"),
      set("/mesh/axis_size", 2, 4, "rank list"),
      set("/mesh/axis_role", 1, 3, "axis role 3"),
      set("/mesh/axis_role", 1, 255, "axis role 255"),
      sized("/mesh/axis_role", 2, "axis_role"),
      set("/mesh/axis_name_bytes", 0, ',', "must not contain"),
      set("/mesh/axis_name_ptr", 1, 0, "needs a name"),
      set("/mesh/axis_name_bytes", 2, 'd', "dp"),  // "dp" twice
      set("/mesh/axis_ptr", 1, 0, "at least one axis"),
      set("/mesh/ranks", 0, 0, "repeated"),
      set("/mesh/ranks", 0, minus_one, "negative"),
      set("/mesh/ranks", 0, 6, "rank 6"),
      sized("/mesh/ranks", 4, "rank_ptr"),
      // Files and segments.
      set("/files/size", 0, 0, "file size 0"),
      set("/files/size", 0, minus_one, "out of range"),
      set("/files/size", 0, 8192, "does not fit"),
      {"sizes that nobody can add",
       [](Columns& columns) {
         for (const std::size_t f : {0, 1}) set_element(columns["/files/size"], f, huge);
       },
       "add up"},
      sized("/files/size", 3, "size"),
      set("/files/ranks", 0, 3, "ranks once"),
      set("/files/ranks", 2, 3, "ranks once"),
      set("/files/ranks", 0, 6, "ranks once"),
      set("/files/ranks", 0, minus_one, "ranks once"),
      set("/files/ranks", 0, huge, "ranks once"),
      sized("/files/ranks", 7, "rank_ptr"),
      {"the last rank is in no file",
       [](Columns& columns) {
         resize(columns["/files/ranks"], 5);
         set_element(columns["/files/rank_ptr"], 2, 5);
       },
       "ranks once"},
      {"/segments of fewer ranks",
       [](Columns& columns) {
         columns["/segments"].shape = {3, 17, 4};
       },
       "/segments has shape"},
      set("/segments", segment_at(0, DType::f32), 8192, "f32 segment of rank 0"),
      set("/segments", segment_at(3, DType::f64), 0, "f64 segment of rank 3"),
      set("/segments", segment_at(3, DType::f64), minus_one, "f64 segment of rank 3"),
      set("/segments", segment_at(0, DType::f32) + 1, 4096, "f32 segment of rank 0"),
      set("/segments", segment_at(0, DType::f32) + 1, minus_one - 8191, "f32 segment of rank 0"),
      set("/segments", segment_at(0, DType::f32) + 1, 1 << 21, "f32 segment of rank 0"),
      set("/segments", segment_at(0, DType::f32) + 1, huge, "f32 segment of rank 0"),
      // Tensors.
      set("/table/dtype", 0, 0, "dtype code 0"),
      set("/table/dtype", 0, 18, "dtype code 18"),
      set("/table/dtype", 0, 255, "dtype code 255"),
      sized("/table/dtype", 8, "/table/dtype has 8"),
      sized("/table/digest", 6, "digest"),
      sized("/table/mesh", 8, "mesh"),
      set("/table/mesh", 0, 2, "mesh 2"),
      set("/table/mesh", 0, minus_one, "mesh"),
      set("/table/mesh", 0, 1, "2 placements"),
      set("/table/shape", 1, minus_one, "negative"),
      set("/table/shape", 1, huge, "64 bits"),
      set("/table/shape", 5, huge >> 2, "overflows"),  // of 16 bytes each
      set("/table/shape", 7, huge >> 2, "more than"),
      set("/table/name_ptr", 1, 0, "has no name"),
      set("/table/name_bytes", 0, 'z', "out of order"),
      {"the same name twice",
       [](Columns& columns) { set_element(columns["/table/name_bytes"], 5, '/'); },  // a.weight -> a/weight
       "twice"},
      set("/table/placement_kind", 0, 3, "placement kind 3"),
      set("/table/placement_kind", 0, 7, "placement kind 7"),
      set("/table/placement_kind", 0, 1, "Shard(0)"),  // of a scalar
      set("/table/placement_dim", 2, 1, "Shard(1)"),
      set("/table/placement_dim", 2, minus_one, "Shard(-1)"),
      set("/table/placement_dim", 2, huge, "Shard("),
      sized("/table/placement_dim", 13, "placement_dim"),
      set("/table/split_order", 2, 0, "permutation"),
      set("/table/split_order", 2, 2, "permutation"),
      set("/table/split_order", 2, minus_one, "permutation"),
      set("/table/split_order", 2, huge, "permutation"),
      sized("/table/split_order", 11, "split_order"),
      // Ragged bounds: tensor 2 has rows 0 on axis 0 in placement 4.
      set("/table/placement_bounds", 4, 2, "ragged bounds 2"),
      set("/table/placement_bounds", 4, minus_one, "do not exist"),
      set("/table/placement_bounds", 4, 1, "ragged bounds"),
      set("/ragged/bounds", 0, 1, "ragged bounds"),
      set("/ragged/bounds", 0, minus_one, "ragged bounds"),
      set("/ragged/bounds", 1, 18, "ragged bounds"),
      set("/ragged/bounds", 1, minus_one, "ragged bounds"),
      set("/ragged/bounds", 3, 16, "ragged bounds"),
      set("/ragged/bounds_ptr", 1, 0, "ragged bounds"),
      sized("/ragged/bounds", 8, "bounds_ptr"),
      {"a ragged cut after another of its dimension",
       [](Columns& columns) {
         set_element(columns["/table/split_order"], 4, 1);
         set_element(columns["/table/split_order"], 5, 0);
       },
       "first cut"},
  };
  for (const char* path :
       {"/mesh/name_ptr", "/mesh/axis_ptr", "/mesh/axis_name_ptr", "/mesh/rank_ptr", "/files/rank_ptr",
        "/table/name_ptr", "/table/shape_ptr", "/table/placement_ptr", "/ragged/bounds_ptr"}) {
    const std::size_t size = encode_index(rich_index()).at(path).size();
    for (const std::size_t few : {0, 1})
      all.push_back(sized(path, few, path == "/mesh/axis_ptr"s ? "number of meshes" : path));
    if (path != "/ragged/bounds_ptr"s) all.push_back(sized(path, size - 1, path));
    all.push_back(sized(path, size + 1, path));
    all.push_back(set(path, 0, 1, path));
    all.push_back(set(path, 1, minus_one, path));
    all.push_back(set(path, 1, huge, path));
    all.push_back(set(path, size - 1, 0, path));
    all.push_back(set(path, size - 1, minus_one, path));
  }
  for (const auto& [path, column] : encode_index(rich_index()))
    all.push_back({path == "/header" ? "no /header" : "a missing dataset",
                   [path = path](Columns& columns) { columns.erase(path); }, "has no dataset"});
  return all;
}

TEST(IndexFile, ForgeriesAreRefused) {
  const ScratchFolder scratch;
  const Columns honest = encode_index(rich_index('+'));
  write_columns(scratch / "index.h5", honest);
  expect_equal(read_index(scratch.path()), rich_index('+'));
  for (const Forgery& forgery : forgeries()) {
    SCOPED_TRACE(forgery.what + ": expected \""s + forgery.message + "\"");
    Columns columns = honest;
    forgery.change(columns);
    write_columns(scratch / "index.h5", columns);
    const std::string message = error_of<CorruptError>([&] { read_index(scratch.path()); });
    EXPECT_NE(message.find(forgery.message), std::string::npos) << message;
    EXPECT_NE(message.find("index.h5"), std::string::npos) << message;
  }
}

/// A list of bounds as long as the file, which thousands of tensors name: 1.2 GB, if it were copied for each.
TEST(IndexFile, LongBoundsAreNotCopiedForEveryTensor) {
  const ScratchFolder scratch;
  CheckpointIndex index = rich_index();
  index.tensors.clear();
  for (int t = 0; t < 3000; ++t)
    index.tensors.push_back({fmt::format("{:04}", t), {DType::u8, {5}, {Ragged{0, {0, 5}}}, {0}}, 1, 0});
  Columns columns = encode_index(index);
  resize(columns["/ragged/bounds"], 50000);
  set_element(columns["/ragged/bounds_ptr"], 1, 50000);
  write_columns(scratch / "index.h5", columns);
  struct rusage before {};
  struct rusage after {};
  ASSERT_EQ(::getrusage(RUSAGE_SELF, &before), 0);
  const std::string message = error_of<CorruptError>([&] { read_index(scratch.path()); });
  ASSERT_EQ(::getrusage(RUSAGE_SELF, &after), 0);
  EXPECT_NE(message.find("50000 numbers"), std::string::npos) << message;
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 100 << 10);
}

TEST(IndexFile, NoNumberMakesTheDecoderOrThePlannerFail) {
  const ScratchFolder scratch;
  const Columns honest = encode_index(rich_index());
  std::mt19937_64 random(7);
  const int trials = std::getenv("FSDP2_TEST_LONG") != nullptr ? 20000 : 200;
  int accepted = 0;
  for (int trial = 0; trial < trials; ++trial) {
    Columns columns = honest;
    for (std::uint64_t changes = 1 + random() % 2; changes > 0; --changes) {
      auto it = std::next(columns.begin(), static_cast<std::ptrdiff_t>(random() % columns.size()));
      if (it->first == "/header" && random() % 4 != 0) continue;
      Column& column = it->second;
      if (column.size() == 0) continue;
      const std::size_t i = random() % column.size();
      const std::uint64_t old = testing::element(column, i);
      const std::uint64_t values[] = {
          0,         1,    2,         old + 1,   old - 1, old ^ (std::uint64_t{1} << random() % 64),
          minus_one, huge, huge >> 1, huge << 1, 17,      random()};
      set_element(column, i, values[random() % std::size(values)]);
    }
    write_columns(scratch / "index.h5", columns);
    try {
      const CheckpointIndex index = read_index(scratch.path());
      for (std::int64_t rank = 0; rank < index.world_size; ++rank) plan_rank(index, rank);
      ++accepted;
    } catch (const CheckpointError&) {
    }
  }
  EXPECT_GT(accepted, trials / 10);
  EXPECT_LT(accepted, trials * 9 / 10);
}

}  // namespace
}  // namespace fsdp2::checkpoint
