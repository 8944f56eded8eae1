// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// A decoder-only transformer that learns the bytes of a text, on a mesh of ranks:
//
//   mpirun -n 2 02_train_gpt                              shards over both ranks
//   mpirun -n 8 02_train_gpt --replicate 2 --tp 2 --bf16  2 replicas of 2 shards, each cut in 2 by tensor parallelism
//   mpirun -n 3 02_train_gpt --steps 200 --save run; mpirun -n 2 02_train_gpt --load run
//
// A batch is a function of seed and step alone, and is shared out among the ranks and the parts that --accumulate asks
// for: in f32 the losses are the same, up to rounding, for every mesh. 02_train_gpt.py does the same with PyTorch.

#include <mpi.h>

#include <CLI/CLI.hpp>
#include <Kokkos_Core.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iomanip>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "fsdp2/fsdp2.hpp"
#include "support/collectively.hpp"
#include "support/gpt.hpp"
#include "support/program.hpp"
#include "support/text.hpp"

namespace {

using fsdp2::DeviceMesh;
using fsdp2::ExecutionSpace;
using fsdp2::Tensor;

struct Options {
  std::string text = "/usr/share/common-licenses/GPL-3";
  std::int64_t dp = 0;
  std::int64_t replicate = 1;
  std::int64_t tp = 1;
  bool bf16 = false;
  std::int64_t accumulate = 1;
  double clip = 1;
  std::int64_t steps = 600;
  std::int64_t batch = 16;
  std::int64_t layers = 2;
  std::int64_t width = 128;
  std::int64_t heads = 4;
  std::int64_t context = 64;
  double lr = 1e-3;
  std::string optimizer = "adamw";
  std::uint64_t seed = 1;
  std::string save;
  std::string load;
  std::string csv;
};

/// Fills `o`; returns an exit status where there is nothing to train: for --help, and for bad usage, which `speaks`
/// explains.
std::optional<int> parse(int argc, char** argv, bool speaks, Options& o) {
  CLI::App app("Trains a transformer on the bytes of a text, sharded over all MPI ranks.", "02_train_gpt");
  app.add_option("--text", o.text, "File to learn")->type_name("FILE")->capture_default_str();
  const auto number = [&app](const char* name, std::int64_t& value, int least, int most, const char* help) {
    return app.add_option(name, value, help)->check(CLI::Range(least, most).description(""))->capture_default_str();
  };
  number("--dp", o.dp, 1, 1 << 20, "Ranks over which parameters are sharded; default: all that the others leave")
      ->default_str("");
  number("--replicate", o.replicate, 1, 1 << 20, "Replicas of these shards");
  number("--tp", o.tp, 1, 1 << 20, "Ranks that share a layer's work on the same samples");
  app.add_flag("--bf16", o.bf16, "Gather parameters in bf16; reduce gradients in f32");
  number("--accumulate", o.accumulate, 1, 1 << 16, "Parts of a step's batch, one after another");
  app.add_option("--clip", o.clip, "Largest norm of the gradient; 0: any")->capture_default_str();
  number("--steps", o.steps, 0, 1 << 30, "Last step; a loaded run begins after its checkpoint's");
  number("--batch", o.batch, 1, 1 << 16, "Samples in a step, on all ranks together");
  number("--layers", o.layers, 1, 1 << 10, "Transformer blocks");
  number("--width", o.width, 1, 1 << 14, "Length of embeddings");
  number("--heads", o.heads, 1, 1 << 10, "Attention heads; divide the width");
  number("--context", o.context, 1, 1 << 14, "Bytes of a sample");
  app.add_option("--lr", o.lr, "Learning rate")->capture_default_str();
  app.add_option("--optimizer", o.optimizer, "adamw, or sgd with momentum 0.9")
      ->check(CLI::IsMember({"adamw", "sgd"}).description(""))
      ->capture_default_str();
  app.add_option("--seed", o.seed, "Of parameters and batches")->capture_default_str();
  app.add_option("--save", o.save, "Save a checkpoint after the last step")->type_name("DIR");
  app.add_option("--load", o.load, "Checkpoint to go on from, saved on any mesh")->type_name("DIR");
  app.add_option("--csv", o.csv, "Write each step's loss to this file")->type_name("FILE");
  try {
    app.parse(argc, argv);
    if (!std::isfinite(o.lr) || o.lr <= 0) throw CLI::ValidationError("--lr", "Value is not a positive number");
    if (!std::isfinite(o.clip) || o.clip < 0)
      throw CLI::ValidationError("--clip", "Value is neither a positive number nor 0");
  } catch (const CLI::ParseError& error) {
    if (speaks) app.exit(error);
    return error.get_exit_code() == 0 ? 0 : 2;
  }
  return std::nullopt;
}

std::vector<fsdp2::MeshAxis> mesh_axes(const Options& o, std::int64_t ranks) {
  const std::int64_t others = o.replicate * o.tp;
  const std::int64_t dp = o.dp == 0 ? ranks / others : o.dp;
  if (dp * others != ranks)
    throw fsdp2::Error("a mesh of --replicate " + std::to_string(o.replicate) + " x --tp " + std::to_string(o.tp) +
                       (o.dp == 0 ? "" : " x --dp " + std::to_string(o.dp)) + " does not fit " + std::to_string(ranks) +
                       " ranks: change these flags, or mpirun's -n");
  std::vector<fsdp2::MeshAxis> axes;
  if (o.replicate > 1) axes.push_back({"replicate", o.replicate});
  axes.push_back({"dp", dp});
  if (o.tp > 1) axes.push_back({"tp", o.tp});
  return axes;
}

fsdp2::Config config(const DeviceMesh& mesh, const Options& o) {
  // The loss is a mean over the global batch already: gradients are summed over ranks, not averaged.
  fsdp2::Config result{.mesh = mesh, .gradient_divide_factor = 1.0};
  if (o.replicate > 1) result.replicate_dim_name = "replicate";
  if (o.bf16) result.mp_policy = fsdp2::MixedPrecisionPolicy::bf16();
  return result;
}

std::unique_ptr<fsdp2::Optimizer> make_optimizer(const fsdp2::Model& model, const Options& o) {
  if (o.optimizer == "sgd") return std::make_unique<fsdp2::Sgd>(model, fsdp2::SgdOptions{.lr = o.lr, .momentum = 0.9});
  return std::make_unique<fsdp2::AdamW>(model, fsdp2::AdamWOptions{.lr = o.lr});
}

/// What a loaded run must have in common with the run that saved.
nlohmann::json hyperparameters(const Options& o) {
  return {
      {"context", o.context}, {"width", o.width}, {"layers", o.layers}, {"heads", o.heads}, {"optimizer", o.optimizer}};
}

/// Throws where the checkpoint to load was trained with other hyperparameters.
void check_hyperparameters(const Options& o) {
  const nlohmann::json saved = nlohmann::json::parse(fsdp2::read_index(o.load).metadata, nullptr, false);
  const nlohmann::json own = hyperparameters(o);
  for (const auto& [name, value] : own.items()) {
    const std::string flag = "--" + name;
    if (!saved.is_object() || !saved.contains(name))
      throw fsdp2::Error("checkpoint " + o.load + " does not record " + flag + ": this example did not save it");
    if (saved[name] != value)
      throw fsdp2::Error("checkpoint " + o.load + " was trained with " + flag + " " + saved[name].dump() +
                         ", this run has " + value.dump());
  }
}

/// The samples of a step that are this rank's: ranks that differ along "tp" alone have the same.
fsdp2::Range own_samples(const DeviceMesh& mesh, const Options& o) {
  const auto along = [&mesh](const char* axis) { return mesh.coordinate()[mesh.spec().axis(axis)]; };
  const std::int64_t dp = mesh.communicator("dp").size();
  const std::int64_t replica = o.replicate > 1 ? along("replicate") : 0;
  return fsdp2::chunk(o.batch, o.replicate * dp, replica * dp + along("dp"));
}

/// Collective over `comm`, which is that of the mesh.
void train(MPI_Comm comm, const DeviceMesh& mesh, const Options& o) {
  const bool speaks = mesh.rank() == 0;
  const ExecutionSpace exec;

  std::vector<std::uint8_t> text;
  examples::collectively(comm, [&] { text = examples::read_text(o.text, o.context + 1); });
  std::ofstream csv;
  examples::collectively(comm, [&] {
    if (!speaks || o.csv.empty()) return;
    csv.open(o.csv);
    csv << "step,loss\n" << std::setprecision(17) << std::flush;
    if (!csv) throw fsdp2::Error("cannot write --csv \"" + o.csv + "\"");
  });

  examples::Sequences batches(std::move(text), own_samples(mesh, o), o.context, o.seed);
  const examples::GptShape shape{.context = o.context, .width = o.width, .heads = o.heads, .layers = o.layers};
  examples::Gpt gpt(config(mesh, o), shape, fsdp2::chunk(batches.size(), o.accumulate, 0).size(), o.seed);
  const std::unique_ptr<fsdp2::Optimizer> optimizer = make_optimizer(gpt.model(), o);

  std::int64_t step = 0;
  if (!o.load.empty()) {
    examples::collectively(comm, [&] { check_hyperparameters(o); });
    step = fsdp2::load(o.load, state_dict(gpt.model(), *optimizer)).step;
    if (speaks) std::printf("loaded %s at step %lld\n", o.load.c_str(), static_cast<long long>(step));
  }

  const std::int64_t predictions = o.batch * o.context;
  const Tensor losses(exec, fsdp2::DType::f64, {o.accumulate}, "losses");
  const auto host_losses = Kokkos::create_mirror_view(losses.view<double*>());
  const std::int64_t steps_per_line = 20;
  std::int64_t last_printed = step;
  auto last_time = std::chrono::steady_clock::now();
  while (step < o.steps) {
    ++step;
    batches.load(exec, step);
    optimizer->zero_grad(exec);
    for (std::int64_t part = 0; part < o.accumulate; ++part) {
      const fsdp2::Range samples = fsdp2::chunk(batches.size(), o.accumulate, part);
      // Only the last part communicates gradients, those of all parts.
      gpt.forward_backward(exec, batches.inputs(samples), batches.targets(samples),
                           1.0 / static_cast<double>(predictions), losses.slice(part, {}).view<double>(),
                           part == o.accumulate - 1);
    }
    if (o.clip > 0) clip_grad_norm(gpt.model(), o.clip, {}, exec);
    optimizer->step(exec);

    mesh.communicator("dp").all_reduce(exec, losses, fsdp2::ReduceOp::sum).wait();
    if (o.replicate > 1) mesh.communicator("replicate").all_reduce(exec, losses, fsdp2::ReduceOp::sum).wait();
    Kokkos::deep_copy(exec, host_losses, losses.view<double*>());
    exec.fence();
    double loss = 0;
    for (std::size_t part = 0; part < host_losses.extent(0); ++part) loss += host_losses(part);
    if (speaks && !o.csv.empty()) csv << step << ',' << loss << std::endl;
    if (speaks && (step == 1 || step % steps_per_line == 0 || step == o.steps)) {
      const auto now = std::chrono::steady_clock::now();
      const double seconds = std::chrono::duration<double>(now - last_time).count();
      std::printf("step %6lld  loss %.4f  %.0f bytes/s\n", static_cast<long long>(step), loss,
                  static_cast<double>(predictions * (step - last_printed)) / seconds);
      std::fflush(stdout);
      last_printed = step;
      last_time = now;
    }
  }
  if (!o.save.empty()) {
    fsdp2::save(o.save, state_dict(gpt.model(), *optimizer), {.step = step, .metadata = hyperparameters(o).dump()});
    if (speaks) std::printf("saved %s\n", o.save.c_str());
  }
  examples::collectively(comm, [&] {
    if (!csv) throw fsdp2::Error("cannot write --csv \"" + o.csv + "\"");
  });
}

}  // namespace

int main(int argc, char** argv) {
  return examples::Program<Options>{"02_train_gpt", parse, mesh_axes, train}.run(argc, argv);
}
