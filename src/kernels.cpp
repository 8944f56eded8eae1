// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "kernels.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <complex>
#include <cstring>
#include <type_traits>

#include "castable.hpp"
#include "kokkos_compat.hpp"
#include "philox.hpp"

// Casts are bound by arithmetic on the vectors that every x86-64 has: where the processor has wider ones, they are
// used.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#include <immintrin.h>
#define FSDP2_HAS_WIDE_VECTORS
#define FSDP2_WIDE_VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define FSDP2_WIDE_VECTORS
#endif

// A fused multiply-add is a library call on the x86-64 that every processor has, with the same result.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__)
#define FSDP2_CHOOSES_FMA
#endif

namespace fsdp2::kernels {

FSDP2_WIDE_VECTORS void cast_elements(bfloat16* target, const float* source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = static_cast<bfloat16>(source[i]);
}
FSDP2_WIDE_VECTORS void cast_elements(float* target, const bfloat16* source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = source[i];
}
namespace {
FSDP2_WIDE_VECTORS void encode_elements(float16* target, const float* source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = static_cast<float16>(source[i]);
}
#if defined(FSDP2_HAS_WIDE_VECTORS)
/// The processor's conversion has the same bits, NaN included.
__attribute__((target("avx,f16c"))) void encode_elements_in_hardware(float16* target, const float* source,
                                                                     std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < count; ++i) target[i] = static_cast<float16>(source[i]);
}
#endif
}  // namespace

void cast_elements(float16* target, const float* source, std::int64_t count) {
#if defined(FSDP2_HAS_WIDE_VECTORS)
  static const bool is_in_hardware = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  if (is_in_hardware) return encode_elements_in_hardware(target, source, count);
#endif
  encode_elements(target, source, count);
}
FSDP2_WIDE_VECTORS void cast_elements(float* target, const float16* source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = source[i];
}

namespace {

using HostBytes = Kokkos::View<std::byte*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
using ConstHostBytes = Kokkos::View<const std::byte*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>> range(const ExecutionSpace& exec,
                                                                           std::int64_t count) {
  return {exec, 0, count};
}

void require_same_length(const Tensor& target, const Tensor& source) {
  if (target.bytes() != source.bytes())
    throw ShapeError(fmt::format("cannot copy {} bytes of {} {} into {} bytes of {} {}", source.bytes(),
                                 to_string(source.dtype()), to_string(source.shape()), target.bytes(),
                                 to_string(target.dtype()), to_string(target.shape())));
}

template <class T>
T* data_of(const Tensor& tensor) {
  return reinterpret_cast<T*>(tensor.data());
}

/// The type in which values of T are combined.
template <class T>
struct AccumulatorOf {
  using type = std::conditional_t<std::is_convertible_v<T, float> && !std::is_arithmetic_v<T>, float, T>;
};

/// Elements that one iteration of a host kernel handles, so that the compiler can vectorise across them; a GPU thread
/// takes one.
constexpr int block = compat::host_accessible<MemorySpace> ? 256 : 1;

template <class T, ReduceOp op>
struct ReduceParts {
  using Accumulator = typename AccumulatorOf<T>::type;

  const T* others;
  const T* own;
  T* result;
  std::int64_t count;
  std::int64_t part_count;
  std::int64_t own_part;

  KOKKOS_FUNCTION const T* part(std::int64_t index) const {
    if (index == own_part) return own;
    return others + (index < own_part ? index : index - 1) * count;
  }

  KOKKOS_FUNCTION static Accumulator combine(Accumulator a, Accumulator b) {
    if constexpr (op == ReduceOp::sum) {
      if constexpr (std::is_same_v<T, bool>)
        return a || b;
      else
        return static_cast<Accumulator>(a + b);
    } else if constexpr (op == ReduceOp::min) {
      return b < a ? b : a;
    } else {
      return a < b ? b : a;
    }
  }

