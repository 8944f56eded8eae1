// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <filesystem>

#include "checkpoint/columns.hpp"
#include "fsdp2/checkpoint/layout.hpp"

namespace fsdp2::checkpoint {

inline constexpr std::uint64_t format_version = 1;

/// The index as columns, without /check: FORMAT.md §8.
Columns encode_index(const CheckpointIndex& index);

/// The inverse, which trusts nothing but that all columns are there, with their types: CorruptError, which names
/// `path`, where they contradict each other.
CheckpointIndex decode_index(const Columns& columns, const std::filesystem::path& path);

/// The CRC that goes into /check.
std::uint64_t check_of(const Columns& columns);

/// Writes and fsyncs `directory`/index.h5.
void write_index(const std::filesystem::path& directory, const CheckpointIndex& index);

/// A save id's two halves, and back. The text is 32 hexadecimal digits.
std::pair<std::uint64_t, std::uint64_t> save_id_halves(const std::string& save_id);
std::string save_id_text(std::uint64_t high, std::uint64_t low);

}  // namespace fsdp2::checkpoint
