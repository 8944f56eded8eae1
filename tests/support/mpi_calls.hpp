// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// What a test program that is built with mpi_calls.cpp communicates.

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp2::test {

/// Where the names of communicating MPI calls of this process are recorded, in order, without "MPI_"; null: nowhere.
inline std::vector<std::string>* calls = nullptr;
/// Called before the first one enters the list.
inline std::function<void()> at_first_call;

/// The calls that `body` makes.
template <class Body>
std::vector<std::string> calls_of(Body&& body) {
  std::vector<std::string> seen;
  calls = &seen;
  std::forward<Body>(body)();
  calls = nullptr;
  return seen;
}

}  // namespace fsdp2::test
