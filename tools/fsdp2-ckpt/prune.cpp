// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <fmt/format.h>

#include <limits>
#include <memory>

#include "command.hpp"
#include "fsdp2/checkpoint/manager.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::tool {

namespace {

struct Options {
  std::string root;
  Retention retention;
  bool partials = false;
  bool dry_run = false;
  bool json = false;
};

std::vector<std::string> texts(const std::vector<std::filesystem::path>& paths) {
  return {paths.begin(), paths.end()};
}

void run(const Options& options) {
  require_directory(options.root);
  PruneReport report;
  try {
    report = prune(options.root, options.retention, options.partials, options.dry_run);
  } catch (const Error& error) {
    throw Exit{status_failed, error.what()};
  }
  if (options.json) {
    print_json({{"root", options.root},
                {"dry_run", options.dry_run},
                {"checkpoints", texts(report.checkpoints)},
                {"leftovers", texts(report.leftovers)}});
    return;
  }
  const char* verb = options.dry_run ? "would remove" : "removed";
  for (const std::string& path : texts(report.leftovers)) fmt::print("{} leftover {}\n", verb, printable(path));
  for (const std::string& path : texts(report.checkpoints)) fmt::print("{} checkpoint {}\n", verb, printable(path));
}

}  // namespace

void add_prune(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "prune",
      "Removes old checkpoints of a run, never the last good ones, and what writers that died have left behind.");
  const auto options = std::make_shared<Options>();
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  command->add_option("ROOT", options->root, "directory of the run's checkpoints")->required();
  command
      ->add_option("--keep-last", options->retention.keep_last,
                   "so many of the newest stay, of those whose tables verify")
      ->required()
      ->check(CLI::Range(std::int64_t{1}, most));
  command
      ->add_option("--keep-every", options->retention.keep_every,
                   "checkpoints whose step is a multiple of this stay as well")
      ->check(CLI::Range(std::int64_t{1}, most));
  command->add_flag("--partials", options->partials,
                    "remove unfinished checkpoints of other hosts too: only when nobody is saving");
  command->add_flag("--dry-run", options->dry_run, "change nothing; say what would be removed");
  command->add_flag("--json", options->json, "print one JSON document");
  command->callback([options] { run(*options); });
}

}  // namespace fsdp2::tool
