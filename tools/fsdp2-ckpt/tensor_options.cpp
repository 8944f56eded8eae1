// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "tensor_options.hpp"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <charconv>

#include "command.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::tool {

namespace {

bool matches_any(const std::vector<std::string>& globs, const std::string& name) {
  return std::any_of(globs.begin(), globs.end(), [&](const std::string& glob) { return matches(glob, name); });
}

/// A pattern without a tensor is a mistake that would go unseen until someone misses the tensor.
void require_match(const CheckpointIndex& index, const char* option, const std::string& glob) {
  if (std::none_of(index.tensors.begin(), index.tensors.end(),
                   [&](const TensorEntry& tensor) { return matches(glob, tensor.name); }))
    throw Exit{status_usage, fmt::format("{} {}: no tensor has such a name", option, glob)};
}

}  // namespace

void add_selection(CLI::App& command, TensorOptions& options) {
  command.add_option("--include", options.include, "GLOB: copy only tensors of such names; may be repeated")
      ->allow_extra_args(false);
  command.add_option("--exclude", options.exclude, "GLOB: leave out tensors of such names; may be repeated")
      ->allow_extra_args(false);
  command
      .add_option("--cast", options.casts,
                  "GLOB=dtype: round tensors of such names to f64, f32, f16 or bf16; the last that fits counts")
      ->allow_extra_args(false);
}

std::function<bool(const TensorEntry&)> selection_of(const TensorOptions& options, const CheckpointIndex& source) {
  for (const std::string& glob : options.include) require_match(source, "--include", glob);
  for (const std::string& glob : options.exclude) require_match(source, "--exclude", glob);
  return [include = options.include, exclude = options.exclude](const TensorEntry& tensor) {
    return (include.empty() || matches_any(include, tensor.name)) && !matches_any(exclude, tensor.name);
  };
}

std::function<DType(const TensorEntry&)> casts_of(const TensorOptions& options, const CheckpointIndex& source) {
  std::vector<std::pair<std::string, DType>> casts;
  for (const std::string& text : options.casts) {
    const std::pair<std::string, std::string> cast = parse_assignment("--cast", text);
    require_match(source, "--cast", cast.first);
    try {
      casts.emplace_back(cast.first, parse_dtype(cast.second));
    } catch (const Error& error) {
      throw Exit{status_usage, fmt::format("--cast {}: {}", text, error.what())};
    }
  }
  return [casts](const TensorEntry& tensor) {
    DType dtype = tensor.spec.dtype;
    for (const auto& [glob, to] : casts)
      if (matches(glob, tensor.name)) dtype = to;
    return dtype;
  };
}

bool matches(const std::string& glob, const std::string& name) {
  return ::fnmatch(glob.c_str(), name.c_str(), 0) == 0;
}

std::pair<std::string, std::string> parse_assignment(const char* option, const std::string& text) {
  const std::size_t equals = text.rfind('=');
  if (equals == std::string::npos) throw Exit{status_usage, fmt::format("{} {}: expected GLOB=value", option, text)};
  return {text.substr(0, equals), text.substr(equals + 1)};
}

std::int64_t parse_number(const char* option, const std::string& text) {
  std::int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [parsed, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || parsed != end)
    throw Exit{status_usage, fmt::format("{}: \"{}\" is no number", option, text)};
  return number;
}

std::pair<std::string, MeshSpec> parse_mesh(const std::string& text) {
  const auto refuse = [&] {
    throw Exit{status_usage, fmt::format("--mesh {}: expected [NAME:]axis=size,axis=size, such as dp=4,tp=2", text)};
  };
  const std::size_t colon = text.rfind(':');
  const std::string name = colon == std::string::npos ? "" : text.substr(0, colon);
  std::string rest = colon == std::string::npos ? text : text.substr(colon + 1);
  std::vector<MeshAxis> axes;
  for (bool is_last = false; !is_last;) {
    const std::size_t comma = rest.find(',');
    is_last = comma == std::string::npos;
    const std::string axis = rest.substr(0, comma);
    rest.erase(0, is_last ? rest.size() : comma + 1);
    const std::size_t equals = axis.find('=');
    if (equals == std::string::npos) refuse();
    std::int64_t size = 0;
    const char* const end = axis.data() + axis.size();
    const auto [parsed, error] = std::from_chars(axis.data() + equals + 1, end, size);
    if (error != std::errc() || parsed != end) refuse();
    axes.push_back({axis.substr(0, equals), size});
  }
  try {
    return {name, MeshSpec(std::move(axes))};
  } catch (const Error& error) {
    throw Exit{status_usage, fmt::format("--mesh {}: {}", text, error.what())};
  }
}

}  // namespace fsdp2::tool
