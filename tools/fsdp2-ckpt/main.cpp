// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string_view>

#include "command.hpp"
#include "documents.hpp"
#include "fsdp2/version.hpp"
#include "launch.hpp"

namespace fsdp2::tool {

namespace {

int run(int argc, char** argv, const Launch& launch) {
  const std::string_view first = argc > 1 ? argv[1] : "";
  if (!launch.is_first() && first != "reshard") return status_done;  // what one process does alone
  CLI::App app(
      "Looks at, checks, compares and reshards checkpoints of fsdp2. Needs no GPU, no MPI launcher and no queue; under "
      "a launcher, the processes share the work of reshard.",
      "fsdp2-ckpt");
  app.set_version_flag("--version", fmt::format("fsdp2-ckpt {}\n{}", version(), build_info()));
  app.footer(
      "Exit status: 0 done, equal or valid; 1 differs or invalid; 2 wrong usage or unreadable input; 3 failed while "
      "working.");
  app.require_subcommand(1);
  add_inspect(app);
  add_verify(app);
  add_reshard(app, launch);
  add_diff(app);
  add_list(app);
  add_prune(app);
  add_export(app);
  add_import(app);
  add_view(app);
  // Not among the options: for packagers only.
  const std::string_view only = argc == 2 ? argv[1] : "";
  if (only == "--man" || only == "--bash-completion") {
    fmt::print("{}", only == "--man" ? man_page(app) : bash_completion(app));
    return status_done;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? status_done : status_usage;
  } catch (const Exit& end) {
    if (!end.message.empty()) fmt::print(stderr, "fsdp2-ckpt: {}\n", printable(end.message, true));
    return end.status;
  }
  return status_done;
}

}  // namespace

}  // namespace fsdp2::tool

int main(int argc, char** argv) {
  int status = fsdp2::tool::status_failed;
  fsdp2::tool::Launch launch;
  try {
    status = fsdp2::tool::run(argc, argv, launch);
    launch.finish();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fsdp2-ckpt: %s\n", fsdp2::tool::printable(error.what(), true).c_str());
    launch.abort(status);
  }
  if (status == fsdp2::tool::status_done) return status;
  // HDF5 1.10 leaks where it meets damaged metadata, and its exit handler then complains at length. All files are
  // closed.
  std::fflush(nullptr);
  std::_Exit(status);
}
