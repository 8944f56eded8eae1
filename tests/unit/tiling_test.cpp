// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/tiling.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace fsdp2::checkpoint {
namespace {

bool tile(const std::vector<Box>& boxes, const Shape& shape) {
  Tiling tiling;
  for (const Box& box : boxes) tiling.add(box);
  return tiling.is_exact(shape);
}

/// Cuts at random places until there are `count` boxes, or none that can be cut.
std::vector<Box> cut_at_random(const Shape& shape, std::size_t count, std::mt19937& random) {
  std::vector<Box> boxes{Box::whole(shape)};
  for (int tries = 0; boxes.size() < count && tries < 1000; ++tries) {
    const std::size_t b = random() % boxes.size();
    const std::size_t d = random() % shape.size();
    if (boxes[b].extent[d] < 2) continue;
    const std::int64_t rows = 1 + static_cast<std::int64_t>(random()) % (boxes[b].extent[d] - 1);
    Box rest = boxes[b];
    rest.offset[d] += rows;
    rest.extent[d] -= rows;
    boxes[b].extent[d] = rows;
    boxes.push_back(rest);
  }
  std::shuffle(boxes.begin(), boxes.end(), random);
  return boxes;
}

/// How often each element is in a box: slow, and right.
bool tile_by_counting(const std::vector<Box>& boxes, const Shape& shape) {
  std::vector<int> held(static_cast<std::size_t>(numel(shape)), 0);
  for (const Box& box : boxes)
    for (RunCursor cursor = runs_of(shape, box); !cursor.is_done(); cursor.next())
      for (std::int64_t i = 0; i < cursor.run().count; ++i) ++held[static_cast<std::size_t>(cursor.run().from + i)];
  return std::all_of(held.begin(), held.end(), [](int count) { return count == 1; });
}

TEST(Tiling, TellsTilesFromOthers) {
  std::mt19937 random(1);
  int exact = 0;
  int wrong = 0;
  for (const Shape& shape : {Shape{7}, Shape{5, 6}, Shape{3, 4, 5}, Shape{2, 3, 2, 3}})
    for (int trial = 0; trial < 2000; ++trial) {
      std::vector<Box> boxes = cut_at_random(shape, 1 + random() % 8, random);
      EXPECT_TRUE(tile(boxes, shape));
      for (std::uint32_t change = random() % 4; change > 0; --change) {  // mostly of the same number of elements
        Box& box = boxes[random() % boxes.size()];
        const std::size_t d = random() % shape.size();
        if (random() % 2 == 0 && box.offset[d] > 0) --box.offset[d];
        if (random() % 2 == 0 && box.offset[d] + box.extent[d] < shape[d]) ++box.extent[d];
        if (random() % 4 == 0) boxes.push_back(boxes[random() % boxes.size()]);
        if (random() % 4 == 0 && boxes.size() > 1) boxes.pop_back();
      }
      const bool expected = tile_by_counting(boxes, shape);
      ++(expected ? exact : wrong);
      EXPECT_EQ(tile(boxes, shape), expected);
    }
  EXPECT_GT(exact, 1000);
  EXPECT_GT(wrong, 1000);
}

TEST(Tiling, ScalarsAndEmptyArrays) {
  EXPECT_TRUE(tile({Box::whole({})}, {}));
  EXPECT_FALSE(tile({}, {}));
  EXPECT_FALSE(tile({Box::whole({}), Box::whole({})}, {}));
  EXPECT_TRUE(tile({}, {3, 0}));
}

}  // namespace
}  // namespace fsdp2::checkpoint
