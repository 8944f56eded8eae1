// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/dtype.hpp"

#include <fmt/format.h>

#include "fsdp2/error.hpp"

namespace fsdp2 {

std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "f64";
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::f8_e4m3:
      return "f8_e4m3";
    case DType::f8_e5m2:
      return "f8_e5m2";
    case DType::i64:
      return "i64";
    case DType::i32:
      return "i32";
    case DType::i16:
      return "i16";
    case DType::i8:
      return "i8";
    case DType::u64:
      return "u64";
    case DType::u32:
      return "u32";
    case DType::u16:
      return "u16";
    case DType::u8:
      return "u8";
    case DType::boolean:
      return "bool";
    case DType::complex64:
      return "complex64";
    case DType::complex128:
      return "complex128";
  }
  return "unknown";
}

DType parse_dtype(std::string_view name) {
  for (const DType dtype : all_dtypes)
    if (to_string(dtype) == name) return dtype;
  throw ShapeError(
      fmt::format("unknown dtype \"{}\": expected one of f64 f32 f16 bf16 f8_e4m3 f8_e5m2 i64 i32 i16 i8 "
                  "u64 u32 u16 u8 bool complex64 complex128",
                  name));
}

}  // namespace fsdp2
