// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
// Writes the checkpoints of checkpoints/golden as this version of the library writes them: make_golden OUT, where OUT
// must not exist. Golden files are committed once per released format version, and never written anew.

#include <cstdio>
#include <filesystem>

#include "golden/golden.hpp"
#include "support/local_checkpoint.hpp"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: make_golden OUT\n", stderr);
    return 2;
  }
  try {
    if (!std::filesystem::create_directory(argv[1])) {
      std::fprintf(stderr, "make_golden: %s exists\n", argv[1]);
      return 2;
    }
    for (const auto& [name, index, ranks_per_file, rank_local] : fsdp2::testing::golden_checkpoints()) {
      const std::filesystem::path directory = std::filesystem::path(argv[1]) / name;
      std::filesystem::create_directory(directory);
      fsdp2::testing::write_local_checkpoint(directory, index, ranks_per_file, rank_local);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "make_golden: %s\n", error.what());
    return 3;
  }
  return 0;
}
