// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Where the parameters of a group lie in its buffers. Pure: no communication, no memory.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdp2/config.hpp"
#include "fsdp2/dtensor.hpp"
#include "kernels.hpp"

namespace fsdp2::detail {

/// Where parameters begin in gather and reduce slots, and sections in other buffers; in bytes.
inline constexpr std::int64_t buffer_alignment = 64;
/// Where parameters that are not packed begin in a section; in elements, so that the distances between parameters are
/// the same in all buffers.
inline constexpr std::int64_t section_alignment = 64;

/// Over which ranks parameters are sharded and reduced.
struct Binding {
  DeviceMesh mesh;
  std::size_t axis = 0;
  std::optional<std::size_t> replicate_axis;
  std::optional<double> divide_factor;
  Communicator* shard = nullptr;
  Communicator* reduce = nullptr;     ///< of the same ranks
  Communicator* replicate = nullptr;  ///< null: no replicas

  std::int64_t ranks() const { return shard->size(); }
  std::int64_t replicas() const { return replicate == nullptr ? 1 : replicate->size(); }
};

/// A parameter, and its place in the buffers of its group.
struct Param {
  std::string name;
  std::uint64_t id = 0;
  DType dtype = DType::f32;
  bool requires_grad = true;
  bool is_ignored = false;
  bool is_sharded = false;
  bool is_direct = false;  ///< sharded, and communicated in place
  std::size_t binding = 0;
  TensorSpec spec;                ///< over the binding's mesh
  Box full_box;                   ///< what a scope shows, in the global index space
  std::vector<Box> pieces;        ///< of each rank of FSDP's axis, in the full tensor; none if replicated
  std::int64_t count = 0;         ///< elements of the full tensor
  std::int64_t shard_count = 0;   ///< of the largest piece, which all shards are padded to; count, if replicated
  std::size_t section = 0;        //
  std::int64_t start = 0;         ///< in the section's shards; in elements
  std::int64_t train_start = 0;   ///< in the section's gradients; in elements
  std::int64_t slot_offset = -1;  ///< in the gather slot; in bytes; -1 for what scopes show as it is
  std::int64_t lent_offset = -1;  ///< in the reduce slot, if sharded and trainable; in bytes
  DTensor shard;
  bool has_gradient = false;
  bool is_written = false;  ///< the lent gradient holds something to add to

  const Shape& full_shape() const { return full_box.extent; }
};

/// Parameters of the same dtypes, ranks and treatment: one typed range in each buffer. The shards are packed frozen,
/// packed trainable, direct trainable, direct frozen, or replicated trainable, replicated frozen ones at first;
/// gradients follow in the same order without the frozen ones.
struct Section {
  std::size_t binding = 0;
  bool is_sharded = false;
  bool is_ignored = false;
  DType dtype = DType::f32;
  DType gather_dtype = DType::f32;
  DType reduce_dtype = DType::f32;
  DType gradient_dtype = DType::f32;
  bool is_staged = false;  ///< gathers send a copy: cast, or out of host memory

  std::int64_t count = 0;  ///< elements
  std::int64_t trainable = 0;
  std::vector<Range> buckets;            ///< of packed shards, each sent together; in elements
  std::vector<Range> trainable_buckets;  ///< of packed gradients

  // Byte offsets of the section in the buffers.
  std::int64_t shard_offset = 0;
  std::int64_t pack_offset = 0;
  std::int64_t gradient_offset = 0;
  std::int64_t receive_offset = 0;  ///< in the reduce slot, if sharded
  std::int64_t reduce_pack_offset = 0;

  /// Whether its gradients are reduced in the model's buckets.
  bool is_bucketed() const { return !is_sharded && !is_ignored && trainable > 0; }
  std::int64_t packed() const { return buckets.empty() ? 0 : buckets.back().end; }
};

/// Sizes in bytes.
struct Layout {
  std::vector<Section> sections;
  std::int64_t shards = 0;
  std::int64_t gather_slot = 0;
  std::int64_t gather_pack = 0;
  std::int64_t gradients = 0;
  std::int64_t reduce_slot = 0;    ///< begins with the unsharded gradients …
  std::int64_t receive_start = 0;  ///< … and ends with what is received
  std::int64_t reduce_pack = 0;
};

/// Places the parameters, whose fields up to shard_count are set.
Layout lay_out(std::vector<Param>& params, std::span<const Binding> bindings, const Config& config);
/// Places the gradients anew, after requires_grad has changed.
void lay_out_gradients(Layout& layout, std::vector<Param>& params, std::span<const Binding> bindings,
                       const Config& config);

/// What the packing kernels do; in bytes.
struct PackingTables {
  std::vector<kernels::Segment> scatter;    ///< packed gather → gather slot
  std::vector<kernels::Segment> pack;       ///< reduce slot → packed reduction
  std::vector<kernels::Segment> zero;       ///< pad rows and gaps of the reduce slot
  std::vector<kernels::Segment> pack_zero;  ///< padding of the packed reduction
};
PackingTables packing_tables(const Layout& layout, std::span<const Param> params, std::span<const Binding> bindings);

}  // namespace fsdp2::detail
