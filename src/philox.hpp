// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <Kokkos_Macros.hpp>
#include <cstdint>

namespace fsdp2 {

struct PhiloxBlock {
  std::uint32_t word[4];
};

/// Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011): 128 random bits for each
/// counter.
KOKKOS_INLINE_FUNCTION PhiloxBlock philox(std::uint64_t key, std::uint64_t counter_low, std::uint64_t counter_high) {
  auto key0 = static_cast<std::uint32_t>(key);
  auto key1 = static_cast<std::uint32_t>(key >> 32);
  PhiloxBlock block{{static_cast<std::uint32_t>(counter_low), static_cast<std::uint32_t>(counter_low >> 32),
                     static_cast<std::uint32_t>(counter_high), static_cast<std::uint32_t>(counter_high >> 32)}};
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * block.word[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * block.word[2];
    block = {{static_cast<std::uint32_t>(product1 >> 32) ^ block.word[1] ^ key0, static_cast<std::uint32_t>(product1),
              static_cast<std::uint32_t>(product0 >> 32) ^ block.word[3] ^ key1, static_cast<std::uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return block;
}

}  // namespace fsdp2
