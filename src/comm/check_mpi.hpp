// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <mpi.h>

#include <string_view>

namespace fsdp2 {

/// Throws CommError with MPI's own text unless `code` is MPI_SUCCESS. `call` names the function, `group` the
/// communicator.
void check_mpi(int code, std::string_view call, std::string_view group);

/// A duplicate of `comm` that returns error codes instead of aborting: the caller's handler is left alone. Collective.
MPI_Comm duplicate(MPI_Comm comm, std::string_view group);

}  // namespace fsdp2
