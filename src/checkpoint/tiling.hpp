// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "fsdp2/shape.hpp"

namespace fsdp2::checkpoint {

/// Tells whether boxes tile an array, each element in exactly one of them, from one number, whatever their count: the
/// boxes' measure. A box's measure is the product over its dimensions of h(begin) - h(end), with a random number h of a
/// prime field for every position of every dimension. Such measures add up: those of tiles to that of the whole.
/// Boxes that do not tile leave a polynomial in the random numbers that is not zero, of a degree no greater than the
/// number of dimensions, so that they are mistaken for tiles with a probability of dimensions / (2^61 - 1) (Schwartz,
/// "Fast probabilistic algorithms for verification of polynomial identities", 1980).
class Tiling {
 public:
  void add(const Box& box);
  bool is_exact(const Shape& shape) const;

 private:
  std::uint64_t measure_ = 0;
};

}  // namespace fsdp2::checkpoint
