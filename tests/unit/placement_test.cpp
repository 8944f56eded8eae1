// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/placement.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "fsdp2/error.hpp"

namespace fsdp2 {
namespace {

using Rows = std::vector<std::int64_t>;

// Python's [rows[i:i+length] for i in range(0, len(rows), length)], padded with empty lists: torch.chunk on a list.
std::vector<Rows> chunk_list(const Rows& rows, std::int64_t parts) {
  std::size_t length = rows.size() / static_cast<std::size_t>(parts);
  if (length * static_cast<std::size_t>(parts) != rows.size()) ++length;
  std::vector<Rows> pieces;
  for (std::size_t i = 0; i < rows.size(); i += length)
    pieces.emplace_back(rows.begin() + static_cast<std::ptrdiff_t>(i),
                        rows.begin() + static_cast<std::ptrdiff_t>(std::min(i + length, rows.size())));
  pieces.resize(static_cast<std::size_t>(parts));
  return pieces;
}

// The global indices that a rank holds in each dimension, by cutting explicit lists again and again.
std::vector<Rows> cut_lists(const TensorSpec& spec, const MeshSpec& mesh, const std::vector<std::size_t>& order,
                            const Shape& coordinate) {
  std::vector<Rows> lists;
  for (const std::int64_t extent : spec.shape) {
    Rows rows(static_cast<std::size_t>(extent));
    std::iota(rows.begin(), rows.end(), std::int64_t{0});
    lists.push_back(rows);
  }
  for (const std::size_t axis : order) {
    const auto part = static_cast<std::size_t>(coordinate[axis]);
    if (const auto* shard = std::get_if<Shard>(&spec.placements[axis])) {
      Rows& rows = lists[static_cast<std::size_t>(shard->dim)];
      rows = chunk_list(rows, mesh.axes()[axis].size)[part];
    } else if (const auto* ragged = std::get_if<Ragged>(&spec.placements[axis])) {
      Rows& rows = lists[static_cast<std::size_t>(ragged->dim)];
      Rows kept;
      for (const std::int64_t row : rows)
        if (row >= ragged->bounds[part] && row < ragged->bounds[part + 1]) kept.push_back(row);
      rows = kept;
    }
  }
  return lists;
}

bool cuts(const Placement& placement) {
  return std::holds_alternative<Shard>(placement) || std::holds_alternative<Ragged>(placement);
}

// Compares local_box with the lists on every rank, and counts how often each element is held by one replica set.
void check(const TensorSpec& spec, const MeshSpec& mesh) {
  std::vector<std::size_t> order;
  if (spec.split_order.empty())
    for (std::size_t axis = 0; axis < mesh.dimensions(); ++axis) order.push_back(axis);
  else
    for (const std::int64_t axis : spec.split_order) order.push_back(static_cast<std::size_t>(axis));

  std::vector<int> held(static_cast<std::size_t>(numel(spec.shape)), 0);
  for (std::int64_t rank = 0; rank < mesh.size(); ++rank) {
    const Shape coordinate = mesh.coordinate_of(rank);
    const Box box = local_box(spec, mesh, coordinate);
    const std::vector<Rows> lists = cut_lists(spec, mesh, order, coordinate);
    bool matches = box.offset.size() == spec.shape.size() && box.extent.size() == spec.shape.size();
    for (std::size_t d = 0; matches && d < spec.shape.size(); ++d) {
      matches = box.extent[d] == static_cast<std::int64_t>(lists[d].size()) && box.offset[d] >= 0 &&
                box.offset[d] + box.extent[d] <= spec.shape[d];
      std::int64_t row = box.offset[d];
      for (const std::int64_t listed : lists[d]) matches = matches && listed == row++;  // a shard is one interval
    }
    ASSERT_TRUE(matches) << "rank " << rank << " has box " << to_string(box.offset) << " + " << to_string(box.extent);
    bool is_first_replica = true;
    for (std::size_t axis = 0; axis < mesh.dimensions(); ++axis)
      is_first_replica = is_first_replica && (cuts(spec.placements[axis]) || coordinate[axis] == 0);
    if (is_first_replica)
      for (RunCursor cursor = runs_of(spec.shape, box); !cursor.is_done(); cursor.next())
        for (std::int64_t i = 0; i < cursor.run().count; ++i) ++held[static_cast<std::size_t>(cursor.run().from + i)];
  }
  const auto wrong = std::find_if(held.begin(), held.end(), [](int count) { return count != 1; });
  ASSERT_EQ(wrong, held.end()) << "element " << wrong - held.begin() << " is held " << *wrong << " times";
}

// Compares for_each_holder with the boxes of all ranks.
void check_holders(const TensorSpec& spec, const MeshSpec& mesh, const Box& wanted) {
  std::vector<std::int64_t> expected;
  for (std::int64_t rank = 0; rank < mesh.size(); ++rank)
    if (intersect(local_box(spec, mesh, mesh.coordinate_of(rank)), wanted).numel() > 0) expected.push_back(rank);
  std::vector<std::int64_t> found;
  for_each_holder(spec, mesh, wanted, [&](const Shape& coordinate) { found.push_back(mesh.rank_at(coordinate)); });
  std::sort(found.begin(), found.end());
  ASSERT_EQ(found, expected) << "for " << to_string(wanted.offset) << " + " << to_string(wanted.extent);
}
void check_holders(const TensorSpec& spec, const MeshSpec& mesh) {
  check_holders(spec, mesh, Box::whole(spec.shape));
  for (std::int64_t rank = 0; rank < mesh.size(); ++rank) {
    Box box = local_box(spec, mesh, mesh.coordinate_of(rank));
    check_holders(spec, mesh, box);
    for (std::size_t d = 0; d < box.extent.size(); ++d) {  // over its edge, from the middle on
      const std::int64_t end = std::min(box.offset[d] + box.extent[d] + 1, spec.shape[d]);
      box.offset[d] += box.extent[d] / 2;
      box.extent[d] = end - box.offset[d];
    }
    check_holders(spec, mesh, box);
  }
}

std::string describe(const TensorSpec& spec, const MeshSpec& mesh) {
  std::string text =
      to_string(spec.shape) + " on " + mesh.to_string() + ", order " + to_string(split_order(spec)) + ":";
  for (const Placement& placement : spec.placements) text += " " + to_string(placement);
  return text;
}

// Uneven bounds: all rows first, all rows last, and widths that differ everywhere.
std::vector<std::vector<std::int64_t>> ragged_bounds(std::int64_t extent, std::int64_t parts) {
  std::vector<std::vector<std::int64_t>> all;
  std::vector<std::int64_t> first(static_cast<std::size_t>(parts) + 1, extent);
  first.front() = 0;
  std::vector<std::int64_t> last(static_cast<std::size_t>(parts) + 1, 0);
  last.back() = extent;
  std::vector<std::int64_t> mixed = first;
  for (std::size_t i = 1; i < static_cast<std::size_t>(parts); ++i)
    mixed[i] = std::min(extent, mixed[i - 1] + static_cast<std::int64_t>(3 * i % 4));
  all.push_back(mixed);
  if (first != mixed) all.push_back(first);
  if (last != mixed && last != first) all.push_back(last);
  return all;
}

// Checks all placements of a shape on a mesh in one split order. Ragged cuts that are not the first of their dimension
// must be refused. Returns how many specs were checked.
std::int64_t check_all_placements(const Shape& shape, const MeshSpec& mesh, const std::vector<std::int64_t>& order,
                                  bool all_bounds) {
  std::int64_t checked = 0;
  TensorSpec spec{DType::f32, shape, {}, order};
  auto place = [&](auto& self, std::size_t axis) -> void {
    if (axis < mesh.dimensions()) {
      std::vector<Placement> choices{Replicate{}};
      for (std::size_t d = 0; d < shape.size(); ++d) {
        const auto dim = static_cast<std::int64_t>(d);
        choices.emplace_back(Shard{dim});
        auto bounds = ragged_bounds(shape[d], mesh.axes()[axis].size);
        if (!all_bounds) bounds.resize(1);
        for (auto& b : bounds) choices.emplace_back(Ragged{dim, std::move(b)});
      }
      for (const Placement& choice : choices) {
        spec.placements.push_back(choice);
        self(self, axis + 1);
        spec.placements.pop_back();
        if (::testing::Test::HasFatalFailure()) return;
      }
      return;
    }
    bool is_valid = true;
    std::vector<bool> is_cut(shape.size(), false);
    for (const std::int64_t a : split_order(spec)) {
      const Placement& placement = spec.placements[static_cast<std::size_t>(a)];
      const auto* ragged = std::get_if<Ragged>(&placement);
      if (ragged != nullptr && is_cut[static_cast<std::size_t>(ragged->dim)]) is_valid = false;
      if (ragged != nullptr) is_cut[static_cast<std::size_t>(ragged->dim)] = true;
      if (const auto* shard = std::get_if<Shard>(&placement)) is_cut[static_cast<std::size_t>(shard->dim)] = true;
    }
    if (!is_valid) {
      ASSERT_THROW(validate(spec, mesh, "w"), ConfigError) << describe(spec, mesh);
      return;
    }
    ASSERT_NO_THROW(validate(spec, mesh, "w")) << describe(spec, mesh);
    check(spec, mesh);
    check_holders(spec, mesh);
    if (::testing::Test::HasFatalFailure()) FAIL() << describe(spec, mesh);
    ++checked;
  };
  place(place, 0);
  return checked;
}

TEST(LocalBox, OneDimensionalMeshes) {
  for (std::int64_t ranks = 1; ranks <= 8; ++ranks)
    for (std::int64_t extent = 0; extent <= 17; ++extent)
      ASSERT_GT(check_all_placements({extent}, MeshSpec({{"dp", ranks}}), {}, true), 2);
}

TEST(LocalBox, TwoDimensionalMeshesBothSplitOrders) {
  std::int64_t checked = 0;
  for (std::int64_t dp = 1; dp <= 4; ++dp)
    for (std::int64_t tp = 1; tp <= 4; ++tp) {
      const MeshSpec mesh({{"dp", dp}, {"tp", tp}});
      for (const std::vector<std::int64_t>& order : {std::vector<std::int64_t>{}, {1, 0}})
        for (std::int64_t extent = 0; extent <= 17; ++extent)
          ASSERT_GT(checked += check_all_placements({extent}, mesh, order, true), 0);
      for (const std::vector<std::int64_t>& order : {std::vector<std::int64_t>{0, 1}, {1, 0}})
        for (std::int64_t rows = 0; rows <= 17; ++rows)
          for (const std::int64_t columns : {0, 1, 6, 17})
            ASSERT_GT(checked += check_all_placements({rows, columns}, mesh, order, false), 0);
    }
  EXPECT_GT(checked, 50000);
}

TEST(LocalBox, ThreeDimensionalMeshesAllSplitOrders) {
  for (const auto& [a, b, c] : {std::array<std::int64_t, 3>{2, 2, 2}, {2, 1, 3}, {3, 2, 2}, {1, 4, 2}}) {
    const MeshSpec mesh({{"a", a}, {"b", b}, {"c", c}});
    std::vector<std::int64_t> order{0, 1, 2};
    do {
      for (const std::int64_t extent : {1, 7, 13}) ASSERT_GT(check_all_placements({extent, 3}, mesh, order, false), 0);
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST(LocalBox, OtherRanksOfTensors) {
  const MeshSpec mesh({{"dp", 2}, {"tp", 3}});
  for (const Shape& shape : {Shape{}, Shape{3, 0, 5}, Shape{1, 1, 1}, Shape{2, 3, 4, 5}})
    for (const std::vector<std::int64_t>& order : {std::vector<std::int64_t>{0, 1}, {1, 0}})
      ASSERT_GT(check_all_placements(shape, mesh, order, true), 0);
}

TEST(LocalBox, RankListMovesRanksNotBoxes) {
  const MeshSpec mesh({{"dp", 4}}, {3, 1, 0, 2});
  const TensorSpec spec{DType::f32, {10}, {Shard{0}}, {}};
  EXPECT_EQ(local_box(spec, mesh, mesh.coordinate_of(3)), (Box{{0}, {3}}));
  EXPECT_EQ(local_box(spec, mesh, mesh.coordinate_of(2)), (Box{{9}, {1}}));
}

TEST(LocalBox, PartialDoesNotCut) {
  const MeshSpec mesh({{"dp", 2}, {"tp", 2}});
  const TensorSpec spec{DType::f32, {5}, {Partial{ReduceOp::max}, Shard{0}}, {}};
  EXPECT_NO_THROW(validate(spec, mesh, "w"));
  for (std::int64_t dp = 0; dp < 2; ++dp) {
    EXPECT_EQ(local_box(spec, mesh, {dp, 0}), (Box{{0}, {3}}));
    EXPECT_EQ(local_box(spec, mesh, {dp, 1}), (Box{{3}, {2}}));
  }
}

// FSDP after tensor parallelism on the same dimension, as PyTorch's fully_shard lays it out: the mesh is written
// (dp, tp), tp cuts first.
TEST(LocalBox, TensorParallelCutsBeforeFsdp) {
  const MeshSpec mesh({{"dp", 2}, {"tp", 2}});
  const TensorSpec even{DType::f32, {8}, {Shard{0}, Shard{0}}, {1, 0}};
  EXPECT_EQ(local_box(even, mesh, {0, 0}), (Box{{0}, {2}}));
  EXPECT_EQ(local_box(even, mesh, {1, 0}), (Box{{2}, {2}}));
  EXPECT_EQ(local_box(even, mesh, {0, 1}), (Box{{4}, {2}}));
  EXPECT_EQ(local_box(even, mesh, {1, 1}), (Box{{6}, {2}}));

  TensorSpec plain = even;
  plain.split_order = {};
  EXPECT_EQ(local_box(plain, mesh, {1, 0}), (Box{{4}, {2}}));
  EXPECT_EQ(local_box(plain, mesh, {0, 1}), (Box{{2}, {2}}));

  const TensorSpec uneven{DType::f32, {5}, {Shard{0}, Shard{0}}, {1, 0}};
  EXPECT_EQ(local_box(uneven, mesh, {0, 0}), (Box{{0}, {2}}));
  EXPECT_EQ(local_box(uneven, mesh, {1, 0}), (Box{{2}, {1}}));
  EXPECT_EQ(local_box(uneven, mesh, {0, 1}), (Box{{3}, {1}}));
  EXPECT_EQ(local_box(uneven, mesh, {1, 1}), (Box{{4}, {1}}));
}

TEST(LocalBox, FlattenedAxisIsNotNestedSharding) {
  const MeshSpec nested({{"a", 2}, {"b", 2}});
  const MeshSpec flat = nested.flatten({"a", "b"}, "ab");
  const TensorSpec nested_spec{DType::f32, {5}, {Shard{0}, Shard{0}}, {}};
  const TensorSpec flat_spec{DType::f32, {5}, {Shard{0}}, {}};
  std::vector<Box> nested_boxes;
  std::vector<Box> flat_boxes;
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    nested_boxes.push_back(local_box(nested_spec, nested, nested.coordinate_of(rank)));
    flat_boxes.push_back(local_box(flat_spec, flat, flat.coordinate_of(rank)));
  }
  EXPECT_EQ(nested_boxes, (std::vector<Box>{{{0}, {2}}, {{2}, {1}}, {{3}, {1}}, {{4}, {1}}}));
  EXPECT_EQ(flat_boxes, (std::vector<Box>{{{0}, {2}}, {{2}, {2}}, {{4}, {1}}, {{5}, {0}}}));
}

TEST(Placement, Text) {
  EXPECT_EQ(to_string(Placement{Replicate{}}), "Replicate");
  EXPECT_EQ(to_string(Placement{Shard{1}}), "Shard(1)");
  EXPECT_EQ(to_string(Placement{Ragged{2, {0, 4}}}), "Ragged(2)");
  EXPECT_EQ(to_string(Placement{Partial{}}), "Partial(sum)");
  EXPECT_EQ(to_string(Placement{Partial{ReduceOp::min}}), "Partial(min)");
  EXPECT_EQ(to_string(Placement{Partial{ReduceOp::max}}), "Partial(max)");
}

TEST(Placement, ReductionCodesAreThoseOfTheFormat) {
  EXPECT_EQ(static_cast<int>(ReduceOp::sum), 0);
  EXPECT_EQ(static_cast<int>(ReduceOp::min), 1);
  EXPECT_EQ(static_cast<int>(ReduceOp::max), 2);
}

TEST(TensorSpec, BytesAndSplitOrder) {
  EXPECT_EQ((TensorSpec{DType::bf16, {5, 17}, {}, {}}.bytes()), 170);
  EXPECT_EQ((TensorSpec{DType::complex128, {}, {}, {}}.bytes()), 16);
  EXPECT_THROW((TensorSpec{DType::f64, {std::int64_t{1} << 60}, {}, {}}.bytes()), ShapeError);
  EXPECT_EQ(split_order({DType::f32, {4}, {Shard{0}, Shard{0}, Replicate{}}, {}}),
            (std::vector<std::int64_t>{0, 1, 2}));
  EXPECT_EQ(split_order({DType::f32, {4}, {Shard{0}, Shard{0}}, {1, 0}}), (std::vector<std::int64_t>{1, 0}));
}

template <class ErrorType>
void expect_invalid(const TensorSpec& spec, const MeshSpec& mesh, const std::vector<std::string>& parts) {
  try {
    validate(spec, mesh, "layers.0.weight");
    ADD_FAILURE() << "accepted " << describe(spec, mesh);
  } catch (const ErrorType& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("\"layers.0.weight\""), std::string::npos) << message;
    for (const std::string& part : parts)
      EXPECT_NE(message.find(part), std::string::npos) << message << " lacks " << part;
  }
}

TEST(Validate, NamesTheTensorAndWhatIsWrong) {
  const MeshSpec mesh({{"dp", 2}, {"tp", 3}});
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  const Placement rows = Shard{0};
  const Placement all = Replicate{};

  expect_invalid<ConfigError>({DType::f32, {4}, {}, {}}, mesh, {"0 placements", "dp=2,tp=3", "2 axes"});
  expect_invalid<ConfigError>({DType::f32, {4}, {rows}, {}}, mesh, {"1 placements", "2 axes"});
  expect_invalid<ConfigError>({DType::f32, {4}, {rows, rows, all}, {}}, mesh, {"3 placements"});

  expect_invalid<ShapeError>({DType::f32, {4, 5}, {Shard{2}, all}, {}}, mesh, {"Shard(2)", "\"dp\"", "[4, 5]"});
  expect_invalid<ShapeError>({DType::f32, {4, 5}, {all, Shard{-1}}, {}}, mesh, {"Shard(-1)", "\"tp\""});
  expect_invalid<ShapeError>({DType::f32, {}, {rows, all}, {}}, mesh, {"Shard(0)", "[]", "0 dimensions"});
  expect_invalid<ShapeError>({DType::f32, {4}, {Ragged{1, {0, 2, 4}}, all}, {}}, mesh, {"Ragged(1)", "\"dp\""});

  expect_invalid<ConfigError>({DType::f32, {4}, {rows, rows}, {0}}, mesh, {"1 axes"});
  expect_invalid<ConfigError>({DType::f32, {4}, {rows, rows}, {0, 1, 0}}, mesh, {"3 axes"});
  expect_invalid<ConfigError>({DType::f32, {4}, {rows, rows}, {0, 0}}, mesh, {"[0, 0]", "permutation"});
  expect_invalid<ConfigError>({DType::f32, {4}, {rows, rows}, {1, 2}}, mesh, {"[1, 2]", "permutation"});
  expect_invalid<ConfigError>({DType::f32, {4}, {rows, rows}, {-1, 0}}, mesh, {"[-1, 0]", "permutation"});
  expect_invalid<ConfigError>({DType::f32, {4}, {rows, rows}, {huge, 0}}, mesh, {"permutation"});

  expect_invalid<ShapeError>({DType::f32, {-4}, {rows, rows}, {}}, mesh, {"[-4]", "negative"});
  expect_invalid<ShapeError>({DType::f32, {huge, 2}, {rows, rows}, {}}, mesh, {std::to_string(huge)});
  expect_invalid<ShapeError>({DType::f32, {std::int64_t{1} << 61}, {rows, rows}, {}}, mesh, {"overflows"});
  expect_invalid<ShapeError>({DType::f32, {0, huge, 2}, {rows, rows}, {}}, mesh, {"[0, "});
}

TEST(Validate, RaggedBounds) {
  const MeshSpec mesh({{"dp", 2}, {"tp", 3}});
  const auto spec = [](std::vector<std::int64_t> bounds) {
    return TensorSpec{DType::f32, {6, 4}, {Ragged{0, std::move(bounds)}, Replicate{}}, {}};
  };
  for (const auto& bounds : {std::vector<std::int64_t>{0, 2, 6}, {0, 0, 6}, {0, 6, 6}})
    EXPECT_NO_THROW(validate(spec(bounds), mesh, "w"));
  for (const auto& bounds :
       {std::vector<std::int64_t>{}, {0}, {0, 6}, {0, 2, 4, 6}, {1, 2, 6}, {0, 2, 5}, {0, 7, 6}, {0, -1, 6}})
    expect_invalid<ShapeError>(spec(bounds), mesh, {to_string(bounds), "\"dp\"", "from 0 to 6", "(2)"});

  const Placement ragged_dp = Ragged{0, {0, 2, 6}};
  const Placement ragged_tp = Ragged{0, {0, 2, 4, 6}};
  EXPECT_NO_THROW(validate({DType::f32, {6}, {ragged_dp, Shard{0}}, {}}, mesh, "w"));
  EXPECT_NO_THROW(validate({DType::f32, {6}, {Shard{0}, ragged_tp}, {1, 0}}, mesh, "w"));
  expect_invalid<ConfigError>({DType::f32, {6}, {Shard{0}, ragged_tp}, {}}, mesh, {"Ragged(0)", "\"tp\"", "first cut"});
  expect_invalid<ConfigError>({DType::f32, {6}, {ragged_dp, ragged_tp}, {}}, mesh, {"\"tp\"", "first cut"});
  expect_invalid<ConfigError>({DType::f32, {6}, {ragged_dp, ragged_tp}, {1, 0}}, mesh, {"\"dp\"", "first cut"});

  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  expect_invalid<ShapeError>({DType::f32, {6}, {Ragged{0, {0, 6}}}, {}}, MeshSpec({{"dp", huge}}),
                             {std::to_string(huge)});
}

}  // namespace
}  // namespace fsdp2
