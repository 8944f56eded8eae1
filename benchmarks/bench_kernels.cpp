// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// The library's kernels beside memcpy: of as many bytes as the kernel reads and writes, half of them read, half
// written. Usage: bench_kernels [MIB [ROUNDS]]: by default 128 MiB of f32 elements, 15 rounds.

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "support/compare.hpp"
#include "support/main.hpp"

namespace fsdp2 {
namespace {

/// What a kernel touches per element.
void compare_with_memcpy(const std::string& title, std::int64_t bytes_touched, int rounds,
                         const std::function<void()>& kernel) {
  const auto half = static_cast<std::size_t>(bytes_touched / 2);
  const Tensor from(ExecutionSpace(), DType::u8, {bytes_touched / 2}, "from");
  const Tensor to(ExecutionSpace(), DType::u8, {bytes_touched / 2}, "to");
  bench::compare(title, static_cast<double>(bytes_touched), rounds,
                 {{"memcpy", [&] { std::memcpy(to.data(), from.data(), half); }}, {"kernel", kernel}});
}

void run(int argc, char** argv) {
  const std::int64_t count = (argc > 1 ? std::atoll(argv[1]) : 128) << 18;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 15;
  const ExecutionSpace exec;
  const auto make = [&](DType dtype) {
    const Tensor tensor = Tensor::uninitialized(dtype, {count}, "operand");
    kernels::initialize(exec, tensor, init::normal(0, 1, 1), {count}, Box::whole({count}), 7);
    return tensor;
  };
  const Tensor wide = make(DType::f32);
  const Tensor other = make(DType::f32);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const Tensor narrow = make(dtype);
    compare_with_memcpy("cast f32 to " + std::string(to_string(dtype)), 6 * count, rounds,
                        [&] { kernels::cast(exec, narrow, wide); });
    compare_with_memcpy("cast " + std::string(to_string(dtype)) + " to f32", 6 * count, rounds,
                        [&] { kernels::cast(exec, wide, narrow); });
    compare_with_memcpy("add f32 gradients to " + std::string(to_string(dtype)) + " sums", 10 * count, rounds,
                        [&] { kernels::accumulate(exec, wide, narrow, 3, true); });
  }
  compare_with_memcpy("write gradients", 8 * count, rounds, [&] { kernels::accumulate(exec, wide, other, 3, false); });
  compare_with_memcpy("add to gradients", 12 * count, rounds, [&] { kernels::accumulate(exec, wide, other, 3, true); });
  {
    std::vector<kernels::Segment> segments;
    constexpr std::int64_t pieces = 1000;
    const std::int64_t bytes = 4 * count / pieces / 64 * 64;
    for (std::int64_t i = 0; i < pieces; ++i) segments.push_back({i * bytes, (pieces - 1 - i) * bytes, bytes});
    const Tensor table = kernels::make_segments(exec, segments);
    compare_with_memcpy("pack 1000 parameters", 2 * pieces * bytes, rounds,
                        [&] { kernels::copy_segments(exec, wide, other, table); });
  }
  const Tensor m(exec, DType::f32, {count}, "m");
  const Tensor v(exec, DType::f32, {count}, "v");
  const Tensor scalars = Tensor::uninitialized(DType::f64, {2}, "scalars");
  const double values[] = {1e-3, 0.5};
  kernels::copy_from_host(exec, scalars, reinterpret_cast<const std::byte*>(values));
  compare_with_memcpy("AdamW", 28 * count, rounds,
                      [&] { kernels::adamw(exec, wide, other, m, v, scalars, 0.999, 0.9, 0.999, 1e-8); });
  compare_with_memcpy("SGD with momentum", 20 * count, rounds,
                      [&] { kernels::sgd_momentum(exec, wide, other, m, 1e-9, 0.9, 0); });
  const Tensor all = kernels::make_segments(exec, {{0, 0, count}});
  const Tensor result(exec, DType::u64, {}, "result");
  compare_with_memcpy("norm of gradients", 4 * count, rounds,
                      [&] { kernels::reduce_segments(exec, result, other, all, kernels::Term::square); });
}

}  // namespace
}  // namespace fsdp2

int main(int argc, char** argv) {
  return fsdp2::bench::run_main(argc, argv, fsdp2::run);
}
