// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/reshard.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "command.hpp"
#include "fsdp2/error.hpp"
#include "launch.hpp"
#include "progress.hpp"
#include "tensor_options.hpp"

namespace fsdp2::tool {

namespace {

struct Options {
  std::string source;
  std::string target;
  ReshardOptions reshard;
  std::vector<std::string> meshes;
  TensorOptions tensors;
  Progress progress;
  bool quiet = false;
  bool json = false;
};

/// Turns what was said on the command line into options of the library.
void complete(Options& options, const CheckpointIndex& source) {
  if (options.meshes.empty() && options.reshard.world_size == 0)
    throw Exit{status_usage, "reshard needs --world-size or --mesh"};
  for (const std::string& text : options.meshes)
    if (!options.reshard.meshes.insert(parse_mesh(text)).second)
      throw Exit{status_usage, fmt::format("--mesh {}: this mesh was given before", text)};
  options.reshard.select = selection_of(options.tensors, source);
  options.reshard.dtype = casts_of(options.tensors, source);
}

void check_target(const Options& options) {
  const std::filesystem::path target = options.target;
  std::error_code error;
  if (!std::filesystem::exists(std::filesystem::symlink_status(target, error))) return;
  if (!options.reshard.overwrite)
    throw Exit{status_usage,
               fmt::format("{} already exists: choose another name, remove it, or say --overwrite", options.target)};
  // What is replaced is removed: a slip of the hand must not cost other directories.
  if (!std::filesystem::is_regular_file(target / "index.h5", error))
    throw Exit{status_usage,
               fmt::format("{} exists and is no checkpoint: only checkpoints are overwritten", options.target)};
}

/// What the subcommand says at its end.
struct Summary {
  const ReshardReport& report;
  std::int64_t tensor_bytes = 0;
  std::int64_t file_bytes = 0;
  std::vector<std::string> casts;  // "name: f32 -> bf16"

