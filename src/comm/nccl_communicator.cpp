// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "comm/check_mpi.hpp"
#include "comm/checks.hpp"
#include "comm/host_communicator.hpp"
#include "comm/nccl_channel.hpp"
#include "fsdp2/communicator.hpp"
#include "fsdp2/log.hpp"
#include "kernels.hpp"

namespace fsdp2 {

namespace {

/// The dtypes that NCCL sums as a communicator promises; the others are exchanged and combined by us, small floats
/// because NCCL rounds them after every addition.
std::optional<ncclDataType_t> reducible_type(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return ncclFloat64;
    case DType::f32:
      return ncclFloat32;
    case DType::i64:
      return ncclInt64;
    case DType::i32:
      return ncclInt32;
    case DType::i8:
      return ncclInt8;
    case DType::u64:
      return ncclUint64;
    case DType::u32:
      return ncclUint32;
    case DType::u8:
      return ncclUint8;
    default:
      return std::nullopt;
  }
}

ncclRedOp_t reduction(ReduceOp op) {
  return op == ReduceOp::sum ? ncclSum : op == ReduceOp::min ? ncclMin : ncclMax;
}

std::size_t size_of_bytes(const Tensor& tensor) {
  return static_cast<std::size_t>(tensor.bytes());
}

/// An operation on the channel's stream. Waiting orders the caller's stream after it; the host goes on.
class NcclWork final : public detail::PendingWork {
 public:
  NcclWork(std::shared_ptr<NcclChannel> channel, ExecutionSpace exec, std::vector<Tensor> buffers)
      : channel_(std::move(channel)), exec_(std::move(exec)), buffers_(std::move(buffers)), end_(channel_->mark()) {}

  void wait() override {
    if (!end_.is_valid()) return;
    channel_->order(exec_.cuda_stream(), end_);
    end_.reset();
  }
  bool test() override { return !end_.is_valid() || channel_->has_happened(end_); }

 private:
  std::shared_ptr<NcclChannel> channel_;
  ExecutionSpace exec_;
  std::vector<Tensor> buffers_;
  CudaEvent end_;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(MPI_Comm comm, std::string name, const CommunicatorOptions& options)
      : host_(std::make_shared<HostCommunicator>(comm, std::move(name))), options_(options) {}

  std::int64_t rank() const override { return host_->rank(); }
  std::int64_t size() const override { return host_->size(); }
  const std::string& name() const override { return host_->name(); }

  Work all_gather(const ExecutionSpace& exec, std::span<const Transfer> transfers) override {
    begin("all_gather", transfers, 1, size());
    if (is_copy()) return copy(exec, transfers);
    return start(exec, "all_gather", transfers, [&](const NcclCalls& calls) {
      for (const auto& [send, receive] : transfers) calls.all_gather(send.data(), receive.data(), size_of_bytes(send));
    });
  }

  Work reduce_scatter(const ExecutionSpace& exec, std::span<const Transfer> transfers, ReduceOp op) override {
    for (const Transfer& transfer : transfers) check_op(transfer.send.dtype(), op);
    begin("reduce_scatter", transfers, size(), 1);
    if (is_copy()) return copy(exec, transfers);
    const bool is_native = std::all_of(transfers.begin(), transfers.end(),
                                       [&](const Transfer& transfer) { return reduces(transfer.send.dtype()); });
    if (is_native)
      return start(exec, "reduce_scatter", transfers, [&](const NcclCalls& calls) {
        for (const auto& [send, receive] : transfers)
          calls.reduce_scatter(send.data(), receive.data(), static_cast<std::size_t>(receive.numel()),
                               *reducible_type(send.dtype()), reduction(op));
      });
    return exchange_and_reduce(exec, transfers, op);
  }

