// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/low_precision.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

namespace fsdp2 {
namespace {

// What the tests know about a format, written down without the code under test.
template <class T>
struct Facts;
template <>
struct Facts<float16> {
  using Bits = std::uint16_t;
  static constexpr int exponent_bits = 5, mantissa_bits = 10, bias = 15;
  static constexpr bool has_infinity = true;
  static constexpr double largest = 65504.0, smallest = 0x1p-24;
  static constexpr Bits infinity = 0x7c00, nan = 0x7e00;
};
template <>
struct Facts<bfloat16> {
  using Bits = std::uint16_t;
  static constexpr int exponent_bits = 8, mantissa_bits = 7, bias = 127;
  static constexpr bool has_infinity = true;
  static constexpr double largest = 0x1.fep127, smallest = 0x1p-133;
  static constexpr Bits infinity = 0x7f80, nan = 0x7fc0;
};
template <>
struct Facts<float8_e4m3> {
  using Bits = std::uint8_t;
  static constexpr int exponent_bits = 4, mantissa_bits = 3, bias = 7;
  static constexpr bool has_infinity = false;
  static constexpr double largest = 448.0, smallest = 0x1p-9;
  static constexpr Bits infinity = 0x7f, nan = 0x7f;  // what overflows becomes the NaN
};
template <>
struct Facts<float8_e5m2> {
  using Bits = std::uint8_t;
  static constexpr int exponent_bits = 5, mantissa_bits = 2, bias = 15;
  static constexpr bool has_infinity = true;
  static constexpr double largest = 57344.0, smallest = 0x1p-16;
  static constexpr Bits infinity = 0x7c, nan = 0x7e;
};

template <class T>
class LowPrecision : public ::testing::Test {
 protected:
  using Known = Facts<T>;
  static constexpr unsigned sign_bit = 1u << (Known::exponent_bits + Known::mantissa_bits);
  static constexpr unsigned patterns = 2 * sign_bit;

  // The value of a pattern, from its fields and ldexp.
  static double value_of(unsigned bits) {
    const double sign = (bits & sign_bit) != 0 ? -1.0 : 1.0;
    const unsigned magnitude = bits & (sign_bit - 1);
    const unsigned exponent = magnitude >> Known::mantissa_bits;
    const unsigned mantissa = magnitude - (exponent << Known::mantissa_bits);
    const unsigned top = (1u << Known::exponent_bits) - 1;
    if (Known::has_infinity && exponent == top)
      return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
    if (!Known::has_infinity && exponent == top && mantissa == (1u << Known::mantissa_bits) - 1) return std::nan("");
    const double hidden = exponent == 0 ? 0.0 : 1.0;
    const int power = exponent == 0 ? 1 - Known::bias : static_cast<int>(exponent) - Known::bias;
    return sign * std::ldexp(hidden + std::ldexp(mantissa, -Known::mantissa_bits), power);
  }

  // Positive finite patterns ascend with their values: 0, smallest, …, largest.
  static std::vector<double> finite_values() {
    std::vector<double> values;
    for (unsigned bits = 0; std::isfinite(value_of(bits)); ++bits) values.push_back(value_of(bits));
    return values;
  }

  static unsigned encode_bits(float value) { return T(value).bits; }
  static unsigned encode_bits(double value) { return T(value).bits; }

  // Nearest value, ties to the even pattern, by search among all values.
  template <class Float>
  static unsigned nearest(const std::vector<double>& values, Float x) {
    const unsigned sign = std::signbit(x) ? sign_bit : 0;
    const double magnitude = std::fabs(static_cast<double>(x));
    const auto above = std::upper_bound(values.begin(), values.end(), magnitude);
    const auto lower = static_cast<unsigned>(above - values.begin()) - 1;
    const double next = above != values.end() ? *above : values.back() + (values.back() - values[values.size() - 2]);
    const double middle = values[lower] + (next - values[lower]) / 2;
    unsigned bits = lower;
    if (magnitude > middle || (magnitude == middle && lower % 2 == 1)) ++bits;
    return sign | (bits == values.size() ? unsigned{Known::infinity} : bits);
  }

  template <class Float>
  static void expect_encodes(Float value, unsigned bits) {
    ASSERT_EQ(encode_bits(value), bits) << std::hexfloat << value;
    ASSERT_EQ(encode_bits(-value), bits | sign_bit) << std::hexfloat << -value;
  }