  KOKKOS_FUNCTION void operator()(std::int64_t block_index) const {
    const std::int64_t begin = block_index * block;
    const auto length = static_cast<int>(count - begin < block ? count - begin : block);
    Accumulator sums[block];
    const T* const first = part(0) + begin;
    for (int i = 0; i < length; ++i) sums[i] = static_cast<Accumulator>(first[i]);
    for (std::int64_t index = 1; index < part_count; ++index) {
      const T* const values = part(index) + begin;
      for (int i = 0; i < length; ++i) sums[i] = combine(sums[i], static_cast<Accumulator>(values[i]));
    }
    for (int i = 0; i < length; ++i) result[begin + i] = static_cast<T>(sums[i]);
  }
};

template <class T, ReduceOp op>
void launch_reduce(const ExecutionSpace& exec, const Tensor& result, const Tensor& others, const Tensor& own,
                   std::int64_t own_part) {
  const std::int64_t count = result.numel();
  const ReduceParts<T, op> functor{
      data_of<const T>(others), data_of<const T>(own), data_of<T>(result), count, others.numel() / count + 1, own_part};
  Kokkos::parallel_for("fsdp2::reduce_parts", range(exec, (count + block - 1) / block), functor);
}

template <class T>
void reduce_as(const ExecutionSpace& exec, const Tensor& result, const Tensor& others, const Tensor& own,
               std::int64_t own_part, ReduceOp op) {
  if (op == ReduceOp::sum) return launch_reduce<T, ReduceOp::sum>(exec, result, others, own, own_part);
  if constexpr (std::is_same_v<T, Kokkos::complex<float>> || std::is_same_v<T, Kokkos::complex<double>>)
    throw ShapeError(fmt::format("{} has no minimum or maximum: only a sum", to_string(result.dtype())));
  else if (op == ReduceOp::min)
    launch_reduce<T, ReduceOp::min>(exec, result, others, own, own_part);
  else
    launch_reduce<T, ReduceOp::max>(exec, result, others, own, own_part);
}

/// Dimensions of the largest box that kernels take.
constexpr int max_dimensions = 8;

/// Where the elements of a box lie in a row-major tensor.
struct BoxIndex {
  int dimensions;
  std::int64_t extent[max_dimensions];
  std::int64_t stride[max_dimensions];  // of the tensor, in elements
  std::int64_t start;

  BoxIndex(const Shape& shape, const Box& box)
      : dimensions(static_cast<int>(shape.size())), extent{}, stride{}, start(0) {
    if (dimensions > max_dimensions)
      throw ShapeError(fmt::format("shape {} has more than {} dimensions", to_string(shape), max_dimensions));
    std::int64_t size = 1;
    for (std::size_t d = shape.size(); d-- > 0;) {
      extent[d] = box.extent[d];
      stride[d] = size;
      start += box.offset[d] * size;
      size *= shape[d];
    }
  }

  KOKKOS_FUNCTION std::int64_t operator()(std::int64_t index) const {
    std::int64_t place = start;
    for (int d = dimensions - 1; d >= 0; --d) {
      place += (index % extent[d]) * stride[d];
      index /= extent[d];
    }
    return place;
  }
};

/// Between a box of one tensor and a dense one.
template <bool extracts>
struct CopyBox {
  const std::byte* source;
  std::byte* target;
  std::int64_t element_bytes;
  BoxIndex place;

  KOKKOS_FUNCTION void operator()(std::int64_t index) const {
    const std::int64_t in_box = place(index);
    memcpy(target + (extracts ? index : in_box) * element_bytes, source + (extracts ? in_box : index) * element_bytes,
           static_cast<std::size_t>(element_bytes));
  }
};

template <bool extracts>
void copy_box(const ExecutionSpace& exec, const Tensor& target, const Tensor& source, const Box& box) {
  const Tensor& whole = extracts ? source : target;
  const Tensor& dense = extracts ? target : source;
  const BoxIndex place(whole.shape(), box);
  const std::int64_t count = box.numel();
  if (dense.dtype() != whole.dtype() || dense.numel() != count)
    throw ShapeError(fmt::format("a box of {} {} does not fit {} {}", to_string(whole.dtype()), to_string(box.extent),
                                 to_string(dense.dtype()), to_string(dense.shape())));
  if (count == 0) return;
  Kokkos::parallel_for("fsdp2::copy_box", range(exec, count),
                       CopyBox<extracts>{source.data(), target.data(), size_of(source.dtype()), place});
}

/// The largest piece of a segment that one host iteration or one team takes.
constexpr std::int64_t segment_piece = 65536;

using SegmentPolicy = Kokkos::TeamPolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

SegmentPolicy segment_policy(const ExecutionSpace& exec, const Tensor& segments) {
  const auto pieces = static_cast<int>(segments.shape()[0]);
  if constexpr (compat::host_accessible<MemorySpace>)
    return SegmentPolicy(exec, pieces, 1);
  else
    return SegmentPolicy(exec, pieces, Kokkos::AUTO);
}

struct CopySegments {
  const Segment* segments;
  const std::byte* source;
  std::byte* target;

