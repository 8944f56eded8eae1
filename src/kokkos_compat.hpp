// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// The only place that knows Kokkos versions: 3.4 (Debian 12) to 5.x.

#include <Kokkos_Core.hpp>
#include <cmath>
#include <string>

namespace fsdp2::compat {

/// Waits for everything queued on one execution-space instance. The label appears in profiles where Kokkos takes one.
template <class Execution>
void fence(const Execution& exec, [[maybe_unused]] const std::string& label) {
#if KOKKOS_VERSION >= 30500
  exec.fence(label);
#else
  exec.fence();
#endif
}

#if KOKKOS_VERSION >= 30700
using Kokkos::cos;
using Kokkos::log;
using Kokkos::pow;
using Kokkos::sqrt;
#else
using Kokkos::Experimental::cos;
using Kokkos::Experimental::log;
using Kokkos::Experimental::pow;
using Kokkos::Experimental::sqrt;
#endif

#if KOKKOS_VERSION >= 40000
using Kokkos::fma;
#else
using std::fma;
#endif

/// Host memory that kernels on the default execution space can reach.
#if defined(KOKKOS_ENABLE_CUDA)
using PinnedSpace = Kokkos::CudaHostPinnedSpace;
#else
using PinnedSpace = Kokkos::HostSpace;
#endif

/// Whether the host may dereference pointers into a memory space.
template <class Space>
inline constexpr bool host_accessible = Kokkos::SpaceAccessibility<Kokkos::HostSpace, Space>::accessible;

/// Whether kernels on an execution space may.
template <class Execution, class Space>
inline constexpr bool kernel_accessible = Kokkos::SpaceAccessibility<Execution, Space>::accessible;

}  // namespace fsdp2::compat
