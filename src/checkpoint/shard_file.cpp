// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/shard_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "checkpoint/digest.hpp"
#include "checkpoint/file.hpp"
#include "checkpoint/index_file.hpp"
#include "checkpoint/segment_digest.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::checkpoint {

namespace {

constexpr std::size_t named_view_limit = 2000;  // FORMAT.md §9
constexpr std::int64_t writeback_bytes = std::int64_t{32} << 20;

enum RankField : std::size_t { world_rank, first_row, row_count, first_name_byte, first_shape_entry };
constexpr std::size_t segment_field(DType dtype) {
  return 9 + 3 * (static_cast<std::size_t>(dtype) - 1);
}

std::string data_path(DType dtype) {
  return fmt::format("/data/{}", to_string(dtype));
}
std::string blocks_path(DType dtype) {
  return fmt::format("/blocks/{}", to_string(dtype));
}

std::uint64_t unsigned_of(std::int64_t value) {
  return static_cast<std::uint64_t>(value);
}

/// Length of a valid UTF-8 sequence at the beginning of `text`, or 0.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  const bool is_overlong = (lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xf0 && byte(1) < 0x90);
  const bool is_outside = (lead == 0xed && byte(1) >= 0xa0) || (lead == 0xf4 && byte(1) >= 0x90);
  return is_overlong || is_outside ? 0 : length;
}

/// A tensor's name as one HDF5 link name.
std::string escape_name(std::string_view name) {
  std::string escaped;
  for (std::size_t i = 0; i < name.size();) {
    const std::size_t length = utf8_length(name.substr(i));
    const auto byte = static_cast<unsigned char>(name[i]);
    const bool is_plain =
        length > 0 && byte >= 0x20 && byte != 0x7f && byte != '/' && byte != '%' && !(i == 0 && byte == '.');
    if (is_plain)
      escaped += name.substr(i, length);
    else
      escaped += fmt::format("%{:02X}", byte);
    i += is_plain ? length : 1;
  }
  return escaped;
}

std::vector<std::uint64_t> header_of(const CheckpointIndex& index, std::size_t file, std::size_t files,
                                     std::size_t ranks) {
  const auto [high, low] = save_id_halves(index.save_id);
  return {format_version,
          unsigned_of(index.world_size),
          file,
          files,
          ranks,
          unsigned_of(index.step),
          unsigned_of(index.sizes.block_bytes),
          unsigned_of(index.sizes.segment_align),
          unsigned_of(index.sizes.split_bytes),
          high,
          low,
          0};
}

/// The rows of /table of some ranks' pieces, in order; digests are filled in later.
Columns encode_table(const CheckpointIndex& index, std::span<const RankPlan* const> plans,
                     std::span<const PerDType<Segment>* const> segments) {
  ListBuilder names;
  std::vector<std::uint8_t> dtypes;
  std::vector<std::uint64_t> shape_ptr{0};
  std::vector<std::int64_t> shapes;
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> extents;
  std::vector<std::uint64_t> starts;
  std::vector<std::uint64_t> lengths;
  for (std::size_t r = 0; r < plans.size(); ++r)
    for (const Piece& piece : plans[r]->pieces) {
      const TensorEntry& tensor = index.tensors[piece.tensor];
      names.add(tensor.name);
      dtypes.push_back(static_cast<std::uint8_t>(tensor.spec.dtype));
      shapes.insert(shapes.end(), tensor.spec.shape.begin(), tensor.spec.shape.end());
      offsets.insert(offsets.end(), piece.box.offset.begin(), piece.box.offset.end());
      extents.insert(extents.end(), piece.box.extent.begin(), piece.box.extent.end());
      shape_ptr.push_back(shapes.size());
      starts.push_back(unsigned_of((*segments[r])[tensor.spec.dtype].start + piece.start));
      lengths.push_back(unsigned_of(piece.bytes));
    }
  Columns columns;
  names.store(columns, "/table/name_ptr", "/table/name_bytes");
  columns["/table/dtype"] = Column(std::span<const std::uint8_t>(dtypes));
  columns["/table/shape_ptr"] = Column(std::span<const std::uint64_t>(shape_ptr));
  columns["/table/shape"] = Column(std::span<const std::int64_t>(shapes));
  columns["/table/offset"] = Column(std::span<const std::int64_t>(offsets));
  columns["/table/extent"] = Column(std::span<const std::int64_t>(extents));
  columns["/table/arena_start"] = Column(std::span<const std::uint64_t>(starts));
  columns["/table/bytes"] = Column(std::span<const std::uint64_t>(lengths));
  columns["/table/digest"] = Column(std::span<const std::uint64_t>(std::vector<std::uint64_t>(dtypes.size(), 0)));
  return columns;
}

