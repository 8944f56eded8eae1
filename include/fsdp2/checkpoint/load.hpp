// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fsdp2/checkpoint/layout.hpp"
#include "fsdp2/state_dict.hpp"

namespace fsdp2 {

struct LoadOptions {
  /// Every key of the state dict must be in the checkpoint, and every tensor of the checkpoint in the state dict. Off,
  /// only the common ones are loaded.
  bool strict = true;
  /// The name in the checkpoint of a key of the state dict; by default the same.
  std::function<std::string(const std::string& key)> rename = {};
  /// Allows other dtypes: f64, f32, f16 and bf16 are cast to one another, as by Kokkos kernels, to nearest.
  bool cast = false;
  /// Of ranks that hold the same part of a tensor, one reads it and broadcasts it: for file systems that are slower
  /// than the network.
  bool broadcast_replicas = false;
  /// Where this rank's rank-local values go, if anywhere.
  RankLocalValues* rank_local = nullptr;
  RankLocalPolicy rank_local_policy = RankLocalPolicy::error;
};

/// Fills the tensors of `state`, in place, from a checkpoint written by any number of ranks on any mesh. Collective
/// over all ranks of the dict's meshes, with the same options. Returns the checkpoint's index: step, metadata, where it
/// came from. Throws the same error on every rank: MismatchError, which lists all missing and unexpected keys and all
/// other shapes and dtypes, with nothing changed; IoError and CorruptError with nothing changed where the index is at
/// fault, else with the tensors undefined.
CheckpointIndex load(const std::filesystem::path& checkpoint, const StateDict& state, const LoadOptions& options = {});

/// The rank-local values that rank `rank` of `world_size` gets. No MPI. Throws as load.
RankLocalValues read_rank_local(const std::filesystem::path& checkpoint, std::int64_t rank, std::int64_t world_size,
                                RankLocalPolicy policy = RankLocalPolicy::error);

/// A box of one tensor, the whole by default, row-major in host memory. No MPI. Throws as load, and ShapeError for a
/// box that is not in the tensor.
HostTensor read_tensor(const std::filesystem::path& checkpoint, const std::string& name,
                       const std::optional<Box>& box = {});

}  // namespace fsdp2
