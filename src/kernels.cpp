// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "kernels.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <complex>
#include <cstring>
#include <type_traits>

#include "kokkos_compat.hpp"
#include "philox.hpp"

namespace fsdp2::kernels {

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

  const T* parts;
  T* result;
  std::int64_t count;
  std::int64_t part_count;

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
    for (int i = 0; i < length; ++i) sums[i] = static_cast<Accumulator>(parts[begin + i]);
    for (std::int64_t part = 1; part < part_count; ++part) {
      const T* values = parts + part * count + begin;
      for (int i = 0; i < length; ++i) sums[i] = combine(sums[i], static_cast<Accumulator>(values[i]));
    }
    for (int i = 0; i < length; ++i) result[begin + i] = static_cast<T>(sums[i]);
  }
};

template <class T, ReduceOp op>
void launch_reduce(const ExecutionSpace& exec, const Tensor& result, const Tensor& parts) {
  const std::int64_t count = result.numel();
  const ReduceParts<T, op> functor{reinterpret_cast<const T*>(parts.data()), reinterpret_cast<T*>(result.data()), count,
                                   parts.numel() / count};
  Kokkos::parallel_for("fsdp2::reduce_parts", range(exec, (count + block - 1) / block), functor);
}

template <class T>
void reduce_as(const ExecutionSpace& exec, const Tensor& result, const Tensor& parts, ReduceOp op) {
  if (op == ReduceOp::sum) return launch_reduce<T, ReduceOp::sum>(exec, result, parts);
  if constexpr (std::is_same_v<T, Kokkos::complex<float>> || std::is_same_v<T, Kokkos::complex<double>>)
    throw ShapeError(fmt::format("{} has no minimum or maximum: only a sum", to_string(result.dtype())));
  else if (op == ReduceOp::min)
    launch_reduce<T, ReduceOp::min>(exec, result, parts);
  else
    launch_reduce<T, ReduceOp::max>(exec, result, parts);
}

/// Dimensions of the largest box that extract_box takes in one kernel.
constexpr int max_dimensions = 8;

struct ExtractBox {
  const std::byte* source;
  std::byte* target;
  std::int64_t element_bytes;
  int dimensions;
  std::int64_t extent[max_dimensions];
  std::int64_t stride[max_dimensions];  // of the source, in elements
  std::int64_t start;

  KOKKOS_FUNCTION void operator()(std::int64_t index) const {
    std::int64_t from = start;
    std::int64_t rest = index;
    for (int d = dimensions - 1; d >= 0; --d) {
      from += (rest % extent[d]) * stride[d];
      rest /= extent[d];
    }
    memcpy(target + index * element_bytes, source + from * element_bytes, static_cast<std::size_t>(element_bytes));
  }
};

float* f32(const Tensor& tensor) {
  return reinterpret_cast<float*>(tensor.data());
}

/// The largest piece of a segment that one host iteration or one team copies.
constexpr std::int64_t segment_piece = 16384;

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
  const float* source;
  float* target;

  KOKKOS_FUNCTION void operator()(const SegmentPolicy::member_type& team) const {
    const Segment piece = segments[team.league_rank()];
    if constexpr (compat::host_accessible<MemorySpace>) {
      memcpy(target + piece.target, source + piece.source, static_cast<std::size_t>(piece.count) * sizeof(float));
    } else {
      for (std::int64_t i = team.team_rank(); i < piece.count; i += team.team_size())
        target[piece.target + i] = source[piece.source + i];
    }
  }
};

struct ZeroSegments {
  const Segment* segments;
  float* target;

  KOKKOS_FUNCTION void operator()(const SegmentPolicy::member_type& team) const {
    const Segment piece = segments[team.league_rank()];
    for (std::int64_t i = team.team_rank(); i < piece.count; i += team.team_size()) target[piece.target + i] = 0;
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

template <bool add>
struct Accumulate {
  float* gradient;
  const float* sum;
  float divisor;

  KOKKOS_FUNCTION void operator()(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t i = begin; i < end; ++i) {
      const float share = sum[i] / divisor;
      gradient[i] = add ? gradient[i] + share : share;
    }
  }
};

struct Magnitude {
  using Value = double;
  using Reducer = Kokkos::Sum<double, MemorySpace>;
  KOKKOS_FUNCTION static double term(float x) { return x < 0 ? -static_cast<double>(x) : static_cast<double>(x); }
  KOKKOS_FUNCTION static double combine(double a, double b) { return a + b; }
};

struct Square {
  using Value = double;
  using Reducer = Kokkos::Sum<double, MemorySpace>;
  KOKKOS_FUNCTION static double term(float x) { return static_cast<double>(x) * static_cast<double>(x); }
  KOKKOS_FUNCTION static double combine(double a, double b) { return a + b; }
};

/// Of the bits, which are in the order of the magnitudes, with NaN at the end.
struct Maximum {
  using Value = std::uint32_t;
  using Reducer = Kokkos::Max<std::uint64_t, MemorySpace>;
  KOKKOS_FUNCTION static std::uint32_t term(float x) {
    std::uint32_t bits = 0;
    memcpy(&bits, &x, sizeof(bits));
    return bits & 0x7fffffffu;
  }
  template <class T>
  KOKKOS_FUNCTION static T combine(T a, T b) {
    return a < b ? b : a;
  }
};

template <class Norm>
struct ReduceSegments {
  using Result = typename Norm::Reducer::value_type;
  /// Independent partial results, so that the compiler can vectorise across them.
  static constexpr int lanes = compat::host_accessible<MemorySpace> ? 16 : 1;

