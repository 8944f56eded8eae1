// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "command.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <iterator>
#include <limits>
#include <system_error>

#include "fsdp2/error.hpp"

namespace fsdp2::tool {

namespace {

/// The character at the beginning of `text` and how many bytes it has; 0 of them where it is not valid UTF-8.
struct Character {
  std::uint32_t code = 0;
  std::size_t bytes = 0;
};

Character first_character(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) return {lead, 1};
  const std::size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  std::uint32_t code = lead & (0x7fu >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    const auto next = static_cast<unsigned char>(text[i]);
    if ((next & 0xc0) != 0x80) return {};
    code = code << 6 | (next & 0x3fu);
  }
  constexpr std::uint32_t lowest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xd800 && code < 0xe000;
  return code < lowest[bytes] || code > 0x10ffff || is_surrogate ? Character{} : Character{code, bytes};
}

/// Whether a terminal would do something else with it than show it.
bool is_control(std::uint32_t code) {
  const bool is_direction = code == 0x200e || code == 0x200f || (code >= 0x2028 && code <= 0x202e) ||
                            (code >= 0x2066 && code <= 0x2069) || code == 0x61c;
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || is_direction;
}

}  // namespace

std::string format_bytes(std::int64_t bytes) {
  constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(units); ++unit) value /= 1024;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, units[unit]);
}

std::string printable(std::string_view text, bool keeps_lines) {
  std::string result;
  while (!text.empty()) {
    const auto [code, bytes] = first_character(text);
    const std::size_t taken = bytes == 0 ? 1 : bytes;
    if (bytes != 0 && (!is_control(code) || (keeps_lines && code == '\n')))
      result += text.substr(0, taken);
    else
      for (const char byte : text.substr(0, taken))
        result += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
    text.remove_prefix(taken);
  }
  return result;
}

void print_json(const nlohmann::ordered_json& document) {
  constexpr int indent = 2;
  fmt::print("{}\n", document.dump(indent, ' ', true, nlohmann::ordered_json::error_handler_t::replace));
}

std::string placements_text(const TensorEntry& tensor, const MeshEntry& mesh) {
  std::string text;
  for (std::size_t a = 0; a < tensor.spec.placements.size(); ++a)
    text += fmt::format("{}{}:{}", a == 0 ? "" : " ", mesh.spec.axes()[a].name, to_string(tensor.spec.placements[a]));
  return text;
}

CheckpointIndex open_checkpoint(const std::string& path) {
  try {
    return read_index(path);
  } catch (const Error& error) {
    throw Exit{status_usage, error.what()};
  }
}

void run_work(const std::function<void()>& work) {
  try {
    work();
  } catch (const ConfigError& error) {
    throw Exit{status_usage, error.what()};
  } catch (const ShapeError& error) {
    throw Exit{status_usage, error.what()};
  } catch (const Error& error) {
    throw Exit{status_failed, error.what()};
  }
}

void require_directory(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) throw Exit{status_usage, fmt::format("{} is not a directory", path)};
}

void require_absent(const std::string& path) {
  std::error_code error;
  if (std::filesystem::exists(std::filesystem::symlink_status(path, error)))
    throw Exit{status_usage, fmt::format("{} already exists: choose another name or remove it", path)};
}

void add_memory(CLI::App& command, std::int64_t& bytes) {
  command.add_option("--memory", bytes, "most tensor bytes in memory at a time, such as 256MiB; at least some blocks")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::int64_t{1}, std::numeric_limits<std::int64_t>::max()))
      ->capture_default_str();
}

CLI::Option* add_checkpoint(CLI::App& command, std::string& path, const std::string& description) {
  return command.add_option("CKPT", path, description)->required();
}

}  // namespace fsdp2::tool
