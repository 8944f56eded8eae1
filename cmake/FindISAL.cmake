# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause

# Finds Intel's ISA-L (CRC-64): target ISAL::ISAL. ISAL_ROOT wins.
include(FindPackageHandleStandardArgs)
find_path(ISAL_INCLUDE_DIR isa-l/crc64.h)
find_library(ISAL_LIBRARY isal)
find_package_handle_standard_args(ISAL DEFAULT_MSG ISAL_LIBRARY ISAL_INCLUDE_DIR)
mark_as_advanced(ISAL_INCLUDE_DIR ISAL_LIBRARY)
if(ISAL_FOUND AND NOT TARGET ISAL::ISAL)
  add_library(ISAL::ISAL UNKNOWN IMPORTED)
  set_target_properties(ISAL::ISAL PROPERTIES IMPORTED_LOCATION "${ISAL_LIBRARY}"
                                              INTERFACE_INCLUDE_DIRECTORIES "${ISAL_INCLUDE_DIR}")
endif()
