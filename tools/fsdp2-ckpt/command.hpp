// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

namespace fsdp2::tool {

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
void add_reshard(CLI::App& app);

/// "1.50 MiB".
std::string format_bytes(std::int64_t bytes);

/// Adds the positional CKPT.
CLI::Option* add_checkpoint(CLI::App& command, std::string& path, const std::string& description);

}  // namespace fsdp2::tool
