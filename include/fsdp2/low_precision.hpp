// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <Kokkos_Macros.hpp>
#include <cstdint>
#include <cstring>

#include "fsdp2/dtype.hpp"

namespace fsdp2 {

namespace detail {

template <class To, class From>
KOKKOS_INLINE_FUNCTION To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

template <class Float>
struct IeeeFormat;
template <>
struct IeeeFormat<float> {
  using Bits = std::uint32_t;
  static constexpr int mantissa = 23;
  static constexpr int bias = 127;
};
template <>
struct IeeeFormat<double> {
  using Bits = std::uint64_t;
  static constexpr int mantissa = 52;
  static constexpr int bias = 1023;
};

/// A storage-only floating-point number of 1 sign, E exponent and M mantissa bits. Without infinities (OCP "fn") the
/// only special value is the all-ones NaN, and what overflows becomes that NaN, as in PyTorch.
template <class BitsType, int E, int M, bool HasInfinity>
struct SmallFloatFormat {
  using Bits = BitsType;
  static constexpr int exponent = E;
  static constexpr int mantissa = M;
  static constexpr int bias = (1 << (E - 1)) - 1;
  static constexpr bool has_infinity = HasInfinity;
  static constexpr Bits exponent_mask = static_cast<Bits>(((1u << E) - 1) << M);
  static constexpr Bits mantissa_mask = static_cast<Bits>((1u << M) - 1);
  static constexpr Bits nan = HasInfinity ? static_cast<Bits>(exponent_mask | (1u << (M - 1)))
                                          : static_cast<Bits>(exponent_mask | mantissa_mask);
  static constexpr Bits overflow = HasInfinity ? exponent_mask : nan;
};

/// Round to nearest, ties to even, in one rounding from float or double. A NaN stays a NaN: sign and the leading
/// payload bits are kept where the format has them, and the quiet bit is set.
template <class Format, class Float>
KOKKOS_INLINE_FUNCTION typename Format::Bits encode(Float value) {
  using Source = IeeeFormat<Float>;
  using Wide = typename Source::Bits;
  using Bits = typename Format::Bits;
  constexpr int source_width = static_cast<int>(8 * sizeof(Wide));
  constexpr int drop = Source::mantissa - Format::mantissa;
  constexpr Wide source_infinity = static_cast<Wide>(static_cast<Wide>(2 * Source::bias + 1) << Source::mantissa);

  const Wide raw = bit_cast<Wide>(value);
  const Wide magnitude = raw & static_cast<Wide>(~(Wide{1} << (source_width - 1)));
  const Bits sign =
      static_cast<Bits>(static_cast<Bits>(raw >> (source_width - 1)) << (Format::exponent + Format::mantissa));

  if (magnitude > source_infinity) {
    const Bits payload = static_cast<Bits>(static_cast<Bits>(magnitude >> drop) & Format::mantissa_mask);
    return static_cast<Bits>(sign | Format::nan | payload);
  }
  if (magnitude == source_infinity) return static_cast<Bits>(sign | Format::overflow);

  int exponent = static_cast<int>(magnitude >> Source::mantissa) - Source::bias + Format::bias;
  Wide significand = magnitude & static_cast<Wide>((Wide{1} << Source::mantissa) - 1);
  int shift = drop;
  if (exponent <= 0) {  // subnormal in the target (a subnormal source has no implicit bit, and rounds to zero or below)
    if ((magnitude >> Source::mantissa) != 0)
      significand |= Wide{1} << Source::mantissa;
    else
      ++exponent;
    shift += 1 - exponent;
    exponent = 0;
    if (shift > Source::mantissa + 2) return sign;
  }
  const Wide half = Wide{1} << (shift - 1);
  const Wide rest = significand & static_cast<Wide>((Wide{1} << shift) - 1);
  Wide rounded = (static_cast<Wide>(exponent) << Format::mantissa) + (significand >> shift);
  if (rest > half || (rest == half && (rounded & 1) != 0)) ++rounded;
  if (rounded >= Format::overflow) return static_cast<Bits>(sign | Format::overflow);
  return static_cast<Bits>(sign | static_cast<Bits>(rounded));
}

/// Exact: every value of a small format is a float.
template <class Format>
KOKKOS_INLINE_FUNCTION float decode(typename Format::Bits bits) {
  using Float = IeeeFormat<float>;
  const std::uint32_t sign = static_cast<std::uint32_t>(bits >> (Format::exponent + Format::mantissa)) << 31;
  const std::uint32_t exponent = static_cast<std::uint32_t>(bits & Format::exponent_mask) >> Format::mantissa;
  std::uint32_t mantissa = bits & Format::mantissa_mask;
  constexpr int widen = Float::mantissa - Format::mantissa;
  constexpr std::uint32_t top = (1u << Format::exponent) - 1;

  const bool is_special =
      Format::has_infinity ? exponent == top : (exponent == top && mantissa == Format::mantissa_mask);
  if (is_special) return bit_cast<float>(sign | 0x7f800000u | (mantissa << widen));
  if (exponent != 0)
    return bit_cast<float>(sign | ((exponent + Float::bias - Format::bias) << Float::mantissa) | (mantissa << widen));
  if constexpr (Format::bias == Float::bias) {  // subnormal in float too
    return bit_cast<float>(sign | (mantissa << widen));
  } else {
    if (mantissa == 0) return bit_cast<float>(sign);
    std::uint32_t shifts = 0;
    while ((mantissa >> Format::mantissa) == 0) {
      mantissa <<= 1;
      ++shifts;
    }
    mantissa &= Format::mantissa_mask;
    return bit_cast<float>(sign | ((1 + Float::bias - Format::bias - shifts) << Float::mantissa) | (mantissa << widen));
  }
}

using Float16Format = SmallFloatFormat<std::uint16_t, 5, 10, true>;
using Bfloat16Format = SmallFloatFormat<std::uint16_t, 8, 7, true>;
using Float8E4m3Format = SmallFloatFormat<std::uint8_t, 4, 3, false>;
using Float8E5m2Format = SmallFloatFormat<std::uint8_t, 5, 2, true>;

// The same for float and the 16-bit types, without branches, so that loops over them vectorise.

template <>
KOKKOS_INLINE_FUNCTION std::uint16_t encode<Bfloat16Format>(float value) {
  const auto raw = bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (raw >> 16) | 0x40u;
  return static_cast<std::uint16_t>((raw & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

template <>
KOKKOS_INLINE_FUNCTION float decode<Bfloat16Format>(std::uint16_t bits) {
  return bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

template <>
KOKKOS_INLINE_FUNCTION std::uint16_t encode<Float16Format>(float value) {
  const auto raw = bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = raw & 0x7fffffffu;
  const std::uint32_t rebased = magnitude - (112u << 23);
  const std::uint32_t normal = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
  // Added to 1/2, the last bit that remains is the last bit of a subnormal.
  const std::uint32_t subnormal = bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  std::uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= (143u << 23) ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? nan : result;
  return static_cast<std::uint16_t>(((raw >> 16) & 0x8000u) | result);
}

template <>
KOKKOS_INLINE_FUNCTION float decode<Float16Format>(std::uint16_t bits) {
  const std::uint32_t sign = (static_cast<std::uint32_t>(bits) & 0x8000u) << 16;
  const std::uint32_t magnitude = (static_cast<std::uint32_t>(bits) & 0x7fffu) << 13;
  const std::uint32_t exponent = magnitude & (0x1fu << 23);
  const std::uint32_t normal = magnitude + (112u << 23);
  const std::uint32_t special = magnitude + (224u << 23);
  const std::uint32_t subnormal =
      bit_cast<std::uint32_t>(bit_cast<float>(magnitude + (113u << 23)) - bit_cast<float>(113u << 23));
  std::uint32_t result = exponent == (0x1fu << 23) ? special : normal;
  result = exponent == 0 ? subnormal : result;
  return bit_cast<float>(sign | result);
}

template <class Format>
struct SmallFloat {
  typename Format::Bits bits;

  SmallFloat() = default;
  KOKKOS_INLINE_FUNCTION explicit SmallFloat(float value) : bits(encode<Format>(value)) {}
  KOKKOS_INLINE_FUNCTION explicit SmallFloat(double value) : bits(encode<Format>(value)) {}
  KOKKOS_INLINE_FUNCTION operator float() const { return decode<Format>(bits); }

  KOKKOS_INLINE_FUNCTION static SmallFloat from_bits(typename Format::Bits raw) {
    SmallFloat value;
    value.bits = raw;
    return value;
  }
};

}  // namespace detail

/// Storage types of 16 and 8 bits, usable in kernels: they convert implicitly to float (exactly) and explicitly from
/// float and double (one rounding to nearest even, NaN kept). Arithmetic is done in float.
using float16 = detail::SmallFloat<detail::Float16Format>;
using bfloat16 = detail::SmallFloat<detail::Bfloat16Format>;
using float8_e4m3 = detail::SmallFloat<detail::Float8E4m3Format>;
using float8_e5m2 = detail::SmallFloat<detail::Float8E5m2Format>;

namespace detail {
template <>
struct DTypeOf<float16> {
  static constexpr DType value = DType::f16;
};
template <>
struct DTypeOf<bfloat16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOf<float8_e4m3> {
  static constexpr DType value = DType::f8_e4m3;
};
template <>
struct DTypeOf<float8_e5m2> {
  static constexpr DType value = DType::f8_e5m2;
};
}  // namespace detail

}  // namespace fsdp2
