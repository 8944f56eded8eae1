// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/view.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "command.hpp"

namespace fsdp2::tool {

namespace {

struct Options {
  std::string path;
  bool quiet = false;
  bool json = false;
};

void run(const Options& options) {
  (void)open_checkpoint(options.path);
  ViewReport report;
  run_work([&] { report = write_view(options.path); });
  const std::string view = options.path + "/view.h5";
  if (options.json)
    print_json(
        {{"checkpoint", options.path}, {"view", view}, {"tensors", report.tensors}, {"mappings", report.mappings}});
  else if (!options.quiet)
    fmt::print("{}: {} tensors from {} pieces\n", printable(view), report.tensors, report.mappings);
}

}  // namespace

void add_view(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "view", "Writes CKPT/view.h5, which shows each tensor whole to h5py and h5ls, by HDF5's virtual datasets.");
  const auto options = std::make_shared<Options>();
  add_checkpoint(*command, options->path, "checkpoint directory");
  CLI::Option* quiet = command->add_flag("--quiet,-q", options->quiet, "print nothing");
  command->add_flag("--json", options->json, "print one JSON document")->excludes(quiet);
  command->callback([options] { run(*options); });
}

}  // namespace fsdp2::tool
