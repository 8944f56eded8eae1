// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <filesystem>

#include "fsdp2/checkpoint/layout.hpp"
#include "fsdp2/state_dict.hpp"

namespace fsdp2 {

struct LoadOptions {
  /// Every key of the state dict must be in the checkpoint, and every tensor of the checkpoint in the state dict. Off,
  /// only the common ones are loaded.
  bool strict = true;
};

/// Fills the tensors of `state`, in place, from a checkpoint written by any number of ranks on any mesh. Collective
/// over all ranks of the dict's meshes. Returns the checkpoint's index: step, metadata, where it came from. Throws the
/// same error on every rank: MismatchError, which lists all missing and unexpected keys and all other shapes and
/// dtypes, with nothing changed; IoError and CorruptError with nothing changed where the index is at fault, else with
/// the tensors undefined.
CheckpointIndex load(const std::filesystem::path& checkpoint, const StateDict& state, const LoadOptions& options = {});

}  // namespace fsdp2
