// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// The runtime against one process that has the whole model: every factorisation of the world into replicas and shards,
// dtypes, ways of accumulation and divide factors. The sums are of small whole numbers, so results are compared
// bitwise; one test has numbers that round, and holds the bound.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "fsdp2/error.hpp"
#include "fsdp2/gradients.hpp"
#include "fsdp2/model.hpp"
#include "fsdp2/optimizer.hpp"
#include "fsdp2/redistribute.hpp"
#include "support/fsdp.hpp"
#include "support/mpi_calls.hpp"

namespace fsdp2::test {
namespace {

const std::vector<Shape> shapes = {{}, {0}, {1}, {7}, {13, 2}, {5, 2, 3}, {3, 0, 2}, {64, 5}};

/// In which dtypes a model works.
struct Numbers {
  DType dtype = DType::f32;
  MixedPrecisionPolicy policy = {};
};
const std::vector<Numbers> all_numbers = {{DType::f64},
                                          {DType::f32},
                                          {DType::bf16},
                                          {DType::f16},
                                          {DType::f32, MixedPrecisionPolicy::bf16()},
                                          {DType::f32, {.param_dtype = DType::bf16, .reduce_dtype = DType::bf16}},
                                          {DType::f32, {.param_dtype = DType::f16, .reduce_dtype = DType::f16}},
                                          {DType::f32, {.reduce_dtype = DType::bf16, .keep_low_precision_grads = true}},
                                          {DType::f64, {.reduce_dtype = DType::f32}}};

enum class Accumulation { reduce, hold, no_sync, no_all_reduce, keep_unsharded };
const std::vector<Accumulation> accumulations = {Accumulation::reduce, Accumulation::hold, Accumulation::no_sync,
                                                 Accumulation::no_all_reduce, Accumulation::keep_unsharded};

std::vector<double> doubles(const Tensor& tensor) {
  const Tensor wide = Tensor::uninitialized(DType::f64, tensor.shape(), "fsdp2::test");
  kernels::cast(ExecutionSpace(), wide, tensor);
  return to_host<double>(wide);
}

void fill_doubles(const Tensor& tensor, const std::vector<double>& values) {
  const Tensor wide = Tensor::uninitialized(DType::f64, tensor.shape(), "fsdp2::test");
  fill(wide, values);
  kernels::cast(ExecutionSpace(), tensor, wide);
}

/// Of the parameter of shapes[p], on a rank, in a micro-batch.
using Gradient = std::function<std::vector<double>(std::size_t p, std::int64_t rank, int micro)>;

std::vector<double> small_numbers(std::size_t p, std::int64_t rank, int micro) {
  std::vector<double> values(static_cast<std::size_t>(numel(shapes[p])));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<double>(
        (static_cast<int>(i) * 7 + static_cast<int>(p) * 5 + static_cast<int>(rank) * 3 + micro * 2) % 9 - 4);
  return values;
}

/// Half the distance from 1 to the next number.
double unit_of(DType dtype) {
  return dtype == DType::f64 ? 0x1p-53 : dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
}

std::string name_of(std::size_t p) {
  return "p" + std::to_string(p);
}

/// A module of all shapes, of whole numbers.
Module& add_module(Model& model, DType dtype) {
  std::vector<ParamSpec> specs;
  for (std::size_t p = 0; p < shapes.size(); ++p) {
    const Tensor full = Tensor::uninitialized(dtype, shapes[p], "fsdp2::test");
    std::vector<double> values(static_cast<std::size_t>(numel(shapes[p])));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i % 64 + p);
    fill_doubles(full, values);
    specs.push_back({name_of(p), shapes[p], full});
  }
  return model.add("m", specs);
}

void add_to(const LentTensor& lent, std::vector<double> values) {
  if (lent.beta != 0) {
    const std::vector<double> old = doubles(lent.tensor);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] += old[i];
  }
  fill_doubles(lent.tensor, values);
}

