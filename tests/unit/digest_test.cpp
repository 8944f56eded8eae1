// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/digest.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string_view>
#include <vector>

namespace fsdp2::checkpoint {
namespace {

constexpr std::uint64_t one = std::uint64_t{1} << 63;  // x^0

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::vector<std::byte> random_bytes(std::mt19937_64& random, std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

/// The definition, bit by bit.
std::uint64_t times_x(std::uint64_t value) {
  return (value >> 1) ^ ((value & 1) != 0 ? 0xc96c5795d7870f42 : 0);
}

std::uint64_t plain_crc(std::span<const std::byte> bytes) {
  std::uint64_t value = ~std::uint64_t{0};
  for (const std::byte byte : bytes) {
    value ^= static_cast<std::uint64_t>(byte);
    for (int bit = 0; bit < 8; ++bit) value = times_x(value);
  }
  return ~value;
}

/// Schoolbook multiplication: the terms x^i·b of the bits of a.
std::uint64_t plain_product(std::uint64_t a, std::uint64_t b) {
  std::uint64_t product = 0;
  for (int power = 0; power < 64; ++power) {
    if (((a >> (63 - power)) & 1) != 0) product ^= b;
    b = times_x(b);
  }
  return product;
}

TEST(Crc64, HasTheCheckValueOfCrc64Xz) {
  EXPECT_EQ(crc64(bytes_of("123456789")), 0x995dc9bbdf1939fau);
  EXPECT_EQ(crc64({}), 0u);
  EXPECT_EQ(crc64({}, 42), 42u);
}

TEST(Crc64, EqualsTheDefinitionAtEveryLengthAndAlignment) {
  std::mt19937_64 random(1);
  const std::vector<std::byte> bytes = random_bytes(random, 700);
  for (std::size_t begin = 0; begin < 17; ++begin)
    for (std::size_t length = 0; length < 600; length += length < 70 ? 1 : 37) {
      const auto part = std::span(bytes).subspan(begin, length);
      ASSERT_EQ(crc64(part), plain_crc(part)) << length << " bytes from " << begin;
    }
}

TEST(Crc64, ContinuesWhereItStopped) {
  std::mt19937_64 random(2);
  const std::vector<std::byte> bytes = random_bytes(random, 300);
  for (std::size_t split = 0; split <= bytes.size(); ++split)
    ASSERT_EQ(crc64(std::span(bytes).subspan(split), crc64(std::span(bytes).first(split))), crc64(bytes)) << split;
}

TEST(MultiplyMod, EqualsSchoolbookMultiplication) {
  std::mt19937_64 random(3);
  std::vector<std::uint64_t> values{0, 1, one, ~std::uint64_t{0}, 0xc96c5795d7870f42};
  for (int i = 0; i < 64; ++i) values.push_back(std::uint64_t{1} << i);
  for (int i = 0; i < 100; ++i) values.push_back(random());
  for (const std::uint64_t a : values)
    for (const std::uint64_t b : values) ASSERT_EQ(multiply_mod(a, b), plain_product(a, b)) << a << " * " << b;
}

TEST(ShiftFactor, ShiftsOverEveryPowerOfTwo) {
  std::uint64_t power = one;  // x^8, squared again and again
  for (int bit = 0; bit < 8; ++bit) power = times_x(power);
  for (int k = 0; k <= 40; ++k) {
    ASSERT_EQ(shift_factor(std::uint64_t{1} << k), power) << "2^" << k;
    power = plain_product(power, power);
  }
  EXPECT_EQ(shift_factor(0), one);
  std::mt19937_64 random(4);
  for (int i = 0; i < 100; ++i) {
    const std::uint64_t a = random() >> 24;
    const std::uint64_t b = random() >> 24;
    ASSERT_EQ(shift_factor(a + b), plain_product(shift_factor(a), shift_factor(b)));
  }
}

TEST(ShiftFactor, CombinesCrcs) {
  std::mt19937_64 random(5);
  const std::vector<std::byte> bytes = random_bytes(random, 5000);
  for (const std::size_t split : {0, 1, 7, 64, 999, 4096, 4999, 5000}) {
    const std::uint64_t first = crc64(std::span(bytes).first(split));
    const std::uint64_t second = crc64(std::span(bytes).subspan(split));
    EXPECT_EQ(multiply_mod(first, shift_factor(bytes.size() - split)) ^ second, crc64(bytes)) << split;
  }
}

/// Cuts [0, length) anywhere, into `count` parts some of which may be empty: the ends.
std::vector<std::size_t> random_cuts(std::mt19937_64& random, std::size_t length, std::size_t count) {
  std::vector<std::size_t> ends{length};
  while (ends.size() < count) ends.push_back(random() % (length + 1));
  std::sort(ends.begin(), ends.end());
  return ends;
}

TEST(RunDigest, AddsUpToTheCrcHoweverRunsAreSplitAndDealtOut) {
  std::mt19937_64 random(6);
  for (int trial = 0; trial < 200; ++trial) {
    const std::vector<std::byte> bytes = random_bytes(random, random() % 3000);
    std::vector<RunDigest> owners(1 + random() % 5);
    std::size_t begin = 0;
    for (const std::size_t end : random_cuts(random, bytes.size(), 1 + random() % 40)) {
      const std::uint64_t crc = crc64(std::span(bytes).subspan(begin, end - begin));
      owners[random() % owners.size()].add(crc, end);
      begin = end;
    }
    std::uint64_t sum = 0;
    for (RunDigest& owner : owners) sum ^= owner.finish(bytes.size());
    ASSERT_EQ(sum, crc64(bytes)) << "trial " << trial;
  }
}

TEST(RunDigest, NothingContributesNothing) {
  EXPECT_EQ(RunDigest().finish(0), 0u);
  EXPECT_EQ(RunDigest().finish(12345), 0u);
}

}  // namespace
}  // namespace fsdp2::checkpoint
