// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/version.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

namespace {

TEST(Version, LibraryAgreesWithItsHeaders) {
  EXPECT_EQ(fsdp2::version(), FSDP2_VERSION_STRING);
  EXPECT_EQ(fsdp2::version(), fmt::format("{}.{}.{}", FSDP2_VERSION_MAJOR, FSDP2_VERSION_MINOR, FSDP2_VERSION_PATCH));
}

TEST(Version, BuildInfoNamesWhatResultsDependOn) {
  const std::string info = fsdp2::build_info();
  for (const char* key : {"version: ", "commit: ", "compiler: ", "build type: ", "kokkos: ", "mpi: ", "hdf5: "})
    EXPECT_NE(info.find(key), std::string::npos) << key << "is missing in\n" << info;
}

}  // namespace
