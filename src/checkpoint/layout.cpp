// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "fsdp2/error.hpp"

namespace fsdp2 {

namespace {

constexpr std::int64_t piece_align = 64;
/// Of all tensors: plan_rank doubles positions and aligns ends, which then cannot overflow.
constexpr std::int64_t max_total_bytes = std::int64_t{1} << 60;
/// Of the format. Readers hold a block in memory, and a file has a multiple of this of each dtype and rank.
constexpr std::int64_t max_segment_align = std::int64_t{1} << 30;

bool is_power_of_two(std::int64_t value) {
  return value > 0 && (value & (value - 1)) == 0;
}

/// The ranks that hold the same box of a tensor: a mesh, and which of its axes replicate.
using ReplicaAxes = std::pair<std::size_t, std::vector<bool>>;

/// The stretch of a replica set's line of boxes that falls to one rank.
struct Share {
  std::int64_t total = 0;  ///< bytes on the line
  std::int64_t replicas = 1;
  std::int64_t mine = 0;  ///< this rank's place among them

  std::int64_t cut(std::int64_t m) const { return total / replicas * m + total % replicas * m / replicas; }
};

ReplicaAxes replica_axes(const TensorEntry& tensor) {
  std::vector<bool> is_replicated;
  for (const Placement& placement : tensor.spec.placements)
    is_replicated.push_back(std::holds_alternative<Replicate>(placement));
  return {tensor.mesh, std::move(is_replicated)};
}

Share make_share(const ReplicaAxes& axes, const MeshSpec& mesh, const Shape& coordinate) {
  Share share;
  for (std::size_t a = 0; a < mesh.dimensions(); ++a) {
    if (!axes.second[a]) continue;
    share.replicas *= mesh.axes()[a].size;
    share.mine = share.mine * mesh.axes()[a].size + coordinate[a];
  }
  return share;
}

/// How many of the `rows` rows of a box of `bytes` bytes, which begins at `begin` on the line, lie before `position`.
std::int64_t rows_before(std::int64_t position, std::int64_t begin, std::int64_t bytes, std::int64_t rows,
                         std::int64_t split_bytes) {
  const std::int64_t twice = 2 * (position - begin);
  if (bytes <= split_bytes || rows == 1) return twice >= bytes ? rows : 0;
  const std::int64_t row_bytes = bytes / rows;
  const std::int64_t numerator = twice + row_bytes;
  return numerator < 0 ? 0 : std::min(numerator / (2 * row_bytes), rows);
}

}  // namespace

std::size_t CheckpointIndex::find(const std::string& name) const {
  const auto it = std::lower_bound(tensors.begin(), tensors.end(), name,
                                   [](const TensorEntry& entry, const std::string& key) { return entry.name < key; });
  return it != tensors.end() && it->name == name ? static_cast<std::size_t>(it - tensors.begin()) : tensors.size();
}

RankPlan plan_rank(const CheckpointIndex& index, std::int64_t rank) {
  std::vector<Shape> coordinates;  // by mesh; empty where the rank is outside
  for (const MeshEntry& mesh : index.meshes)
    coordinates.push_back(mesh.spec.contains(rank) ? mesh.spec.coordinate_of(rank) : Shape{});

  struct Placed {
    std::size_t tensor;
    Box box;
    std::int64_t bytes;
    std::int64_t begin;  // on the line of its replica set
    Share* share;
  };
  std::map<ReplicaAxes, Share> shares;
  std::vector<Placed> boxes;
  for (std::size_t t = 0; t < index.tensors.size(); ++t) {
    const TensorEntry& tensor = index.tensors[t];
    const Shape& coordinate = coordinates[tensor.mesh];
    if (coordinate.empty()) continue;
    const MeshSpec& mesh = index.meshes[tensor.mesh].spec;
    Box box = local_box(tensor.spec, mesh, coordinate);
    const std::int64_t bytes = box.numel() * size_of(tensor.spec.dtype);
    ReplicaAxes axes = replica_axes(tensor);
    auto it = shares.find(axes);
    if (it == shares.end()) it = shares.emplace(axes, make_share(axes, mesh, coordinate)).first;
    Share& share = it->second;
    if (bytes != 0) boxes.push_back({t, std::move(box), bytes, share.total, &share});
    share.total = checked_add(share.total, bytes);
  }

  RankPlan plan;
  plan.used.fill(0);
  for (Placed& placed : boxes) {
    const Share& share = *placed.share;
    Box& box = placed.box;
    std::size_t dim = 0;
    while (dim < box.extent.size() && box.extent[dim] == 1) ++dim;
    const bool has_rows = dim < box.extent.size();
    const std::int64_t rows = has_rows ? box.extent[dim] : 1;
    const auto before = [&](std::int64_t position) {
      return rows_before(position, placed.begin, placed.bytes, rows, index.sizes.split_bytes);
    };
    const std::int64_t first = before(share.cut(share.mine));
    const std::int64_t last = before(share.cut(share.mine + 1));
    if (last <= first) continue;
    if (has_rows) {
      box.offset[dim] += first;
      box.extent[dim] = last - first;
    }
    std::int64_t& used = plan.used[index.tensors[placed.tensor].spec.dtype];
    const std::int64_t start = align_up(used, piece_align);
    const std::int64_t bytes = placed.bytes / rows * (last - first);
    plan.pieces.push_back({placed.tensor, std::move(box), start, bytes});
    used = checked_add(start, bytes);
  }
  return plan;
}

void validate(const CheckpointIndex& index) {
  const FormatSizes& sizes = index.sizes;
  if (!is_power_of_two(sizes.block_bytes) || !is_power_of_two(sizes.segment_align) || sizes.block_bytes < 4096 ||
      sizes.segment_align < sizes.block_bytes || sizes.segment_align > max_segment_align || sizes.split_bytes < 0)
    throw ConfigError(
        fmt::format("block_bytes {} and segment_align {} must be powers of two with 4096 <= block_bytes <= "
                    "segment_align <= {}, and split_bytes {} not negative",
                    sizes.block_bytes, sizes.segment_align, max_segment_align, sizes.split_bytes));
  if (index.world_size < 1) throw ConfigError(fmt::format("world size {} is not at least 1", index.world_size));
  for (const MeshEntry& mesh : index.meshes) {
    const std::vector<std::int64_t>& ranks = mesh.spec.ranks();
    const std::int64_t highest = ranks.empty() ? mesh.spec.size() - 1 : *std::max_element(ranks.begin(), ranks.end());
    if (highest >= index.world_size)
      throw ConfigError(fmt::format("mesh \"{}\" ({}) has rank {}, but the world has {} ranks", mesh.name,
                                    mesh.spec.to_string(), highest, index.world_size));
    if (mesh.roles.size() != mesh.spec.dimensions())
      throw ConfigError(fmt::format("mesh \"{}\" has {} axis roles for {} axes", mesh.name, mesh.roles.size(),
                                    mesh.spec.dimensions()));
  }
  std::int64_t total = 0;
  for (std::size_t t = 0; t < index.tensors.size(); ++t) {
    const TensorEntry& tensor = index.tensors[t];
    if (tensor.name.empty()) throw ConfigError("a tensor has no name");
    if (t > 0 && !(index.tensors[t - 1].name < tensor.name))
      throw ConfigError(fmt::format("tensor \"{}\" appears twice or out of order", tensor.name));
    if (tensor.mesh >= index.meshes.size())
      throw ConfigError(fmt::format("tensor \"{}\" lies on mesh {}, but there are {}", tensor.name, tensor.mesh,
                                    index.meshes.size()));
    validate(tensor.spec, index.meshes[tensor.mesh].spec, tensor.name);
    if (tensor.bytes() > max_total_bytes - total)
      throw ShapeError(
          fmt::format("tensor \"{}\": with it, the tensors have more than {} bytes", tensor.name, max_total_bytes));
    total += tensor.bytes();
    for (const Placement& placement : tensor.spec.placements)
      if (std::holds_alternative<Partial>(placement))
        throw ConfigError(
            fmt::format("tensor \"{}\" has placement {}: only finished tensors can be saved, redistribute it to "
                        "Replicate or Shard first",
                        tensor.name, to_string(placement)));
  }
}

std::string shard_file_name(std::size_t file, std::size_t files) {
  return fmt::format("shard-{:05}-of-{:05}.h5", file, files);
}

}  // namespace fsdp2
