// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp2/dtensor.hpp"
#include "fsdp2/error.hpp"
#include "fsdp2/state_dict.hpp"

namespace fsdp2 {

namespace detail {

/// A View without `ghosts[d]` layers at both ends of each dimension d.
template <class View, std::size_t... dims>
auto interior(const View& view, const std::vector<std::int64_t>& ghosts, std::index_sequence<dims...>) {
  const auto inner = [&](std::size_t d) {
    const auto layers = static_cast<std::size_t>(ghosts[d]);
    return std::pair(layers, view.extent(static_cast<unsigned>(d)) - layers);
  };
  return Kokkos::subview(view, inner(dims)...);
}

/// Throws ShapeError unless there is one number from 0 a dimension, and each leaves something of its extent.
void check_ghosts(const std::string& name, const Shape& extents, const std::vector<std::int64_t>& ghosts);

}  // namespace detail

/// Adds a simulation field: a global array of `shape` of which this rank has a block, in a View of any layout on the
/// default memory space, with `ghosts[d]` layers of foreign cells at both ends of dimension d (none by default). The
/// placements say which block: Shard{0} and Shard{1} on a px x py mesh cut both dimensions, Ragged cuts particles or
/// uneven domains. The dict keeps the View, and a dense copy of its own cells: taken anew whenever the dict is saved,
/// and written back after a load, without the ghosts. Throws ShapeError or ConfigError where the block has another
/// shape, and ConfigError for a name that is there already. Local.
template <class View>
void add_field(StateDict& dict, const std::string& name, const View& view, const Shape& shape,
               std::vector<Placement> placements, const DeviceMesh& mesh, std::vector<std::int64_t> ghosts = {}) {
  using Value = typename View::non_const_value_type;
  constexpr std::size_t rank = View::rank;
  static_assert(rank > 0, "a field has dimensions");
  static_assert(std::is_same_v<typename View::memory_space, MemorySpace>, "a field lives where kernels run");
  Shape extents;
  for (unsigned d = 0; d < rank; ++d) extents.push_back(static_cast<std::int64_t>(view.extent(d)));
  if (ghosts.empty()) ghosts.assign(rank, 0);
  detail::check_ghosts(name, extents, ghosts);
  const auto cells = detail::interior(view, ghosts, std::make_index_sequence<rank>());
  for (std::size_t d = 0; d < rank; ++d) extents[d] -= 2 * ghosts[d];
  const Tensor dense = Tensor::uninitialized(dtype_of<Value>, extents, "fsdp2::field");
  const auto packed = dense.template view<typename View::non_const_data_type>();
  const ExecutionSpace exec;
  StateDict field;
  field.tensors[name] = DTensor::from_local(dense, {dense.dtype(), shape, std::move(placements), {}}, mesh);
  field.require_current = [exec, dense, packed, cells] {
    Kokkos::deep_copy(exec, packed, cells);
    exec.fence();
  };
  field.after_load = [exec, dense, packed, cells] {
    Kokkos::deep_copy(exec, cells, packed);
    exec.fence();
  };
  field.require_current();
  merge(dict, std::move(field));
}

}  // namespace fsdp2
