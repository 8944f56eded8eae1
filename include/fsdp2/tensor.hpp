// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <Kokkos_Core.hpp>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "fsdp2/dtype.hpp"
#include "fsdp2/error.hpp"
#include "fsdp2/low_precision.hpp"
#include "fsdp2/shape.hpp"

namespace fsdp2 {

/// Where shards live and kernels run: CUDA where Kokkos has it.
using ExecutionSpace = Kokkos::DefaultExecutionSpace;
using MemorySpace = ExecutionSpace::memory_space;

namespace detail {
template <>
struct DTypeOf<Kokkos::complex<float>> {
  static constexpr DType value = DType::complex64;
};
template <>
struct DTypeOf<Kokkos::complex<double>> {
  static constexpr DType value = DType::complex128;
};

/// Throws ShapeError unless a tensor of this dtype and rank may be viewed as asked.
void check_view(DType found, DType asked, std::size_t found_rank, std::size_t asked_rank, const Shape& shape);
/// Throws ShapeError, naming the remedy, for a View that is not contiguous row-major.
[[noreturn]] void refuse_layout(const std::string& label, const char* found);
}  // namespace detail

/// A dense row-major array of any dtype: a dtype and a shape over contiguous bytes. A cheap handle, copies share the
/// bytes. Constness is shallow, as for Kokkos Views.
template <class Space>
class BasicTensor {
 public:
  using Bytes = Kokkos::View<std::byte*, Space>;

  /// f32, shape [0], no memory.
  BasicTensor() : shape_{0} {}

  /// Allocates zeros, ordered on `exec`. `label` names the allocation in profiles. Throws ShapeError for a bad shape,
  /// and ConfigError where Kokkos is not initialised.
  BasicTensor(const ExecutionSpace& exec, DType dtype, Shape shape, const std::string& label);

  /// Allocates without writing: every element must be written before it is read.
  static BasicTensor uninitialized(DType dtype, Shape shape, const std::string& label);

  /// Interprets existing bytes, whose length must be that of the shape; shares their ownership, and keeps `owner` alive
  /// too. Throws ShapeError for another length.
  static BasicTensor over(Bytes bytes, DType dtype, Shape shape, std::shared_ptr<const void> owner = nullptr);

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  std::int64_t numel() const { return static_cast<std::int64_t>(bytes_.extent(0)) / size_of(dtype_); }
  /// Length in bytes.
  std::int64_t bytes() const { return static_cast<std::int64_t>(bytes_.extent(0)); }
  std::byte* data() const { return bytes_.data(); }
  const Bytes& buffer() const { return bytes_; }

  /// `count` elements from element `begin` on, as a tensor of `shape` that shares the memory (numel(shape) elements).
  /// Throws ShapeError where that leaves the tensor.
  BasicTensor slice(std::int64_t begin, Shape shape) const;

  /// The same bytes as another dtype and shape. Throws ShapeError for another length.
  BasicTensor as(DType dtype, Shape shape) const { return over(bytes_, dtype, std::move(shape), owner_); }

  /// A typed, unmanaged View of the same memory, such as view<float**>() or view<const bfloat16*>(): valid while this
  /// tensor or a copy of it lives. A scalar's is view<float>(). Throws ShapeError for another element type or rank.
  template <class DataType>
  auto view() const {
    using Result = Kokkos::View<DataType, Kokkos::LayoutRight, Space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    using Value = typename Result::non_const_value_type;
    constexpr std::size_t rank = Result::rank;
    detail::check_view(dtype_, dtype_of<Value>, shape_.size(), rank, shape_);
    Kokkos::LayoutRight layout;
    for (std::size_t d = 0; d < rank; ++d) layout.dimension[d] = static_cast<std::size_t>(shape_[d]);
    return Result(reinterpret_cast<typename Result::pointer_type>(bytes_.data()), layout);
  }

 private:
  DType dtype_ = DType::f32;
  Shape shape_;
  Bytes bytes_;
  std::shared_ptr<const void> owner_;
};

/// A tensor where kernels run, and one in host memory: the same type on a host build.
using Tensor = BasicTensor<MemorySpace>;
using HostTensor = BasicTensor<Kokkos::HostSpace>;

extern template class BasicTensor<Kokkos::HostSpace>;
#if defined(KOKKOS_ENABLE_CUDA)
extern template class BasicTensor<Kokkos::CudaSpace>;
#endif

/// A tensor over the memory of a user's View, without a copy; it keeps the View alive. Throws ShapeError, with the
/// remedy, for a View that is not contiguous row-major (LayoutLeft, the default on GPUs, of rank ≥ 2, or a strided
/// subview): pack() copies those.
template <class DataType, class... Properties>
auto wrap(const Kokkos::View<DataType, Properties...>& view) {
  using View = Kokkos::View<DataType, Properties...>;
  using Space = typename View::memory_space;
  using Value = typename View::value_type;
  static_assert(!std::is_const_v<Value>, "wrap needs a View of non-const elements");
  Shape shape;
  for (unsigned d = 0; d < static_cast<unsigned>(View::rank); ++d)
    shape.push_back(static_cast<std::int64_t>(view.extent(d)));
  std::int64_t expected = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    if (shape[d] > 1 && static_cast<std::int64_t>(view.stride(static_cast<unsigned>(d))) != expected)
      detail::refuse_layout(view.label(),
                            std::is_same_v<typename View::array_layout, Kokkos::LayoutLeft> ? "LayoutLeft" : "strided");
    expected *= shape[d];
  }
  const DType dtype = dtype_of<std::remove_cv_t<Value>>;
  const auto length = static_cast<std::size_t>(checked_multiply(numel(shape), size_of(dtype)));
  using Result = BasicTensor<Space>;
  return Result::over(typename Result::Bytes(reinterpret_cast<std::byte*>(view.data()), length), dtype,
                      std::move(shape), std::make_shared<View>(view));
}

/// A row-major copy of a View of any layout, made by a kernel ordered on `exec`.
template <class DataType, class... Properties>
auto pack(const ExecutionSpace& exec, const Kokkos::View<DataType, Properties...>& view) {
  using View = Kokkos::View<DataType, Properties...>;
  using Target = Kokkos::View<typename View::non_const_data_type, Kokkos::LayoutRight, typename View::memory_space>;
  Kokkos::LayoutRight layout;
  for (unsigned d = 0; d < static_cast<unsigned>(View::rank); ++d) layout.dimension[d] = view.extent(d);
  const Target target(Kokkos::view_alloc(Kokkos::WithoutInitializing, "fsdp2::pack"), layout);
  Kokkos::deep_copy(exec, target, view);
  return wrap(target);
}

}  // namespace fsdp2