/// The rows of /ranks for the same ranks.
Column encode_ranks(const CheckpointIndex& index, std::span<const std::int64_t> ranks,
                    std::span<const RankPlan* const> plans, std::span<const PerDType<Segment>* const> segments) {
  std::vector<std::uint64_t> rows;
  std::uint64_t row = 0;
  std::uint64_t name_byte = 0;
  std::uint64_t shape_entry = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    rows.insert(rows.end(), {unsigned_of(ranks[r]), row, plans[r]->pieces.size(), name_byte, shape_entry, 0, 0, 0, 0});
    for (const DType dtype : all_dtypes) {
      const Segment& segment = (*segments[r])[dtype];
      rows.insert(rows.end(),
                  {unsigned_of(segment.start), unsigned_of(plans[r]->used[dtype]), unsigned_of(segment.length)});
    }
    row += plans[r]->pieces.size();
    for (const Piece& piece : plans[r]->pieces) {
      name_byte += index.tensors[piece.tensor].name.size();
      shape_entry += piece.box.extent.size();
    }
  }
  Column column{std::span<const std::uint64_t>(rows)};
  column.shape = {static_cast<std::int64_t>(ranks.size()), static_cast<std::int64_t>(rank_fields)};
  return column;
}

struct Range64 {
  std::uint64_t begin;
  std::uint64_t end;
};

std::span<const std::byte> part_of(const Column& column, Range64 elements) {
  const auto width = static_cast<std::uint64_t>(size_of(column.type));
  return std::span(column.bytes).subspan(elements.begin * width, (elements.end - elements.begin) * width);
}

/// The /check value of rank number `r` of a file whose columns are complete: FORMAT.md §7.
std::uint64_t check_of_rank(const Columns& columns, std::size_t r, std::int64_t block_bytes) {
  const Column& ranks = columns.at("/ranks");
  const auto field = [&](std::size_t f) { return ranks.u64(r * rank_fields + f); };
  const bool is_last = (r + 1) * rank_fields == ranks.size();
  // Where the next rank's part begins, or what the column's end is for the last.
  const auto range = [&](std::size_t f, const char* path) {
    const std::uint64_t end = is_last ? columns.at(path).size() : ranks.u64((r + 1) * rank_fields + f);
    return Range64{field(f), end};
  };
  const Range64 rows{field(first_row), field(first_row) + field(row_count)};
  const Range64 rows_and_end{rows.begin, rows.end + 1};
  const Range64 names = range(first_name_byte, "/table/name_bytes");
  const Range64 dims = range(first_shape_entry, "/table/shape");
  const Range64 local{field(5), field(5) + field(6)};
  const Range64 local_and_end{local.begin, local.end + 1};
  const Range64 local_names = range(7, "/rank_local/name_bytes");
  const Range64 local_values = range(8, "/rank_local/value_bytes");
  const auto part = [&](const std::string& path) {
    if (path == "/table/name_bytes") return names;
    if (path == "/table/shape" || path == "/table/offset" || path == "/table/extent") return dims;
    if (path == "/table/name_ptr" || path == "/table/shape_ptr") return rows_and_end;
    if (path == "/rank_local/name_bytes") return local_names;
    if (path == "/rank_local/value_bytes") return local_values;
    if (path == "/rank_local/name_ptr" || path == "/rank_local/value_ptr") return local_and_end;
    return rows;
  };

  CheckDigest digest;
  digest.add(columns.at("/header").bytes);
  digest.add(part_of(ranks, {r * rank_fields, (r + 1) * rank_fields}));
  for (const auto& [path, column] : columns) {
    if (path == "/header" || path == "/ranks") continue;
    if (path.starts_with("/blocks/")) {
      const DType dtype = parse_dtype(path.substr(8));
      const auto block = static_cast<std::uint64_t>(block_bytes);
      const std::uint64_t start = field(segment_field(dtype)) / block;
      digest.add(part_of(column, {start, start + field(segment_field(dtype) + 2) / block}));
    } else {
      digest.add(part_of(column, part(path)));
    }
  }
  return digest.value();
}

void add_empty_rank_local(Columns& columns) {
  const ListBuilder empty;
  empty.store(columns, "/rank_local/name_ptr", "/rank_local/name_bytes");
  empty.store(columns, "/rank_local/value_ptr", "/rank_local/value_bytes");
}

