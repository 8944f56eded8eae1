// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/redistribute.hpp"

#include <algorithm>
#include <utility>

#include "kernels.hpp"
#include "kokkos_compat.hpp"

namespace fsdp2 {

namespace {

bool is_cut(const Placement& placement) {
  return std::holds_alternative<Shard>(placement) || std::holds_alternative<Ragged>(placement);
}

/// `box` in the coordinates of an array that begins at `origin`.
Box relative(Box box, const Box& origin) {
  for (std::size_t d = 0; d < box.offset.size(); ++d) box.offset[d] -= origin.offset[d];
  return box;
}

/// Partial contributions combined: the same tensor, Replicate where it was Partial.
DTensor without_partials(const DTensor& source, const ExecutionSpace& exec) {
  TensorSpec spec = source.spec();
  Tensor local = source.local();
  bool is_copied = false;
  for (std::size_t axis = 0; axis < spec.placements.size(); ++axis) {
    const auto* partial = std::get_if<Partial>(&spec.placements[axis]);
    if (partial == nullptr) continue;
    if (!is_copied) {
      local = Tensor::uninitialized(spec.dtype, local.shape(), "fsdp2::redistribute");
      kernels::copy(exec, local, source.local());
      is_copied = true;
    }
    source.mesh().communicator(axis).all_reduce(exec, local, partial->op).wait();
    spec.placements[axis] = Replicate{};
  }
  return DTensor::from_local(std::move(local), std::move(spec), source.mesh());
}

}  // namespace

DTensor redistribute(const DTensor& source, std::vector<Placement> placements, const ExecutionSpace& exec,
                     std::vector<std::int64_t> split_order) {
  const DeviceMesh& mesh = source.mesh();
  const MeshSpec& spec = mesh.spec();
  TensorSpec wanted{source.spec().dtype, source.spec().shape, std::move(placements), std::move(split_order)};
  validate(wanted, spec, "to be redistributed");
  const DTensor whole = without_partials(source, exec);

  // A rank takes everything from ranks at its own place along the axes that hold replicas: itself, if it has it.
  std::vector<std::size_t> axes;
  for (std::size_t axis = 0; axis < spec.dimensions(); ++axis)
    if (is_cut(whole.spec().placements[axis])) axes.push_back(axis);
  std::vector<Box> from;  // what these ranks have, and want
  std::vector<Box> to;
  std::size_t own = 0;
  Shape coordinate = mesh.coordinate();
  for (const std::size_t axis : axes) coordinate[axis] = 0;
  for (bool is_done = false; !is_done;) {
    if (coordinate == mesh.coordinate()) own = from.size();
    from.push_back(local_box(whole.spec(), spec, coordinate));
    to.push_back(local_box(wanted, spec, coordinate));
    is_done = true;
    for (std::size_t i = axes.size(); i-- > 0 && is_done;) {
      is_done = ++coordinate[axes[i]] == spec.axes()[axes[i]].size;
      if (is_done) coordinate[axes[i]] = 0;
    }
  }
  const std::size_t ranks = from.size();
  std::int64_t part = 0;  // the most that one sends to another: all parts of an all-to-all are equal
  for (std::size_t a = 0; a < ranks; ++a)
    for (std::size_t b = 0; b < ranks; ++b)
      if (a != b) part = std::max(part, intersect(from[a], to[b]).numel());

  const DType dtype = wanted.dtype;
  Tensor target(exec, dtype, to[own].extent, "fsdp2::redistributed");
  const auto in_target = [&](std::size_t rank) { return relative(intersect(from[rank], to[own]), to[own]); };
  const auto in_source = [&](std::size_t rank) { return relative(intersect(from[own], to[rank]), from[own]); };
  const Box kept = in_source(own);
  if (kept.numel() > 0) {
    const Tensor copy = Tensor::uninitialized(dtype, kept.extent, "fsdp2::redistributed");
    kernels::extract_box(exec, copy, whole.local(), kept);
    kernels::insert_box(exec, target, copy, in_target(own));
  }
  if (part > 0) {
    const std::int64_t length = part * static_cast<std::int64_t>(ranks);
    const Transfer transfer{Tensor(exec, dtype, {length}, "fsdp2::redistribute"),
                            Tensor::uninitialized(dtype, {length}, "fsdp2::redistribute")};
    const auto part_of = [&](const Tensor& tensor, std::size_t rank, const Box& box) {
      return tensor.slice(static_cast<std::int64_t>(rank) * part, box.extent);
    };
    for (std::size_t rank = 0; rank < ranks; ++rank)
      if (rank != own)
        kernels::extract_box(exec, part_of(transfer.send, rank, in_source(rank)), whole.local(), in_source(rank));
    mesh.communicator(axes).all_to_all(exec, {&transfer, 1}).wait();
    for (std::size_t rank = 0; rank < ranks; ++rank)
      if (rank != own)
        kernels::insert_box(exec, target, part_of(transfer.receive, rank, in_target(rank)), in_target(rank));
  }
  for (std::size_t axis = 0; axis < spec.dimensions(); ++axis) {
    const auto* partial = std::get_if<Partial>(&wanted.placements[axis]);
    if (partial != nullptr && partial->op == ReduceOp::sum && mesh.coordinate()[axis] != 0)
      kernels::zero(exec, target.buffer());
  }
  compat::fence(exec, "fsdp2::redistribute");
  return DTensor::from_local(std::move(target), std::move(wanted), mesh);
}

Tensor full_tensor(const DTensor& source, const ExecutionSpace& exec) {
  return redistribute(source, std::vector<Placement>(source.spec().placements.size(), Replicate{}), exec).local();
}

}  // namespace fsdp2