  // Around every midpoint of neighbours, the one past the largest value included.
  template <class Float>
  static void check_midpoints() {
    const std::vector<double> values = finite_values();
    constexpr Float up = std::numeric_limits<Float>::infinity();
    for (unsigned lower = 0; lower < values.size(); ++lower) {
      const bool is_last = lower + 1 == values.size();
      const double next = is_last ? values[lower] + (values[lower] - values[lower - 1]) : values[lower + 1];
      const unsigned upper = is_last ? unsigned{Known::infinity} : lower + 1;
      const auto middle = static_cast<Float>((values[lower] + next) / 2);
      ASSERT_EQ(static_cast<double>(middle), (values[lower] + next) / 2) << "the midpoint must be exact";
      expect_encodes(middle, lower % 2 == 0 ? lower : upper);
      expect_encodes(std::nextafter(middle, up), upper);
      expect_encodes(std::nextafter(middle, Float{0}), lower);
      if (lower > 0) {
        const auto exact = static_cast<Float>(values[lower]);
        expect_encodes(exact, lower);
        expect_encodes(std::nextafter(exact, up), lower);
        expect_encodes(std::nextafter(exact, Float{0}), lower);
      }
    }
  }
};

using Formats = ::testing::Types<float16, bfloat16, float8_e4m3, float8_e5m2>;
struct FormatNames {
  template <class T>
  static std::string GetName(int) {
    return std::string(to_string(dtype_of<T>));
  }
};
TYPED_TEST_SUITE(LowPrecision, Formats, FormatNames);

TYPED_TEST(LowPrecision, IsStorageThatConvertsImplicitlyToFloatOnly) {
  EXPECT_EQ(sizeof(TypeParam), sizeof(typename Facts<TypeParam>::Bits));
  EXPECT_TRUE(std::is_trivially_copyable_v<TypeParam>);
  EXPECT_TRUE((std::is_convertible_v<TypeParam, float>));
  EXPECT_FALSE((std::is_convertible_v<float, TypeParam>));
  EXPECT_FALSE((std::is_convertible_v<double, TypeParam>));
}

TYPED_TEST(LowPrecision, LimitsAreThoseOfTheFormat) {
  using F = Facts<TypeParam>;
  const std::vector<double> values = TestFixture::finite_values();
  EXPECT_EQ(values.back(), F::largest);
  EXPECT_EQ(values[1], F::smallest);
  EXPECT_TRUE(std::is_sorted(values.begin(), values.end()));
  EXPECT_EQ(static_cast<double>(static_cast<float>(TypeParam(1.0f))), 1.0);
}

TYPED_TEST(LowPrecision, EveryPatternDecodesExactlyAndEncodesBack) {
  using Bits = typename Facts<TypeParam>::Bits;
  unsigned nans = 0;
  for (unsigned bits = 0; bits < TestFixture::patterns; ++bits) {
    const float decoded = TypeParam::from_bits(static_cast<Bits>(bits));
    const double expected = TestFixture::value_of(bits);
    ASSERT_EQ(std::signbit(decoded), (bits & TestFixture::sign_bit) != 0) << bits;
    if (std::isnan(expected)) {
      ++nans;
      ASSERT_TRUE(std::isnan(decoded)) << bits;
      const unsigned quiet = bits | unsigned{Facts<TypeParam>::nan};  // the quiet bit is set, all other bits are kept
      ASSERT_EQ(TestFixture::encode_bits(decoded), quiet);
      ASSERT_EQ(TestFixture::encode_bits(static_cast<double>(decoded)), quiet);
    } else {
      ASSERT_EQ(static_cast<double>(decoded), expected) << bits;
      ASSERT_EQ(TestFixture::encode_bits(decoded), bits);
      ASSERT_EQ(TestFixture::encode_bits(expected), bits);
    }
  }
  const unsigned mantissas = 1u << Facts<TypeParam>::mantissa_bits;
  EXPECT_EQ(nans, Facts<TypeParam>::has_infinity ? 2 * (mantissas - 1) : 2);
}

TYPED_TEST(LowPrecision, FloatRoundsToNearestEven) {
  this->template check_midpoints<float>();
}

// Neighbours of a midpoint in double are ties in float: rounding through float would be wrong on half of them.
TYPED_TEST(LowPrecision, DoubleRoundsOnce) {
  this->template check_midpoints<double>();
}

TYPED_TEST(LowPrecision, FloatsOfEveryMagnitude) {
  const std::vector<double> values = TestFixture::finite_values();
  for (std::uint32_t high = 0; high < 0x10000; ++high)
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const auto value = std::bit_cast<float>(high << 16 | low);
      if (!std::isfinite(value)) continue;
      const unsigned expected = TestFixture::nearest(values, value);
      ASSERT_EQ(TestFixture::encode_bits(value), expected) << std::hexfloat << value;
      ASSERT_EQ(TestFixture::encode_bits(static_cast<double>(value)), expected) << std::hexfloat << value;
    }
}

TYPED_TEST(LowPrecision, DoublesOfEveryMagnitude) {
  const std::vector<double> values = TestFixture::finite_values();
  for (std::uint64_t exponent = 0; exponent < 0x7ff; ++exponent)
    for (std::uint64_t mantissa = 0; mantissa < 64; ++mantissa)
      for (const std::uint64_t low : {std::uint64_t{0}, std::uint64_t{1}, (std::uint64_t{1} << 46) - 1}) {
        const auto value = std::bit_cast<double>(exponent << 52 | mantissa << 46 | low);
        ASSERT_EQ(TestFixture::encode_bits(value), TestFixture::nearest(values, value)) << std::hexfloat << value;
        ASSERT_EQ(TestFixture::encode_bits(-value), TestFixture::nearest(values, -value)) << std::hexfloat << -value;
      }
}

TYPED_TEST(LowPrecision, ZerosInfinitiesAndExtremes) {
  using F = Facts<TypeParam>;
  TestFixture::expect_encodes(0.0f, 0);
  TestFixture::expect_encodes(0.0, 0);
  TestFixture::expect_encodes(std::numeric_limits<float>::infinity(), F::infinity);
  TestFixture::expect_encodes(std::numeric_limits<double>::infinity(), F::infinity);
  TestFixture::expect_encodes(std::numeric_limits<float>::max(), F::infinity);
  TestFixture::expect_encodes(std::numeric_limits<double>::max(), F::infinity);
  TestFixture::expect_encodes(std::numeric_limits<float>::denorm_min(), 0);
  TestFixture::expect_encodes(std::numeric_limits<double>::denorm_min(), 0);
  TestFixture::expect_encodes(std::numeric_limits<double>::min(), 0);
  TestFixture::expect_encodes(F::smallest / 2, 0);  // a tie with zero
  TestFixture::expect_encodes(std::nextafter(F::smallest / 2, 1.0), 1);
}

TYPED_TEST(LowPrecision, NanStaysNanWithSignAndLeadingPayload) {
  using F = Facts<TypeParam>;
  const int float_drop = 23 - F::mantissa_bits;
  const int double_drop = 52 - F::mantissa_bits;
  const unsigned mantissa_mask = (1u << F::mantissa_bits) - 1;
  for (std::uint32_t payload = 1; payload < 1u << 23; payload = payload * 3 + 1)
    for (const unsigned sign : {0u, 1u}) {
      const unsigned kept = sign * TestFixture::sign_bit | F::nan;
      const auto narrow = std::bit_cast<float>(sign << 31 | 0x7f800000u | payload);
      ASSERT_EQ(TestFixture::encode_bits(narrow), kept | (payload >> float_drop)) << std::hex << payload;
      const std::uint64_t wide_payload = std::uint64_t{payload} << 29 | 1;
      const auto wide = std::bit_cast<double>(std::uint64_t{sign} << 63 | 0x7ff0000000000000u | wide_payload);
      ASSERT_EQ(TestFixture::encode_bits(wide),
                kept | (static_cast<unsigned>(wide_payload >> double_drop) & mantissa_mask));
      // a payload below what the format holds must not turn into infinity
      const auto low = std::bit_cast<double>(std::uint64_t{sign} << 63 | 0x7ff0000000000001u);
      ASSERT_EQ(TestFixture::encode_bits(low), kept);
    }
}

TEST(LowPrecisionExamples, DoubleRoundingTrap) {
  const double value = 1.0 + 0x1p-8 + 0x1p-50;  // just above the midpoint of 1 and 1 + 2^-7; as a float, the midpoint
  ASSERT_EQ(static_cast<float>(value), 1.0f + 0x1p-8f);
  EXPECT_EQ(bfloat16(static_cast<float>(value)).bits, 0x3f80);
  EXPECT_EQ(bfloat16(value).bits, 0x3f81);
  EXPECT_EQ(float16(1.0 + 0x1p-11 + 0x1p-50).bits, 0x3c01);
}

TEST(LowPrecisionExamples, E4m3HasNoInfinity) {
  EXPECT_EQ(float8_e4m3(448.0f).bits, 0x7e);
  EXPECT_EQ(float8_e4m3(464.0f).bits, 0x7e);
  EXPECT_EQ(float8_e4m3(std::nextafter(464.0f, 500.0f)).bits, 0x7f);
  EXPECT_EQ(float8_e4m3(480.0f).bits, 0x7f);
  EXPECT_EQ(float8_e4m3(-1e30f).bits, 0xff);
  EXPECT_EQ(static_cast<float>(float8_e4m3::from_bits(0x78)), 256.0f);
  EXPECT_TRUE(std::isnan(static_cast<float>(float8_e4m3::from_bits(0xff))));
}

TEST(LowPrecisionExamples, E5m2OverflowsToInfinity) {
  EXPECT_EQ(float8_e5m2(57344.0f).bits, 0x7b);
  EXPECT_EQ(float8_e5m2(61439.0f).bits, 0x7b);
  EXPECT_EQ(float8_e5m2(61440.0f).bits, 0x7c);
  EXPECT_EQ(float8_e5m2(-61440.0f).bits, 0xfc);
  EXPECT_EQ(float16(65519.0f).bits, 0x7bff);
  EXPECT_EQ(float16(65520.0f).bits, 0x7c00);
}

}  // namespace
}  // namespace fsdp2