/// Streams one rank's segment of one dtype: bytes, block CRCs and contributions in one pass.
class SegmentStream {
 public:
  SegmentStream(const CheckpointIndex& index, const RankPlan& plan, DType dtype, std::span<std::byte> window,
                const PieceSource& source)
      : block_bytes_(index.sizes.block_bytes), window_(window), source_(source), digest_(index, plan, dtype) {
    for (const Piece& piece : plan.pieces)
      if (index.tensors[piece.tensor].spec.dtype == dtype) pieces_.push_back(&piece);
  }

  /// Writes `length` bytes at `offset` of the file, and returns the CRCs of their blocks.
  std::vector<std::uint64_t> write(File& file, std::int64_t offset, std::int64_t length) {
    std::vector<std::uint64_t> crcs;
    std::int64_t paced = 0;
    for (std::int64_t begin = 0; begin < length;) {
      const std::int64_t count = std::min<std::int64_t>(static_cast<std::int64_t>(window_.size()), length - begin);
      fill(begin, begin + count);
      const std::span<const std::byte> bytes = window_.first(static_cast<std::size_t>(count));
      for (std::int64_t block = 0; block < count; block += block_bytes_)
        crcs.push_back(
            digest_.add_block(bytes.subspan(static_cast<std::size_t>(block), static_cast<std::size_t>(block_bytes_))));
      file.write(bytes, offset + begin);
      begin += count;
      if (begin - paced >= writeback_bytes) {
        file.start_writeback(offset + paced, begin - paced);
        paced = begin;
      }
    }
    return crcs;
  }

  void take_digests(std::vector<std::uint64_t>& by_piece) const { digest_.store(by_piece); }

 private:
  /// Brings segment bytes [begin, end) into the window.
  void fill(std::int64_t begin, std::int64_t end) {
    std::vector<PieceRequest> requests;
    std::int64_t at = begin;
    for (std::size_t i = next_piece_; i < pieces_.size() && pieces_[i]->start < end; ++i) {
      const Piece& piece = *pieces_[i];
      const std::int64_t from = std::max(piece.start, begin);
      const std::int64_t to = std::min(piece.start + piece.bytes, end);
      clear(at - begin, from - begin);
      requests.push_back(
          {&piece, from - piece.start,
           window_.subspan(static_cast<std::size_t>(from - begin), static_cast<std::size_t>(to - from))});
      at = to;
      if (piece.start + piece.bytes <= end) next_piece_ = i + 1;
    }
    clear(at - begin, end - begin);
    if (!requests.empty()) source_(requests);
  }

  void clear(std::int64_t from, std::int64_t to) {
    std::memset(window_.data() + from, 0, static_cast<std::size_t>(to - from));
  }

  std::int64_t block_bytes_;
  std::span<std::byte> window_;
  const PieceSource& source_;
  SegmentDigest digest_;
  std::vector<const Piece*> pieces_;  // of this dtype
  std::size_t next_piece_ = 0;        // the first that the windows so far did not finish
};

std::vector<NamedView> named_views(const CheckpointIndex& index, const RankPlan& plan) {
  std::vector<NamedView> views;
  if (plan.pieces.size() >= named_view_limit) return views;
  for (const Piece& piece : plan.pieces) {
    const TensorEntry& tensor = index.tensors[piece.tensor];
    const DType dtype = tensor.spec.dtype;
    views.push_back({"/tensors/" + escape_name(tensor.name), data_path(dtype), dtype, piece.start / size_of(dtype),
                     piece.box.extent});
  }
  return views;
}

}  // namespace

