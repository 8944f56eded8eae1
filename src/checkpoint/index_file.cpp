// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/index_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <set>

#include "checkpoint/file.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::checkpoint {

namespace {

constexpr std::size_t header_fields = 12;
enum class PlacementKind : std::uint8_t { replicate = 0, shard = 1, ragged = 2 };

/// Every dataset of the index but /check, with its type and number of dimensions.
struct ColumnSpec {
  const char* path;
  DType type;
  std::size_t dimensions = 1;
};
constexpr ColumnSpec index_columns[] = {
    {"/header", DType::u64},
    {"/library", DType::u8},
    {"/metadata", DType::u8},
    {"/mesh/name_ptr", DType::u64},
    {"/mesh/name_bytes", DType::u8},
    {"/mesh/axis_ptr", DType::u64},
    {"/mesh/axis_name_ptr", DType::u64},
    {"/mesh/axis_name_bytes", DType::u8},
    {"/mesh/axis_size", DType::u64},
    {"/mesh/axis_role", DType::u8},
    {"/mesh/rank_ptr", DType::u64},
    {"/mesh/ranks", DType::u64},
    {"/files/size", DType::u64},
    {"/files/rank_ptr", DType::u64},
    {"/files/ranks", DType::u64},
    {"/segments", DType::u64, 3},
    {"/table/name_ptr", DType::u64},
    {"/table/name_bytes", DType::u8},
    {"/table/dtype", DType::u8},
    {"/table/shape_ptr", DType::u64},
    {"/table/shape", DType::i64},
    {"/table/mesh", DType::u64},
    {"/table/placement_ptr", DType::u64},
    {"/table/placement_kind", DType::u8},
    {"/table/placement_dim", DType::i64},
    {"/table/placement_bounds", DType::u64},
    {"/table/split_order", DType::u64},
    {"/table/digest", DType::u64},
    {"/ragged/bounds_ptr", DType::u64},
    {"/ragged/bounds", DType::i64},
};

template <class T>
Column column(const std::vector<T>& values) {
  return Column(std::span<const T>(values));
}

std::uint64_t unsigned_of(std::int64_t value) {
  return static_cast<std::uint64_t>(value);
}

void encode_meshes(const CheckpointIndex& index, Columns& columns) {
  ListBuilder names;
  ListBuilder axis_names;
  std::vector<std::uint64_t> axis_ptr{0};
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint8_t> roles;
  std::vector<std::uint64_t> rank_ptr{0};
  std::vector<std::uint64_t> ranks;
  for (const MeshEntry& mesh : index.meshes) {
    names.add(mesh.name);
    for (std::size_t a = 0; a < mesh.spec.dimensions(); ++a) {
      axis_names.add(mesh.spec.axes()[a].name);
      sizes.push_back(unsigned_of(mesh.spec.axes()[a].size));
      roles.push_back(static_cast<std::uint8_t>(mesh.roles[a]));
    }
    axis_ptr.push_back(sizes.size());
    ranks.insert(ranks.end(), mesh.spec.ranks().begin(), mesh.spec.ranks().end());
    rank_ptr.push_back(ranks.size());
  }
  names.store(columns, "/mesh/name_ptr", "/mesh/name_bytes");
  axis_names.store(columns, "/mesh/axis_name_ptr", "/mesh/axis_name_bytes");
  columns["/mesh/axis_ptr"] = column(axis_ptr);
  columns["/mesh/axis_size"] = column(sizes);
  columns["/mesh/axis_role"] = column(roles);
  columns["/mesh/rank_ptr"] = column(rank_ptr);
  columns["/mesh/ranks"] = column(ranks);
}

void encode_files(const CheckpointIndex& index, Columns& columns) {
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint64_t> rank_ptr{0};
  std::vector<std::uint64_t> ranks;
  for (const FileEntry& file : index.files) {
    sizes.push_back(unsigned_of(file.size));
    ranks.insert(ranks.end(), file.ranks.begin(), file.ranks.end());
    rank_ptr.push_back(ranks.size());
  }
  columns["/files/size"] = column(sizes);
  columns["/files/rank_ptr"] = column(rank_ptr);
  columns["/files/ranks"] = column(ranks);
  std::vector<std::uint64_t> segments;
  for (const PerDType<Segment>& rank : index.segments)
    for (const Segment& segment : rank) {
      segments.push_back(unsigned_of(segment.start));
      segments.push_back(unsigned_of(segment.length));
    }
  columns["/segments"] = column(segments);
  columns["/segments"].shape = {static_cast<std::int64_t>(index.segments.size()), std::size(all_dtypes), 2};
}

void encode_tensors(const CheckpointIndex& index, Columns& columns) {
  ListBuilder names;
  std::vector<std::uint8_t> dtypes;
  std::vector<std::uint64_t> shape_ptr{0};
  std::vector<std::int64_t> shapes;
  std::vector<std::uint64_t> meshes;
  std::vector<std::uint64_t> placement_ptr{0};
  std::vector<std::uint8_t> kinds;
  std::vector<std::int64_t> dims;
  std::vector<std::uint64_t> bounds_of;
  std::vector<std::uint64_t> orders;
  std::vector<std::uint64_t> digests;
  std::map<std::vector<std::int64_t>, std::uint64_t> ragged;
  std::vector<std::uint64_t> bounds_ptr{0};
  std::vector<std::int64_t> bounds;
  for (const TensorEntry& tensor : index.tensors) {
    names.add(tensor.name);
    dtypes.push_back(static_cast<std::uint8_t>(tensor.spec.dtype));
    shapes.insert(shapes.end(), tensor.spec.shape.begin(), tensor.spec.shape.end());
    shape_ptr.push_back(shapes.size());
    meshes.push_back(tensor.mesh);
    for (const Placement& placement : tensor.spec.placements) {
      PlacementKind kind = PlacementKind::replicate;
      std::int64_t dim = 0;
      std::uint64_t row = 0;
      if (const auto* shard = std::get_if<Shard>(&placement)) {
        kind = PlacementKind::shard;
        dim = shard->dim;
      } else if (const auto* cut = std::get_if<Ragged>(&placement)) {
        kind = PlacementKind::ragged;
        dim = cut->dim;
        const auto [it, is_new] = ragged.emplace(cut->bounds, ragged.size());
        row = it->second;
        if (is_new) {
          bounds.insert(bounds.end(), cut->bounds.begin(), cut->bounds.end());
          bounds_ptr.push_back(bounds.size());
        }
      }
      kinds.push_back(static_cast<std::uint8_t>(kind));
      dims.push_back(dim);
      bounds_of.push_back(row);
    }
    for (const std::int64_t axis : split_order(tensor.spec)) orders.push_back(unsigned_of(axis));
    placement_ptr.push_back(kinds.size());
    digests.push_back(tensor.digest);
  }
  names.store(columns, "/table/name_ptr", "/table/name_bytes");
  columns["/table/dtype"] = column(dtypes);
  columns["/table/shape_ptr"] = column(shape_ptr);
  columns["/table/shape"] = column(shapes);
  columns["/table/mesh"] = column(meshes);
  columns["/table/placement_ptr"] = column(placement_ptr);
  columns["/table/placement_kind"] = column(kinds);
  columns["/table/placement_dim"] = column(dims);
  columns["/table/placement_bounds"] = column(bounds_of);
  columns["/table/split_order"] = column(orders);
  columns["/table/digest"] = column(digests);
  columns["/ragged/bounds_ptr"] = column(bounds_ptr);
  columns["/ragged/bounds"] = column(bounds);
}

/// Turns checked columns into an index, trusting only their digest.
class IndexDecoder {
 public:
  IndexDecoder(const Columns& columns, const std::filesystem::path& path) : columns_(columns), path_(path.string()) {}

