// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp2/communicator.hpp"
#include "fsdp2/mesh.hpp"

namespace fsdp2 {

class HostCommunicator;  // src/comm/host_communicator.hpp: the metadata plane

/// A MeshSpec with this process's place in it and a communicator along each axis. A cheap handle: copies are the same
/// mesh. Rank r of the caller's communicator stands at the mesh coordinate of r.
class DeviceMesh {
 public:
  /// One rank, axis "dp", no MPI.
  DeviceMesh();

  /// Collective over `comm`, whose size must be the mesh's; it is duplicated, and may be freed afterwards. Throws
  /// ConfigError on every rank where sizes differ, CommError where MPI fails.
  DeviceMesh(MPI_Comm comm, std::vector<MeshAxis> axes, std::string name = "mesh", CommunicatorOptions options = {});
  DeviceMesh(MPI_Comm comm, MeshSpec spec, std::string name = "mesh", CommunicatorOptions options = {});

  const MeshSpec& spec() const;
  /// Names the mesh in checkpoints.
  const std::string& name() const;
  std::int64_t rank() const;
  std::int64_t size() const { return spec().size(); }
  /// This rank's index along every axis.
  const Shape& coordinate() const;

  /// The ranks that differ from this one along one axis only. Throws ConfigError for an unknown axis.
  Communicator& communicator(std::string_view axis) const;
  Communicator& communicator(std::size_t axis) const;

  /// The ranks that differ from this one along some axes, given in ascending order; their indices along these,
  /// row-major, order them. Collective over the mesh when it is first asked for; closed with the mesh. Throws
  /// ConfigError for axes that are unknown, repeated or in another order.
  Communicator& communicator(const std::vector<std::size_t>& axes) const;

  /// A mesh of the same ranks in which adjacent axes are one, see MeshSpec::flatten. Collective; to be closed on its
  /// own.
  DeviceMesh flatten(const std::vector<std::string>& axes, std::string flattened_name) const;

  /// A part of one of the mesh's communicators, for what must not share it: made by split(color) when it is first asked
  /// for by this name, and closed with the mesh. Collective over `parent`.
  Communicator& derived(const std::string& name, Communicator& parent, std::int64_t color) const;

  /// All ranks of the mesh, for host metadata: agreements, never tensor data.
  HostCommunicator& host() const;

  /// What FSDP does along each axis: none until a model says so. Shared by all handles; local, the same call on all
  /// ranks.
  void set_axis_role(std::string_view axis, AxisRole role) const;
  const std::vector<AxisRole>& axis_roles() const;

  /// 64 random bits, the same on every rank of the mesh and, with overwhelming probability, on no other mesh. With a
  /// count of saves, which this call advances, they name a save: 32 hexadecimal digits. Local; all ranks must call it
  /// equally often.
  std::string next_save_id() const;

  /// Collective end of all its communicators; see Communicator::close. The mesh must not be used afterwards.
  void close();

  /// Whether both are handles of one mesh.
  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b) { return a.state_ == b.state_; }

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace fsdp2
