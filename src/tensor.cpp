// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/tensor.hpp"

#include <fmt/format.h>

#include "kernels.hpp"

namespace fsdp2 {

namespace detail {

void check_view(DType found, DType asked, std::size_t found_rank, std::size_t asked_rank, const Shape& shape) {
  if (found != asked)
    throw ShapeError(fmt::format("a tensor of {} cannot be viewed as {}", to_string(found), to_string(asked)));
  if (found_rank != asked_rank)
    throw ShapeError(
        fmt::format("a tensor of shape {} cannot be viewed with {} dimensions", to_string(shape), asked_rank));
}

void refuse_layout(const std::string& label, const char* found) {
  throw ShapeError(
      fmt::format("View \"{}\" is {}, but a tensor is contiguous and row-major: declare the View "
                  "Kokkos::LayoutRight, or copy it with fsdp2::pack(exec, view)",
                  label, found));
}

}  // namespace detail

template <class Space>
BasicTensor<Space> BasicTensor<Space>::uninitialized(DType dtype, Shape shape, const std::string& label) {
  const std::int64_t length = checked_multiply(fsdp2::numel(shape), size_of(dtype));
  if (!Kokkos::is_initialized())
    throw ConfigError(fmt::format("cannot allocate \"{}\": call Kokkos::initialize first", label));
  BasicTensor tensor;
  tensor.dtype_ = dtype;
  tensor.shape_ = std::move(shape);
  tensor.bytes_ = Bytes(Kokkos::view_alloc(Kokkos::WithoutInitializing, label), static_cast<std::size_t>(length));
  return tensor;
}

template <class Space>
BasicTensor<Space>::BasicTensor(const ExecutionSpace& exec, DType dtype, Shape shape, const std::string& label)
    : BasicTensor(uninitialized(dtype, std::move(shape), label)) {
  kernels::zero(exec, bytes_);
}

template <class Space>
BasicTensor<Space> BasicTensor<Space>::over(Bytes bytes, DType dtype, Shape shape, std::shared_ptr<const void> owner) {
  const std::int64_t length = checked_multiply(fsdp2::numel(shape), size_of(dtype));
  if (length != static_cast<std::int64_t>(bytes.extent(0)))
    throw ShapeError(fmt::format("{} bytes cannot hold {} {}: expected {} bytes", bytes.extent(0), to_string(dtype),
                                 to_string(shape), length));
  BasicTensor tensor;
  tensor.dtype_ = dtype;
  tensor.shape_ = std::move(shape);
  tensor.bytes_ = std::move(bytes);
  tensor.owner_ = std::move(owner);
  return tensor;
}

template <class Space>
BasicTensor<Space> BasicTensor<Space>::slice(std::int64_t begin, Shape shape) const {
  const std::int64_t count = fsdp2::numel(shape);
  if (begin < 0 || count > numel() - begin)
    throw ShapeError(
        fmt::format("elements [{}, {}) are outside a tensor of {} elements", begin, begin + count, numel()));
  const auto from = static_cast<std::size_t>(begin * size_of(dtype_));
  const auto to = static_cast<std::size_t>((begin + count) * size_of(dtype_));
  return over(Kokkos::subview(bytes_, std::pair(from, to)), dtype_, std::move(shape), owner_);
}

template class BasicTensor<Kokkos::HostSpace>;
#if defined(KOKKOS_ENABLE_CUDA)
template class BasicTensor<Kokkos::CudaSpace>;
#endif

}  // namespace fsdp2
