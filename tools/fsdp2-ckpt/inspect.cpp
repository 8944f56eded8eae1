// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "command.hpp"
#include "fsdp2/checkpoint/layout.hpp"
#include "page.hpp"
#include "sums.hpp"

namespace fsdp2::tool {

namespace {

struct Options {
  std::string path;
  bool tensors = false;
  bool ranks = false;
  bool json = false;
  std::string html;
};

void print_tensors(const CheckpointIndex& index) {
  struct Row {
    std::string name;
    std::string shape;
    std::string placement;
  };
  std::vector<Row> rows;
  Row widest{"name", "shape", "placement"};
  const auto widen = [](std::string& text, const std::string& other) {
    if (other.size() > text.size()) text = other;
  };
  for (const TensorEntry& tensor : index.tensors) {
    rows.push_back({printable(tensor.name), to_string(tensor.spec.shape),
                    printable(placements_text(tensor, index.meshes[tensor.mesh]))});
    widen(widest.name, rows.back().name);
    widen(widest.shape, rows.back().shape);
    widen(widest.placement, rows.back().placement);
  }
  const auto print = [&](const Row& row, std::string_view dtype, const std::string& digest) {
    fmt::print("{:<{}}  {:<10}  {:<{}}  {:<{}}  {}\n", row.name, widest.name.size(), dtype, row.shape,
               widest.shape.size(), row.placement, widest.placement.size(), digest);
  };
  fmt::print("\n");
  print({"name", "shape", "placement"}, "dtype", "digest");
  for (std::size_t t = 0; t < rows.size(); ++t)
    print(rows[t], to_string(index.tensors[t].spec.dtype), fmt::format("{:016x}", index.tensors[t].digest));
}

void print_ranks(const CheckpointIndex& index) {
  constexpr std::int64_t bar_width = 40;
  const std::vector<std::int64_t> bytes = bytes_of_ranks(index);
  const std::vector<std::size_t> files = files_of_ranks(index);
  const std::int64_t most = *std::max_element(bytes.begin(), bytes.end());
  fmt::print("\n{:>8}  {:>8}  {:>12}\n", "rank", "file", "bytes");
  for (std::size_t r = 0; r < bytes.size(); ++r) {
    const auto length =
        most == 0 ? std::size_t{0}
                  : static_cast<std::size_t>(static_cast<double>(bytes[r]) / static_cast<double>(most) * bar_width);
    fmt::print("{:>8}  {:>8}  {:>12}  {}\n", r, files[r], format_bytes(bytes[r]), std::string(length, '#'));
  }
  const double mean = static_cast<double>(tensor_bytes(index)) / static_cast<double>(index.world_size);
  if (mean > 0) fmt::print("  balance     the largest rank has {:.3f} of the mean\n", static_cast<double>(most) / mean);
}

void print_text(const Options& options, const CheckpointIndex& index) {
  fmt::print("{}\n", printable(options.path));
  fmt::print("  written by  {}\n", printable(index.library));
  fmt::print("  save id     {}\n", index.save_id);
  fmt::print("  step        {}\n", index.step);
  fmt::print("  ranks       {}\n", index.world_size);
  for (const MeshEntry& mesh : index.meshes)
    fmt::print("  mesh        {} ({})\n", printable(mesh.name), printable(mesh.spec.to_string()));
  fmt::print("  files       {}, {}\n", index.files.size(), format_bytes(file_bytes(index)));
  fmt::print("  tensors     {}, {}\n", index.tensors.size(), format_bytes(tensor_bytes(index)));
  if (!index.metadata.empty()) fmt::print("  metadata    {}\n", printable(index.metadata));
  if (options.ranks) print_ranks(index);
  if (options.tensors) print_tensors(index);
}

std::string_view role_text(AxisRole role) {
  return role == AxisRole::shard ? "shard" : role == AxisRole::replicate ? "replicate" : "none";
}

void print_document(const Options& options, const CheckpointIndex& index) {
  using Json = nlohmann::ordered_json;
  Json document{{"checkpoint", options.path},
                {"library", index.library},
                {"save_id", index.save_id},
                {"step", index.step},
                {"world_size", index.world_size},
                {"tensors", index.tensors.size()},
                {"tensor_bytes", tensor_bytes(index)},
                {"file_bytes", file_bytes(index)},
                {"metadata", index.metadata}};
  Json& meshes = document["meshes"] = Json::array();
  for (const MeshEntry& mesh : index.meshes) {
    Json axes = Json::array();
    for (std::size_t a = 0; a < mesh.roles.size(); ++a)
      axes.push_back(
          {{"name", mesh.spec.axes()[a].name}, {"size", mesh.spec.axes()[a].size}, {"role", role_text(mesh.roles[a])}});
    meshes.push_back({{"name", mesh.name}, {"axes", axes}, {"ranks", mesh.spec.ranks()}});
  }
  Json& files = document["files"] = Json::array();
  for (std::size_t f = 0; f < index.files.size(); ++f)
    files.push_back({{"name", shard_file_name(f, index.files.size())},
                     {"bytes", index.files[f].size},
                     {"ranks", index.files[f].ranks}});
  if (options.ranks) document["bytes_of_ranks"] = bytes_of_ranks(index);
  if (options.tensors) {
    Json& tensors = document["tensor_table"] = Json::array();
    for (const TensorEntry& tensor : index.tensors) {
      Json placements = Json::array();
      for (const Placement& placement : tensor.spec.placements) placements.push_back(to_string(placement));
      tensors.push_back({{"name", tensor.name},
                         {"dtype", to_string(tensor.spec.dtype)},
                         {"shape", tensor.spec.shape},
                         {"bytes", tensor.bytes()},
                         {"mesh", index.meshes[tensor.mesh].name},
                         {"placements", placements},
                         {"split_order", tensor.spec.split_order},
                         {"digest", fmt::format("{:016x}", tensor.digest)}});
    }
  }
  print_json(document);
}

}  // namespace

void add_inspect(CLI::App& app) {
  CLI::App* command = app.add_subcommand("inspect", "Says what a checkpoint is. Reads the index only.");
  const auto options = std::make_shared<Options>();
  add_checkpoint(*command, options->path, "checkpoint directory");
  command->add_flag("--tensors", options->tensors, "list the tensors: dtype, shape, placement, content digest");
  command->add_flag("--ranks", options->ranks, "list the tensor bytes of each rank, and their balance");
  command->add_flag("--json", options->json, "print one JSON document; the metadata is in it as text");
  command->add_option("--html", options->html,
                      "FILE: write a page with meshes, who holds which part of each tensor, bytes of ranks, digests");
  command->callback([options] {
    const CheckpointIndex index = open_checkpoint(options->path);
    if (!options->html.empty()) write_page(options->html, html_page(index, options->path));
    if (options->json)
      print_document(*options, index);
    else
      print_text(*options, index);
  });
}

}  // namespace fsdp2::tool
