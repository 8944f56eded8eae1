// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>
#include <string_view>

namespace fsdp2 {

enum class LogLevel { info, warning };

/// Receives what the library has to say, on the thread that says it. The library itself never prints.
using LogSink = std::function<void(LogLevel, std::string_view message)>;

/// Installs the sink for this process; an empty function (the default) drops all messages. Messages come from every
/// rank: a sink that prints will usually do so on rank 0 only. Not to be called while another thread uses the library.
void set_log_sink(LogSink sink);

/// Sends a message to the sink.
void log(LogLevel level, std::string_view message);

}  // namespace fsdp2