  KOKKOS_FUNCTION void operator()(const SegmentPolicy::member_type& team) const {
    const Segment piece = segments[team.league_rank()];
    if constexpr (compat::host_accessible<MemorySpace>) {
      memcpy(target + piece.target, source + piece.source, static_cast<std::size_t>(piece.count));
    } else {
      for (std::int64_t i = team.team_rank(); i < piece.count; i += team.team_size())
        target[piece.target + i] = source[piece.source + i];
    }
  }
};

struct ZeroSegments {
  const Segment* segments;
  std::byte* target;

  KOKKOS_FUNCTION void operator()(const SegmentPolicy::member_type& team) const {
    const Segment piece = segments[team.league_rank()];
    for (std::int64_t i = team.team_rank(); i < piece.count; i += team.team_size())
      target[piece.target + i] = std::byte{0};
  }
};

/// An element-wise kernel: Body(begin, end) is called for ranges of at most `block` elements.
template <class Body>
struct Blocks {
  Body body;
  std::int64_t count;

  KOKKOS_FUNCTION void operator()(std::int64_t block_index) const {
    const std::int64_t begin = block_index * block;
    body(begin, count - begin < block ? count : begin + block);
  }
};

template <class Body>
void for_blocks(const ExecutionSpace& exec, const char* label, std::int64_t count, const Body& body) {
  if (count == 0) return;
  Kokkos::parallel_for(label, range(exec, (count + block - 1) / block), Blocks<Body>{body, count});
}

/// Whether a host kernel has vectors for this cast.
template <class Target, class Source>
inline constexpr bool has_wide_cast = compat::host_accessible<MemorySpace> && sizeof(Target) + sizeof(Source) == 6 &&
                                      (std::is_same_v<Target, float> || std::is_same_v<Source, float>);

/// Asks for the cache lines of a block that comes later; one past the end does no harm. Two streams of different width
/// defeat the prefetchers of current processors: without it, casts run at two thirds of the speed of memcpy.
template <class T>
void prefetch_block(const T* values) {
  for (int i = 0; i < block; i += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(values + i);
}

template <class Target, class Source>
struct Cast {
  Target* target;
  const Source* source;

  KOKKOS_FUNCTION void operator()(std::int64_t begin, std::int64_t end) const {
    if constexpr (has_wide_cast<Target, Source>) {
      prefetch_block(source + begin + 2 * block);
      prefetch_block(target + begin + 2 * block);
      cast_elements(target + begin, source + begin, end - begin);
    } else {
      for (std::int64_t i = begin; i < end; ++i)
        target[i] = static_cast<Target>(static_cast<Compute<Target, Source>>(source[i]));
    }
  }
};

template <class Gradient, class Sum, bool add>
struct Accumulate {
  using Number = Compute<Gradient, Sum>;

  Gradient* gradient;
  const Sum* sum;
  Number divisor;

  KOKKOS_FUNCTION void operator()(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t i = begin; i < end; ++i) {
      const Number share = static_cast<Number>(sum[i]) / divisor;
      gradient[i] = static_cast<Gradient>(add ? static_cast<Number>(gradient[i]) + share : share);
    }
  }
};

struct CountDifferences {
  const std::byte* a;
  const std::byte* b;

  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t& count) const { count += a[i] == b[i] ? 0 : 1; }
};

struct Magnitude {
  using Reducer = Kokkos::Sum<double, MemorySpace>;
  template <class T>
  KOKKOS_FUNCTION static double term(T x) {
    return x < 0 ? -static_cast<double>(x) : static_cast<double>(x);
  }
  KOKKOS_FUNCTION static double combine(double a, double b) { return a + b; }
  KOKKOS_FUNCTION static double widen(double value) { return value; }
};

struct Square {
  using Reducer = Kokkos::Sum<double, MemorySpace>;
  template <class T>
  KOKKOS_FUNCTION static double term(T x) {
    return static_cast<double>(x) * static_cast<double>(x);
  }
  KOKKOS_FUNCTION static double combine(double a, double b) { return a + b; }
  KOKKOS_FUNCTION static double widen(double value) { return value; }
};

