// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <limits>

#include "command.hpp"

namespace fsdp2::tool {

void Progress::add_option(CLI::App& command) {
  command
      .add_option("--progress", seconds_,
                  "SECONDS between lines that say how far the work is, where standard error is no terminal")
      ->check(CLI::Range(0.0, std::numeric_limits<double>::max()))
      ->capture_default_str();
}

std::function<void(std::int64_t done, std::int64_t total)> Progress::start(bool quiet, bool json) {
  begin_ = last_ = Clock::now();
  form_ = json ? Form::event : ::isatty(STDERR_FILENO) != 0 ? Form::terminal : Form::line;
  if (quiet) return {};
  return [this](std::int64_t done, std::int64_t total) { report(done, total); };
}

void Progress::report(std::int64_t done, std::int64_t total) {
  constexpr double terminal_seconds = 0.1;
  const auto seconds_since = [now = Clock::now()](Clock::time_point then) {
    return std::chrono::duration<double>(now - then).count();
  };
  if (seconds_since(last_) < (form_ == Form::terminal ? terminal_seconds : seconds_)) return;
  last_ = Clock::now();
  const double rate = static_cast<double>(done) / std::max(seconds_since(begin_), 1e-3);
  const double left = rate > 0 ? static_cast<double>(total - done) / rate : 0;
  if (form_ == Form::event) {
    const nlohmann::ordered_json event{
        {"event", "progress"}, {"done", done}, {"total", total}, {"bytes_per_second", rate}, {"seconds_left", left}};
    fmt::print(stderr, "{}\n", event.dump());
    return;
  }
  const std::string text = fmt::format("{} of {}, {}/s, {:.0f} s left", format_bytes(done), format_bytes(total),
                                       format_bytes(static_cast<std::int64_t>(rate)), left);
  has_line_ = form_ == Form::terminal;
  if (has_line_)
    fmt::print(stderr, "\r{}   ", text);
  else
    fmt::print(stderr, "{}\n", text);
  std::fflush(stderr);
}

void Progress::finish() {
  if (has_line_) fmt::print(stderr, "\n");
  has_line_ = false;
}

}  // namespace fsdp2::tool
