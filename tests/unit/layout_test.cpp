// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
// Who writes what and where, against a restatement of FORMAT.md §3 to §5 with lists of indices instead of arithmetic.

#include "fsdp2/checkpoint/layout.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <random>

#include "fsdp2/error.hpp"

namespace fsdp2 {
namespace {

using Indices = std::vector<std::vector<std::int64_t>>;  // by dimension
using Wide = __int128;

MeshEntry mesh_of(std::vector<MeshAxis> axes, std::vector<std::int64_t> ranks = {}) {
  const std::size_t count = axes.size();
  return {"mesh", MeshSpec(std::move(axes), std::move(ranks)), std::vector<AxisRole>(count, AxisRole::none)};
}

TensorEntry tensor_of(std::string name, DType dtype, Shape shape, std::vector<Placement> placements,
                      std::vector<std::int64_t> split_order = {}, std::size_t mesh = 0) {
  return {std::move(name), {dtype, std::move(shape), std::move(placements), std::move(split_order)}, mesh, 0};
}

std::int64_t pick(std::mt19937_64& random, std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
}

/// ---- The restatement ----

std::vector<Shape> coordinates_of(const MeshSpec& mesh) {
  std::vector<Shape> all{{}};
  for (const MeshAxis& axis : mesh.axes()) {
    std::vector<Shape> longer;
    for (const Shape& prefix : all)
      for (std::int64_t i = 0; i < axis.size; ++i) {
        longer.push_back(prefix);
        longer.back().push_back(i);
      }
    all = std::move(longer);
  }
  return all;
}

/// Nothing where the rank is outside.
std::vector<std::int64_t> coordinate_of(const MeshSpec& mesh, std::int64_t rank) {
  const std::vector<Shape> all = coordinates_of(mesh);
  for (std::size_t i = 0; i < all.size(); ++i)
    if ((mesh.ranks().empty() ? static_cast<std::int64_t>(i) : mesh.ranks()[i]) == rank) return all[i];
  return {};
}

Indices held(const TensorSpec& spec, const MeshSpec& mesh, const Shape& coordinate) {
  Indices own;
  for (const std::int64_t extent : spec.shape) {
    own.emplace_back(static_cast<std::size_t>(extent));
    std::iota(own.back().begin(), own.back().end(), std::int64_t{0});
  }
  for (const std::int64_t axis : split_order(spec)) {
    const auto a = static_cast<std::size_t>(axis);
    const std::int64_t i = coordinate[a];
    if (const auto* shard = std::get_if<Shard>(&spec.placements[a])) {
      std::vector<std::int64_t>& rows = own[static_cast<std::size_t>(shard->dim)];
      const auto size = static_cast<std::int64_t>(rows.size());
      std::int64_t each = 0;
      while (each * mesh.axes()[a].size < size) ++each;
      const std::vector<std::int64_t> all = std::exchange(rows, {});
      for (std::int64_t r = i * each; r < std::min((i + 1) * each, size); ++r)
        rows.push_back(all[static_cast<std::size_t>(r)]);
    } else if (const auto* ragged = std::get_if<Ragged>(&spec.placements[a])) {
      std::erase_if(own[static_cast<std::size_t>(ragged->dim)], [&](std::int64_t r) {
        return r < ragged->bounds[static_cast<std::size_t>(i)] || r >= ragged->bounds[static_cast<std::size_t>(i + 1)];
      });
    }
  }
  return own;
}

std::int64_t bytes_of(const Indices& indices, DType dtype) {
  std::int64_t bytes = size_of(dtype);
  for (const auto& dimension : indices) bytes *= static_cast<std::int64_t>(dimension.size());
  return bytes;
}

std::vector<std::size_t> replicate_axes(const TensorSpec& spec) {
  std::vector<std::size_t> axes;
  for (std::size_t a = 0; a < spec.placements.size(); ++a)
    if (std::holds_alternative<Replicate>(spec.placements[a])) axes.push_back(a);
  return axes;
}

struct ExpectedPiece {
  std::size_t tensor;
  Indices indices;
  std::int64_t start;
  std::int64_t bytes;
  std::int64_t granule;  // what its box is cut in
  std::pair<std::size_t, std::vector<std::size_t>> replicas;
};

struct ExpectedPlan {
  std::vector<ExpectedPiece> pieces;
  PerDType<std::int64_t> used;
  /// By replica set: bytes on the line, number of replicas, the largest granule.
  std::map<std::pair<std::size_t, std::vector<std::size_t>>, std::array<std::int64_t, 3>> lines;
};

ExpectedPlan expected_plan(const CheckpointIndex& index, std::int64_t rank) {
  ExpectedPlan plan;
  plan.used.fill(0);
  std::map<std::size_t, std::int64_t> begins;
  for (std::size_t t = 0; t < index.tensors.size(); ++t) {
    const TensorEntry& tensor = index.tensors[t];
    const MeshSpec& mesh = index.meshes[tensor.mesh].spec;
    const Shape coordinate = coordinate_of(mesh, rank);
    if (coordinate.empty()) continue;
    auto& line = plan.lines[{tensor.mesh, replicate_axes(tensor.spec)}];
    begins[t] = line[0];
    line[0] += bytes_of(held(tensor.spec, mesh, coordinate), tensor.spec.dtype);
  }
  for (const auto& [t, begin] : begins) {
    const TensorEntry& tensor = index.tensors[t];
    const MeshSpec& mesh = index.meshes[tensor.mesh].spec;
    const Shape coordinate = coordinate_of(mesh, rank);
    const std::vector<std::size_t> axes = replicate_axes(tensor.spec);
    auto& [total, replicas, largest] = plan.lines[{tensor.mesh, axes}];
    replicas = 1;
    std::int64_t mine = 0;
    for (const std::size_t a : axes) {
      replicas *= mesh.axes()[a].size;
      mine = mine * mesh.axes()[a].size + coordinate[a];
    }
    Indices own = held(tensor.spec, mesh, coordinate);
    const std::int64_t bytes = bytes_of(own, tensor.spec.dtype);
    if (bytes == 0) continue;
    const auto rows = std::find_if(own.begin(), own.end(), [](const auto& dimension) { return dimension.size() > 1; });
    const bool is_whole = bytes <= index.sizes.split_bytes || rows == own.end();
    const std::int64_t granule = is_whole ? bytes : bytes / static_cast<std::int64_t>(rows->size());
    largest = std::max(largest, granule);
    // A granule belongs to the replica whose stretch [cut(m), cut(m+1)) of the line has the granule's middle, the end
    // included.
    const auto cut = [&, all = total, count = replicas](std::int64_t m) { return static_cast<Wide>(all) * m / count; };
    const auto is_mine = [&, first = begin](std::int64_t number) {
      const Wide middle_twice = 2 * static_cast<Wide>(first) + (2 * number + 1) * static_cast<Wide>(granule);
      return 2 * cut(mine) < middle_twice && middle_twice <= 2 * cut(mine + 1);
    };
    std::vector<std::int64_t> taken;
    for (std::int64_t number = 0; number < bytes / granule; ++number)
      if (is_mine(number)) taken.push_back(number);
    if (taken.empty()) continue;
    if (!is_whole) {
      const std::vector<std::int64_t> all = std::exchange(*rows, {});
      for (const std::int64_t number : taken) rows->push_back(all[static_cast<std::size_t>(number)]);
    }
    std::int64_t& used = plan.used[tensor.spec.dtype];
    while (used % 64 != 0) ++used;
    const std::int64_t piece_bytes = bytes_of(own, tensor.spec.dtype);
    plan.pieces.push_back({t, std::move(own), used, piece_bytes, granule, {tensor.mesh, axes}});
    used += piece_bytes;
  }
  return plan;
}

Indices indices_of(const Box& box) {
  Indices indices;
  for (std::size_t d = 0; d < box.offset.size(); ++d) {
    indices.emplace_back(static_cast<std::size_t>(box.extent[d]));
    std::iota(indices.back().begin(), indices.back().end(), box.offset[d]);
  }
  return indices;
}

/// ---- Random checkpoints ----

std::vector<std::int64_t> some_ranks(std::mt19937_64& random, std::int64_t world, std::int64_t count) {
  std::vector<std::int64_t> ranks(static_cast<std::size_t>(world));
  std::iota(ranks.begin(), ranks.end(), std::int64_t{0});
  std::shuffle(ranks.begin(), ranks.end(), random);
  ranks.resize(static_cast<std::size_t>(count));
  return ranks;
}

TensorEntry random_tensor(std::mt19937_64& random, const CheckpointIndex& index, std::string name) {
  TensorEntry tensor;
  tensor.name = std::move(name);
  tensor.mesh = random() % index.meshes.size();
  tensor.spec.dtype = all_dtypes[random() % std::size(all_dtypes)];
  for (std::int64_t d = pick(random, 0, 3); d > 0; --d) tensor.spec.shape.push_back(pick(random, 0, 9));
  const MeshSpec& mesh = index.meshes[tensor.mesh].spec;
  tensor.spec.split_order.resize(mesh.dimensions());
  std::iota(tensor.spec.split_order.begin(), tensor.spec.split_order.end(), std::int64_t{0});
  std::shuffle(tensor.spec.split_order.begin(), tensor.spec.split_order.end(), random);
  tensor.spec.placements.assign(mesh.dimensions(), Replicate{});
  std::vector<bool> is_cut(tensor.spec.shape.size(), false);
  for (const std::int64_t axis : tensor.spec.split_order) {
    const auto a = static_cast<std::size_t>(axis);
    if (tensor.spec.shape.empty() || random() % 2 == 0) continue;
    const std::size_t d = random() % tensor.spec.shape.size();
    if (!is_cut[d] && random() % 4 == 0) {
      std::vector<std::int64_t> bounds{0, tensor.spec.shape[d]};
      while (static_cast<std::int64_t>(bounds.size()) <= mesh.axes()[a].size)
        bounds.push_back(pick(random, 0, tensor.spec.shape[d]));
      std::sort(bounds.begin(), bounds.end());
      tensor.spec.placements[a] = Ragged{static_cast<std::int64_t>(d), std::move(bounds)};
    } else {
      tensor.spec.placements[a] = Shard{static_cast<std::int64_t>(d)};
    }
    is_cut[d] = true;
  }
  return tensor;
}

CheckpointIndex random_index(std::mt19937_64& random) {
  CheckpointIndex index;
  index.world_size = pick(random, 1, 12);
  constexpr std::int64_t splits[] = {0, 8, 100, 1000, std::int64_t{4} << 20};
  index.sizes = {4096, 4096, splits[random() % std::size(splits)]};
  for (std::int64_t m = pick(random, 1, 3); m > 0; --m) {
    std::vector<MeshAxis> axes;
    std::int64_t size = 1;
    for (std::int64_t a = pick(random, 1, 3); a > 0; --a) {
      axes.push_back({fmt::format("axis{}", a), pick(random, 1, index.world_size / size)});
      size *= axes.back().size;
    }
    index.meshes.push_back(mesh_of(
        std::move(axes), random() % 2 == 0 ? std::vector<std::int64_t>{} : some_ranks(random, index.world_size, size)));
  }
  for (std::int64_t t = pick(random, 0, 12); t > 0; --t)
    index.tensors.push_back(random_tensor(random, index, fmt::format("t{:02}", 20 - t)));
  validate(index);
  return index;
}

std::string describe(const CheckpointIndex& index) {
  std::string text = fmt::format("world {}, split {}", index.world_size, index.sizes.split_bytes);
  for (const TensorEntry& tensor : index.tensors) {
    text += fmt::format("\n{} {} {} on {}", tensor.name, to_string(tensor.spec.dtype), to_string(tensor.spec.shape),
                        index.meshes[tensor.mesh].spec.to_string());
    for (const Placement& placement : tensor.spec.placements) text += " " + to_string(placement);
  }
  return text;
}

TEST(PlanRank, EqualsTheRestatementOfTheFormat) {
  std::mt19937_64 random(11);
  std::size_t cut_pieces = 0;
  for (int trial = 0; trial < 1500; ++trial) {
    const CheckpointIndex index = random_index(random);
    SCOPED_TRACE(describe(index));
    for (std::int64_t rank = 0; rank < index.world_size; ++rank) {
      const RankPlan plan = plan_rank(index, rank);
      const ExpectedPlan expected = expected_plan(index, rank);
      ASSERT_EQ(plan.used, expected.used) << "rank " << rank;
      ASSERT_EQ(plan.pieces.size(), expected.pieces.size()) << "rank " << rank;
      for (std::size_t p = 0; p < plan.pieces.size(); ++p) {
        const Piece& piece = plan.pieces[p];
        ASSERT_EQ(piece.tensor, expected.pieces[p].tensor);
        ASSERT_EQ(indices_of(piece.box), expected.pieces[p].indices)
            << index.tensors[piece.tensor].name << ", rank " << rank;
        ASSERT_EQ(piece.start, expected.pieces[p].start);
        ASSERT_EQ(piece.bytes, expected.pieces[p].bytes);
        cut_pieces +=
            piece.bytes % expected.pieces[p].granule == 0 && piece.bytes != expected.pieces[p].granule ? 1 : 0;
      }
    }
  }
  EXPECT_GT(cut_pieces, 500u) << "few boxes were cut by rows: the trials show little";
}

TEST(PlanRank, EveryElementIsWrittenOnce) {
  std::mt19937_64 random(12);
  for (int trial = 0; trial < 1500; ++trial) {
    const CheckpointIndex index = random_index(random);
    SCOPED_TRACE(describe(index));
    std::vector<std::vector<int>> written;
    for (const TensorEntry& tensor : index.tensors)
      written.emplace_back(static_cast<std::size_t>(numel(tensor.spec.shape)), 0);
    for (std::int64_t rank = 0; rank < index.world_size; ++rank)
      for (const Piece& piece : plan_rank(index, rank).pieces)
        for (RunCursor cursor = runs_of(index.tensors[piece.tensor].spec.shape, piece.box); !cursor.is_done();
             cursor.next())
          for (std::int64_t i = 0; i < cursor.run().count; ++i)
            ++written[piece.tensor][static_cast<std::size_t>(cursor.run().from + i)];
    for (std::size_t t = 0; t < written.size(); ++t)
      ASSERT_TRUE(std::all_of(written[t].begin(), written[t].end(), [](int times) { return times == 1; }))
          << index.tensors[t].name;
  }
}

TEST(PlanRank, NobodyWritesMoreThanOneGranuleAboveTheEvenShare) {
  std::mt19937_64 random(13);
  for (int trial = 0; trial < 800; ++trial) {
    const CheckpointIndex index = random_index(random);
    SCOPED_TRACE(describe(index));
    for (std::int64_t rank = 0; rank < index.world_size; ++rank) {
      const ExpectedPlan expected = expected_plan(index, rank);
      std::map<std::pair<std::size_t, std::vector<std::size_t>>, std::int64_t> written;
      for (const Piece& piece : plan_rank(index, rank).pieces)
        written[{index.tensors[piece.tensor].mesh, replicate_axes(index.tensors[piece.tensor].spec)}] += piece.bytes;
      for (const auto& [replicas, bytes] : written) {
        const auto& [total, count, granule] = expected.lines.at(replicas);
        ASSERT_LE(bytes, total / count + 1 + granule) << "rank " << rank;
      }
    }
  }
}

TEST(PlanRank, PiecesLieAlignedAndAscending) {
  std::mt19937_64 random(14);
  for (int trial = 0; trial < 300; ++trial) {
    const CheckpointIndex index = random_index(random);
    for (std::int64_t rank = 0; rank < index.world_size; ++rank) {
      const RankPlan plan = plan_rank(index, rank);
      PerDType<std::int64_t> end{};
      std::size_t least_tensor = 0;
      for (const Piece& piece : plan.pieces) {
        ASSERT_GE(piece.tensor, least_tensor);
        least_tensor = piece.tensor + 1;
        std::int64_t& before = end[index.tensors[piece.tensor].spec.dtype];
        ASSERT_EQ(piece.start % 64, 0);
        ASSERT_GE(piece.start, before);
        ASSERT_LT(piece.start, before + 64);
        ASSERT_GT(piece.bytes, 0);
        before = piece.start + piece.bytes;
      }
      ASSERT_EQ(plan.used, end);
    }
  }
}

/// A mesh over which no loop ever ends: what a rank writes does not need the others.
TEST(PlanRank, DoesNotLookAtOtherRanks) {
  constexpr std::int64_t side = std::int64_t{1} << 20;
  CheckpointIndex index;
  index.world_size = side * side;
  index.sizes = {4096, 4096, 0};
  index.meshes.push_back(mesh_of({{"dp", side}, {"tp", side}}));
  index.tensors.push_back(tensor_of("cut", DType::f32, {4 * side, 3}, {Shard{0}, Replicate{}}));
  index.tensors.push_back(tensor_of("everywhere", DType::u8, {side, side}, {Replicate{}, Replicate{}}));
  validate(index);
  // Each rank's stretch of the line is one byte long: a row belongs to the rank whose byte ends in its middle.
  const std::int64_t rank = 7 * side + side / 2 - 1;
  const RankPlan plan = plan_rank(index, rank);
  ASSERT_EQ(plan.pieces.size(), 1u);
  EXPECT_EQ(plan.pieces[0].tensor, 1u);
  EXPECT_EQ(plan.pieces[0].box, (Box{{7, 0}, {1, side}}));
  EXPECT_EQ(plan_rank(index, rank + 1).pieces.size(), 0u);
}

TEST(PlanRank, SharesATypicalModelAmong16384Ranks) {
  CheckpointIndex index;
  index.world_size = 16384;
  index.meshes.push_back(mesh_of({{"replicate", 128}, {"shard", 128}}));
  for (int layer = 0; layer < 400; ++layer) {
    index.tensors.push_back(tensor_of(fmt::format("{:03}.bias", layer), DType::f32, {4096}, {Replicate{}, Shard{0}}));
    index.tensors.push_back(
        tensor_of(fmt::format("{:03}.weight", layer), DType::f32, {4096, 4096}, {Replicate{}, Shard{0}}));
  }
  validate(index);
  const std::int64_t column = 77;
  std::vector<std::int64_t> next(index.tensors.size(), 32 * column);  // the first row of its chunk
  std::int64_t total = 0;
  for (std::int64_t replica = 0; replica < 128; ++replica) {
    std::int64_t bytes = 0;
    for (const Piece& piece : plan_rank(index, replica * 128 + column).pieces) {
      EXPECT_EQ(piece.box.offset[0], next[piece.tensor]) << "replicas write ascending parts of the chunk";
      next[piece.tensor] = piece.box.offset[0] + piece.box.extent[0];
      bytes += piece.bytes;
    }
    EXPECT_LE(bytes, 400 * (4096 * 4 * 32 + 4 * 32) / 128 + 4096 * 4 * 32 + 1);
    total += bytes;
  }
  EXPECT_EQ(total, std::int64_t{400} * (4096 * 4 * 32 + 4 * 32));
  for (const std::int64_t row : next) EXPECT_EQ(row, 32 * (column + 1));
}

/// ---- Names and validity ----

TEST(CheckpointIndex, FindsNamesInBytewiseOrder) {
  using namespace std::string_literals;
  const std::vector<std::string> names{"\0"s,  "\x01"s, "A"s,    "a"s,    "a\0b"s,     "a."s,
                                       "a.b"s, "aa"s,   "\x7f"s, "\x80"s, "\xc3\xa4"s, "\xff"s};
  CheckpointIndex index;
  index.meshes.push_back(mesh_of({{"dp", 1}}));
  for (const std::string& name : names) index.tensors.push_back(tensor_of(name, DType::u8, {1}, {Replicate{}}));
  validate(index);
  for (std::size_t t = 0; t < names.size(); ++t) EXPECT_EQ(index.find(names[t]), t);
  for (const std::string& name : {""s, "a\0"s, "b"s, "\xff\xff"s}) EXPECT_EQ(index.find(name), names.size()) << name;
  const RankPlan plan = plan_rank(index, 0);
  ASSERT_EQ(plan.pieces.size(), names.size());
  for (std::size_t t = 0; t < names.size(); ++t) EXPECT_EQ(plan.pieces[t].start, 64 * static_cast<std::int64_t>(t));
  for (std::size_t t = 1; t < names.size(); ++t) {
    CheckpointIndex wrong = index;
    std::swap(wrong.tensors[t - 1], wrong.tensors[t]);
    EXPECT_THROW(validate(wrong), ConfigError) << t;
    wrong = index;
    wrong.tensors[t].name = wrong.tensors[t - 1].name;
    EXPECT_THROW(validate(wrong), ConfigError) << t;
  }
}

TEST(CheckpointIndex, IsRefusedWhereItIsNotWellFormed) {
  CheckpointIndex good;
  good.world_size = 4;
  good.meshes.push_back(mesh_of({{"dp", 2}, {"tp", 2}}));
  good.tensors.push_back(tensor_of("a", DType::f32, {4, 4}, {Shard{0}, Replicate{}}));
  good.tensors.push_back(tensor_of("b", DType::f32, {4, 4}, {Shard{0}, Shard{1}}));
  EXPECT_NO_THROW(validate(good));
  const auto refuses = [&](auto change, const char* part) {
    CheckpointIndex index = good;
    change(index);
    try {
      validate(index);
      ADD_FAILURE() << "accepted: " << part;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refuses([](CheckpointIndex& index) { index.sizes.block_bytes = 2048; }, "block_bytes 2048");
  refuses([](CheckpointIndex& index) { index.sizes.block_bytes = 5000; }, "powers of two");
  refuses([](CheckpointIndex& index) { index.sizes.segment_align = 4096; }, "segment_align 4096");
  refuses([](CheckpointIndex& index) { index.sizes.segment_align = 3 << 20; }, "powers of two");
  refuses([](CheckpointIndex& index) { index.sizes.segment_align = std::int64_t{1} << 31; },
          "segment_align <= 1073741824");
  refuses([](CheckpointIndex& index) { index.sizes.split_bytes = -1; }, "split_bytes -1");
  refuses([](CheckpointIndex& index) { index.world_size = 0; }, "world size 0");
  refuses([](CheckpointIndex& index) { index.world_size = 3; }, "rank 3");
  refuses([](CheckpointIndex& index) { index.meshes[0].roles.pop_back(); }, "axis roles");
  refuses([](CheckpointIndex& index) { index.tensors[0].name.clear(); }, "no name");
  refuses([](CheckpointIndex& index) { index.tensors[1].mesh = 1; }, "mesh 1");
  refuses([](CheckpointIndex& index) { index.tensors[1].spec.placements[0] = Partial{}; }, "redistribute");
  refuses([](CheckpointIndex& index) { index.tensors[1].spec.placements[0] = Shard{2}; }, "\"b\"");
  refuses([](CheckpointIndex& index) { index.tensors[1].spec.shape[0] = -1; }, "\"b\"");
  refuses(
      [](CheckpointIndex& index) {
        index.tensors[1].spec.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40};
      },
      "\"b\"");
  // Each fits into 64 bits, but sums and doubled positions would not.
  refuses([](CheckpointIndex& index) { index.tensors[1].spec.shape = {std::int64_t{1} << 59, 2}; }, "\"b\"");
  refuses(
      [](CheckpointIndex& index) {
        for (TensorEntry& tensor : index.tensors) tensor.spec.shape = {std::int64_t{1} << 56, 3};
      },
      "\"b\"");
}

TEST(ShardFileName, HasAtLeastFiveDigits) {
  EXPECT_EQ(shard_file_name(2, 4), "shard-00002-of-00004.h5");
  EXPECT_EQ(shard_file_name(123456, 1000000), "shard-123456-of-1000000.h5");
}

}  // namespace
}  // namespace fsdp2