WrittenShard write_shard(const std::filesystem::path& directory, const CheckpointIndex& index, const RankPlan& plan,
                         std::int64_t rank, std::int64_t window_bytes, const PieceSource& source) {
  WrittenShard result;
  result.digests.assign(plan.pieces.size(), 0);
  const auto files = static_cast<std::size_t>(index.world_size);
  const auto file_number = static_cast<std::size_t>(rank);
  for (const DType dtype : all_dtypes)
    result.segments[dtype] = {0, align_up(plan.used[dtype], index.sizes.segment_align)};

  const RankPlan* const plans[] = {&plan};
  const PerDType<Segment>* const segments[] = {&result.segments};
  Columns columns = encode_table(index, plans, segments);
  columns["/header"] = Column(std::span<const std::uint64_t>(header_of(index, file_number, files, 1)));
  columns["/ranks"] = encode_ranks(index, {&rank, 1}, plans, segments);
  add_empty_rank_local(columns);
  for (const DType dtype : all_dtypes) {
    const std::int64_t blocks = result.segments[dtype].length / index.sizes.block_bytes;
    if (blocks != 0)
      columns[blocks_path(dtype)] =
          Column(std::span<const std::uint64_t>(std::vector<std::uint64_t>(static_cast<std::size_t>(blocks), 0)));
  }

  std::map<std::string, DatasetSpec> datasets;
  for (const auto& [path, column] : columns) datasets[path] = {column.type, column.shape};
  datasets["/check"] = {DType::u64, {1}};
  for (const DType dtype : all_dtypes)
    if (result.segments[dtype].length != 0)
      datasets[data_path(dtype)] = {dtype, {result.segments[dtype].length / size_of(dtype)}};
  const Skeleton skeleton = build_skeleton(datasets, named_views(index, plan),
                                           {{{"format_version", static_cast<std::int64_t>(format_version)},
                                             {"step", index.step},
                                             {"world_size", index.world_size},
                                             {"rank", rank},
                                             {"block_bytes", index.sizes.block_bytes},
                                             {"segment_align", index.sizes.segment_align}},
                                            {{"library", index.library}, {"save_id", index.save_id}}});

  File file = File::create(directory / shard_file_name(file_number, files));
  result.file_size = skeleton.file_size;
  file.reserve(skeleton.file_size);
  for (const auto& [offset, bytes] : skeleton.metadata) file.write(bytes, offset);
  std::vector<std::byte> window;
  for (const DType dtype : all_dtypes) {
    const std::int64_t length = result.segments[dtype].length;
    if (length == 0) continue;
    window.resize(static_cast<std::size_t>(std::min(window_bytes, length)));
    SegmentStream stream(index, plan, dtype, window, source);
    const std::vector<std::uint64_t> crcs = stream.write(file, skeleton.places.at(data_path(dtype)).offset, length);
    stream.take_digests(result.digests);
    columns[blocks_path(dtype)] = Column(std::span<const std::uint64_t>(crcs));
  }
  columns["/table/digest"] = Column(std::span<const std::uint64_t>(result.digests));
  const std::uint64_t check = check_of_rank(columns, 0, index.sizes.block_bytes);
  columns["/check"] = Column(std::span(&check, 1));
  for (const auto& [path, column] : columns) file.write(column.bytes, skeleton.places.at(path).offset);
  file.sync();
  file.close();
  return result;
}

