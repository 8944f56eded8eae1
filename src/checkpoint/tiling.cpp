// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/tiling.hpp"

#include <cstddef>

#include "philox.hpp"

namespace fsdp2::checkpoint {

namespace {

__extension__ using Product = unsigned __int128;

constexpr std::uint64_t prime = (std::uint64_t{1} << 61) - 1;

/// h of one position.
std::uint64_t random_number(std::size_t dimension, std::int64_t position) {
  constexpr std::uint64_t key = 0x66736470'32746c65;  // any: what is checked was not made to deceive
  const PhiloxBlock block = philox(key, static_cast<std::uint64_t>(position), dimension);
  return ((std::uint64_t{block.word[0]} << 32) | block.word[1]) % prime;
}

std::uint64_t measure(const Box& box) {
  std::uint64_t product = 1;
  for (std::size_t d = 0; d < box.extent.size(); ++d) {
    const std::uint64_t begin = random_number(d, box.offset[d]);
    const std::uint64_t end = random_number(d, box.offset[d] + box.extent[d]);
    product = static_cast<std::uint64_t>(Product{product} * (begin + prime - end) % prime);
  }
  return product;
}

}  // namespace

void Tiling::add(const Box& box) {
  measure_ = (measure_ + measure(box)) % prime;
}

bool Tiling::is_exact(const Shape& shape) const {
  return measure_ == measure(Box::whole(shape));
}

}  // namespace fsdp2::checkpoint
