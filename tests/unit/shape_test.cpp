// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/shape.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "fsdp2/error.hpp"

namespace fsdp2 {
namespace {

constexpr std::int64_t max = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t min = std::numeric_limits<std::int64_t>::min();

// torch.chunk on explicit rows: pieces of the smallest length that fits all rows into `parts` pieces, cut off the front
// of the list until nothing is left, and then empty ones.
std::vector<std::vector<std::int64_t>> torch_chunk(std::int64_t extent, std::int64_t parts) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(extent));
  std::iota(rows.begin(), rows.end(), std::int64_t{0});
  std::int64_t length = 0;
  while (length * parts < extent) ++length;
  std::vector<std::vector<std::int64_t>> pieces;
  auto next = rows.begin();
  for (std::int64_t part = 0; part < parts; ++part) {
    std::vector<std::int64_t> piece;
    while (next != rows.end() && static_cast<std::int64_t>(piece.size()) < length) piece.push_back(*next++);
    pieces.push_back(piece);
  }
  return pieces;
}

std::vector<std::int64_t> sizes(std::int64_t extent, std::int64_t parts) {
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i < parts; ++i) result.push_back(chunk(extent, parts, i).size());
  return result;
}

TEST(Chunk, EqualsTorchChunkOnExplicitRows) {
  for (std::int64_t extent = 0; extent <= 17; ++extent)
    for (std::int64_t parts = 1; parts <= 8; ++parts) {
      const auto pieces = torch_chunk(extent, parts);
      EXPECT_EQ(chunk_size(extent, parts), static_cast<std::int64_t>(pieces[0].size()));
      for (std::int64_t i = 0; i < parts; ++i) {
        const Range range = chunk(extent, parts, i);
        std::vector<std::int64_t> rows;
        for (std::int64_t row = range.begin; row < range.end; ++row) rows.push_back(row);
        EXPECT_EQ(rows, pieces[static_cast<std::size_t>(i)]) << extent << " over " << parts << ", part " << i;
      }
    }
}

TEST(Chunk, TilesExactlyWithShortPartsAtTheTailOnly) {
  for (std::int64_t extent = 0; extent <= 100; ++extent)
    for (std::int64_t parts = 1; parts <= 40; ++parts) {
      std::int64_t end = 0;
      std::int64_t previous = chunk_size(extent, parts);
      for (std::int64_t i = 0; i < parts; ++i) {
        const Range range = chunk(extent, parts, i);
        ASSERT_EQ(range.begin, end) << "an empty part, too, begins where the part before it ends";
        ASSERT_GE(range.size(), 0);
        ASSERT_LE(range.size(), previous);
        ASSERT_TRUE(i == 0 || range.size() == 0 || previous == chunk_size(extent, parts))
            << "only the last may be short";
        previous = range.size();
        end = range.end;
      }
      ASSERT_EQ(end, extent);
    }
}

