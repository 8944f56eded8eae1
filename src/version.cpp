// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/version.hpp"

#include <fmt/format.h>
#include <mpi.h>

#include <Kokkos_Core.hpp>
#include <array>

#include "fsdp2/tensor.hpp"

namespace fsdp2 {

namespace {

/// The MPI library found at run time, which need not be the one compiled against.
std::string mpi_library() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  if (MPI_Get_library_version(text.data(), &length) != MPI_SUCCESS) return "unknown";
  const std::string_view all(text.data(), static_cast<std::size_t>(length));
  std::string first_line(all.substr(0, all.find_first_of(",\n")));
  for (char& c : first_line)
    if (c == '\t') c = ' ';
  return first_line;
}

#if defined(__clang__)
constexpr std::string_view compiler = "clang " __clang_version__;
#else
constexpr std::string_view compiler = "gcc " __VERSION__;
#endif

}  // namespace

std::string_view version() {
  return FSDP2_VERSION_STRING;
}

std::string build_info() {
  return fmt::format(
      "version: {}\ncommit: {}\ncompiler: {}\nbuild type: {}\nkokkos: {}.{}.{} on {}\nmpi: {}\nhdf5: {}\n",
      FSDP2_VERSION_STRING, FSDP2_GIT_COMMIT, compiler, FSDP2_BUILD_TYPE, KOKKOS_VERSION / 10000,
      KOKKOS_VERSION / 100 % 100, KOKKOS_VERSION % 100, ExecutionSpace::name(), mpi_library(), FSDP2_HDF5_VERSION);
}

}  // namespace fsdp2
