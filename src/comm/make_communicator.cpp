// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <fmt/format.h>

#include <utility>

#include "fsdp2/communicator.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2 {

std::unique_ptr<Communicator> make_communicator(MPI_Comm comm, std::string name, CommunicatorOptions options) {
  if (options.backend == Backend::mpi) return make_mpi_communicator(comm, std::move(name), options);
#if defined(FSDP2_HAS_NCCL)
  return make_nccl_communicator(comm, std::move(name), options);
#else
  throw ConfigError(
      fmt::format("group \"{}\" wants Backend::nccl, but this library was built without NCCL: configure it with "
                  "FSDP2_ENABLE_CUDA=ON and FSDP2_ENABLE_NCCL=ON, or choose Backend::mpi",
                  name));
#endif
}

}  // namespace fsdp2
