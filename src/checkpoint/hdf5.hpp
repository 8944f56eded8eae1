// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// The only part of the library that knows HDF5's API: building the structure of a file, and reading it back, both
// without the tensor bytes. Data are read and written at the offsets found here; MpioFile is the other way of writing.

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp2/dtype.hpp"
#include "fsdp2/shape.hpp"
#include "unique_handle.hpp"

namespace fsdp2::checkpoint {

/// A contiguous dataset to be made.
struct DatasetSpec {
  DType type = DType::u8;
  Shape shape;
};

/// Where a dataset's bytes lie in its file. A dataset without elements lies nowhere: offset 0, bytes 0.
struct DatasetPlace {
  Shape shape;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

/// Where HDF5 finds a box of a virtual dataset: its elements, row-major, are elements from `start` on of a
/// one-dimensional dataset.
struct ViewPart {
  Box box;
  std::string file;  ///< "." is the view's own; else in its directory
  std::string source;
  std::int64_t source_elements = 0;
  std::int64_t start = 0;
};

/// A virtual dataset. Where there is no part, or its file is missing, HDF5 shows NaN, or 0 in types without NaN.
struct NamedView {
  std::string path;
  DType type = DType::u8;
  Shape shape;
  std::vector<ViewPart> parts;
};

/// What is in a file for people: attributes of the root group.
struct RootAttributes {
  std::vector<std::pair<std::string, std::int64_t>> numbers;
  std::vector<std::pair<std::string, std::string>> texts;
};

/// An HDF5 file without the bytes of its datasets.
struct Skeleton {
  std::int64_t file_size = 0;
  std::map<std::string, DatasetPlace> places;
  /// What lies outside every dataset: HDF5's own bytes, by offset.
  std::vector<std::pair<std::int64_t, std::vector<std::byte>>> metadata;
};

/// Lets HDF5 lay out a file: all groups and datasets, no data. The same arguments give the same bytes. Takes about 2
/// ms; throws IoError.
Skeleton build_skeleton(const std::map<std::string, DatasetSpec>& datasets, const std::vector<NamedView>& views,
                        const RootAttributes& attributes);

/// MPI_Info of a file.
using MpiHints = std::map<std::string, std::string>;

/// One rank: makes an empty file through MPI-IO, which applies hints of how a file lies on disks only then. Throws
/// IoError.
void create_by_mpi(const std::filesystem::path& path, const MpiHints& hints);

/// Datasets of a complete skeleton, written by some ranks through HDF5's MPI-IO driver. HDF5 writes nothing of its own
/// but, on rank 0 in close, the superblock as it was: where one rank of a parallel HDF5 1.10 cannot write structure,
/// the others wait for it for ever, and its process crashes at the end.
class MpioFile {
 public:
  enum class Transfer : std::uint8_t { independent, collective };

  /// Collective over `comm`, as close is. Throws IoError; ranks must then agree that nobody goes on.
  MpioFile(const std::filesystem::path& path, MPI_Comm comm, const MpiHints& hints, Transfer transfer);
  MpioFile(const MpioFile&) = delete;
  MpioFile& operator=(const MpioFile&) = delete;
  /// Does not close: that would wait for ranks that may not come. MPI_Finalize closes what was left open.
  ~MpioFile() = default;

  /// Whole rows from byte `start` of a dataset on, in one call; at most 1 GiB. Collective transfers: all ranks, for one
  /// dataset after another, equally often, some of them perhaps without bytes.
  void write(const std::string& dataset, std::int64_t start, std::span<const std::byte> bytes);
  void close();

 private:
  std::filesystem::path path_;
  Transfer transfer_;
  std::int64_t file_ = -1;
};

struct Hdf5FileTraits {
  using Type = std::int64_t;
  static constexpr Type invalid() { return -1; }
  static void release(Type id);
};

/// The structure of an existing file, trusted as little as possible.
class Hdf5Structure {
 public:
  /// Checks the superblock (signature, version 3, checksum, end of file = file size) before HDF5 opens the file. Throws
  /// CorruptError, or IoError where the file cannot be read.
  explicit Hdf5Structure(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  std::int64_t file_size() const { return file_size_; }

  /// The place of a dataset; nothing if there is none of that name. Throws CorruptError unless it is reached by hard
  /// links, has exactly that type and number of dimensions, and is contiguous, unfiltered and inside the file.
  std::optional<DatasetPlace> find(const std::string& dataset, DType type, std::size_t dimensions) const;
  /// The same for one that must exist.
  DatasetPlace require(const std::string& dataset, DType type, std::size_t dimensions) const;

 private:
  std::filesystem::path path_;
  std::int64_t file_size_ = 0;
  UniqueHandle<Hdf5FileTraits> file_;
};

}  // namespace fsdp2::checkpoint
