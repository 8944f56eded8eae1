// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/shape.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "fsdp2/error.hpp"

namespace fsdp2 {

std::int64_t checked_multiply(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) throw ShapeError(fmt::format("{} * {} overflows 64 bits", a, b));
  return result;
}

std::int64_t checked_add(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) throw ShapeError(fmt::format("{} + {} overflows 64 bits", a, b));
  return result;
}

std::int64_t align_up(std::int64_t value, std::int64_t alignment) {
  const std::int64_t rest = value % alignment;
  return rest == 0 ? value : checked_add(value, alignment - rest);
}

std::int64_t numel(const Shape& shape) {
  std::int64_t count = 1;
  bool has_zero = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) throw ShapeError(fmt::format("shape {} has a negative extent", to_string(shape)));
    if (extent == 0)
      has_zero = true;
    else if (__builtin_mul_overflow(count, extent, &count))
      throw ShapeError(fmt::format("shape {} has more elements than 64 bits can count", to_string(shape)));
  }
  return has_zero ? 0 : count;
}

std::string to_string(const Shape& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::int64_t chunk_size(std::int64_t extent, std::int64_t parts) {
  if (extent < 0 || parts < 1)
    throw ShapeError(fmt::format("cannot cut {} rows into {} parts: expected rows >= 0 and parts >= 1", extent, parts));
  return extent / parts + (extent % parts != 0 ? 1 : 0);
}

Range chunk(std::int64_t extent, std::int64_t parts, std::int64_t index) {
  const std::int64_t rows = chunk_size(extent, parts);
  if (index < 0 || index >= parts) throw ShapeError(fmt::format("part {} of {} does not exist", index, parts));
  // index·rows can exceed 64 bits only if it exceeds the extent as well
  const std::int64_t begin = rows != 0 && index > extent / rows ? extent : std::min(index * rows, extent);
  return {begin, extent - begin < rows ? extent : begin + rows};
}

Box intersect(const Box& a, const Box& b) {
  Box common{a.offset, a.extent};
  for (std::size_t d = 0; d < a.offset.size(); ++d) {
    const std::int64_t begin = std::max(a.offset[d], b.offset[d]);
    const std::int64_t end = std::min(a.offset[d] + a.extent[d], b.offset[d] + b.extent[d]);
    common.offset[d] = begin;
    common.extent[d] = std::max<std::int64_t>(end - begin, 0);
  }
  return common;
}

RunCursor::RunCursor(const Shape& extent, const Shape& from_shape, const Shape& from, const Shape& to_shape,
                     const Shape& to) {
  for (const std::int64_t rows : extent)
    if (rows == 0) return;
  // Trailing dimensions that the box covers whole in both arrays merge with the dimension before them.
  std::size_t outer = extent.size();
  run_.count = 1;
  while (outer > 0) {
    --outer;
    run_.count *= extent[outer];
    if (extent[outer] != from_shape[outer] || extent[outer] != to_shape[outer]) break;
  }
  outer_.resize(outer);
  std::int64_t from_stride = 1;
  std::int64_t to_stride = 1;
  for (std::size_t d = extent.size(); d-- > 0;) {
    run_.from += from[d] * from_stride;
    run_.to += to[d] * to_stride;
    if (d < outer) outer_[d] = {extent[d], from_stride, to_stride, 0};
    from_stride *= from_shape[d];
    to_stride *= to_shape[d];
  }
}

}  // namespace fsdp2
