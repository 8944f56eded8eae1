# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause

# Debian's Kokkos (libtrilinos-kokkos-dev) exports a target whose include directory does not exist: it is computed one
# folder too low. Its Kokkos_INCLUDE_DIRS is right. Included after find_package(Kokkos), here and by fsdp2Config.cmake.
get_target_property(fsdp2_kokkos_includes Kokkos::kokkos INTERFACE_INCLUDE_DIRECTORIES)
if(Kokkos_INCLUDE_DIRS AND NOT EXISTS "${fsdp2_kokkos_includes}/Kokkos_Core.hpp")
  get_filename_component(fsdp2_kokkos_includes "${Kokkos_INCLUDE_DIRS}" REALPATH)
  set_target_properties(
    Kokkos::kokkos PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${fsdp2_kokkos_includes}"
                              INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${fsdp2_kokkos_includes}")
endif()
unset(fsdp2_kokkos_includes)
