// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

#include "fsdp2/checkpoint/manager.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpi.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "fsdp2/log.hpp"
#include "support/checkpoint.hpp"

namespace fsdp2::testing {
namespace {

namespace fs = std::filesystem;

class Manager : public ::testing::Test {
 public:
  void SetUp() override {
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    mesh_ = DeviceMesh(MPI_COMM_WORLD, {{"dp", size_}});
    root_ = scratch_ / "run";
  }
  void TearDown() override { mesh_.close(); }

  /// The values tell the step.
  StateDict make(std::int64_t step) const {
    StateDict state;
    add_tensor(state, mesh_, "w", DType::f32, {40, 30}, {Shard{0}}, false);
    add_tensor(state, mesh_, "r", DType::i64, {9}, {Replicate{}}, false);
    for (const auto& [name, tensor] : state.tensors)
      set_bytes(tensor.local(),
                Bytes(static_cast<std::size_t>(tensor.local().bytes()), static_cast<std::byte>(step & 0x7f)));
    return state;
  }
  void save(CheckpointManager& manager, std::int64_t step) const {
    manager.save(step, make(step), {.sizes = small_blocks()});
  }
  void expect_restored(CheckpointManager& manager, std::int64_t step) const {
    const StateDict state = make(0);
    const auto index = manager.restore(state);
    ASSERT_TRUE(index.has_value());
    EXPECT_EQ(index->step, step);
    for (const auto& [name, tensor] : make(step).tensors)
      EXPECT_TRUE(bytes_of(state.tensors.at(name).local()) == bytes_of(tensor.local())) << name;
  }
  std::vector<std::int64_t> steps() const {
    MPI_Barrier(MPI_COMM_WORLD);
    std::vector<std::int64_t> found;
    for (const NamedCheckpoint& checkpoint : list_checkpoints(root_)) found.push_back(checkpoint.step);
    MPI_Barrier(MPI_COMM_WORLD);
    return found;
  }
  template <class Change>
  void on_rank_0(Change&& change) const {
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank_ == 0) change();
    MPI_Barrier(MPI_COMM_WORLD);
  }
  void damage(const fs::path& path) const {
    on_rank_0([&] { fs::resize_file(path, fs::file_size(path) / 2); });
  }

 protected:
  using Steps = std::vector<std::int64_t>;

