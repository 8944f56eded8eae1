// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/diff.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <type_traits>

#include "checkpoint/selection.hpp"
#include "fsdp2/error.hpp"
#include "fsdp2/low_precision.hpp"

namespace fsdp2 {

namespace checkpoint {

namespace {

double magnitude(double value) {
  return std::fabs(value);
}
double magnitude(std::complex<double> value) {
  return std::hypot(value.real(), value.imag());
}
bool is_finite(double value) {
  return std::isfinite(value);
}
bool is_finite(std::complex<double> value) {
  return std::isfinite(value.real()) && std::isfinite(value.imag());
}

/// |x - y|. Of integers exactly, before it is rounded once: two large ones may be the same double.
template <class T>
double distance(T x, T y) {
  if constexpr (std::is_integral_v<T>) {
    const auto modular = [](T value) { return static_cast<std::uint64_t>(static_cast<std::int64_t>(value)); };
    return static_cast<double>(modular(std::max(x, y)) - modular(std::min(x, y)));
  } else if constexpr (std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>) {
    return magnitude(std::complex<double>(x) - std::complex<double>(y));
  } else {
    return magnitude(static_cast<double>(x) - static_cast<double>(y));
  }
}

template <class T>
auto wide(T value) {
  if constexpr (std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>)
    return std::complex<double>(value);
  else
    return static_cast<double>(value);
}

/// What there is to say of the elements seen so far.
struct Comparison {
  const DiffOptions& options;
  TensorDifference& result;
  std::int64_t first = -1;

  template <class T>
  void add(std::int64_t begin, const std::byte* a, const std::byte* b, std::int64_t count) {
    const bool is_exact = options.relative_tolerance == 0 && options.absolute_tolerance == 0;
    for (std::int64_t i = 0; i < count; ++i, a += sizeof(T), b += sizeof(T)) {
      if (std::memcmp(a, b, sizeof(T)) == 0) continue;
      T x;
      T y;
      std::memcpy(&x, a, sizeof(T));
      std::memcpy(&y, b, sizeof(T));
      const bool both_finite = is_finite(wide(x)) && is_finite(wide(y));
      const double apart = distance(x, y);
      const double scale = magnitude(wide(y));
      if (both_finite && !is_exact && apart <= options.absolute_tolerance + options.relative_tolerance * scale)
        continue;
      if (first < 0) first = begin + i;
      ++result.count;
      if (both_finite) {
        result.max_absolute = std::max(result.max_absolute, apart);
        if (apart != 0) result.max_relative = std::max(result.max_relative, apart / scale);
      } else {
        ++result.not_finite;
      }
    }
  }

  void add(DType dtype, std::int64_t begin, const std::byte* a, const std::byte* b, std::int64_t count) {
    switch (dtype) {
      case DType::f64:
        return add<double>(begin, a, b, count);
      case DType::f32:
        return add<float>(begin, a, b, count);
      case DType::f16:
        return add<float16>(begin, a, b, count);
      case DType::bf16:
        return add<bfloat16>(begin, a, b, count);
      case DType::f8_e4m3:
        return add<float8_e4m3>(begin, a, b, count);
      case DType::f8_e5m2:
        return add<float8_e5m2>(begin, a, b, count);
      case DType::i64:
        return add<std::int64_t>(begin, a, b, count);
      case DType::i32:
        return add<std::int32_t>(begin, a, b, count);
      case DType::i16:
        return add<std::int16_t>(begin, a, b, count);
      case DType::i8:
        return add<std::int8_t>(begin, a, b, count);
      case DType::u64:
        return add<std::uint64_t>(begin, a, b, count);
      case DType::u32:
        return add<std::uint32_t>(begin, a, b, count);
      case DType::u16:
        return add<std::uint16_t>(begin, a, b, count);
      case DType::u8:
      case DType::boolean:  // a file may hold other bytes than 0 and 1
        return add<std::uint8_t>(begin, a, b, count);
      case DType::complex64:
        return add<std::complex<float>>(begin, a, b, count);
      case DType::complex128:
        return add<std::complex<double>>(begin, a, b, count);
    }
  }
};

Shape index_of(const Shape& shape, std::int64_t element) {
  Shape index(shape.size());
  for (std::size_t d = shape.size(); d-- > 0;) {
    index[d] = element % shape[d];
    element /= shape[d];
  }
  return index;
}

/// Tensors of one name, dtype and shape whose digests differ.
struct Pair {
  std::size_t in_a;
  std::size_t in_b;
  TensorDifference difference = {};
  std::int64_t first = -1;  // element that differs
};

/// Compares tensors through a window on each checkpoint that holds as many of them, or as much of one, as fit: blocks
/// with several are read once.
class PairReader {
 public:
  PairReader(CheckpointReader& a, CheckpointReader& b, const DiffOptions& options) : a_(a), b_(b), options_(options) {}

