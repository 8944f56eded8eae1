// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/reshard.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>

#include "command.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::tool {

namespace {

struct Options {
  std::string source;
  std::string target;
  ReshardOptions reshard;
  bool quiet = false;
};

void run(Options options) {
  // Usage errors first: what is wrong before any work is done has another status than what goes wrong during it.
  try {
    (void)read_index(options.source);
  } catch (const Error& error) {
    throw Exit{status_usage, error.what()};
  }
  if (std::filesystem::exists(std::filesystem::symlink_status(options.target)))
    throw Exit{status_usage, fmt::format("{} already exists: choose another name or remove it", options.target)};
  const bool shows_progress = !options.quiet && ::isatty(STDERR_FILENO) != 0;
  if (shows_progress)
    options.reshard.progress = [](std::int64_t done, std::int64_t total) {
      fmt::print(stderr, "\r{} of {}", format_bytes(done), format_bytes(total));
    };
  ReshardReport report;
  try {
    report = reshard(options.source, options.target, options.reshard);
  } catch (const ConfigError& error) {
    throw Exit{status_usage, error.what()};
  } catch (const Error& error) {
    throw Exit{status_failed, error.what()};
  }
  if (shows_progress) fmt::print(stderr, "\n");
  if (options.quiet) return;
  std::int64_t bytes = 0;
  for (const TensorEntry& tensor : report.target.tensors) bytes += tensor.bytes();
  fmt::print("{} ({} ranks) -> {} ({} ranks)\n", options.source, report.source.world_size, options.target,
             report.target.world_size);
  for (std::size_t m = 0; m < report.target.meshes.size(); ++m)
    fmt::print("  mesh {}: {} -> {}\n", report.target.meshes[m].name, report.source.meshes[m].spec.to_string(),
               report.target.meshes[m].spec.to_string());
  fmt::print("  {} tensors, {}: all content digests equal\n", report.target.tensors.size(), format_bytes(bytes));
}

}  // namespace

void add_reshard(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "reshard",
      "Copies a checkpoint to another number of ranks, bit by bit, with bounded memory, and proves it by digests.");
  const auto options = std::make_shared<Options>();
  command->add_option("SRC", options->source, "checkpoint directory")->required();
  command->add_option("DST", options->target, "directory to make; must not exist")->required();
  command
      ->add_option("--world-size", options->reshard.world_size,
                   "ranks of the new checkpoint; the axis over which FSDP shards is rescaled, other axes are kept")
      ->required()
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{std::numeric_limits<int>::max()}));  // as MPI counts ranks
  command
      ->add_option("--memory", options->reshard.memory_bytes, "most tensor bytes in memory at a time, such as 256MiB")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::int64_t{1}, std::numeric_limits<std::int64_t>::max()))
      ->capture_default_str();
  command->add_flag("--quiet,-q", options->quiet, "print errors only");
  command->callback([options] { run(*options); });
}

}  // namespace fsdp2::tool
