// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
// Loads checkpoints that may be damaged or hostile, each in a process of its own, and says what became of it.
//
//   hostile_reader make OUT SEED   writes a checkpoint of the model below, with the values, save id and step of SEED;
//                                  prints the digest of its content
//   hostile_reader read            for each line of standard input, a directory: loads and verifies it in a child;
//                                  prints a line of JSON
//
// Of a child: "status" (0 loaded, 3 refused by a CheckpointError, 4 any other exception), "signal" (what killed it, 14
// after 10 s), "seconds" and "growth_kib" (of the largest resident set) of loading and verifying, "digest" of what was
// loaded, "error" and "verify": what loading and verifying had to say.

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <Kokkos_Core.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>

#include "checkpoint/index_file.hpp"
#include "checkpoint/shard_file.hpp"
#include "fsdp2/checkpoint/verify.hpp"
#include "support/checkpoint.hpp"

namespace fsdp2::testing {
namespace {

using checkpoint::PieceRequest;

/// Four ranks; the second file holds two of them. Pieces of several blocks and several in one block, all kinds of cuts.
CheckpointIndex model() {
  CheckpointIndex index;
  index.library = "hostile_reader";
  index.world_size = 4;
  index.sizes = {4096, 4096, 256};
  index.metadata = R"({"of": "a test"})";
  index.meshes.push_back({"grid", MeshSpec({{"dp", 2}, {"tp", 2}}), {AxisRole::shard, AxisRole::none}});
  index.meshes.push_back({"list", MeshSpec({{"x", 3}}, {3, 0, 2}), {AxisRole::none}});
  const auto add = [&](std::string name, DType dtype, Shape shape, std::vector<Placement> placements,
                       std::size_t mesh = 0) {
    std::vector<std::int64_t> order(placements.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
    index.tensors.push_back({std::move(name), {dtype, std::move(shape), std::move(placements), order}, mesh, 0});
  };
  add("big", DType::f32, {70, 61}, {Shard{0}, Shard{1}});
  add("columns", DType::bf16, {5, 301}, {Replicate{}, Shard{1}});
  add("empty", DType::f32, {0, 3}, {Shard{0}, Replicate{}});
  add("flags", DType::boolean, {7, 5}, {Shard{0}}, 1);
  add("list", DType::i64, {50, 9}, {Replicate{}}, 1);
  add("n\xc3\xa4me/with %", DType::f32, {4}, {Shard{0}, Replicate{}});
  add("ragged", DType::f32, {11, 40}, {Ragged{0, {0, 3, 11}}, Shard{1}});
  add("replicated", DType::bf16, {50, 4}, {Replicate{}, Replicate{}});
  add("scalar", DType::i64, {}, {Replicate{}, Replicate{}});
  return index;
}

const std::vector<std::vector<std::int64_t>> ranks_of_files{{0}, {1, 2}, {3}};

std::uint64_t digest_of(const std::vector<Bytes>& tensors) {
  std::uint64_t crc = 0;
  for (const Bytes& bytes : tensors) crc = checkpoint::crc64(bytes, crc);
  return crc;
}

void make(const std::filesystem::path& directory, std::uint64_t seed) {
  CheckpointIndex index = model();
  index.step = static_cast<std::int64_t>(100 + seed);
  index.save_id = checkpoint::save_id_text(mix(2 * seed), mix(2 * seed + 1));
  const auto values = [&](const TensorEntry& tensor, const Box& box) {
    return box_bytes(fmt::format("{}.{}", seed, tensor.name), tensor.spec.dtype, tensor.spec.shape, box);
  };
  validate(index);
  std::filesystem::create_directory(directory);
  index.segments.resize(static_cast<std::size_t>(index.world_size));
  for (std::size_t f = 0; f < ranks_of_files.size(); ++f) {
    checkpoint::FilePlan file{f, ranks_of_files.size(), ranks_of_files[f], {}, 0};
    const auto local = [](std::int64_t rank) {
      return RankLocalValues{{"rng", Bytes(static_cast<std::size_t>(40 + rank), std::byte{7})}};
    };
    for (const std::int64_t rank : file.ranks)
      file.counts.push_back(checkpoint::count_rank(index, plan_rank(index, rank), local(rank)));
    for (; file.position < file.ranks.size(); ++file.position) {
      const std::int64_t rank = file.ranks[file.position];
      const RankPlan plan = plan_rank(index, rank);
      checkpoint::ShardWriter writer(directory, index, plan, file, local(rank));
      writer.write(index.sizes.block_bytes, [&](std::span<const PieceRequest> requests) {
        for (const PieceRequest& request : requests) {
          const Bytes bytes = values(index.tensors[request.piece->tensor], request.piece->box);
          std::memcpy(request.target.data(), bytes.data() + request.begin, request.target.size());
        }
      });
      for (std::size_t p = 0; p < plan.pieces.size(); ++p)
        index.tensors[plan.pieces[p].tensor].digest ^= writer.digests()[p];
      index.segments[static_cast<std::size_t>(rank)] = writer.segments();
      if (file.position == 0) index.files.push_back({writer.file_size(), file.ranks});
    }
  }
  checkpoint::write_index(directory, index);
  std::vector<Bytes> tensors;
  for (const TensorEntry& tensor : index.tensors) tensors.push_back(values(tensor, Box::whole(tensor.spec.shape)));
  fmt::print("{:016x}\n", digest_of(tensors));
}

std::string kind_of(const CheckpointError& error) {
  if (dynamic_cast<const CorruptError*>(&error) != nullptr) return "CorruptError";
  if (dynamic_cast<const MismatchError*>(&error) != nullptr) return "MismatchError";
  if (dynamic_cast<const IoError*>(&error) != nullptr) return "IoError";
  return "CheckpointError";
}

/// What the verifier says: "valid", or all that it found.
std::string verdict(const std::filesystem::path& directory) {
  try {
    const VerifyReport report = verify(directory);
    std::string text;
    for (const std::string& problem : report.problems) text += problem + "\n";
    return text.empty() ? "valid" : text;
  } catch (const CheckpointError& error) {
    return fmt::format("{}: {}", kind_of(error), error.what());
  }
}

std::int64_t largest_kib() {
  struct rusage usage {};
  return ::getrusage(RUSAGE_SELF, &usage) == 0 ? usage.ru_maxrss : 0;
}

/// Loads all tensors of the model, as a program that knows its model does, and verifies.
nlohmann::json read_here(const std::filesystem::path& directory) {
  const Kokkos::ScopeGuard kokkos;
  const DeviceMesh mesh;
  StateDict state;
  for (const TensorEntry& tensor : model().tensors)
    add_tensor(state, mesh, tensor.name, tensor.spec.dtype, tensor.spec.shape, {Replicate{}}, false);
  nlohmann::json result;
  const std::int64_t before = largest_kib();
  const auto start = std::chrono::steady_clock::now();
  try {
    try {
      (void)load(directory, state);
      std::vector<Bytes> tensors;
      for (const auto& [name, tensor] : state.tensors) tensors.push_back(bytes_of(tensor.local()));
      result["digest"] = fmt::format("{:016x}", digest_of(tensors));
      result["status"] = 0;
    } catch (const CheckpointError& error) {
      result["error"] = fmt::format("{}: {}", kind_of(error), error.what());
      result["status"] = 3;
    }
    result["verify"] = verdict(directory);
  } catch (const std::exception& error) {
    result["error"] = fmt::format("not a CheckpointError: {}", error.what());
    result["status"] = 4;
  }
  result["seconds"] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  result["growth_kib"] = largest_kib() - before;
  return result;
}

[[noreturn]] void be_child(const std::filesystem::path& directory, int output) {
  ::alarm(10);
  const std::string text = read_here(directory).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t written = ::write(output, text.data() + at, text.size() - at);
    if (written <= 0) break;
    at += static_cast<std::size_t>(written);
  }
  std::fflush(nullptr);
  ::_exit(0);  // HDF5 1.10's exit handler complains after it has met damaged metadata
}

nlohmann::json read_in_child(const std::filesystem::path& directory) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) be_child(directory, ends[1]);
  ::close(ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t got = 0; (got = ::read(ends[0], buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<std::size_t>(got));
  ::close(ends[0]);
  int status = 0;
  if (::waitpid(child, &status, 0) != child) throw std::runtime_error("waitpid failed");
  nlohmann::json result;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
    result = nlohmann::json::parse(text);
  else  // a sanitizer ends the process with a status of its own
    result["status"] = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  result["signal"] = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  return result;
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.size() == 3 && arguments[0] == "make") {
    make(arguments[1], std::stoull(arguments[2]));
    return 0;
  }
  if (arguments.size() != 1 || arguments[0] != "read") {
    std::fputs("usage: hostile_reader make OUT SEED | hostile_reader read\n", stderr);
    return 2;
  }
  for (std::string directory; std::getline(std::cin, directory);)
    std::cout << read_in_child(directory).dump() << std::endl;
  return 0;
}

}  // namespace
}  // namespace fsdp2::testing

int main(int argc, char** argv) {
  try {
    return fsdp2::testing::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hostile_reader: %s\n", error.what());
    return 1;
  }
}
