// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "comm/nccl_channel.hpp"

#include <gtest/gtest.h>
#include <mpi.h>

#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "fsdp2/error.hpp"

namespace fsdp2 {
namespace {

int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

template <class ErrorType>
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const ErrorType& error) {
    return error.what();
  }
  return "";
}

/// Numbers in the memory of the device.
class DeviceNumbers {
 public:
  explicit DeviceNumbers(const std::vector<float>& values) : count_(values.size()) {
    check_cuda(cudaMalloc(&memory_, bytes()), "cudaMalloc", "test");
    check_cuda(cudaMemcpy(memory_, values.data(), bytes(), cudaMemcpyHostToDevice), "cudaMemcpy", "test");
  }
  DeviceNumbers(const DeviceNumbers&) = delete;
  DeviceNumbers& operator=(const DeviceNumbers&) = delete;
  ~DeviceNumbers() { cudaFree(memory_); }

  float* data() const { return static_cast<float*>(memory_); }
  std::size_t bytes() const { return count_ * sizeof(float); }
  std::vector<float> values() const {
    std::vector<float> values(count_);
    check_cuda(cudaMemcpy(values.data(), memory_, bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy", "test");
    return values;
  }

 private:
  void* memory_ = nullptr;
  std::size_t count_;
};

class NcclChannelTest : public ::testing::Test {
 protected:
  NcclChannelTest() : shared(std::make_shared<HostCommunicator>(MPI_COMM_WORLD, "dp")), host(*shared) {}
  ~NcclChannelTest() override { host.close(); }

  std::shared_ptr<HostCommunicator> shared;
  HostCommunicator& host;
};

TEST_F(NcclChannelTest, WithoutDeviceItIsOneErrorOnAllRanks) {
  if (device_count() > 0) GTEST_SKIP() << "this machine has a GPU";
  const std::string message = error_of<CommError>([&] { NcclChannel(shared, 5); });
  EXPECT_NE(message.find("cudaGetDevice for group \"dp\" failed"), std::string::npos) << message;
  host.barrier();  // nobody waits for anybody
}

TEST_F(NcclChannelTest, SharedDevicesAreNamed) {
  if (device_count() == 0) GTEST_SKIP() << "needs a GPU";
  if (host.size() == 1) GTEST_SKIP() << "needs several ranks";
  check_cuda(cudaSetDevice(0), "cudaSetDevice", "test");
  const std::string message = error_of<ConfigError>([&] { NcclChannel(shared, 5); });
  EXPECT_NE(message.find("ranks 0 and 1 of group \"dp\" have the same GPU"), std::string::npos) << message;
}

TEST_F(NcclChannelTest, CollectivesOnStreams) {
  if (device_count() < host.size())
    GTEST_SKIP() << "needs " << host.size() << " GPUs, and there are " << device_count();
  check_cuda(cudaSetDevice(static_cast<int>(host.rank())), "cudaSetDevice", "test");
  NcclChannel channel(shared, 30);
  const auto ranks = static_cast<std::size_t>(host.size());
  const auto rank = static_cast<float>(host.rank());
  std::vector<float> mine(1000);
  std::iota(mine.begin(), mine.end(), 1000 * rank);
  const DeviceNumbers send(mine);
  const DeviceNumbers all(std::vector<float>(1000 * ranks));
  const DeviceNumbers sum(mine);
  channel.follow(cudaStreamLegacy);
  channel.run("test", [&](const NcclCalls& calls) {
    calls.all_gather(send.data(), all.data(), send.bytes());
    calls.all_reduce(sum.data(), 1000, ncclFloat32, ncclSum);
  });
  const CudaEvent end = channel.mark();
  while (!channel.has_happened(end)) {
  }
  std::vector<float> expected(1000 * ranks);
  std::iota(expected.begin(), expected.end(), 0.0f);
  EXPECT_EQ(all.values(), expected);
  for (std::size_t i = 0; i < 1000; ++i) {
    float total = 0;
    for (std::size_t r = 0; r < ranks; ++r) total += expected[1000 * r + i];
    EXPECT_EQ(sum.values()[i], total);
  }
  channel.close();
  EXPECT_THROW(channel.run("test", [](const NcclCalls&) {}), CommError);
}

}  // namespace
}  // namespace fsdp2
