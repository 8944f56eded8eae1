// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/log.hpp"

#include <utility>

namespace fsdp2 {

namespace {
LogSink& current_sink() {
  static LogSink sink;
  return sink;
}
}  // namespace

void set_log_sink(LogSink sink) {
  current_sink() = std::move(sink);
}

void log(LogLevel level, std::string_view message) {
  if (const LogSink& sink = current_sink()) sink(level, message);
}

}  // namespace fsdp2
