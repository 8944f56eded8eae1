// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <fmt/format.h>

#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp2/checkpoint/layout.hpp"
#include "fsdp2/version.hpp"

namespace fsdp2::testing {

/// One directory of checkpoints/golden. Values of tensors are box_bytes of their names.
struct GoldenCheckpoint {
  std::string name;
  CheckpointIndex index;
  std::int64_t ranks_per_file = 1;
  std::map<std::int64_t, RankLocalValues> rank_local = {};
};

inline CheckpointIndex golden_index(std::int64_t world_size, std::string metadata) {
  CheckpointIndex index;
  index.library = fmt::format("fsdp2 {}", version());
  index.save_id = "00112233445566778899aabbccddeeff";
  index.step = 100;
  index.world_size = world_size;
  index.sizes = {4096, 4096, 256};
  index.metadata = std::move(metadata);
  return index;
}

/// Tensors must be added in bytewise order of names.
inline void add(CheckpointIndex& index, std::string name, DType dtype, Shape shape, std::vector<Placement> placements,
                std::vector<std::int64_t> split_order = {}, std::size_t mesh = 0) {
  TensorSpec spec{dtype, std::move(shape), std::move(placements), std::move(split_order)};
  spec.split_order = fsdp2::split_order(spec);
  index.tensors.push_back({std::move(name), std::move(spec), mesh, 0});
}

/// Uneven cuts of both dimensions, replicated tensors written whole and cut, every dtype, a scalar, an empty tensor, a
/// name that needs escaping.
inline GoldenCheckpoint golden_uneven() {
  CheckpointIndex index = golden_index(3, R"({"note": "written once, read for ever"})");
  index.meshes.push_back({"mesh", MeshSpec({{"dp", 3}}), {AxisRole::shard}});
  add(index, "columns", DType::f32, {3, 10}, {Shard{1}});
  add(index, "empty", DType::f32, {0, 3}, {Shard{0}});
  for (const char* name : {"bf16", "bool", "complex128", "complex64", "f16", "f32", "f64", "f8_e4m3", "f8_e5m2", "i16",
                           "i32", "i64", "i8", "u16", "u32", "u64", "u8"})
    add(index, std::string("every.") + name, parse_dtype(name), {5, 3}, {Replicate{}});
  add(index, "n\xc3\xa4me/with %", DType::f32, {4}, {Shard{0}});
  add(index, "replicated", DType::f32, {50, 4}, {Replicate{}});
  add(index, "rows", DType::f32, {7, 5}, {Shard{0}});
  add(index, "scalar", DType::f32, {}, {Replicate{}});
  return {"dp3-uneven", std::move(index)};
}

/// Hybrid sharding: shards that two ranks hold, written once.
inline GoldenCheckpoint golden_hybrid() {
  CheckpointIndex index = golden_index(4, "");
  index.meshes.push_back({"mesh", MeshSpec({{"replicate", 2}, {"dp", 2}}), {AxisRole::replicate, AxisRole::shard}});
  add(index, "bias", DType::f32, {3}, {Replicate{}, Shard{0}});
  add(index, "optim.step", DType::i64, {}, {Replicate{}, Replicate{}});
  add(index, "table", DType::bf16, {40, 9}, {Replicate{}, Replicate{}});
  add(index, "weight", DType::f32, {41, 3}, {Replicate{}, Shard{0}});
  return {"hybrid-2x2", std::move(index)};
}

/// FSDP cuts what tensor parallelism has left, by rows and by columns; two ranks a file.
inline GoldenCheckpoint golden_tensor_parallel() {
  CheckpointIndex index = golden_index(4, "{}");
  index.meshes.push_back({"mesh", MeshSpec({{"dp", 2}, {"tp", 2}}), {AxisRole::shard, AxisRole::none}});
  add(index, "column.weight", DType::f32, {13, 7}, {Shard{0}, Shard{0}}, {1, 0});
  add(index, "norm", DType::f32, {5}, {Shard{0}, Replicate{}});
  add(index, "row.weight", DType::bf16, {7, 13}, {Shard{0}, Shard{1}}, {1, 0});
  return {"tensor-parallel-2x2", std::move(index), 2};
}

/// A simulation: a field on a grid, particles on some of its ranks by a list, a model on all of them, the random
/// numbers of two ranks; one file.
inline GoldenCheckpoint golden_simulation() {
  CheckpointIndex index = golden_index(6, R"({"time": 0.5})");
  index.step = -7;
  index.meshes.push_back({"grid", MeshSpec({{"x", 3}, {"y", 2}}), {AxisRole::none, AxisRole::none}});
  index.meshes.push_back({"model", MeshSpec({{"dp", 6}}), {AxisRole::shard}});
  index.meshes.push_back({"particles", MeshSpec({{"p", 4}}, {5, 0, 3, 2}), {AxisRole::none}});
  add(index, "field", DType::f64, {7, 5, 2}, {Shard{0}, Shard{1}});
  add(index, "particles", DType::f32, {9, 3}, {Ragged{0, {0, 4, 4, 5, 9}}}, {}, 2);
  add(index, "weight", DType::f32, {8, 2}, {Shard{0}}, {}, 1);
  const auto bytes = [](const std::string& text) {
    const auto view = std::as_bytes(std::span(text));
    return std::vector<std::byte>(view.begin(), view.end());
  };
  return {"simulation-6",
          std::move(index),
          6,
          {{1, {{"data", bytes("epoch 3")}, {"rng", bytes(std::string("\0one", 4))}}}, {4, {{"rng", {}}}}}};
}

/// Names that file formats stumble over, in bytewise order, and metadata larger than an HDF5 attribute can be.
inline GoldenCheckpoint golden_names() {
  CheckpointIndex index = golden_index(2, "\"" + std::string(70000, 'm') + "\"");
  index.meshes.push_back({"mesh/%", MeshSpec({{"d p", 2}}), {AxisRole::shard}});
  const std::string names[] = {std::string("\0", 1),
                               std::string("\0a\0", 3),
                               "\t\n",
                               " ",
                               "%2F",
                               ".",
                               "..",
                               "../up",
                               "/",
                               "//",
                               "/a/",
                               "a",
                               std::string("a\0b", 3),
                               "a/b",
                               "a/b/",
                               "a\\b",
                               std::string(300, 'n'),
                               "\x7f",
                               "\x80",
                               "\xc3\xa4",
                               "\xe6\xa8\xa1\xe5\x9e\x8b.\xe5\xb1\xa4/\xe6\x9d\x83",
                               "\xf0\x9f\xa7\xa0",
                               "\xff\xfe"};
  for (const std::string& name : names) add(index, name, DType::u8, {3}, {Shard{0}});
  return {"names", std::move(index)};
}

inline std::vector<GoldenCheckpoint> golden_checkpoints() {
  return {golden_uneven(), golden_hybrid(), golden_tensor_parallel(), golden_simulation(), golden_names()};
}

}  // namespace fsdp2::testing
