// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "fsdp2/checkpoint/layout.hpp"
#include "fsdp2/state_dict.hpp"

namespace fsdp2 {

/// Which ranks write one file together.
enum class FileGroups : std::uint8_t {
  node,   ///< those that share memory
  world,  ///< all
};

struct SaveOptions {
  /// Recorded in the checkpoint; by default the dict's "optim.step", else 0.
  std::optional<std::int64_t> step = {};
  /// The user's own JSON text, or empty.
  std::string metadata = {};
  FormatSizes sizes = {};
  /// So many neighbouring ranks write one HDF5 file, in parallel and without waiting for each other.
  std::variant<std::int64_t, FileGroups> ranks_per_file = std::int64_t{1};
  /// What only this rank has, by name: the state of its random numbers, its place in the data. At most 2^31 bytes a
  /// rank.
  std::map<std::string, std::vector<std::byte>> rank_local = {};
  /// Replaces a checkpoint of that name: in one step where the file system can exchange directories, else by way of
  /// hidden names, from which an interrupted replacement is restored.
  bool overwrite = false;
};

/// Writes a sharded state dict as a checkpoint directory `target`, which must not exist; its parents are made.
/// Collective over all ranks of the dict's meshes, with the same keys, specs and options. Every rank plans and writes
/// its part alone: no communication until all bytes are on stable storage, then one agreement on status and digests,
/// and one on publication. Waits for all device work first; the tensors may be written again when it returns. Either
/// `target` is a complete, durable checkpoint afterwards, or every rank throws the same error and that name is as it was
/// before: ConfigError for what cannot be saved (no tensors, a Partial placement, an empty name), MismatchError where
/// ranks disagree, IoError where the file system fails.
void save(const std::filesystem::path& target, const StateDict& state, const SaveOptions& options = {});

}  // namespace fsdp2
