// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/reshard.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <random>

#include "checkpoint/index_file.hpp"
#include "checkpoint/publication.hpp"
#include "checkpoint/reader.hpp"
#include "fsdp2/error.hpp"
#include "fsdp2/version.hpp"

namespace fsdp2 {

namespace checkpoint {

namespace {

/// The axis of a mesh that takes the change of the number of ranks.
std::size_t rescaled_axis(const MeshEntry& mesh) {
  for (std::size_t a = 0; a < mesh.roles.size(); ++a)
    if (mesh.roles[a] == AxisRole::shard) return a;
  if (mesh.spec.dimensions() == 1) return 0;
  throw ConfigError(
      fmt::format("mesh \"{}\" ({}) has no FSDP shard axis to rescale", mesh.name, mesh.spec.to_string()));
}

MeshEntry rescale(const MeshEntry& mesh, std::int64_t world_size) {
  const std::size_t axis = rescaled_axis(mesh);
  std::vector<MeshAxis> axes = mesh.spec.axes();
  const std::int64_t others = mesh.spec.size() / axes[axis].size;
  if (world_size < 1 || world_size % others != 0)
    throw ConfigError(fmt::format("mesh \"{}\" ({}) cannot have {} ranks: its other axes need a multiple of {}",
                                  mesh.name, mesh.spec.to_string(), world_size, others));
  axes[axis].size = world_size / others;
  return {mesh.name, MeshSpec(std::move(axes)), mesh.roles};
}

std::string random_save_id() {
  std::random_device device;
  const auto word = [&] { return (static_cast<std::uint64_t>(device()) << 32) | device(); };
  const std::uint64_t high = word();
  return save_id_text(high, word());
}

CheckpointIndex describe_target(const CheckpointIndex& source, std::int64_t world_size) {
  constexpr std::int64_t most_ranks = std::numeric_limits<std::int32_t>::max();  // MPI's
  if (world_size < 1 || world_size > most_ranks)
    throw ConfigError(fmt::format("world size {} is not between 1 and {}", world_size, most_ranks));
  CheckpointIndex target = source;
  target.library = fmt::format("fsdp2 {}", version());
  target.save_id = random_save_id();
  target.world_size = world_size;
  target.files.clear();
  target.segments.clear();
  for (MeshEntry& mesh : target.meshes) mesh = rescale(mesh, world_size);
  for (TensorEntry& tensor : target.tensors) {
    tensor.digest = 0;
    // Bounds were made for the old number of ranks.
    for (Placement& placement : tensor.spec.placements)
      if (const auto* ragged = std::get_if<Ragged>(&placement)) placement = Shard{ragged->dim};
  }
  validate(target);
  return target;
}

/// Turns ranges of target pieces into boxes, and reads them.
void fetch(CheckpointReader& reader, const CheckpointIndex& target, std::span<const PieceRequest> requests) {
  std::vector<BoxRequest> boxes;
  for (const PieceRequest& request : requests) {
    const Piece& piece = *request.piece;
    const std::int64_t width = size_of(target.tensors[piece.tensor].spec.dtype);
    const std::int64_t begin = request.begin / width;
    const std::int64_t end = begin + static_cast<std::int64_t>(request.target.size()) / width;
    for_each_box(piece.box.extent, begin, end, [&](Box box, std::int64_t first) {
      for (std::size_t d = 0; d < box.offset.size(); ++d) box.offset[d] += piece.box.offset[d];
      boxes.push_back({piece.tensor, std::move(box), request.target.data() + (first - begin) * width});
    });
  }
  reader.read(boxes);
}

}  // namespace

}  // namespace checkpoint

ReshardReport reshard(const std::filesystem::path& source, const std::filesystem::path& target,
                      const ReshardOptions& options) {
  using namespace checkpoint;
  CheckpointReader reader(source);
  ReshardReport report{reader.index(), describe_target(reader.index(), options.world_size)};
  CheckpointIndex& index = report.target;
  const std::int64_t block_bytes = index.sizes.block_bytes;
  // The reader holds one block besides the window.
  const std::int64_t window_bytes = std::max<std::int64_t>(options.memory_bytes / block_bytes - 1, 1) * block_bytes;
  std::int64_t total = 0;
  for (const TensorEntry& tensor : index.tensors) total += tensor.bytes();

  const Publication publication(target, index.save_id);
  publication.prepare();
  try {
    publication.note_owner();
    std::int64_t done = 0;
    for (std::int64_t rank = 0; rank < index.world_size; ++rank) {
      const RankPlan plan = plan_rank(index, rank);
      ShardWriter writer(publication.partial(), index, plan,
                         {static_cast<std::size_t>(rank),
                          static_cast<std::size_t>(index.world_size),
                          {rank},
                          {count_rank(index, plan, {})},
                          0});
      writer.write(window_bytes, [&](std::span<const PieceRequest> requests) {
        fetch(reader, index, requests);
        for (const PieceRequest& request : requests) done += static_cast<std::int64_t>(request.target.size());
        if (options.progress) options.progress(done, total);
      });
      for (std::size_t p = 0; p < plan.pieces.size(); ++p)
        index.tensors[plan.pieces[p].tensor].digest ^= writer.digests()[p];
      index.files.push_back({writer.file_size(), {rank}});
      index.segments.push_back(writer.segments());
    }
    for (std::size_t t = 0; t < index.tensors.size(); ++t)
      if (index.tensors[t].digest != report.source.tensors[t].digest)
        throw CorruptError(fmt::format("{}: tensor \"{}\" has content digest {:016x}, but its index says {:016x}",
                                       source.string(), index.tensors[t].name, index.tensors[t].digest,
                                       report.source.tensors[t].digest));
    write_index(publication.partial(), index);
    publication.publish();
  } catch (...) {
    publication.discard();
    throw;
  }
  return report;
}

}  // namespace fsdp2
