// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <numeric>

#include "command.hpp"
#include "fsdp2/checkpoint/manager.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::tool {

namespace {

struct Options {
  std::string root;
  bool json = false;
};

/// A checkpoint of the list; of one that cannot be read, why.
struct Row {
  NamedCheckpoint checkpoint;
  CheckpointIndex index;
  std::string error;

  std::int64_t bytes() const {
    return std::accumulate(index.files.begin(), index.files.end(), std::int64_t{0},
                           [](std::int64_t sum, const FileEntry& file) { return sum + file.size; });
  }
};

std::vector<Row> read_rows(const std::string& root) {
  std::vector<Row> rows;
  try {
    for (NamedCheckpoint& found : list_checkpoints(root)) rows.push_back({std::move(found), {}, ""});
  } catch (const Error& error) {
    throw Exit{status_usage, error.what()};
  }
  for (Row& row : rows) {
    try {
      row.index = read_index(row.checkpoint.path);
    } catch (const Error& error) {
      row.error = error.what();
    }
  }
  return rows;
}

void print_document(const std::vector<Row>& rows) {
  nlohmann::ordered_json document = nlohmann::ordered_json::array();
  for (const Row& row : rows) {
    nlohmann::ordered_json entry{{"path", row.checkpoint.path.string()}, {"step", row.checkpoint.step}};
    if (row.error.empty()) {
      entry["save_id"] = row.index.save_id;
      entry["world_size"] = row.index.world_size;
      entry["tensors"] = row.index.tensors.size();
      entry["file_bytes"] = row.bytes();
    } else {
      entry["error"] = row.error;
    }
    document.push_back(std::move(entry));
  }
  print_json(document);
}

void print_text(const std::vector<Row>& rows) {
  if (rows.empty()) return;
  fmt::print("{:>12}  {:>8}  {:>8}  {:>12}  path\n", "step", "ranks", "tensors", "bytes");
  for (const Row& row : rows)
    if (row.error.empty())
      fmt::print("{:>12}  {:>8}  {:>8}  {:>12}  {}\n", row.checkpoint.step, row.index.world_size,
                 row.index.tensors.size(), format_bytes(row.bytes()), printable(row.checkpoint.path.string()));
    else
      fmt::print("{:>12}  UNREADABLE: {}\n", row.checkpoint.step, printable(row.error));
}

void run(const Options& options) {
  require_directory(options.root);
  const std::vector<Row> rows = read_rows(options.root);
  if (options.json)
    print_document(rows);
  else
    print_text(rows);
}

}  // namespace

void add_list(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "list", "Lists the checkpoints step-<step> of a run, oldest first; also those that cannot be read, and why.");
  const auto options = std::make_shared<Options>();
  command->add_option("ROOT", options->root, "directory of the run's checkpoints")->required();
  command->add_flag("--json", options->json, "print one JSON document");
  command->callback([options] { run(*options); });
}

}  // namespace fsdp2::tool
