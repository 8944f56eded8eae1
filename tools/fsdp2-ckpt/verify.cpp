// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/verify.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "command.hpp"
#include "fsdp2/error.hpp"
#include "progress.hpp"

namespace fsdp2::tool {

namespace {

struct Options {
  std::string path;
  VerifyOptions verify;
  Progress progress;
  bool quiet = false;
  bool json = false;
};

void print_document(const Options& options, const VerifyReport& report) {
  print_json({{"checkpoint", options.path},
              {"valid", report.is_valid()},
              {"quick", options.verify.quick},
              {"tensors", report.index.tensors.size()},
              {"tensors_checked", report.tensors},
              {"files", report.index.files.size()},
              {"files_checked", report.files},
              {"bytes_checked", report.bytes},
              {"problems", report.problems}});
}

void print_text(const Options& options, const VerifyReport& report) {
  for (const std::string& problem : report.problems) fmt::print(stderr, "{}\n", printable(problem, true));
  if (options.quiet) return;
  const std::size_t tensors = report.index.tensors.size();
  const std::string checked =
      options.verify.quick
          ? fmt::format("tables and sizes only: no bytes of {} tensors", tensors)
          : fmt::format("{} of {} tensors, {} of data", report.tensors, tensors, format_bytes(report.bytes));
  fmt::print("{}: {} (checked {} of {} files, {})\n", printable(options.path), report.is_valid() ? "valid" : "INVALID",
             report.files, report.index.files.size(), checked);
}

void run(Options& options) {
  options.verify.progress = options.progress.start(options.quiet, options.json);
  VerifyReport report;
  try {
    report = verify(options.path, options.verify);
  } catch (const CorruptError& error) {
    if (!options.json) throw Exit{status_differs, error.what()};
    report.problems.push_back(error.what());  // an index that is damaged: nothing else is known
  } catch (const Error& error) {
    throw Exit{status_usage, error.what()};
  }
  options.progress.finish();
  if (options.json)
    print_document(options, report);
  else
    print_text(options, report);
  if (!report.is_valid()) throw Exit{status_differs, ""};
}

}  // namespace

void add_verify(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "verify", "Checks a checkpoint: tables, sizes, the digest of every block and of every tensor.");
  const auto options = std::make_shared<Options>();
  add_checkpoint(*command, options->path, "checkpoint directory");
  command->add_flag("--quick", options->verify.quick, "tables and sizes only: read no tensor bytes");
  options->progress.add_option(*command);
  CLI::Option* quiet = command->add_flag("--quiet,-q", options->quiet, "print problems only");
  command->add_flag("--json", options->json, "print one JSON document")->excludes(quiet);
  command->callback([options] { run(*options); });
}

}  // namespace fsdp2::tool
