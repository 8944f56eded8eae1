// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "fsdp2/checkpoint/layout.hpp"
#include "fsdp2/mesh.hpp"

namespace fsdp2 {

struct ExportOptions {
  /// Most bytes of tensor data held in memory at a time; at least some blocks.
  std::int64_t memory_bytes = std::int64_t{256} << 20;
  /// 0: one file. Else a directory of files with at most so many bytes of tensors each, but for a larger tensor, with
  /// the names and the index that Hugging Face gives them.
  std::int64_t max_shard_bytes = 0;
  /// Which tensors are written; by default all.
  std::function<bool(const TensorEntry&)> select = {};
  /// The dtype of a tensor in the file; by default its own. f64, f32, f16 and bf16 are cast to one another, to nearest.
  std::function<DType(const TensorEntry&)> dtype = {};
  /// Called now and then with the tensor bytes written so far and in all.
  std::function<void(std::int64_t done, std::int64_t total)> progress = {};
};

struct ExportReport {
  std::int64_t tensors = 0;
  std::int64_t casts = 0;  ///< of these, with another dtype
  std::int64_t files = 0;  ///< with tensors
  std::int64_t bytes = 0;  ///< of these files
};

/// Writes tensors of a checkpoint whole into a file in the safetensors format, or into a directory of such files, which
/// must not exist, with bounded memory; each tensor that is not cast is proved by its content digest on its way. Step
/// and metadata are kept as the files' metadata. No MPI. Throws ConfigError, with nothing written, for what the format
/// has no dtype or name for and for options that do not fit, IoError where the target exists or cannot be written, and
/// as read_index and reading do; the target is then not there.
ExportReport export_safetensors(const std::filesystem::path& checkpoint, const std::filesystem::path& target,
                                const ExportOptions& options = {});

struct ImportOptions {
  /// Number of ranks; 0: that of `mesh`.
  std::int64_t world_size = 0;
  /// By default one axis, "dp". Tensors are sharded over "dp", or over the first axis where there is none of that name,
  /// and replicated over the others; FSDP shards over that axis, and replicates over one called "replicate".
  std::optional<MeshSpec> mesh = std::nullopt;
  std::string mesh_name = "mesh";
  /// The dimension that is sharded; by default 0. Scalars are replicated.
  std::function<std::int64_t(const TensorEntry&)> shard_dim = {};
  std::int64_t ranks_per_file = 1;
  std::int64_t memory_bytes = std::int64_t{256} << 20;
  /// Called now and then with the tensor bytes read so far and in all.
  std::function<void(std::int64_t done, std::int64_t total)> progress = {};
};

/// Makes a checkpoint of a safetensors file, byte for byte, with bounded memory, or of several: of a
/// "*.safetensors.index.json", or of a directory that has one, or a single safetensors file. The files' metadata
/// becomes the checkpoint's, and what export_safetensors wrote comes back as it was. No MPI. Throws CorruptError, which
/// names the tensor, with nothing written, where a file breaks a rule of the format or has a dtype that checkpoints
/// lack, ConfigError and ShapeError for options that do not fit; else as reshard.
CheckpointIndex import_safetensors(const std::filesystem::path& source, const std::filesystem::path& checkpoint,
                                   const ImportOptions& options);

}  // namespace fsdp2
