// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <concepts>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>

#include "fsdp2/dtensor.hpp"
#include "fsdp2/model.hpp"
#include "fsdp2/optimizer.hpp"

namespace fsdp2 {

/// Named tensors, ordered by name: what is saved, and what is loaded into. Those of a model share its memory, and so
/// stay current while it trains.
struct StateDict {
  std::map<std::string, DTensor> tensors;
  /// Who has written into the tensors calls it, if it is set: a model then drops gathered copies of the old values.
  std::function<void()> after_load;
  /// Who reads or writes the tensors later than they were taken calls it, if it is set: copies are made anew. Throws
  /// Error where the tensors are not the model's any more, since parameters were added to it.
  std::function<void()> require_current;
};

/// Parameters as "<module>.<parameter>", and with an optimizer its state as "optim.<state>.<module>.<parameter>" and
/// "optim.step". No communication, no copies. Throws ConfigError where two modules give one key.
StateDict state_dict(const Model& model);
StateDict state_dict(const Model& model, const Optimizer& optimizer);
StateDict state_dict(std::span<Module* const> modules);
StateDict state_dict(std::span<Module* const> modules, const Optimizer& optimizer);

/// What joins a state dict beside models: an object that gives its tensors, and takes them back once they were loaded.
template <class T>
concept Stateful = requires(T& object, const StateDict& dict) {
  { object.state_dict() } -> std::convertible_to<StateDict>;
  object.load_state_dict(dict);
};

/// Adds the tensors of another dict, and what it wants to be called. Throws ConfigError for keys that are there
/// already.
void merge(StateDict& dict, StateDict other);

/// The same with keys "<prefix>.<key>".
void add(StateDict& dict, const std::string& prefix, StateDict other);

/// Adds an object, which must live as long as the dict is used: load_state_dict gets its tensors, under their own
/// names, after something was loaded into them.
template <Stateful T>
void add(StateDict& dict, const std::string& prefix, T& object) {
  StateDict own = object.state_dict();
  own.after_load = [&object, values = own, before = own.after_load] {
    if (before) before();
    object.load_state_dict(values);
  };
  add(dict, prefix, std::move(own));
}

/// Whole tensors in host memory, by key.
using FullStateDict = std::map<std::string, HostTensor>;

/// Gathers the tensors of a dict whole, one after the other: beside the result, a rank holds one of them at a time.
/// Collective over the meshes. With rank0_only, the others get nothing. Throws as redistribute, and Error where the
/// dict is not current.
FullStateDict get_full_state_dict(const StateDict& state, bool rank0_only = true,
                                  const ExecutionSpace& exec = ExecutionSpace());

struct LoadFullOptions {
  bool strict = true;                ///< as for load_sharded_state_dict
  bool broadcast_from_rank0 = true;  ///< only rank 0 of each mesh has the tensors; else every rank has them
};

/// Copies this rank's parts out of whole tensors. Broadcast, they are one at a time on their way. Collective over the
/// meshes. First compares all keys, shapes and dtypes, and throws MismatchError, the same on all ranks, which lists all
/// problems, with nothing changed.
void load_full_state_dict(const StateDict& state, const FullStateDict& source, const LoadFullOptions& options = {},
                          const ExecutionSpace& exec = ExecutionSpace());

/// The parameters of modules in or outside models, as state_dict.
StateDict get_sharded_state_dict(std::span<Module* const> modules);

/// Copies every tensor of `source` into the parameter of that key, on this rank. First checks all, and throws
/// MismatchError, which lists all problems, with nothing changed: another global or local shape, another dtype; and
/// unless `strict` is false, missing and unexpected keys. Throws Error while a scope of a module is live. No
/// communication.
void load_sharded_state_dict(std::span<Module* const> modules, const StateDict& source, bool strict = true,
                             const ExecutionSpace& exec = ExecutionSpace());

}  // namespace fsdp2
