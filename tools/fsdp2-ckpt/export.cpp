// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <fmt/format.h>

#include <memory>

#include "command.hpp"
#include "fsdp2/checkpoint/safetensors.hpp"
#include "progress.hpp"
#include "tensor_options.hpp"

namespace fsdp2::tool {

namespace {

struct Options {
  std::string checkpoint;
  std::string target;
  TensorOptions tensors;
  ExportOptions exports;
  Progress progress;
  bool json = false;
};

void run(Options& options) {
  const CheckpointIndex index = open_checkpoint(options.checkpoint);
  require_absent(options.target);
  options.exports.select = selection_of(options.tensors, index);
  options.exports.dtype = casts_of(options.tensors, index);
  options.exports.progress = options.progress.start(false, options.json);
  ExportReport report;
  run_work([&] { report = export_safetensors(options.checkpoint, options.target, options.exports); });
  options.progress.finish();
  if (options.json) {
    print_json({{"checkpoint", options.checkpoint},
                {"target", options.target},
                {"tensors", report.tensors},
                {"casts", report.casts},
                {"files", report.files},
                {"file_bytes", report.bytes}});
    return;
  }
  const std::string files = report.files == 1 ? "" : fmt::format(" in {} files", report.files);
  const std::string casts = report.casts == 0 ? "" : fmt::format("{} cast, ", report.casts);
  fmt::print("{} -> {}: {} tensors, {}{}: {}all {}content digests equal\n", printable(options.checkpoint),
             printable(options.target), report.tensors, format_bytes(report.bytes), files, casts,
             report.casts == 0 ? "" : "other ");
}

}  // namespace

void add_export(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "export", "Writes tensors of a checkpoint, whole, into safetensors files, and proves them by digests.");
  const auto options = std::make_shared<Options>();
  add_checkpoint(*command, options->checkpoint, "checkpoint directory");
  command
      ->add_option("OUT", options->target,
                   "file to make, such as model.safetensors, or directory with --max-shard-size; must not exist")
      ->required();
  command
      ->add_option("--max-shard-size", options->exports.max_shard_bytes,
                   "make a directory with files of at most so many bytes of tensors, such as 5GB, and an index of them")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::int64_t{1}, std::numeric_limits<std::int64_t>::max()));
  add_selection(*command, options->tensors);
  add_memory(*command, options->exports.memory_bytes);
  options->progress.add_option(*command);
  command->add_flag("--json", options->json, "print one JSON document");
  command->callback([options] { run(*options); });
}

}  // namespace fsdp2::tool
