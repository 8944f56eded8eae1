// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/dtensor.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kernels.hpp"

namespace fsdp2 {

namespace {

const DeviceMesh& placeholder_mesh() {
  static const DeviceMesh mesh;
  return mesh;
}

}  // namespace

DTensor::DTensor() : spec_{DType::f32, {0}, {Replicate{}}, {}}, mesh_(placeholder_mesh()), box_(Box::whole({0})) {}

DTensor DTensor::from_local(Tensor local, TensorSpec spec, DeviceMesh mesh) {
  validate(spec, mesh.spec(), "from_local");
  DTensor result;
  result.box_ = local_box(spec, mesh.spec(), mesh.coordinate());
  if (local.dtype() != spec.dtype || local.shape() != result.box_.extent)
    throw ShapeError(fmt::format("rank {} of mesh {} must hold {} {} of a tensor {} {}, but the local tensor is {} {}",
                                 mesh.rank(), mesh.spec().to_string(), to_string(spec.dtype),
                                 to_string(result.box_.extent), to_string(spec.dtype), to_string(spec.shape),
                                 to_string(local.dtype()), to_string(local.shape())));
  result.local_ = std::move(local);
  result.spec_ = std::move(spec);
  result.mesh_ = std::move(mesh);
  return result;
}

DTensor DTensor::distribute(const ExecutionSpace& exec, const Tensor& full, std::vector<Placement> placements,
                            DeviceMesh mesh, std::vector<std::int64_t> split_order) {
  TensorSpec spec{full.dtype(), full.shape(), std::move(placements), std::move(split_order)};
  validate(spec, mesh.spec(), "distribute");
  for (const Placement& placement : spec.placements)
    if (std::holds_alternative<Partial>(placement))
      throw ConfigError("distribute cannot make a Partial tensor: use Replicate or Shard");
  const Box box = local_box(spec, mesh.spec(), mesh.coordinate());
  Tensor local = Tensor::uninitialized(spec.dtype, box.extent, "fsdp2::distribute");
  kernels::extract_box(exec, local, full, box);
  return from_local(std::move(local), std::move(spec), std::move(mesh));
}

}  // namespace fsdp2
