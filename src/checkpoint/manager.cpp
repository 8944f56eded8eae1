// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/manager.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <string>
#include <string_view>
#include <system_error>

#include "checkpoint/publication.hpp"
#include "comm/host_communicator.hpp"
#include "fsdp2/checkpoint/verify.hpp"
#include "fsdp2/error.hpp"
#include "fsdp2/log.hpp"

namespace fsdp2 {

namespace {

using checkpoint::HiddenDirectory;

std::atomic<bool> save_requested = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // for signal handlers

std::string name_of(std::int64_t step) {
  return fmt::format("step-{:08}", step);
}

/// The step of a name that name_of gives.
std::optional<std::int64_t> step_of(const std::string& name) {
  constexpr std::string_view prefix = "step-";
  if (!name.starts_with(prefix)) return std::nullopt;
  std::int64_t step = -1;
  const auto [end, error] = std::from_chars(name.data() + prefix.size(), name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size() || step < 0 || name != name_of(step))
    return std::nullopt;
  return step;
}

bool is_good(const NamedCheckpoint& checkpoint) {
  try {
    return verify(checkpoint.path, {.quick = true}).is_valid();
  } catch (const Error&) {
    return false;
  }
}

/// The checkpoints that need not stay.
std::vector<NamedCheckpoint> superfluous(const std::filesystem::path& root, const Retention& retention) {
  if (retention.keep_last < 0 || retention.keep_every < 0)
    throw ConfigError(fmt::format("retention keeps the last {} and every {}: expected numbers from 0",
                                  retention.keep_last, retention.keep_every));
  std::vector<NamedCheckpoint> result;
  if (retention.keep_last == 0) return result;
  std::vector<NamedCheckpoint> all = list_checkpoints(root);
  std::int64_t kept = 0;
  for (auto checkpoint = all.rbegin(); checkpoint != all.rend(); ++checkpoint) {
    const bool is_kept_anyway = retention.keep_every > 0 && checkpoint->step % retention.keep_every == 0;
    if (kept < retention.keep_last) {
      if (is_good(*checkpoint)) ++kept;
    } else if (!is_kept_anyway && is_good(*checkpoint)) {
      result.push_back(*checkpoint);
    }
  }
  std::reverse(result.begin(), result.end());
  return result;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

std::vector<NamedCheckpoint> list_checkpoints(const std::filesystem::path& root) {
  std::vector<NamedCheckpoint> checkpoints;
  std::error_code error;
  if (!std::filesystem::exists(root, error)) return checkpoints;
  try {
    for (const auto& entry : std::filesystem::directory_iterator(root))
      if (const auto step = step_of(entry.path().filename().string()))
        if (std::filesystem::is_regular_file(entry.path() / "index.h5", error))
          checkpoints.push_back({*step, entry.path()});
  } catch (const std::filesystem::filesystem_error& failure) {
    throw IoError(fmt::format("listing the checkpoints in {} failed: {}", root.string(), failure.code().message()));
  }
  std::sort(checkpoints.begin(), checkpoints.end(),
            [](const NamedCheckpoint& a, const NamedCheckpoint& b) { return a.step < b.step; });
  return checkpoints;
}

PruneReport prune(const std::filesystem::path& root, const Retention& retention, bool all_partials, bool dry_run) {
  PruneReport report;
  for (const HiddenDirectory& hidden : checkpoint::hidden_directories(root)) {
    if (hidden.kind == "old" && checkpoint::is_replacement_interrupted(hidden)) {
      if (!dry_run) checkpoint::restore_replaced(hidden.target);
    } else if (hidden.kind != "partial" || all_partials || checkpoint::is_owner_dead(hidden.path)) {
      if (!dry_run) checkpoint::remove_hidden(hidden);
      report.leftovers.push_back(hidden.path);
    }
  }
  for (const NamedCheckpoint& old : superfluous(root, retention)) {
    if (!dry_run) checkpoint::remove_checkpoint(old.path, read_index(old.path).save_id);
    report.checkpoints.push_back(old.path);
  }
  return report;
}

CheckpointManager::CheckpointManager(std::filesystem::path root, const DeviceMesh& mesh, const ManagerOptions& options)
    : root_(std::move(root)), mesh_(mesh), options_(options) {
  mesh_.host().collectively([&] {
    if (mesh_.rank() != 0) return;
    std::error_code error;
    std::filesystem::create_directories(root_, error);
    if (error || !std::filesystem::is_directory(root_))
      throw IoError(fmt::format("making directory {} for checkpoints failed: {}", root_.string(),
                                error ? error.message() : "it is not a directory"));
    prune(root_, options_.retention);
  });
}

std::filesystem::path CheckpointManager::path_of(std::int64_t step) const {
  return root_ / name_of(step);
}

void CheckpointManager::save(std::int64_t step, const StateDict& state, SaveOptions options) {
  wait();
  mesh_.host().collectively([&] {
    if (step < 0) throw ConfigError(fmt::format("step {} of a checkpoint is negative", step));
  });
  options.step = step;
  begin_ = now();
  if (options_.asynchronous) {
    saver_.save(path_of(step), state, options);
  } else {
    fsdp2::save(path_of(step), state, options);
    finish();
  }
}

bool CheckpointManager::poll() {
  return saver_.poll();
}

void CheckpointManager::wait() {
  if (!saver_.is_saving()) return;
  saver_.wait();
  finish();
}

void CheckpointManager::finish() {
  const double seconds = now() - begin_;
  longest_save_ = has_saved_ ? std::max(longest_save_, seconds) : seconds;
  has_saved_ = true;
  if (mesh_.rank() != 0) return;
  try {
    prune(root_, options_.retention);
  } catch (const Error& error) {
    log(LogLevel::warning, error.what());  // the checkpoint is complete: no reason to stop
  }
}

std::optional<NamedCheckpoint> CheckpointManager::latest() const {
  std::int64_t step = -1;
  mesh_.host().collectively([&] {
    if (mesh_.rank() != 0) return;
    const std::vector<NamedCheckpoint> all = list_checkpoints(root_);
    if (!all.empty()) step = all.back().step;
  });
  auto number = static_cast<std::uint64_t>(step);
  mesh_.host().broadcast({&number, 1}, 0);
  step = static_cast<std::int64_t>(number);
  if (step < 0) return std::nullopt;
  return NamedCheckpoint{step, path_of(step)};
}

std::optional<CheckpointIndex> CheckpointManager::restore(const StateDict& state, const LoadOptions& options) {
  const HostCommunicator& host = mesh_.host();
  wait();
  std::vector<std::uint64_t> steps;
  host.collectively([&] {
    if (mesh_.rank() != 0) return;
    for (const NamedCheckpoint& found : list_checkpoints(root_))
      steps.push_back(static_cast<std::uint64_t>(found.step));
  });
  std::uint64_t count = steps.size();
  host.broadcast({&count, 1}, 0);
  steps.resize(count);
  host.broadcast(steps, 0);
  while (!steps.empty()) {
    const std::filesystem::path path = path_of(static_cast<std::int64_t>(steps.back()));
    steps.pop_back();
    try {
      return load(path, state, options);
    } catch (const MismatchError&) {
      throw;
    } catch (const CheckpointError& error) {  // the same on all ranks
      if (steps.empty()) throw;
      log(LogLevel::warning, fmt::format("{}; trying the checkpoint before it", error.what()));
    }
  }
  return std::nullopt;
}

bool CheckpointManager::save_due(std::optional<double> seconds_left) {
  const bool is_near_the_end = seconds_left && *seconds_left < 1.5 * longest_save_;
  std::uint64_t reasons[] = {save_requested.exchange(false) ? 1u : 0u, is_near_the_end ? 1u : 0u};
  mesh_.host().all_reduce(reasons, MPI_MAX);
  const bool is_end = reasons[1] != 0 && !has_saved_for_the_end_;
  has_saved_for_the_end_ = reasons[1] != 0;
  return reasons[0] != 0 || is_end;
}

void CheckpointManager::request_save() noexcept {
  save_requested = true;
}

}  // namespace fsdp2
