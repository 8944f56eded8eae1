// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// Saves and loads on command, with faults. Usage: fault_program mpi|single
//
// Reads commands, one JSON object a line, and answers each with one line. Every rank does what rank 0 reads:
//   {"do": "save", "target", "version", "ranks_per_file", "overwrite", "rank", "faults"}   rank: whom the faults hit
//   {"do": "load", "target", "rank", "faults"}
//   {"do": "check", "target"}: verifies as well; single only
//   {"do": "restore", "target"}: puts an interrupted replacement back
// A checkpoint of version v has step v, and values that follow from v: what is loaded says whether it is all of one.

#include <dlfcn.h>
#include <fmt/format.h>
#include <mpi.h>
#include <unistd.h>

#include <Kokkos_Core.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/publication.hpp"
#include "fault/shim.hpp"
#include "fsdp2/checkpoint/verify.hpp"
#include "support/checkpoint.hpp"

namespace fsdp2 {
namespace {

using nlohmann::json;
using testing::Bytes;

/// The shim's functions; all null where it is not preloaded.
struct Shim {
  decltype(&fsdp2_fault_arm) arm = find<decltype(&fsdp2_fault_arm)>("fsdp2_fault_arm");
  decltype(&fsdp2_fault_fired) fired = find<decltype(&fsdp2_fault_fired)>("fsdp2_fault_fired");
  decltype(&fsdp2_fault_calls) calls = find<decltype(&fsdp2_fault_calls)>("fsdp2_fault_calls");

 private:
  template <class Function>
  static Function find(const char* name) {
    return reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, name));
  }
};

struct TensorDescription {
  std::string name;
  DType dtype;
  Shape shape;
  Placement placement;
};

const std::vector<TensorDescription>& tensors() {
  static const std::vector<TensorDescription> all = {{"a.weight", DType::f32, {64, 33}, Shard{0}},
                                                     {"b.bias", DType::i64, {9}, Replicate{}},
                                                     {"c.table", DType::bf16, {50, 37}, Shard{1}},
                                                     {"d.scale", DType::f32, {700}, Shard{0}}};
  return all;
}

Bytes values_of(const TensorDescription& tensor, std::int64_t version, const Box& box) {
  return testing::box_bytes(fmt::format("{}@{}", tensor.name, version), tensor.dtype, tensor.shape, box);
}

/// With the values of a version, or without any.
StateDict state_of(const DeviceMesh& mesh, std::optional<std::int64_t> version) {
  StateDict state;
  for (const TensorDescription& tensor : tensors()) {
    testing::add_tensor(state, mesh, tensor.name, tensor.dtype, tensor.shape, {tensor.placement}, false);
    const DTensor& made = state.tensors.at(tensor.name);
    if (version) testing::set_bytes(made.local(), values_of(tensor, *version, made.box()));
  }
  return state;
}

std::string error_text(const std::exception& error) {
  const char* type = dynamic_cast<const IoError*>(&error) != nullptr         ? "IoError"
                     : dynamic_cast<const CorruptError*>(&error) != nullptr  ? "CorruptError"
                     : dynamic_cast<const MismatchError*>(&error) != nullptr ? "MismatchError"
                     : dynamic_cast<const Error*>(&error) != nullptr         ? "Error"
                                                                             : "not of fsdp2";
  return fmt::format("{}: {}", type, error.what());
}

class Program {
 public:
  Program(DeviceMesh mesh, MPI_Comm comm) : mesh_(std::move(mesh)), control_(comm, "control") {
    for (const std::string& pid : control_.all_gather(std::to_string(::getpid()))) pids_.push_back(std::stoi(pid));
  }

  void run() {
    answer({{"pids", pids_}});
    for (std::string line; read(line);) {
      const json command = json::parse(line);
      const std::string what = command.at("do");
      const std::string target = command.at("target");
      if (what == "save") {
        answer(with_faults(command, [&] {
          save(target, state_of(mesh_, command.at("version")),
               {.step = command.at("version").get<std::int64_t>(),
                .sizes = testing::small_blocks(),
                .ranks_per_file = command.at("ranks_per_file").get<std::int64_t>(),
                .rank_local = {{"seed", Bytes(24, std::byte{7})}},
                .overwrite = command.at("overwrite")});
          return std::int64_t{0};
        }));
      } else if (what == "load") {
        answer(with_faults(command, [&] { return loaded_version(target); }));
      } else if (what == "check") {
        answer(check(target));
      } else if (what == "restore") {
        checkpoint::restore_replaced(target);
        answer(json::object());
      } else {
        throw ConfigError("no such command: " + line);
      }
    }
  }