/// Of the bits, which are in the order of the magnitudes, with NaN at the end.
struct Maximum {
  using Reducer = Kokkos::Max<std::uint64_t, MemorySpace>;
  KOKKOS_FUNCTION static std::uint32_t term(float x) { return detail::bit_cast<std::uint32_t>(x) & 0x7fffffffu; }
  KOKKOS_FUNCTION static std::uint64_t term(double x) {
    return detail::bit_cast<std::uint64_t>(x) & 0x7fffffffffffffffu;
  }
  template <class T>
  KOKKOS_FUNCTION static T combine(T a, T b) {
    return a < b ? b : a;
  }
  KOKKOS_FUNCTION static std::uint64_t widen(std::uint32_t bits) {
    return detail::bit_cast<std::uint64_t>(static_cast<double>(detail::bit_cast<float>(bits)));
  }
  KOKKOS_FUNCTION static std::uint64_t widen(std::uint64_t bits) { return bits; }
};

template <class Norm, class T>
struct ReduceSegments {
  using Result = typename Norm::Reducer::value_type;
  using Number = Compute<T>;
  using Partial = decltype(Norm::term(Number()));
  /// Independent partial results, so that the compiler can vectorise across them.
  static constexpr int lanes = compat::host_accessible<MemorySpace> ? 16 : 1;

  const Segment* segments;
  const T* source;

  KOKKOS_FUNCTION void operator()(const SegmentPolicy::member_type& team, Result& result) const {
    const Segment piece = segments[team.league_rank()];
    const T* values = source + piece.source;
    Partial partial[lanes] = {};
    std::int64_t i = static_cast<std::int64_t>(team.team_rank()) * lanes;
    for (; i + lanes <= piece.count; i += static_cast<std::int64_t>(team.team_size()) * lanes)
      for (int lane = 0; lane < lanes; ++lane)
        partial[lane] = Norm::combine(partial[lane], Norm::term(static_cast<Number>(values[i + lane])));
    for (int lane = 0; i + lane < piece.count; ++lane)
      partial[lane] = Norm::combine(partial[lane], Norm::term(static_cast<Number>(values[i + lane])));
    for (int lane = 0; lane < lanes; ++lane) result = Norm::combine(result, Norm::widen(partial[lane]));
  }
};

template <class Norm>
void launch_reduce_segments(const ExecutionSpace& exec, const Tensor& result, const Tensor& source,
                            const Tensor& segments) {
  using Reducer = typename Norm::Reducer;
  using Result = typename Reducer::value_type;
  const Kokkos::View<Result, MemorySpace> target(data_of<Result>(result));
  for_castable(source.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    Kokkos::parallel_reduce("fsdp2::reduce_segments", segment_policy(exec, segments),
                            ReduceSegments<Norm, T>{data_of<const Segment>(segments), data_of<const T>(source)},
                            Reducer(target));
  });
}

template <class T>
struct Scale {
  T* values;
  Compute<T> factor;

  KOKKOS_FUNCTION void operator()(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t i = begin; i < end; ++i) values[i] = static_cast<T>(static_cast<Compute<T>>(values[i]) * factor);
  }
};

template <class T>
struct FillConstant {
  T* target;
  T value;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const { target[i] = value; }
};

template <class T>
struct FillUniform {
  T* target;
  BoxIndex place;
  std::uint64_t key;
  std::uint64_t seed;
  double low;
  double high;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const PhiloxBlock random = philox(seed, static_cast<std::uint64_t>(place(i)), key);
    target[i] = static_cast<T>(low + (high - low) * (random.word[0] * 0x1p-32));
  }
};

/// Box and Muller, of the first two words or the last two.
KOKKOS_FUNCTION double standard_normal(const PhiloxBlock& random, int pair) {
  const double radius = compat::sqrt(-2.0 * compat::log((random.word[2 * pair] + 1.0) * 0x1p-32));
  const double angle = 6.283185307179586 * (random.word[2 * pair + 1] * 0x1p-32);
  return radius * compat::cos(angle);
}

template <class T>
struct FillNormal {
  T* target;
  BoxIndex place;
  std::uint64_t key;
  std::uint64_t seed;
  double mean;
  double standard_deviation;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const PhiloxBlock random = philox(seed, static_cast<std::uint64_t>(place(i)), key);
    target[i] = static_cast<T>(mean + standard_deviation * standard_normal(random, 0));
  }
};

/// Normal numbers until one is within the bounds. Each attempt has another key, so that elements stay independent.
template <class T>
struct FillTruncatedNormal {
  T* target;
  BoxIndex place;
  std::uint64_t key;
  std::uint64_t seed;
  double mean;
  double standard_deviation;
  double low;
  double high;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const auto index = static_cast<std::uint64_t>(place(i));
    for (std::uint64_t attempt = 0;; ++attempt) {
      const PhiloxBlock random = philox(seed + attempt * 0x9e3779b97f4a7c15u, index, key);
      for (int pair = 0; pair < 2; ++pair) {
        const double value = mean + standard_deviation * standard_normal(random, pair);
        if (value < low || value > high) continue;
        target[i] = static_cast<T>(value);
        return;
      }
    }
  }
};

