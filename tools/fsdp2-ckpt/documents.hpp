// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// What --help says, in other forms, from the same definitions.

#include <CLI/CLI.hpp>
#include <string>

namespace fsdp2::tool {

/// The man page, in roff with the macros of man(7).
std::string man_page(const CLI::App& app);

/// A script for bash that completes subcommands, their options, and files.
std::string bash_completion(const CLI::App& app);

}  // namespace fsdp2::tool
