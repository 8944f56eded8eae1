// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <vector>

#include "fsdp2/device_mesh.hpp"
#include "fsdp2/placement.hpp"
#include "fsdp2/tensor.hpp"

namespace fsdp2 {

/// A tensor spread over a mesh: this rank's part, and the spec that says which part it is. A cheap handle; nothing here
/// communicates.
class DTensor {
 public:
  /// A placeholder: an empty f32 local tensor on a mesh of one rank, which all placeholders share.
  DTensor();

  /// Takes this rank's part as it is. Throws ShapeError or ConfigError where the spec does not fit the mesh, or the
  /// local tensor's dtype or shape is not that of local_box.
  static DTensor from_local(Tensor local, TensorSpec spec, DeviceMesh mesh);

  /// Copies this rank's part out of a full tensor that every rank holds, ordered on `exec`. Partial placements are
  /// refused.
  static DTensor distribute(const ExecutionSpace& exec, const Tensor& full, std::vector<Placement> placements,
                            DeviceMesh mesh, std::vector<std::int64_t> split_order = {});

  const Tensor& local() const { return local_; }
  const TensorSpec& spec() const { return spec_; }
  const DeviceMesh& mesh() const { return mesh_; }
  /// Where local() lies in the global index space.
  const Box& box() const { return box_; }

 private:
  Tensor local_;
  TensorSpec spec_;
  DeviceMesh mesh_;
  Box box_;
};

}  // namespace fsdp2
