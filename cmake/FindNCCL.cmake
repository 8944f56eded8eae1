# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
#
# NVIDIA's collectives, https://github.com/NVIDIA/nccl, which bring no package file: target NCCL::NCCL, and NCCL_VERSION.
# Looks beside the CUDA Toolkit, too; NCCL_ROOT wins.
find_package(CUDAToolkit QUIET)
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR})

if(NCCL_INCLUDE_DIR)
  file(STRINGS "${NCCL_INCLUDE_DIR}/nccl.h" nccl_numbers REGEX "#define NCCL_(MAJOR|MINOR|PATCH) +[0-9]+")
  string(REGEX REPLACE "[^0-9;]" "" NCCL_VERSION "${nccl_numbers}")
  string(REPLACE ";" "." NCCL_VERSION "${NCCL_VERSION}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  NCCL
  REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR CUDAToolkit_FOUND
  VERSION_VAR NCCL_VERSION)
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)

if(NCCL_FOUND AND NOT TARGET NCCL::NCCL)
  add_library(NCCL::NCCL UNKNOWN IMPORTED)
  set_target_properties(NCCL::NCCL PROPERTIES IMPORTED_LOCATION "${NCCL_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES
                                                                                   "${NCCL_INCLUDE_DIR}")
  target_link_libraries(NCCL::NCCL INTERFACE CUDA::cudart)
endif()