TEST(Chunk, DocumentedExamples) {
  using Sizes = std::vector<std::int64_t>;
  EXPECT_EQ(sizes(10, 4), (Sizes{3, 3, 3, 1}));
  EXPECT_EQ(sizes(9, 8), (Sizes{2, 2, 2, 2, 1, 0, 0, 0}));
  EXPECT_EQ(sizes(5, 4), (Sizes{2, 2, 1, 0}));
  EXPECT_EQ(sizes(17, 8), (Sizes{3, 3, 3, 3, 3, 2, 0, 0}));
  EXPECT_EQ(sizes(1, 8), (Sizes{1, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(sizes(0, 3), (Sizes{0, 0, 0}));
}

TEST(Chunk, HugeExtentsAndPartsDoNotOverflow) {
  for (const std::int64_t extent : {max, max - 1, max / 2 + 1, std::int64_t{1} << 62})
    for (const std::int64_t parts :
         {std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, std::int64_t{7}, std::int64_t{1000}}) {
      std::int64_t end = 0;
      for (std::int64_t i = 0; i < parts; ++i) {
        const Range range = chunk(extent, parts, i);
        ASSERT_EQ(range.begin, end);
        ASSERT_LE(range.size(), chunk_size(extent, parts));
        end = range.end;
      }
      EXPECT_EQ(end, extent);
    }
  EXPECT_EQ(chunk_size(max, 2), max / 2 + 1);
  EXPECT_EQ(chunk(max, 2, 1), (Range{max / 2 + 1, max}));
  EXPECT_EQ(chunk(max, max, max - 1), (Range{max - 1, max}));
  EXPECT_EQ(chunk(max - 1, max, max - 1), (Range{max - 1, max - 1}));
  // 2 rows each: the parts of the upper half lie beyond the end, and index·rows beyond 64 bits
  EXPECT_EQ(chunk(max, max - 1, max - 2), (Range{max, max}));
  EXPECT_EQ(chunk(max, max - 1, max / 2), (Range{max - 1, max}));
  EXPECT_EQ(chunk(5, max, 4), (Range{4, 5}));
  EXPECT_EQ(chunk(5, max, max - 1), (Range{5, 5}));
  EXPECT_EQ(chunk(0, max, max - 1), (Range{0, 0}));
}

TEST(Chunk, RefusesWhatIsNoPart) {
  EXPECT_THROW(chunk(-1, 4, 0), ShapeError);
  EXPECT_THROW(chunk(min, 4, 0), ShapeError);
  EXPECT_THROW(chunk(4, 0, 0), ShapeError);
  EXPECT_THROW(chunk(4, -1, 0), ShapeError);
  EXPECT_THROW(chunk(4, 4, 4), ShapeError);
  EXPECT_THROW(chunk(4, 4, -1), ShapeError);
  EXPECT_THROW(chunk_size(-1, 1), ShapeError);
  EXPECT_THROW(chunk_size(1, 0), ShapeError);
}

TEST(CheckedArithmetic, IsExactOrThrows) {
  EXPECT_EQ(checked_multiply(max, 1), max);
  EXPECT_EQ(checked_multiply(std::int64_t{1} << 31, std::int64_t{1} << 31), std::int64_t{1} << 62);
  EXPECT_EQ(checked_multiply(max, 0), 0);
  EXPECT_EQ(checked_multiply(min, 1), min);
  EXPECT_THROW(checked_multiply(std::int64_t{1} << 32, std::int64_t{1} << 31), ShapeError);
  EXPECT_THROW(checked_multiply(max, 2), ShapeError);
  EXPECT_THROW(checked_multiply(min, -1), ShapeError);
  EXPECT_EQ(checked_add(max, 0), max);
  EXPECT_EQ(checked_add(max, min), -1);
  EXPECT_THROW(checked_add(max, 1), ShapeError);
  EXPECT_THROW(checked_add(min, -1), ShapeError);
}

TEST(CheckedArithmetic, AlignUpIsTheSmallestMultiple) {
  for (std::int64_t alignment = 1; alignment <= 70; ++alignment)
    for (std::int64_t value = 0; value <= 300; ++value) {
      const std::int64_t aligned = align_up(value, alignment);
      ASSERT_EQ(aligned % alignment, 0);
      ASSERT_GE(aligned, value);
      ASSERT_LT(aligned - value, alignment);
    }
  EXPECT_EQ(align_up(max, 1), max);
  EXPECT_EQ(align_up(max, 7), max) << "2^63-1 is a multiple of 7: nothing overflows";
  EXPECT_EQ(align_up(max - 6, 7), max);
  EXPECT_EQ(align_up(1, max), max);
  EXPECT_EQ(align_up(max - 63, 64), max - 63);
  EXPECT_THROW(align_up(max - 62, 64), ShapeError);
  EXPECT_THROW(align_up(max, 2), ShapeError);
}

TEST(Numel, CountsChecksAndOverflows) {
  EXPECT_EQ(numel({}), 1);
  EXPECT_EQ(numel({0}), 0);
  EXPECT_EQ(numel({7}), 7);
  EXPECT_EQ(numel({3, 0, 5}), 0);
  EXPECT_EQ(numel({5, 17}), 85);
  EXPECT_EQ(numel({max}), max);
  EXPECT_EQ(numel({max, 1, 1}), max);
  EXPECT_EQ(numel({std::int64_t{1} << 31, std::int64_t{1} << 31}), std::int64_t{1} << 62);
  EXPECT_THROW(numel({std::int64_t{1} << 32, std::int64_t{1} << 31}), ShapeError);
  EXPECT_THROW(numel({max, 2}), ShapeError);
  EXPECT_THROW(numel({max, max, max}), ShapeError);
  EXPECT_THROW(numel({-1}), ShapeError);
  EXPECT_THROW(numel({min}), ShapeError);
  EXPECT_THROW(numel({-2, -3}), ShapeError);
  // a zero extent hides neither a negative extent nor strides that overflow
  EXPECT_THROW(numel({0, -1}), ShapeError);
  EXPECT_THROW(numel({-1, 0}), ShapeError);
  EXPECT_THROW(numel({0, max, 2}), ShapeError);
  EXPECT_THROW(numel({max, 0, 2}), ShapeError);
}

TEST(Numel, MessagesShowTheShape) {
  EXPECT_EQ(to_string(Shape{}), "[]");
  EXPECT_EQ(to_string(Shape{5, 17}), "[5, 17]");
  try {
    numel({5, -17});
    ADD_FAILURE();
  } catch (const ShapeError& error) {
    EXPECT_NE(std::string(error.what()).find("[5, -17]"), std::string::npos) << error.what();
  }
}

// All intervals of [0, extent), the empty ones at every position included.
std::vector<Range> all_ranges(std::int64_t extent) {
  std::vector<Range> ranges;
  for (std::int64_t begin = 0; begin <= extent; ++begin)
    for (std::int64_t end = begin; end <= extent; ++end) ranges.push_back({begin, end});
  return ranges;
}

// Calls f with every list of one entry from each of `choices`.
template <class T, class F>
void for_each_combination(const std::vector<std::vector<T>>& choices, F&& f) {
  std::vector<T> chosen;
  auto descend = [&](auto& self) -> void {
    if (chosen.size() == choices.size()) return f(chosen);
    for (const T& choice : choices[chosen.size()]) {
      chosen.push_back(choice);
      self(self);
      chosen.pop_back();
    }
  };
  descend(descend);
}

template <class F>
void for_each_shape(std::size_t rank, std::int64_t largest, F&& f) {
  std::vector<std::int64_t> extents;
  for (std::int64_t extent = 0; extent <= largest; ++extent) extents.push_back(extent);
  for_each_combination(std::vector<std::vector<std::int64_t>>(rank, extents), f);
}

Box box_of(const std::vector<Range>& ranges) {
  Box box;
  for (const Range& range : ranges) {
    box.offset.push_back(range.begin);
    box.extent.push_back(range.size());
  }
  return box;
}

using Runs = std::vector<Run>;

Runs collect(RunCursor cursor) {
  Runs runs;
  for (; !cursor.is_done(); cursor.next()) runs.push_back(cursor.run());
  return runs;
}

Runs collect_runs(const Shape& shape, const Box& box) {
  return collect(runs_of(shape, box));
}

// Visits the elements of the tensor in order, asks of each whether it is in the box, and joins neighbours.
Runs runs_by_enumeration(const Shape& shape, const Box& box) {
  Runs runs;
  std::int64_t tensor_index = 0;
  std::int64_t box_index = 0;
  Shape index(shape.size(), 0);
  auto walk = [&](auto& self, std::size_t d) -> void {
    if (d < shape.size()) {
      for (index[d] = 0; index[d] < shape[d]; ++index[d]) self(self, d + 1);
      return;
    }
    bool inside = true;
    for (std::size_t i = 0; i < shape.size(); ++i)
      inside = inside && index[i] >= box.offset[i] && index[i] < box.offset[i] + box.extent[i];
    if (inside) {
      if (!runs.empty() && runs.back().from + runs.back().count == tensor_index)
        ++runs.back().count;
      else
        runs.push_back({tensor_index, box_index, 1});
      ++box_index;
    }
    ++tensor_index;
  };
  walk(walk, 0);
  return runs;
}

TEST(RunCursor, EqualsEnumerationForAllBoxesOfAllSmallShapes) {
  const std::int64_t largest[] = {0, 8, 5, 3, 3};
  std::int64_t boxes = 0;
  for (std::size_t rank = 0; rank <= 4; ++rank)
    for_each_shape(rank, largest[rank], [&](const Shape& shape) {
      std::vector<std::vector<Range>> choices;
      for (const std::int64_t extent : shape) choices.push_back(all_ranges(extent));
      for_each_combination(choices, [&](const std::vector<Range>& ranges) {
        const Box box = box_of(ranges);
        const Runs found = collect_runs(shape, box);
        ASSERT_EQ(found, runs_by_enumeration(shape, box))
            << "shape " << to_string(shape) << " box " << to_string(box.offset) << " + " << to_string(box.extent);
        ASSERT_TRUE(
            std::all_of(found.begin(), found.end(), [&](const auto& run) { return run.count == found[0].count; }));
        ++boxes;
      });
    });
  EXPECT_GT(boxes, 100000);
}

TEST(RunCursor, NeedsNoElementsInMemory) {
  constexpr std::int64_t row = std::int64_t{1} << 22;
  constexpr std::int64_t start = (std::int64_t{1} << 39) * row + 5;
  EXPECT_EQ(collect_runs({std::int64_t{1} << 40, row}, {{std::int64_t{1} << 39, 5}, {2, 7}}),
            (Runs{{start, 0, 7}, {start + row, 7, 7}}));
  EXPECT_EQ(collect_runs({max}, Box::whole({max})), (Runs{{0, 0, max}}));
}

// Copies a box between two arrays by runs, and element by element.
TEST(RunCursor, MovesABoxBetweenTwoArrays) {
  std::int64_t boxes = 0;
  for_each_shape(3, 3, [&](const Shape& extent) {
    if (numel(extent) == 0) return;
    std::vector<std::vector<Range>> margins(3, all_ranges(2));
    for_each_combination(margins, [&](const std::vector<Range>& before) {
      Shape from_shape(3);
      Shape to_shape(3);
      Shape from(3);
      Shape to(3);
      for (std::size_t d = 0; d < 3; ++d) {
        from[d] = before[d].begin;
        to[d] = before[d].end - before[d].begin;
        from_shape[d] = from[d] + extent[d] + (before[d].end % 2);
        to_shape[d] = to[d] + extent[d];
      }
      std::vector<std::int64_t> by_runs(static_cast<std::size_t>(numel(to_shape)), -1);
      std::vector<std::int64_t> by_elements = by_runs;
      std::int64_t last = -1;
      for (RunCursor cursor(extent, from_shape, from, to_shape, to); !cursor.is_done(); cursor.next()) {
        ASSERT_GT(cursor.run().from, last);
        last = cursor.run().from + cursor.run().count - 1;
        for (std::int64_t i = 0; i < cursor.run().count; ++i)
          by_runs[static_cast<std::size_t>(cursor.run().to + i)] = cursor.run().from + i;
      }
      const auto index = [](const Shape& shape, const Shape& start, std::int64_t i, std::int64_t j, std::int64_t k) {
        return ((start[0] + i) * shape[1] + start[1] + j) * shape[2] + start[2] + k;
      };
      for (std::int64_t i = 0; i < extent[0]; ++i)
        for (std::int64_t j = 0; j < extent[1]; ++j)
          for (std::int64_t k = 0; k < extent[2]; ++k)
            by_elements[static_cast<std::size_t>(index(to_shape, to, i, j, k))] = index(from_shape, from, i, j, k);
      ASSERT_EQ(by_runs, by_elements) << "extent " << to_string(extent);
      ++boxes;
    });
  });
  EXPECT_GT(boxes, 1000);
}

TEST(ForEachBox, TilesEveryRangeOfSmallShapes) {
  for (std::size_t rank = 0; rank <= 3; ++rank)
    for_each_shape(rank, 4, [&](const Shape& shape) {
      for (const Range& range : all_ranges(numel(shape))) {
        std::int64_t next = range.begin;
        std::size_t boxes = 0;
        for_each_box(shape, range.begin, range.end, [&](const Box& box, std::int64_t first) {
          ASSERT_EQ(first, next);
          for (const auto& run : collect_runs(shape, box)) {
            ASSERT_EQ(run.from, next);
            next += run.count;
          }
          ++boxes;
        });
        ASSERT_EQ(next, range.end);
        ASSERT_LE(boxes, rank == 0 ? 1 : 2 * rank - 1) << to_string(shape) << " " << range.begin << " " << range.end;
      }
    });
}

TEST(Box, IntersectEqualsEnumeration) {
  std::vector<Box> boxes;
  for_each_combination<Range>({all_ranges(4), all_ranges(3)},
                              [&](const std::vector<Range>& ranges) { boxes.push_back(box_of(ranges)); });
  const auto holds = [](const Box& box, std::int64_t i, std::int64_t j) {
    return i >= box.offset[0] && i < box.offset[0] + box.extent[0] && j >= box.offset[1] &&
           j < box.offset[1] + box.extent[1];
  };
  for (const Box& a : boxes)
    for (const Box& b : boxes) {
      const Box common = intersect(a, b);
      for (std::int64_t i = 0; i < 4; ++i)
        for (std::int64_t j = 0; j < 3; ++j) ASSERT_EQ(holds(common, i, j), holds(a, i, j) && holds(b, i, j));
      ASSERT_GE(*std::min_element(common.extent.begin(), common.extent.end()), 0);
    }
}

TEST(Box, WholeCoversTheTensor) {
  EXPECT_EQ(Box::whole({5, 17}), (Box{{0, 0}, {5, 17}}));
  EXPECT_EQ(Box::whole({5, 17}).numel(), 85);
  EXPECT_EQ(Box::whole({}).numel(), 1);
  EXPECT_EQ(intersect(Box::whole({}), Box::whole({})), Box::whole({}));
}

}  // namespace
}  // namespace fsdp2
