// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
// Feeds the decoders of the index and of shard files with tables that were changed at will, under digests that are
// right. They may refuse with a CheckpointError; what they accept must hold together. decoder_fuzz [FIRST COUNT] runs
// these inputs only. Each input is a list of changes of ten bytes, so that libFuzzer can make inputs too.

#include <fmt/format.h>

#include "checkpoint/reader.hpp"
#include "hostile/fuzz.hpp"
#include "support/forged_file.hpp"
#include "support/local_checkpoint.hpp"
#include "support/scratch_folder.hpp"

namespace fsdp2::testing {
namespace {

using checkpoint::Column;
using checkpoint::Columns;

CheckpointIndex some_index() {
  CheckpointIndex index;
  index.library = "decoder_fuzz";
  index.save_id = "0123456789abcdeffedcba9876543210";
  index.step = -1;
  index.world_size = 6;
  index.sizes = {4096, 8192, 100};
  index.metadata = "{}";
  index.meshes.push_back({"grid", MeshSpec({{"dp", 3}, {"tp", 2}}), {AxisRole::shard, AxisRole::replicate}});
  index.meshes.push_back({"list", MeshSpec({{"x", 5}}, {4, 0, 5, 2, 3}), {AxisRole::none}});
  const Placement replicate = Replicate{};
  index.tensors = {{"a", {DType::f64, {}, {replicate, replicate}, {0, 1}}, 0, 0},
                   {"b", {DType::bf16, {0, 4}, {Shard{0}, Shard{1}}, {1, 0}}, 0, 0},
                   {"c", {DType::f32, {50, 17}, {Ragged{1, {0, 3, 3, 17}}, Shard{1}}, {0, 1}}, 0, 0},
                   {"d", {DType::f32, {170, 5}, {Shard{0}, replicate}, {0, 1}}, 0, 0},
                   {"e", {DType::boolean, {7, 3}, {Shard{0}}, {0}}, 1, 0},
                   {"f", {DType::u8, {900}, {replicate}, {0}}, 1, 0}};
  return index;
}

/// The checkpoint on disk that shard files are put into.
struct Base {
  ScratchFolder scratch;
  CheckpointIndex index = write_local_checkpoint(scratch.path(), some_index());
  Columns index_columns = checkpoint::encode_index(index);
  Columns shard_columns;