  void close() {
    control_.close();
    mesh_.close();
  }

 private:
  bool read(std::string& line) const {
    line.clear();
    if (control_.rank() == 0) std::getline(std::cin, line);
    control_.broadcast(line, 0);
    return !line.empty();
  }

  void answer(const json& values) const {
    if (control_.rank() == 0) std::cout << values.dump() << std::endl;
  }

  /// Loads, compares bit by bit, and says which version it was.
  std::int64_t loaded_version(const std::filesystem::path& target) const {
    const StateDict state = state_of(mesh_, std::nullopt);
    const std::int64_t version = load(target, state).step;
    for (const TensorDescription& tensor : tensors()) {
      const DTensor& loaded = state.tensors.at(tensor.name);
      if (testing::bytes_of(loaded.local()) != values_of(tensor, version, loaded.box()))
        throw std::runtime_error(fmt::format("tensor {} is not that of version {}", tensor.name, version));
    }
    return version;
  }

  json check(const std::filesystem::path& target) const {
    try {
      const std::int64_t version = loaded_version(target);
      const VerifyReport report = verify(target);
      if (!report.is_valid()) return {{"error", "verify: " + report.problems.front()}};
      return {{"version", version}};
    } catch (const std::exception& error) {
      return {{"error", error_text(error)}};
    }
  }

  /// Runs a collective call while one rank (-1: none) has faults; what became of it, by rank.
  template <class Body>
  json with_faults(const json& command, Body&& body) const {
    const std::int64_t rank = command.at("rank");
    const std::string faults = command.at("faults");
    json own{{"error", ""}, {"result", 0}, {"fired", ""}, {"calls", ""}};
    control_.barrier();
    if (shim_.arm != nullptr)
      shim_.arm(rank == control_.rank() ? faults.c_str() : "", pids_.data(), static_cast<int>(pids_.size()));
    const auto start = std::chrono::steady_clock::now();
    try {
      own["result"] = body();
    } catch (const std::exception& error) {
      own["error"] = error_text(error);
    }
    own["seconds"] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (shim_.arm != nullptr) {
      own["fired"] = shim_.fired();
      if (command.value("wants_calls", false)) own["calls"] = shim_.calls();
      shim_.arm("", nullptr, 0);
    }
    const std::filesystem::directory_iterator descriptors("/proc/self/fd");
    own["descriptors"] = std::distance(begin(descriptors), end(descriptors));
    json all = json::array();
    for (const std::string& text : control_.all_gather(own.dump())) all.push_back(json::parse(text));
    return {{"ranks", all}};
  }

  DeviceMesh mesh_;
  HostCommunicator control_;
  Shim shim_;
  std::vector<int> pids_;
};

void run(bool has_mpi) {
  int size = 1;
  if (has_mpi) MPI_Comm_size(MPI_COMM_WORLD, &size);
  Program program(has_mpi ? DeviceMesh(MPI_COMM_WORLD, {{"dp", size}}) : DeviceMesh(),
                  has_mpi ? MPI_COMM_WORLD : MPI_COMM_NULL);
  program.run();
  program.close();
}

}  // namespace
}  // namespace fsdp2

int main(int argc, char** argv) {
  const bool has_mpi = argc == 2 && std::string(argv[1]) == "mpi";
  if (has_mpi) MPI_Init(&argc, &argv);
  int status = 0;
  try {
    const Kokkos::ScopeGuard kokkos;
    fsdp2::run(has_mpi);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fault_program: %s\n", error.what());
    status = 1;
  }
  if (has_mpi && status != 0) MPI_Abort(MPI_COMM_WORLD, status);
  if (has_mpi) MPI_Finalize();
  return status;
}
