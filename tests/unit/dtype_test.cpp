// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/dtype.hpp"

#include <gtest/gtest.h>

#include <complex>
#include <iterator>
#include <set>
#include <string>

#include "fsdp2/error.hpp"
#include "fsdp2/low_precision.hpp"

namespace fsdp2 {
namespace {

// The codes are written into checkpoints: a change here is a change of the file format.
struct Expected {
  DType dtype;
  int code;
  std::int64_t bytes;
  const char* name;
  bool floating;
};
constexpr Expected table[] = {
    {DType::f64, 1, 8, "f64", true},
    {DType::f32, 2, 4, "f32", true},
    {DType::f16, 3, 2, "f16", true},
    {DType::bf16, 4, 2, "bf16", true},
    {DType::f8_e4m3, 5, 1, "f8_e4m3", true},
    {DType::f8_e5m2, 6, 1, "f8_e5m2", true},
    {DType::i64, 7, 8, "i64", false},
    {DType::i32, 8, 4, "i32", false},
    {DType::i16, 9, 2, "i16", false},
    {DType::i8, 10, 1, "i8", false},
    {DType::u64, 11, 8, "u64", false},
    {DType::u32, 12, 4, "u32", false},
    {DType::u16, 13, 2, "u16", false},
    {DType::u8, 14, 1, "u8", false},
    {DType::boolean, 15, 1, "bool", false},
    {DType::complex64, 16, 8, "complex64", false},
    {DType::complex128, 17, 16, "complex128", false},
};

TEST(DType, CodesSizesAndNamesAreThoseOfTheFormat) {
  for (const Expected& expected : table) {
    SCOPED_TRACE(expected.name);
    EXPECT_EQ(static_cast<int>(expected.dtype), expected.code);
    EXPECT_EQ(size_of(expected.dtype), expected.bytes);
    EXPECT_EQ(to_string(expected.dtype), expected.name);
    EXPECT_EQ(parse_dtype(expected.name), expected.dtype);
    EXPECT_EQ(is_floating_point(expected.dtype), expected.floating);
  }
}

TEST(DType, AllDtypesListsEachOnceInOrderOfCode) {
  ASSERT_EQ(std::size(all_dtypes), std::size(table));
  for (std::size_t i = 0; i < std::size(table); ++i) EXPECT_EQ(all_dtypes[i], table[i].dtype);
}

TEST(DType, ParseRefusesAnythingElse) {
  for (const char* name : {"", "F32", "f32 ", " f32", "float", "boolean", "f", "f8", "unknown", "complex"}) {
    try {
      parse_dtype(name);
      ADD_FAILURE() << "accepted \"" << name << "\"";
    } catch (const ShapeError& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("\"" + std::string(name) + "\""), std::string::npos) << message;
      for (const Expected& expected : table) EXPECT_NE(message.find(expected.name), std::string::npos) << message;
    }
  }
  EXPECT_THROW(parse_dtype(std::string_view("f32\0", 4)), ShapeError);
}

TEST(DType, CodesFromFilesAreRecognised) {
  std::set<std::uint64_t> known;
  for (const Expected& expected : table) known.insert(static_cast<std::uint64_t>(expected.code));
  for (std::uint64_t code = 0; code < 300; ++code) EXPECT_EQ(is_dtype(code), known.count(code) == 1) << code;
  EXPECT_FALSE(is_dtype(~std::uint64_t{0}));
  EXPECT_FALSE(is_dtype((std::uint64_t{1} << 32) + 2));
}

template <class T, DType expected>
constexpr bool stores() {
  return dtype_of<T> == expected && size_of(expected) == static_cast<std::int64_t>(sizeof(T));
}
static_assert(stores<double, DType::f64>() && stores<float, DType::f32>());
static_assert(stores<float16, DType::f16>() && stores<bfloat16, DType::bf16>());
static_assert(stores<float8_e4m3, DType::f8_e4m3>() && stores<float8_e5m2, DType::f8_e5m2>());
static_assert(stores<std::int64_t, DType::i64>() && stores<std::int32_t, DType::i32>());
static_assert(stores<std::int16_t, DType::i16>() && stores<std::int8_t, DType::i8>());
static_assert(stores<std::uint64_t, DType::u64>() && stores<std::uint32_t, DType::u32>());
static_assert(stores<std::uint16_t, DType::u16>() && stores<std::uint8_t, DType::u8>());
static_assert(stores<bool, DType::boolean>());
static_assert(stores<std::complex<float>, DType::complex64>() && stores<std::complex<double>, DType::complex128>());

}  // namespace
}  // namespace fsdp2