  void compare(std::span<Pair> pairs) {
    std::int64_t bytes = 0;
    for (const Pair& pair : pairs) bytes += a_.index().tensors[pair.in_a].bytes();
    // Each reader holds a block besides; smaller windows would read blocks over and over.
    const std::int64_t block_bytes = std::max(a_.index().sizes.block_bytes, b_.index().sizes.block_bytes);
    const std::int64_t window = std::min(std::max(options_.memory_bytes / 2 - block_bytes, block_bytes), bytes);
    of_a_.resize(static_cast<std::size_t>(window));
    of_b_.resize(of_a_.size());
    for (Pair& pair : pairs) add(pair);
    flush();
  }

 private:
  struct Part {
    Pair* pair;
    std::int64_t begin;  // elements
    std::int64_t count;
    std::int64_t at;  // in the windows
  };

  const TensorSpec& spec_of(const Pair& pair) const { return a_.index().tensors[pair.in_a].spec; }

  void add(Pair& pair) {
    const TensorSpec& spec = spec_of(pair);
    const std::int64_t width = size_of(spec.dtype);
    const std::int64_t elements = numel(spec.shape);
    for (std::int64_t begin = 0; begin < elements;) {
      const std::int64_t room = (static_cast<std::int64_t>(of_a_.size()) - used_) / width;
      if (room == 0) {
        flush();
        continue;
      }
      const std::int64_t count = std::min(room, elements - begin);
      parts_.push_back({&pair, begin, count, used_});
      used_ += count * width;
      begin += count;
    }
  }

  void flush() {
    std::vector<ElementRequest> from_a;
    std::vector<ElementRequest> from_b;
    for (const Part& part : parts_) {
      const TensorSpec& spec = spec_of(*part.pair);
      const Box whole = Box::whole(spec.shape);
      from_a.push_back({part.pair->in_a, whole, part.begin, part.count, spec.dtype, of_a_.data() + part.at});
      from_b.push_back({part.pair->in_b, whole, part.begin, part.count, spec.dtype, of_b_.data() + part.at});
    }
    read_elements(a_, from_a);
    read_elements(b_, from_b);
    for (const Part& part : parts_) {
      Comparison comparison{options_, part.pair->difference, part.pair->first};
      comparison.add(spec_of(*part.pair).dtype, part.begin, of_a_.data() + part.at, of_b_.data() + part.at, part.count);
      part.pair->first = comparison.first;
    }
    parts_.clear();
    used_ = 0;
  }

  CheckpointReader& a_;
  CheckpointReader& b_;
  const DiffOptions& options_;
  std::vector<std::byte> of_a_;
  std::vector<std::byte> of_b_;
  std::int64_t used_ = 0;
  std::vector<Part> parts_;
};

}  // namespace

}  // namespace checkpoint

DiffReport diff(const std::filesystem::path& path_a, const std::filesystem::path& path_b, const DiffOptions& options) {
  if (!(options.relative_tolerance >= 0) || !(options.absolute_tolerance >= 0))
    throw ConfigError(fmt::format("tolerances {} (relative) and {} (absolute) must be at least 0",
                                  options.relative_tolerance, options.absolute_tolerance));
  checkpoint::CheckpointReader a(path_a);
  checkpoint::CheckpointReader b(path_b);
  DiffReport report;
  report.a = a.index();
  report.b = b.index();
  const auto note = [&](const std::string& name, DifferenceKind kind) {
    report.differences.emplace_back().name = name;
    report.differences.back().kind = kind;
  };
  std::vector<checkpoint::Pair> pairs;
  const auto compare = [&](std::size_t in_a, std::size_t in_b) {
    const TensorEntry& x = report.a.tensors[in_a];
    const TensorEntry& y = report.b.tensors[in_b];
    if (x.spec.dtype != y.spec.dtype) note(x.name, DifferenceKind::dtype);
    if (x.spec.shape != y.spec.shape) note(x.name, DifferenceKind::shape);
    if (x.spec.dtype != y.spec.dtype || x.spec.shape != y.spec.shape) return;
    if (x.digest == y.digest)
      ++report.equal;
    else
      pairs.push_back({in_a, in_b});
  };
  const auto& of_a = report.a.tensors;
  const auto& of_b = report.b.tensors;
  for (std::size_t i = 0, j = 0; i < of_a.size() || j < of_b.size();) {
    if (j == of_b.size() || (i < of_a.size() && of_a[i].name < of_b[j].name))
      note(of_a[i++].name, DifferenceKind::only_in_a);
    else if (i == of_a.size() || of_b[j].name < of_a[i].name)
      note(of_b[j++].name, DifferenceKind::only_in_b);
    else
      compare(i++, j++);
  }
  checkpoint::PairReader(a, b, options).compare(pairs);
  for (checkpoint::Pair& pair : pairs) {
    const TensorEntry& tensor = report.a.tensors[pair.in_a];
    if (pair.first < 0) {
      ++report.close;
      continue;
    }
    pair.difference.name = tensor.name;
    pair.difference.first = checkpoint::index_of(tensor.spec.shape, pair.first);
    report.differences.push_back(std::move(pair.difference));
  }
  std::stable_sort(report.differences.begin(), report.differences.end(),
                   [](const TensorDifference& x, const TensorDifference& y) { return x.name < y.name; });
  report.bytes = a.bytes_read() + b.bytes_read();
  return report;
}

}  // namespace fsdp2
