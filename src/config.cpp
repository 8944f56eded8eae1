// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/config.hpp"

#include <fmt/format.h>

#include <cmath>

#include "fsdp2/error.hpp"

namespace fsdp2 {

namespace {

void require_castable(const char* field, const std::optional<DType>& dtype) {
  if (dtype && !is_castable(*dtype))
    throw ConfigError(
        fmt::format("MixedPrecisionPolicy::{} is {}: expected f64, f32, bf16 or f16", field, to_string(*dtype)));
}

}  // namespace

MixedPrecisionPolicy MixedPrecisionPolicy::bf16() {
  return {DType::bf16, DType::f32, DType::bf16, true};
}

MixedPrecisionPolicy MixedPrecisionPolicy::fp16() {
  return {DType::f16, DType::f32, DType::f16, true};
}

ConfigBuilder Config::builder() {
  return {};
}

Config ConfigBuilder::build() const {
  config_.validate();
  return config_;
}

void Config::validate() const {
  if (!mesh)
    throw ConfigError("Config::mesh is not set: give the DeviceMesh to shard over, DeviceMesh() for a single process");
  const MeshSpec& spec = mesh->spec();
  if (!spec.has_axis(mesh_dim_name))
    throw ConfigError(fmt::format("Config::mesh_dim_name is \"{}\", but the axes of the mesh are {}", mesh_dim_name,
                                  spec.to_string()));
  if (min_shard_size < 0)
    throw ConfigError(
        fmt::format("Config::min_shard_size is {}: expected a number of elements, at least 0", min_shard_size));
  if (direct_bytes < 0)
    throw ConfigError(fmt::format("Config::direct_bytes is {}: expected a number of bytes, at least 0", direct_bytes));
  if (gradient_divide_factor && !(std::isfinite(*gradient_divide_factor) && *gradient_divide_factor > 0))
    throw ConfigError(
        fmt::format("Config::gradient_divide_factor is {}: expected a positive number, or none for the mean",
                    *gradient_divide_factor));

  if (max_bucket_bytes < 0)
    throw ConfigError(
        fmt::format("Config::max_bucket_bytes is {}: expected a number of bytes, or 0 for no limit", max_bucket_bytes));
  if (replicate_dim_name && (!spec.has_axis(*replicate_dim_name) || *replicate_dim_name == mesh_dim_name))
    throw ConfigError(
        fmt::format("Config::replicate_dim_name is \"{}\": expected an axis of the mesh, {}, other than "
                    "mesh_dim_name, \"{}\"",
                    *replicate_dim_name, spec.to_string(), mesh_dim_name));
  if (const auto* slices = std::get_if<std::int64_t>(&reshard_after_forward)) {
    const std::int64_t ranks = spec.axes()[spec.axis(mesh_dim_name)].size;
    if (*slices < 1 || ranks % *slices != 0)
      throw ConfigError(
          fmt::format("Config::reshard_after_forward is {}: expected true, false, or a number that divides "
                      "the {} ranks of axis \"{}\"",
                      *slices, ranks, mesh_dim_name));
  }
  require_castable("param_dtype", mp_policy.param_dtype);
  require_castable("reduce_dtype", mp_policy.reduce_dtype);
  require_castable("buffer_dtype", mp_policy.buffer_dtype);
  require_castable("output_dtype", mp_policy.output_dtype);
}

}  // namespace fsdp2