/// One backward, of which `gradient` says what each parameter gets.
void backward(Module& module, const std::function<std::vector<double>(std::size_t)>& gradient, bool holds) {
  BackwardScope scope = module.backward();
  for (std::size_t p = 0; p < shapes.size(); ++p) add_to(scope.grad_tensor(name_of(p)), gradient(p));
  if (holds)
    scope.hold();
  else
    scope.reduce();
}

/// An iteration of two micro-batches.
void iterate(Model& model, Module& module, Accumulation accumulation, std::int64_t rank, const Gradient& gradient) {
  for (int micro = 0; micro < 2; ++micro) {
    const bool is_last = micro == 1;
    if (accumulation == Accumulation::no_sync) model.set_requires_gradient_sync(is_last);
    if (accumulation == Accumulation::no_all_reduce) model.set_requires_all_reduce(is_last);
    if (accumulation == Accumulation::keep_unsharded) model.set_reshard_after_backward(is_last);
    run_forward(module);
    backward(
        module, [&](std::size_t p) { return gradient(p, rank, micro); },
        accumulation == Accumulation::hold && !is_last);
  }
  model.finish_backward();
}

/// What one process with the whole model does with the sums over ranks.
class Serial {
 public:
  Serial(const Numbers& numbers, double factor, std::int64_t ranks)
      : model_({.mesh = mesh_, .mp_policy = numbers.policy, .gradient_divide_factor = factor}),
        module_(add_module(model_, numbers.dtype)),
        ranks_(ranks) {}

  void iterate(Accumulation accumulation) {
    const auto sum = [&](std::size_t p, std::int64_t, int micro) {
      std::vector<double> total(static_cast<std::size_t>(numel(shapes[p])), 0);
      for (std::int64_t rank = 0; rank < ranks_; ++rank) {
        const std::vector<double> part = small_numbers(p, rank, micro);
        for (std::size_t i = 0; i < total.size(); ++i) total[i] += part[i];
      }
      return total;
    };
    // Where nothing is reduced between micro-batches, there is one division.
    const bool is_once = accumulation == Accumulation::hold || accumulation == Accumulation::no_sync ||
                         accumulation == Accumulation::no_all_reduce;
    test::iterate(model_, module_, is_once ? Accumulation::hold : Accumulation::reduce, 0, sum);
  }
  Model& model() { return model_; }
  Module& module() { return module_; }

 private:
  DeviceMesh mesh_;
  Model model_;
  Module& module_;
  std::int64_t ranks_;
};

/// The rows of values that a rank has of a parameter.
std::vector<double> local(const ShardedParam& param, const std::vector<double>& full) {
  const DTensor& tensor = param.dtensor();
  std::vector<double> part(static_cast<std::size_t>(tensor.box().numel()));
  for (RunCursor cursor = runs_of(tensor.spec().shape, tensor.box()); !cursor.is_done() && !part.empty(); cursor.next())
    std::copy_n(full.begin() + cursor.run().from, cursor.run().count, part.begin() + cursor.run().to);
  return part;
}

class OracleTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    ranks_ = size;
    for (std::int64_t replicas = 1; replicas <= ranks_; ++replicas)
      if (ranks_ % replicas == 0)
        meshes_.emplace_back(MPI_COMM_WORLD, std::vector<MeshAxis>{{"replicate", replicas}, {"dp", ranks_ / replicas}});
  }
  void TearDown() override {
    for (DeviceMesh& mesh : meshes_) mesh.close();
  }

  /// Two of four settings of packing and replication, which change with the case.
  static Config config(const DeviceMesh& mesh, const Numbers& numbers, int which) {
    Config result{.mesh = mesh, .replicate_dim_name = "replicate", .mp_policy = numbers.policy};
    result.min_shard_size = which % 2 == 0 ? 0 : 10;
    result.direct_bytes = which % 3 == 0 ? 0 : which % 3 == 1 ? 150 : 1 << 20;
    return result;
  }
  std::int64_t ranks_ = 1;
  std::vector<DeviceMesh> meshes_;
};

