// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// Any placements into any others, on meshes of one to three axes.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fsdp2/error.hpp"
#include "fsdp2/redistribute.hpp"
#include "support/fsdp.hpp"

namespace fsdp2::test {
namespace {

std::vector<std::int64_t> uneven_bounds(std::int64_t extent, std::int64_t parts) {
  std::vector<std::int64_t> bounds{0};
  for (std::int64_t i = 1; i < parts; ++i) bounds.push_back(std::min(extent, 2 * i - 1));
  bounds.push_back(extent);
  return bounds;
}

/// Everything that an axis can carry for a shape.
std::vector<Placement> placements_of(const Shape& shape, std::int64_t ranks) {
  std::vector<Placement> result{Replicate{}, Partial{ReduceOp::sum}};
  for (std::size_t d = 0; d < shape.size(); ++d) result.push_back(Shard{static_cast<std::int64_t>(d)});
  if (!shape.empty()) result.push_back(Ragged{0, uneven_bounds(shape[0], ranks)});
  return result;
}

/// This rank's part of a tensor of global linear indices. At most one axis is Partial; its contributions are whole
/// numbers whose sum is right.
DTensor make(const DeviceMesh& mesh, const Shape& shape, const std::vector<Placement>& placements,
             const std::vector<std::int64_t>& order) {
  const TensorSpec spec{DType::f32, shape, placements, order};
  const Box box = local_box(spec, mesh.spec(), mesh.coordinate());
  const std::vector<float> full = ramp(shape);
  std::vector<float> local(static_cast<std::size_t>(box.numel()));
  for (RunCursor cursor = runs_of(shape, box); !cursor.is_done() && !local.empty(); cursor.next())
    std::copy_n(full.begin() + cursor.run().from, cursor.run().count, local.begin() + cursor.run().to);
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    if (!std::holds_alternative<Partial>(placements[axis])) continue;
    const std::int64_t ranks = mesh.spec().axes()[axis].size;
    const std::int64_t i = mesh.coordinate()[axis];
    for (float& value : local)
      value = i == 0 ? value - static_cast<float>(ranks * (ranks - 1) / 2) : value * 0 + static_cast<float>(i);
  }
  return DTensor::from_local(make_tensor(box.extent, local), spec, mesh);
}

bool is_valid(const TensorSpec& spec, const MeshSpec& mesh) {
  try {
    validate(spec, mesh, "t");
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::string name_of(const std::vector<Placement>& placements) {
  std::string name;
  for (const Placement& placement : placements) name += to_string(placement) + " ";
  return name;
}

void check_all_pairs(const std::vector<MeshAxis>& axes, const std::vector<Shape>& shapes) {
  DeviceMesh mesh(MPI_COMM_WORLD, axes);
  std::vector<std::vector<std::int64_t>> orders{{}};
  if (axes.size() == 2) orders.push_back({1, 0});
  for (const Shape& shape : shapes) {
    std::vector<std::vector<Placement>> all{{}};
    for (const MeshAxis& axis : axes) {
      std::vector<std::vector<Placement>> longer;
      for (const std::vector<Placement>& start : all)
        for (const Placement& placement : placements_of(shape, axis.size)) {
          longer.push_back(start);
          longer.back().push_back(placement);
        }
      all = longer;
    }
    const auto partials = [](const std::vector<Placement>& placements) {
      return std::count_if(placements.begin(), placements.end(),
                           [](const Placement& p) { return std::holds_alternative<Partial>(p); });
    };
    for (const auto& from_order : orders)
      for (const std::vector<Placement>& from : all) {
        const TensorSpec source{DType::f32, shape, from, from_order};
        if (!is_valid(source, mesh.spec()) || partials(from) > 1) continue;
        const DTensor tensor = make(mesh, shape, from, from_order);
        for (const std::vector<Placement>& to : all) {
          const TensorSpec target{DType::f32, shape, to, {}};
          if (!is_valid(target, mesh.spec())) continue;
          SCOPED_TRACE(
              fmt::format("{} {}: {}-> {}", mesh.spec().to_string(), to_string(shape), name_of(from), name_of(to)));
          const DTensor result = redistribute(tensor, to);
          ASSERT_EQ(result.spec().placements, to);
          std::vector<Placement> plain = to;
          bool has_value = true;
          for (std::size_t axis = 0; axis < plain.size(); ++axis)
            if (std::holds_alternative<Partial>(plain[axis])) {
              plain[axis] = Replicate{};
              has_value = has_value && mesh.coordinate()[axis] == 0;
            }
          std::vector<float> expected = to_host(make(mesh, shape, plain, {}).local());
          if (!has_value) std::fill(expected.begin(), expected.end(), 0.0f);
          ASSERT_EQ(to_host(result.local()), expected);
        }
        ASSERT_EQ(to_host(full_tensor(tensor)), ramp(shape));
      }
  }
  mesh.close();
}

class RedistributeTest : public OnMesh {};

TEST_F(RedistributeTest, EveryPairOnOneAxis) {
  check_all_pairs({{"a", ranks_}}, {{}, {0}, {1}, {7}, {5, 3}, {2, 11, 3}, {3, 0, 2}});
}

TEST_F(RedistributeTest, EveryPairOnTwoAxes) {
  for (std::int64_t a = 1; a <= ranks_; ++a)
    if (ranks_ % a == 0) check_all_pairs({{"a", a}, {"b", ranks_ / a}}, {{13}, {5, 3}});
}

TEST_F(RedistributeTest, ThreeAxes) {
  if (ranks_ % 2 == 0) check_all_pairs({{"a", 1}, {"b", 2}, {"c", ranks_ / 2}}, {{6, 5}});
}

TEST_F(RedistributeTest, EveryDtypeIsCopiedBitByBit) {
  for (const DType dtype : all_dtypes) {
    const Tensor full = Tensor::uninitialized(dtype, {9, 4}, "fsdp2::test");
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(full.bytes()));
    for (std::size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<std::uint8_t>(dtype == DType::boolean ? i % 2 : i * 89 + 3);
    fill(full.as(DType::u8, {full.bytes()}), bytes);
    const DTensor rows = DTensor::distribute(ExecutionSpace(), full, {Shard{0}}, mesh_);
    const Tensor back = full_tensor(redistribute(rows, {Shard{1}}));
    EXPECT_EQ(to_host<std::uint8_t>(back.as(DType::u8, {back.bytes()})), bytes) << to_string(dtype);
  }
}

TEST_F(RedistributeTest, PartialsOfOtherOperationsAreCombined) {
  const Tensor mine = make_tensor({3}, std::vector<float>(3, static_cast<float>(rank_)));
  for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    const DTensor partial = DTensor::from_local(mine, {DType::f32, {3}, {Partial{op}}, {}}, mesh_);
    const float expected = op == ReduceOp::min ? 0.0f : static_cast<float>(ranks_ - 1);
    EXPECT_EQ(to_host(full_tensor(partial)), std::vector<float>(3, expected));
    const DTensor again = redistribute(
        DTensor::from_local(make_tensor({3}, {7, 7, 7}), {DType::f32, {3}, {Replicate{}}, {}}, mesh_), {Partial{op}});
    EXPECT_EQ(to_host(full_tensor(again)), std::vector<float>(3, 7));
  }
}

TEST_F(RedistributeTest, WhatTheMeshCannotCarryIsNamed) {
  const DTensor tensor = DTensor::distribute(ExecutionSpace(), ramp_tensor({4, 3}), {Shard{0}}, mesh_);
  EXPECT_TRUE(contains(message_of<ShapeError>([&] { redistribute(tensor, {Shard{2}}); }), "\"dp\""));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { redistribute(tensor, {Shard{0}, Shard{1}}); }), "axes"));
  EXPECT_THROW(redistribute(tensor, {Ragged{0, {0, 5}}}), ShapeError);
}

