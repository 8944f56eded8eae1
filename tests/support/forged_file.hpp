// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Checkpoint files that say what nobody should write, under a /check that matches.

#include <filesystem>
#include <map>
#include <string>
#include <string_view>

#include "checkpoint/columns.hpp"
#include "checkpoint/file.hpp"
#include "checkpoint/hdf5.hpp"

namespace fsdp2::testing {

/// Reads the named datasets of a file, with their types; those of two or three dimensions are /ranks and /segments.
inline checkpoint::Columns read_columns(const std::filesystem::path& path, const std::map<std::string, DType>& types) {
  const checkpoint::Hdf5Structure structure(path);
  const checkpoint::File file = checkpoint::File::open(path);
  checkpoint::Columns columns;
  for (const auto& [name, type] : types)
    columns[name] = checkpoint::read_column(file, structure, name, type,
                                            name == "/segments" ? 3
                                            : name == "/ranks"  ? 2
                                                                : 1);
  return columns;
}

/// The /check of an index, and of a shard file of one rank: over all datasets but /check itself and tensor bytes, in
/// order of paths, but in a shard file (which has /ranks) /header and /ranks come first.
inline std::uint64_t check_of_file(checkpoint::Columns columns) {
  checkpoint::CheckDigest digest;
  if (columns.contains("/ranks"))
    for (const char* path : {"/header", "/ranks"}) {
      digest.add(columns[path].bytes);
      columns.erase(path);
    }
  for (const auto& [path, column] : columns)
    if (path != "/check" && !path.starts_with("/data/")) digest.add(column.bytes);
  return digest.value();
}

/// Writes a file of these datasets and the /check that goes with them. Returns the size of the file.
inline std::int64_t write_columns(const std::filesystem::path& path, checkpoint::Columns columns) {
  const std::uint64_t check = check_of_file(columns);
  columns["/check"] = checkpoint::Column(std::span(&check, 1));
  std::map<std::string, checkpoint::DatasetSpec> datasets;
  for (const auto& [name, column] : columns) datasets[name] = {column.type, column.shape};
  const checkpoint::Skeleton skeleton = checkpoint::build_skeleton(datasets, {}, {});
  std::filesystem::remove(path);
  checkpoint::File file = checkpoint::File::create(path);
  file.reserve(skeleton.file_size);
  for (const auto& [offset, bytes] : skeleton.metadata) file.write(bytes, offset);
  for (const auto& [name, column] : columns) file.write(column.bytes, skeleton.places.at(name).offset);
  file.close();
  return skeleton.file_size;
}

/// Sets an element, whatever the width of the column.
inline void set_element(checkpoint::Column& column, std::size_t i, std::uint64_t value) {
  if (column.type == DType::u8)
    column.bytes.at(i) = static_cast<std::byte>(value);
  else
    column.set_u64(i, value);
}

inline std::uint64_t element(const checkpoint::Column& column, std::size_t i) {
  return column.type == DType::u8 ? column.u8(i) : column.u64(i);
}

/// Gives a one-dimensional column another number of elements: zeros are added at the end.
inline void resize(checkpoint::Column& column, std::size_t size) {
  column.bytes.resize(size * static_cast<std::size_t>(size_of(column.type)));
  column.shape = {static_cast<std::int64_t>(size)};
}

}  // namespace fsdp2::testing