TEST_F(OracleTest, GatheredParametersAreTheWholeOnes) {
  int which = 0;
  for (const DeviceMesh& mesh : meshes_)
    for (const Numbers& numbers : all_numbers)
      for (int setting = 0; setting < 6; ++setting) {
        Model model(config(mesh, numbers, which++));
        Module& module = add_module(model, numbers.dtype);
        const DeviceMesh alone;
        Model serial({.mesh = alone, .mp_policy = numbers.policy});
        Module& whole = add_module(serial, numbers.dtype);
        const Scope scope = module.forward();
        const Scope expected = whole.forward();
        for (std::size_t p = 0; p < shapes.size(); ++p) {
          EXPECT_EQ(scope.tensor(name_of(p)).dtype(), numbers.policy.param_dtype.value_or(numbers.dtype));
          EXPECT_EQ(doubles(scope.tensor(name_of(p))), doubles(expected.tensor(name_of(p)))) << to_string(shapes[p]);
          EXPECT_EQ(doubles(full_tensor(module.param(name_of(p)).dtensor())),
                    doubles(whole.param(name_of(p)).local_shard()));
        }
      }
}

TEST_F(OracleTest, GradientsNormsAndUpdatesAreTheSerialOnes) {
  const std::vector<double> factors = {0, 1, static_cast<double>(ranks_), 300};  // 0: the default
  int which = 0;
  int exponent = 0;
  for (const Numbers& numbers : all_numbers)
    for (const Accumulation accumulation : accumulations)
      for (const double factor : factors) {
        const double divisor = factor == 0 ? static_cast<double>(ranks_) : factor;
        // Two quotients that round are not the quotient of the sum.
        const bool divides_once = accumulation != Accumulation::reduce && accumulation != Accumulation::keep_unsharded;
        const bool is_exact = divides_once || std::frexp(divisor, &exponent) == 0.5;
        const DType kept = numbers.policy.keep_low_precision_grads ? numbers.policy.reduce_dtype.value_or(numbers.dtype)
                                                                   : numbers.dtype;
        const double unit = unit_of(kept);
        Serial serial(numbers, divisor, ranks_);
        serial.iterate(accumulation);
        std::map<std::string, std::vector<double>> gradients;
        for (const ShardedParam& param : serial.module().params())
          gradients[param.name()] = doubles(param.gradient()->local());
        std::map<double, double> norms;
        for (const double p : {1.0, 2.0, std::numeric_limits<double>::infinity()})
          norms[p] = clip_grad_norm(serial.model(), 1e300, {.norm_type = p});
        AdamW serial_optimizer(serial.model(), {.lr = 0.5});
        for (int step = 0; step < 3; ++step) serial_optimizer.step();

        for (const DeviceMesh& mesh : meshes_) {
          SCOPED_TRACE(fmt::format("{} {} accumulation {} factor {} case {}", mesh.spec().to_string(),
                                   to_string(numbers.dtype), static_cast<int>(accumulation), factor, which));
          Config own = config(mesh, numbers, which++);
          if (factor != 0) own.gradient_divide_factor = factor;
          Model model(own);
          Module& module = add_module(model, numbers.dtype);
          iterate(model, module, accumulation, mesh.rank(), small_numbers);
          for (const ShardedParam& param : module.params()) {
            ASSERT_TRUE(param.gradient().has_value());
            const std::vector<double> found = doubles(param.gradient()->local());
            const std::vector<double> expected = local(param, gradients[param.name()]);
            if (is_exact) {
              ASSERT_EQ(found, expected) << param.name();
            } else {  // |sums| ≤ 2 · 4 · ranks
              for (std::size_t i = 0; i < found.size(); ++i)
                ASSERT_NEAR(found[i], expected[i], 4 * unit * 8 * static_cast<double>(ranks_) / divisor)
                    << param.name();
            }
          }
          if (!is_exact) continue;
          for (const auto& [p, norm] : norms)
            EXPECT_NEAR(clip_grad_norm(model, 1e300, {.norm_type = p}), norm, 1e-12 * norm);
          AdamW optimizer(model, {.lr = 0.5});
          for (int step = 0; step < 3; ++step) optimizer.step();
          for (const ShardedParam& param : module.params())
            ASSERT_EQ(doubles(param.local_shard()),
                      local(param, doubles(serial.module().param(param.name()).local_shard())))
                << param.name();
          EXPECT_EQ(model.memory_stats().unsharded_bytes, 0);
          EXPECT_FALSE(module.param(name_of(4)).is_sharded() && module.param(name_of(4)).is_gathered());
        }
      }
}

