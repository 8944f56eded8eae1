// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "checkpoint/shard_file.hpp"
#include "comm/host_communicator.hpp"
#include "fsdp2/checkpoint/layout.hpp"

namespace fsdp2::checkpoint {

/// Writes the shard files of all ranks from the processes of `host`, each its share of them, one after the other, and
/// completes the index: files, segments and content digests, which it must not have yet. Without a `source` nothing is
/// written, and digests stay as they are. Collective: throws as ShardWriter, on all processes what one of them threw.
void write_files(const HostCommunicator& host, const std::filesystem::path& directory, CheckpointIndex& index,
                 std::int64_t ranks_per_file, std::int64_t window_bytes,
                 const std::function<RankLocalValues(std::int64_t rank)>& rank_local, const PieceSource& source);

/// For a checkpoint that no mesh has agreed on a save id for.
std::string random_save_id();

}  // namespace fsdp2::checkpoint
