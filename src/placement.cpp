// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/placement.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

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

Box local_box(const TensorSpec& spec, const MeshSpec& mesh, const Shape& coordinate) {
  Box box = Box::whole(spec.shape);
  for (const std::int64_t axis : split_order(spec)) {
    const auto a = static_cast<std::size_t>(axis);
    if (const auto* shard = std::get_if<Shard>(&spec.placements[a])) {
      const auto d = static_cast<std::size_t>(shard->dim);
      const Range rows = chunk(box.extent[d], mesh.axes()[a].size, coordinate[a]);
      box.offset[d] += rows.begin;
      box.extent[d] = rows.size();
    } else if (const auto* ragged = std::get_if<Ragged>(&spec.placements[a])) {
      const auto d = static_cast<std::size_t>(ragged->dim);
      const auto i = static_cast<std::size_t>(coordinate[a]);
      box.offset[d] = ragged->bounds[i];
      box.extent[d] = ragged->bounds[i + 1] - ragged->bounds[i];
    }
  }
  return box;
}

}  // namespace fsdp2
