// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <fmt/format.h>

#include <filesystem>
#include <memory>

#include "command.hpp"
#include "fsdp2/checkpoint/safetensors.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::tool {

namespace {

struct Options {
  std::string checkpoint;
  std::string file;
  std::int64_t memory_bytes = std::int64_t{256} << 20;
  bool json = false;
};

void run(const Options& options) {
  (void)open_checkpoint(options.checkpoint);
  require_absent(options.file);
  CheckpointIndex index;
  try {
    index = export_safetensors(options.checkpoint, options.file, options.memory_bytes);
  } catch (const ConfigError& error) {
    throw Exit{status_usage, error.what()};
  } catch (const Error& error) {
    throw Exit{status_failed, error.what()};
  }
  const auto bytes = static_cast<std::int64_t>(std::filesystem::file_size(options.file));
  if (options.json)
    print_json({{"checkpoint", options.checkpoint},
                {"file", options.file},
                {"tensors", index.tensors.size()},
                {"file_bytes", bytes}});
  else
    fmt::print("{} -> {}: {} tensors, {}: all content digests equal\n", printable(options.checkpoint),
               printable(options.file), index.tensors.size(), format_bytes(bytes));
}

}  // namespace

void add_export(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "export", "Writes the tensors of a checkpoint, whole, into one safetensors file, and proves them by digests.");
  const auto options = std::make_shared<Options>();
  add_checkpoint(*command, options->checkpoint, "checkpoint directory");
  command->add_option("OUT", options->file, "file to make, such as model.safetensors; must not exist")->required();
  add_memory(*command, options->memory_bytes);
  command->add_flag("--json", options->json, "print one JSON document");
  command->callback([options] { run(*options); });
}

}  // namespace fsdp2::tool
