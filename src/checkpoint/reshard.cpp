// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/reshard.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "checkpoint/index_file.hpp"
#include "checkpoint/publication.hpp"
#include "checkpoint/reader.hpp"
#include "checkpoint/selection.hpp"
#include "checkpoint/write_files.hpp"
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

/// The mesh with new axes, which keep what FSDP does along those of the same name.
MeshEntry replace_axes(const MeshEntry& mesh, const MeshSpec& spec) {
  MeshEntry result{mesh.name, spec, {}};
  for (const MeshAxis& axis : spec.axes())
    result.roles.push_back(mesh.spec.has_axis(axis.name) ? mesh.roles[mesh.spec.axis(axis.name)] : AxisRole::none);
  return result;
}

std::int64_t target_world_size(const CheckpointIndex& source, const ReshardOptions& options) {
  std::int64_t world_size = options.world_size;
  for (const auto& [mesh_name, spec] : options.meshes) {
    const std::string& name = mesh_name;  // lambdas of C++20 cannot capture a structured binding in clang 14
    const bool is_known = name.empty() || std::any_of(source.meshes.begin(), source.meshes.end(),
                                                      [&](const MeshEntry& mesh) { return mesh.name == name; });
    if (!is_known) {
      std::string names;
      for (const MeshEntry& mesh : source.meshes) names += fmt::format(" \"{}\"", mesh.name);
      throw ConfigError(fmt::format("the checkpoint has no mesh \"{}\"; it has{}", name, names));
    }
    if (world_size == 0) world_size = spec.size();
    if (spec.size() != world_size)
      throw ConfigError(fmt::format("mesh {} has {} ranks, but the new checkpoint {}: every mesh has them all",
                                    spec.to_string(), spec.size(), world_size));
  }
  constexpr std::int64_t most_ranks = std::numeric_limits<std::int32_t>::max();  // MPI's
  if (world_size < 1 || world_size > most_ranks)
    throw ConfigError(fmt::format("world size {} is not between 1 and {}", world_size, most_ranks));
  return world_size;
}

/// Puts a tensor on a mesh whose axes differ.
void move_tensor(TensorEntry& tensor, const MeshEntry& from, const MeshEntry& to) {
  TensorSpec moved = tensor.spec;
  moved.placements.assign(to.spec.dimensions(), Replicate{});
  moved.split_order.clear();
  for (const std::int64_t axis : split_order(tensor.spec)) {
    const std::string& name = from.spec.axes()[static_cast<std::size_t>(axis)].name;
    const Placement& placement = tensor.spec.placements[static_cast<std::size_t>(axis)];
    if (to.spec.has_axis(name)) {
      const std::size_t number = to.spec.axis(name);
      // Bounds were made for the old number of ranks.
      const auto* ragged = std::get_if<Ragged>(&placement);
      moved.placements[number] = ragged != nullptr ? Placement{Shard{ragged->dim}} : placement;
      moved.split_order.push_back(static_cast<std::int64_t>(number));
    } else if (!std::holds_alternative<Replicate>(placement)) {
      throw ConfigError(
          fmt::format("mesh \"{}\" ({}) cannot carry tensor \"{}\", which is {} on axis \"{}\" of {}: keep that axis",
                      to.name, to.spec.to_string(), tensor.name, to_string(placement), name, from.spec.to_string()));
    }
  }
  for (std::size_t a = 0; a < to.spec.dimensions(); ++a)
    if (!from.spec.has_axis(to.spec.axes()[a].name)) moved.split_order.push_back(static_cast<std::int64_t>(a));
  tensor.spec = std::move(moved);
}

/// What is to be written, and from where.
struct Target {
  CheckpointIndex index;
  std::vector<std::size_t> sources;  // by tensor: its number in the source
};

Target describe_target(const CheckpointIndex& source, const ReshardOptions& options) {
  if (options.ranks_per_file < 1)
    throw ConfigError(fmt::format("{} ranks a file: expected at least 1", options.ranks_per_file));
  Target target;
  CheckpointIndex& index = target.index;
  index = source;
  index.library = fmt::format("fsdp2 {}", version());
  index.save_id = random_save_id();
  index.world_size = target_world_size(source, options);
  index.files.clear();
  index.segments.clear();
  for (MeshEntry& mesh : index.meshes) {
    auto given = options.meshes.find(mesh.name);
    if (given == options.meshes.end()) given = options.meshes.find("");
    mesh = given == options.meshes.end() ? rescale(mesh, index.world_size) : replace_axes(mesh, given->second);
  }
  Selection selection = select_tensors(source, options.select, options.dtype);
  for (TensorEntry& tensor : selection.tensors)
    move_tensor(tensor, source.meshes[tensor.mesh], index.meshes[tensor.mesh]);
  index.tensors = std::move(selection.tensors);
  target.sources = std::move(selection.sources);
  validate(index);
  return target;
}