  Work all_reduce(const ExecutionSpace& exec, const Tensor& buffer, ReduceOp op) override {
    check_op(buffer.dtype(), op);
    const Transfer transfer{buffer, buffer};
    begin("all_reduce", {&transfer, 1}, 1, 1);
    if (is_copy() || buffer.numel() == 0) return {};
    if (reduces(buffer.dtype()))
      return start(exec, "all_reduce", {&transfer, 1}, [&](const NcclCalls& calls) {
        calls.all_reduce(buffer.data(), static_cast<std::size_t>(buffer.numel()), *reducible_type(buffer.dtype()),
                         reduction(op));
      });
    // Every rank combines its share, and all gather the shares.
    const std::int64_t share = chunk_size(buffer.numel(), size());
    const Tensor padded = Tensor::uninitialized(buffer.dtype(), {share * size()}, "fsdp2::communicator_scratch");
    const Tensor used = padded.slice(0, {buffer.numel()});
    const Tensor mine = padded.slice(rank() * share, {share});
    kernels::zero(exec, padded.buffer());
    kernels::copy(exec, used, buffer);
    const Transfer sum{padded, mine};
    const Transfer gather{mine, padded};
    exchange_and_reduce(exec, {&sum, 1}, op).wait();
    all_gather(exec, {&gather, 1}).wait();
    kernels::copy(exec, buffer, used);
    return {};
  }

  Work broadcast(const ExecutionSpace& exec, const Tensor& buffer, std::int64_t root) override {
    check_root(*this, root);
    const Transfer transfer{buffer, buffer};
    begin("broadcast", {&transfer, 1}, 1, 1);
    if (is_copy()) return {};
    return start(exec, "broadcast", {&transfer, 1}, [&](const NcclCalls& calls) {
      calls.broadcast(buffer.data(), size_of_bytes(buffer), static_cast<int>(root));
    });
  }

  Work all_to_all(const ExecutionSpace& exec, std::span<const Transfer> transfers) override {
    check_parts(*this, transfers);
    begin("all_to_all", transfers, 1, 1);
    if (is_copy()) return copy(exec, transfers);
    return start(exec, "all_to_all", transfers, [&](const NcclCalls& calls) {
      for (const auto& [send, receive] : transfers) {
        const std::size_t part = size_of_bytes(send) / static_cast<std::size_t>(size());
        for (int peer = 0; peer < static_cast<int>(size()); ++peer) {
          const std::size_t at = part * static_cast<std::size_t>(peer);
          calls.send(send.data() + at, part, peer);
          calls.receive(receive.data() + at, part, peer);
        }
      }
    });
  }

  void barrier() override {
    require_open();
    host_->barrier();
  }

  std::unique_ptr<Communicator> split(std::int64_t color, std::int64_t key, std::string name) override {
    require_open();
    if (host_->mpi() == MPI_COMM_NULL)
      return std::make_unique<NcclCommunicator>(MPI_COMM_NULL, std::move(name), options_);
    if (color < 0 || color > std::numeric_limits<int>::max() || key < std::numeric_limits<int>::min() ||
        key > std::numeric_limits<int>::max())
      throw CommError(fmt::format("split of group \"{}\": color {} and key {} must fit MPI's int, color not negative",
                                  host_->name(), color, key));
    MPI_Comm part = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split(host_->mpi(), static_cast<int>(color), static_cast<int>(key), &part), "MPI_Comm_split",
              host_->name());
    auto made = std::make_unique<NcclCommunicator>(part, std::move(name), options_);
    check_mpi(MPI_Comm_free(&part), "MPI_Comm_free", host_->name());
    return made;
  }

  void close() override {
    if (is_closed_) return;
    is_closed_ = true;
    try {
      if (!is_dead()) pending_->drain();
      on_channel_.reset();
      if (channel_ && !is_dead()) channel_->close();
    } catch (const CommError& error) {
      if (!is_dead()) throw;
      log(LogLevel::warning, error.what());
    }
    if (is_dead()) return;  // freeing the communicator is collective: MPI_Finalize does it
    channel_.reset();
    host_->barrier();
    host_->close();
  }

 private:
  void require_open() const {
    if (is_closed_) throw CommError(fmt::format("group \"{}\" is closed", host_->name()));
  }

