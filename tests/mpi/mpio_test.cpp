// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
// Saving through parallel HDF5: the same files, and the same errors on every rank. MPI's file functions are wrapped, to
// see what they are asked for, and to fail.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpi.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <set>

#include "checkpoint/save_job.hpp"
#include "fsdp2/checkpoint/verify.hpp"
#include "support/checkpoint.hpp"

namespace {

struct FileCalls {
  std::vector<std::string> hints;  // "cb_nodes" at every opening
  std::int64_t independent = 0;
  std::int64_t collective = 0;
  std::int64_t longest = 0;  // bytes of one independent transfer
};
FileCalls calls;
bool is_opening_broken = false;
bool is_writing_broken = false;
bool is_disk_full = false;

}  // namespace

extern "C" {
int fallocate(int descriptor, int mode, off_t offset, off_t length) {
  if (!is_disk_full) return static_cast<int>(::syscall(SYS_fallocate, descriptor, mode, offset, length));
  errno = ENOSPC;
  return -1;
}
int MPI_File_open(MPI_Comm comm, const char* name, int mode, MPI_Info info, MPI_File* file) {
  std::array<char, MPI_MAX_INFO_VAL + 1> value{};
  int is_found = 0;
  if (info != MPI_INFO_NULL) MPI_Info_get(info, "cb_nodes", MPI_MAX_INFO_VAL, value.data(), &is_found);
  calls.hints.emplace_back(is_found != 0 ? value.data() : "");
  return is_opening_broken ? MPI_ERR_IO : PMPI_File_open(comm, name, mode, info, file);
}
int MPI_File_write_at(MPI_File file, MPI_Offset at, const void* data, int count, MPI_Datatype type,
                      MPI_Status* status) {
  int bytes = 0;
  MPI_Type_size(type, &bytes);
  ++calls.independent;
  calls.longest = std::max(calls.longest, std::int64_t{bytes} * count);
  return is_writing_broken ? MPI_ERR_IO : PMPI_File_write_at(file, at, data, count, type, status);
}
int MPI_File_write_at_all(MPI_File file, MPI_Offset at, const void* data, int count, MPI_Datatype type,
                          MPI_Status* status) {
  ++calls.collective;
  const int code = PMPI_File_write_at_all(file, at, data, count, type, status);
  return is_writing_broken ? MPI_ERR_IO : code;
}
}

namespace fsdp2 {
namespace {

using testing::add_tensor;
using testing::names_in;
using testing::same_error;
using testing::ScratchDirectory;
using testing::small_blocks;

class Mpio : public ::testing::Test {
 protected:
  Mpio() : mesh(MPI_COMM_WORLD, {{"dp", world_size()}}) { calls = {}; }
  ~Mpio() override { mesh.close(); }

  static std::int64_t world_size() {
    int value = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &value);
    return value;
  }
  /// What precedes the message of a rank's error.
  std::string from(std::int64_t rank) const { return mesh.size() == 1 ? "" : fmt::format("rank {}: ", rank); }
  bool is_last() const { return mesh.rank() == mesh.size() - 1; }

  /// Rows are so few that some ranks have none, and so long that others have many blocks.
  StateDict dict(bool has_values = true) const {
    StateDict state;
    add_tensor(state, mesh, "uneven", DType::f32, {mesh.size() + 2, 3000}, {Shard{0}}, has_values);
    add_tensor(state, mesh, "row", DType::complex128, {1, 700}, {Shard{0}}, has_values);
    add_tensor(state, mesh, "replicated", DType::bf16, {5, 99}, {Replicate{}}, has_values);
    add_tensor(state, mesh, "scalar", DType::boolean, {}, {Replicate{}}, has_values);
    return state;
  }
  static SaveOptions mpio(std::int64_t ranks_per_file, MpioOptions options = {}) {
    return {.sizes = small_blocks(), .ranks_per_file = ranks_per_file, .io = Io::mpio, .mpio = std::move(options)};
  }

  template <class ErrorType, class Call>
  std::string error_of(Call&& call) const {
    const std::string message = same_error<ErrorType>(mesh.host(), std::forward<Call>(call));
    mesh.host().barrier();
    EXPECT_EQ(names_in(scratch.path()), std::vector<std::string>{});
    mesh.host().barrier();
    return message;
  }
  void expect_loads(const std::filesystem::path& path) const {
    const StateDict state = dict(false);
    load(path, state);
    testing::expect_values(state);
    const VerifyReport report = verify(path);
    EXPECT_TRUE(report.is_valid()) << report.problems.front();
  }
  /// That an earlier failure has left nothing behind that matters.
  void expect_saves() const {
    save(scratch / "after", dict(), mpio(mesh.size()));
    expect_loads(scratch / "after");
  }