  const Segment* segments;
  const float* source;

  KOKKOS_FUNCTION void operator()(const SegmentPolicy::member_type& team, Result& result) const {
    const Segment piece = segments[team.league_rank()];
    const float* values = source + piece.source;
    typename Norm::Value partial[lanes] = {};
    std::int64_t i = static_cast<std::int64_t>(team.team_rank()) * lanes;
    for (; i + lanes <= piece.count; i += static_cast<std::int64_t>(team.team_size()) * lanes)
      for (int lane = 0; lane < lanes; ++lane)
        partial[lane] = Norm::combine(partial[lane], Norm::term(values[i + lane]));
    for (int lane = 0; i + lane < piece.count; ++lane)
      partial[lane] = Norm::combine(partial[lane], Norm::term(values[i + lane]));
    for (int lane = 0; lane < lanes; ++lane) result = Norm::combine(result, static_cast<Result>(partial[lane]));
  }
};

template <class Norm>
void launch_reduce_segments(const ExecutionSpace& exec, const Tensor& result, const Tensor& source,
                            const Tensor& segments) {
  using Reducer = typename Norm::Reducer;
  using Result = typename Reducer::value_type;
  const Kokkos::View<Result, MemorySpace> target(reinterpret_cast<Result*>(result.data()));
  Kokkos::parallel_reduce("fsdp2::reduce_segments", segment_policy(exec, segments),
                          ReduceSegments<Norm>{reinterpret_cast<const Segment*>(segments.data()), f32(source)},
                          Reducer(target));
}

struct Scale {
  float* values;
  float factor;

  KOKKOS_FUNCTION void operator()(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t i = begin; i < end; ++i) values[i] *= factor;
  }
};

struct FillUniform {
  float* target;
  std::int64_t first;
  std::uint64_t key;
  std::uint64_t seed;
  double low;
  double high;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const PhiloxBlock random = philox(seed, static_cast<std::uint64_t>(first + i), key);
    target[i] = static_cast<float>(low + (high - low) * (random.word[0] * 0x1p-32));
  }
};

struct FillNormal {
  float* target;
  std::int64_t first;
  std::uint64_t key;
  std::uint64_t seed;
  double mean;
  double standard_deviation;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {  // Box and Muller
    const PhiloxBlock random = philox(seed, static_cast<std::uint64_t>(first + i), key);
    const double radius = compat::sqrt(-2.0 * compat::log((random.word[0] + 1.0) * 0x1p-32));
    const double angle = 6.283185307179586 * (random.word[1] * 0x1p-32);
    target[i] = static_cast<float>(mean + standard_deviation * radius * compat::cos(angle));
  }
};

struct Increment {
  std::int64_t* step;
  KOKKOS_FUNCTION void operator()(std::int64_t) const { ++*step; }
};

struct AdamWScalars {
  float* scalars;
  const std::int64_t* step;
  double lr;
  double beta1;
  double beta2;

  KOKKOS_FUNCTION void operator()(std::int64_t) const {
    const auto t = static_cast<double>(*step);
    scalars[0] = static_cast<float>(lr / (1.0 - compat::pow(beta1, t)));
    scalars[1] = static_cast<float>(compat::sqrt(1.0 - compat::pow(beta2, t)));
  }
};

struct AdamWUpdate {
  float* parameters;
  const float* gradients;
  float* exp_avg;
  float* exp_avg_sq;
  const float* scalars;
  float decay;
  float beta1;
  float rest1;  // 1 - beta1
  float beta2;
  float rest2;
  float eps;

