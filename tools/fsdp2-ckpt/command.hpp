// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "fsdp2/checkpoint/layout.hpp"

namespace fsdp2::tool {

class Launch;

/// Exit statuses, as documented in --help.
inline constexpr int status_done = 0;     ///< done, equal, valid
inline constexpr int status_differs = 1;  ///< differs, invalid
inline constexpr int status_usage = 2;    ///< usage, or unreadable input
inline constexpr int status_failed = 3;   ///< failed while working

/// Thrown by a subcommand to end with a status; an empty message says that everything was printed already.
struct Exit {
  int status = status_done;
  std::string message;
};

/// Each adds one subcommand, whose callback does the work. One file a subcommand.
void add_inspect(CLI::App& app);
void add_verify(CLI::App& app);
void add_reshard(CLI::App& app, const Launch& launch);
void add_diff(CLI::App& app);
void add_list(CLI::App& app);
void add_prune(CLI::App& app);
void add_export(CLI::App& app);
void add_import(CLI::App& app);
void add_view(CLI::App& app);

/// Reads an index, or ends the subcommand: an unreadable input is no failure of the work.
CheckpointIndex open_checkpoint(const std::string& path);

/// Ends the subcommand unless `path` is a directory.
void require_directory(const std::string& path);
/// Ends the subcommand if there is something of that name.
void require_absent(const std::string& path);

/// Runs the work of a subcommand: options that do not fit end it as wrong usage does, other errors as failures.
void run_work(const std::function<void()>& work);

/// "1.50 MiB".
std::string format_bytes(std::int64_t bytes);

/// Text that comes out of files, for a terminal: control characters, bytes that are no UTF-8 and characters that change
/// the direction of writing become "\\x1b". Unless `keeps_lines` is true, so do line feeds.
std::string printable(std::string_view text, bool keeps_lines = false);

/// Writes one JSON document in ASCII to standard output.
void print_json(const nlohmann::ordered_json& document);

/// "dp:Shard(0) tp:Replicate".
std::string placements_text(const TensorEntry& tensor, const MeshEntry& mesh);

/// Adds the positional CKPT.
CLI::Option* add_checkpoint(CLI::App& command, std::string& path, const std::string& description);

/// Adds --memory.
void add_memory(CLI::App& command, std::int64_t& bytes);

}  // namespace fsdp2::tool
