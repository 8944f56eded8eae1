// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "comm/check_mpi.hpp"

#include <fmt/format.h>

#include "fsdp2/error.hpp"

namespace fsdp2 {

void check_mpi(int code, std::string_view call, std::string_view group) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) length = 0;
  throw CommError(fmt::format("{} on group \"{}\" failed: {} (MPI error {})", call, group,
                              std::string_view(text, static_cast<std::size_t>(length)), code));
}

MPI_Comm duplicate(MPI_Comm comm, std::string_view group) {
  int is_initialized = 0;
  check_mpi(MPI_Initialized(&is_initialized), "MPI_Initialized", group);
  if (is_initialized == 0)
    throw ConfigError(
        fmt::format("group \"{}\" needs MPI: call MPI_Init before making it, or use a mesh of one rank", group));
  MPI_Comm copy = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(comm, &copy), "MPI_Comm_dup", group);
  check_mpi(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler", group);
  return copy;
}

}  // namespace fsdp2