struct Increment {
  std::int64_t* step;
  KOKKOS_FUNCTION void operator()(std::int64_t) const { ++*step; }
};

struct AdamWScalars {
  double* scalars;
  const std::int64_t* step;
  double lr;
  double beta1;
  double beta2;

  KOKKOS_FUNCTION void operator()(std::int64_t) const {
    const auto t = static_cast<double>(*step);
    scalars[0] = lr / (1.0 - compat::pow(beta1, t));
    scalars[1] = compat::sqrt(1.0 - compat::pow(beta2, t));
  }
};

#if defined(FSDP2_CHOOSES_FMA)
template <class Update>
__attribute__((target("avx2,fma"))) void update_in_hardware(const Update& update, std::int64_t begin,
                                                            std::int64_t end) {
  update.update(begin, end);
}
#endif

/// The operations of torch.optim.AdamW on a CPU, in its order, with its fused multiply-adds: where terms cancel, other
/// roundings would be many units in the last place.
template <class Parameter, class Gradient>
struct AdamWUpdate {
  using Number = Compute<Parameter, Gradient>;

  Parameter* parameters;
  const Gradient* gradients;
  Number* exp_avg;
  Number* exp_avg_sq;
  const double* scalars;
  Number decay;
  Number rest1;  // 1 - beta1
  Number beta2;
  Number rest2;
  Number eps;

  KOKKOS_FORCEINLINE_FUNCTION void update(std::int64_t begin, std::int64_t end) const {
    const auto rate = static_cast<Number>(-scalars[0]);
    const auto correction = static_cast<Number>(scalars[1]);
    for (std::int64_t i = begin; i < end; ++i) {
      const auto g = static_cast<Number>(gradients[i]);
      const Number m = compat::fma(rest1, g - exp_avg[i], exp_avg[i]);
      const Number v = compat::fma(rest2 * g, g, beta2 * exp_avg_sq[i]);
      exp_avg[i] = m;
      exp_avg_sq[i] = v;
      parameters[i] = static_cast<Parameter>(static_cast<Number>(parameters[i]) * decay +
                                             rate * m / (compat::sqrt(v) / correction + eps));
    }
  }

  KOKKOS_FUNCTION void operator()(std::int64_t begin, std::int64_t end) const {
#if defined(FSDP2_CHOOSES_FMA)
    static const bool is_in_hardware = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (is_in_hardware) return update_in_hardware(*this, begin, end);
#endif
    update(begin, end);
  }
};

template <class Parameter, class Gradient>
struct SgdUpdate {
  using Number = Compute<Parameter, Gradient>;

  Parameter* parameters;
  const Gradient* gradients;
  Number lr;
  Number weight_decay;

  KOKKOS_FUNCTION void operator()(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t i = begin; i < end; ++i) {
      const auto p = static_cast<Number>(parameters[i]);
      parameters[i] = static_cast<Parameter>(p - lr * (static_cast<Number>(gradients[i]) + weight_decay * p));
    }
  }
};

template <class Parameter, class Gradient>
struct SgdMomentumUpdate {
  using Number = Compute<Parameter, Gradient>;

  Parameter* parameters;
  const Gradient* gradients;
  Number* momentum_buffer;
  Number lr;
  Number momentum;
  Number weight_decay;

  KOKKOS_FUNCTION void operator()(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t i = begin; i < end; ++i) {
      const auto p = static_cast<Number>(parameters[i]);
      const Number g = static_cast<Number>(gradients[i]) + weight_decay * p;
      const Number m = momentum * momentum_buffer[i] + g;
      momentum_buffer[i] = m;
      parameters[i] = static_cast<Parameter>(p - lr * m);
    }
  }
};

/// Visits the types of parameters and gradients: the same, or low-precision gradients of wider parameters.
template <class Visitor>
void for_update(const Tensor& parameters, const Tensor& gradients, Visitor&& visit) {
  for_castable(parameters.dtype(), [&](auto parameter) {
    using Parameter = typename decltype(parameter)::type;
    if (gradients.dtype() == parameters.dtype()) return visit(parameter, parameter);
    if constexpr (sizeof(Parameter) > 2) {
      if (gradients.dtype() == DType::bf16) return visit(parameter, std::type_identity<bfloat16>());
      if (gradients.dtype() == DType::f16) return visit(parameter, std::type_identity<float16>());
    }
    throw ShapeError(fmt::format("{} parameters cannot be updated by {} gradients", to_string(parameters.dtype()),
                                 to_string(gradients.dtype())));
  });
}

}  // namespace

