# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause

# fsdp2_require(<package> <debian package> [arguments of find_package]): finds it, or says what to install.
macro(fsdp2_require package debian)
  find_package(${package} ${ARGN})
  if(NOT ${package}_FOUND)
    message(FATAL_ERROR "fsdp2 needs ${package}, which was not found. On Debian or Ubuntu: apt-get install ${debian} "
                        "(scripts/install-deps installs all that is needed). Elsewhere: set ${package}_ROOT to where it is installed.")
  endif()
endmacro()

fsdp2_require(Kokkos libtrilinos-kokkos-dev)
include(Fsdp2MendKokkos)

if(FSDP2_ENABLE_CUDA AND NOT Kokkos_ENABLE_CUDA)
  message(FATAL_ERROR "FSDP2_ENABLE_CUDA is ON, but the Kokkos found in ${Kokkos_DIR} was built for ${Kokkos_DEVICES}. "
                      "Set Kokkos_ROOT to a Kokkos that was built with -DKokkos_ENABLE_CUDA=ON, and CMAKE_CXX_COMPILER to "
                      "its bin/nvcc_wrapper (preset \"cuda\" does both).")
endif()
if(Kokkos_ENABLE_CUDA AND NOT FSDP2_ENABLE_CUDA)
  message(FATAL_ERROR "The Kokkos found in ${Kokkos_DIR} runs on CUDA by default, but FSDP2_ENABLE_CUDA is OFF. Set "
                      "FSDP2_ENABLE_CUDA=ON (preset \"cuda\"), or Kokkos_ROOT to a Kokkos without CUDA.")
endif()
if(FSDP2_ENABLE_NCCL)
  if(NOT FSDP2_ENABLE_CUDA)
    message(FATAL_ERROR "FSDP2_ENABLE_NCCL needs FSDP2_ENABLE_CUDA=ON: NCCL moves data between CUDA devices.")
  endif()
  fsdp2_require(NCCL libnccl-dev)
endif()

set(MPI_CXX_SKIP_MPICXX ON)
fsdp2_require(MPI libopenmpi-dev COMPONENTS CXX)

set(HDF5_PREFER_PARALLEL ON)
fsdp2_require(HDF5 libhdf5-openmpi-dev COMPONENTS C)
if(NOT HDF5_IS_PARALLEL)
  message(FATAL_ERROR "fsdp2 needs an HDF5 that was built with MPI, but the one found (${HDF5_C_LIBRARIES}) was not. On "
                      "Debian or Ubuntu: apt-get install libhdf5-openmpi-dev. Elsewhere: set HDF5_ROOT.")
endif()

fsdp2_require(ISAL libisal-dev)
fsdp2_require(fmt libfmt-dev)
fsdp2_require(nlohmann_json nlohmann-json3-dev)
if(FSDP2_ENABLE_TOOLS OR FSDP2_ENABLE_EXAMPLES)
  fsdp2_require(CLI11 libcli11-dev)
endif()
if(FSDP2_ENABLE_EXAMPLES AND NOT FSDP2_ENABLE_CUDA)
  fsdp2_require(OpenBLAS libopenblas-dev)
endif()
if(FSDP2_ENABLE_TESTS)
  fsdp2_require(GTest libgtest-dev)
  # Checkpoints are read and written without the library too. The first python3 of the path need not have h5py.
  function(fsdp2_has_h5py result python)
    execute_process(COMMAND "${python}" -c "import h5py, numpy" RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
    if(NOT status EQUAL 0)
      set(${result} FALSE PARENT_SCOPE)
    endif()
  endfunction()
  find_program(FSDP2_PYTHON python3 VALIDATOR fsdp2_has_h5py DOC "A python3 with h5py and numpy, for the tests")
  if(NOT FSDP2_PYTHON)
    message(FATAL_ERROR "The tests need a python3 with h5py and numpy, which was not found. On Debian or Ubuntu: apt-get "
                        "install python3-h5py python3-numpy. Elsewhere: set FSDP2_PYTHON to such an interpreter, or "
                        "FSDP2_ENABLE_TESTS=OFF.")
  endif()
endif()
if(FSDP2_ENABLE_BENCHMARKS)
  fsdp2_require(benchmark libbenchmark-dev)
endif()
