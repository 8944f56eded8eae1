// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// Gathering the parameters of a module and reducing their gradients, beside bare MPI collectives of the same bytes.
// Usage: mpirun -n 2 bench_group [MIB [ROUNDS]]: by default 64 MiB in 1, 10, 100 and 1000 parameters, 15 rounds.

#include <fmt/format.h>
#include <mpi.h>

#include <cstdlib>
#include <cstring>
#include <fsdp2/fsdp2.hpp>
#include <utility>
#include <vector>

#include "support/compare.hpp"
#include "support/main.hpp"

namespace fsdp2 {
namespace {

void compare_group(const DeviceMesh& mesh, std::int64_t parameters, std::int64_t total, int rounds) {
  const std::int64_t ranks = mesh.size();
  constexpr std::int64_t columns = 64;
  const std::int64_t rows = total / parameters / columns / 4 / ranks * ranks;
  const std::int64_t bytes = rows * columns * 4 * parameters;
  std::vector<ParamSpec> specs;
  std::vector<std::string> names;
  for (std::int64_t p = 0; p < parameters; ++p) {
    names.push_back(fmt::format("p{}", p));
    specs.push_back({names.back(), {rows, columns}, init::ones()});
  }
  const auto make = [&](std::int64_t direct_bytes) {
    return make_module("m", specs, {.mesh = mesh, .min_shard_size = 0, .direct_bytes = direct_bytes});
  };
  set_log_sink([](LogLevel, std::string_view) {});
  const auto direct = make(0);
  const auto packed = make(std::int64_t{1} << 40);

  const auto count = static_cast<int>(bytes / ranks / 4);
  std::vector<float> whole(static_cast<std::size_t>(count) * static_cast<std::size_t>(ranks), 1);
  std::vector<float> other(whole.size(), 1);
  std::vector<float> shard(static_cast<std::size_t>(count), 1);
  const auto all_gather = [&] {
    MPI_Allgather(MPI_IN_PLACE, 0, MPI_FLOAT, whole.data(), count, MPI_FLOAT, MPI_COMM_WORLD);
  };
  const auto all_gather_apart = [&] {  // as a direct parameter is gathered: from the shards into the whole
    MPI_Allgather(shard.data(), count, MPI_FLOAT, whole.data(), count, MPI_FLOAT, MPI_COMM_WORLD);
  };
  const auto unshard = [](Module& module) { const Scope scope = module.unshard(); };
  const std::string title = fmt::format("{} parameters, {} MiB, {} ranks", parameters, total >> 20, ranks);
  const bool is_direct = rows * columns * 4 >= Config{}.direct_bytes;  // smaller ones are packed unless told otherwise
  if (is_direct)
    bench::compare("gather " + title, static_cast<double>(bytes), rounds,
                   {{"MPI_Allgather", all_gather_apart}, {"unshard, direct", [&] { unshard(*direct); }}});
  bench::compare("gather " + title, static_cast<double>(bytes), rounds,
                 {{"MPI_Allgather + 2 memcpy",
                   [&] {
                     std::memcpy(whole.data() + shard.size() * static_cast<std::size_t>(mesh.rank()), shard.data(),
                                 shard.size() * 4);
                     all_gather();
                     std::memcpy(other.data(), whole.data(), whole.size() * 4);
                   }},
                  {"unshard, packed", [&] { unshard(*packed); }}});
  const auto reduce = [&](Module& module) {
    module.set_unshard_in_backward(false);
    BackwardScope scope = module.backward();
    for (const std::string& name : names) (void)scope.grad_tensor(name);
    scope.reduce();
    module.finish_backward();
  };
  std::vector<bench::Contender> reductions = {
      {"MPI_Reduce_scatter_block",
       [&] { MPI_Reduce_scatter_block(whole.data(), shard.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); }},
      {"reduce, packed", [&] { reduce(*packed); }, [&] { packed->zero_grad(); }}};
  if (is_direct) reductions.push_back({"reduce, direct", [&] { reduce(*direct); }, [&] { direct->zero_grad(); }});
  bench::compare("reduce " + title, static_cast<double>(bytes), rounds, std::move(reductions));
}

void run(int argc, char** argv) {
  const std::int64_t total = (argc > 1 ? std::atoll(argv[1]) : 64) << 20;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 15;
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", ranks}});
  for (const std::int64_t parameters : {1, 10, 100, 1000}) compare_group(mesh, parameters, total, rounds);
  mesh.close();
}

}  // namespace
}  // namespace fsdp2

int main(int argc, char** argv) {
  return fsdp2::bench::run_main(argc, argv, fsdp2::run);
}