  KOKKOS_FUNCTION void operator()(std::int64_t begin, std::int64_t end) const {
    const float rate = scalars[0];
    const float correction = scalars[1];
    for (std::int64_t i = begin; i < end; ++i) {
      const float g = gradients[i];
      const float m = beta1 * exp_avg[i] + rest1 * g;
      const float v = beta2 * exp_avg_sq[i] + rest2 * g * g;
      exp_avg[i] = m;
      exp_avg_sq[i] = v;
      parameters[i] = parameters[i] * decay - rate * m / (compat::sqrt(v) / correction + eps);
    }
  }
};

struct SgdUpdate {
  float* parameters;
  const float* gradients;
  float lr;
  float weight_decay;

  KOKKOS_FUNCTION void operator()(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t i = begin; i < end; ++i) parameters[i] -= lr * (gradients[i] + weight_decay * parameters[i]);
  }
};

struct SgdMomentumUpdate {
  float* parameters;
  const float* gradients;
  float* momentum_buffer;
  float lr;
  float momentum;
  float weight_decay;

  KOKKOS_FUNCTION void operator()(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t i = begin; i < end; ++i) {
      const float g = gradients[i] + weight_decay * parameters[i];
      const float m = momentum * momentum_buffer[i] + g;
      momentum_buffer[i] = m;
      parameters[i] -= lr * m;
    }
  }
};

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

void extract_box(const ExecutionSpace& exec, const Tensor& target, const Tensor& source, const Box& box) {
  const std::size_t rank = source.shape().size();
  if (rank > max_dimensions)
    throw ShapeError(fmt::format("shape {} has more than {} dimensions", to_string(source.shape()), max_dimensions));
  const std::int64_t count = box.numel();
  if (target.dtype() != source.dtype() || target.numel() != count)
    throw ShapeError(fmt::format("a box of {} {} does not fit a target of {} {}", to_string(source.dtype()),
                                 to_string(box.extent), to_string(target.dtype()), to_string(target.shape())));
  if (count == 0) return;
  ExtractBox functor{source.data(), target.data(), size_of(source.dtype()), static_cast<int>(rank), {}, {}, 0};
  std::int64_t stride = 1;
  for (std::size_t d = rank; d-- > 0;) {
    functor.extent[d] = box.extent[d];
    functor.stride[d] = stride;
    functor.start += box.offset[d] * stride;
    stride *= source.shape()[d];
  }
  Kokkos::parallel_for("fsdp2::extract_box", range(exec, count), functor);
}

void reduce_parts(const ExecutionSpace& exec, const Tensor& result, const Tensor& parts, ReduceOp op) {
  if (result.numel() == 0) return;
  if (parts.dtype() != result.dtype() || parts.numel() % result.numel() != 0)
    throw ShapeError(fmt::format("{} {} cannot be reduced to {} {}", parts.numel(), to_string(parts.dtype()),
                                 result.numel(), to_string(result.dtype())));
  switch (result.dtype()) {
    case DType::f64:
      return reduce_as<double>(exec, result, parts, op);
    case DType::f32:
      return reduce_as<float>(exec, result, parts, op);
    case DType::f16:
      return reduce_as<float16>(exec, result, parts, op);
    case DType::bf16:
      return reduce_as<bfloat16>(exec, result, parts, op);
    case DType::f8_e4m3:
      return reduce_as<float8_e4m3>(exec, result, parts, op);
    case DType::f8_e5m2:
      return reduce_as<float8_e5m2>(exec, result, parts, op);
    case DType::i64:
      return reduce_as<std::int64_t>(exec, result, parts, op);
    case DType::i32:
      return reduce_as<std::int32_t>(exec, result, parts, op);
    case DType::i16:
      return reduce_as<std::int16_t>(exec, result, parts, op);
    case DType::i8:
      return reduce_as<std::int8_t>(exec, result, parts, op);
    case DType::u64:
      return reduce_as<std::uint64_t>(exec, result, parts, op);
    case DType::u32:
      return reduce_as<std::uint32_t>(exec, result, parts, op);
    case DType::u16:
      return reduce_as<std::uint16_t>(exec, result, parts, op);
    case DType::u8:
      return reduce_as<std::uint8_t>(exec, result, parts, op);
    case DType::boolean:
      return reduce_as<bool>(exec, result, parts, op);
    case DType::complex64:
      return reduce_as<Kokkos::complex<float>>(exec, result, parts, op);
    case DType::complex128:
      return reduce_as<Kokkos::complex<double>>(exec, result, parts, op);
  }
}

