// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include "fsdp2/checkpoint/layout.hpp"

namespace fsdp2::tool {

/// A page about a checkpoint, in one HTML document without any other resource: what it is, its meshes, bytes of ranks,
/// tensors, and who holds which part of them. Large checkpoints are cut short, and the page says where.
std::string html_page(const CheckpointIndex& index, const std::string& path);

/// Writes it under a hidden name first, so that nobody sees half a page. Ends the subcommand where it cannot.
void write_page(const std::string& path, const std::string& page);

}  // namespace fsdp2::tool