  CheckpointIndex decode() {
    const Column& header = at("/header");
    CheckpointIndex index;
    index.world_size = positive(header.u64(1), "world size");
    const std::size_t files = bounded(header.u64(2), at("/files/size").size(), "number of files");
    index.step = header.i64(3);
    index.sizes = {positive(header.u64(4), "block_bytes"), positive(header.u64(5), "segment_align"), header.i64(6)};
    index.save_id = save_id_text(header.u64(7), header.u64(8));
    const std::size_t tensors = bounded(header.u64(9), at("/table/dtype").size(), "number of tensors");
    const std::size_t meshes = bounded(header.u64(10), at("/mesh/axis_ptr").size(), "number of meshes");
    index.library = at("/library").text();
    index.metadata = at("/metadata").text();
    // In this order, what the next step copies per rank or axis is bounded by what the file itself has per rank.
    decode_files(files, index);
    decode_meshes(meshes, index);
    decode_tensors(tensors, index);
    try {
      validate(index);
    } catch (const Error& error) {
      refuse(error.what());
    }
    return index;
  }

 private:
  [[noreturn]] void refuse(std::string_view why) const { throw CorruptError(fmt::format("{}: {}", path_, why)); }
  const Column& at(const char* path) const { return columns_.at(path); }

  std::int64_t positive(std::uint64_t value, std::string_view what) const {
    if (value == 0 || value > std::uint64_t{1} << 62) refuse(fmt::format("{} {} is out of range", what, value));
    return static_cast<std::int64_t>(value);
  }
  std::size_t bounded(std::uint64_t value, std::size_t most, std::string_view what) const {
    if (value > most) refuse(fmt::format("{} is {}, but its tables have {} rows", what, value, most));
    return static_cast<std::size_t>(value);
  }
  void lists(const char* pointers, std::size_t count, std::size_t length) const {
    check_pointers(at(pointers), count, length, path_ + ":" + pointers);
  }
  void length(const char* path, std::size_t expected) const {
    if (at(path).size() != expected)
      refuse(fmt::format("{} has {} entries: expected {}", path, at(path).size(), expected));
  }
  static std::pair<std::size_t, std::size_t> list(const Column& pointers, std::size_t i) {
    return {static_cast<std::size_t>(pointers.u64(i)), static_cast<std::size_t>(pointers.u64(i + 1))};
  }
  std::pair<std::size_t, std::size_t> list(const char* pointers, std::size_t i) const { return list(at(pointers), i); }

