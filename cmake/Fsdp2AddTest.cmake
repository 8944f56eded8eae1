# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause

# One thread a rank. More ranks than cores, and root in a container, are normal for tests; other MPIs ignore the OMPI_ ones.
set(fsdp2_test_environment OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1
                           OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1)
# MPI libraries keep memory until the end: leaks are looked for in the tests without MPI.
set(fsdp2_mpi_test_environment ${fsdp2_test_environment} ASAN_OPTIONS=detect_leaks=0)

set(fsdp2_mpirun "${MPIEXEC_EXECUTABLE}")
execute_process(COMMAND "${MPIEXEC_EXECUTABLE}" --version OUTPUT_VARIABLE mpiexec_version ERROR_QUIET)
if(mpiexec_version MATCHES "Open MPI|OpenRTE")
  list(APPEND fsdp2_mpirun --oversubscribe)
endif()
list(APPEND fsdp2_mpirun ${MPIEXEC_NUMPROC_FLAG})

# fsdp2_add_test(<name> SOURCES <file>… [RANKS <n>…] [TIMEOUT <seconds>] [LIBRARIES <target>…])
#
# Builds one GoogleTest executable. Without RANKS one ctest runs it, with Kokkos initialised; with RANKS one ctest per
# rank count runs it under mpirun, with MPI and Kokkos initialised. TIMEOUT, for each ctest, is 120 by default.
function(fsdp2_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "SOURCES;RANKS;LIBRARIES")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if(arg_RANKS)
    set(main "${PROJECT_SOURCE_DIR}/tests/support/mpi_main.cpp")
  else()
    set(main "${PROJECT_SOURCE_DIR}/tests/support/kokkos_main.cpp")
  endif()
  add_executable(${name} ${arg_SOURCES} "${main}")
  # Tests see the library's private headers too.
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/tests")
  target_link_libraries(${name} PRIVATE fsdp2::fsdp2 fsdp2_build_flags fmt::fmt GTest::gtest ${arg_LIBRARIES})
  if(NOT arg_RANKS)
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES TIMEOUT ${arg_TIMEOUT} ENVIRONMENT "${fsdp2_test_environment}")
  endif()
  foreach(ranks IN LISTS arg_RANKS)
    add_test(NAME ${name}.${ranks} COMMAND ${fsdp2_mpirun} ${ranks} $<TARGET_FILE:${name}>)
    set_tests_properties(${name}.${ranks} PROPERTIES TIMEOUT ${arg_TIMEOUT} PROCESSORS ${ranks}
                                                     ENVIRONMENT "${fsdp2_mpi_test_environment}")
  endforeach()
endfunction()

# Where the ctest fixture install_prefix, of tests/install, puts the build tree.
set(fsdp2_test_prefix "${PROJECT_BINARY_DIR}/tests/install/prefix")

# fsdp2_add_installed_test(<name> <source> <binary> [<command>…])
#
# One ctest that configures and builds the project in <source> against the installed package alone, as its users would,
# and then runs the command.
function(fsdp2_add_installed_test name source binary)
  if(ARGN)
    list(PREPEND ARGN --test-command)
  endif()
  add_test(
    NAME ${name}
    COMMAND
      ${CMAKE_CTEST_COMMAND} --build-and-test "${source}" "${binary}" --build-generator "${CMAKE_GENERATOR}" --build-noclean
      --build-options "-DCMAKE_PREFIX_PATH=${fsdp2_test_prefix}" "-DKokkos_DIR=${Kokkos_DIR}"
      "-DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}" "-DCMAKE_CXX_FLAGS=${CMAKE_CXX_FLAGS}" "-DCMAKE_BUILD_TYPE=$<CONFIG>"
      "-DMPI_CXX_COMPILER=${MPI_CXX_COMPILER}" "-DREADME=${PROJECT_SOURCE_DIR}/README.md"
      "-DGUIDE=${PROJECT_SOURCE_DIR}/docs/guide.md" ${ARGN})
  set_tests_properties(${name} PROPERTIES FIXTURES_REQUIRED install_prefix TIMEOUT 300
                                          ENVIRONMENT "${fsdp2_mpi_test_environment}")
endfunction()
