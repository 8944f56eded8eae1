// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <fmt/format.h>

#include <type_traits>

#include "fsdp2/dtype.hpp"
#include "fsdp2/error.hpp"
#include "fsdp2/low_precision.hpp"

namespace fsdp2 {

/// The values of a type tag, called with the type of a castable dtype.
template <class Visitor>
void for_castable(DType dtype, Visitor&& visit) {
  switch (dtype) {
    case DType::f64:
      return visit(std::type_identity<double>());
    case DType::f32:
      return visit(std::type_identity<float>());
    case DType::f16:
      return visit(std::type_identity<float16>());
    case DType::bf16:
      return visit(std::type_identity<bfloat16>());
    default:
      throw ShapeError(fmt::format("{} is not f64, f32, f16 or bf16", to_string(dtype)));
  }
}

/// In which elements are computed: f64 where one of the types is f64.
template <class... T>
using Compute = std::conditional_t<(std::is_same_v<T, double> || ...), double, float>;

}  // namespace fsdp2
