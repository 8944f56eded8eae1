// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// Trains as PyTorch's FSDP2 did: see tests/data/make_pytorch_data.py.

#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fsdp2/fsdp2.hpp"
#include "support/fsdp.hpp"
#include "support/gpt.hpp"

namespace {

using examples::Gpt;
using fsdp2::DeviceMesh;
using fsdp2::ExecutionSpace;
using fsdp2::ShardedParam;
using fsdp2::Tensor;

using Values = std::vector<float>;
/// By section and parameter, such as "gradient1" and "root.tokens".
using Sections = std::map<std::string, std::map<std::string, Values>>;

struct Recorded {
  nlohmann::json manifest;
  Sections sections;
  std::map<std::string, fsdp2::Shape> shapes;

  Recorded() {
    const std::string path = FSDP2_TEST_DATA "/pytorch_gpt";
    manifest = nlohmann::json::parse(std::ifstream(path + ".json"));
    std::ifstream data(path + ".f32", std::ios::binary);
    for (const auto& parameter : manifest.at("parameters"))
      shapes[parameter.at("name")] = parameter.at("shape").get<fsdp2::Shape>();
    for (const auto& section : manifest.at("sections"))
      for (const auto& parameter : manifest.at("parameters")) {
        const std::string name = parameter.at("name");
        Values& values = sections[section][name];
        values.resize(static_cast<std::size_t>(fsdp2::numel(shapes.at(name))));
        data.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(float)));
      }
    EXPECT_TRUE(data) << path << ".f32 is too short";
    EXPECT_EQ(data.peek(), std::ifstream::traits_type::eof());
  }

  std::int64_t steps() const { return manifest.at("steps"); }
  std::int64_t samples() const { return manifest.at("samples"); }
  examples::GptShape shape() const {
    const auto& s = manifest.at("shape");
    return {s.at("values"), s.at("context"), s.at("width"), s.at("heads"), s.at("layers")};
  }
  const Values& of(const std::string& section, std::int64_t step, const std::string& name) const {
    return sections.at(section + std::to_string(step)).at(name);
  }
};

const Recorded& recorded() {
  static const Recorded data;
  return data;
}

/// The meshes of all ranks that a model may lie on.
std::vector<std::vector<fsdp2::MeshAxis>> meshes() {
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  std::vector<std::vector<fsdp2::MeshAxis>> result = {{{"dp", ranks}}};
  if (ranks % 2 == 0) {
    result.push_back({{"replicate", 2}, {"dp", ranks / 2}});
    result.push_back({{"dp", ranks / 2}, {"tp", 2}});
  }
  return result;
}

std::vector<ShardedParam> params_of(Gpt& gpt) {
  std::vector<ShardedParam> result;
  for (fsdp2::Module* module : gpt.model().modules())
    for (const ShardedParam& param : module->params()) result.push_back(param);
  return result;
}

/// What this rank holds of a full tensor.
Values part_of(const Values& full, const fsdp2::DTensor& like) {
  const Tensor tensor = fsdp2::test::make_tensor(like.spec().shape, full);
  return fsdp2::test::to_host(
      fsdp2::DTensor::distribute(ExecutionSpace(), tensor, like.spec().placements, like.mesh(), like.spec().split_order)
          .local());
}

/// As PyTorch's did, shards all parameters, and sums gradients of a loss that is a mean over the global batch.
fsdp2::Config config(const DeviceMesh& mesh, const fsdp2::MixedPrecisionPolicy& policy = {}) {
  fsdp2::Config result{.mesh = mesh, .mp_policy = policy, .min_shard_size = 0, .gradient_divide_factor = 1.0};
  if (mesh.spec().has_axis("replicate")) result.replicate_dim_name = "replicate";
  return result;
}

