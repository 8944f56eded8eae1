// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// NCCL and the CUDA runtime, for host compilers: pointers, bytes and streams. What knows tensors is in
// nccl_communicator.cpp.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "comm/host_communicator.hpp"
#include "unique_handle.hpp"

namespace fsdp2 {

/// Throws CommError with CUDA's own text unless `code` is cudaSuccess.
void check_cuda(cudaError_t code, std::string_view call, std::string_view group);

struct EventTraits {
  using Type = cudaEvent_t;
  static cudaEvent_t invalid() { return nullptr; }
  static void release(cudaEvent_t event);
};
/// A point in a stream.
using CudaEvent = UniqueHandle<EventTraits>;

struct StreamTraits {
  using Type = cudaStream_t;
  static cudaStream_t invalid() { return nullptr; }
  static void release(cudaStream_t stream);
};

/// The work of one group of NCCL calls: each returns at once, and is part of the group. Lengths are in bytes, or in
/// elements where they are reduced.
class NcclCalls {
 public:
  NcclCalls(ncclComm_t comm, cudaStream_t stream, std::string_view group)
      : comm_(comm), stream_(stream), group_(group) {}

  void all_gather(const void* send, void* receive, std::size_t bytes) const;
  void reduce_scatter(const void* send, void* receive, std::size_t count, ncclDataType_t type, ncclRedOp_t op) const;
  void all_reduce(void* buffer, std::size_t count, ncclDataType_t type, ncclRedOp_t op) const;
  void broadcast(void* buffer, std::size_t bytes, int root) const;
  void send(const void* bytes, std::size_t count, int rank) const;
  void receive(void* bytes, std::size_t count, int rank) const;

 private:
  void check(ncclResult_t result, const char* call) const;

  ncclComm_t comm_;
  cudaStream_t stream_;
  std::string_view group_;
};

/// An NCCL communicator with a stream of its own, of high priority, on the current device. NCCL does not block: every
/// call is waited for, but for no longer than the time-out. After an error the channel is aborted and dead: all later
/// calls throw the same.
class NcclChannel {
 public:
  /// Collective over `host`, the ranks of the channel. Throws CommError, and ConfigError where two ranks have one
  /// device, the same on all.
  NcclChannel(std::shared_ptr<const HostCommunicator> host, double timeout_seconds);
  NcclChannel(const NcclChannel&) = delete;
  NcclChannel& operator=(const NcclChannel&) = delete;
  /// Aborts what was not closed.
  ~NcclChannel();

  cudaStream_t stream() const { return stream_.get(); }
  bool is_dead() const { return !reason_.empty(); }

  /// Lets the channel's stream wait for all that is queued on `before`.
  void follow(cudaStream_t before);
  /// Queues calls as one group on the channel's stream. `what` names them in messages.
  void run(std::string_view what, const std::function<void(const NcclCalls&)>& calls);
  /// The end of what is queued on the channel's stream.
  CudaEvent mark() const;
  /// Whether an event has happened. Looks for errors of the other ranks, too.
  bool has_happened(const CudaEvent& event);
  /// Lets `stream` wait for an event; the host does not wait.
  void order(cudaStream_t stream, const CudaEvent& event);

  /// Collective: waits for all that is queued, and for the other ranks.
  void close();

 private:
  void initialize(const ncclUniqueId& id);
  /// Waits until NCCL has done what it was asked to do: put work on the stream, or made its connections.
  void settle(std::string_view what);
  [[noreturn]] void die(std::string_view why);
  void require_alive() const;

  std::shared_ptr<const HostCommunicator> host_;  // operations may outlive the communicator
  double timeout_seconds_;
  ncclComm_t comm_ = nullptr;
  UniqueHandle<StreamTraits> stream_;
  std::string reason_;  // why it is dead; empty: it is not
};

}  // namespace fsdp2