/// Sharding over two flattened axes is not nested sharding.
TEST_F(RedistributeTest, FlattenedAxesAreOneAxis) {
  if (ranks_ % 2 != 0) GTEST_SKIP() << "needs an even number of ranks";
  DeviceMesh grid(MPI_COMM_WORLD, {{"a", 2}, {"b", ranks_ / 2}});
  DeviceMesh flat = grid.flatten({"a", "b"}, "dp");
  ASSERT_EQ(flat.spec().axes(), (std::vector<MeshAxis>{{"dp", ranks_}}));
  EXPECT_EQ(flat.rank(), grid.rank());
  EXPECT_EQ(flat.communicator("dp").size(), ranks_);
  EXPECT_EQ(grid.communicator(std::vector<std::size_t>{0, 1}).rank(), rank_);
  Model model({.mesh = flat, .min_shard_size = 0});
  Module& module = model.add("m", {{"w", {ranks_ + 1, 3}, ramp_tensor({ranks_ + 1, 3})}});
  EXPECT_EQ(to_host(full_tensor(module.param("w").dtensor())), ramp({ranks_ + 1, 3}));
  EXPECT_EQ(module.param("w").local_shape()[0], chunk(ranks_ + 1, ranks_, rank_).size());
  flat.close();
  grid.close();
}

}  // namespace
}  // namespace fsdp2::test
