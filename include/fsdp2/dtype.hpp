// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <complex>
#include <cstdint>
#include <string>
#include <string_view>

namespace fsdp2 {

/// Element types. The numeric values are part of the checkpoint format and never change.
enum class DType : std::uint8_t {
  f64 = 1,
  f32 = 2,
  f16 = 3,
  bf16 = 4,
  f8_e4m3 = 5,  ///< OCP "fn" flavour: no infinities, NaN is 0x7f and 0xff
  f8_e5m2 = 6,
  i64 = 7,
  i32 = 8,
  i16 = 9,
  i8 = 10,
  u64 = 11,
  u32 = 12,
  u16 = 13,
  u8 = 14,
  boolean = 15,  ///< one byte, 0 or 1; spelled "bool" in text
  complex64 = 16,
  complex128 = 17,
};

inline constexpr DType all_dtypes[] = {DType::f64,       DType::f32,       DType::f16, DType::bf16, DType::f8_e4m3,
                                       DType::f8_e5m2,   DType::i64,       DType::i32, DType::i16,  DType::i8,
                                       DType::u64,       DType::u32,       DType::u16, DType::u8,   DType::boolean,
                                       DType::complex64, DType::complex128};

/// Bytes of one element.
constexpr std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::complex128:
      return 16;
    case DType::f64:
    case DType::i64:
    case DType::u64:
    case DType::complex64:
      return 8;
    case DType::f32:
    case DType::i32:
    case DType::u32:
      return 4;
    case DType::f16:
    case DType::bf16:
    case DType::i16:
    case DType::u16:
      return 2;
    case DType::f8_e4m3:
    case DType::f8_e5m2:
    case DType::i8:
    case DType::u8:
    case DType::boolean:
      return 1;
  }
  return 0;
}

/// True for the real floating-point types, which can be reduced.
constexpr bool is_floating_point(DType dtype) {
  return dtype <= DType::f8_e5m2;
}

/// True for f64, f32, f16 and bf16, which can be cast into each other, and optimized.
constexpr bool is_castable(DType dtype) {
  return dtype <= DType::bf16;
}

/// The name used in messages, files and on the command line: "f32", "bf16", "bool", …
std::string_view to_string(DType dtype);

/// The inverse of to_string. Throws ShapeError for any other text.
DType parse_dtype(std::string_view name);

/// Whether a number read from a file names a dtype.
constexpr bool is_dtype(std::uint64_t code) {
  return code >= 1 && code <= 17;
}

namespace detail {
template <class T>
struct DTypeOf;  // specialised for every element type; low_precision.hpp and tensor.hpp add theirs
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct DTypeOf<std::int16_t> {
  static constexpr DType value = DType::i16;
};
template <>
struct DTypeOf<std::int8_t> {
  static constexpr DType value = DType::i8;
};
template <>
struct DTypeOf<std::uint64_t> {
  static constexpr DType value = DType::u64;
};
template <>
struct DTypeOf<std::uint32_t> {
  static constexpr DType value = DType::u32;
};
template <>
struct DTypeOf<std::uint16_t> {
  static constexpr DType value = DType::u16;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::u8;
};
template <>
struct DTypeOf<bool> {
  static constexpr DType value = DType::boolean;
};
template <>
struct DTypeOf<std::complex<float>> {
  static constexpr DType value = DType::complex64;
};
template <>
struct DTypeOf<std::complex<double>> {
  static constexpr DType value = DType::complex128;
};
}  // namespace detail

/// The dtype that stores a C++ element type.
template <class T>
inline constexpr DType dtype_of = detail::DTypeOf<T>::value;

}  // namespace fsdp2
