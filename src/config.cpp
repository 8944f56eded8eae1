// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/config.hpp"

#include <fmt/format.h>

#include <cmath>

#include "fsdp2/error.hpp"

namespace fsdp2 {

MixedPrecisionPolicy MixedPrecisionPolicy::bf16() {
  return {DType::bf16, DType::f32, DType::bf16, true, false};
}

MixedPrecisionPolicy MixedPrecisionPolicy::fp16() {
  return {DType::f16, DType::f32, DType::f16, true, false};
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

  if (replicate_dim_name)
    throw ConfigError(
        fmt::format("Config::replicate_dim_name is \"{}\", but hybrid sharding is not supported yet: leave it "
                    "unset, and shard over one axis",
                    *replicate_dim_name));
  for (const MeshAxis& axis : spec.axes())
    if (axis.name != mesh_dim_name && axis.size > 1)
      throw ConfigError(
          fmt::format("Config::mesh is {}, but meshes with an axis besides \"{}\" are not supported yet: other "
                      "axes must have size 1",
                      spec.to_string(), mesh_dim_name));
  if (mp_policy != MixedPrecisionPolicy::fp32())
    throw ConfigError("Config::mp_policy: mixed precision is not supported yet: use MixedPrecisionPolicy::fp32()");
  if (const auto* slices = std::get_if<std::int64_t>(&reshard_after_forward))
    throw ConfigError(
        fmt::format("Config::reshard_after_forward is {}, but keeping a slice is not supported yet: use true or "
                    "false",
                    *slices));
  if (offload_to_cpu) throw ConfigError("Config::offload_to_cpu: offloading is not supported yet: use false");
  if (forward_prefetch) throw ConfigError("Config::forward_prefetch is not supported yet: use false");
}

}  // namespace fsdp2