/// |g − g_serial| ≤ (W−1)·u·Σ|g_r| plus roundings of the result.
TEST_F(OracleTest, SumsThatRoundStayWithinTheBound) {
  const auto thirds = [](std::size_t p, std::int64_t rank, int micro) {
    std::vector<double> values = small_numbers(p, rank, micro);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = (values[i] + 0.37) / (3 + static_cast<double>(rank));
    return values;
  };
  int which = 0;
  for (const Numbers& numbers : all_numbers) {
    const DType reduce = numbers.policy.reduce_dtype.value_or(numbers.dtype);
    const double u = unit_of(reduce);
    const double own = unit_of(numbers.dtype);
    for (const DeviceMesh& mesh : meshes_) {
      Model model(config(mesh, numbers, which++));
      Module& module = add_module(model, numbers.dtype);
      run_forward(module);
      backward(
          module, [&](std::size_t p) { return thirds(p, mesh.rank(), 0); }, false);
      model.finish_backward();
      for (std::size_t p = 0; p < shapes.size(); ++p) {
        const ShardedParam param = module.param(name_of(p));
        std::vector<double> mean(static_cast<std::size_t>(numel(shapes[p])), 0);
        std::vector<double> magnitude(mean.size(), 0);
        for (std::int64_t rank = 0; rank < ranks_; ++rank) {
          const std::vector<double> part = thirds(p, rank, 0);
          for (std::size_t i = 0; i < mean.size(); ++i) {
            mean[i] += part[i] / static_cast<double>(ranks_);
            magnitude[i] += std::abs(part[i]) / static_cast<double>(ranks_);
          }
        }
        const std::vector<double> found = doubles(param.gradient()->local());
        const std::vector<double> expected = local(param, mean);
        const std::vector<double> size = local(param, magnitude);
        // Each contribution is rounded when it is written, and again where replicas are added up.
        for (std::size_t i = 0; i < found.size(); ++i)
          EXPECT_LE(std::abs(found[i] - expected[i]),
                    (static_cast<double>(ranks_ - 1) * u + 3 * u + 2 * own) * size[i]);
      }
    }
  }
}

TEST_F(OracleTest, CollectivesAreAsManyAsPlannedAndTheSameOnAllRanks) {
  for (const DeviceMesh& mesh : meshes_) {
    const std::int64_t shards = mesh.spec().axes()[1].size;
    const std::int64_t replicas = mesh.spec().axes()[0].size;
    Config own = config(mesh, {}, 0);
    own.direct_bytes = 1000;
    Model model(own);
    Module& module = add_module(model, DType::f32);  // shapes[7] is direct, the scalar replicated, the rest packed
    const auto count = [](const std::vector<std::string>& calls, const std::string& name) {
      return std::count(calls.begin(), calls.end(), name);
    };
    for (int step = 0; step < 2; ++step) {
      const std::vector<std::string> forward = calls_of([&] { run_forward(module); });
      EXPECT_EQ(count(forward, "Iallgather"), shards > 1 ? 2 : 0);
      EXPECT_EQ(forward.size(), static_cast<std::size_t>(shards > 1 ? 2 : 0));
      const std::vector<std::string> reduced = calls_of([&] {
        // A rank that has nothing to add sends the same.
        BackwardScope scope = module.backward();
        if (mesh.rank() == 0) add_to(scope.grad_tensor("p4"), small_numbers(4, 0, 0));
        scope.reduce();
      });
      EXPECT_EQ(count(reduced, "Iallgather"), shards > 1 ? 2 : 0);
      EXPECT_EQ(count(reduced, "Ialltoallv"), shards > 1 ? 2 : 0);
      EXPECT_EQ(reduced.size(), static_cast<std::size_t>(shards > 1 ? 4 : 0));
      const std::vector<std::string> finished = calls_of([&] { model.finish_backward(); });
      // All-reduces, each an all-to-all and an all-gather: of the shards' gradients and of the bucket over the
      // replicas, of the bucket over the shards.
      const int all_reduces = (replicas > 1 ? 2 : 0) + (shards > 1 ? 1 : 0);
      EXPECT_EQ(count(finished, "Ialltoallv"), all_reduces);
      EXPECT_EQ(count(finished, "Iallgather"), all_reduces);
      EXPECT_EQ(finished.size(), static_cast<std::size_t>(2 * all_reduces));
      model.zero_grad();
    }
  }
}

