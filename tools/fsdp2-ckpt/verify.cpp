// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/verify.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "command.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::tool {

namespace {

struct Options {
  std::string path;
  VerifyOptions verify;
  bool quiet = false;
};

void run(const Options& options) {
  VerifyReport report;
  try {
    report = verify(options.path, options.verify);
  } catch (const CorruptError& error) {
    throw Exit{status_differs, error.what()};
  } catch (const Error& error) {
    throw Exit{status_usage, error.what()};
  }
  for (const std::string& problem : report.problems) fmt::print(stderr, "{}\n", problem);
  if (!options.quiet) {
    const std::string checked = options.verify.quick ? std::string("tables and sizes only")
                                                     : fmt::format("{} of data checked", format_bytes(report.bytes));
    fmt::print("{}: {} ({} tensors, {} of {} files, {})\n", options.path, report.is_valid() ? "valid" : "INVALID",
               report.index.tensors.size(), report.files, report.index.files.size(), checked);
  }
  if (!report.is_valid()) throw Exit{status_differs, ""};
}

}  // namespace

void add_verify(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "verify", "Checks a checkpoint: tables, sizes, the digest of every block and of every tensor.");
  const auto options = std::make_shared<Options>();
  add_checkpoint(*command, options->path, "checkpoint directory");
  command->add_flag("--quick", options->verify.quick, "tables and sizes only: read no tensor bytes");
  command->add_flag("--quiet,-q", options->quiet, "print problems only");
  command->callback([options] { run(*options); });
}

}  // namespace fsdp2::tool
