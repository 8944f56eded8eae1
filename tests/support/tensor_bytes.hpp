// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <Kokkos_Core.hpp>
#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "fsdp2/tensor.hpp"

namespace fsdp2::testing {

using Bytes = std::vector<std::byte>;

/// A tensor's bytes on the host, wherever it lives.
inline Bytes bytes_of(const Tensor& tensor) {
  Bytes bytes(static_cast<std::size_t>(tensor.bytes()));
  using Host = Kokkos::View<std::byte*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  if (!bytes.empty()) Kokkos::deep_copy(Host(bytes.data(), bytes.size()), tensor.buffer());
  return bytes;
}

inline void set_bytes(const Tensor& tensor, const Bytes& bytes) {
  using Host = Kokkos::View<const std::byte*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  if (!bytes.empty()) Kokkos::deep_copy(tensor.buffer(), Host(bytes.data(), bytes.size()));
}

/// A new tensor of dimension 1 with these bytes.
inline Tensor tensor_of(DType dtype, const Bytes& bytes) {
  const Tensor tensor =
      Tensor::uninitialized(dtype, {static_cast<std::int64_t>(bytes.size()) / size_of(dtype)}, "test");
  set_bytes(tensor, bytes);
  return tensor;
}

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  static_assert(!std::is_same_v<T, bool>, "std::vector<bool> has no bytes");
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

template <class T>
std::vector<T> values_of(const Tensor& tensor) {
  const Bytes bytes = bytes_of(tensor);
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// Well mixed bits of a number: test values that repeat nowhere and look like nothing in particular.
inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace fsdp2::testing
