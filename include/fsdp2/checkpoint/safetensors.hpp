// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <filesystem>

#include "fsdp2/checkpoint/layout.hpp"

namespace fsdp2 {

/// Writes all tensors of a checkpoint whole into one file in the safetensors format, which must not exist, with bounded
/// memory; each is proved by its content digest on its way. Step and metadata are kept as the file's metadata. No MPI.
/// Returns the checkpoint's index. Throws ConfigError, with nothing written, for what the format has no dtype or name
/// for, IoError where the file exists or cannot be written, and as read_index and reading do.
CheckpointIndex export_safetensors(const std::filesystem::path& checkpoint, const std::filesystem::path& file,
                                   std::int64_t memory_bytes = std::int64_t{256} << 20);

struct ImportOptions {
  std::int64_t world_size = 1;
  std::int64_t ranks_per_file = 1;
  std::int64_t memory_bytes = std::int64_t{256} << 20;
};

/// Makes a checkpoint of a safetensors file, byte for byte, with bounded memory: dimension 0 of every tensor is sharded
/// over a mesh "mesh" with one axis "dp", scalars are replicated. The file's metadata becomes the checkpoint's, and
/// what export_safetensors wrote comes back as it was. No MPI. Throws CorruptError, which names the tensor, with
/// nothing written, where the file breaks a rule of the format or has a dtype that checkpoints lack; else as reshard.
CheckpointIndex import_safetensors(const std::filesystem::path& file, const std::filesystem::path& checkpoint,
                                   const ImportOptions& options = {});

}  // namespace fsdp2