/// Turns ranges of target pieces into elements of the source, and reads them.
void fetch(CheckpointReader& reader, const Target& target, std::span<const PieceRequest> requests) {
  std::vector<ElementRequest> elements;
  for (const PieceRequest& request : requests) {
    const Piece& piece = *request.piece;
    const DType to = target.index.tensors[piece.tensor].spec.dtype;
    elements.push_back({target.sources[piece.tensor], piece.box, request.begin / size_of(to),
                        static_cast<std::int64_t>(request.target.size()) / size_of(to), to, request.target.data()});
  }
  read_elements(reader, elements);
}

/// Buffers for tensor data: a window of what is written, what is cast into it, and the reader's block.
struct Buffers {
  std::int64_t window = 0;  // at most so long
  std::int64_t parts = 1;   // all but the block, in windows

  /// When all segments are known: no window is longer than the longest.
  std::int64_t bytes(const CheckpointIndex& target) const {
    std::int64_t longest = 0;
    for (const PerDType<Segment>& segments : target.segments)
      for (const Segment& segment : segments) longest = std::max(longest, segment.length);
    return longest == 0 ? 0 : checked_add(checked_multiply(std::min(window, longest), parts), target.sizes.block_bytes);
  }
};

Buffers plan_buffers(const CheckpointIndex& source, const Target& target, std::int64_t memory_bytes) {
  Buffers buffers;
  for (std::size_t t = 0; t < target.sources.size(); ++t) {
    const DType to = target.index.tensors[t].spec.dtype;
    const DType from = source.tensors[target.sources[t]].spec.dtype;
    if (to != from) buffers.parts = std::max(buffers.parts, 1 + (size_of(from) + size_of(to) - 1) / size_of(to));
  }
  const std::int64_t block = target.index.sizes.block_bytes;
  buffers.window = std::max<std::int64_t>((memory_bytes / block - 1) / buffers.parts, 1) * block;
  return buffers;
}

void check_digests(const CheckpointReader& reader, const Target& target) {
  for (std::size_t t = 0; t < target.sources.size(); ++t) {
    const TensorEntry& written = target.index.tensors[t];
    const TensorEntry& expected = reader.index().tensors[target.sources[t]];
    if (written.spec.dtype == expected.spec.dtype && written.digest != expected.digest)
      throw CorruptError(fmt::format("{}: tensor \"{}\" has content digest {:016x}, but its index says {:016x}",
                                     reader.directory().string(), written.name, written.digest, expected.digest));
  }
}

ReshardReport reshard_together(const HostCommunicator& host, const std::filesystem::path& source,
                               const std::filesystem::path& path, const ReshardOptions& options) {
  std::optional<CheckpointReader> reader;
  Target target;
  Buffers buffers;
  bool has_local = false;
  host.collectively([&] {
    reader.emplace(source);
    target = describe_target(reader->index(), options);
    buffers = plan_buffers(reader->index(), target, options.memory_bytes);
    has_local = reader->index().world_size == target.index.world_size || options.rank_local != RankLocalPolicy::error;
  });
  CheckpointIndex& index = target.index;
  host.broadcast(index.save_id, 0);
  const Publication publication(path, index.save_id);
  std::int64_t done = 0;
  std::int64_t total = 0;
  for (const TensorEntry& tensor : index.tensors) total += tensor.bytes();
  const auto write = [&](const PieceSource& pieces) {
    const auto values = [&](std::int64_t rank) {
      return has_local ? reader->rank_local(rank, index.world_size, options.rank_local) : RankLocalValues();
    };
    write_files(host, publication.partial(), index, options.ranks_per_file, buffers.window, values, pieces);
  };
  const auto on_first = [&](const auto& body) {
    host.collectively([&] {
      if (host.rank() == 0) body();
    });
  };
  const auto report = [&] {
    const std::int64_t memory_bytes = buffers.bytes(target.index);
    return ReshardReport{reader->take_index(), std::move(target.index), memory_bytes};
  };
  on_first([&] {
    if (!has_local) (void)reader->rank_local(0, index.world_size, options.rank_local);  // throws, if there are any
  });
  if (options.dry_run) {
    write({});
    return report();
  }
  try {
    on_first([&] {
      publication.prepare(options.overwrite);
      publication.note_owner();
    });
    write([&](std::span<const PieceRequest> requests) {
      fetch(*reader, target, requests);
      for (const PieceRequest& request : requests) done += static_cast<std::int64_t>(request.target.size());
      if (options.progress) options.progress(std::min(done * host.size(), total), total);
    });
    check_digests(*reader, target);  // the same everywhere
    on_first([&] {
      write_index(publication.partial(), index);
      publication.publish(options.overwrite);
    });
  } catch (...) {
    if (host.rank() == 0) publication.discard();  // nobody writes any more: all have the error
    throw;
  }
  return report();
}

}  // namespace

}  // namespace checkpoint

ReshardReport reshard(const std::filesystem::path& source, const std::filesystem::path& path,
                      const ReshardOptions& options) {
  HostCommunicator host(options.comm, "reshard");
  try {
    ReshardReport report = checkpoint::reshard_together(host, source, path, options);
    host.close();
    return report;
  } catch (...) {
    host.close();
    throw;
  }
}

}  // namespace fsdp2
