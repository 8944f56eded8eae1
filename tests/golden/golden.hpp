// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <fmt/format.h>

#include "fsdp2/checkpoint/layout.hpp"
#include "fsdp2/version.hpp"

namespace fsdp2::testing {

/// What checkpoints/golden/dp3-uneven holds: three ranks, uneven cuts of both dimensions, replicated tensors written
/// whole and cut, every dtype, a scalar, an empty tensor, a name that needs escaping. Values are box_bytes of the
/// names.
inline CheckpointIndex golden_index() {
  CheckpointIndex index;
  index.library = fmt::format("fsdp2 {}", version());
  index.save_id = "00112233445566778899aabbccddeeff";
  index.step = 100;
  index.world_size = 3;
  index.sizes = {4096, 4096, 256};
  index.metadata = R"({"note": "written once, read for ever"})";
  index.meshes.push_back({"mesh", MeshSpec({{"dp", 3}}), {AxisRole::shard}});
  const auto add = [&](std::string name, DType dtype, Shape shape, Placement placement) {
    index.tensors.push_back({std::move(name), {dtype, std::move(shape), {std::move(placement)}, {0}}, 0, 0});
  };
  add("columns", DType::f32, {3, 10}, Shard{1});
  add("empty", DType::f32, {0, 3}, Shard{0});
  for (const char* name : {"bf16", "bool", "complex128", "complex64", "f16", "f32", "f64", "f8_e4m3", "f8_e5m2", "i16",
                           "i32", "i64", "i8", "u16", "u32", "u64", "u8"})
    add(std::string("every.") + name, parse_dtype(name), {5, 3}, Replicate{});
  add("n\xc3\xa4me/with %", DType::f32, {4}, Shard{0});
  add("replicated", DType::f32, {50, 4}, Replicate{});
  add("rows", DType::f32, {7, 5}, Shard{0});
  add("scalar", DType::f32, {}, Replicate{});
  return index;
}

}  // namespace fsdp2::testing
