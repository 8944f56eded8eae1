// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// The whole public API, in reading order: each header uses only those above it.

// clang-format off
#include "fsdp2/error.hpp"
#include "fsdp2/version.hpp"
#include "fsdp2/log.hpp"

// Index arithmetic: no MPI, no Kokkos.
#include "fsdp2/dtype.hpp"
#include "fsdp2/low_precision.hpp"
#include "fsdp2/shape.hpp"
#include "fsdp2/mesh.hpp"
#include "fsdp2/placement.hpp"

// Tensors on ranks.
#include "fsdp2/tensor.hpp"
#include "fsdp2/communicator.hpp"
#include "fsdp2/device_mesh.hpp"
#include "fsdp2/dtensor.hpp"
#include "fsdp2/redistribute.hpp"

// Sharded training.
#include "fsdp2/config.hpp"
#include "fsdp2/initializer.hpp"
#include "fsdp2/sharded_param.hpp"
#include "fsdp2/module.hpp"
#include "fsdp2/model.hpp"
#include "fsdp2/optimizer.hpp"
#include "fsdp2/state_dict.hpp"
#include "fsdp2/field.hpp"
#include "fsdp2/gradients.hpp"

// Checkpoints.
#include "fsdp2/checkpoint/layout.hpp"
#include "fsdp2/checkpoint/save.hpp"
#include "fsdp2/checkpoint/load.hpp"
#include "fsdp2/checkpoint/manager.hpp"
#include "fsdp2/checkpoint/verify.hpp"
#include "fsdp2/checkpoint/view.hpp"
#include "fsdp2/checkpoint/diff.hpp"
#include "fsdp2/checkpoint/reshard.hpp"
#include "fsdp2/checkpoint/safetensors.hpp"
// clang-format on