template <class Space>
void zero(const ExecutionSpace& exec, const Kokkos::View<std::byte*, Space>& bytes) {
  if (bytes.extent(0) == 0) return;
  if constexpr (compat::kernel_accessible<ExecutionSpace, Space>)
    Kokkos::deep_copy(exec, bytes, std::byte{0});
  else
    std::memset(bytes.data(), 0, bytes.extent(0));
}

template void zero(const ExecutionSpace&, const Kokkos::View<std::byte*, Kokkos::HostSpace>&);
#if defined(KOKKOS_ENABLE_CUDA)
template void zero(const ExecutionSpace&, const Kokkos::View<std::byte*, Kokkos::CudaSpace>&);
#endif

void poison(const Tensor& tensor) noexcept {
  const ExecutionSpace exec;
  Kokkos::deep_copy(exec, tensor.buffer(), std::byte{0xff});
  compat::fence(exec, "fsdp2::poison");
}

void copy(const ExecutionSpace& exec, const Tensor& target, const Tensor& source) {
  require_same_length(target, source);
  if (source.bytes() != 0 && target.data() != source.data()) Kokkos::deep_copy(exec, target.buffer(), source.buffer());
}

void copy_to_host(const ExecutionSpace& exec, std::byte* target, const Tensor& source) {
  if (source.bytes() == 0) return;
  Kokkos::deep_copy(exec, HostBytes(target, source.buffer().extent(0)), source.buffer());
  compat::fence(exec, "fsdp2::copy_to_host");
}

void copy_from_host(const ExecutionSpace& exec, const Tensor& target, const std::byte* source) {
  if (target.bytes() == 0) return;
  Kokkos::deep_copy(exec, target.buffer(), ConstHostBytes(source, target.buffer().extent(0)));
  compat::fence(exec, "fsdp2::copy_from_host");
}

void cast(const ExecutionSpace& exec, const Tensor& target, const Tensor& source) {
  if (target.dtype() == source.dtype()) return copy(exec, target, source);
  if (target.numel() != source.numel())
    throw ShapeError(fmt::format("cannot cast {} elements into {}", source.numel(), target.numel()));
  for_castable(target.dtype(), [&](auto target_tag) {
    for_castable(source.dtype(), [&](auto source_tag) {
      using Target = typename decltype(target_tag)::type;
      using Source = typename decltype(source_tag)::type;
      if constexpr (!std::is_same_v<Target, Source>)
        for_blocks(exec, "fsdp2::cast", target.numel(),
                   Cast<Target, Source>{data_of<Target>(target), data_of<const Source>(source)});
    });
  });
}

std::int64_t count_differences(const ExecutionSpace& exec, const Tensor& a, const Tensor& b) {
  require_same_length(a, b);
  std::int64_t count = 0;
  Kokkos::parallel_reduce("fsdp2::count_differences", range(exec, a.bytes()), CountDifferences{a.data(), b.data()},
                          count);
  return count;
}

void extract_box(const ExecutionSpace& exec, const Tensor& target, const Tensor& source, const Box& box) {
  copy_box<true>(exec, target, source, box);
}

void insert_box(const ExecutionSpace& exec, const Tensor& target, const Tensor& source, const Box& box) {
  copy_box<false>(exec, target, source, box);
}

