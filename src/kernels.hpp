// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Every Kokkos kernel of the library. All are queued on `exec` and return at once, unless they say otherwise.

#include <Kokkos_Core.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp2/initializer.hpp"
#include "fsdp2/placement.hpp"
#include "fsdp2/tensor.hpp"

namespace fsdp2::kernels {

/// Writes zero bytes.
template <class Space>
void zero(const ExecutionSpace& exec, const Kokkos::View<std::byte*, Space>& bytes);

/// Writes ones to all bits, which are NaN in every floating-point type, and waits for it.
void poison(const Tensor& tensor) noexcept;

/// target = source, bytewise. Throws ShapeError for other lengths.
void copy(const ExecutionSpace& exec, const Tensor& target, const Tensor& source);

/// Between a tensor and host memory of its length; returns when the bytes are there.
void copy_to_host(const ExecutionSpace& exec, std::byte* target, const Tensor& source);
void copy_from_host(const ExecutionSpace& exec, const Tensor& target, const std::byte* source);

/// target = source, rounded once where the dtypes differ: both are castable then, else any. Equal numbers of elements.
void cast(const ExecutionSpace& exec, const Tensor& target, const Tensor& source);

/// How many bytes of two tensors of one length differ; returns when it is known.
std::int64_t count_differences(const ExecutionSpace& exec, const Tensor& a, const Tensor& b);

/// Copies the elements of `box` out of a row-major tensor `source` into the dense `target` of the box's extents.
void extract_box(const ExecutionSpace& exec, const Tensor& target, const Tensor& source, const Box& box);

/// The reverse: copies the dense `source` of the box's extents into `box` of a row-major `target`.
void insert_box(const ExecutionSpace& exec, const Tensor& target, const Tensor& source, const Box& box);

/// result[i] = part 0[i] op part 1[i] op …, in that order, for the n elements of result. Part number `own_part` is
/// `own`, which may be `result`; the other parts lie in `others`, one after another. The accumulator is f64 for f64,
/// f32 for the smaller floats, the type itself for integers. For bool, sum and max are "or", min is "and". Throws
/// ShapeError for min or max of complex numbers, and for other lengths.
void reduce_parts(const ExecutionSpace& exec, const Tensor& result, const Tensor& others, const Tensor& own,
                  std::int64_t own_part, ReduceOp op);

/// target[target .. target+count) = source[source .. source+count).
struct Segment {
  std::int64_t source = 0;
  std::int64_t target = 0;
  std::int64_t count = 0;
};
/// The segments where kernels can read them, cut into pieces of similar work. Returns when they are there.
Tensor make_segments(const ExecutionSpace& exec, const std::vector<Segment>& segments);
/// Copies bytes; segments must not overlap in the target.
void copy_segments(const ExecutionSpace& exec, const Tensor& target, const Tensor& source, const Tensor& segments);
/// Writes zeros to the target ranges, in bytes.
void zero_segments(const ExecutionSpace& exec, const Tensor& target, const Tensor& segments);

/// gradient = sum / divisor, or gradient += sum / divisor, of castable dtypes and equal lengths, in f64 where one of
/// them is f64, else in f32. A division, so that it rounds once.
void accumulate(const ExecutionSpace& exec, const Tensor& gradient, const Tensor& sum, double divisor, bool add);

/// What a norm adds up, or takes the largest of.
enum class Term : std::uint8_t { magnitude, square, maximum };
/// result, a u64 scalar = the bits of the f64 number Σ|x|, Σx² or max |x| over the elements x of castable `source` at
/// the segments' sources. NaN is the largest of all. `result` must be 0 before.
void reduce_segments(const ExecutionSpace& exec, const Tensor& result, const Tensor& source, const Tensor& segments,
                     Term term);
/// tensor *= factor, castable; the factor is rounded to f32 first, unless the tensor is f64.
void scale(const ExecutionSpace& exec, const Tensor& tensor, double factor);

/// The elements of `box`, of at most 8 dimensions, of the parameter of `shape` whose name hashes to `key`. Castable.
/// `initializer` is not kaiming.
void initialize(const ExecutionSpace& exec, const Tensor& target, const Initializer& initializer, const Shape& shape,
                const Box& box, std::uint64_t key);

/// ++step, an i64 scalar.
void increment(const ExecutionSpace& exec, const Tensor& step);
/// scalars = {lr / (1 − beta1^step), √(1 − beta2^step)}, computed in f64.
void adamw_scalars(const ExecutionSpace& exec, const Tensor& scalars, const Tensor& step, double lr, double beta1,
                   double beta2);
/// The updates of optimizer.hpp, on tensors of equal length: the state is f64, and the arithmetic too, where the
/// parameters are f64, else f32. Gradients have the parameters' dtype, or are bf16 or f16. Zeros in all of them stay
/// zeros.
void adamw(const ExecutionSpace& exec, const Tensor& parameters, const Tensor& gradients, const Tensor& exp_avg,
           const Tensor& exp_avg_sq, const Tensor& scalars, double decay, double beta1, double beta2, double eps);
void sgd(const ExecutionSpace& exec, const Tensor& parameters, const Tensor& gradients, double lr, double weight_decay);
void sgd_momentum(const ExecutionSpace& exec, const Tensor& parameters, const Tensor& gradients,
                  const Tensor& momentum_buffer, double lr, double momentum, double weight_decay);

}  // namespace fsdp2::kernels