ShardTables read_shard(const std::filesystem::path& directory, const CheckpointIndex& index, std::size_t file_number,
                       std::span<const RankPlan* const> plans) {
  ShardTables tables;
  tables.path = directory / shard_file_name(file_number, index.files.size());
  const FileEntry& entry = index.files[file_number];
  const auto refuse = [&](std::string_view why) {
    throw CorruptError(fmt::format("{}: {}", tables.path.string(), why));
  };
  const Hdf5Structure structure(tables.path);
  if (structure.file_size() != entry.size)
    refuse(fmt::format("has {} bytes, but the index says {}", structure.file_size(), entry.size));
  const File file = File::open(tables.path);

  std::vector<const PerDType<Segment>*> segments;
  for (std::size_t r = 0; r < entry.ranks.size(); ++r) {
    segments.push_back(&index.segments[static_cast<std::size_t>(entry.ranks[r])]);
    for (const DType dtype : all_dtypes)
      if ((*segments[r])[dtype].length != align_up(plans[r]->used[dtype], index.sizes.segment_align))
        refuse(fmt::format("the index gives rank {} a {} segment of {} bytes for {} bytes of pieces", entry.ranks[r],
                           to_string(dtype), (*segments[r])[dtype].length, plans[r]->used[dtype]));
  }
  // Everything but digests follows from the index: what the file must say is known before it is read.
  Columns expected = encode_table(index, plans, segments);
  expected["/header"] =
      Column(std::span<const std::uint64_t>(header_of(index, file_number, index.files.size(), entry.ranks.size())));
  expected["/ranks"] = encode_ranks(index, entry.ranks, plans, segments);

  Columns columns;
  columns["/header"] = read_column(file, structure, "/header", DType::u64);
  if (columns["/header"].bytes != expected["/header"].bytes) {
    const Column& header = columns["/header"];
    if (header.size() == expected["/header"].size() && save_id_text(header.u64(9), header.u64(10)) != index.save_id)
      refuse(fmt::format(
          "belongs to save {} (step {}), but the index to save {} (step {}): files of two checkpoints are mixed",
          save_id_text(header.u64(9), header.u64(10)), header.i64(5), index.save_id, index.step));
    refuse("its header disagrees with the index: it is damaged, or files are swapped");
  }
  columns["/ranks"] = read_column(file, structure, "/ranks", DType::u64, 2);
  for (const auto& [path, column] : expected)
    if (path.starts_with("/table/")) columns[path] = read_column(file, structure, path, column.type);
  for (const char* path : {"/rank_local/name_ptr", "/rank_local/value_ptr"})
    columns[path] = read_column(file, structure, path, DType::u64);
  for (const char* path : {"/rank_local/name_bytes", "/rank_local/value_bytes"})
    columns[path] = read_column(file, structure, path, DType::u8);
  for (const DType dtype : all_dtypes) {
    const std::int64_t length = segments.back()->operator[](dtype).start + segments.back()->operator[](dtype).length;
    const std::optional<DatasetPlace> arena = structure.find(data_path(dtype), dtype, 1);
    if ((arena ? arena->bytes : 0) != length)
      refuse(fmt::format("{} has {} bytes: expected {}", data_path(dtype), arena ? arena->bytes : 0, length));
    if (length == 0) continue;
    tables.arena_offset[dtype] = arena->offset;
    Column blocks = read_column(file, structure, blocks_path(dtype), DType::u64);
    if (static_cast<std::int64_t>(blocks.size()) != length / index.sizes.block_bytes)
      refuse(fmt::format("{} has {} entries: expected {}", blocks_path(dtype), blocks.size(),
                         length / index.sizes.block_bytes));
    for (std::size_t i = 0; i < blocks.size(); ++i) tables.block_crcs[dtype].push_back(blocks.u64(i));
    columns[blocks_path(dtype)] = std::move(blocks);
  }

  // Rows of rank-local values are the one thing that the index does not foretell; the rest must be as expected.
  const Column& ranks = columns["/ranks"];
  if (ranks.shape != expected["/ranks"].shape) refuse("/ranks has another shape than expected");
  const std::size_t local_rows = columns["/rank_local/name_ptr"].size() - 1;
  check_pointers(columns["/rank_local/name_ptr"], local_rows, columns["/rank_local/name_bytes"].size(),
                 tables.path.string() + ":/rank_local/name_ptr");
  check_pointers(columns["/rank_local/value_ptr"], local_rows, columns["/rank_local/value_bytes"].size(),
                 tables.path.string() + ":/rank_local/value_ptr");
  std::uint64_t next_local = 0;
  for (std::size_t r = 0; r < entry.ranks.size(); ++r) {
    const auto field = [&](std::size_t f) { return ranks.u64(r * rank_fields + f); };
    const std::uint64_t rows = field(6);
    if (field(5) != next_local || rows > local_rows - next_local ||
        field(7) != columns["/rank_local/name_ptr"].u64(static_cast<std::size_t>(next_local)) ||
        field(8) != columns["/rank_local/value_ptr"].u64(static_cast<std::size_t>(next_local)))
      refuse("/ranks and /rank_local contradict each other");
    next_local += rows;
    for (std::size_t f = 0; f < rank_fields; ++f)
      if ((f < 5 || f > 8) && field(f) != expected["/ranks"].u64(r * rank_fields + f))
        refuse(fmt::format("/ranks disagrees with the index about rank {}: column {} is {}, expected {}",
                           entry.ranks[r], f, field(f), expected["/ranks"].u64(r * rank_fields + f)));
  }
  if (next_local != local_rows) refuse("/ranks and /rank_local contradict each other");
  for (const auto& [path, column] : expected)
    if (path.starts_with("/table/") && path != "/table/digest" && columns[path].bytes != column.bytes)
      refuse(fmt::format("{} is not what the index implies: the table is damaged", path));
  if (columns["/table/digest"].size() != expected["/table/digest"].size())
    refuse("/table/digest has another length than the table");

  const Column check = read_column(file, structure, "/check", DType::u64);
  if (check.size() != entry.ranks.size())
    refuse(fmt::format("/check has {} entries: expected {}", check.size(), entry.ranks.size()));
  std::size_t row = 0;
  for (std::size_t r = 0; r < entry.ranks.size(); ++r) {
    if (check.u64(r) != check_of_rank(columns, r, index.sizes.block_bytes))
      refuse(
          fmt::format("the tables of rank {} contradict their /check digest: the file was damaged after it was written",
                      entry.ranks[r]));
    std::vector<std::uint64_t>& digests = tables.digests.emplace_back();
    for (std::size_t p = 0; p < plans[r]->pieces.size(); ++p) digests.push_back(columns["/table/digest"].u64(row++));
  }
  return tables;
}

}  // namespace fsdp2::checkpoint
