// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/publication.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>

#include "checkpoint/file.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::checkpoint {

namespace {

/// "run/step-1/" names the same directory as "run/step-1".
std::filesystem::path without_trailing_slash(const std::filesystem::path& path) {
  const std::filesystem::path normal = path.lexically_normal();
  return normal.has_filename() ? normal : normal.parent_path();
}

std::filesystem::path parent_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : ".";
}

std::filesystem::path hidden_name(const std::filesystem::path& target, const char* kind, const std::string& id) {
  return target.parent_path() / fmt::format(".{}.{}-{}", target.filename().string(), kind, id);
}

/// What was moved aside to replace the target.
std::vector<HiddenDirectory> replaced(const std::filesystem::path& target) {
  std::vector<HiddenDirectory> found = hidden_directories(parent_of(target));
  std::erase_if(found, [&](const HiddenDirectory& hidden) {
    return hidden.kind != "old" || hidden.target.filename() != target.filename();
  });
  return found;
}

/// Runs `body`, and after a failure `undo`: a publication that failed must not be seen.
template <class Body, class Undo>
void or_undo(Body&& body, Undo&& undo) {
  try {
    body();
  } catch (const IoError& error) {
    try {
      undo();
    } catch (const IoError& second) {
      throw IoError(fmt::format("{}; taking it back failed too: {}", error.what(), second.what()));
    }
    throw;
  }
}

/// What is left of it has a name that says so. No failure: the checkpoint that matters is in its place.
void throw_away(const std::filesystem::path& path, const std::filesystem::path& trash) {
  std::error_code ignored;
  std::filesystem::rename(path, trash, ignored);
  if (!ignored) std::filesystem::remove_all(trash, ignored);
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) name[0] = '\0';
  return name.data();
}

