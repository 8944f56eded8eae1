// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/placement.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "fsdp2/error.hpp"

namespace fsdp2 {

std::string to_string(const Placement& placement) {
  if (const auto* shard = std::get_if<Shard>(&placement)) return fmt::format("Shard({})", shard->dim);
  if (const auto* ragged = std::get_if<Ragged>(&placement)) return fmt::format("Ragged({})", ragged->dim);
  if (const auto* partial = std::get_if<Partial>(&placement)) {
    constexpr const char* names[] = {"sum", "min", "max"};
    return fmt::format("Partial({})", names[static_cast<int>(partial->op)]);
  }
  return "Replicate";
}

std::vector<std::int64_t> split_order(const TensorSpec& spec) {
  if (!spec.split_order.empty()) return spec.split_order;
  std::vector<std::int64_t> order(spec.placements.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  return order;
}

void validate(const TensorSpec& spec, const MeshSpec& mesh, const std::string& name) {
  try {
    (void)spec.bytes();
  } catch (const ShapeError& error) {
    throw ShapeError(fmt::format("tensor \"{}\": {}", name, error.what()));
  }
  const auto rank = static_cast<std::int64_t>(spec.shape.size());
  if (spec.placements.size() != mesh.dimensions())
    throw ConfigError(fmt::format("tensor \"{}\" has {} placements, but mesh {} has {} axes", name,
                                  spec.placements.size(), mesh.to_string(), mesh.dimensions()));
  const std::vector<std::int64_t> order = split_order(spec);
  std::vector<bool> is_cut(spec.shape.size(), false);
  std::vector<bool> seen(mesh.dimensions(), false);
  if (order.size() != mesh.dimensions())
    throw ConfigError(fmt::format("tensor \"{}\": the split order names {} axes, but mesh {} has {}", name,
                                  order.size(), mesh.to_string(), mesh.dimensions()));
  for (const std::int64_t axis : order) {
    if (axis < 0 || axis >= static_cast<std::int64_t>(seen.size()) || seen[static_cast<std::size_t>(axis)])
      throw ConfigError(fmt::format("tensor \"{}\": split order {} is not a permutation of the {} mesh axes", name,
                                    to_string(order), seen.size()));
    const auto a = static_cast<std::size_t>(axis);
    seen[a] = true;
    const Placement& placement = spec.placements[a];
    const auto* shard = std::get_if<Shard>(&placement);
    const auto* ragged = std::get_if<Ragged>(&placement);
    if (shard == nullptr && ragged == nullptr) continue;
    const std::int64_t dim = shard != nullptr ? shard->dim : ragged->dim;
    if (dim < 0 || dim >= rank)
      throw ShapeError(fmt::format("tensor \"{}\": {} on axis \"{}\", but shape {} has {} dimensions", name,
                                   to_string(placement), mesh.axes()[a].name, to_string(spec.shape), rank));
    const auto d = static_cast<std::size_t>(dim);
    if (ragged != nullptr) {
      const std::vector<std::int64_t>& bounds = ragged->bounds;
      if (is_cut[d])
        throw ConfigError(fmt::format("tensor \"{}\": Ragged({}) on axis \"{}\" must be the first cut of its dimension",
                                      name, dim, mesh.axes()[a].name));
      const std::int64_t ranks = mesh.axes()[a].size;
      if (static_cast<std::int64_t>(bounds.size()) - 1 != ranks || bounds.front() != 0 ||
          bounds.back() != spec.shape[d] || !std::is_sorted(bounds.begin(), bounds.end()))
        throw ShapeError(
            fmt::format("tensor \"{}\": ragged bounds {} on axis \"{}\" must ascend from 0 to {}, "
                        "with one number more than the axis has ranks ({})",
                        name, to_string(bounds), mesh.axes()[a].name, spec.shape[d], ranks));
    }
    is_cut[d] = true;
  }
}

namespace {

/// What the rank at `index` of an axis of `size` ranks holds of dimension d of a box that the axes before it have cut.
Range cut(const Placement& placement, std::size_t d, const Box& box, std::int64_t size, std::int64_t index) {
  if (const auto* ragged = std::get_if<Ragged>(&placement)) {
    const auto i = static_cast<std::size_t>(index);
    return {ragged->bounds[i], ragged->bounds[i + 1]};
  }
  const Range rows = chunk(box.extent[d], size, index);
  return {box.offset[d] + rows.begin, box.offset[d] + rows.end};
}

/// The dimension that a placement cuts.
std::optional<std::size_t> cut_dimension(const Placement& placement) {
  if (const auto* shard = std::get_if<Shard>(&placement)) return static_cast<std::size_t>(shard->dim);
  if (const auto* ragged = std::get_if<Ragged>(&placement)) return static_cast<std::size_t>(ragged->dim);
  return std::nullopt;
}

/// The ranks along an axis that hold some of rows [begin, end), which lie in the box.
Range holders(const Placement& placement, std::size_t d, const Box& box, std::int64_t size, Range rows) {
  if (const auto* ragged = std::get_if<Ragged>(&placement)) {
    const std::vector<std::int64_t>& bounds = ragged->bounds;
    return {std::upper_bound(bounds.begin(), bounds.end(), rows.begin) - bounds.begin() - 1,
            std::lower_bound(bounds.begin(), bounds.end(), rows.end) - bounds.begin()};
  }
  const std::int64_t chunk_rows = chunk(box.extent[d], size, 0).size();
  return {(rows.begin - box.offset[d]) / chunk_rows, (rows.end - 1 - box.offset[d]) / chunk_rows + 1};
}

/// Goes down the split order, and along each axis only to ranks that hold some of what is wanted.
struct HolderSearch {
  const TensorSpec& spec;
  const MeshSpec& mesh;
  const std::vector<std::int64_t> order;
  const Box& wanted;
  const std::function<void(const Shape&)>& found;
  Box box;
  Shape coordinate;

  void search(std::size_t level) {
    if (level == order.size()) return found(coordinate);
    const auto a = static_cast<std::size_t>(order[level]);
    const Placement& placement = spec.placements[a];
    const std::int64_t size = mesh.axes()[a].size;
    const std::optional<std::size_t> d = cut_dimension(placement);
    if (!d) {
      for (coordinate[a] = 0; coordinate[a] < size; ++coordinate[a]) search(level + 1);
      return;
    }
    const std::int64_t offset = box.offset[*d];
    const std::int64_t extent = box.extent[*d];
    const Range rows{std::max(wanted.offset[*d], offset),
                     std::min(wanted.offset[*d] + wanted.extent[*d], offset + extent)};
    if (rows.end <= rows.begin) return;
    const Range indices = holders(placement, *d, box, size, rows);
    for (std::int64_t index = indices.begin; index < indices.end; ++index) {
      const Range part = cut(placement, *d, box, size, index);
      if (part.size() == 0) continue;
      coordinate[a] = index;
      box.offset[*d] = part.begin;
      box.extent[*d] = part.size();
      search(level + 1);
      box.offset[*d] = offset;
      box.extent[*d] = extent;
    }
  }
};

}  // namespace

Box local_box(const TensorSpec& spec, const MeshSpec& mesh, const Shape& coordinate) {
  Box box = Box::whole(spec.shape);
  for (const std::int64_t axis : split_order(spec)) {
    const auto a = static_cast<std::size_t>(axis);
    const std::optional<std::size_t> d = cut_dimension(spec.placements[a]);
    if (!d) continue;
    const Range rows = cut(spec.placements[a], *d, box, mesh.axes()[a].size, coordinate[a]);
    box.offset[*d] = rows.begin;
    box.extent[*d] = rows.size();
  }
  return box;
}

void for_each_holder(const TensorSpec& spec, const MeshSpec& mesh, const Box& wanted,
                     const std::function<void(const Shape& coordinate)>& found) {
  if (wanted.numel() == 0) return;
  HolderSearch{spec, mesh, split_order(spec), wanted, found, Box::whole(spec.shape), Shape(mesh.dimensions(), 0)}
      .search(0);
}

}  // namespace fsdp2
