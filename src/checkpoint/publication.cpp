// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/publication.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <vector>

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

/// The ids of saves that moved the target aside to replace it. Nothing may follow the save id: ".a.old-…" also begins
/// what is hidden of a checkpoint whose name begins with "a.old-".
std::vector<std::string> replacements(const std::filesystem::path& target) {
  constexpr std::size_t id_length = 32;
  const std::string prefix = fmt::format(".{}.old-", target.filename().string());
  std::vector<std::string> found;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(parent_of(target), ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(prefix) || name.size() != prefix.size() + id_length) continue;
    const std::string id = name.substr(prefix.size());
    if (id.find_first_not_of("0123456789abcdef") == std::string::npos) found.push_back(id);
  }
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
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  const std::string note =
      fmt::format("host={}\nboot_id={}\npid={}\njob={}\n", host.data(), boot_id(), ::getpid(), job_id());
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
  for (const std::string& stale : replacements(target_))
    throw_away(hidden_name(target_, "old", stale), hidden_name(target_, "trash", stale));
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

void restore_replaced(const std::filesystem::path& target) {
  std::error_code error;
  if (std::filesystem::exists(std::filesystem::symlink_status(target, error))) return;
  const std::vector<std::string> ids = replacements(target);
  if (!ids.empty())
    std::filesystem::rename(hidden_name(target, "old", ids.front()), target, error);  // another rank may be faster
}

void remove_checkpoint(const std::filesystem::path& checkpoint, const std::string& id) {
  const std::filesystem::path trash = hidden_name(checkpoint, "trash", id);
  rename_to_new(checkpoint, trash);
  std::error_code ignored;  // what is left is trash
  std::filesystem::remove_all(trash, ignored);
}

}  // namespace fsdp2::checkpoint
