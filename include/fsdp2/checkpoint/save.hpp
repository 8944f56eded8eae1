// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
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

/// How bytes get into files. The files are the same.
enum class Io : std::uint8_t {
  direct,  ///< by system calls: no rank waits for another, and a full disk is reported like any other error
  mpio,    ///< by parallel HDF5 over MPI-IO, for file systems on which MPI-IO is tuned; AsyncSaver refuses it
};

/// For Io::mpio.
struct MpioOptions {
  /// Ranks of one file transfer their parts together, so that MPI-IO can aggregate them; otherwise each for itself.
  /// With it, HDF5 may wait for ever for a rank whose device fails in the middle of a transfer.
  bool collective = false;
  /// At most so many bytes a call, from 4 KiB to 1 GiB (older HDF5 and MPI fail at 2 GiB), a multiple of 4 KiB. A rank
  /// needs a buffer of that size, or of a block if that is larger.
  std::int64_t call_bytes = std::int64_t{64} << 20;
  /// MPI_Info of every file, such as {"striping_factor", "16"} or {"cb_nodes", "4"}. MPI ignores what it does not know.
  std::map<std::string, std::string> hints = {};
};

struct SaveOptions {
  /// Recorded in the checkpoint; by default the dict's "optim.step", else 0.
  std::optional<std::int64_t> step = {};
  /// The user's own JSON text, or empty.
  std::string metadata = {};
  FormatSizes sizes = {};
  /// So many neighbouring ranks write one HDF5 file, in parallel and without waiting for each other.
  std::variant<std::int64_t, FileGroups> ranks_per_file = std::int64_t{1};
  /// What only this rank has.
  RankLocalValues rank_local = {};
  /// Replaces a checkpoint of that name: in one step where the file system can exchange directories, else by way of
  /// hidden names, from which an interrupted replacement is restored.
  bool overwrite = false;
  Io io = Io::direct;
  MpioOptions mpio = {};
};

/// Writes a sharded state dict as a checkpoint directory `target`, which must not exist; its parents are made.
/// Collective over all ranks of the dict's meshes, with the same keys, specs and options. Every rank plans and writes
/// its part alone, unless by Io::mpio: no communication until all bytes are on stable storage, then one agreement on
/// status and digests, and one on publication. Waits for all device work first; the tensors may be written again when
/// it returns. Either `target` is a complete, durable checkpoint afterwards, or every rank throws the same error and
/// that name is as it was before: ConfigError for what cannot be saved (no tensors, a Partial placement, an empty
/// name), MismatchError where ranks disagree, IoError where the file system fails.
void save(const std::filesystem::path& target, const StateDict& state, const SaveOptions& options = {});

/// Saves while the program goes on. A save begins with a copy of this rank's part to host memory, of the same size and
/// kept for the next save; a thread, which calls neither MPI nor HDF5 nor Kokkos, writes it. Agreement and publication
/// follow in poll or wait. One save at a time.
class AsyncSaver {
 public:
  AsyncSaver();
  AsyncSaver(AsyncSaver&&) noexcept;
  AsyncSaver& operator=(AsyncSaver&&) noexcept;
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;
  /// Gives up a save that was not waited for: it is never published, and its hidden directory is left over.
  ~AsyncSaver();

  /// As fsdp2::save, but returns when the tensors may be written again, and throws only what is known by then.
  /// Collective over the ranks of the dict's meshes, which must not be closed before wait. Throws Error while a save is
  /// under way.
  void save(const std::filesystem::path& target, const StateDict& state, const SaveOptions& options = {});

  /// Lets the save go on, and returns true when it is over, well or not, or when there is none. Never waits for other
  /// ranks, but rank 0 for its file system when it publishes. The ranks need not call it equally often, or see the end
  /// in the same step.
  bool poll();

  /// Returns when `target` is a complete, durable checkpoint, or throws the same error on every rank, as save does.
  /// Does nothing when there is no save. Every rank must call it, or poll until the end.
  void wait();

  /// From save to wait.
  bool is_saving() const { return operation_ != nullptr; }

 private:
  class Operation;
  class Image;
  void abandon() noexcept;

  std::unique_ptr<Operation> operation_;
  std::unique_ptr<Image> image_;
};

}  // namespace fsdp2
