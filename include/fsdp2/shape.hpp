// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp2 {

/// Extents in elements, slowest dimension first (row-major). Empty for a scalar.
using Shape = std::vector<std::int64_t>;

/// a·b and a+b in 64 bits. Throw ShapeError where the result overflows.
std::int64_t checked_multiply(std::int64_t a, std::int64_t b);
std::int64_t checked_add(std::int64_t a, std::int64_t b);

/// The smallest multiple of `alignment` (> 0) that is at least `value` (≥ 0). Throws ShapeError on overflow.
std::int64_t align_up(std::int64_t value, std::int64_t alignment);

/// Number of elements: 1 for a scalar, 0 if any extent is 0. Throws ShapeError for a negative extent, and where the
/// product of the non-zero extents overflows: a shape that is accepted has safe strides as well.
std::int64_t numel(const Shape& shape);

/// "[5, 17]".
std::string to_string(const Shape& shape);

/// Elements [begin, end).
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t size() const { return end - begin; }
  friend bool operator==(const Range&, const Range&) = default;
};

/// Rows of part `index` when `extent` rows are cut into `parts`: c = ceil(extent/parts) rows each, the last parts short
/// or empty. This is torch.chunk's rule, so that all padding lies at the tail of a gather. Throws ShapeError unless
/// extent ≥ 0, parts ≥ 1 and 0 ≤ index < parts.
Range chunk(std::int64_t extent, std::int64_t parts, std::int64_t index);

/// Rows of the largest part, ceil(extent/parts): what every rank's shard is padded to.
std::int64_t chunk_size(std::int64_t extent, std::int64_t parts);

/// A rectangular part of a global index space: elements offset[d] … offset[d]+extent[d]-1 in each dimension.
struct Box {
  Shape offset;
  Shape extent;

  /// The box that covers a whole tensor.
  static Box whole(const Shape& shape) { return {Shape(shape.size(), 0), shape}; }

  std::int64_t numel() const { return fsdp2::numel(extent); }
  friend bool operator==(const Box&, const Box&) = default;
};

/// The common part of two boxes of one index space; its extents are 0 where they do not meet.
Box intersect(const Box& a, const Box& b);

/// Elements that are adjacent in two row-major arrays: element indices in the first and in the second.
struct Run {
  std::int64_t from = 0;
  std::int64_t to = 0;
  std::int64_t count = 0;

  friend bool operator==(const Run&, const Run&) = default;
};

/// Walks the maximal common runs of a box that lies in two row-major arrays, ascending in both: what a copy of the box
/// from one into the other moves. All runs have the same count.
class RunCursor {
 public:
  /// The box has `extent`, and starts at index `from` in an array of shape `from_shape`, at `to` in one of `to_shape`.
  /// It must lie inside both.
  RunCursor(const Shape& extent, const Shape& from_shape, const Shape& from, const Shape& to_shape, const Shape& to);

  bool is_done() const { return run_.count == 0; }
  const Run& run() const { return run_; }
  void next() {
    for (std::size_t d = outer_.size(); d-- > 0;) {
      Dimension& dimension = outer_[d];
      run_.from += dimension.from_stride;
      run_.to += dimension.to_stride;
      if (++dimension.index < dimension.extent) return;
      run_.from -= dimension.extent * dimension.from_stride;
      run_.to -= dimension.extent * dimension.to_stride;
      dimension.index = 0;
    }
    run_.count = 0;
  }

 private:
  /// One that is walked index by index; those after it are inside a run.
  struct Dimension {
    std::int64_t extent;
    std::int64_t from_stride;
    std::int64_t to_stride;
    std::int64_t index;
  };
  std::vector<Dimension> outer_;
  Run run_;
};

/// The runs of `box` in a row-major tensor of `shape` (from), and in the dense array of the box itself (to).
inline RunCursor runs_of(const Shape& shape, const Box& box) {
  return {box.extent, shape, box.offset, box.extent, Shape(shape.size(), 0)};
}

/// Calls visit(Box, first) for boxes that together are elements [begin, end) of a row-major array of `shape`, in
/// ascending order; `first` is the box's first element. At most 2·dimensions - 1 boxes.
template <class Visitor>
void for_each_box(const Shape& shape, std::int64_t begin, std::int64_t end, Visitor&& visit) {
  while (begin < end) {
    // The largest box that starts at `begin`: whole rows of the first dimension d in which begin is aligned.
    Shape index(shape.size(), 0);
    std::int64_t rest = begin;
    for (std::size_t d = shape.size(); d-- > 0;) {
      index[d] = rest % shape[d];
      rest /= shape[d];
    }
    Box box{index, Shape(shape.size(), 1)};
    std::int64_t count = 1;
    for (std::size_t d = shape.size(); d-- > 0;) {
      const std::int64_t rows =
          (end - begin) / count < shape[d] - index[d] ? (end - begin) / count : shape[d] - index[d];
      box.extent[d] = rows;
      count *= rows;
      if (rows != shape[d]) break;
    }
    visit(box, begin);
    begin += count;
  }
}

}  // namespace fsdp2
