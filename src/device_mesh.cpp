// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/device_mesh.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>

#include "comm/host_communicator.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2 {

struct DeviceMesh::State {
  State(MPI_Comm comm, MeshSpec mesh, std::string mesh_name, CommunicatorOptions mesh_options)
      : spec(std::move(mesh)), name(std::move(mesh_name)), host(comm, name), options(mesh_options) {
    std::string first = fmt::format("\"{}\" ({}) of ranks {}", name, spec.to_string(), fsdp2::to_string(spec.ranks()));
    const std::string mine = first;
    host.broadcast(first, 0);
    try {
      host.collectively([&] {
        if (mine != first)
          throw ConfigError(
              fmt::format("this rank makes mesh {}, but rank 0 makes mesh {}: all must make the same", mine, first));
        if (host.size() != spec.size())
          throw ConfigError(
              fmt::format("mesh \"{}\" ({}) has {} ranks, but its communicator has {}: make their product the "
                          "number of ranks",
                          name, spec.to_string(), spec.size(), host.size()));
        coordinate = spec.coordinate_of(host.rank());
      });
      for (std::size_t i = 0; i < spec.dimensions(); ++i) axes.push_back(make_group({i}, spec.axes()[i].name));
    } catch (...) {
      host.close();
      throw;
    }
    roles.assign(spec.dimensions(), AxisRole::none);
    nonce = (static_cast<std::uint64_t>(std::random_device{}()) << 32) ^ std::random_device{}();
    host.broadcast({&nonce, 1}, 0);
  }

  /// Ranks whose other indices agree form one group, ordered by their indices along the axes.
  std::unique_ptr<Communicator> make_group(const std::vector<std::size_t>& along, const std::string& group_name) {
    const std::unique_ptr<Communicator> world = make_communicator(host.mpi(), name, options);
    std::int64_t color = 0;
    std::int64_t key = 0;
    for (std::size_t i = 0; i < spec.dimensions(); ++i) {
      const bool is_along = std::find(along.begin(), along.end(), i) != along.end();
      std::int64_t& number = is_along ? key : color;
      number = number * spec.axes()[i].size + coordinate[i];
    }
    std::unique_ptr<Communicator> group = world->split(color, key, group_name);
    world->close();
    return group;
  }

  MeshSpec spec;
  std::string name;
  HostCommunicator host;
  CommunicatorOptions options;
  Shape coordinate;
  std::vector<std::unique_ptr<Communicator>> axes;
  // Closed in the same order on all ranks.
  std::map<std::vector<std::size_t>, std::unique_ptr<Communicator>> groups;
  std::map<std::string, std::unique_ptr<Communicator>> derived;
  std::vector<AxisRole> roles;
  std::uint64_t nonce = 0;
  std::uint64_t saves = 0;
};

DeviceMesh::DeviceMesh()
    : state_(std::make_shared<State>(MPI_COMM_NULL, MeshSpec({{"dp", 1}}), "mesh", CommunicatorOptions{})) {}

DeviceMesh::DeviceMesh(MPI_Comm comm, std::vector<MeshAxis> axes, std::string name, CommunicatorOptions options)
    : DeviceMesh(comm, MeshSpec(std::move(axes)), std::move(name), options) {}

DeviceMesh::DeviceMesh(MPI_Comm comm, MeshSpec spec, std::string name, CommunicatorOptions options)
    : state_(std::make_shared<State>(comm, std::move(spec), std::move(name), options)) {}

const MeshSpec& DeviceMesh::spec() const {
  return state_->spec;
}

const std::string& DeviceMesh::name() const {
  return state_->name;
}

std::int64_t DeviceMesh::rank() const {
  return state_->host.rank();
}

const Shape& DeviceMesh::coordinate() const {
  return state_->coordinate;
}

Communicator& DeviceMesh::communicator(std::string_view axis) const {
  return communicator(state_->spec.axis(axis));
}

Communicator& DeviceMesh::communicator(std::size_t axis) const {
  if (axis >= state_->axes.size())
    throw ConfigError(fmt::format("mesh {} has no axis number {}", state_->spec.to_string(), axis));
  return *state_->axes[axis];
}

HostCommunicator& DeviceMesh::host() const {
  return state_->host;
}

void DeviceMesh::set_axis_role(std::string_view axis, AxisRole role) const {
  state_->roles[state_->spec.axis(axis)] = role;
}

const std::vector<AxisRole>& DeviceMesh::axis_roles() const {
  return state_->roles;
}

std::string DeviceMesh::next_save_id() const {
  return fmt::format("{:016x}{:016x}", state_->nonce, state_->saves++);
}

Communicator& DeviceMesh::communicator(const std::vector<std::size_t>& axes) const {
  if (axes.size() == 1) return communicator(axes.front());
  const bool ascends = std::adjacent_find(axes.begin(), axes.end(), std::greater_equal<>()) == axes.end();
  if (axes.empty() || !ascends || axes.back() >= spec().dimensions())
    throw ConfigError(fmt::format("axes {} of mesh {}: expected some of 0 to {}, in ascending order", axes,
                                  spec().to_string(), spec().dimensions() - 1));
  const auto known = state_->groups.find(axes);
  if (known != state_->groups.end()) return *known->second;
  std::string name;
  for (const std::size_t axis : axes) name += (name.empty() ? "" : " x ") + spec().axes()[axis].name;
  return *state_->groups.emplace(axes, state_->make_group(axes, name)).first->second;
}

DeviceMesh DeviceMesh::flatten(const std::vector<std::string>& axes, std::string flattened_name) const {
  return DeviceMesh(host().mpi(), spec().flatten(axes, std::move(flattened_name)), name(), state_->options);
}

Communicator& DeviceMesh::derived(const std::string& name, Communicator& parent, std::int64_t color) const {
  const auto known = state_->derived.find(name);
  if (known != state_->derived.end()) return *known->second;
  return *state_->derived.emplace(name, parent.split(color, parent.rank(), name)).first->second;
}

void DeviceMesh::close() {
  for (const auto& [name, communicator] : state_->derived) communicator->close();
  for (const auto& [along, communicator] : state_->groups) communicator->close();
  for (const auto& axis : state_->axes) axis->close();
  state_->host.close();
}

}  // namespace fsdp2