Tensor make_segments(const ExecutionSpace& exec, const std::vector<Segment>& segments) {
  std::vector<Segment> pieces;
  for (const Segment& segment : segments)
    for (std::int64_t done = 0; done < segment.count; done += segment_piece)
      pieces.push_back({segment.source + done, segment.target + done, std::min(segment_piece, segment.count - done)});
  const Tensor table =
      Tensor::uninitialized(DType::i64, {static_cast<std::int64_t>(pieces.size()), 3}, "fsdp2::segments");
  static_assert(sizeof(Segment) == 3 * sizeof(std::int64_t));
  copy_from_host(exec, table, reinterpret_cast<const std::byte*>(pieces.data()));
  return table;
}

void copy_segments(const ExecutionSpace& exec, const Tensor& target, const Tensor& source, const Tensor& segments) {
  if (segments.numel() == 0) return;
  Kokkos::parallel_for("fsdp2::copy_segments", segment_policy(exec, segments),
                       CopySegments{reinterpret_cast<const Segment*>(segments.data()), f32(source), f32(target)});
}

void zero_segments(const ExecutionSpace& exec, const Tensor& target, const Tensor& segments) {
  if (segments.numel() == 0) return;
  Kokkos::parallel_for("fsdp2::zero_segments", segment_policy(exec, segments),
                       ZeroSegments{reinterpret_cast<const Segment*>(segments.data()), f32(target)});
}

void accumulate(const ExecutionSpace& exec, const Tensor& gradient, const Tensor& sum, double divisor, bool add) {
  const auto factor = static_cast<float>(divisor);
  if (add)
    for_blocks(exec, "fsdp2::accumulate", gradient.numel(), Accumulate<true>{f32(gradient), f32(sum), factor});
  else
    for_blocks(exec, "fsdp2::accumulate", gradient.numel(), Accumulate<false>{f32(gradient), f32(sum), factor});
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
  for_blocks(exec, "fsdp2::scale", tensor.numel(), Scale{f32(tensor), static_cast<float>(factor)});
}

void initialize(const ExecutionSpace& exec, const Tensor& target, const Initializer& initializer, std::int64_t first,
                std::uint64_t key) {
  const std::int64_t count = target.numel();
  if (count == 0) return;
  const auto [kind, a, b, seed] = initializer;
  if (kind == Initializer::Kind::constant)
    Kokkos::deep_copy(exec, target.slice(0, {count}).view<float*>(), static_cast<float>(a));
  else if (kind == Initializer::Kind::uniform)
    Kokkos::parallel_for("fsdp2::fill_uniform", range(exec, count), FillUniform{f32(target), first, key, seed, a, b});
  else
    Kokkos::parallel_for("fsdp2::fill_normal", range(exec, count), FillNormal{f32(target), first, key, seed, a, b});
}

void increment(const ExecutionSpace& exec, const Tensor& step) {
  Kokkos::parallel_for("fsdp2::increment", range(exec, 1), Increment{reinterpret_cast<std::int64_t*>(step.data())});
}

void adamw_scalars(const ExecutionSpace& exec, const Tensor& scalars, const Tensor& step, double lr, double beta1,
                   double beta2) {
  Kokkos::parallel_for(
      "fsdp2::adamw_scalars", range(exec, 1),
      AdamWScalars{f32(scalars), reinterpret_cast<const std::int64_t*>(step.data()), lr, beta1, beta2});
}

void adamw(const ExecutionSpace& exec, const Tensor& parameters, const Tensor& gradients, const Tensor& exp_avg,
           const Tensor& exp_avg_sq, const Tensor& scalars, double decay, double beta1, double beta2, double eps) {
  for_blocks(exec, "fsdp2::adamw", parameters.numel(),
             AdamWUpdate{f32(parameters), f32(gradients), f32(exp_avg), f32(exp_avg_sq), f32(scalars),
                         static_cast<float>(decay), static_cast<float>(beta1), static_cast<float>(1 - beta1),
                         static_cast<float>(beta2), static_cast<float>(1 - beta2), static_cast<float>(eps)});
}

void sgd(const ExecutionSpace& exec, const Tensor& parameters, const Tensor& gradients, double lr,
         double weight_decay) {
  for_blocks(exec, "fsdp2::sgd", parameters.numel(),
             SgdUpdate{f32(parameters), f32(gradients), static_cast<float>(lr), static_cast<float>(weight_decay)});
}

void sgd_momentum(const ExecutionSpace& exec, const Tensor& parameters, const Tensor& gradients,
                  const Tensor& momentum_buffer, double lr, double momentum, double weight_decay) {
  for_blocks(exec, "fsdp2::sgd_momentum", parameters.numel(),
             SgdMomentumUpdate{f32(parameters), f32(gradients), f32(momentum_buffer), static_cast<float>(lr),
                               static_cast<float>(momentum), static_cast<float>(weight_decay)});
}

}  // namespace fsdp2::kernels
