// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "unique_handle.hpp"

namespace fsdp2::checkpoint {

struct DescriptorTraits {
  using Type = int;
  static constexpr int invalid() { return -1; }
  static void release(int descriptor);
};

/// A file read and written at offsets. Every function throws IoError with the call, the path and errno's text.
class File {
 public:
  /// For writing; made if it is not there, its content kept if it is: several ranks may open one file.
  static File create(const std::filesystem::path& path);
  static File open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  std::int64_t size() const;
  /// Makes the file `bytes` long, with disk space behind it where the file system can promise that.
  void reserve(std::int64_t bytes);
  void write(std::span<const std::byte> bytes, std::int64_t offset);
  /// Fills one part after the other. Throws CorruptError where the file ends early.
  void read(std::span<const std::span<std::byte>> parts, std::int64_t offset) const;
  void read(std::span<std::byte> bytes, std::int64_t offset) const { read({&bytes, 1}, offset); }
  /// Asks the kernel to start writing a range, so that sync() finds little left to do. A hint: failures do not matter.
  void start_writeback(std::int64_t offset, std::int64_t bytes);
  /// Returns when the content is on stable storage. Never retried: after a failure the kernel may have dropped pages.
  void sync();
  /// Reports what the destructor cannot.
  void close();

 private:
  File(std::filesystem::path path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}

  std::filesystem::path path_;
  UniqueHandle<DescriptorTraits> descriptor_;
};

/// Memory for bytes of a file. Throws IoError, which names it, where there is not so much: a hole in a file costs its
/// writer nothing.
std::vector<std::byte> buffer_for(const std::filesystem::path& path, std::int64_t bytes);

/// Makes one directory; true if it is new. Its parent must exist.
bool make_directory(const std::filesystem::path& path);
/// Makes the entries of a directory durable.
void sync_directory(const std::filesystem::path& path);
/// Renames `from` to `to`, which must not exist.
void rename_to_new(const std::filesystem::path& from, const std::filesystem::path& to);
/// Exchanges two names in one step; false where the file system cannot.
bool exchange(const std::filesystem::path& a, const std::filesystem::path& b);
/// Removes a file.
void remove_file(const std::filesystem::path& path);

}  // namespace fsdp2::checkpoint
