// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

namespace fsdp2::tool {

/// How far long work has come, on standard error: bytes, rate and time left, on one line of a terminal; else a line, or
/// with --json an event in JSON, now and then.
class Progress {
 public:
  /// Adds --progress.
  void add_option(CLI::App& command);
  /// For the library: called with the bytes done so far and in all. Nothing is said if `quiet`.
  std::function<void(std::int64_t done, std::int64_t total)> start(bool quiet, bool json);
  /// Leaves the line on the terminal.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  enum class Form { terminal, line, event };

  void report(std::int64_t done, std::int64_t total);

  double seconds_ = 10;
  Form form_ = Form::line;
  Clock::time_point begin_;
  Clock::time_point last_;
  bool has_line_ = false;
};

}  // namespace fsdp2::tool