class PytorchParity : public ::testing::Test {
 protected:
  static void set_parameters(Gpt& gpt, const std::string& section = "start") {
    for (ShardedParam& param : params_of(gpt)) {
      ASSERT_TRUE(param.is_sharded()) << param.key();
      const Values values = part_of(recorded().sections.at(section).at(param.key()), param.dtensor());
      param.update_local_shard(fsdp2::test::make_tensor(param.local_shape(), values));
    }
  }

  /// One step, without the update; returns the loss of the global batch.
  static double forward_backward(Gpt& gpt, const DeviceMesh& mesh, std::int64_t step) {
    const ExecutionSpace exec;
    const auto at = static_cast<std::size_t>(step - 1);
    const auto along = [&mesh](const char* axis) {
      return mesh.spec().has_axis(axis) ? mesh.coordinate()[mesh.spec().axis(axis)] : 0;
    };
    const std::int64_t dp = mesh.communicator("dp").size();
    const std::int64_t replicas = mesh.spec().has_axis("replicate") ? mesh.communicator("replicate").size() : 1;
    const fsdp2::Range own = fsdp2::chunk(recorded().samples(), replicas * dp, along("replicate") * dp + along("dp"));
    const std::int64_t context = recorded().shape().context;
    const auto own_bytes = [&](const std::string& name) {
      std::vector<std::uint8_t> result;
      for (std::int64_t sample = own.begin; sample < own.end; ++sample)
        for (const std::uint8_t byte : recorded().manifest.at(name).at(at).at(static_cast<std::size_t>(sample)))
          result.push_back(byte);
      const Kokkos::View<std::uint8_t*, Kokkos::LayoutRight, fsdp2::MemorySpace> view(name, result.size());
      Kokkos::deep_copy(
          view, Kokkos::View<std::uint8_t*, Kokkos::LayoutRight, Kokkos::HostSpace>(result.data(), result.size()));
      return view;
    };
    const auto inputs = own_bytes("inputs");
    const auto targets = own_bytes("targets");
    const examples::ByteMatrix matrix = Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, fsdp2::MemorySpace>(
        inputs.data(), static_cast<std::size_t>(own.size()), static_cast<std::size_t>(context));
    const Tensor loss(exec, fsdp2::DType::f64, {}, "loss");
    gpt.forward_backward(exec, matrix, targets, 1.0 / static_cast<double>(recorded().samples() * context),
                         loss.view<double>());
    for (const char* axis : {"dp", "replicate"})
      if (mesh.spec().has_axis(axis)) mesh.communicator(axis).all_reduce(exec, loss, fsdp2::ReduceOp::sum).wait();
    gpt.model().finish_backward();
    return fsdp2::test::to_host<double>(loss).at(0);
  }

  static void expect_close(const Tensor& found, const Values& expected, const std::string& what) {
    const Values values = fsdp2::test::to_host(found);
    ASSERT_EQ(values.size(), expected.size()) << what;
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_NEAR(values[i], expected[i], 1e-6 + 1e-5 * std::abs(expected[i])) << what << ", element " << i;
  }

  fsdp2::SgdOptions sgd() const {
    const auto& options = recorded().manifest.at("sgd");
    return {.lr = options.at("lr"), .momentum = options.at("momentum")};
  }
};

TEST_F(PytorchParity, TrainingGivesTheSameLossesGradientsAndParameters) {
  for (const auto& axes : meshes()) {
    DeviceMesh mesh(MPI_COMM_WORLD, axes);
    SCOPED_TRACE(mesh.spec().to_string());
    Gpt gpt(config(mesh), recorded().shape(), recorded().samples(), 1);
    set_parameters(gpt);
    fsdp2::Sgd optimizer(gpt.model(), sgd());
    ASSERT_EQ(recorded().steps(), 5);
    for (std::int64_t step = 1; step <= recorded().steps(); ++step) {
      optimizer.zero_grad();
      const double expected = recorded().manifest.at("losses").at(static_cast<std::size_t>(step - 1));
      EXPECT_NEAR(forward_backward(gpt, mesh, step), expected, 1e-6 + 1e-5 * expected) << "step " << step;
      const std::string when = "step " + std::to_string(step) + ", ";
      for (const ShardedParam& param : params_of(gpt))
        expect_close(param.gradient().value().local(),
                     part_of(recorded().of("gradient", step, param.key()), param.dtensor()),
                     when + "gradient of " + param.key());
      optimizer.step();
      for (const ShardedParam& param : params_of(gpt))
        expect_close(param.local_shard(), part_of(recorded().of("sgd", step, param.key()), param.dtensor()),
                     when + param.key());
    }
    mesh.close();
  }
}

