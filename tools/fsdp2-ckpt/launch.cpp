// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "launch.hpp"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "command.hpp"

namespace fsdp2::tool {

namespace {

void require(int code, const char* call) {
  if (code != MPI_SUCCESS) throw std::runtime_error(std::string(call) + " failed");
}

/// Open MPI, MPICH and its kin, and launchers that speak PMIx set one of these; batch systems alone do not.
bool is_launched() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"})
    if (std::getenv(name) != nullptr) return true;
  return false;
}

}  // namespace

Launch::Launch() {
  if (!is_launched()) return;
  require(MPI_Init(nullptr, nullptr), "MPI_Init");
  is_initialized_ = true;
  int size = 1;
  require(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  require(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
  if (size == 1) return;
  comm_ = MPI_COMM_WORLD;
  // All say the same: one is enough.
  if (rank_ != 0 &&
      (std::freopen("/dev/null", "w", stdout) == nullptr || std::freopen("/dev/null", "w", stderr) == nullptr))
    throw std::runtime_error("opening /dev/null failed");
}

void Launch::together(const std::function<void()>& body) const {
  Exit own;
  try {
    body();
  } catch (const Exit& end) {
    own = end;
  }
  int worst = own.status;
  if (comm_ != MPI_COMM_NULL) require(MPI_Allreduce(MPI_IN_PLACE, &worst, 1, MPI_INT, MPI_MAX, comm_), "MPI_Allreduce");
  if (own.status != status_done) throw own;
  if (worst != status_done) throw Exit{worst, "another process could not do its part"};
}

void Launch::abort(int status) const {
  if (comm_ != MPI_COMM_NULL) MPI_Abort(comm_, status);
}

void Launch::finish() {
  if (is_initialized_) require(MPI_Finalize(), "MPI_Finalize");
  is_initialized_ = false;
}

}  // namespace fsdp2::tool