TEST_F(OracleTest, NotANumberOnOneRankSkipsTheStepOnAll) {
  for (const DeviceMesh& mesh : meshes_) {
    Model model(config(mesh, {}, 1));
    Module& module = add_module(model, DType::f32);
    AdamW optimizer(model, {.lr = 0.5});
    GradScaler scaler({.init_scale = 4});
    for (int step = 0; step < 2; ++step) {
      std::vector<std::vector<double>> before;
      for (const ShardedParam& param : module.params()) before.push_back(doubles(param.local_shard()));
      optimizer.zero_grad();
      backward(
          module,
          [&](std::size_t p) {
            std::vector<double> values = small_numbers(p, mesh.rank(), 0);
            if (p == 5 && step == 1 && mesh.rank() == ranks_ - 1) values[3] = std::nan("");
            return values;
          },
          false);
      const bool has_stepped = scaler.step(optimizer);
      scaler.update();
      EXPECT_EQ(has_stepped, step == 0);
      bool is_unchanged = true;
      for (std::size_t p = 0; p < before.size(); ++p)
        is_unchanged = is_unchanged && doubles(module.params()[p].local_shard()) == before[p];
      EXPECT_TRUE(step == 0 || is_unchanged);
      EXPECT_EQ(scaler.scale(), step == 0 ? 4 : 2);
    }
  }
}

TEST_F(OracleTest, AfterAnExceptionAndResetTrainingGoesOnAsIfNothingHadHappened) {
  for (const DeviceMesh& mesh : meshes_) {
    const auto train = [&](bool fails) {
      Model model(config(mesh, {}, 2));
      std::vector<Module*> layers;
      for (int i = 0; i < 4; ++i)
        layers.push_back(&model.add(fmt::format("layer{}", i),
                                    {{"w", {11, 4}, init::uniform(-1, 1, 5)}, {"b", {3}, init::zeros()}}));
      AdamW optimizer(model, {.lr = 0.1});
      const auto iteration = [&](bool throws) {
        optimizer.zero_grad();
        for (Module* layer : layers) run_forward(*layer);
        for (std::size_t i = 4; i-- > 0;) {
          BackwardScope scope = layers[i]->backward();
          write(scope.grad_tensor("w"), std::vector<float>(44, static_cast<float>(mesh.rank() + 1)));
          write(scope.grad_tensor("b"), std::vector<float>(3, 1));
          if (throws && i == 1) throw std::runtime_error("in layer 3 from the end");
          scope.reduce();
        }
        optimizer.step();
      };
      iteration(false);
      if (fails) {
        EXPECT_THROW(iteration(true), std::runtime_error);
        EXPECT_THROW(optimizer.step(), Error);
        model.reset();
        EXPECT_EQ(model.memory_stats().unsharded_bytes, 0);
        EXPECT_EQ(model.memory_stats().reduction_bytes, model.plan_memory().replicated_gradients);
      }
      iteration(false);
      std::vector<double> all;
      for (Module* layer : layers)
        for (const ShardedParam& param : layer->params())
          for (const double value : doubles(param.local_shard())) all.push_back(value);
      return all;
    };
    EXPECT_EQ(train(true), train(false));
  }
}

}  // namespace
}  // namespace fsdp2::test
