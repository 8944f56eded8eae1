// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
// Saving and loading beside plain pwrite + fsync and pread of the same bytes, the copy that begins an asynchronous save
// beside memcpy, and planning.
// Usage: mpirun -n 2 bench_checkpoint [DIRECTORY [MIB [ROUNDS]]]: by default the current directory, 1024 MiB over all
// ranks in a few large and in 20,000 small tensors, 15 rounds.

#include <fcntl.h>
#include <fmt/format.h>
#include <mpi.h>
#include <unistd.h>

#include <Kokkos_Core.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fsdp2/fsdp2.hpp>
#include <stdexcept>

#include "support/compare.hpp"
#include "support/main.hpp"

namespace fsdp2 {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t chunk_bytes = std::int64_t{8} << 20;
enum class Pace { plain, paced };

/// The limit: one file a rank, reserved, written in order and synced; writing back early or not, whichever is faster.
void write_raw(const fs::path& path, const std::vector<std::byte>& bytes, Pace pace) {
  const int file = ::open(path.c_str(), O_CREAT | O_RDWR | O_TRUNC, 0666);
  const auto size = static_cast<std::int64_t>(bytes.size());
  if (file < 0 || ::fallocate(file, 0, 0, size) != 0) throw std::runtime_error("cannot make " + path.string());
  for (std::int64_t at = 0; at < size; at += chunk_bytes) {
    const std::int64_t count = std::min(chunk_bytes, size - at);
    if (::pwrite(file, bytes.data() + at, static_cast<std::size_t>(count), at) != count)
      throw std::runtime_error("cannot write " + path.string());
    if (pace == Pace::paced) ::sync_file_range(file, at, count, SYNC_FILE_RANGE_WRITE);
  }
  if (::fsync(file) != 0 || ::close(file) != 0) throw std::runtime_error("cannot sync " + path.string());
}

void read_raw(const fs::path& path, std::vector<std::byte>& bytes) {
  const int file = ::open(path.c_str(), O_RDONLY);
  const auto size = static_cast<std::int64_t>(bytes.size());
  for (std::int64_t at = 0; at < size; at += chunk_bytes) {
    const std::int64_t count = std::min(chunk_bytes, size - at);
    if (::pread(file, bytes.data() + at, static_cast<std::size_t>(count), at) != count)
      throw std::runtime_error("cannot read " + path.string());
  }
  ::close(file);
}

StateDict make_state(const DeviceMesh& mesh, std::int64_t tensors, std::int64_t elements) {
  StateDict state;
  for (std::int64_t t = 0; t < tensors; ++t) {
    TensorSpec spec{DType::f32, {mesh.size(), elements}, {Shard{0}}, {}};
    const Tensor local = Tensor::uninitialized(DType::f32, {1, elements}, "state");
    Kokkos::deep_copy(local.view<float**>(), static_cast<float>(t));
    state.tensors[fmt::format("layer{:05}.weight", t)] = DTensor::from_local(local, spec, mesh);
  }
  return state;
}

/// The plan of one rank of many, in milliseconds.
double plan_milliseconds(std::int64_t tensors, std::int64_t ranks) {
  CheckpointIndex index;
  index.world_size = ranks;
  index.meshes.push_back({"mesh", MeshSpec({{"replicate", 4}, {"dp", ranks / 4}}), {AxisRole::none, AxisRole::none}});
  for (std::int64_t t = 0; t < tensors; ++t)
    index.tensors.push_back(
        {fmt::format("layer{:06}", t), {DType::f32, {4096 + t % 7, 1024}, {Replicate{}, Shard{0}}, {0, 1}}, 0, 0});
  const double begin = MPI_Wtime();
  (void)plan_rank(index, ranks / 2);
  return (MPI_Wtime() - begin) * 1e3;
}

void run(int argc, char** argv) {
  const fs::path directory = argc > 1 ? argv[1] : ".";
  const std::int64_t total = (argc > 2 ? std::atoll(argv[2]) : 1024) << 20;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 15;
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", size}});
  const fs::path checkpoint = directory / "bench-checkpoint";
  const fs::path resharded = directory / "bench-resharded";
  const fs::path raw = directory / fmt::format("bench-raw-{}", rank);
  std::vector<std::byte> bytes(static_cast<std::size_t>(total / size), std::byte{1});
  const auto remove_checkpoint = [&] {
    if (rank == 0) fs::remove_all(checkpoint);
    MPI_Barrier(MPI_COMM_WORLD);
  };
  const auto remove_raw = [&] { fs::remove(raw); };
  for (const std::int64_t tensors : {std::int64_t{8}, std::int64_t{20000}}) {
    const StateDict state = make_state(mesh, tensors, total / size / tensors / 4);
    bench::compare(
        fmt::format("save {} MiB in {} tensors on {} ranks into {}", total >> 20, tensors, size, directory.string()),
        static_cast<double>(total), rounds,
        {{"pwrite + fsync", [&] { write_raw(raw, bytes, Pace::plain); }, remove_raw},
         {"pwrite + fsync, paced", [&] { write_raw(raw, bytes, Pace::paced); }, remove_raw},
         {"fsdp2::save", [&] { save(checkpoint, state); }, remove_checkpoint},
         {"fsdp2::save, one file", [&] { save(checkpoint, state, {.ranks_per_file = FileGroups::world}); },
          remove_checkpoint},
         {"fsdp2::save, one file, mpio",
          [&] { save(checkpoint, state, {.ranks_per_file = FileGroups::world, .io = Io::mpio}); }, remove_checkpoint}});
    AsyncSaver saver;
    std::vector<std::byte> image(bytes.size());
    bench::compare(fmt::format("begin to save {} MiB in {} tensors asynchronously", total >> 20, tensors),
                   static_cast<double>(total), rounds,
                   {{"memcpy", [&] { std::memcpy(image.data(), bytes.data(), bytes.size()); }},
                    {"AsyncSaver::save", [&] { saver.save(checkpoint, state); },
                     [&] {
                       saver.wait();
                       remove_checkpoint();
                     }}});
    save(checkpoint, state);
    if (rank == 0) reshard(checkpoint, resharded, {.world_size = size + 1});
    MPI_Barrier(MPI_COMM_WORLD);
    write_raw(raw, bytes, Pace::plain);
    bench::compare(fmt::format("load {} MiB in {} tensors, cached", total >> 20, tensors), static_cast<double>(total),
                   rounds,
                   {{"pread", [&] { read_raw(raw, bytes); }},
                    {"fsdp2::load", [&] { load(checkpoint, state); }},
                    {fmt::format("fsdp2::load, of {} ranks", size + 1), [&] { load(resharded, state); }}});
    remove_checkpoint();
    if (rank == 0) fs::remove_all(resharded);
    remove_raw();
  }
  if (rank == 0)
    std::printf("plan of one rank of 16384: 2000 tensors %.2f ms, 100000 tensors %.1f ms\n",
                plan_milliseconds(2000, 16384), plan_milliseconds(100000, 16384));
  mesh.close();
}

}  // namespace
}  // namespace fsdp2

int main(int argc, char** argv) {
  return fsdp2::bench::run_main(argc, argv, fsdp2::run);
}
