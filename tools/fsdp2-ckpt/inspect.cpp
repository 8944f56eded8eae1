// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "command.hpp"
#include "fsdp2/checkpoint/layout.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::tool {

namespace {

struct Options {
  std::string path;
  bool tensors = false;
};

std::string placements_text(const TensorEntry& tensor, const MeshEntry& mesh) {
  std::string text;
  for (std::size_t a = 0; a < tensor.spec.placements.size(); ++a)
    text += fmt::format("{}{}:{}", a == 0 ? "" : " ", mesh.spec.axes()[a].name, to_string(tensor.spec.placements[a]));
  return text;
}

void print_tensors(const CheckpointIndex& index) {
  std::size_t name_width = 4;
  std::size_t shape_width = 5;
  std::size_t placement_width = 9;
  for (const TensorEntry& tensor : index.tensors) {
    name_width = std::max(name_width, tensor.name.size());
    shape_width = std::max(shape_width, to_string(tensor.spec.shape).size());
    placement_width = std::max(placement_width, placements_text(tensor, index.meshes[tensor.mesh]).size());
  }
  fmt::print("\n{:<{}}  {:<10}  {:<{}}  {:<{}}  digest\n", "name", name_width, "dtype", "shape", shape_width,
             "placement", placement_width);
  for (const TensorEntry& tensor : index.tensors)
    fmt::print("{:<{}}  {:<10}  {:<{}}  {:<{}}  {:016x}\n", tensor.name, name_width, to_string(tensor.spec.dtype),
               to_string(tensor.spec.shape), shape_width, placements_text(tensor, index.meshes[tensor.mesh]),
               placement_width, tensor.digest);
}

void inspect(const Options& options) {
  CheckpointIndex index;
  try {
    index = read_index(options.path);
  } catch (const Error& error) {
    throw Exit{status_usage, error.what()};
  }
  std::int64_t tensor_bytes = 0;
  for (const TensorEntry& tensor : index.tensors) tensor_bytes += tensor.bytes();
  std::int64_t file_bytes = 0;
  for (const FileEntry& file : index.files) file_bytes += file.size;
  fmt::print("{}\n", options.path);
  fmt::print("  written by  {}\n", index.library);
  fmt::print("  save id     {}\n", index.save_id);
  fmt::print("  step        {}\n", index.step);
  fmt::print("  ranks       {}\n", index.world_size);
  for (const MeshEntry& mesh : index.meshes) fmt::print("  mesh        {} ({})\n", mesh.name, mesh.spec.to_string());
  fmt::print("  files       {}, {}\n", index.files.size(), format_bytes(file_bytes));
  fmt::print("  tensors     {}, {}\n", index.tensors.size(), format_bytes(tensor_bytes));
  if (!index.metadata.empty()) fmt::print("  metadata    {}\n", index.metadata);
  if (options.tensors) print_tensors(index);
}

}  // namespace

void add_inspect(CLI::App& app) {
  CLI::App* command = app.add_subcommand("inspect", "Says what a checkpoint is. Reads the index only.");
  const auto options = std::make_shared<Options>();
  add_checkpoint(*command, options->path, "checkpoint directory");
  command->add_flag("--tensors", options->tensors, "list the tensors: dtype, shape, placement, content digest");
  command->callback([options] { inspect(*options); });
}

}  // namespace fsdp2::tool