  void decode_meshes(std::size_t count, CheckpointIndex& index) const {
    const std::size_t axes = at("/mesh/axis_size").size();
    lists("/mesh/name_ptr", count, at("/mesh/name_bytes").size());
    lists("/mesh/axis_ptr", count, axes);
    lists("/mesh/axis_name_ptr", axes, at("/mesh/axis_name_bytes").size());
    lists("/mesh/rank_ptr", count, at("/mesh/ranks").size());
    length("/mesh/axis_role", axes);
    for (std::size_t m = 0; m < count; ++m) {
      std::vector<MeshAxis> mesh_axes;
      std::vector<AxisRole> roles;
      const auto [first_axis, last_axis] = list("/mesh/axis_ptr", m);
      for (std::size_t a = first_axis; a < last_axis; ++a) {
        mesh_axes.push_back({std::string(list_text(at("/mesh/axis_name_ptr"), at("/mesh/axis_name_bytes"), a)),
                             positive(at("/mesh/axis_size").u64(a), "mesh axis size")});
        const std::uint8_t role = at("/mesh/axis_role").u8(a);
        if (role > static_cast<std::uint8_t>(AxisRole::replicate)) refuse(fmt::format("unknown axis role {}", role));
        roles.push_back(static_cast<AxisRole>(role));
      }
      std::vector<std::int64_t> ranks;
      const auto [first_rank, last_rank] = list("/mesh/rank_ptr", m);
      for (std::size_t r = first_rank; r < last_rank; ++r) ranks.push_back(at("/mesh/ranks").i64(r));
      try {
        index.meshes.push_back({std::string(list_text(at("/mesh/name_ptr"), at("/mesh/name_bytes"), m)),
                                MeshSpec(std::move(mesh_axes), std::move(ranks)), std::move(roles)});
      } catch (const Error& error) {
        refuse(error.what());
      }
      const MeshEntry& mesh = index.meshes.back();
      if (mesh.spec.size() > index.world_size)
        refuse(fmt::format("mesh \"{}\" ({}) has rank {}, but the world has {} ranks", mesh.name, mesh.spec.to_string(),
                           mesh.spec.size() - 1, index.world_size));
    }
  }

