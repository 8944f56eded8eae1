// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/publication.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "fsdp2/error.hpp"
#include "support/checkpoint.hpp"
#include "support/scratch_folder.hpp"

namespace fsdp2::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::names_in;
using testing::ScratchFolder;
using Names = std::vector<std::string>;

const std::string save_id = "0123456789abcdef0123456789abcdef";

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream(path) << text;
}

std::string read_text(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

/// A publication with one file in it.
Publication prepared(const fs::path& target) {
  const Publication publication(target, save_id);
  publication.prepare();
  publication.note_owner();
  write_text(publication.partial() / "file", "content");
  return publication;
}

TEST(Publication, IsHiddenUntilItIsPublished) {
  const ScratchFolder scratch;
  const Publication publication = prepared(scratch / "step-1");
  const std::string hidden = ".step-1.partial-" + save_id;
  EXPECT_EQ(publication.partial(), scratch / hidden);
  EXPECT_EQ(names_in(scratch.path()), Names{hidden});
  EXPECT_EQ(names_in(publication.partial()), (Names{"file", "owner"}));
  publication.publish();
  EXPECT_EQ(names_in(scratch.path()), Names{"step-1"});
  EXPECT_EQ(names_in(scratch / "step-1"), Names{"file"});
  EXPECT_EQ(read_text(scratch / "step-1" / "file"), "content");
}

TEST(Publication, SaysWhoIsWriting) {
  const ScratchFolder scratch;
  ASSERT_EQ(::setenv("SLURM_JOB_ID", "job 17", 1), 0);
  const Publication publication = prepared(scratch / "step-1");
  ::unsetenv("SLURM_JOB_ID");
  std::istringstream note(read_text(publication.partial() / "owner"));
  Names lines;
  for (std::string line; std::getline(note, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 4u);
  char host[256] = {};
  ASSERT_EQ(::gethostname(host, sizeof host - 1), 0);
  EXPECT_EQ(lines[0], fmt::format("host={}", host));
  EXPECT_EQ(lines[1].substr(0, 8), "boot_id=");
  EXPECT_EQ(lines[2], fmt::format("pid={}", ::getpid()));
  EXPECT_EQ(lines[3], "job=job 17");
}

TEST(Publication, RefusesNamesThatAreNeverLoaded) {
  for (const char* name : {"", "/", ".", "..", ".hidden", "dir/.hidden", "dir/.hidden/", "dir/..", "a/b/../.."})
    EXPECT_THROW(Publication(name, save_id), ConfigError) << name;
}

TEST(Publication, KnowsATargetByAnySpelling) {
  const ScratchFolder scratch;
  for (const char* spelling : {"dir/step-1", "dir/step-1/", "dir/step-1//", "dir/./step-1/.", "dir/other/../step-1"})
    EXPECT_EQ(Publication(scratch / spelling, save_id).partial(), scratch / "dir" / (".step-1.partial-" + save_id))
        << spelling;
  prepared(scratch / "step-1/").publish();
  EXPECT_EQ(names_in(scratch.path()), Names{"step-1"});
}

TEST(Publication, WorksInTheCurrentDirectory) {
  const ScratchFolder scratch;
  const fs::path before = fs::current_path();
  fs::current_path(scratch.path());
  prepared("step-1").publish();
  prepared("./step-2/").publish();
  fs::current_path(before);
  EXPECT_EQ(names_in(scratch.path()), (Names{"step-1", "step-2"}));
}

TEST(Publication, MakesParents) {
  const ScratchFolder scratch;
  prepared(scratch / "run/7/step-1").publish();
  EXPECT_EQ(names_in(scratch / "run/7"), Names{"step-1"});
  write_text(scratch / "file", "");
  EXPECT_THROW(prepared(scratch / "file/step-1"), IoError);
  EXPECT_THROW(prepared(scratch / "file/7/step-1"), IoError);
}

TEST(Publication, EveryRankMayPrepare) {
  const ScratchFolder scratch;
  const Publication one(scratch / "run/step-1", save_id);
  const Publication two(scratch / "run/step-1", save_id);
  one.prepare();
  two.prepare();
  one.note_owner();
  one.publish();
  EXPECT_THROW(two.prepare(), IoError);
}

/// What is there under the final name: it is refused, and stays as it is.
TEST(Publication, NeverReplacesAnything) {
  const ScratchFolder scratch;
  write_text(scratch / "file", "mine");
  fs::create_directory(scratch / "empty");
  fs::create_directory(scratch / "full");
  write_text(scratch / "full/file", "mine");
  fs::create_symlink("nowhere", scratch / "dangling");
  fs::create_directory_symlink("full", scratch / "link");
  const Names before = names_in(scratch.path());
  for (const std::string& name : before) {
    try {
      prepared(scratch / name);
      ADD_FAILURE() << name;
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find("already exists"), std::string::npos) << error.what();
    }
    EXPECT_THROW(prepared(scratch / (name + "/")), IoError);
  }
  EXPECT_EQ(names_in(scratch.path()), before);
  EXPECT_EQ(read_text(scratch / "file"), "mine");
  EXPECT_EQ(read_text(scratch / "full/file"), "mine");
}

TEST(Publication, DoesNotReplaceWhatAppearedMeanwhile) {
  const ScratchFolder scratch;
  for (const char* kind : {"file", "empty", "full", "dangling"}) {
    SCOPED_TRACE(kind);
    const fs::path target = scratch / (std::string("step-") + kind);
    const Publication publication = prepared(target);
    if (kind == std::string("file")) write_text(target, "mine");
    if (kind == std::string("dangling")) fs::create_symlink("nowhere", target);
    if (kind == std::string("empty") || kind == std::string("full")) fs::create_directory(target);
    if (kind == std::string("full")) write_text(target / "file", "mine");
    EXPECT_THROW(publication.publish(), IoError);
    EXPECT_FALSE(fs::is_directory(target) && fs::exists(target / "file") && read_text(target / "file") != "mine");
    EXPECT_TRUE(fs::exists(fs::symlink_status(target)));
    publication.discard();
    EXPECT_FALSE(fs::exists(publication.partial()));
    EXPECT_TRUE(fs::exists(fs::symlink_status(target)));
  }
}

TEST(Publication, OverwritesWhenAsked) {
  const ScratchFolder scratch;
  prepared(scratch / "step-1").publish();
  const Publication publication(scratch / "step-1", std::string(32, 'f'));
  publication.prepare(true);
  publication.note_owner();
  write_text(publication.partial() / "file", "new");
  publication.publish(true);
  EXPECT_EQ(names_in(scratch.path()), Names{"step-1"});
  EXPECT_EQ(read_text(scratch / "step-1" / "file"), "new");
}

/// What an interrupted replacement left under a hidden name comes back; nothing else does.
TEST(Publication, RestoresWhatWasReplaced) {
  const ScratchFolder scratch;
  const Names others = {".step-1.old-" + save_id + ".trash-" + save_id, ".step-1.old-er.partial-" + save_id,
                        ".step-1.old-" + save_id + "0", ".step-1.trash-" + save_id};
  for (const std::string& name : others) fs::create_directory(scratch / name);
  restore_replaced(scratch / "step-1");
  EXPECT_FALSE(fs::exists(scratch / "step-1"));
  fs::create_directory(scratch / (".step-1.old-" + save_id));
  write_text(scratch / (".step-1.old-" + save_id) / "file", "mine");
  EXPECT_THROW(prepared(scratch / "step-1"), IoError);
  EXPECT_EQ(read_text(scratch / "step-1" / "file"), "mine");
  for (const std::string& name : others) EXPECT_TRUE(fs::exists(scratch / name)) << name;
}

TEST(Publication, ThrowsAwayUnderANameThatIsNotRestored) {
  const ScratchFolder scratch;
  prepared(scratch / "step-1").publish();
  // Non-empty, so that nothing can be renamed to it.
  const fs::path trash = scratch / (".step-1.trash-" + save_id);
  fs::create_directory(trash);
  write_text(trash / "file", "");
  EXPECT_THROW(remove_checkpoint(scratch / "step-1", save_id), IoError);
  EXPECT_EQ(names_in(scratch.path()), (Names{trash.filename().string(), "step-1"}));
  fs::remove_all(trash);
  remove_checkpoint(scratch / "step-1", save_id);
  EXPECT_EQ(names_in(scratch.path()), Names{});
}

TEST(Publication, DiscardLeavesNothing) {
  const ScratchFolder scratch;
  const Publication publication = prepared(scratch / "step-1");
  fs::create_directory(publication.partial() / "more");
  write_text(publication.partial() / "more" / "file", "");
  publication.discard();
  EXPECT_EQ(names_in(scratch.path()), Names{});
  publication.discard();
}

TEST(Publication, DiscardLeavesWhatWasPublished) {
  const ScratchFolder scratch;
  const Publication publication = prepared(scratch / "step-1");
  publication.publish();
  publication.discard();
  EXPECT_EQ(names_in(scratch.path()), Names{"step-1"});
}

}  // namespace
}  // namespace fsdp2::checkpoint
