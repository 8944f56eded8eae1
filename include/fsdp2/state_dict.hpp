// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>

#include "fsdp2/dtensor.hpp"
#include "fsdp2/model.hpp"
#include "fsdp2/optimizer.hpp"

namespace fsdp2 {

/// Named tensors, ordered by name: what is saved, and what is loaded into. Those of a model share its memory.
struct StateDict {
  std::map<std::string, DTensor> tensors;
  /// Who has written into the tensors calls it, if it is set: a model then drops gathered copies of the old values.
  std::function<void()> after_load;
};

/// Parameters as "<module>.<parameter>", and with an optimizer its state as "optim.<state>.<module>.<parameter>" and
/// "optim.step". No communication, no copies. Throws ConfigError where two modules give one key.
StateDict state_dict(const Model& model);
StateDict state_dict(const Model& model, const Optimizer& optimizer);
StateDict state_dict(std::span<Module* const> modules);
StateDict state_dict(std::span<Module* const> modules, const Optimizer& optimizer);

/// The parameters of modules in or outside models, as state_dict.
StateDict get_sharded_state_dict(std::span<Module* const> modules);

/// Copies every tensor of `source` into the parameter of that key, on this rank. First checks all, and throws
/// MismatchError, which lists all problems, with nothing changed: another global or local shape, another dtype; and
/// unless `strict` is false, missing and unexpected keys. Throws Error while a scope of a module is live. No
/// communication.
void load_sharded_state_dict(std::span<Module* const> modules, const StateDict& source, bool strict = true,
                             const ExecutionSpace& exec = ExecutionSpace());

}  // namespace fsdp2