void reduce_parts(const ExecutionSpace& exec, const Tensor& result, const Tensor& others, const Tensor& own,
                  std::int64_t own_part, ReduceOp op) {
  if (result.numel() == 0) return;
  if (own.dtype() != result.dtype() || own.numel() != result.numel() || others.dtype() != result.dtype() ||
      others.numel() % result.numel() != 0)
    throw ShapeError(fmt::format("{} {} and {} {} cannot be reduced to {} {}", own.numel(), to_string(own.dtype()),
                                 others.numel(), to_string(others.dtype()), result.numel(), to_string(result.dtype())));
  switch (result.dtype()) {
    case DType::f64:
      return reduce_as<double>(exec, result, others, own, own_part, op);
    case DType::f32:
      return reduce_as<float>(exec, result, others, own, own_part, op);
    case DType::f16:
      return reduce_as<float16>(exec, result, others, own, own_part, op);
    case DType::bf16:
      return reduce_as<bfloat16>(exec, result, others, own, own_part, op);
    case DType::f8_e4m3:
      return reduce_as<float8_e4m3>(exec, result, others, own, own_part, op);
    case DType::f8_e5m2:
      return reduce_as<float8_e5m2>(exec, result, others, own, own_part, op);
    case DType::i64:
      return reduce_as<std::int64_t>(exec, result, others, own, own_part, op);
    case DType::i32:
      return reduce_as<std::int32_t>(exec, result, others, own, own_part, op);
    case DType::i16:
      return reduce_as<std::int16_t>(exec, result, others, own, own_part, op);
    case DType::i8:
      return reduce_as<std::int8_t>(exec, result, others, own, own_part, op);
    case DType::u64:
      return reduce_as<std::uint64_t>(exec, result, others, own, own_part, op);
    case DType::u32:
      return reduce_as<std::uint32_t>(exec, result, others, own, own_part, op);
    case DType::u16:
      return reduce_as<std::uint16_t>(exec, result, others, own, own_part, op);
    case DType::u8:
      return reduce_as<std::uint8_t>(exec, result, others, own, own_part, op);
    case DType::boolean:
      return reduce_as<bool>(exec, result, others, own, own_part, op);
    case DType::complex64:
      return reduce_as<Kokkos::complex<float>>(exec, result, others, own, own_part, op);
    case DType::complex128:
      return reduce_as<Kokkos::complex<double>>(exec, result, others, own, own_part, op);
  }
}

Tensor make_segments(const ExecutionSpace& exec, const std::vector<Segment>& segments) {
  std::vector<Segment> pieces;
  for (const Segment& segment : segments)
    for (std::int64_t done = 0; done < segment.count; done += segment_piece)
      pieces.push_back({segment.source + done, segment.target + done, std::min(segment_piece, segment.count - done)});
  if (pieces.empty()) return {};
  const Tensor table =
      Tensor::uninitialized(DType::i64, {static_cast<std::int64_t>(pieces.size()), 3}, "fsdp2::segments");
  static_assert(sizeof(Segment) == 3 * sizeof(std::int64_t));
  copy_from_host(exec, table, reinterpret_cast<const std::byte*>(pieces.data()));
  return table;
}

void copy_segments(const ExecutionSpace& exec, const Tensor& target, const Tensor& source, const Tensor& segments) {
  if (segments.numel() == 0) return;
  Kokkos::parallel_for("fsdp2::copy_segments", segment_policy(exec, segments),
                       CopySegments{data_of<const Segment>(segments), source.data(), target.data()});
}

void zero_segments(const ExecutionSpace& exec, const Tensor& target, const Tensor& segments) {
  if (segments.numel() == 0) return;
  Kokkos::parallel_for("fsdp2::zero_segments", segment_policy(exec, segments),
                       ZeroSegments{data_of<const Segment>(segments), target.data()});
}

void accumulate(const ExecutionSpace& exec, const Tensor& gradient, const Tensor& sum, double divisor, bool add) {
  for_castable(gradient.dtype(), [&](auto gradient_tag) {
    for_castable(sum.dtype(), [&](auto sum_tag) {
      using Gradient = typename decltype(gradient_tag)::type;
      using Sum = typename decltype(sum_tag)::type;
      Gradient* const target = data_of<Gradient>(gradient);
      const Sum* const source = data_of<const Sum>(sum);
      const auto number = static_cast<Compute<Gradient, Sum>>(divisor);
      if (add)
        for_blocks(exec, "fsdp2::accumulate", gradient.numel(),
                   Accumulate<Gradient, Sum, true>{target, source, number});
      else
        for_blocks(exec, "fsdp2::accumulate", gradient.numel(),
                   Accumulate<Gradient, Sum, false>{target, source, number});
    });
  });
}

void reduce_segments(const ExecutionSpace& exec, const Tensor& result, const Tensor& source, const Tensor& segments,
                     Term term) {
  if (segments.numel() == 0) return;
  switch (term) {
    case Term::magnitude:
      return launch_reduce_segments<Magnitude>(exec, result, source, segments);
    case Term::square:
      return launch_reduce_segments<Square>(exec, result, source, segments);
    case Term::maximum:
      return launch_reduce_segments<Maximum>(exec, result, source, segments);
  }
}

void scale(const ExecutionSpace& exec, const Tensor& tensor, double factor) {
  for_castable(tensor.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_blocks(exec, "fsdp2::scale", tensor.numel(), Scale<T>{data_of<T>(tensor), static_cast<Compute<T>>(factor)});
  });
}