  explicit Summary(const ReshardReport& of) : report(of) {
    for (const TensorEntry& tensor : of.target.tensors) {
      tensor_bytes += tensor.bytes();
      const DType from = of.source.tensors[of.source.find(tensor.name)].spec.dtype;
      if (from != tensor.spec.dtype)
        casts.push_back(fmt::format("{}: {} -> {}", tensor.name, to_string(from), to_string(tensor.spec.dtype)));
    }
    for (const FileEntry& file : of.target.files) file_bytes += file.size;
  }
};

void print_text(const Options& options, const Summary& summary) {
  const CheckpointIndex& source = summary.report.source;
  const CheckpointIndex& target = summary.report.target;
  fmt::print("{} ({} ranks) -> {} ({} ranks)\n", printable(options.source), source.world_size,
             printable(options.target), target.world_size);
  for (std::size_t m = 0; m < target.meshes.size(); ++m)
    fmt::print("  mesh {}: {} -> {}\n", printable(target.meshes[m].name), printable(source.meshes[m].spec.to_string()),
               printable(target.meshes[m].spec.to_string()));
  for (const std::string& cast : summary.casts) fmt::print("  cast {}\n", printable(cast));
  if (options.reshard.dry_run) {
    fmt::print("  would write {} tensors, {}, in {} shard files, {}, with {} of memory\n", target.tensors.size(),
               format_bytes(summary.tensor_bytes), target.files.size(), format_bytes(summary.file_bytes),
               format_bytes(summary.report.memory_bytes));
    return;
  }
  const std::string cast = summary.casts.empty() ? "" : fmt::format("{} cast, ", summary.casts.size());
  fmt::print("  {} tensors, {}: {}all {}content digests equal\n", target.tensors.size(),
             format_bytes(summary.tensor_bytes), cast, summary.casts.empty() ? "" : "other ");
}

void print_document(const Options& options, const Summary& summary) {
  using Json = nlohmann::ordered_json;
  const CheckpointIndex& source = summary.report.source;
  const CheckpointIndex& target = summary.report.target;
  Json document{{"source", options.source},
                {"target", options.target},
                {"dry_run", options.reshard.dry_run},
                {"source_world_size", source.world_size},
                {"world_size", target.world_size},
                {"tensors", target.tensors.size()},
                {"tensor_bytes", summary.tensor_bytes},
                {"file_bytes", summary.file_bytes},
                {"memory_bytes", summary.report.memory_bytes},
                {"casts", summary.casts}};
  document["digests_equal"] = options.reshard.dry_run ? 0 : target.tensors.size() - summary.casts.size();
  Json& meshes = document["meshes"] = Json::array();
  for (std::size_t m = 0; m < target.meshes.size(); ++m)
    meshes.push_back({{"name", target.meshes[m].name},
                      {"from", source.meshes[m].spec.to_string()},
                      {"to", target.meshes[m].spec.to_string()}});
  Json& files = document["files"] = Json::array();
  for (std::size_t f = 0; f < target.files.size(); ++f)
    files.push_back({{"name", shard_file_name(f, target.files.size())},
                     {"bytes", target.files[f].size},
                     {"ranks", target.files[f].ranks}});
  print_json(document);
}

void run(Options& options, const Launch& launch) {
  // Usage errors first: what is wrong before any work is done has another status than what goes wrong during it.
  launch.together([&] {
    complete(options, open_checkpoint(options.source));
    check_target(options);
  });
  options.reshard.comm = launch.comm();
  options.reshard.progress = options.progress.start(options.quiet, options.json);
  ReshardReport report;
  run_work([&] {
    try {
      report = reshard(options.source, options.target, options.reshard);
    } catch (const MismatchError& error) {
      throw Exit{status_usage, fmt::format("{} (--rank-local)", error.what())};
    }
  });
  options.progress.finish();
  const Summary summary(report);
  if (options.json)
    print_document(options, summary);
  else if (!options.quiet)
    print_text(options, summary);
}

}  // namespace

void add_reshard(CLI::App& app, const Launch& launch) {
  CLI::App* command =
      app.add_subcommand("reshard",
                         "Copies a checkpoint to another number of ranks or other meshes, bit by bit, with bounded "
                         "memory, and proves it by digests.");
  const auto options = std::make_shared<Options>();
  ReshardOptions& reshard = options->reshard;
  const CLI::Range positive(std::int64_t{1}, std::numeric_limits<std::int64_t>::max());
  command->add_option("SRC", options->source, "checkpoint directory")->required();
  command->add_option("DST", options->target, "directory to make; must not exist")->required();
  command
      ->add_option("--world-size", reshard.world_size,
                   "ranks of the new checkpoint; the axis over which FSDP shards is rescaled, other axes are kept")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{std::numeric_limits<int>::max()}));  // as MPI counts ranks
  command
      ->add_option("--mesh", options->meshes,
                   "[NAME:]axis=size,...: the axes of the mesh of this name, or of every mesh; may be repeated. Axes "
                   "that keep their names keep what they cut; tensors are replicated over new ones")
      ->allow_extra_args(false);
  command->add_option("--ranks-per-file", reshard.ranks_per_file, "ranks that share one shard file")
      ->check(positive)
      ->capture_default_str();
  command
      ->add_option("--rank-local", reshard.rank_local,
                   "what each rank gets of the values that single ranks saved, if the number of ranks changes: error "
                   "(if there are any), first (those of rank 0), each (those of its number), concatenate (those of its "
                   "share of the old ranks)")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, RankLocalPolicy>{{"error", RankLocalPolicy::error},
                                                 {"first", RankLocalPolicy::first},
                                                 {"each", RankLocalPolicy::each},
                                                 {"concatenate", RankLocalPolicy::concatenate}}));
  add_selection(*command, options->tensors);
  add_memory(*command, reshard.memory_bytes);
  options->progress.add_option(*command);
  command->add_flag("--overwrite", reshard.overwrite, "replace DST, if it is a checkpoint, when all is written");
  command->add_flag("--dry-run", reshard.dry_run, "write nothing; say what bytes, files and memory it would take");
  CLI::Option* quiet = command->add_flag("--quiet,-q", options->quiet, "print errors only");
  command->add_flag("--json", options->json, "print one JSON document")->excludes(quiet);
  command->callback([options, &launch] { run(*options, launch); });
}

}  // namespace fsdp2::tool