  DeviceMesh mesh;
  ScratchDirectory scratch;
};

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST_F(Mpio, FilesAreThoseOfDirectIo) {
  const std::map<std::string, std::vector<std::byte>> own = {
      {"rng", testing::Bytes(static_cast<std::size_t>(mesh.rank()) * 5000, std::byte{7})}};
  for (const std::int64_t ranks : std::set<std::int64_t>{1, 2, mesh.size()})
    for (const MpioOptions& options :
         {MpioOptions{}, MpioOptions{.call_bytes = 4096}, MpioOptions{.collective = true},
          MpioOptions{.collective = true, .call_bytes = 4096}, MpioOptions{.collective = true, .call_bytes = 8192}}) {
      SCOPED_TRACE(fmt::format("{} ranks a file, {} at {}", ranks, options.collective, options.call_bytes));
      const std::string name = fmt::format("{}-{}-{}", ranks, options.collective, options.call_bytes);
      SaveOptions direct = mpio(ranks);
      direct.io = Io::direct;
      direct.rank_local = own;
      save(scratch / ("direct-" + name), dict(), direct);
      SaveOptions parallel = mpio(ranks, options);
      parallel.rank_local = own;
      save(scratch / name, dict(), parallel);
      expect_loads(scratch / name);
      const CheckpointIndex index = read_index(scratch / name);
      for (std::size_t f = 0; f < index.files.size(); ++f) {
        const std::string shard = shard_file_name(f, index.files.size());
        const testing::Bytes expected = testing::file_bytes(scratch / ("direct-" + name) / shard);
        const testing::Bytes found = testing::file_bytes(scratch / name / shard);
        EXPECT_EQ(static_cast<std::int64_t>(found.size()), index.files[f].size);
        ASSERT_EQ(found.size(), expected.size());
        std::size_t differences = 0;
        for (std::size_t i = 0; i < found.size(); ++i) differences += found[i] != expected[i] ? 1 : 0;
        // The save id, as number and text, and the checksums over it.
        EXPECT_LE(differences, 32 + 16 + 8 + 8 * index.files[f].ranks.size());
      }
    }
}

TEST_F(Mpio, HintsAndTransfersAreTheOnesAskedFor) {
  const MpioOptions hinted{.call_bytes = 8192, .hints = {{"cb_nodes", "1"}, {"no_such_hint", "1"}}};
  save(scratch / "independent", dict(), mpio(mesh.size(), hinted));
  EXPECT_EQ(calls.hints, std::vector<std::string>(mesh.rank() == 0 ? 2 : 1, "1")) << "one makes the file, all open it";
  EXPECT_EQ(calls.collective, 0);
  EXPECT_GT(calls.independent, 0);
  EXPECT_LE(calls.longest, 8192);
  calls = {};
  save(scratch / "collective", dict(), mpio(mesh.size(), {.collective = true}));
  EXPECT_EQ(calls.hints, std::vector<std::string>(mesh.rank() == 0 ? 2 : 1, ""));
  if (mesh.size() == 1) return;  // with itself there is nothing to aggregate
  EXPECT_LE(calls.independent, mesh.rank() == 0 ? 1 : 0) << "only the superblock, in close";
  EXPECT_GT(calls.collective, 0);
}

TEST_F(Mpio, WrongOptions) {
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{4095}, std::int64_t{4097}, std::int64_t{1} << 31}) {
    const std::string message = error_of<ConfigError>(
        [&] { save(scratch / "x", dict(), mpio(1, {.collective = false, .call_bytes = bytes, .hints = {}})); });
    EXPECT_CONTAINS(message, "call_bytes");
  }
  const checkpoint::MpiHints bad[] = {{{"", "1"}}, {{"cb_nodes", ""}}, {{std::string(1000, 'x'), "1"}}};
  for (const checkpoint::MpiHints& hints : bad) {
    const std::string message =
        error_of<ConfigError>([&] { save(scratch / "x", dict(), mpio(mesh.size(), {.hints = hints})); });
    EXPECT_CONTAINS(message, "hint");
  }
  const DeviceMesh alone;
  StateDict state;
  add_tensor(state, alone, "w", DType::f32, {3}, {Replicate{}}, true);
  EXPECT_THROW(save(scratch / fmt::format("x{}", mesh.rank()), state, mpio(1)), ConfigError);
  EXPECT_TRUE(calls.hints.empty());
}

TEST_F(Mpio, AsynchronousSavesRefuseIt) {
  AsyncSaver saver;
  const std::string message = error_of<ConfigError>([&] { saver.save(scratch / "x", dict(), mpio(1)); });
  EXPECT_CONTAINS(message, "Io::direct");
  EXPECT_FALSE(saver.is_saving());
  saver.save(scratch / "x", dict(), {.sizes = small_blocks()});
  saver.wait();
  expect_loads(scratch / "x");
}