  ScratchDirectory scratch_;
  fs::path root_;
  int size_ = 1;
  int rank_ = 0;
  DeviceMesh mesh_;
};

TEST_F(Manager, KeepsTheLastAndEverySoMany) {
  for (const bool asynchronous : {false, true}) {
    root_ = scratch_ / fmt::format("run{}", asynchronous);
    CheckpointManager manager(root_, mesh_,
                              {.retention = {.keep_last = 2, .keep_every = 30}, .asynchronous = asynchronous});
    EXPECT_FALSE(manager.latest().has_value());
    EXPECT_FALSE(manager.restore(make(0)).has_value());
    for (std::int64_t step = 10; step <= 100; step += 10) {
      save(manager, step);
      if (step == 50) {
        while (!manager.poll()) {
        }
      }
    }
    manager.wait();
    EXPECT_EQ(steps(), (Steps{30, 60, 90, 100}));
    EXPECT_EQ(manager.latest(), (NamedCheckpoint{100, root_ / "step-00000100"}));
    expect_restored(manager, 100);
    EXPECT_EQ(names_in(root_).size(), 4u);  // and nothing hidden
  }
}

TEST_F(Manager, KeepsAllUnlessToldOtherwise) {
  CheckpointManager manager(root_, mesh_);
  for (const std::int64_t step : {1, 2, 3}) save(manager, step);
  EXPECT_EQ(steps(), (Steps{1, 2, 3}));
  same_error<IoError>(mesh_.host(), [&] { save(manager, 3); });
  same_error<ConfigError>(mesh_.host(), [&] { save(manager, -1); });
  manager.save(3, make(4), {.sizes = small_blocks(), .overwrite = true});
  EXPECT_EQ(steps(), (Steps{1, 2, 3}));
  same_error<ConfigError>(mesh_.host(), [&] { CheckpointManager(root_, mesh_, {.retention = {.keep_last = -1}}); });
}

// By number, not by text; and only what the manager would have made.
TEST_F(Manager, LookAlikesAreIgnored) {
  CheckpointManager manager(root_, mesh_, {.retention = {.keep_last = 1}});
  save(manager, 99999999);
  save(manager, 100000000);
  on_rank_0([&] {
    for (const char* name : {"step-1", "step-000000200000000", "step-200000000x", "step--0000001", "Step-200000000",
                             ".step-200000000", "step-200000000.bak"})
      fs::copy(root_ / "step-100000000", root_ / name);
    fs::create_directory(root_ / "step-300000000");  // without an index
    std::ofstream(root_ / "step-400000000") << "a file";
  });
  EXPECT_EQ(steps(), Steps{100000000});
  save(manager, 100000001);
  EXPECT_EQ(steps(), Steps{100000001});
  EXPECT_TRUE(fs::exists(root_ / "step-1"));
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST_F(Manager, RestoresTheNewestThatIsGood) {
  std::vector<std::string> warnings;
  set_log_sink([&](LogLevel, std::string_view message) { warnings.emplace_back(message); });
  CheckpointManager manager(root_, mesh_);
  for (const std::int64_t step : {1, 2, 3, 4}) save(manager, step);
  damage(root_ / "step-00000004" / "index.h5");
  on_rank_0([&] {
    fs::remove(root_ / "step-00000003" /
               shard_file_name(static_cast<std::size_t>(size_ - 1), static_cast<std::size_t>(size_)));
  });
  expect_restored(manager, 2);
  EXPECT_EQ(warnings.size(), 2u);
  EXPECT_EQ(manager.latest()->step, 4);
  damage(root_ / "step-00000002" / shard_file_name(0, static_cast<std::size_t>(size_)));
  expect_restored(manager, 1);
  damage(root_ / "step-00000001" / "index.h5");
  same_error<CorruptError>(mesh_.host(), [&] { manager.restore(make(0)); });
  set_log_sink({});

  CheckpointManager other(scratch_ / "other", mesh_);
  save(other, 1);
  save(other, 2);
  StateDict wrong = make(0);
  add_tensor(wrong, mesh_, "more", DType::f32, {2}, {Replicate{}}, false);
  same_error<MismatchError>(mesh_.host(), [&] { other.restore(wrong); });
}

// What does not verify does not count, and is nobody's to remove.
TEST_F(Manager, TheLastGoodOneStays) {
  CheckpointManager manager(root_, mesh_);
  for (const std::int64_t step : {1, 2, 3, 4}) save(manager, step);
  damage(root_ / "step-00000003" / "index.h5");
  damage(root_ / "step-00000004" / "index.h5");
  on_rank_0([&] {
    const PruneReport would = prune(root_, {.keep_last = 1}, false, true);
    EXPECT_EQ(would.checkpoints, std::vector<fs::path>{root_ / "step-00000001"});
    EXPECT_TRUE(fs::exists(root_ / "step-00000001"));
    prune(root_, {.keep_last = 1});
  });
  EXPECT_EQ(steps(), (Steps{2, 3, 4}));
}

TEST_F(Manager, ClearsWhatADeadRunLeft) {
  {
    CheckpointManager manager(root_, mesh_);
    save(manager, 1);
  }
  const std::string id(32, 'a');
  const auto leave = [&](const std::string& name, const std::string& owner) {
    fs::create_directories(root_ / name);
    std::ofstream(root_ / name / "owner") << owner;
  };
  on_rank_0([&] {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(0);
    int status = 0;
    ::waitpid(child, &status, 0);
    std::ifstream boot("/proc/sys/kernel/random/boot_id");
    std::string boot_id;
    std::getline(boot, boot_id);
    char host[256] = {};
    ::gethostname(host, sizeof host - 1);
    const auto note = [&](const std::string& h, const std::string& b, int pid) {
      return fmt::format("host={}\nboot_id={}\npid={}\njob=\n", h, b, pid);
    };
    leave(".step-00000002.partial-" + id, note(host, boot_id, child));
    leave(".step-00000003.partial-" + id, note(host, boot_id, ::getpid()));
    leave(".step-00000004.partial-" + id, note("elsewhere", boot_id, child));
    leave(".step-00000005.partial-" + id, note(host, "another boot", child));
    leave(".step-00000006.partial-" + id, "");
    leave(".step-00000001.old-" + id, "");
    leave(".step-00000007.trash-" + id, "");
    leave(".step-00000008.partial-short", note(host, boot_id, child));
    fs::rename(root_ / "step-00000001", root_ / (".step-00000009.old-" + id));
    fs::copy(root_ / (".step-00000009.old-" + id), root_ / "step-00000001");
  });
  const CheckpointManager manager(root_, mesh_);
  EXPECT_EQ(steps(), (Steps{1, 9}));  // 9 was being replaced
  const auto hidden = [&] {
    std::vector<std::string> names;
    for (const std::string& name : names_in(root_))
      if (name.starts_with('.')) names.push_back(name.substr(0, name.find('-', 8)));
    return names;
  };
  EXPECT_EQ(hidden(),
            (std::vector<std::string>{".step-00000003.partial", ".step-00000004.partial", ".step-00000005.partial",
                                      ".step-00000006.partial", ".step-00000008.partial"}));
  on_rank_0([&] { EXPECT_EQ(prune(root_, {}, true).leftovers.size(), 4u); });
  EXPECT_EQ(hidden(), std::vector<std::string>{".step-00000008.partial"});
}

TEST_F(Manager, SavesAreDueWhenAskedForAndBeforeTheEnd) {
  CheckpointManager manager(root_, mesh_);
  EXPECT_FALSE(manager.save_due());
  EXPECT_FALSE(manager.save_due(3600.0));
  if (rank_ == size_ - 1) {  // one rank is enough
    const auto before = std::signal(SIGUSR1, [](int) { CheckpointManager::request_save(); });
    std::raise(SIGUSR1);
    std::signal(SIGUSR1, before);
  }
  EXPECT_TRUE(manager.save_due());
  EXPECT_FALSE(manager.save_due());
  const bool is_first = rank_ == 0;
  EXPECT_TRUE(manager.save_due(is_first ? 59.0 : 61.0));  // nobody knows how long a save takes
  EXPECT_FALSE(manager.save_due(50.0));                   // it is due once
  save(manager, 1);
  EXPECT_FALSE(manager.save_due(50.0));  // it took less than that
  EXPECT_TRUE(manager.save_due(0.0));
  EXPECT_FALSE(manager.save_due(0.0));
}

}  // namespace
}  // namespace fsdp2::testing
