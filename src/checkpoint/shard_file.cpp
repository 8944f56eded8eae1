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
#include "comm/host_communicator.hpp"
#include "fsdp2/checkpoint/save.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::checkpoint {

namespace {

constexpr std::size_t named_view_limit = 2000;  // FORMAT.md §9
constexpr std::int64_t writeback_bytes = std::int64_t{32} << 20;

enum RankField : std::size_t {
  world_rank,
  first_row,
  row_count,
  first_name_byte,
  first_shape_entry,
  first_local_row,
  local_row_count,
  first_local_name_byte,
  first_local_value_byte
};
constexpr std::size_t segment_field(DType dtype) {
  return first_local_value_byte + 1 + 3 * (static_cast<std::size_t>(dtype) - 1);
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

void add(RankCounts& sum, const RankCounts& counts) {
  sum.rows += counts.rows;
  sum.name_bytes += counts.name_bytes;
  sum.shape_entries += counts.shape_entries;
  sum.local_rows += counts.local_rows;
  sum.local_name_bytes += counts.local_name_bytes;
  sum.local_value_bytes += counts.local_value_bytes;
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

/// The rows of /ranks of some of a file's ranks.
Column encode_ranks(std::span<const std::int64_t> ranks, std::span<const RankCounts> counts,
                    std::span<const PerDType<Segment>> segments, std::size_t begin, std::size_t end) {
  std::vector<std::uint64_t> rows;
  RankCounts before;
  for (std::size_t r = 0; r < end; ++r) {
    if (r >= begin) {
      for (const std::int64_t field :
           {ranks[r], before.rows, counts[r].rows, before.name_bytes, before.shape_entries, before.local_rows,
            counts[r].local_rows, before.local_name_bytes, before.local_value_bytes})
        rows.push_back(unsigned_of(field));
      for (const DType dtype : all_dtypes)
        rows.insert(rows.end(), {unsigned_of(segments[r][dtype].start), unsigned_of(counts[r].used[dtype]),
                                 unsigned_of(segments[r][dtype].length)});
    }
    add(before, counts[r]);
  }
  Column column{std::span<const std::uint64_t>(rows)};
  column.shape = {static_cast<std::int64_t>(end - begin), static_cast<std::int64_t>(rank_fields)};
  return column;
}

/// Elements of a column that belong to one rank of a file: where its own begin, how many it has, and how many there are
/// of all. Pointers of lists have one more at the end, which is also the next rank's first.
struct ColumnPart {
  std::int64_t first;
  std::int64_t count;
  std::int64_t total;
};

ColumnPart column_part(const std::string& path, const RankCounts& before, const RankCounts& own,
                       const RankCounts& all) {
  const auto part = [&](std::int64_t RankCounts::*count, std::int64_t more = 0) {
    return ColumnPart{before.*count, own.*count + more, all.*count + more};
  };
  if (path == "/table/name_bytes") return part(&RankCounts::name_bytes);
  if (path == "/table/shape" || path == "/table/offset" || path == "/table/extent")
    return part(&RankCounts::shape_entries);
  if (path == "/table/name_ptr" || path == "/table/shape_ptr") return part(&RankCounts::rows, 1);
  if (path == "/rank_local/name_bytes") return part(&RankCounts::local_name_bytes);
  if (path == "/rank_local/value_bytes") return part(&RankCounts::local_value_bytes);
  if (path == "/rank_local/name_ptr" || path == "/rank_local/value_ptr") return part(&RankCounts::local_rows, 1);
  return part(&RankCounts::rows);
}

/// What the ranks of a complete file in front of number `r` add to it; number of ranks: all of them.
RankCounts counts_before(const Columns& columns, std::size_t r) {
  const Column& ranks = columns.at("/ranks");
  const auto size = [&](const char* path) { return static_cast<std::int64_t>(columns.at(path).size()); };
  RankCounts counts;
  if (r * rank_fields == ranks.size()) {
    counts.rows = size("/table/dtype");
    counts.name_bytes = size("/table/name_bytes");
    counts.shape_entries = size("/table/shape");
    counts.local_rows = size("/rank_local/name_ptr") - 1;
    counts.local_name_bytes = size("/rank_local/name_bytes");
    counts.local_value_bytes = size("/rank_local/value_bytes");
    return counts;
  }
  const auto field = [&](std::size_t f) { return ranks.i64(r * rank_fields + f); };
  counts.rows = field(first_row);
  counts.name_bytes = field(first_name_byte);
  counts.shape_entries = field(first_shape_entry);
  counts.local_rows = field(first_local_row);
  counts.local_name_bytes = field(first_local_name_byte);
  counts.local_value_bytes = field(first_local_value_byte);
  return counts;
}

/// The /check value of rank number `r` of a file whose columns are complete: FORMAT.md §7.
std::uint64_t check_of_rank(const Columns& columns, std::size_t r, std::int64_t block_bytes) {
  const RankCounts before = counts_before(columns, r);
  const RankCounts end = counts_before(columns, r + 1);
  RankCounts own;
  for (const auto count : {&RankCounts::rows, &RankCounts::name_bytes, &RankCounts::shape_entries,
                           &RankCounts::local_rows, &RankCounts::local_name_bytes, &RankCounts::local_value_bytes})
    own.*count = end.*count - before.*count;
  const Column& ranks = columns.at("/ranks");
  const auto elements = [](const Column& column, std::int64_t first, std::int64_t count) {
    const std::int64_t width = size_of(column.type);
    return std::span(column.bytes)
        .subspan(static_cast<std::size_t>(first * width), static_cast<std::size_t>(count * width));
  };
  constexpr auto fields = static_cast<std::int64_t>(rank_fields);
  CheckDigest digest;
  digest.add(columns.at("/header").bytes);
  digest.add(elements(ranks, static_cast<std::int64_t>(r) * fields, fields));
  for (const auto& [path, column] : columns) {
    if (path == "/header" || path == "/ranks") continue;
    if (path.starts_with("/blocks/")) {
      const std::size_t segment = r * rank_fields + segment_field(parse_dtype(path.substr(8)));
      digest.add(elements(column, ranks.i64(segment) / block_bytes, ranks.i64(segment + 2) / block_bytes));
    } else {
      const ColumnPart part = column_part(path, before, own, own);
      digest.add(elements(column, part.first, part.count));
    }
  }
  return digest.value();
}

void add_rank_local(Columns& columns, const RankLocalValues& values) {
  ListBuilder names;
  ListBuilder contents;
  for (const auto& [name, value] : values) {
    names.add(name);
    contents.add({reinterpret_cast<const char*>(value.data()), value.size()});
  }
  names.store(columns, "/rank_local/name_ptr", "/rank_local/name_bytes");
  contents.store(columns, "/rank_local/value_ptr", "/rank_local/value_bytes");
}

/// Lists of one rank as a part of a file's.
void rebase(Column& pointers, std::int64_t first) {
  for (std::size_t i = 0; i < pointers.size(); ++i) pointers.set_u64(i, pointers.u64(i) + unsigned_of(first));
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

  /// Gives `put` the segment's `length` bytes, each window with its start, and returns the CRCs of their blocks.
  template <class Put>
  std::vector<std::uint64_t> write(std::int64_t length, Put&& put) {
    std::vector<std::uint64_t> crcs;
    for (std::int64_t begin = 0; begin < length;) {
      std::span<const std::byte> bytes = block_in_place(begin);
      if (bytes.empty()) {
        bytes = window_.first(std::min(window_.size(), static_cast<std::size_t>(length - begin)));
        fill(begin, begin + static_cast<std::int64_t>(bytes.size()));
      }
      const auto count = static_cast<std::int64_t>(bytes.size());
      for (std::int64_t block = 0; block < count; block += block_bytes_)
        crcs.push_back(
            digest_.add_block(bytes.subspan(static_cast<std::size_t>(block), static_cast<std::size_t>(block_bytes_))));
      put(begin, bytes);
      begin += count;
    }
    return crcs;
  }

  void take_digests(std::vector<std::uint64_t>& by_piece) const { digest_.store(by_piece); }

 private:
  /// The block at `begin` where it lies, if one piece covers it.
  std::span<const std::byte> block_in_place(std::int64_t begin) {
    const auto end_of = [](const Piece& piece) { return piece.start + piece.bytes; };
    while (next_piece_ < pieces_.size() && end_of(*pieces_[next_piece_]) <= begin) ++next_piece_;
    if (!source_.view || next_piece_ == pieces_.size()) return {};
    const Piece& piece = *pieces_[next_piece_];
    if (piece.start > begin || end_of(piece) < begin + block_bytes_) return {};
    return {source_.view(piece) + (begin - piece.start), static_cast<std::size_t>(block_bytes_)};
  }

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
    if (!requests.empty()) source_.fill(requests);
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

std::vector<NamedView> named_views(const CheckpointIndex& index, const RankPlan& plan,
                                   const std::map<std::string, DatasetSpec>& datasets) {
  std::vector<NamedView> views;
  if (plan.pieces.size() >= named_view_limit) return views;
  for (const Piece& piece : plan.pieces) {
    const TensorEntry& tensor = index.tensors[piece.tensor];
    const DType dtype = tensor.spec.dtype;
    const std::string source = data_path(dtype);
    views.push_back(
        {"/tensors/" + escape_name(tensor.name),
         dtype,
         piece.box.extent,
         {{Box::whole(piece.box.extent), ".", source, datasets.at(source).shape[0], piece.start / size_of(dtype)}}});
  }
  return views;
}

}  // namespace

std::string data_path(DType dtype) {
  return fmt::format("/data/{}", to_string(dtype));
}

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

RankCounts count_rank(const CheckpointIndex& index, const RankPlan& plan, const RankLocalValues& values) {
  RankCounts counts;
  counts.rows = static_cast<std::int64_t>(plan.pieces.size());
  for (const Piece& piece : plan.pieces) {
    counts.name_bytes += static_cast<std::int64_t>(index.tensors[piece.tensor].name.size());
    counts.shape_entries += static_cast<std::int64_t>(piece.box.extent.size());
  }
  counts.local_rows = static_cast<std::int64_t>(values.size());
  for (const auto& [name, value] : values) {
    counts.local_name_bytes += static_cast<std::int64_t>(name.size());
    counts.local_value_bytes += static_cast<std::int64_t>(value.size());
  }
  counts.used = plan.used;
  return counts;
}

std::vector<PerDType<Segment>> lay_out_segments(const CheckpointIndex& index, std::span<const RankCounts> counts) {
  std::vector<PerDType<Segment>> segments;
  segments.reserve(counts.size());
  PerDType<std::int64_t> ends{};
  for (const RankCounts& each : counts) {
    PerDType<Segment>& own = segments.emplace_back();
    for (const DType dtype : all_dtypes) {
      own[dtype] = {ends[dtype], align_up(each.used[dtype], index.sizes.segment_align)};
      ends[dtype] = checked_add(ends[dtype], own[dtype].length);
    }
  }
  return segments;
}

void agree_in_file(const HostCommunicator* group, const std::exception_ptr& error) {
  std::uint64_t is_well = error ? 0 : 1;
  if (group != nullptr) group->all_reduce({&is_well, 1}, MPI_MIN);
  if (error) std::rethrow_exception(error);
  if (is_well == 0) throw PeerFailed("a rank that writes the same file has failed");
}

ShardWriter::ShardWriter(const std::filesystem::path& directory, const CheckpointIndex& index, const RankPlan& plan,
                         FilePlan file, const RankLocalValues& values)
    : path_(directory / shard_file_name(file.file, file.files)),
      index_(index),
      plan_(plan),
      file_(std::move(file)),
      digests_(plan.pieces.size(), 0) {
  const std::vector<PerDType<Segment>> segments = lay_out_segments(index, file_.counts);
  segments_ = segments[file_.position];
  RankCounts before;
  RankCounts all;
  for (std::size_t r = 0; r < file_.ranks.size(); ++r) {
    if (r < file_.position) add(before, file_.counts[r]);
    add(all, file_.counts[r]);
  }

  const RankPlan* const plans[] = {&plan};
  const PerDType<Segment>* const own_segments[] = {&segments_};
  columns_ = encode_table(index, plans, own_segments);
  add_rank_local(columns_, values);
  rebase(columns_["/table/name_ptr"], before.name_bytes);
  rebase(columns_["/table/shape_ptr"], before.shape_entries);
  rebase(columns_["/rank_local/name_ptr"], before.local_name_bytes);
  rebase(columns_["/rank_local/value_ptr"], before.local_value_bytes);

  std::map<std::string, DatasetSpec> datasets;
  for (const auto& [path, column] : columns_) {
    const ColumnPart part = column_part(path, before, file_.counts[file_.position], all);
    firsts_[path] = part.first;
    datasets[path] = {column.type, {part.total}};
  }
  const auto ranks = static_cast<std::int64_t>(file_.ranks.size());
  const auto position = static_cast<std::int64_t>(file_.position);
  columns_["/header"] =
      Column(std::span<const std::uint64_t>(header_of(index, file_.file, file_.files, file_.ranks.size())));
  columns_["/ranks"] = encode_ranks(file_.ranks, file_.counts, segments, file_.position, file_.position + 1);
  firsts_["/ranks"] = position * static_cast<std::int64_t>(rank_fields);
  firsts_["/check"] = position;
  datasets["/header"] = {DType::u64, columns_["/header"].shape};
  datasets["/ranks"] = {DType::u64, {ranks, static_cast<std::int64_t>(rank_fields)}};
  datasets["/check"] = {DType::u64, {ranks}};
  for (const DType dtype : all_dtypes) {
    const std::int64_t bytes = segments.back()[dtype].start + segments.back()[dtype].length;
    if (bytes == 0) continue;
    datasets[data_path(dtype)] = {dtype, {bytes / size_of(dtype)}};
    datasets[blocks_path(dtype)] = {DType::u64, {bytes / index.sizes.block_bytes}};
    firsts_[blocks_path(dtype)] = segments_[dtype].start / index.sizes.block_bytes;
    columns_[blocks_path(dtype)] = Column(std::span<const std::uint64_t>());
  }
  skeleton_ = build_skeleton(datasets, ranks == 1 ? named_views(index, plan, datasets) : std::vector<NamedView>(),
                             {{{"format_version", static_cast<std::int64_t>(format_version)},
                               {"step", index.step},
                               {"world_size", index.world_size},
                               {"rank", file_.ranks.front()},
                               {"ranks", ranks},
                               {"block_bytes", index.sizes.block_bytes},
                               {"segment_align", index.sizes.segment_align}},
                              {{"library", index.library}, {"save_id", index.save_id}}});
}

void ShardWriter::write_skeleton(File& file) const {
  file.reserve(skeleton_.file_size);
  for (const auto& [offset, bytes] : skeleton_.metadata) file.write(bytes, offset);
}

void ShardWriter::write(std::int64_t window_bytes, const PieceSource& source) {
  File file = File::create(path_);
  if (file_.position == 0) write_skeleton(file);
  std::int64_t paced = 0;  // what lies between has not been asked to be written back
  std::int64_t written = 0;
  put_all(window_bytes, source, [&](const std::string& dataset, std::int64_t start, std::span<const std::byte> bytes) {
    const std::int64_t offset = skeleton_.places.at(dataset).offset + start;
    file.write(bytes, offset);
    if (offset != written) paced = offset;
    written = offset + static_cast<std::int64_t>(bytes.size());
    if (written - paced < writeback_bytes) return;
    file.start_writeback(paced, written - paced);
    paced = written;
  });
  file.sync();
  file.close();
}

/// Transfers that all ranks of a file make equally often, for one dataset after another in the same order, whatever
/// they have to write, and also after a failure.
class ShardWriter::CollectivePut {
 public:
  /// Collective over `group`.
  CollectivePut(MpioFile& file, const ShardWriter& writer, std::int64_t window_bytes, std::int64_t call_bytes,
                const HostCommunicator* group)
      : file_(file) {
    std::vector<std::uint64_t> counts;
    const auto add_dataset = [&](const std::string& path, std::int64_t bytes, std::int64_t window) {
      const auto calls = [&](std::int64_t n) { return (n + call_bytes - 1) / call_bytes; };
      left_.emplace_back(path, 0);
      counts.push_back(unsigned_of(bytes / window * calls(window) + calls(bytes % window)));
    };
    for (const DType dtype : all_dtypes)
      if (writer.skeleton_.places.contains(data_path(dtype)))
        add_dataset(data_path(dtype), writer.segments_[dtype].length, window_bytes);
    std::map<std::string, std::int64_t> columns{{"/check", 8}};
    for (const auto& [path, column] : writer.columns_) {
      columns[path] = static_cast<std::int64_t>(column.bytes.size());
      if (path.starts_with("/blocks/"))  // values are not known yet, but how many
        columns[path] = writer.segments_[parse_dtype(path.substr(8))].length / writer.index_.sizes.block_bytes * 8;
    }
    for (const auto& [path, bytes] : columns) add_dataset(path, bytes, call_bytes);
    if (group != nullptr) group->all_reduce(counts, MPI_MAX);
    for (std::size_t i = 0; i < counts.size(); ++i) left_[i].second = counts[i];
  }

  void write(const std::string& dataset, std::int64_t start, std::span<const std::byte> bytes) {
    while (left_.at(next_).first != dataset) finish_dataset();
    --left_[next_].second;  // also if it fails
    file_.write(dataset, start, bytes);
  }
  void finish() {
    while (next_ < left_.size()) finish_dataset();
  }
  /// The first error is the one to tell: after a failed transfer HDF5 fails in all that follows.
  void finish_after_failure() noexcept {
    try {
      finish();
    } catch (const IoError&) {
    }
  }

 private:
  void finish_dataset() {
    while (left_[next_].second > 0) {
      --left_[next_].second;
      file_.write(left_[next_].first, 0, {});
    }
    ++next_;
  }

  MpioFile& file_;
  std::vector<std::pair<std::string, std::uint64_t>> left_;  // calls by dataset
  std::size_t next_ = 0;
};

void ShardWriter::write(const MpioOptions& options, const HostCommunicator* group, const PieceSource& source) {
  const auto together = [&](auto&& body) {
    std::exception_ptr error;
    try {
      body();
    } catch (...) {
      error = std::current_exception();
    }
    agree_in_file(group, error);
  };
  // The file gets its structure and its disk space before MPI-IO writes to it: HDF5 does not survive a full disk.
  together([&] {
    if (file_.position != 0) return;
    create_by_mpi(path_, options.hints);
    File file = File::create(path_);
    write_skeleton(file);
    file.close();
  });
  // A rank that cannot open the file would leave the others waiting inside of HDF5.
  together([&] { (void)File::open(path_); });
  const bool is_collective = options.collective && file_.ranks.size() > 1;
  std::optional<MpioFile> file;
  together([&] {
    file.emplace(path_, group == nullptr ? MPI_COMM_SELF : group->mpi(), options.hints,
                 is_collective ? MpioFile::Transfer::collective : MpioFile::Transfer::independent);
  });
  std::exception_ptr failure;
  std::uint64_t can_close = 1;
  try {
    const std::int64_t window_bytes =
        std::max(options.call_bytes / index_.sizes.block_bytes, std::int64_t{1}) * index_.sizes.block_bytes;
    std::optional<CollectivePut> collective;
    if (is_collective) collective.emplace(*file, *this, window_bytes, options.call_bytes, group);
    together([&] {
      try {
        // Through the window always: whole windows, as they were counted.
        put_all(window_bytes, PieceSource(source.fill),
                [&](const std::string& dataset, std::int64_t start, std::span<const std::byte> bytes) {
                  while (!bytes.empty()) {
                    const auto part = bytes.first(std::min(bytes.size(), static_cast<std::size_t>(options.call_bytes)));
                    if (collective)
                      collective->write(dataset, start, part);
                    else
                      file->write(dataset, start, part);
                    bytes = bytes.subspan(part.size());
                    start += static_cast<std::int64_t>(part.size());
                  }
                });
      } catch (...) {
        can_close = file_.position == 0 ? 0 : 1;
        if (collective) collective->finish_after_failure();
        throw;
      }
      if (collective) collective->finish();
    });
  } catch (...) {
    failure = std::current_exception();
  }
  // A first rank that cannot write would fail in close, too, and leave the others there: MPI_Finalize tries again.
  if (failure && group != nullptr) group->broadcast({&can_close, 1}, 0);
  if (can_close != 0) together([&] { file->close(); });
  if (failure) std::rethrow_exception(failure);
  File::open(path_).sync();  // on every rank: MPI-IO may have left the bytes of one with another
}

void ShardWriter::put_all(std::int64_t window_bytes, const PieceSource& source, const Put& put) {
  std::vector<std::byte> window;
  for (const DType dtype : all_dtypes) {
    const std::int64_t length = segments_[dtype].length;
    if (length == 0) continue;
    window.resize(static_cast<std::size_t>(std::min(window_bytes, length)));
    SegmentStream stream(index_, plan_, dtype, window, source);
    const std::string path = data_path(dtype);
    const std::vector<std::uint64_t> crcs =
        stream.write(length, [&](std::int64_t begin, std::span<const std::byte> bytes) {
          put(path, segments_[dtype].start + begin, bytes);
        });
    stream.take_digests(digests_);
    columns_[blocks_path(dtype)] = Column(std::span<const std::uint64_t>(crcs));
  }
  columns_["/table/digest"] = Column(std::span<const std::uint64_t>(digests_));

  CheckDigest digest;
  digest.add(columns_.at("/header").bytes);
  digest.add(columns_.at("/ranks").bytes);
  for (const auto& [path, column] : columns_)
    if (path != "/header" && path != "/ranks") digest.add(column.bytes);
  const std::uint64_t check = digest.value();
  columns_["/check"] = Column(std::span(&check, 1));
  if (file_.position != 0) columns_["/header"].bytes.clear();
  for (const auto& [path, column] : columns_) {
    if (column.bytes.empty()) continue;
    const auto first = firsts_.find(path);
    put(path, first == firsts_.end() ? 0 : first->second * size_of(column.type), column.bytes);
  }
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
  std::vector<RankCounts> counts;
  std::vector<PerDType<Segment>> all_segments;
  for (std::size_t r = 0; r < entry.ranks.size(); ++r) {
    counts.push_back(count_rank(index, *plans[r], {}));
    all_segments.push_back(*segments[r]);
  }
  expected["/ranks"] = encode_ranks(entry.ranks, counts, all_segments, 0, entry.ranks.size());

  Columns columns;
  columns["/header"] = read_column(file, structure, "/header", DType::u64, expected["/header"].shape);
  if (columns["/header"].bytes != expected["/header"].bytes) {
    const Column& header = columns["/header"];
    if (save_id_text(header.u64(9), header.u64(10)) != index.save_id)
      refuse(fmt::format(
          "belongs to save {} (step {}), but the index to save {} (step {}): files of two checkpoints are mixed",
          save_id_text(header.u64(9), header.u64(10)), header.i64(5), index.save_id, index.step));
    refuse("its header disagrees with the index: it is damaged, or files are swapped");
  }
  columns["/ranks"] = read_column(file, structure, "/ranks", DType::u64, expected["/ranks"].shape);
  for (const auto& [path, column] : expected)
    if (path.starts_with("/table/")) columns[path] = read_column(file, structure, path, column.type, column.shape);
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
    Column blocks =
        read_column(file, structure, blocks_path(dtype), DType::u64, Shape{length / index.sizes.block_bytes});
    for (std::size_t i = 0; i < blocks.size(); ++i) tables.block_crcs[dtype].push_back(blocks.u64(i));
    columns[blocks_path(dtype)] = std::move(blocks);
  }

  // Rows of rank-local values are the one thing that the index does not foretell; the rest must be as expected.
  const Column& ranks = columns["/ranks"];
  const std::size_t local_rows = columns["/rank_local/name_ptr"].size() - 1;
  check_pointers(columns["/rank_local/name_ptr"], local_rows, columns["/rank_local/name_bytes"].size(),
                 tables.path.string() + ":/rank_local/name_ptr");
  check_pointers(columns["/rank_local/value_ptr"], local_rows, columns["/rank_local/value_bytes"].size(),
                 tables.path.string() + ":/rank_local/value_ptr");
  std::uint64_t next_local = 0;
  for (std::size_t r = 0; r < entry.ranks.size(); ++r) {
    const auto field = [&](std::size_t f) { return ranks.u64(r * rank_fields + f); };
    const std::uint64_t rows = field(local_row_count);
    if (field(first_local_row) != next_local || rows > local_rows - next_local ||
        field(first_local_name_byte) != columns["/rank_local/name_ptr"].u64(static_cast<std::size_t>(next_local)) ||
        field(first_local_value_byte) != columns["/rank_local/value_ptr"].u64(static_cast<std::size_t>(next_local)))
      refuse("/ranks and /rank_local contradict each other");
    next_local += rows;
    for (std::size_t f = 0; f < rank_fields; ++f)
      if ((f < first_local_row || f > first_local_value_byte) &&
          field(f) != expected["/ranks"].u64(r * rank_fields + f))
        refuse(fmt::format("/ranks disagrees with the index about rank {}: column {} is {}, expected {}",
                           entry.ranks[r], f, field(f), expected["/ranks"].u64(r * rank_fields + f)));
  }
  if (next_local != local_rows) refuse("/ranks and /rank_local contradict each other");
  for (const auto& [path, column] : expected)
    if (path.starts_with("/table/") && path != "/table/digest" && columns[path].bytes != column.bytes)
      refuse(fmt::format("{} is not what the index implies: the table is damaged", path));

  const Column check =
      read_column(file, structure, "/check", DType::u64, Shape{static_cast<std::int64_t>(entry.ranks.size())});
  std::size_t row = 0;
  for (std::size_t r = 0; r < entry.ranks.size(); ++r) {
    if (check.u64(r) != check_of_rank(columns, r, index.sizes.block_bytes))
      refuse(
          fmt::format("the tables of rank {} contradict their /check digest: the file was damaged after it was written",
                      entry.ranks[r]));
    std::vector<std::uint64_t>& digests = tables.digests.emplace_back();
    for (std::size_t p = 0; p < plans[r]->pieces.size(); ++p) digests.push_back(columns["/table/digest"].u64(row++));
    RankLocalValues& values = tables.rank_local.emplace_back();
    for (std::uint64_t i = ranks.u64(r * rank_fields + first_local_row),
                       end = i + ranks.u64(r * rank_fields + local_row_count);
         i < end; ++i) {
      const auto item = static_cast<std::size_t>(i);
      const std::string_view value =
          list_text(columns["/rank_local/value_ptr"], columns["/rank_local/value_bytes"], item);
      const auto bytes = std::as_bytes(std::span(value));
      values.emplace(list_text(columns["/rank_local/name_ptr"], columns["/rank_local/name_bytes"], item),
                     std::vector<std::byte>(bytes.begin(), bytes.end()));
    }
  }
  return tables;
}

}  // namespace fsdp2::checkpoint