  void decode_tensors(std::size_t count, CheckpointIndex& index) const {
    const std::size_t placements = at("/table/placement_kind").size();
    const std::size_t ragged = at("/ragged/bounds_ptr").size() - 1;
    lists("/table/name_ptr", count, at("/table/name_bytes").size());
    lists("/table/shape_ptr", count, at("/table/shape").size());
    lists("/table/placement_ptr", count, placements);
    lists("/ragged/bounds_ptr", ragged, at("/ragged/bounds").size());
    for (const char* path : {"/table/dtype", "/table/mesh", "/table/digest"}) length(path, count);
    for (const char* path : {"/table/placement_dim", "/table/placement_bounds", "/table/split_order"})
      length(path, placements);
    // Found once: there may be very many tensors.
    const Column& name_ptr = at("/table/name_ptr");
    const Column& name_bytes = at("/table/name_bytes");
    const Column& dtypes = at("/table/dtype");
    const Column& shapes = at("/table/shape");
    const Column& meshes = at("/table/mesh");
    const Column& digests = at("/table/digest");
    const Column& orders = at("/table/split_order");
    const Column& shape_ptr = at("/table/shape_ptr");
    const Column& placement_ptr = at("/table/placement_ptr");
    for (std::size_t t = 0; t < count; ++t) {
      TensorEntry tensor;
      tensor.name = list_text(name_ptr, name_bytes, t);
      const std::uint8_t dtype = dtypes.u8(t);
      if (!is_dtype(dtype)) refuse(fmt::format("tensor \"{}\" has unknown dtype code {}", tensor.name, dtype));
      tensor.spec.dtype = static_cast<DType>(dtype);
      const auto [first_dim, last_dim] = list(shape_ptr, t);
      for (std::size_t d = first_dim; d < last_dim; ++d) tensor.spec.shape.push_back(shapes.i64(d));
      tensor.mesh = static_cast<std::size_t>(meshes.u64(t));
      if (tensor.mesh >= index.meshes.size())
        refuse(fmt::format("tensor \"{}\" lies on mesh {}, but there are {}", tensor.name, tensor.mesh,
                           index.meshes.size()));
      const MeshSpec& mesh = index.meshes[tensor.mesh].spec;
      tensor.digest = digests.u64(t);
      const auto [first, last] = list(placement_ptr, t);
      if (last - first != mesh.dimensions())
        refuse(fmt::format("tensor \"{}\" has {} placements, but mesh {} has {} axes", tensor.name, last - first,
                           mesh.to_string(), mesh.dimensions()));
      for (std::size_t p = first; p < last; ++p) {
        tensor.spec.placements.push_back(decode_placement(p, ragged, mesh.axes()[p - first].size));
        tensor.spec.split_order.push_back(orders.i64(p));
      }
      index.tensors.push_back(std::move(tensor));
    }
  }

  Placement decode_placement(std::size_t p, std::size_t ragged, std::int64_t ranks) const {
    const std::int64_t dim = at("/table/placement_dim").i64(p);
    switch (static_cast<PlacementKind>(at("/table/placement_kind").u8(p))) {
      case PlacementKind::replicate:
        return Replicate{};
      case PlacementKind::shard:
        return Shard{dim};
      case PlacementKind::ragged: {
        const std::uint64_t row = at("/table/placement_bounds").u64(p);
        if (row >= ragged) refuse(fmt::format("ragged bounds {} do not exist: there are {}", row, ragged));
        Ragged placement{dim, {}};
        const auto [first, last] = list("/ragged/bounds_ptr", static_cast<std::size_t>(row));
        // Any number of tensors may name the same list: it is not copied for them before its length is known to be
        // right.
        if (last - first != static_cast<std::size_t>(ranks) + 1)
          refuse(fmt::format("ragged bounds {} have {} numbers: expected one more than their axis has ranks ({})", row,
                             last - first, ranks));
        for (std::size_t b = first; b < last; ++b) placement.bounds.push_back(at("/ragged/bounds").i64(b));
        return placement;
      }
    }
    refuse(fmt::format("unknown placement kind {}", at("/table/placement_kind").u8(p)));
  }

