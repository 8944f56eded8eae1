// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/view.hpp"

#include <fmt/format.h>

#include <string>
#include <vector>

#include "checkpoint/file.hpp"
#include "checkpoint/hdf5.hpp"
#include "checkpoint/shard_file.hpp"
#include "checkpoint/write_files.hpp"
#include "fsdp2/checkpoint/layout.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2 {

namespace checkpoint {

namespace {

constexpr const char* partial_prefix = ".view.h5.partial-";

/// A file with what HDF5 makes of views alone: it has no data.
void write_structure(const std::filesystem::path& path, const Skeleton& skeleton) {
  File file = File::create(path);
  for (const auto& [offset, bytes] : skeleton.metadata) file.write(bytes, offset);
  file.sync();
  file.close();
}

/// Removes what killed processes have left of views. Best effort.
void remove_partials(const std::filesystem::path& directory) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored))
    if (entry.path().filename().string().starts_with(partial_prefix)) std::filesystem::remove(entry.path(), ignored);
}

/// Elements of the arena of each dtype in a file.
PerDType<std::int64_t> arena_elements(const CheckpointIndex& index, const FileEntry& file) {
  PerDType<std::int64_t> elements{};
  for (const DType dtype : all_dtypes) {
    const Segment& last = index.segments[static_cast<std::size_t>(file.ranks.back())][dtype];
    elements[dtype] = (last.start + last.length) / size_of(dtype);
  }
  return elements;
}

}  // namespace

}  // namespace checkpoint

ViewReport write_view(const std::filesystem::path& directory) {
  using namespace checkpoint;
  const CheckpointIndex index = read_index(directory);
  ViewReport report;
  std::vector<NamedView> views;
  for (const TensorEntry& tensor : index.tensors)
    views.push_back({"/" + escape_name(tensor.name), tensor.spec.dtype, tensor.spec.shape, {}});
  for (std::size_t f = 0; f < index.files.size(); ++f) {
    const std::string name = shard_file_name(f, index.files.size());
    const PerDType<std::int64_t> elements = arena_elements(index, index.files[f]);
    for (const std::int64_t rank : index.files[f].ranks)
      for (const Piece& piece : plan_rank(index, rank).pieces) {
        ++report.mappings;
        if (report.mappings > max_view_mappings) continue;  // only counted
        NamedView& view = views[piece.tensor];
        const DType dtype = view.type;
        const Segment& segment = index.segments[static_cast<std::size_t>(rank)][dtype];
        view.parts.push_back(
            {piece.box, name, data_path(dtype), elements[dtype], (segment.start + piece.start) / size_of(dtype)});
      }
  }
  if (report.mappings > max_view_mappings)
    throw ConfigError(
        fmt::format("checkpoint {} has {} pieces, and a view maps at most {}, which HDF5 can still open: use "
                    "read_checkpoint.py, or reshard it to fewer ranks first",
                    directory.string(), report.mappings, max_view_mappings));
  report.tensors = static_cast<std::int64_t>(views.size());
  const Skeleton skeleton = build_skeleton(
      {}, views,
      {{{"step", index.step}},
       {{"library", index.library},
        {"note",
         "A view for people. HDF5 checks no digests, and shows NaN or 0 where a shard file is missing: programs read "
         "index.h5 and the shard files, see FORMAT.md."},
        {"save_id", index.save_id}}});
  const std::filesystem::path target = directory / "view.h5";
  remove_partials(directory);
  const std::filesystem::path partial = directory / fmt::format("{}{}", partial_prefix, random_save_id());
  try {
    write_structure(partial, skeleton);
    std::filesystem::rename(partial, target);
    sync_directory(directory);
  } catch (const std::filesystem::filesystem_error& error) {
    std::error_code ignored;
    std::filesystem::remove(partial, ignored);
    throw IoError(fmt::format("renaming {} to view.h5 failed: {}", partial.string(), error.code().message()));
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(partial, ignored);
    throw;
  }
  return report;
}

}  // namespace fsdp2