std::string job_id() {
  for (const char* name : {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"})
    if (const char* value = std::getenv(name)) return value;
  return "";
}

}  // namespace

Publication::Publication(const std::filesystem::path& target, const std::string& save_id)
    : target_(without_trailing_slash(target)), save_id_(save_id) {
  const std::string leaf = target_.filename().string();
  if (leaf.empty() || leaf.front() == '.')
    throw ConfigError(fmt::format("checkpoint name \"{}\" is empty or begins with '.': such names are never loaded",
                                  target.string()));
  partial_ = hidden("partial");
}

std::filesystem::path Publication::hidden(const char* kind) const {
  return hidden_name(target_, kind, save_id_);
}

void Publication::prepare(bool overwrites) const {
  std::error_code error;
  restore_replaced(target_);
  const std::filesystem::file_status status = std::filesystem::symlink_status(target_, error);
  if (std::filesystem::exists(status) && !overwrites)
    throw IoError(
        fmt::format("{} already exists: a checkpoint is not overwritten unless asked for; choose another name "
                    "or remove it",
                    target_.string()));
  if (std::filesystem::exists(status) && !std::filesystem::is_directory(status))
    throw IoError(fmt::format("{} is not a directory: only checkpoints are overwritten", target_.string()));
  if (const std::filesystem::path parent = target_.parent_path(); !parent.empty()) {
    std::filesystem::create_directories(parent, error);
    if (error || !std::filesystem::is_directory(parent))
      throw IoError(fmt::format("making directory {} for checkpoint {} failed: {}", parent.string(), target_.string(),
                                error ? error.message() : "it is not a directory"));
  }
  (void)make_directory(partial_);
}

void Publication::note_owner() const {
  const std::string note =
      fmt::format("host={}\nboot_id={}\npid={}\njob={}\n", host_name(), boot_id(), ::getpid(), job_id());
  File file = File::create(partial_ / "owner");
  file.write(std::as_bytes(std::span(note)), 0);
  file.close();
}

void Publication::publish(bool overwrites) const {
  const std::filesystem::path parent = parent_of(target_);
  remove_file(partial_ / "owner");
  sync_directory(partial_);
  std::error_code ignored;
  if (!overwrites || !std::filesystem::exists(target_, ignored)) {
    rename_to_new(partial_, target_);
    or_undo([&] { sync_directory(parent); }, [&] { rename_to_new(target_, partial_); });
    return;
  }
  if (exchange(partial_, target_)) {
    or_undo([&] { sync_directory(parent); }, [&] { (void)exchange(partial_, target_); });
    throw_away(partial_, hidden("trash"));
    return;
  }
  // What a replacement left that ended before it had cleared up: the next interruption must not bring it back.
  for (const HiddenDirectory& stale : replaced(target_)) remove_hidden(stale);
  const std::filesystem::path old = hidden("old");
  rename_to_new(target_, old);
  or_undo(
      [&] {
        rename_to_new(partial_, target_);
        or_undo([&] { sync_directory(parent); }, [&] { rename_to_new(target_, partial_); });
      },
      [&] { rename_to_new(old, target_); });
  throw_away(old, hidden("trash"));
}

void Publication::discard() const noexcept {
  std::error_code ignored;
  std::filesystem::remove_all(partial_, ignored);
}

std::vector<HiddenDirectory> hidden_directories(const std::filesystem::path& parent) {
  std::vector<HiddenDirectory> found;
  std::error_code error;
  if (!std::filesystem::exists(parent, error)) return found;
  constexpr std::size_t id_digits = 32;  // and nothing after them
  try {
    for (const auto& entry : std::filesystem::directory_iterator(parent)) {
      const std::string name = entry.path().filename().string();
      const std::size_t dash = name.size() < id_digits + 1 ? 0 : name.size() - id_digits - 1;
      const std::size_t dot = name.rfind('.', dash);
      if (!name.starts_with('.') || dash == 0 || name[dash] != '-' || dot == std::string::npos || dot < 2 ||
          name.find_first_not_of("0123456789abcdef", dash + 1) != std::string::npos ||
          !std::filesystem::is_directory(entry.symlink_status()))
        continue;
      const std::string kind = name.substr(dot + 1, dash - dot - 1);
      if (kind == "partial" || kind == "old" || kind == "trash")
        found.push_back({entry.path(), kind, name.substr(dash + 1), parent / name.substr(1, dot - 1)});
    }
  } catch (const std::filesystem::filesystem_error& failure) {
    throw IoError(fmt::format("listing {} failed: {}", parent.string(), failure.code().message()));
  }
  return found;
}

bool is_owner_dead(const std::filesystem::path& partial) {
  std::ifstream file(partial / "owner");
  std::map<std::string, std::string> note;
  for (std::string line; std::getline(file, line);)
    if (const std::size_t equals = line.find('='); equals != std::string::npos)
      note[line.substr(0, equals)] = line.substr(equals + 1);
  if (note["host"] != host_name() || note["boot_id"].empty() || note["boot_id"] != boot_id()) return false;
  pid_t pid = 0;
  const std::string& text = note["pid"];
  if (std::from_chars(text.data(), text.data() + text.size(), pid).ec != std::errc() || pid <= 0) return false;
  return ::kill(pid, 0) != 0 && errno == ESRCH;
}

bool is_replacement_interrupted(const HiddenDirectory& old) {
  std::error_code error;
  return !std::filesystem::exists(std::filesystem::symlink_status(old.target, error));
}

void restore_replaced(const std::filesystem::path& target) {
  std::error_code error;
  try {
    const std::vector<HiddenDirectory> old = replaced(target);
    if (!old.empty() && is_replacement_interrupted(old.front()))
      std::filesystem::rename(old.front().path, target, error);  // another rank may be faster
  } catch (const IoError&) {  // checkpoints can be written where directories may not be listed
  }
}

void remove_hidden(const HiddenDirectory& hidden) {
  throw_away(hidden.path, hidden_name(hidden.target, "trash", hidden.save_id));
}

void remove_checkpoint(const std::filesystem::path& checkpoint, const std::string& id) {
  const std::filesystem::path trash = hidden_name(checkpoint, "trash", id);
  rename_to_new(checkpoint, trash);
  std::error_code ignored;  // what is left is trash
  std::filesystem::remove_all(trash, ignored);
}

}  // namespace fsdp2::checkpoint