  void decode_files(std::size_t count, CheckpointIndex& index) const {
    lists("/files/rank_ptr", count, at("/files/ranks").size());
    length("/files/size", count);
    std::set<std::int64_t> seen;
    std::int64_t total = 0;
    for (std::size_t f = 0; f < count; ++f) {
      FileEntry file{positive(at("/files/size").u64(f), "file size"), {}};
      if (__builtin_add_overflow(total, file.size, &total)) refuse("the file sizes add up to more than 64 bits");
      const auto [first, last] = list("/files/rank_ptr", f);
      for (std::size_t r = first; r < last; ++r) file.ranks.push_back(at("/files/ranks").i64(r));
      seen.insert(file.ranks.begin(), file.ranks.end());
      index.files.push_back(std::move(file));
    }
    const auto world = static_cast<std::size_t>(index.world_size);
    if (at("/files/ranks").size() != world || seen.size() != world || *seen.begin() != 0 ||
        *seen.rbegin() != index.world_size - 1)
      refuse(fmt::format("the files do not hold each of the {} ranks once", index.world_size));
    const Column& segments = at("/segments");
    if (segments.shape != Shape{index.world_size, std::size(all_dtypes), 2})
      refuse(fmt::format("/segments has shape {}", fsdp2::to_string(segments.shape)));
    index.segments.resize(world);
    std::size_t next = 0;
    for (PerDType<Segment>& rank : index.segments)
      for (Segment& segment : rank) {
        segment.start = segments.i64(next++);
        segment.length = segments.i64(next++);
      }
    for (const FileEntry& file : index.files) check_segments(file, index);
  }

  /// Segments follow one another without gaps, in whole units of segment_align.
  void check_segments(const FileEntry& file, const CheckpointIndex& index) const {
    for (const DType dtype : all_dtypes) {
      std::int64_t end = 0;
      for (const std::int64_t rank : file.ranks) {
        const Segment& segment = index.segments[static_cast<std::size_t>(rank)][dtype];
        if (segment.start != end || segment.length < 0 || segment.length % index.sizes.segment_align != 0 ||
            segment.length > file.size - end)
          refuse(fmt::format("the {} segment of rank {} at {} + {} does not fit", to_string(dtype), rank, segment.start,
                             segment.length));
        end += segment.length;
      }
    }
  }

  const Columns& columns_;
  std::string path_;
};

}  // namespace

std::pair<std::uint64_t, std::uint64_t> save_id_halves(const std::string& save_id) {
  std::uint64_t halves[2] = {0, 0};
  bool is_good = save_id.size() == 32;
  for (std::size_t i = 0; is_good && i < 2; ++i) {
    const char* end = save_id.data() + 16 * (i + 1);
    is_good = std::from_chars(end - 16, end, halves[i], 16).ptr == end;
  }
  if (!is_good) throw ConfigError(fmt::format("save id \"{}\" is not 32 hexadecimal digits", save_id));
  return {halves[0], halves[1]};
}

std::string save_id_text(std::uint64_t high, std::uint64_t low) {
  return fmt::format("{:016x}{:016x}", high, low);
}

Columns encode_index(const CheckpointIndex& index) {
  Columns columns;
  const auto [high, low] = save_id_halves(index.save_id);
  const std::vector<std::uint64_t> header = {format_version,
                                             unsigned_of(index.world_size),
                                             index.files.size(),
                                             unsigned_of(index.step),
                                             unsigned_of(index.sizes.block_bytes),
                                             unsigned_of(index.sizes.segment_align),
                                             unsigned_of(index.sizes.split_bytes),
                                             high,
                                             low,
                                             index.tensors.size(),
                                             index.meshes.size(),
                                             0};
  columns["/header"] = column(header);
  columns["/library"] = Column(std::string_view(index.library));
  columns["/metadata"] = Column(std::string_view(index.metadata));
  encode_meshes(index, columns);
  encode_files(index, columns);
  encode_tensors(index, columns);
  return columns;
}

