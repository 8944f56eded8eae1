// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// The driver of a fuzz target where libFuzzer is not.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <span>
#include <vector>

namespace fsdp2::testing {

/// Numbers of inputs: FIRST COUNT on the command line, or from 0 on `count`, or a million where FSDP2_TEST_LONG is set.
/// `make` gives the bytes of an input to random numbers that belong to it; `accepts` throws where what was accepted is
/// wrong. Returns what main returns.
inline int run_fuzz(int argc, char** argv, std::uint64_t count,
                    const std::function<std::vector<std::uint8_t>(std::mt19937_64& random)>& make,
                    const std::function<bool(std::span<const std::uint8_t> input)>& accepts) {
  const std::uint64_t first = argc == 3 ? std::strtoull(argv[1], nullptr, 10) : 0;
  if (argc == 3)
    count = std::strtoull(argv[2], nullptr, 10);
  else if (std::getenv("FSDP2_TEST_LONG") != nullptr)
    count = 1000000;
  std::uint64_t accepted = 0;
  for (std::uint64_t number = first; number < first + count; ++number) {
    std::mt19937_64 random(number);
    const std::vector<std::uint8_t> input = make(random);
    try {
      accepted += accepts(input) ? 1 : 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "input %llu: %s\n", static_cast<unsigned long long>(number), error.what());
      return 1;
    }
  }
  std::printf("%llu inputs, %llu accepted\n", static_cast<unsigned long long>(count),
              static_cast<unsigned long long>(accepted));
  // Else the changes reach nothing, or everything: nothing was tested.
  return count >= 1000 && (accepted < count / 100 || accepted > count / 2) ? 1 : 0;
}

/// As many random bytes.
inline std::vector<std::uint8_t> random_bytes(std::mt19937_64& random, std::size_t count) {
  std::vector<std::uint8_t> bytes(count);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
  return bytes;
}

}  // namespace fsdp2::testing
