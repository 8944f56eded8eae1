// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// What subcommands that copy tensors are told about them.

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp2/checkpoint/layout.hpp"

namespace fsdp2::tool {

/// --include, --exclude and --cast.
struct TensorOptions {
  std::vector<std::string> include;
  std::vector<std::string> exclude;
  std::vector<std::string> casts;
};
void add_selection(CLI::App& command, TensorOptions& options);

/// Whether a tensor is wanted, and as what. Ends the subcommand for text that means nothing, and for a pattern that
/// fits no tensor of the checkpoint.
std::function<bool(const TensorEntry&)> selection_of(const TensorOptions& options, const CheckpointIndex& source);
std::function<DType(const TensorEntry&)> casts_of(const TensorOptions& options, const CheckpointIndex& source);

/// Whether a name fits a shell pattern.
bool matches(const std::string& glob, const std::string& name);

/// "GLOB=value" of an option; ends the subcommand where there is no '='.
std::pair<std::string, std::string> parse_assignment(const char* option, const std::string& text);

/// A number that is all of the text; ends the subcommand, naming the option, for anything else.
std::int64_t parse_number(const char* option, const std::string& text);

/// "[NAME:]axis=size,axis=size" of --mesh: a mesh name may have any characters, axis names have no ',', ':' or '='.
std::pair<std::string, MeshSpec> parse_mesh(const std::string& text);

}  // namespace fsdp2::tool