  /// What all verbs begin with. In checked mode ranks compare what they are about to do.
  void begin(std::string_view verb, std::span<const Transfer> transfers, std::int64_t send_factor,
             std::int64_t receive_factor) {
    require_open();
    check_lengths(*this, transfers, verb, send_factor, receive_factor);
    if (!options_.checked || size() == 1) return;
    std::string text = fmt::format("{}{}", verb, context_.empty() ? "" : fmt::format(" for \"{}\"", context_));
    for (const Transfer& transfer : transfers)
      text += fmt::format(" {} {}", transfer.send.numel(), to_string(transfer.send.dtype()));
    const std::vector<std::string> all = host_->all_gather(text);
    for (std::size_t other = 1; other < all.size(); ++other)
      if (all[other] != all[0])
        throw CommError(fmt::format("ranks of group \"{}\" disagree: rank 0 wants {}, but rank {} wants {}",
                                    host_->name(), all[0], other, all[other]));
  }

  bool is_dead() const { return channel_ && channel_->is_dead(); }
  bool is_copy() const { return size() == 1 && options_.size_one_shortcut; }
  static Work copy(const ExecutionSpace& exec, std::span<const Transfer> transfers) {
    for (const auto& [send, receive] : transfers) kernels::copy(exec, receive, send);
    return {};
  }

  bool reduces(DType dtype) const { return !options_.deterministic && reducible_type(dtype).has_value(); }

  /// Made by the first operation: groups that only serve to be split need none.
  NcclChannel& channel() {
    if (!channel_) {
      channel_ = std::make_shared<NcclChannel>(host_, options_.timeout_seconds);
      on_channel_.emplace(channel_->stream());
    }
    return *channel_;
  }

  Work finish(const ExecutionSpace& exec, std::vector<Tensor> buffers) {
    auto work = std::make_shared<NcclWork>(channel_, exec, std::move(buffers));
    pending_->add(work);
    return {work, pending_};
  }

  template <class Calls>
  Work start(const ExecutionSpace& exec, std::string_view verb, std::span<const Transfer> transfers, Calls&& calls) {
    pending_->poll();
    channel().follow(exec.cuda_stream());
    channel().run(verb, calls);
    std::vector<Tensor> buffers;
    for (const auto& [send, receive] : transfers) {
      buffers.push_back(send);
      buffers.push_back(receive);
    }
    return finish(exec, std::move(buffers));
  }

  /// Receives the other ranks' parts and combines them in rank order, on the channel's stream.
  Work exchange_and_reduce(const ExecutionSpace& exec, std::span<const Transfer> transfers, ReduceOp op) {
    pending_->poll();
    channel().follow(exec.cuda_stream());
    std::vector<Tensor> buffers;
    for (const auto& [send, receive] : transfers) {
      buffers.push_back(send);
      buffers.push_back(receive);
      buffers.push_back(
          Tensor::uninitialized(send.dtype(), {receive.numel() * (size() - 1)}, "fsdp2::communicator_scratch"));
    }
    channel().run("reduce_scatter", [&](const NcclCalls& calls) {
      for (std::size_t i = 0; i < transfers.size(); ++i) {
        const std::size_t part = size_of_bytes(transfers[i].receive);
        std::byte* next = buffers[3 * i + 2].data();
        for (std::int64_t peer = 0; peer < size(); ++peer) {
          if (peer == rank()) continue;
          calls.send(transfers[i].send.data() + part * static_cast<std::size_t>(peer), part, static_cast<int>(peer));
          calls.receive(next, part, static_cast<int>(peer));
          next += part;
        }
      }
    });
    for (std::size_t i = 0; i < transfers.size(); ++i) {
      const auto& [send, receive] = transfers[i];
      const std::int64_t count = receive.numel();
      if (count > 0)
        kernels::reduce_parts(*on_channel_, receive, buffers[3 * i + 2], send.slice(rank() * count, {count}), rank(),
                              op);
    }
    return finish(exec, std::move(buffers));
  }

  std::shared_ptr<HostCommunicator> host_;
  CommunicatorOptions options_;
  std::shared_ptr<NcclChannel> channel_;
  std::optional<ExecutionSpace> on_channel_;  // for kernels on its stream
  std::shared_ptr<detail::PendingList> pending_ = std::make_shared<detail::PendingList>();
  bool is_closed_ = false;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(MPI_Comm comm, std::string name, CommunicatorOptions options) {
  return std::make_unique<NcclCommunicator>(comm, std::move(name), options);
}

}  // namespace fsdp2
