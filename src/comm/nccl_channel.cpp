// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "comm/nccl_channel.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp2/error.hpp"

namespace fsdp2 {

namespace {

static_assert(NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 0), "fsdp2 needs NCCL 2.18 or newer");

bool is_accepted(ncclResult_t result) {
  return result == ncclSuccess || result == ncclInProgress;
}

void check_nccl(ncclResult_t result, std::string_view call, std::string_view group) {
  if (!is_accepted(result))
    throw CommError(fmt::format("{} on group \"{}\" failed: {}", call, group, ncclGetErrorString(result)));
}

/// Host and device, as text: what no two ranks may have in common.
std::string device_identity(std::string_view group) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice", group);
  std::array<char, 32> bus{};
  check_cuda(cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), device), "cudaDeviceGetPCIBusId", group);
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) name[0] = '\0';
  return fmt::format("{} of {}", bus.data(), name.data());
}

}  // namespace

void check_cuda(cudaError_t code, std::string_view call, std::string_view group) {
  if (code != cudaSuccess)
    throw CommError(fmt::format("{} for group \"{}\" failed: {}", call, group, cudaGetErrorString(code)));
}

void EventTraits::release(cudaEvent_t event) {
  cudaEventDestroy(event);  // a failure can only be a leak
}

void StreamTraits::release(cudaStream_t stream) {
  cudaStreamDestroy(stream);  // as above
}

void NcclCalls::check(ncclResult_t result, const char* call) const {
  check_nccl(result, call, group_);
}

void NcclCalls::all_gather(const void* send, void* receive, std::size_t bytes) const {
  check(ncclAllGather(send, receive, bytes, ncclInt8, comm_, stream_), "ncclAllGather");
}
void NcclCalls::reduce_scatter(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                               ncclRedOp_t op) const {
  check(ncclReduceScatter(send, receive, count, type, op, comm_, stream_), "ncclReduceScatter");
}
void NcclCalls::all_reduce(void* buffer, std::size_t count, ncclDataType_t type, ncclRedOp_t op) const {
  check(ncclAllReduce(buffer, buffer, count, type, op, comm_, stream_), "ncclAllReduce");
}
void NcclCalls::broadcast(void* buffer, std::size_t bytes, int root) const {
  check(ncclBroadcast(buffer, buffer, bytes, ncclInt8, root, comm_, stream_), "ncclBroadcast");
}
void NcclCalls::send(const void* bytes, std::size_t count, int rank) const {
  check(ncclSend(bytes, count, ncclInt8, rank, comm_, stream_), "ncclSend");
}
void NcclCalls::receive(void* bytes, std::size_t count, int rank) const {
  check(ncclRecv(bytes, count, ncclInt8, rank, comm_, stream_), "ncclRecv");
}

NcclChannel::NcclChannel(std::shared_ptr<const HostCommunicator> host, double timeout_seconds)
    : host_(std::move(host)), timeout_seconds_(timeout_seconds) {
  std::string mine;
  std::string id(sizeof(ncclUniqueId), '\0');
  host_->collectively([&] {
    mine = device_identity(host_->name());
    if (host_->rank() != 0) return;
    ncclUniqueId made{};
    check_nccl(ncclGetUniqueId(&made), "ncclGetUniqueId", host_->name());
    std::memcpy(id.data(), &made, sizeof made);
  });
  const std::vector<std::string> devices = host_->all_gather(mine);
  for (std::size_t a = 0; a < devices.size(); ++a)
    for (std::size_t b = 0; b < a; ++b)
      if (devices[a] == devices[b])
        throw ConfigError(fmt::format(
            "ranks {} and {} of group \"{}\" have the same GPU, {}: NCCL needs one for each rank; start fewer "
            "ranks on that node, or choose Backend::mpi, which lets ranks share a GPU",
            b, a, host_->name(), devices[a]));
  host_->broadcast(id, 0);
  ncclUniqueId shared{};
  std::memcpy(&shared, id.data(), sizeof shared);
  host_->collectively([&] { initialize(shared); });
}

void NcclChannel::initialize(const ncclUniqueId& id) {
  int least = 0;
  int greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange", host_->name());
  cudaStream_t made = nullptr;
  check_cuda(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest), "cudaStreamCreateWithPriority",
             host_->name());
  stream_ = UniqueHandle<StreamTraits>(made);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  check_nccl(
      ncclCommInitRankConfig(&comm_, static_cast<int>(host_->size()), id, static_cast<int>(host_->rank()), &config),
      "ncclCommInitRankConfig", host_->name());
  settle("ncclCommInitRankConfig");
}

