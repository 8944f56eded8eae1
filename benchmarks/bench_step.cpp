// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// A training step of example 02 beside its parts, each run on its own: what sharding adds to a step that computes.
// Usage: mpirun -n 2 bench_step [WIDTH [LAYERS [ROUNDS]]]: by default 128, 2 and 15, the example's model.

#include <fmt/format.h>
#include <mpi.h>

#include <cstdlib>
#include <fsdp2/fsdp2.hpp>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "support/compare.hpp"
#include "support/gpt.hpp"
#include "support/main.hpp"
#include "support/text.hpp"

namespace fsdp2 {
namespace {

constexpr std::int64_t samples = 8;  // on each rank

/// A model with its optimizer and a batch.
struct Trainer {
  Trainer(const DeviceMesh& mesh, const examples::GptShape& shape)
      : gpt({.mesh = mesh, .gradient_divide_factor = 1.0}, shape, samples, 1),
        optimizer(gpt.model(), {.lr = 1e-4}),
        batches(make_text(), {0, samples}, shape.context, 1),
        loss(ExecutionSpace(), DType::f64, {}, "loss") {
    batches.load(ExecutionSpace(), 1);
  }

  static std::vector<std::uint8_t> make_text() {
    std::vector<std::uint8_t> text(100000);
    std::iota(text.begin(), text.end(), std::uint8_t{0});
    return text;
  }
  void compute(bool reduces) {
    gpt.forward_backward(ExecutionSpace(), batches.inputs({0, samples}), batches.targets({0, samples}), 1e-3,
                         loss.view<double>(), reduces);
  }
  void update() {
    clip_grad_norm(gpt.model(), 1.0);
    optimizer.step();
  }
  void step() {
    optimizer.zero_grad();
    compute(true);
    update();
  }

  examples::Gpt gpt;
  AdamW optimizer;
  examples::Sequences batches;
  Tensor loss;
};

void run(int argc, char** argv) {
  const examples::GptShape shape{.context = 64,
                                 .width = argc > 1 ? std::atoll(argv[1]) : 128,
                                 .heads = 4,
                                 .layers = argc > 2 ? std::atoll(argv[2]) : 2};
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 15;
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  set_log_sink([](LogLevel, std::string_view) {});
  DeviceMesh mesh(MPI_COMM_WORLD, {{"dp", ranks}});
  const DeviceMesh alone;  // the same computation without sharding
  {
    Trainer sharded(mesh, shape);
    Trainer whole(alone, shape);
    sharded.step();
    whole.step();
    const auto gather = [&] {
      for (Module* module : sharded.gpt.model().modules()) {
        const Scope scope = module->unshard();
      }
    };
    const auto reduce = [&] {
      for (Module* module : sharded.gpt.model().modules()) {
        module->set_unshard_in_backward(false);
        BackwardScope scope = module->backward();
        scope.reduce();
        module->set_unshard_in_backward(true);
      }
      sharded.gpt.model().finish_backward();
    };
    const double bytes = static_cast<double>(sharded.gpt.model().memory_stats().full_bytes);
    bench::compare(fmt::format("step of {} layers of width {} on {} ranks, {:.1f} MB of parameters", shape.layers,
                               shape.width, ranks, bytes * 1e-6),
                   bytes, rounds,
                   {{"sum of parts",
                     [&] {
                       whole.optimizer.zero_grad();
                       whole.compute(true);
                       whole.gpt.model().finish_backward();
                       gather();
                       gather();
                       reduce();
                       sharded.update();
                     }},
                    {"whole step", [&] { sharded.step(); }},
                    {"step without sharding", [&] { whole.step(); }},
                    {"computation",
                     [&] {
                       whole.optimizer.zero_grad();
                       whole.compute(true);
                       whole.gpt.model().finish_backward();
                     }},
                    {"gathers, forward and backward",
                     [&] {
                       gather();
                       gather();
                     }},
                    {"reductions", reduce, [&] { sharded.optimizer.zero_grad(); }},
                    {"clip and update", [&] { sharded.update(); }}});
  }
  mesh.close();
}

}  // namespace
}  // namespace fsdp2

int main(int argc, char** argv) {
  return fsdp2::bench::run_main(argc, argv, fsdp2::run);
}
