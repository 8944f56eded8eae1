// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "param_layout.hpp"

#include <algorithm>

namespace fsdp2::detail {

namespace {

/// Gives a piece of `count` elements its place behind `cursor`; returns the place.
std::int64_t place(std::int64_t& cursor, std::int64_t count, std::int64_t alignment) {
  const std::int64_t start = align_up(cursor, alignment);
  cursor = checked_add(start, count);
  return start;
}

std::int64_t place_bytes(std::int64_t& cursor, std::int64_t count, DType dtype) {
  return place(cursor, checked_multiply(count, size_of(dtype)), buffer_alignment);
}

/// Adds elements to the last bucket, or begins another where that would exceed the limit.
void add_to_buckets(std::vector<Range>& buckets, std::int64_t count, std::int64_t limit) {
  if (buckets.empty() || (limit > 0 && buckets.back().size() > 0 && buckets.back().size() + count > limit)) {
    const std::int64_t begin = buckets.empty() ? 0 : buckets.back().end;
    buckets.push_back({begin, begin});
  }
  buckets.back().end = checked_add(buckets.back().end, count);
}

/// Elements of a shard in a bucket of max_bucket_bytes; 0: no limit.
std::int64_t bucket_limit(const Config& config, DType dtype, std::int64_t ranks) {
  if (config.max_bucket_bytes == 0) return 0;
  return std::max<std::int64_t>(1, config.max_bucket_bytes / (size_of(dtype) * ranks));
}

Section section_of(const Param& param, const Config& config) {
  const MixedPrecisionPolicy& policy = config.mp_policy;
  const bool is_cast = is_castable(param.dtype) && !param.is_ignored;
  Section section;
  section.binding = param.binding;
  section.is_sharded = param.is_sharded;
  section.is_ignored = param.is_ignored;
  section.dtype = param.dtype;
  section.gather_dtype = is_cast ? policy.param_dtype.value_or(param.dtype) : param.dtype;
  section.reduce_dtype = is_cast ? policy.reduce_dtype.value_or(param.dtype) : param.dtype;
  section.gradient_dtype = policy.keep_low_precision_grads ? section.reduce_dtype : param.dtype;
  section.is_staged = config.offload_to_cpu || section.gather_dtype != section.dtype;
  return section;
}

bool belongs(const Param& param, const Section& section) {
  return param.binding == section.binding && param.dtype == section.dtype && param.is_sharded == section.is_sharded &&
         param.is_ignored == section.is_ignored;
}

/// Visits the parameters of a section in the order of its shards.
template <class Params, class Visitor>
void for_each_in_order(Params& params, std::size_t section, Visitor&& visit) {
  std::vector<std::pair<std::int64_t, std::size_t>> order;
  for (std::size_t i = 0; i < params.size(); ++i)
    if (params[i].section == section) order.emplace_back(params[i].start, i);
  std::sort(order.begin(), order.end());  // parameters without elements share places: then by index
  for (const auto& [start, index] : order) visit(params[index]);
}

const Range& bucket_at(const std::vector<Range>& buckets, std::int64_t begin, std::int64_t count) {
  for (const Range& bucket : buckets)
    if (begin >= bucket.begin && begin + count <= bucket.end) return bucket;
  return buckets.back();
}

}  // namespace

Layout lay_out(std::vector<Param>& params, std::span<const Binding> bindings, const Config& config) {
  Layout layout;
  for (Param& param : params) {
    const auto found = std::find_if(layout.sections.begin(), layout.sections.end(),
                                    [&](const Section& section) { return belongs(param, section); });
    param.section = static_cast<std::size_t>(found - layout.sections.begin());
    if (found == layout.sections.end()) layout.sections.push_back(section_of(param, config));
  }
  for (std::size_t s = 0; s < layout.sections.size(); ++s) {
    Section& section = layout.sections[s];
    const std::int64_t ranks = bindings[section.binding].ranks();
    const std::int64_t limit = bucket_limit(config, section.gather_dtype, ranks);
    const std::pair<bool, bool> kinds[] = {
        {false, !section.is_sharded}, {false, section.is_sharded}, {true, true}, {true, false}};
    for (const auto& [is_direct, requires_grad] : kinds)
      for (Param& param : params) {
        if (param.section != s || param.is_direct != is_direct || param.requires_grad != requires_grad) continue;
        const bool is_packed = section.is_sharded && !is_direct;
        param.start = place(section.count, param.shard_count, is_packed ? 1 : section_alignment);
        if (is_packed) add_to_buckets(section.buckets, param.shard_count, limit);
        param.slot_offset = -1;
        if (section.is_sharded || section.is_staged)
          param.slot_offset =
              place_bytes(layout.gather_slot, is_direct ? checked_multiply(param.shard_count, ranks) : param.count,
                          section.gather_dtype);
      }
    section.shard_offset = place_bytes(layout.shards, section.count, section.dtype);
    section.pack_offset =
        place_bytes(layout.gather_pack, checked_multiply(section.packed(), ranks), section.gather_dtype);
  }
  layout.shards = align_up(layout.shards, buffer_alignment);
  layout.gather_slot = align_up(layout.gather_slot, buffer_alignment);
  layout.gather_pack = align_up(layout.gather_pack, buffer_alignment);
  lay_out_gradients(layout, params, bindings, config);
  return layout;
}

void lay_out_gradients(Layout& layout, std::vector<Param>& params, std::span<const Binding> bindings,
                       const Config& config) {
  layout.gradients = layout.reduce_slot = layout.reduce_pack = 0;
  for (std::size_t s = 0; s < layout.sections.size(); ++s) {
    Section& section = layout.sections[s];
    const std::int64_t ranks = bindings[section.binding].ranks();
    const std::int64_t limit = bucket_limit(config, section.reduce_dtype, ranks);
    section.trainable = 0;
    section.trainable_buckets.clear();
    for_each_in_order(params, s, [&](Param& param) {
      param.lent_offset = -1;
      if (!param.requires_grad) return;
      const bool is_packed = section.is_sharded && !param.is_direct;
      param.train_start = place(section.trainable, param.shard_count, is_packed ? 1 : section_alignment);
      if (is_packed) add_to_buckets(section.trainable_buckets, param.shard_count, limit);
      if (section.is_sharded)
        param.lent_offset =
            place_bytes(layout.reduce_slot, param.is_direct ? checked_multiply(param.shard_count, ranks) : param.count,
                        section.reduce_dtype);
    });
    section.gradient_offset = place_bytes(layout.gradients, section.trainable, section.gradient_dtype);
    const std::int64_t packed = section.trainable_buckets.empty() ? 0 : section.trainable_buckets.back().end;
    section.reduce_pack_offset = place_bytes(layout.reduce_pack, checked_multiply(packed, ranks), section.reduce_dtype);
  }
  layout.gradients = align_up(layout.gradients, buffer_alignment);
  layout.reduce_pack = align_up(layout.reduce_pack, buffer_alignment);
  layout.reduce_slot = layout.receive_start = align_up(layout.reduce_slot, buffer_alignment);
  for (Section& section : layout.sections)
    if (section.is_sharded)
      section.receive_offset = place_bytes(layout.reduce_slot, section.trainable, section.reduce_dtype);
  layout.reduce_slot = align_up(layout.reduce_slot, buffer_alignment);
}

PackingTables packing_tables(const Layout& layout, std::span<const Param> params, std::span<const Binding> bindings) {
  PackingTables tables;
  for (std::size_t s = 0; s < layout.sections.size(); ++s) {
    const Section& section = layout.sections[s];
    if (!section.is_sharded) continue;
    const std::int64_t ranks = bindings[section.binding].ranks();
    const std::int64_t gather_size = size_of(section.gather_dtype);
    const std::int64_t reduce_size = size_of(section.reduce_dtype);
    std::int64_t received = 0;  // the end of what earlier parameters receive
    for_each_in_order(params, s, [&](const Param& param) {
      if (param.requires_grad) {
        tables.zero.push_back({0, section.receive_offset + received * reduce_size,
                               std::max<std::int64_t>(0, param.train_start - received) * reduce_size});
        received = param.train_start + param.shard_count;
      }
      if (param.is_direct) {
        if (param.requires_grad)
          tables.zero.push_back({0, param.lent_offset + param.count * reduce_size,
                                 (param.shard_count * ranks - param.count) * reduce_size});
        return;
      }
      if (param.shard_count == 0) return;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const Box& piece = param.pieces[static_cast<std::size_t>(rank)];
        const auto place_in = [&](const std::vector<Range>& buckets, std::int64_t start) {
          const Range& bucket = bucket_at(buckets, start, param.shard_count);
          return bucket.begin * ranks + rank * bucket.size() + start - bucket.begin;
        };
        const std::int64_t gathered = section.pack_offset + place_in(section.buckets, param.start) * gather_size;
        const std::int64_t reduced =
            param.requires_grad
                ? section.reduce_pack_offset + place_in(section.trainable_buckets, param.train_start) * reduce_size
                : 0;
        for (RunCursor cursor = runs_of(param.full_shape(), piece); !cursor.is_done(); cursor.next()) {
          const Run& run = cursor.run();
          tables.scatter.push_back(
              {gathered + run.to * gather_size, param.slot_offset + run.from * gather_size, run.count * gather_size});
          if (param.requires_grad)
            tables.pack.push_back(
                {param.lent_offset + run.from * reduce_size, reduced + run.to * reduce_size, run.count * reduce_size});
        }
        if (param.requires_grad)
          tables.pack_zero.push_back(
              {0, reduced + piece.numel() * reduce_size, (param.shard_count - piece.numel()) * reduce_size});
      }
    });
  }
  return tables;
}

}  // namespace fsdp2::detail
