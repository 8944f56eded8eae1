// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp2/placement.hpp"
#include "fsdp2/tensor.hpp"

namespace fsdp2 {

namespace detail {
/// One started operation of a backend.
class PendingWork {
 public:
  virtual ~PendingWork() = default;
  /// Completes the operation; does nothing the second time. Throws CommError.
  virtual void wait() = 0;
  /// Makes progress; true when wait() would not block.
  virtual bool test() = 0;
};

/// The operations of a communicator that are not known to be complete, held by a Work or dropped.
class PendingList {
 public:
  void add(std::shared_ptr<PendingWork> work) { works_.push_back(std::move(work)); }
  /// Completes one, and forgets it.
  void wait(const std::shared_ptr<PendingWork>& work);
  /// Completes and forgets the dropped ones that have finished.
  void poll();
  /// Completes all.
  void drain();

 private:
  std::vector<std::shared_ptr<PendingWork>> works_;
};
}  // namespace detail

/// A started collective. It keeps its buffers alive. Dropped unfinished, it is completed by its communicator later.
/// Move-only; a moved-from or default Work is finished.
class Work {
 public:
  Work() = default;
  Work(std::shared_ptr<detail::PendingWork> pending, std::shared_ptr<detail::PendingList> list)
      : pending_(std::move(pending)), list_(std::move(list)) {}
  Work(Work&&) noexcept = default;
  Work& operator=(Work&&) noexcept = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  ~Work() = default;

  /// Orders the caller's execution space after the operation (device backends), or completes it (host): afterwards the
  /// send buffer may be written and the receive buffer read by work on that space. Throws CommError.
  void wait();
  /// Gives the operation a chance to progress; true when wait() would not block.
  bool test();
  bool finished() const { return pending_ == nullptr; }

 private:
  std::shared_ptr<detail::PendingWork> pending_;
  std::shared_ptr<detail::PendingList> list_;
};

/// The buffers of one operation in a group of them. Untouched by the caller until Work::wait.
struct Transfer {
  Tensor send;
  Tensor receive;
};

/// The ranks along one axis of a mesh. Every member is collective over them: all ranks make the same calls in the same
/// order with the same dtypes and element counts. Buffers are read and written on `exec`'s behalf: work queued there
/// before the call is done first. A list of transfers is one group: started together, finished together.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual std::int64_t rank() const = 0;
  virtual std::int64_t size() const = 0;
  /// Names the group in messages, such as "dp".
  virtual const std::string& name() const = 0;

  /// receive = the sends of ranks 0, 1, … one after another (size() times as many elements as send). `send` may be
  /// this rank's own part of `receive`.
  virtual Work all_gather(const ExecutionSpace& exec, std::span<const Transfer> transfers) = 0;

  /// receive = element-wise combination over all ranks of part rank() of their sends (size() times as many elements as
  /// receive). Combined in f64 for f64, else f32 for floats, in rank order, so that the result does not depend on
  /// timing or on message size; but NCCL orders sums of f64 and f32 as it likes, unless it is to be deterministic.
  /// There is no averaging: divide afterwards.
  virtual Work reduce_scatter(const ExecutionSpace& exec, std::span<const Transfer> transfers, ReduceOp op) = 0;

  /// In place, every rank the same bits. May complete its first half before it returns.
  virtual Work all_reduce(const ExecutionSpace& exec, const Tensor& buffer, ReduceOp op) = 0;

  /// Every rank receives root's bytes.
  virtual Work broadcast(const ExecutionSpace& exec, const Tensor& buffer, std::int64_t root) = 0;

  /// Part i of send goes to rank i; part i of receive comes from rank i. Equal parts, equal lengths, no overlap.
  virtual Work all_to_all(const ExecutionSpace& exec, std::span<const Transfer> transfers) = 0;

  /// Returns when every rank has called it.
  virtual void barrier() = 0;

  /// Ranks of one color form a new communicator, ordered by key, then rank.
  virtual std::unique_ptr<Communicator> split(std::int64_t color, std::int64_t key, std::string name) = 0;

  /// Collective end: completes what is pending, waits for the other ranks, and frees the communicator. Where they do
  /// not come in time, it is left to MPI_Finalize, and the log sink hears of it; so it is by a destructor without
  /// close. Further calls but rank(), size() and name() throw CommError.
  virtual void close() = 0;

  /// What the next operations are for, such as the name of a module: part of what checked mode compares. Local.
  void set_context(std::string_view context) { context_ = context; }

 protected:
  std::string context_;
};

/// Whether ranks compare what they are about to do, unless told otherwise: in debug builds of the library.
extern const bool checked_by_default;

/// What carries tensors between ranks.
enum class Backend : std::uint8_t {
  mpi,   ///< memory of the host; device memory is staged through it, and ranks may share a device
  nccl,  ///< CUDA devices, one for each rank, on streams: the host does not wait
};

/// How a communicator behaves where there is a choice. The same on all ranks.
struct CommunicatorOptions {
  /// With one rank, collectives are copies that do not enter MPI. Off, they take the same path as any other size.
  bool size_one_shortcut = true;
  /// Before each operation, every rank tells the first one what it is about to do, and waits for its answer: ranks that
  /// disagree all get the same CommError, which names who wants what, instead of a hang or wrong data. Nothing is
  /// started then, and the communicator stays usable. Ranks must then start operations of different communicators in
  /// one order, too.
  bool checked = checked_by_default;
  /// How long an operation may take, in seconds; 0: for ever. Afterwards its wait throws CommError, which in checked
  /// mode names the ranks that did not come (twice the time and a second, where the first rank is missing). Then the
  /// communicator is dead: all later calls throw the same at once, close leaves it to MPI_Finalize, and memory that MPI
  /// may still touch is never freed.
  double timeout_seconds = 1800;
  /// A thread keeps operations going while the caller computes; it sleeps when there are none. Needs
  /// MPI_THREAD_MULTIPLE: ConfigError without. For MPI.
  bool progress_thread = false;
  /// ConfigError for nccl where the library was built without.
  Backend backend = Backend::mpi;
  /// Sums in rank order whatever the backend, as MPI always does.
  bool deterministic = false;
};

/// One of the backend that `options` name, over a duplicate of `comm`. Collective over `comm`. Throws CommError and
/// ConfigError.
std::unique_ptr<Communicator> make_communicator(MPI_Comm comm, std::string name, CommunicatorOptions options = {});

/// A communicator over a duplicate of `comm`, whose error handler the duplicate does not inherit. Collective over
/// `comm`. MPI_COMM_NULL makes a communicator of one rank that works without MPI. Device memory is staged through the
/// host. Throws CommError.
std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm comm, std::string name, CommunicatorOptions options = {});

/// The same for NCCL, on the device that Kokkos uses. Its connections are made by the first operation, which throws
/// ConfigError where two ranks share a device. Its Work::wait lets the stream of the execution space wait; an error of
/// another rank is found by the next call, test or close. Only in libraries built with FSDP2_ENABLE_NCCL.
std::unique_ptr<Communicator> make_nccl_communicator(MPI_Comm comm, std::string name, CommunicatorOptions options = {});

}  // namespace fsdp2