  Base() {
    std::map<std::string, DType> types{{"/header", DType::u64},
                                       {"/ranks", DType::u64},
                                       {"/table/name_ptr", DType::u64},
                                       {"/table/name_bytes", DType::u8},
                                       {"/table/dtype", DType::u8},
                                       {"/table/shape_ptr", DType::u64},
                                       {"/table/shape", DType::i64},
                                       {"/table/offset", DType::i64},
                                       {"/table/extent", DType::i64},
                                       {"/table/arena_start", DType::u64},
                                       {"/table/bytes", DType::u64},
                                       {"/table/digest", DType::u64},
                                       {"/rank_local/name_ptr", DType::u64},
                                       {"/rank_local/name_bytes", DType::u8},
                                       {"/rank_local/value_ptr", DType::u64},
                                       {"/rank_local/value_bytes", DType::u8}};
    for (const DType dtype : all_dtypes)
      if (index.segments[0][dtype].length != 0) {
        types[fmt::format("/data/{}", to_string(dtype))] = dtype;
        types[fmt::format("/blocks/{}", to_string(dtype))] = DType::u64;
      }
    shard_columns = read_columns(scratch / shard_file_name(0, 6), types);
  }
};

Base& base() {
  static Base the_base;
  return the_base;
}

void require(bool condition, const char* what) {
  if (!condition) throw std::logic_error(what);
}

/// A change: column, kind, element (2 bytes), value (6 bytes, sign-extended).
constexpr std::size_t change_bytes = 10;

void change(Columns& columns, std::span<const std::uint8_t> bytes) {
  auto it = std::next(columns.begin(), static_cast<std::ptrdiff_t>(bytes[0] % columns.size()));
  Column& column = it->second;
  const std::size_t at = static_cast<std::size_t>(bytes[2] << 8 | bytes[3]);
  std::uint64_t value = (bytes[4] & 0x80) != 0 ? ~std::uint64_t{0} : 0;
  for (const std::uint8_t byte : bytes.subspan(4, 6)) value = value << 8 | byte;
  if (column.shape.size() == 1 && bytes[1] % 8 == 0)
    return resize(column, at % 4 == 0 ? at >> 4 : column.size() + at % 3);
  if (column.shape.size() > 1 && bytes[1] % 8 == 0) std::swap(column.shape.front(), column.shape.back());
  if (column.type != DType::u8 && column.type != DType::u64 && column.type != DType::i64) return;  // tensor bytes
  if (column.size() == 0) return;
  const std::size_t i = at % column.size();
  const std::uint64_t old = element(column, i);
  const std::uint64_t values[] = {value,
                                  old + 1,
                                  old - 1,
                                  old ^ std::uint64_t{1} << value % 64,
                                  std::uint64_t{1} << value % 64,
                                  ~std::uint64_t{0} << value % 64,
                                  0};
  set_element(column, i, values[bytes[1] % 8 % std::size(values)]);
}

/// What was accepted means the same when it is written again, and gives each rank pieces that lie in their tensors and
/// follow one another.
void check_index(const CheckpointIndex& index) {
  const Columns again = checkpoint::encode_index(index);
  const Columns third = checkpoint::encode_index(checkpoint::decode_index(again, "again"));
  for (const auto& [path, column] : again)
    require(column.bytes == third.at(path).bytes, "the index changes its meaning");
  for (std::int64_t rank = 0; rank < index.world_size; ++rank) {
    PerDType<std::int64_t> ends{};
    const RankPlan plan = plan_rank(index, rank);
    for (const Piece& piece : plan.pieces) {
      const TensorSpec& spec = index.tensors[piece.tensor].spec;
      for (std::size_t d = 0; d < spec.shape.size(); ++d)
        require(piece.box.offset[d] >= 0 && piece.box.extent[d] > 0 &&
                    piece.box.extent[d] <= spec.shape[d] - piece.box.offset[d],
                "a piece is outside its tensor");
      require(piece.bytes == piece.box.numel() * size_of(spec.dtype), "a piece has other bytes than its box");
      require(piece.start >= ends[spec.dtype], "pieces overlap");
      ends[spec.dtype] = piece.start + piece.bytes;
      require(ends[spec.dtype] <= plan.used[spec.dtype], "a piece is outside its segment");
    }
  }
}

/// Whether it was accepted.
bool decode(std::span<const std::uint8_t> input) {
  if (input.empty()) return true;
  const bool is_shard = input.front() % 32 == 0;
  Columns columns = is_shard ? base().shard_columns : base().index_columns;
  for (input = input.subspan(1); input.size() >= change_bytes; input = input.subspan(change_bytes))
    change(columns, input.first(change_bytes));
  try {
    if (!is_shard) {
      check_index(checkpoint::decode_index(columns, "index.h5"));
      return true;
    }
    CheckpointIndex index = base().index;
    index.files[0].size = write_columns(base().scratch / shard_file_name(0, 6), columns);
    const RankPlan plan = plan_rank(index, 0);
    const RankPlan* const plans[] = {&plan};
    const checkpoint::ShardTables tables = checkpoint::read_shard(base().scratch.path(), index, 0, plans);
    for (const DType dtype : all_dtypes) {
      const std::int64_t length = index.segments[0][dtype].length;
      require(tables.arena_offset[dtype] >= 0 && tables.arena_offset[dtype] <= index.files[0].size - length,
              "an arena is outside its file");
      require(static_cast<std::int64_t>(tables.block_crcs[dtype].size()) == length / index.sizes.block_bytes,
              "blocks without CRC");
    }
    require(tables.digests.size() == 1 && tables.digests[0].size() == plan.pieces.size(), "pieces without digest");
    return true;
  } catch (const CheckpointError&) {
    return false;
  }
}

}  // namespace
}  // namespace fsdp2::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  (void)fsdp2::testing::decode({data, size});
  return 0;
}

#ifndef FSDP2_LIBFUZZER
int main(int argc, char** argv) {
  using namespace fsdp2::testing;
  const auto make = [](std::mt19937_64& random) {
    const std::size_t changes = 1 + random() % 3;
    return random_bytes(random, 1 + change_bytes * changes);
  };
  return run_fuzz(argc, argv, 10000, make, decode);
}
#endif
