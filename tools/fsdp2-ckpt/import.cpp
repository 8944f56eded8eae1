// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <fmt/format.h>

#include <filesystem>
#include <limits>
#include <memory>

#include "command.hpp"
#include "fsdp2/checkpoint/safetensors.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::tool {

namespace {

struct Options {
  std::string file;
  std::string checkpoint;
  ImportOptions import;
  bool json = false;
};

void run(const Options& options) {
  std::error_code error_code;
  if (!std::filesystem::is_regular_file(options.file, error_code))
    throw Exit{status_usage, fmt::format("{} is not a file", options.file)};
  require_absent(options.checkpoint);
  CheckpointIndex index;
  try {
    index = import_safetensors(options.file, options.checkpoint, options.import);
  } catch (const CorruptError& error) {  // known before anything is written
    throw Exit{status_usage, error.what()};
  } catch (const ConfigError& error) {
    throw Exit{status_usage, error.what()};
  } catch (const Error& error) {
    throw Exit{status_failed, error.what()};
  }
  std::int64_t bytes = 0;
  for (const TensorEntry& tensor : index.tensors) bytes += tensor.bytes();
  if (options.json)
    print_json({{"file", options.file},
                {"checkpoint", options.checkpoint},
                {"world_size", index.world_size},
                {"tensors", index.tensors.size()},
                {"tensor_bytes", bytes}});
  else
    fmt::print("{} -> {} ({} ranks): {} tensors, {}\n", printable(options.file), printable(options.checkpoint),
               index.world_size, index.tensors.size(), format_bytes(bytes));
}

}  // namespace

void add_import(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "import",
      "Makes a checkpoint of a safetensors file, byte for byte, with dimension 0 sharded over an axis \"dp\".");
  const auto options = std::make_shared<Options>();
  command->add_option("IN", options->file, "safetensors file")->required();
  command->add_option("CKPT", options->checkpoint, "directory to make; must not exist")->required();
  command->add_option("--world-size", options->import.world_size, "ranks of the checkpoint")
      ->required()
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{std::numeric_limits<int>::max()}));  // as MPI counts ranks
  command->add_option("--ranks-per-file", options->import.ranks_per_file, "ranks that share one shard file")
      ->check(CLI::Range(std::int64_t{1}, std::numeric_limits<std::int64_t>::max()))
      ->capture_default_str();
  add_memory(*command, options->import.memory_bytes);
  command->add_flag("--json", options->json, "print one JSON document");
  command->callback([options] { run(*options); });
}

}  // namespace fsdp2::tool
