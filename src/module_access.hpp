// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "fsdp2/model.hpp"
#include "fsdp2/module.hpp"
#include "fsdp2/optimizer.hpp"
#include "param_group.hpp"

namespace fsdp2::detail {

/// How the library's other parts reach what modules and models stand for.
struct ModuleAccess {
  static const std::shared_ptr<ParamGroup>& group(const Module& module) { return module.group_; }
  static const std::shared_ptr<ModelState>& state(const Model& model) { return model.state_; }

  static std::vector<std::shared_ptr<ParamGroup>> groups(const Model& model);
  /// Throws ConfigError for a null or repeated module.
  static std::vector<std::shared_ptr<ParamGroup>> groups(std::span<Module* const> modules);
  static std::vector<std::shared_ptr<ParamGroup>> groups(const Optimizer& optimizer);
};

}  // namespace fsdp2::detail
