// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// The cast kernel, which uses the processor's vectors and conversions, beside the cast of one number.

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <vector>

#include "fsdp2/low_precision.hpp"
#include "kernels.hpp"
#include "support/tensor_bytes.hpp"

namespace fsdp2::testing {
namespace {

template <class Small>
class CastTest : public ::testing::Test {
 public:
  static constexpr DType small = detail::DTypeOf<Small>::value;

  static void expect_narrowed(const std::vector<float>& values) {
    const auto count = static_cast<std::int64_t>(values.size());
    const Tensor narrow = Tensor::uninitialized(small, {count}, "narrow");
    kernels::cast(ExecutionSpace(), narrow, tensor_of(DType::f32, bytes_of(values)));
    const std::vector<std::uint16_t> bits = values_of<std::uint16_t>(narrow);
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(bits[i], static_cast<Small>(values[i]).bits) << std::bit_cast<std::uint32_t>(values[i]);
  }
};

using Smalls = ::testing::Types<float16, bfloat16>;
TYPED_TEST_SUITE(CastTest, Smalls);

TYPED_TEST(CastTest, WidensAllBitPatterns) {
  std::vector<std::uint16_t> patterns(65536);
  for (std::uint32_t i = 0; i < 65536; ++i) patterns[i] = static_cast<std::uint16_t>(i);
  const Tensor wide = Tensor::uninitialized(DType::f32, {65536}, "wide");
  kernels::cast(ExecutionSpace(), wide, tensor_of(this->small, bytes_of(patterns)));
  const std::vector<std::uint32_t> bits = values_of<std::uint32_t>(wide);
  for (std::uint32_t i = 0; i < 65536; ++i)
    ASSERT_EQ(bits[i], std::bit_cast<std::uint32_t>(static_cast<float>(TypeParam::from_bits(patterns[i])))) << i;
}

// Every sign, exponent and leading bits of the mantissa, with all that rounding can meet in the others.
TYPED_TEST(CastTest, NarrowsToTheNearest) {
  for (std::uint32_t tail : {0x0u, 0x1u, 0xfffu, 0x1000u, 0x1001u, 0x1fffu}) {
    std::vector<float> values;
    for (std::uint32_t head = 0; head < 1u << 19; ++head) values.push_back(std::bit_cast<float>(head << 13 | tail));
    this->expect_narrowed(values);
  }
}

TYPED_TEST(CastTest, NarrowsAnyNumberOfElements) {
  for (std::size_t count = 0; count < 600; count += 1 + count / 17)
    this->expect_narrowed(std::vector<float>(count, 1.0f + 0x1p-9f));
}

}  // namespace
}  // namespace fsdp2::testing
