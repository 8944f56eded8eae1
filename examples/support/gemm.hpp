// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Matrix products by BLAS, where the data is: cuBLAS on CUDA, CBLAS on the host.

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "fsdp2/tensor.hpp"

#if defined(KOKKOS_ENABLE_CUDA)
#include <cublas_v2.h>
#else
#include <cblas.h>
#endif

namespace examples {

/// Row-major, in the memory where kernels run, owned by somebody else: what Tensor::view<float**>() returns.
using Matrix = Kokkos::View<float**, Kokkos::LayoutRight, fsdp2::MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
using ConstMatrix =
    Kokkos::View<const float**, Kokkos::LayoutRight, fsdp2::MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

enum class Transpose : bool { no, yes };

namespace detail {

/// BLAS counts in int. A matrix without columns still wants a leading dimension.
inline int blas_size(std::size_t extent) {
  if (extent > static_cast<std::size_t>(std::numeric_limits<int>::max()))
    throw std::length_error("a matrix extent of " + std::to_string(extent) + " is too large for BLAS");
  return static_cast<int>(extent);
}
inline int leading_dimension(const ConstMatrix& matrix) {
  return std::max(1, blas_size(matrix.extent(1)));
}

#if defined(KOKKOS_ENABLE_CUDA)
inline void check(cublasStatus_t status) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string("cuBLAS: ") + cublasGetStatusString(status));
}

/// One for the process, never destroyed: at its end CUDA may be gone first.
inline cublasHandle_t cublas_handle() {
  static const cublasHandle_t handle = [] {
    cublasHandle_t created = nullptr;
    check(cublasCreate(&created));
    return created;
  }();
  return handle;
}
#endif

}  // namespace detail

/// c = op(a)·op(b) + beta·c, ordered on `exec`; with beta 0, c is not read. Extents may be 0.
inline void gemm(const fsdp2::ExecutionSpace& exec, Transpose transpose_a, const ConstMatrix& a, Transpose transpose_b,
                 const ConstMatrix& b, float beta, const Matrix& c) {
  const int rows = detail::blas_size(c.extent(0));
  const int columns = detail::blas_size(c.extent(1));
  const int inner = detail::blas_size(a.extent(transpose_a == Transpose::yes ? 0 : 1));
  const int lda = detail::leading_dimension(a);
  const int ldb = detail::leading_dimension(b);
  const int ldc = detail::leading_dimension(c);
  const float alpha = 1;
#if defined(KOKKOS_ENABLE_CUDA)
  // cuBLAS is column-major: to it each of these matrices is the transpose, and cᵀ = op(b)ᵀ·op(a)ᵀ.
  const auto operation = [](Transpose transpose) { return transpose == Transpose::yes ? CUBLAS_OP_T : CUBLAS_OP_N; };
  if (rows == 0 || columns == 0) return;
  detail::check(cublasSetStream(detail::cublas_handle(), exec.cuda_stream()));
  detail::check(cublasSgemm(detail::cublas_handle(), operation(transpose_b), operation(transpose_a), columns, rows,
                            inner, &alpha, b.data(), ldb, a.data(), lda, &beta, c.data(), ldc));
#else
  const auto operation = [](Transpose transpose) { return transpose == Transpose::yes ? CblasTrans : CblasNoTrans; };
  exec.fence();
  cblas_sgemm(CblasRowMajor, operation(transpose_a), operation(transpose_b), rows, columns, inner, alpha, a.data(), lda,
              b.data(), ldb, beta, c.data(), ldc);
#endif
}

/// Equal matrices, row-major, at a distance from each other: rows of `leading` elements, matrices of `stride`.
struct Strided {
  float* data = nullptr;
  std::int64_t leading = 0;
  std::int64_t stride = 0;
};

struct GemmSize {
  std::int64_t rows = 0;     ///< of c
  std::int64_t columns = 0;  ///< of c
  std::int64_t inner = 0;
};

/// c[i] = alpha·op(a[i])·op(b[i]) for each i below `count`, ordered on `exec`. What was in c is not read.
inline void gemm_each(const fsdp2::ExecutionSpace& exec, std::int64_t count, const GemmSize& size, float alpha,
                      Transpose transpose_a, const Strided& a, Transpose transpose_b, const Strided& b,
                      const Strided& c) {
  const auto blas = [](std::int64_t extent) { return detail::blas_size(static_cast<std::size_t>(extent)); };
  const float beta = 0;
  if (count == 0 || size.rows == 0 || size.columns == 0) return;
#if defined(KOKKOS_ENABLE_CUDA)
  const auto operation = [](Transpose transpose) { return transpose == Transpose::yes ? CUBLAS_OP_T : CUBLAS_OP_N; };
  detail::check(cublasSetStream(detail::cublas_handle(), exec.cuda_stream()));
  detail::check(cublasSgemmStridedBatched(detail::cublas_handle(), operation(transpose_b), operation(transpose_a),
                                          blas(size.columns), blas(size.rows), blas(size.inner), &alpha, b.data,
                                          blas(b.leading), b.stride, a.data, blas(a.leading), a.stride, &beta, c.data,
                                          blas(c.leading), c.stride, blas(count)));
#else
  const auto operation = [](Transpose transpose) { return transpose == Transpose::yes ? CblasTrans : CblasNoTrans; };
  exec.fence();
  for (std::int64_t i = 0; i < count; ++i)
    cblas_sgemm(CblasRowMajor, operation(transpose_a), operation(transpose_b), blas(size.rows), blas(size.columns),
                blas(size.inner), alpha, a.data + i * a.stride, blas(a.leading), b.data + i * b.stride, blas(b.leading),
                beta, c.data + i * c.stride, blas(c.leading));
#endif
}

}  // namespace examples