CheckpointIndex decode_index(const Columns& columns, const std::filesystem::path& path) {
  return IndexDecoder(columns, path).decode();
}

std::uint64_t check_of(const Columns& columns) {
  CheckDigest digest;
  for (const auto& [path, values] : columns) digest.add(values.bytes);
  return digest.value();
}

void write_index(const std::filesystem::path& directory, const CheckpointIndex& index) {
  Columns columns = encode_index(index);
  const std::uint64_t check = check_of(columns);
  columns["/check"] = Column(std::span(&check, 1));
  std::map<std::string, DatasetSpec> datasets;
  for (const auto& [path, values] : columns) datasets[path] = {values.type, values.shape};
  const Skeleton skeleton = build_skeleton(datasets, {},
                                           {{{"format_version", static_cast<std::int64_t>(format_version)},
                                             {"step", index.step},
                                             {"world_size", index.world_size}},
                                            {{"library", index.library}, {"save_id", index.save_id}}});
  File file = File::create(directory / "index.h5");
  file.reserve(skeleton.file_size);
  for (const auto& [offset, bytes] : skeleton.metadata) file.write(bytes, offset);
  for (const auto& [path, values] : columns) file.write(values.bytes, skeleton.places.at(path).offset);
  file.sync();
  file.close();
}

}  // namespace fsdp2::checkpoint

namespace fsdp2 {

CheckpointIndex read_index(const std::filesystem::path& directory) {
  using namespace fsdp2::checkpoint;
  const std::filesystem::path path = directory / "index.h5";
  std::error_code ignored;
  if (!std::filesystem::is_directory(directory, ignored))
    throw IoError(
        fmt::format("{} is not a directory: expected a checkpoint directory with an index.h5", directory.string()));
  if (std::filesystem::canonical(directory, ignored).filename().string().starts_with('.'))
    throw IoError(fmt::format("{} is not a checkpoint: names that begin with '.' are of unfinished or discarded ones",
                              directory.string()));
  if (!std::filesystem::exists(path, ignored))
    throw IoError(fmt::format("{} is not a checkpoint: it has no index.h5", directory.string()));
  const Hdf5Structure structure(path);
  const File file = File::open(path);
  // The version decides what else to expect, so it is looked at before the digest.
  const Column header = read_column(file, structure, "/header", DType::u64);
  if (header.size() == 0) throw CorruptError(fmt::format("{}:/header is empty", path.string()));
  if (header.u64(0) != format_version)
    throw MismatchError(fmt::format("{} has format version {}: this library reads version {}; use a newer fsdp2",
                                    path.string(), header.u64(0), format_version));
  if (header.size() != header_fields)
    throw CorruptError(
        fmt::format("{}:/header has {} fields: expected {}", path.string(), header.size(), header_fields));
  // Each dataset lies in the file; that all of them do bounds the memory that they take.
  std::int64_t bytes = 0;
  std::vector<DatasetPlace> places;
  for (const ColumnSpec& spec : index_columns) {
    places.push_back(structure.require(spec.path, spec.type, spec.dimensions));
    bytes = checked_add(bytes, places.back().bytes);
  }
  if (bytes > structure.file_size())
    throw CorruptError(
        fmt::format("{} has {} bytes, but its datasets {}: they overlap", path.string(), structure.file_size(), bytes));
  Columns columns;
  for (std::size_t i = 0; i < places.size(); ++i)
    columns[index_columns[i].path] = read_column(file, places[i], index_columns[i].type);
  const Column check = read_column(file, structure, "/check", DType::u64, Shape{1});
  if (check.u64(0) != check_of(columns))
    throw CorruptError(
        fmt::format("{} contradicts its /check digest: it was damaged after it was written", path.string()));
  return decode_index(columns, path);
}

}  // namespace fsdp2
