// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <fmt/format.h>

#include <filesystem>
#include <limits>
#include <memory>

#include "command.hpp"
#include "fsdp2/checkpoint/safetensors.hpp"
#include "fsdp2/error.hpp"
#include "progress.hpp"
#include "tensor_options.hpp"

namespace fsdp2::tool {

namespace {

struct Options {
  std::string source;
  std::string checkpoint;
  std::string mesh;
  std::vector<std::string> shard_dims;
  ImportOptions import;
  Progress progress;
  bool json = false;
};

/// Turns what was said on the command line into options of the library.
void complete(Options& options) {
  if (options.import.world_size == 0 && options.mesh.empty())
    throw Exit{status_usage, "import needs --world-size or --mesh"};
  if (!options.mesh.empty()) {
    auto [name, spec] = parse_mesh(options.mesh);
    if (!name.empty()) options.import.mesh_name = name;
    options.import.mesh = std::move(spec);
  }
  std::vector<std::pair<std::string, std::int64_t>> dims;
  for (const std::string& text : options.shard_dims) {
    const std::pair<std::string, std::string> dim = parse_assignment("--shard-dim", text);
    dims.emplace_back(dim.first, parse_number("--shard-dim", dim.second));
  }
  options.import.shard_dim = [dims](const TensorEntry& tensor) {
    std::int64_t dim = 0;
    for (const auto& [glob, number] : dims)
      if (matches(glob, tensor.name)) dim = number;
    return dim;
  };
}

void run(Options& options) {
  std::error_code error_code;
  if (!std::filesystem::is_regular_file(options.source, error_code) &&
      !std::filesystem::is_directory(options.source, error_code))
    throw Exit{status_usage, fmt::format("{} is neither a file nor a directory", options.source)};
  require_absent(options.checkpoint);
  complete(options);
  options.import.progress = options.progress.start(false, options.json);
  CheckpointIndex index;
  run_work([&] {
    try {
      index = import_safetensors(options.source, options.checkpoint, options.import);
    } catch (const CorruptError& error) {  // known before anything is written
      throw Exit{status_usage, error.what()};
    }
  });
  options.progress.finish();
  std::int64_t bytes = 0;
  for (const TensorEntry& tensor : index.tensors) bytes += tensor.bytes();
  if (options.json)
    print_json({{"source", options.source},
                {"checkpoint", options.checkpoint},
                {"world_size", index.world_size},
                {"tensors", index.tensors.size()},
                {"tensor_bytes", bytes}});
  else
    fmt::print("{} -> {} ({} ranks): {} tensors, {}\n", printable(options.source), printable(options.checkpoint),
               index.world_size, index.tensors.size(), format_bytes(bytes));
}

}  // namespace

void add_import(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "import",
      "Makes a checkpoint of one or more safetensors files, byte for byte, with dimension 0 sharded over axis \"dp\".");
  const auto options = std::make_shared<Options>();
  command
      ->add_option("IN", options->source,
                   "safetensors file, or *.safetensors.index.json of several, or a directory that has one")
      ->required();
  command->add_option("CKPT", options->checkpoint, "directory to make; must not exist")->required();
  command->add_option("--world-size", options->import.world_size, "ranks of the checkpoint; or give --mesh")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{std::numeric_limits<int>::max()}));  // as MPI counts ranks
  command->add_option(
      "--mesh", options->mesh,
      "[NAME:]axis=size,...: tensors are sharded over \"dp\", or else the first axis, and replicated over "
      "the others");
  command
      ->add_option("--shard-dim", options->shard_dims,
                   "GLOB=d: shard dimension d of tensors of such names; the last that fits counts")
      ->allow_extra_args(false);
  command->add_option("--ranks-per-file", options->import.ranks_per_file, "ranks that share one shard file")
      ->check(CLI::Range(std::int64_t{1}, std::numeric_limits<std::int64_t>::max()))
      ->capture_default_str();
  add_memory(*command, options->import.memory_bytes);
  options->progress.add_option(*command);
  command->add_flag("--json", options->json, "print one JSON document");
  command->callback([options] { run(*options); });
}

}  // namespace fsdp2::tool