void initialize(const ExecutionSpace& exec, const Tensor& target, const Initializer& initializer, const Shape& shape,
                const Box& box, std::uint64_t key) {
  const std::int64_t count = target.numel();
  if (count == 0) return;
  const BoxIndex place(shape, box);
  const auto& [kind, a, b, seed, low, high] = initializer;
  for_castable(target.dtype(), [&, a = a, b = b, seed = seed, low = low, high = high, kind = kind](auto tag) {
    using T = typename decltype(tag)::type;
    T* const data = data_of<T>(target);
    const auto policy = range(exec, count);
    switch (kind) {
      case Initializer::Kind::constant:
        return Kokkos::parallel_for("fsdp2::fill_constant", policy, FillConstant<T>{data, static_cast<T>(a)});
      case Initializer::Kind::uniform:
        return Kokkos::parallel_for("fsdp2::fill_uniform", policy, FillUniform<T>{data, place, key, seed, a, b});
      case Initializer::Kind::truncated_normal:
        return Kokkos::parallel_for("fsdp2::fill_truncated_normal", policy,
                                    FillTruncatedNormal<T>{data, place, key, seed, a, b, low, high});
      case Initializer::Kind::normal:
      case Initializer::Kind::kaiming:
        return Kokkos::parallel_for("fsdp2::fill_normal", policy, FillNormal<T>{data, place, key, seed, a, b});
    }
  });
}

void increment(const ExecutionSpace& exec, const Tensor& step) {
  Kokkos::parallel_for("fsdp2::increment", range(exec, 1), Increment{reinterpret_cast<std::int64_t*>(step.data())});
}

void adamw_scalars(const ExecutionSpace& exec, const Tensor& scalars, const Tensor& step, double lr, double beta1,
                   double beta2) {
  Kokkos::parallel_for("fsdp2::adamw_scalars", range(exec, 1),
                       AdamWScalars{data_of<double>(scalars), data_of<const std::int64_t>(step), lr, beta1, beta2});
}

void adamw(const ExecutionSpace& exec, const Tensor& parameters, const Tensor& gradients, const Tensor& exp_avg,
           const Tensor& exp_avg_sq, const Tensor& scalars, double decay, double beta1, double beta2, double eps) {
  for_update(parameters, gradients, [&](auto parameter, auto gradient) {
    using Parameter = typename decltype(parameter)::type;
    using Gradient = typename decltype(gradient)::type;
    using Update = AdamWUpdate<Parameter, Gradient>;
    using Number = typename Update::Number;
    for_blocks(exec, "fsdp2::adamw", parameters.numel(),
               Update{data_of<Parameter>(parameters), data_of<const Gradient>(gradients), data_of<Number>(exp_avg),
                      data_of<Number>(exp_avg_sq), data_of<const double>(scalars), static_cast<Number>(decay),
                      static_cast<Number>(1 - beta1), static_cast<Number>(beta2), static_cast<Number>(1 - beta2),
                      static_cast<Number>(eps)});
  });
}

void sgd(const ExecutionSpace& exec, const Tensor& parameters, const Tensor& gradients, double lr,
         double weight_decay) {
  for_update(parameters, gradients, [&](auto parameter, auto gradient) {
    using Parameter = typename decltype(parameter)::type;
    using Gradient = typename decltype(gradient)::type;
    using Update = SgdUpdate<Parameter, Gradient>;
    using Number = typename Update::Number;
    for_blocks(exec, "fsdp2::sgd", parameters.numel(),
               Update{data_of<Parameter>(parameters), data_of<const Gradient>(gradients), static_cast<Number>(lr),
                      static_cast<Number>(weight_decay)});
  });
}

void sgd_momentum(const ExecutionSpace& exec, const Tensor& parameters, const Tensor& gradients,
                  const Tensor& momentum_buffer, double lr, double momentum, double weight_decay) {
  for_update(parameters, gradients, [&](auto parameter, auto gradient) {
    using Parameter = typename decltype(parameter)::type;
    using Gradient = typename decltype(gradient)::type;
    using Update = SgdMomentumUpdate<Parameter, Gradient>;
    using Number = typename Update::Number;
    for_blocks(
        exec, "fsdp2::sgd_momentum", parameters.numel(),
        Update{data_of<Parameter>(parameters), data_of<const Gradient>(gradients), data_of<Number>(momentum_buffer),
               static_cast<Number>(lr), static_cast<Number>(momentum), static_cast<Number>(weight_decay)});
  });
}

}  // namespace fsdp2::kernels
