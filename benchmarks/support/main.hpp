// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <mpi.h>

#include <Kokkos_Core.hpp>

namespace fsdp2::bench {

/// What main returns. `run` has MPI and Kokkos, and arguments without those of either.
inline int run_main(int argc, char** argv, void (*run)(int argc, char** argv)) {
  MPI_Init(&argc, &argv);
  {
    const Kokkos::ScopeGuard kokkos(argc, argv);
    run(argc, argv);
  }
  MPI_Finalize();
  return 0;
}

}  // namespace fsdp2::bench
