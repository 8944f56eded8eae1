// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// A byte-level language model, trained with its parameters, gradients and optimizer state sharded over MPI ranks:
//
//   mpirun -n 4 01_train_lm --steps 100 --save-every 50 --save-dir run
//   mpirun -n 3 01_train_lm --steps 100 --resume run/step-00000050
//
// The model is that of Bengio et al. (2003): the embeddings of the last bytes, side by side, pass through linear layers
// with GELU, and a last linear layer scores the next byte. Each layer is a Module: whole while it computes, sharded
// otherwise.
//
// The losses do not depend on the number of ranks, up to rounding: a batch is a function of the step alone, each rank
// takes its chunk of the samples, and gradients are summed over ranks.

#include <mpi.h>

#include <CLI/CLI.hpp>
#include <Kokkos_Core.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "fsdp2/fsdp2.hpp"
#include "support/collectively.hpp"
#include "support/layers.hpp"
#include "support/program.hpp"
#include "support/text.hpp"

namespace {

using fsdp2::BackwardScope;
using fsdp2::DeviceMesh;
using fsdp2::ExecutionSpace;
using fsdp2::Model;
using fsdp2::Module;
using fsdp2::Scope;
using fsdp2::Tensor;

constexpr std::int64_t byte_values = 256;
constexpr std::uint64_t seed = 1;
constexpr std::int64_t steps_per_line = 10;

struct Options {
  std::string text = "/usr/share/common-licenses/GPL-3";
  std::int64_t steps = 100;
  std::int64_t batch = 32;
  std::int64_t window = 32;
  std::int64_t context = 8;
  std::int64_t width = 128;
  std::int64_t layers = 2;
  double lr = 3e-3;
  std::int64_t save_every = 0;
  std::string save_dir;
  std::string resume;
  std::string csv;
};

/// Fills `o`; returns an exit status where there is nothing to train: for --help, and for bad usage, which `speaks`
/// explains.
std::optional<int> parse(int argc, char** argv, bool speaks, Options& o) {
  CLI::App app("Trains a byte-level language model, sharded over all MPI ranks.", "01_train_lm");
  app.add_option("--text", o.text, "File to learn")->type_name("FILE")->capture_default_str();
  // A product of all upper bounds still fits into 64 bits.
  const auto number = [&app](const char* name, std::int64_t& value, int least, int most, const char* help) {
    return app.add_option(name, value, help)->check(CLI::Range(least, most).description(""))->capture_default_str();
  };
  number("--steps", o.steps, 1, 1 << 30, "Last step; a resumed run begins after its checkpoint's");
  number("--batch", o.batch, 1, 1 << 16, "Samples in a step, on all ranks together");
  number("--window", o.window, 1, 1 << 12, "Bytes that a sample predicts");
  number("--context", o.context, 1, 1 << 10, "Bytes from which the next is predicted");
  number("--width", o.width, 1, 1 << 16, "Length of embeddings and hidden layers");
  number("--layers", o.layers, 2, 1 << 10, "Linear layers with GELU");
  app.add_option("--lr", o.lr, "Learning rate of AdamW")->capture_default_str();
  auto* every = number("--save-every", o.save_every, 1, 1 << 30, "Save after each so many steps")->default_str("");
  auto* dir =
      app.add_option("--save-dir", o.save_dir, "Folder of the checkpoints, step-00000040 and so on")->type_name("DIR");
  every->needs(dir);
  dir->needs(every);
  app.add_option("--resume", o.resume, "Checkpoint to go on from, saved by any number of ranks")->type_name("DIR");
  app.add_option("--csv", o.csv, "Write each step's loss to this file")->type_name("FILE");
  try {
    app.parse(argc, argv);
    if (!std::isfinite(o.lr) || o.lr <= 0) throw CLI::ValidationError("--lr", "Value is not a positive number");
  } catch (const CLI::ParseError& error) {
    if (speaks) app.exit(error);
    return error.get_exit_code() == 0 ? 0 : 2;
  }
  return std::nullopt;
}

class Network {
 public:
  /// For `rows` predictions at a time on this rank.
  Network(const DeviceMesh& mesh, const Options& o, std::int64_t rows)
      // The loss is a mean over the global batch already: gradients are summed over ranks, not averaged.
      : model_({.mesh = mesh, .gradient_divide_factor = 1.0}), logits_(matrix("logits", rows, byte_values)) {
    embedding_ = &model_.add("embedding", {{"table", {byte_values, o.width}, fsdp2::init::normal(0, 1, seed)}});
    std::int64_t inputs = o.context * o.width;
    for (std::int64_t i = 0; i < o.layers; ++i) {
      x_.push_back(matrix("x", rows, inputs));
      dx_.push_back(matrix("dx", rows, inputs));
      z_.push_back(matrix("z", rows, o.width));
      hidden_.push_back(&model_.add(
          "hidden" + std::to_string(i),
          {{"weight", {o.width, inputs}, fsdp2::init::kaiming(seed)}, {"bias", {o.width}, fsdp2::init::zeros()}}));
      inputs = o.width;
    }
    x_.push_back(matrix("x", rows, inputs));
    dx_.push_back(matrix("dx", rows, inputs));
    head_ = &model_.add("head", {{"weight", {byte_values, inputs}, fsdp2::init::normal(0, 0.02, seed)},
                                 {"bias", {byte_values}, fsdp2::init::zeros()}});
  }

