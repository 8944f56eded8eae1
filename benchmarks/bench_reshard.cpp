// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
// Resharding beside cp and fsync of the same bytes, verify beside reading the files, diff of equal checkpoints. All
// files are in the page cache, one process works on one thread. Usage: bench_reshard [DIRECTORY [MIB [ROUNDS]]]: by
// default the current directory, 4096 MiB, 7 rounds.

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fsdp2/fsdp2.hpp>
#include <stdexcept>
#include <vector>

#include "support/compare.hpp"
#include "support/main.hpp"

namespace fsdp2 {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t chunk_bytes = std::size_t{8} << 20;

/// cp, and fsync of every file.
void copy_synced(const fs::path& from, const fs::path& to) {
  fs::create_directory(to);
  std::vector<char> chunk(chunk_bytes);
  for (const auto& entry : fs::directory_iterator(from)) {
    const int source = ::open(entry.path().c_str(), O_RDONLY);
    const int target = ::open((to / entry.path().filename()).c_str(), O_CREAT | O_WRONLY, 0666);
    if (source < 0 || target < 0) throw std::runtime_error("cannot copy " + entry.path().string());
    ssize_t count = 0;
    while ((count = ::read(source, chunk.data(), chunk.size())) > 0)
      if (::write(target, chunk.data(), static_cast<std::size_t>(count)) != count)
        throw std::runtime_error("cannot write " + to.string());
    if (count < 0 || ::fsync(target) != 0) throw std::runtime_error("cannot copy " + entry.path().string());
    ::close(source);
    ::close(target);
  }
}

/// cat > /dev/null.
void read_files(const fs::path& from) {
  std::vector<char> chunk(chunk_bytes);
  for (const auto& entry : fs::directory_iterator(from)) {
    const int source = ::open(entry.path().c_str(), O_RDONLY);
    while (::read(source, chunk.data(), chunk.size()) > 0) {
    }
    ::close(source);
  }
}

/// Matrices with 4096 columns, so that columns can be cut, too.
void save_matrices(const fs::path& path, std::int64_t bytes) {
  constexpr std::int64_t columns = 4096;
  constexpr std::int64_t tensors = 16;
  const DeviceMesh mesh;
  StateDict state;
  for (std::int64_t t = 0; t < tensors; ++t) {
    const Shape shape{bytes / tensors / columns / 4, columns};
    const Tensor local = Tensor::uninitialized(DType::f32, shape, "matrix");
    Kokkos::deep_copy(local.view<float**>(), static_cast<float>(t));
    state.tensors[fmt::format("layer{:02}.weight", t)] =
        DTensor::from_local(local, {DType::f32, shape, {Shard{0}}, {}}, mesh);
  }
  save(path, state);
}

struct Case {
  std::string name;
  ReshardOptions from;
  ReshardOptions to;
};

void run(int argc, char** argv) {
  const fs::path directory = argc > 1 ? argv[1] : ".";
  const std::int64_t bytes = (argc > 2 ? std::atoll(argv[2]) : 4096) << 20;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 7;
  const fs::path saved = directory / "bench-saved";
  const fs::path source = directory / "bench-source";
  const fs::path target = directory / "bench-target";
  const auto remove_target = [&] { fs::remove_all(target); };
  save_matrices(saved, bytes);
  const ReshardOptions grid{.meshes = {{"", MeshSpec({{"dp", 2}, {"tp", 2}})}}};
  for (const Case& one : {Case{"4 to 2 ranks", {.world_size = 4}, {.world_size = 2}},
                          Case{"2 to 4 ranks", {.world_size = 2}, {.world_size = 4}},
                          Case{"4 to 3 ranks", {.world_size = 4}, {.world_size = 3}},
                          Case{"dp=4 to dp=2,tp=2", {.world_size = 4}, grid}}) {
    reshard(saved, source, one.from);
    bench::compare(fmt::format("reshard {} MiB, {}", bytes >> 20, one.name), static_cast<double>(bytes), rounds,
                   {{"cp + fsync", [&] { copy_synced(source, target); }, remove_target},
                    {"fsdp2::reshard", [&] { reshard(source, target, one.to); }, remove_target}});
    fs::remove_all(source);
  }
  reshard(saved, source, {.world_size = 4});
  bench::compare(fmt::format("verify {} MiB", bytes >> 20), static_cast<double>(bytes), rounds,
                 {{"read", [&] { read_files(source); }}, {"fsdp2::verify", [&] {
                                                            if (!verify(source).is_valid())
                                                              throw std::runtime_error("not valid");
                                                          }}});
  const double begin = MPI_Wtime();
  if (!diff(saved, source).is_equal()) throw std::runtime_error("not equal");
  std::printf("diff of equal checkpoints of 1 and 4 ranks: %.1f ms\n", (MPI_Wtime() - begin) * 1e3);
  fs::remove_all(saved);
  fs::remove_all(source);
}

}  // namespace
}  // namespace fsdp2

int main(int argc, char** argv) {
  return fsdp2::bench::run_main(argc, argv, fsdp2::run);
}
