// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <mpi.h>

#include <exception>
#include <string>
#include <utility>

#include "fsdp2/error.hpp"

namespace examples {

/// Runs `action`, which must not communicate, on every rank of `comm`. Where it throws on some ranks, all of them throw
/// fsdp2::Error with the message of the first of them: nobody is left waiting in the next collective call.
template <class Action>
void collectively(MPI_Comm comm, Action&& action) {
  std::string problem;
  int rank = 0;
  int ranks = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &ranks);
  int first = ranks;
  try {
    std::forward<Action>(action)();
  } catch (const std::exception& error) {
    problem = error.what();
    first = rank;
  }
  MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, comm);
  if (first == ranks) return;
  auto length = static_cast<int>(problem.size());
  MPI_Bcast(&length, 1, MPI_INT, first, comm);
  problem.resize(static_cast<std::size_t>(length));
  MPI_Bcast(problem.data(), length, MPI_CHAR, first, comm);
  throw fsdp2::Error(problem);
}

}  // namespace examples