  Model& model() { return model_; }
  examples::Matrix logits() const { return logits_; }

  /// Computes the logits. A scope gathers a module's parameters, and lets go of them at its end.
  void forward(const ExecutionSpace& exec, const examples::ByteMatrix& bytes) {
    {
      const Scope w = embedding_->forward(exec);
      examples::embed(exec, bytes, w.view<float**>("table"), x_[0]);
    }
    for (std::size_t i = 0; i < hidden_.size(); ++i) {
      const Scope w = hidden_[i]->forward(exec);
      examples::linear(exec, x_[i], w.view<float**>("weight"), w.view<float*>("bias"), z_[i]);
      examples::gelu(exec, z_[i], x_[i + 1]);
    }
    const Scope w = head_->forward(exec);
    examples::linear(exec, x_.back(), w.view<float**>("weight"), w.view<float*>("bias"), logits_);
  }

  /// Takes the gradient from where the logits were, back through the layers. reduce() starts summing a module's
  /// gradients over the ranks while the next module computes.
  void backward(const ExecutionSpace& exec, const examples::ByteMatrix& bytes) {
    {
      BackwardScope w = head_->backward(exec);
      examples::linear_backward(exec, x_.back(), w.view<float**>("weight"), logits_, w.grad<float**>("weight"),
                                w.grad<float*>("bias"), dx_.back());
      w.reduce();
    }
    for (std::size_t i = hidden_.size(); i-- > 0;) {
      BackwardScope w = hidden_[i]->backward(exec);
      examples::gelu_backward(exec, z_[i], dx_[i + 1]);
      examples::linear_backward(exec, x_[i], w.view<float**>("weight"), dx_[i + 1], w.grad<float**>("weight"),
                                w.grad<float*>("bias"), dx_[i]);
      w.reduce();
    }
    BackwardScope w = embedding_->backward(exec);
    examples::embed_backward(exec, bytes, dx_[0], w.grad<float**>("table"));
    w.reduce();
  }

 private:
  using Activations = Kokkos::View<float**, Kokkos::LayoutRight, fsdp2::MemorySpace>;
  static Activations matrix(const std::string& label, std::int64_t rows, std::int64_t columns) {
    return Activations(label, static_cast<std::size_t>(rows), static_cast<std::size_t>(columns));
  }

