// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <mpi.h>

#include <Kokkos_Core.hpp>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <optional>
#include <string_view>
#include <vector>

#include "fsdp2/fsdp2.hpp"

namespace examples {

/// A program on all MPI ranks, told apart from others by its options, its mesh and what it trains.
template <class Options>
struct Program {
  const char* name;
  /// Fills `options`; returns an exit status where there is nothing to train, which `speaks` explains.
  std::optional<int> (*parse)(int argc, char** argv, bool speaks, Options& options);
  std::vector<fsdp2::MeshAxis> (*mesh_axes)(const Options& options, std::int64_t ranks);
  /// Collective over `comm`, which is that of the mesh. Throws fsdp2::Error on all ranks or on none.
  void (*train)(MPI_Comm comm, const fsdp2::DeviceMesh& mesh, const Options& options);

  /// Returns what main returns: 1 after an error of all ranks, which one reports. After an error of one, aborts all.
  int run(int argc, char** argv) const {
    MPI_Init(&argc, &argv);
    const int status = run_with_mpi(argc, argv);
    MPI_Finalize();
    return status;
  }

 private:
  int run_with_mpi(int argc, char** argv) const {
    const MPI_Comm comm = MPI_COMM_WORLD;
    int rank = 0;
    int ranks = 1;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
    const bool speaks = rank == 0;
    Options options;
    if (const std::optional<int> status = parse(argc, argv, speaks, options)) return *status;

    const Kokkos::ScopeGuard kokkos;
    fsdp2::set_log_sink([speaks](fsdp2::LogLevel level, std::string_view message) {
      std::FILE* const stream = level == fsdp2::LogLevel::info ? stdout : stderr;
      if (speaks) std::fprintf(stream, "%.*s\n", static_cast<int>(message.size()), message.data());
    });
    try {
      fsdp2::DeviceMesh mesh(comm, mesh_axes(options, ranks));
      try {
        train(comm, mesh, options);
      } catch (const fsdp2::Error&) {
        mesh.close();
        throw;
      }
      mesh.close();
    } catch (const fsdp2::Error& error) {
      // On all ranks the same: one explains, and all leave.
      if (speaks) std::fprintf(stderr, "%s: %s\n", name, error.what());
      return 1;
    } catch (const std::exception& error) {
      // Maybe on this rank only, while the others wait for it.
      std::fprintf(stderr, "%s: rank %d: %s\n", name, rank, error.what());
      MPI_Abort(comm, 1);
    }
    return 0;
  }
};

}  // namespace examples