NcclChannel::~NcclChannel() {
  if (comm_ != nullptr) ncclCommAbort(comm_);  // a failure can only be a leak
}

void NcclChannel::require_alive() const {
  if (is_dead()) throw CommError(reason_);
  if (comm_ == nullptr) throw CommError(fmt::format("group \"{}\" is closed", host_->name()));
}

void NcclChannel::die(std::string_view why) {
  reason_ =
      fmt::format("{}. The group \"{}\" cannot be used any more: close it, or end the program", why, host_->name());
  if (comm_ != nullptr) ncclCommAbort(comm_);
  comm_ = nullptr;
  throw CommError(reason_);
}

void NcclChannel::settle(std::string_view what) {
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
    if (asked != ncclSuccess || !is_accepted(state))
      die(fmt::format("{} on group \"{}\" failed: {} ({})", what, host_->name(),
                      ncclGetErrorString(asked != ncclSuccess ? asked : state), ncclGetLastError(comm_)));
    if (state == ncclSuccess) return;
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    if (timeout_seconds_ > 0 && elapsed.count() > timeout_seconds_)
      die(fmt::format("{} on group \"{}\" took longer than {} s: a rank did not come", what, host_->name(),
                      timeout_seconds_));
    std::this_thread::yield();
  }
}

void NcclChannel::follow(cudaStream_t before) {
  require_alive();
  cudaEvent_t made = nullptr;
  check_cuda(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreateWithFlags", host_->name());
  const CudaEvent event(made);
  check_cuda(cudaEventRecord(event.get(), before), "cudaEventRecord", host_->name());
  // CUDA keeps what an event stands for when it is destroyed.
  check_cuda(cudaStreamWaitEvent(stream_.get(), event.get(), 0), "cudaStreamWaitEvent", host_->name());
}

void NcclChannel::run(std::string_view what, const std::function<void(const NcclCalls&)>& calls) {
  require_alive();
  check_nccl(ncclGroupStart(), "ncclGroupStart", host_->name());
  try {
    calls(NcclCalls(comm_, stream_.get(), host_->name()));
  } catch (const std::exception& error) {
    (void)ncclGroupEnd();  // fails, as its calls have
    die(error.what());
  }
  const ncclResult_t ended = ncclGroupEnd();
  if (!is_accepted(ended))
    die(fmt::format("{} on group \"{}\" failed: {} ({})", what, host_->name(), ncclGetErrorString(ended),
                    ncclGetLastError(comm_)));
  settle(what);
}

CudaEvent NcclChannel::mark() const {
  cudaEvent_t made = nullptr;
  check_cuda(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreateWithFlags", host_->name());
  CudaEvent event(made);
  check_cuda(cudaEventRecord(event.get(), stream_.get()), "cudaEventRecord", host_->name());
  return event;
}

bool NcclChannel::has_happened(const CudaEvent& event) {
  require_alive();
  const cudaError_t state = cudaEventQuery(event.get());
  if (state == cudaSuccess) return true;
  if (state != cudaErrorNotReady) die(fmt::format("cudaEventQuery failed: {}", cudaGetErrorString(state)));
  settle("a collective");  // throws where a peer is gone
  return false;
}

void NcclChannel::order(cudaStream_t stream, const CudaEvent& event) {
  require_alive();
  check_cuda(cudaStreamWaitEvent(stream, event.get(), 0), "cudaStreamWaitEvent", host_->name());
}

void NcclChannel::close() {
  require_alive();
  const CudaEvent end = mark();
  const auto begin = std::chrono::steady_clock::now();
  while (!has_happened(end)) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    if (timeout_seconds_ > 0 && elapsed.count() > timeout_seconds_)
      die(fmt::format("closing group \"{}\": its work took longer than {} s", host_->name(), timeout_seconds_));
    std::this_thread::yield();
  }
  check_nccl(ncclCommFinalize(comm_), "ncclCommFinalize", host_->name());
  settle("ncclCommFinalize");
  check_nccl(ncclCommDestroy(std::exchange(comm_, nullptr)), "ncclCommDestroy", host_->name());
  stream_.reset();
}

}  // namespace fsdp2