  Model model_;
  Module* embedding_ = nullptr;
  std::vector<Module*> hidden_;
  Module* head_ = nullptr;
  std::vector<Activations> x_;   // inputs of the hidden layers, and of the head
  std::vector<Activations> dx_;  // their gradients
  std::vector<Activations> z_;   // of the hidden layers, before GELU
  Activations logits_;
};

/// What a resumed run must have in common with the run that saved.
nlohmann::json hyperparameters(const Options& o) {
  return {{"context", o.context}, {"width", o.width}, {"layers", o.layers}};
}

/// Throws where the checkpoint to resume was trained with other hyperparameters.
void check_hyperparameters(const Options& o) {
  const nlohmann::json saved = nlohmann::json::parse(fsdp2::read_index(o.resume).metadata, nullptr, false);
  const nlohmann::json own = hyperparameters(o);
  for (const auto& [name, value] : own.items()) {
    const std::string flag = "--" + name;
    if (!saved.is_object() || !saved.contains(name))
      throw fsdp2::Error("checkpoint " + o.resume + " does not record " + flag + ": this example did not save it");
    if (saved[name] != value)
      throw fsdp2::Error("checkpoint " + o.resume + " was trained with " + flag + " " + saved[name].dump() +
                         ", this run has " + value.dump());
  }
}

std::vector<fsdp2::MeshAxis> mesh_axes(const Options& /*options*/, std::int64_t ranks) {
  return {{"dp", ranks}};
}

/// Collective over `comm`, which is that of the mesh.
void train(MPI_Comm comm, const DeviceMesh& mesh, const Options& o) {
  const bool speaks = mesh.rank() == 0;
  const ExecutionSpace exec;

  std::vector<std::uint8_t> text;
  examples::collectively(comm, [&] { text = examples::read_text(o.text, o.window + o.context); });
  std::ofstream csv;
  examples::collectively(comm, [&] {
    if (!speaks || o.csv.empty()) return;
    csv.open(o.csv);
    csv << "step,loss\n" << std::setprecision(17) << std::flush;
    if (!csv) throw fsdp2::Error("cannot write --csv \"" + o.csv + "\"");
  });

  examples::Batches batches(std::move(text), fsdp2::chunk(o.batch, mesh.size(), mesh.rank()), o.window, o.context);
  Network network(mesh, o, batches.rows());
  fsdp2::AdamW optimizer(network.model(), {.lr = o.lr});

  std::int64_t step = 0;
  if (!o.resume.empty()) {
    examples::collectively(comm, [&] { check_hyperparameters(o); });
    step = fsdp2::load(o.resume, state_dict(network.model(), optimizer)).step;
    if (speaks) std::printf("resumed %s at step %lld\n", o.resume.c_str(), static_cast<long long>(step));
  }

  std::optional<fsdp2::CheckpointManager> checkpoints;
  if (o.save_every > 0) checkpoints.emplace(o.save_dir, mesh);

  const std::int64_t predictions = o.batch * o.window;
  const Tensor loss_sum(exec, fsdp2::DType::f64, {}, "loss");
  std::int64_t last_printed = step;
  auto last_time = std::chrono::steady_clock::now();
  while (step < o.steps) {
    ++step;
    batches.load(exec, step);
    optimizer.zero_grad(exec);
    network.forward(exec, batches.inputs());
    examples::cross_entropy(exec, network.logits(), batches.targets(), 1.0 / static_cast<double>(predictions),
                            loss_sum.view<double>());
    network.backward(exec, batches.inputs());
    optimizer.step(exec);

    mesh.communicator("dp").all_reduce(exec, loss_sum, fsdp2::ReduceOp::sum).wait();
    double loss = 0;
    Kokkos::deep_copy(exec, loss, loss_sum.view<double>());
    exec.fence();
    if (speaks && !o.csv.empty()) csv << step << ',' << loss << std::endl;
    if (speaks && (step == 1 || step % steps_per_line == 0 || step == o.steps)) {
      const auto now = std::chrono::steady_clock::now();
      const double seconds = std::chrono::duration<double>(now - last_time).count();
      std::printf("step %6lld  loss %.4f  %.0f tokens/s\n", static_cast<long long>(step), loss,
                  static_cast<double>(predictions * (step - last_printed)) / seconds);
      std::fflush(stdout);
      last_printed = step;
      last_time = now;
    }

    if (o.save_every > 0 && step % o.save_every == 0) {
      const auto begin = std::chrono::steady_clock::now();
      checkpoints->save(step, state_dict(network.model(), optimizer), {.metadata = hyperparameters(o).dump()});
      if (speaks) std::printf("saved %s\n", checkpoints->path_of(step).c_str());
      last_time += std::chrono::steady_clock::now() - begin;
    }
  }
  examples::collectively(comm, [&] {
    if (!csv) throw fsdp2::Error("cannot write --csv \"" + o.csv + "\"");
  });
}

}  // namespace

int main(int argc, char** argv) {
  return examples::Program<Options>{"01_train_lm", parse, mesh_axes, train}.run(argc, argv);
}
