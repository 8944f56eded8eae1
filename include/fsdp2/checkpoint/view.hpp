// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <filesystem>

namespace fsdp2 {

/// At most so many pieces are mapped by view.h5: HDF5 reads all mappings of a dataset when it opens it.
inline constexpr std::int64_t max_view_mappings = 1000000;

struct ViewReport {
  std::int64_t tensors = 0;
  std::int64_t mappings = 0;  ///< pieces in the shard files
};

/// Writes `checkpoint`/view.h5, or replaces it: an HDF5 file that shows each tensor, under its name (escaped as in
/// FORMAT.md §9), in its global shape, as a virtual dataset over the shard files. For people: HDF5 checks no digest,
/// and shows NaN, or 0 in types without NaN, where a shard file is missing; fsdp2 never reads it. The directory can be
/// moved as a whole. Reads the index only. No MPI: one process. Throws as read_index, ConfigError above
/// max_view_mappings, and IoError where it cannot be written: then view.h5 is what it was.
ViewReport write_view(const std::filesystem::path& checkpoint);

}  // namespace fsdp2