TEST_F(PytorchParity, Bf16LossesAreWithinTwoPercent) {
  for (const auto& axes : meshes()) {
    DeviceMesh mesh(MPI_COMM_WORLD, axes);
    SCOPED_TRACE(mesh.spec().to_string());
    Gpt gpt(config(mesh, fsdp2::MixedPrecisionPolicy::bf16()), recorded().shape(), recorded().samples(), 1);
    set_parameters(gpt);
    fsdp2::Sgd optimizer(gpt.model(), sgd());
    for (std::int64_t step = 1; step <= recorded().steps(); ++step) {
      const auto at = static_cast<std::size_t>(step - 1);
      const double expected = recorded().manifest.at("bf16_losses").at(at);
      const double exact = recorded().manifest.at("losses").at(at);
      optimizer.zero_grad();
      const double loss = forward_backward(gpt, mesh, step);
      EXPECT_NEAR(loss, expected, 0.02 * expected) << "step " << step;
      EXPECT_GT(std::abs(loss - exact), 1e-5 * exact) << "step " << step << ": nothing was rounded to bf16";
      optimizer.step();
    }
    mesh.close();
  }
}

/// The distance from a number to the next float of larger magnitude.
float ulp_of(float value) {
  return std::nextafter(std::abs(value), std::numeric_limits<float>::infinity()) - std::abs(value);
}

TEST_F(PytorchParity, AdamWMakesTheSameOfTheSameGradients) {
  const auto& options = recorded().manifest.at("adamw");
  for (const auto& axes : meshes()) {
    DeviceMesh mesh(MPI_COMM_WORLD, axes);
    SCOPED_TRACE(mesh.spec().to_string());
    Gpt gpt(config(mesh), recorded().shape(), recorded().samples(), 1);
    set_parameters(gpt);
    fsdp2::AdamW optimizer(gpt.model(), {.lr = options.at("lr"),
                                         .beta1 = options.at("beta1"),
                                         .beta2 = options.at("beta2"),
                                         .eps = options.at("eps"),
                                         .weight_decay = options.at("weight_decay")});
    for (std::int64_t step = 1; step <= recorded().steps(); ++step) {
      // Each step from PyTorch's parameters, so that roundings add up in the moments only.
      if (step > 1) set_parameters(gpt, "adamw" + std::to_string(step - 1));
      for (ShardedParam& param : params_of(gpt)) {
        const Values gradient = part_of(recorded().of("gradient", step, param.key()), param.dtensor());
        param.set_gradient(fsdp2::test::make_tensor(param.local_shape(), gradient));
      }
      optimizer.step();
      for (const ShardedParam& param : params_of(gpt)) {
        const Values found = fsdp2::test::to_host(param.local_shard());
        const Values expected = part_of(recorded().of("adamw", step, param.key()), param.dtensor());
        ASSERT_EQ(found.size(), expected.size());
        for (std::size_t i = 0; i < found.size(); ++i)
          EXPECT_LE(std::abs(found[i] - expected[i]), 4 * ulp_of(expected[i]))
              << "step " << step << ", " << param.key() << ", element " << i << ": " << found[i] << " and "
              << expected[i];
      }
    }
    mesh.close();
  }
}

}  // namespace
