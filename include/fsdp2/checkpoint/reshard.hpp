// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <mpi.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include "fsdp2/checkpoint/layout.hpp"

namespace fsdp2 {

struct ReshardOptions {
  /// Number of ranks of the new checkpoint; 0: that of `meshes`. The axis over which FSDP shards (on a one-axis mesh
  /// without roles, that axis) is rescaled; the others keep their sizes.
  std::int64_t world_size = 0;
  /// Most bytes of tensor data held in memory at a time; at least some blocks.
  std::int64_t memory_bytes = std::int64_t{256} << 20;
  /// Called now and then with the tensor bytes written so far, where several processes write about so many, and in all.
  std::function<void(std::int64_t done, std::int64_t total)> progress = {};
  /// New meshes by the names of the old; "" stands for every mesh that is not named. All have as many ranks. Tensors
  /// keep their placements on the axes that keep their names, and are replicated over new axes; an axis that goes must
  /// not cut any tensor.
  std::map<std::string, MeshSpec> meshes = {};
  std::int64_t ranks_per_file = 1;
  /// Who gets which rank-local values, if the number of ranks changes.
  RankLocalPolicy rank_local = RankLocalPolicy::error;
  /// Which tensors are copied; by default all.
  std::function<bool(const TensorEntry&)> select = {};
  /// The new dtype of a tensor; by default the old. f64, f32, f16 and bf16 are cast to one another, to nearest.
  std::function<DType(const TensorEntry&)> dtype = {};
  /// Replaces a checkpoint of that name, see SaveOptions::overwrite.
  bool overwrite = false;
  /// Processes that share the work, each of them some of the new files: all call with the same arguments, and get the
  /// same report, or error. MPI_COMM_NULL: this process alone, without MPI. Limits of memory are for each.
  MPI_Comm comm = MPI_COMM_NULL;
  /// Plans and lays out everything, but reads no tensor bytes and writes nothing: the report has no new digests.
  bool dry_run = false;
};

struct ReshardReport {
  CheckpointIndex source;
  CheckpointIndex target;         ///< its digests were computed from the bytes written, and equal the source's
  std::int64_t memory_bytes = 0;  ///< of buffers for tensor data
};

/// Copies a checkpoint to another number of ranks, bit by bit but for casts, with bounded memory: a new save id, the
/// same step and metadata. Every source block is checked; nothing is published unless every content digest of the
/// target, of tensors that are not cast, equals the source's. Throws ConfigError where the meshes
/// or options do not fit, MismatchError for rank-local values without a policy, IoError and CorruptError as reading and
/// writing do; `target`, which must not exist, is then not there.
ReshardReport reshard(const std::filesystem::path& source, const std::filesystem::path& target,
                      const ReshardOptions& options);

}  // namespace fsdp2
