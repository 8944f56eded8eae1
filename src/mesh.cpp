// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/mesh.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "fsdp2/error.hpp"

namespace fsdp2 {

MeshSpec::MeshSpec(std::vector<MeshAxis> axes, std::vector<std::int64_t> ranks)
    : axes_(std::move(axes)), ranks_(std::move(ranks)) {
  if (axes_.empty()) throw ConfigError("a mesh needs at least one axis, such as {\"dp\", 4}");
  std::set<std::string> names;
  for (const MeshAxis& axis : axes_) {
    if (axis.name.empty()) throw ConfigError("a mesh axis needs a name");
    if (axis.name.find_first_of(",:=") != std::string::npos)
      throw ConfigError(fmt::format("mesh axis \"{}\": a name must not contain ',', ':' or '='", axis.name));
    if (!names.insert(axis.name).second) throw ConfigError(fmt::format("mesh axis \"{}\" appears twice", axis.name));
    if (axis.size < 1)
      throw ConfigError(fmt::format("mesh axis \"{}\" has size {}: expected at least 1", axis.name, axis.size));
    if (__builtin_mul_overflow(size_, axis.size, &size_))
      throw ConfigError("the product of the mesh axis sizes overflows 64 bits");
  }
  if (ranks_.empty()) return;
  if (static_cast<std::int64_t>(ranks_.size()) != size_)
    throw ConfigError(
        fmt::format("mesh {} needs {} ranks, but its rank list has {}", to_string(), size_, ranks_.size()));
  if (std::set<std::int64_t>(ranks_.begin(), ranks_.end()).size() != ranks_.size() ||
      *std::min_element(ranks_.begin(), ranks_.end()) < 0)
    throw ConfigError(fmt::format("the rank list of mesh {} has a repeated or negative rank", to_string()));
  std::vector<std::int64_t> row_major(ranks_.size());
  std::iota(row_major.begin(), row_major.end(), std::int64_t{0});
  if (ranks_ == row_major) ranks_.clear();  // one representation, so that equal meshes compare equal
}

bool MeshSpec::has_axis(std::string_view name) const {
  return std::any_of(axes_.begin(), axes_.end(), [&](const MeshAxis& axis) { return axis.name == name; });
}

std::size_t MeshSpec::axis(std::string_view name) const {
  for (std::size_t i = 0; i < axes_.size(); ++i)
    if (axes_[i].name == name) return i;
  throw ConfigError(fmt::format("the mesh has no axis \"{}\": its axes are {}", name, to_string()));
}

Shape MeshSpec::coordinate_of(std::int64_t rank) const {
  std::int64_t index = rank;
  if (!ranks_.empty()) index = std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin();
  if (index < 0 || index >= size_) throw ConfigError(fmt::format("rank {} is not in mesh {}", rank, to_string()));
  Shape coordinate(axes_.size());
  for (std::size_t i = axes_.size(); i-- > 0;) {
    coordinate[i] = index % axes_[i].size;
    index /= axes_[i].size;
  }
  return coordinate;
}

std::int64_t MeshSpec::rank_at(const Shape& coordinate) const {
  if (coordinate.size() != axes_.size())
    throw ConfigError(fmt::format("coordinate {} has {} indices, but mesh {} has {} axes", fsdp2::to_string(coordinate),
                                  coordinate.size(), to_string(), axes_.size()));
  std::int64_t index = 0;
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    if (coordinate[i] < 0 || coordinate[i] >= axes_[i].size)
      throw ConfigError(fmt::format("coordinate {} is outside mesh {}", fsdp2::to_string(coordinate), to_string()));
    index = index * axes_[i].size + coordinate[i];
  }
  return ranks_.empty() ? index : ranks_[static_cast<std::size_t>(index)];
}

bool MeshSpec::contains(std::int64_t rank) const {
  if (ranks_.empty()) return rank >= 0 && rank < size_;
  return std::find(ranks_.begin(), ranks_.end(), rank) != ranks_.end();
}

MeshSpec MeshSpec::flatten(const std::vector<std::string>& names, std::string flattened_name) const {
  if (names.empty()) throw ConfigError("flatten needs at least one axis name");
  const std::size_t first = axis(names.front());
  std::int64_t size = 1;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (axis(names[i]) != first + i)
      throw ConfigError(
          fmt::format("axes {} of mesh {} are not adjacent and in order", fmt::join(names, ","), to_string()));
    size *= axes_[first + i].size;
  }
  std::vector<MeshAxis> axes = axes_;
  const auto begin = axes.begin() + static_cast<std::ptrdiff_t>(first);
  axes.erase(begin, begin + static_cast<std::ptrdiff_t>(names.size()));
  axes.insert(axes.begin() + static_cast<std::ptrdiff_t>(first), {std::move(flattened_name), size});
  return MeshSpec(std::move(axes), ranks_);
}

std::string MeshSpec::to_string() const {
  std::string text;
  for (const MeshAxis& axis : axes_) text += fmt::format("{}{}={}", text.empty() ? "" : ",", axis.name, axis.size);
  return text;
}

}  // namespace fsdp2
