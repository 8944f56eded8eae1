// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Helpers of the tests of the FSDP runtime: tensors with known values, in and out of device memory.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fsdp2/model.hpp"
#include "kernels.hpp"

namespace fsdp2::test {

template <class T = float>
std::vector<T> to_host(const Tensor& tensor) {
  std::vector<T> values(static_cast<std::size_t>(tensor.numel()));
  EXPECT_EQ(tensor.dtype(), dtype_of<T>);
  kernels::copy_to_host(ExecutionSpace(), reinterpret_cast<std::byte*>(values.data()), tensor);
  return values;
}

template <class T>
void fill(const Tensor& tensor, const std::vector<T>& values) {
  ASSERT_EQ(tensor.numel(), static_cast<std::int64_t>(values.size()));
  kernels::copy_from_host(ExecutionSpace(), tensor, reinterpret_cast<const std::byte*>(values.data()));
}

inline Tensor make_tensor(const Shape& shape, const std::vector<float>& values) {
  const Tensor tensor = Tensor::uninitialized(DType::f32, shape, "fsdp2::test");
  fill(tensor, values);
  return tensor;
}

/// Values that tell their place: start + i·step at row-major index i.
inline std::vector<float> ramp(const Shape& shape, float start = 0, float step = 1) {
  std::vector<float> values(static_cast<std::size_t>(numel(shape)));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = start + step * static_cast<float>(i);
  return values;
}

inline Tensor ramp_tensor(const Shape& shape, float start = 0, float step = 1) {
  return make_tensor(shape, ramp(shape, start, step));
}

/// The rows of a full tensor that one of `ranks` ranks holds, or all of it.
inline std::vector<float> part_of(const std::vector<float>& full, const ShardedParam& param, std::int64_t ranks,
                                  std::int64_t rank) {
  if (!param.is_sharded() || full.empty()) return full;
  const Range rows = chunk(param.full_shape()[0], ranks, rank);
  const std::int64_t row = numel(param.full_shape()) / param.full_shape()[0];
  return {full.begin() + rows.begin * row, full.begin() + rows.end * row};
}

/// Writes a lent gradient as its contract demands.
inline void write(const LentTensor& lent, std::vector<float> values) {
  if (lent.beta != 0) {
    const std::vector<float> old = to_host(lent.tensor);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] += lent.beta * old[i];
  }
  fill(lent.tensor, values);
}

/// A forward that looks at nothing.
inline void run_forward(Module& module) {
  const Scope scope = module.forward();
}

/// The message of the error that `call` throws; fails the test, and gives "", where it throws none or another type.
template <class Exception, class Call>
std::string message_of(Call&& call) {
  try {
    std::forward<Call>(call)();
  } catch (const Exception& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return {};
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// A mesh of all ranks.
class OnMesh : public ::testing::Test {
 protected:
  void SetUp() override {
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    mesh_ = DeviceMesh(MPI_COMM_WORLD, {{"dp", size}});
    ranks_ = mesh_.size();
    rank_ = mesh_.rank();
  }
  void TearDown() override { mesh_.close(); }

  DeviceMesh mesh_;
  std::int64_t ranks_ = 1;
  std::int64_t rank_ = 0;
};

/// Events of a model as "kind module" texts.
class Trace {
 public:
  explicit Trace(Model& model) {
    model.set_trace([this](const TraceEvent& event) {
      events_.push_back(fmt::format("{}{}{}", to_string(event.kind), event.module.empty() ? "" : " ", event.module));
    });
  }
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// What was added since the last call.
  std::vector<std::string> take() { return std::exchange(events_, {}); }

 private:
  std::vector<std::string> events_;
};

}  // namespace fsdp2::test
