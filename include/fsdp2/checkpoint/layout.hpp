// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "fsdp2/dtype.hpp"
#include "fsdp2/mesh.hpp"
#include "fsdp2/placement.hpp"
#include "fsdp2/shape.hpp"

namespace fsdp2 {

/// A mesh that tensors of a checkpoint lie on.
struct MeshEntry {
  std::string name;
  MeshSpec spec;
  std::vector<AxisRole> roles;  ///< one per axis
};

/// One tensor of a checkpoint.
struct TensorEntry {
  std::string name;
  TensorSpec spec;
  std::size_t mesh = 0;      ///< number in CheckpointIndex::meshes
  std::uint64_t digest = 0;  ///< CRC-64/XZ of the whole tensor's row-major bytes, whatever the mesh

  std::int64_t bytes() const { return spec.bytes(); }
};

/// One shard file.
struct FileEntry {
  std::int64_t size = 0;            ///< bytes
  std::vector<std::int64_t> ranks;  ///< whose bytes it holds, in this order
};

/// One rank's part of the arena of one dtype in its file, in bytes.
struct Segment {
  std::int64_t start = 0;
  std::int64_t length = 0;

  friend bool operator==(const Segment&, const Segment&) = default;
};

/// Something per dtype: element (code − 1).
template <class T>
struct PerDType : std::array<T, std::size(all_dtypes)> {
  using std::array<T, std::size(all_dtypes)>::operator[];
  T& operator[](DType dtype) { return (*this)[static_cast<std::size_t>(dtype) - 1]; }
  const T& operator[](DType dtype) const { return (*this)[static_cast<std::size_t>(dtype) - 1]; }
};

/// Sizes of the format's units, recorded in every checkpoint: powers of two, 4096 ≤ block_bytes ≤ segment_align ≤ 1
/// GiB.
struct FormatSizes {
  std::int64_t block_bytes = std::int64_t{1} << 20;
  std::int64_t segment_align = std::int64_t{1} << 20;
  std::int64_t split_bytes = std::int64_t{4} << 20;  ///< replicated boxes up to this size are written whole by one rank

  friend bool operator==(const FormatSizes&, const FormatSizes&) = default;
};

/// What index.h5 says: all there is to know about a checkpoint but the tensor bytes. checkpoints/FORMAT.md has the
/// rules.
struct CheckpointIndex {
  std::string library;  ///< the writer
  std::string save_id;  ///< 32 hexadecimal digits
  std::int64_t step = 0;
  std::int64_t world_size = 1;
  FormatSizes sizes;
  std::vector<MeshEntry> meshes;
  std::vector<TensorEntry> tensors;  ///< in bytewise name order
  std::vector<FileEntry> files;
  std::vector<PerDType<Segment>> segments;  ///< by rank
  std::string metadata;                     ///< JSON text, or empty

  /// The number of a tensor in `tensors`, or tensors.size().
  std::size_t find(const std::string& name) const;
};

/// Opaque values of one rank, by name: what has no place in the global index space, such as the state of its random
/// numbers or its place in the data.
using RankLocalValues = std::map<std::string, std::vector<std::byte>>;

/// Which rank-local values a rank gets where another number of ranks saved them. With the same number, each gets its
/// own.
enum class RankLocalPolicy : std::uint8_t {
  error,        ///< none: MismatchError, if there are any
  first,        ///< rank 0's
  each,         ///< those of the rank of the same number, if there was one
  concatenate,  ///< those of its chunk of the ranks that saved, see chunk; values of one name one after another
};

/// A box of one tensor that one rank writes, and where.
struct Piece {
  std::size_t tensor = 0;  ///< number in CheckpointIndex::tensors
  Box box;                 ///< in global indices
  std::int64_t start = 0;  ///< first byte in the rank's segment of the tensor's dtype
  std::int64_t bytes = 0;
};

/// All that one rank writes.
struct RankPlan {
  std::vector<Piece> pieces;    ///< in tensor order, none empty
  PerDType<std::int64_t> used;  ///< bytes of each segment up to the end of its last piece
};

/// What `rank` writes of the tensors of an index: a pure function of specs, meshes and sizes, O(tensors), without a
/// loop over ranks. Replicated boxes are cut among their holders so that bytes are balanced ("cut the line", FORMAT.md
/// §4).
RankPlan plan_rank(const CheckpointIndex& index, std::int64_t rank);

/// Throws ConfigError or ShapeError where meshes, tensors, names or sizes are not those of a well-formed checkpoint.
void validate(const CheckpointIndex& index);

/// "shard-00002-of-00004.h5".
std::string shard_file_name(std::size_t file, std::size_t files);

/// Reads and checks the index of a checkpoint directory. No MPI. Throws IoError where it cannot be read (no directory,
/// no index.h5), CorruptError where it contradicts its digest or itself, MismatchError for a format version that is too
/// new.
CheckpointIndex read_index(const std::filesystem::path& checkpoint);

}  // namespace fsdp2
