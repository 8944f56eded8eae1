// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "philox.hpp"

#include <gtest/gtest.h>

#include <array>

namespace fsdp2 {
namespace {

std::array<std::uint32_t, 4> words(std::uint64_t key, std::uint64_t low, std::uint64_t high) {
  const PhiloxBlock block = philox(key, low, high);
  return {block.word[0], block.word[1], block.word[2], block.word[3]};
}

using Words = std::array<std::uint32_t, 4>;

// The known answers that accompany the paper's reference code.
TEST(PhiloxTest, KnownAnswers) {
  EXPECT_EQ(words(0, 0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(words(~0ull, ~0ull, ~0ull), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(words(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

}  // namespace
}  // namespace fsdp2
