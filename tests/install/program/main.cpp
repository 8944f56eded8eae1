// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// A program outside the tree, on the installed headers and library alone: takes one step, saves to the directory that
// is its argument, loads into a second model, and fails where that differs from the first or the checkpoint does not
// verify.

#include <mpi.h>

#include <Kokkos_Core.hpp>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fsdp2/fsdp2.hpp>

namespace {

fsdp2::Model make_model(const fsdp2::DeviceMesh& mesh, std::uint64_t seed) {
  fsdp2::Model model({.mesh = mesh, .min_shard_size = 0});
  model.add("linear", {{"weight", {7, 5}, fsdp2::init::kaiming(seed)}, {"bias", {5}, fsdp2::init::zeros()}});
  return model;
}

bool same_weights(const fsdp2::Model& a, const fsdp2::Model& b) {
  const Kokkos::HostSpace host;
  const auto x =
      Kokkos::create_mirror_view_and_copy(host, a.module("linear").param("weight").local_shard().view<float**>());
  const auto y =
      Kokkos::create_mirror_view_and_copy(host, b.module("linear").param("weight").local_shard().view<float**>());
  for (std::size_t i = 0; i < x.extent(0); ++i)
    for (std::size_t j = 0; j < x.extent(1); ++j)
      if (x(i, j) != y(i, j)) return false;
  return x.extent(0) == y.extent(0);
}

void run(const std::filesystem::path& target) {
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  fsdp2::DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", ranks}});

  fsdp2::Model model = make_model(mesh, 1);
  fsdp2::AdamW optimizer(model, {.lr = 0.1});
  fsdp2::Module& linear = model.module("linear");
  { const fsdp2::Scope forward = linear.forward(); }
  fsdp2::BackwardScope backward = linear.backward();
  Kokkos::deep_copy(backward.grad<float**>("weight").view, 1.0F);
  Kokkos::deep_copy(backward.grad<float*>("bias").view, 2.0F);
  backward.reduce();
  optimizer.step();
  fsdp2::save(target, fsdp2::state_dict(model, optimizer));

  fsdp2::Model loaded = make_model(mesh, 2);
  const fsdp2::AdamW loaded_optimizer(loaded, {.lr = 0.1});
  if (same_weights(model, loaded)) throw fsdp2::Error("two seeds gave the same weights");
  fsdp2::load(target, fsdp2::state_dict(loaded, loaded_optimizer));
  if (!same_weights(model, loaded)) throw fsdp2::Error("the loaded weights differ from the saved ones");
  if (!fsdp2::verify(target).is_valid()) throw fsdp2::Error("the checkpoint does not verify");
  if (mesh.rank() == 0) std::printf("%ssaved and loaded %s\n", fsdp2::build_info().c_str(), target.c_str());
  mesh.close();
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int status = 0;
  try {
    const Kokkos::ScopeGuard kokkos(argc, argv);
    run(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    status = 1;
  }
  MPI_Finalize();
  return status;
}