TEST_F(Mpio, RanksOfOneFileMustUseTheSame) {
  if (mesh.size() == 1) GTEST_SKIP() << "needs two ranks";
  SaveOptions options = mpio(mesh.size());
  if (is_last()) options.io = Io::direct;
  EXPECT_CONTAINS(error_of<MismatchError>([&] { save(scratch / "x", dict(), options); }), "SaveOptions::io");
  expect_saves();
}

TEST_F(Mpio, RankThatCannotPlanIsEverybodysFailure) {
  if (mesh.size() == 1) GTEST_SKIP() << "needs two ranks";
  for (const std::int64_t ranks : {std::int64_t{1}, mesh.size()}) {
    StateDict state = dict();
    if (is_last()) add_tensor(state, mesh, "", DType::f32, {2}, {Replicate{}}, true);
    const std::string message = error_of<ConfigError>([&] { save(scratch / "x", state, mpio(ranks)); });
    EXPECT_CONTAINS(message, from(mesh.size() - 1));
  }
  expect_saves();
}

TEST_F(Mpio, DirectoryInTheWay) {
  const std::string id = mesh.next_save_id();
  const std::uint64_t next = std::stoull(id.substr(16), nullptr, 16) + 1;
  const std::filesystem::path partial = scratch / fmt::format(".x.partial-{}{:016x}", id.substr(0, 16), next);
  const std::string shard = shard_file_name(0, 1);
  if (mesh.rank() == 0) std::filesystem::create_directories(partial / shard);
  mesh.host().barrier();
  const std::string message = error_of<IoError>([&] { save(scratch / "x", dict(), mpio(mesh.size())); });
  EXPECT_CONTAINS(message, "MPI_File_open");
  EXPECT_CONTAINS(message, shard);
  expect_saves();
}

/// Files of this process can get no longer.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST_F(Mpio, FullDiskIsFoundBeforeHdf5Writes) {
  for (const std::int64_t ranks : {std::int64_t{1}, mesh.size()})
    for (const bool collective : {false, true}) {
      is_disk_full = mesh.rank() == 0;
      const std::string message =
          error_of<IoError>([&] { save(scratch / "x", dict(), mpio(ranks, {.collective = collective})); });
      is_disk_full = false;
      EXPECT_CONTAINS(message, from(0) + "reserving");
      EXPECT_CONTAINS(message, "No space left");
    }
  expect_saves();
}

TEST_F(Mpio, SizeLimitOfOneRankIsFoundBeforeHdf5Writes) {
  for (const Io io : {Io::mpio, Io::direct}) {
    SaveOptions options = mpio(mesh.size());
    options.io = io;
    std::string message;
    {
      std::optional<FileSizeLimit> limit;
      if (is_last()) limit.emplace(20000);
      message = error_of<IoError>([&] { save(scratch / "x", dict(), options); });
    }
    EXPECT_CONTAINS(message, from(mesh.size() - 1));
    EXPECT_CONTAINS(message, "RLIMIT_FSIZE");
  }
  expect_saves();
}

TEST_F(Mpio, FailedTransferOfOneRank) {
  for (const std::int64_t ranks : {std::int64_t{1}, std::int64_t{2}, mesh.size()}) {
    is_writing_broken = is_last();
    const std::string message = error_of<IoError>([&] { save(scratch / "x", dict(), mpio(ranks)); });
    is_writing_broken = false;
    EXPECT_CONTAINS(message, from(mesh.size() - 1) + "H5Dwrite");
  }
  expect_saves();
}

TEST_F(Mpio, FailedCollectiveTransfer) {
  is_writing_broken = true;
  const std::string message =
      error_of<IoError>([&] { save(scratch / "x", dict(), mpio(mesh.size(), {.collective = true})); });
  is_writing_broken = false;
  EXPECT_CONTAINS(message, from(0) + "H5Dwrite");
  expect_saves();
}

TEST_F(Mpio, FileThatCannotBeOpened) {
  is_opening_broken = true;
  const std::string message = error_of<IoError>([&] { save(scratch / "x", dict(), mpio(mesh.size())); });
  is_opening_broken = false;
  EXPECT_CONTAINS(message, "MPI_File_open");
  expect_saves();
}

/// A rank whose data cannot be had still takes part in the transfers of the others.
TEST_F(Mpio, FailedSourceOfOneRank) {
  for (const bool collective : {false, true}) {
    const StateDict state = dict();
    const std::string message = error_of<IoError>([&] {
      checkpoint::SaveJob job(scratch / "x", state, mpio(mesh.size(), {.collective = collective, .call_bytes = 4096}));
      job.prepare(state);
      int windows = 0;
      job.write([&](std::span<const checkpoint::PieceRequest> requests) {
        if (mesh.rank() == 0 && ++windows == 2) throw IoError("no data");
        checkpoint::source_of(state).fill(requests);
      });
      try {
        job.agree();
      } catch (...) {
        job.discard();
        throw;
      }
    });
    EXPECT_CONTAINS(message, from(0) + "no data");
  }
  expect_saves();
}

}  // namespace
}  // namespace fsdp2
