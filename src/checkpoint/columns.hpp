// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Tables of fixed-width columns: how everything but tensor bytes is stored in a checkpoint file.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/hdf5.hpp"
#include "fsdp2/dtype.hpp"

namespace fsdp2::checkpoint {

class File;

/// The elements of one dataset in memory: u8, u64 or i64.
struct Column {
  DType type = DType::u64;
  Shape shape;
  std::vector<std::byte> bytes;

  Column() = default;
  explicit Column(std::span<const std::uint64_t> values);
  explicit Column(std::span<const std::int64_t> values);
  explicit Column(std::span<const std::uint8_t> values);
  explicit Column(std::string_view text);

  std::size_t size() const { return bytes.size() / static_cast<std::size_t>(size_of(type)); }
  std::uint64_t u64(std::size_t i) const;
  std::int64_t i64(std::size_t i) const { return static_cast<std::int64_t>(u64(i)); }
  std::uint8_t u8(std::size_t i) const { return static_cast<std::uint8_t>(bytes[i]); }
  void set_u64(std::size_t i, std::uint64_t value);
  std::string_view text() const { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }
};

/// By path, thus in bytewise order of paths.
using Columns = std::map<std::string, Column>;

/// Lists of variable length: list i is values [ptr[i], ptr[i+1]).
class ListBuilder {
 public:
  void add(std::string_view bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    pointers_.push_back(bytes_.size());
  }
  /// Stores the lists as columns `pointer_path` and `bytes_path`.
  void store(Columns& columns, const std::string& pointer_path, const std::string& bytes_path) const;

 private:
  std::vector<std::uint64_t> pointers_{0};
  std::string bytes_;
};

/// The running CRC over byte strings, each preceded by its length: FORMAT.md's /check.
class CheckDigest {
 public:
  void add(std::span<const std::byte> bytes);
  std::uint64_t value() const { return crc_; }

 private:
  std::uint64_t crc_ = 0;
};

/// Reads a dataset whole from its place in a file.
Column read_column(const File& file, const DatasetPlace& place, DType type);
/// The same by its path.
Column read_column(const File& file, const Hdf5Structure& structure, const std::string& path, DType type,
                   std::size_t dimensions = 1);
/// The same for one whose shape is known. Throws CorruptError unless it has it, before anything is read or allocated.
Column read_column(const File& file, const Hdf5Structure& structure, const std::string& path, DType type,
                   const Shape& expected);

/// Throws CorruptError unless `pointers` has lists + 1 entries, begins with 0, never descends and ends with `length`.
void check_pointers(const Column& pointers, std::size_t lists, std::size_t length, const std::string& what);

/// List i of a checked pair of columns.
std::string_view list_text(const Column& pointers, const Column& bytes, std::size_t i);

}  // namespace fsdp2::checkpoint
