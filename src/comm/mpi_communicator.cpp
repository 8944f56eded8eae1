// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <stop_token>
#include <thread>
#include <tuple>
#include <utility>

#include "comm/check_mpi.hpp"
#include "comm/checks.hpp"
#include "fsdp2/communicator.hpp"
#include "fsdp2/error.hpp"
#include "fsdp2/log.hpp"
#include "kernels.hpp"
#include "kokkos_compat.hpp"

namespace fsdp2 {

namespace {

constexpr std::int64_t max_call_bytes = std::int64_t{1} << 30;

/// `bytes` bytes as an MPI (count, type): more than an int can count become one derived type.
class ByteType {
 public:
  ByteType(std::int64_t bytes, std::string_view group) {
    if (bytes <= std::numeric_limits<int>::max()) {
      count_ = static_cast<int>(bytes);
      return;
    }
    const int whole = static_cast<int>(bytes / max_call_bytes);
    const int lengths[] = {whole, static_cast<int>(bytes % max_call_bytes)};
    const MPI_Aint starts[] = {0, static_cast<MPI_Aint>(whole) * max_call_bytes};
    MPI_Datatype gibibyte = MPI_DATATYPE_NULL;
    check_mpi(MPI_Type_contiguous(static_cast<int>(max_call_bytes), MPI_BYTE, &gibibyte), "MPI_Type_contiguous", group);
    const MPI_Datatype types[] = {gibibyte, MPI_BYTE};
    const int code = MPI_Type_create_struct(2, lengths, starts, types, &type_);
    check_mpi(MPI_Type_free(&gibibyte), "MPI_Type_free", group);
    check_mpi(code, "MPI_Type_create_struct", group);
    is_derived_ = true;
    check_mpi(MPI_Type_commit(&type_), "MPI_Type_commit", group);
  }
  ByteType(const ByteType&) = delete;
  ByteType& operator=(const ByteType&) = delete;
  ~ByteType() {
    if (is_derived_) MPI_Type_free(&type_);  // local; a failure can only be a leak
  }

  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  int count_ = 1;
  MPI_Datatype type_ = MPI_BYTE;
  bool is_derived_ = false;
};

/// A part of `bytes` bytes as one element of an MPI type: displacements count parts, whatever their size.
class PartType {
 public:
  PartType(std::int64_t bytes, std::string_view group) {
    const ByteType content(bytes, group);
    check_mpi(MPI_Type_contiguous(content.count(), content.type(), &type_), "MPI_Type_contiguous", group);
    check_mpi(MPI_Type_commit(&type_), "MPI_Type_commit", group);
  }
  PartType(const PartType&) = delete;
  PartType& operator=(const PartType&) = delete;
  ~PartType() { MPI_Type_free(&type_); }  // local; a failure can only be a leak

  MPI_Datatype type() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

/// Reusable memory for receive buffers: fresh pages cost as much as the transfer. The largest free one is taken, and
/// replaced where it is too small: if operations take theirs in descending order, the i-th buffer is as large as the
/// largest i-th request, whatever the order of operations; see memory_plan.cpp.
class ScratchPool : public std::enable_shared_from_this<ScratchPool> {
 public:
  /// Memory that returns to the pool when the last copy of the tensor is gone.
  Tensor take(DType dtype, std::int64_t count) {
    const std::int64_t bytes = checked_multiply(count, size_of(dtype));
    const auto largest = std::max_element(free_.begin(), free_.end(),
                                          [](const Tensor& a, const Tensor& b) { return a.bytes() < b.bytes(); });
    Tensor memory;
    if (largest != free_.end()) {
      memory = std::move(*largest);
      free_.erase(largest);
    }
    if (memory.bytes() < bytes) {
      memory = {};
      memory = Tensor::uninitialized(DType::u8, {align_up(bytes, 64)}, "fsdp2::communicator_scratch");
    }
    const auto whole = Kokkos::subview(memory.buffer(), std::pair(std::size_t{0}, static_cast<std::size_t>(bytes)));
    std::shared_ptr<const void> lease(memory.data(), [pool = weak_from_this(), memory](const void*) {
      if (const auto alive = pool.lock()) alive->free_.push_back(memory);
    });
    return Tensor::over(whole, dtype, {count}, std::move(lease));
  }

 private:
  std::vector<Tensor> free_;
};

/// A tensor's bytes where MPI can reach them: the tensor itself, or a host copy of device memory.
class HostAccess {
 public:
  explicit HostAccess(Tensor tensor) : tensor_(std::move(tensor)) {
    if constexpr (!compat::host_accessible<MemorySpace>)
      staging_ = HostTensor::uninitialized(DType::u8, {tensor_.bytes()}, "fsdp2::mpi_staging");
  }

  std::byte* data() const {
    if constexpr (compat::host_accessible<MemorySpace>)
      return tensor_.data();
    else
      return staging_.data();
  }
  void fetch(const ExecutionSpace& exec) const {
    if constexpr (!compat::host_accessible<MemorySpace>) kernels::copy_to_host(exec, staging_.data(), tensor_);
  }
  void store(const ExecutionSpace& exec) const {
    if constexpr (!compat::host_accessible<MemorySpace>) kernels::copy_from_host(exec, tensor_, staging_.data());
  }

 private:
  Tensor tensor_;
  HostTensor staging_;
};

/// Waits for something that `is_done` looks for, but not longer than a communicator's operations may take: false then.
template <class Test>
bool wait_until(double timeout_seconds, Test&& is_done) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 1; !is_done(); ++i) {
    std::this_thread::yield();
    if (i % 64 != 0 || timeout_seconds == 0) continue;
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    if (elapsed.count() > timeout_seconds) return false;
  }
  return true;
}

/// What a communicator shares with its operations. For the caller's thread only.
struct Health {
  double timeout_seconds = 0;
  bool is_checked = false;
  std::string reason;  // why it is dead; empty: it is not

  bool is_dead() const { return !reason.empty(); }
  void require_alive() const {
    if (is_dead()) throw CommError(reason);
  }
  [[noreturn]] void die(std::string_view why) {
    reason = fmt::format("{}. The communicator cannot be used any more: close it, or end the program", why);
    throw CommError(reason);
  }
};

class MpiWork : public detail::PendingWork {
 public:
  MpiWork(ExecutionSpace exec, std::string group, std::string what, std::shared_ptr<Health> health)
      : exec_(std::move(exec)), group_(std::move(group)), what_(std::move(what)), health_(std::move(health)) {}
  MpiWork(const MpiWork&) = delete;
  MpiWork& operator=(const MpiWork&) = delete;
  ~MpiWork() override {
    // MPI may still read and write: the memory that an unfinished operation knows is leaked on purpose.
    const auto is_active = [](MPI_Request request) { return request != MPI_REQUEST_NULL; };
    if (std::any_of(requests_.begin(), requests_.end(), is_active))
      (void)new (std::nothrow) std::tuple(std::move(buffers_), std::move(steps_), std::move(tables_));
  }

  MPI_Request& add_request() { return requests_.emplace_back(MPI_REQUEST_NULL); }
  /// Numbers that MPI reads while the operation goes on.
  std::vector<int>& add_table(std::size_t length) { return *tables_.emplace_back(new std::vector<int>(length)); }
  /// The memory of a tensor for the time of the operation.
  std::byte* source(const Tensor& tensor) {
    const HostAccess& access = buffers_.emplace_back(tensor);
    access.fetch(exec_);
    return access.data();
  }
  /// The same, written back when the operation is complete.
  std::byte* target(const Tensor& tensor) {
    const HostAccess& access = buffers_.emplace_back(tensor);
    at_end([access](const ExecutionSpace& exec) { access.store(exec); });
    return access.data();
  }
  void at_end(std::function<void(const ExecutionSpace&)> step) { steps_.push_back(std::move(step)); }

  /// Lets MPI work; true when nothing is left to transfer. For any thread.
  bool progress() {
    const std::lock_guard lock(mutex_);
    int is_done = 1;
    if (!requests_.empty())
      check_mpi(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &is_done, MPI_STATUSES_IGNORE),
                "MPI_Testall", group_);
    return is_done != 0;
  }
  bool test() override {
    health_->require_alive();
    return progress();
  }
  void wait() override {
    health_->require_alive();
    if (!wait_until(health_->timeout_seconds, [&] { return progress(); }))
      health_->die(fmt::format("{} on group \"{}\" did not complete within {} s: {}", what_, group_,
                               health_->timeout_seconds,
                               health_->is_checked ? "all ranks began it, but one has failed since, or does not wait"
                                                   : "a rank has failed, or does something else. "
                                                     "CommunicatorOptions::checked tells which ranks did not come"));
    // Not under the lock, which would hold up the progress of other operations while kernels run.
    for (const auto& step : steps_) step(exec_);
    steps_.clear();
    buffers_.clear();
  }

 private:
  std::mutex mutex_;  // of the requests, which a progress thread tests too
  ExecutionSpace exec_;
  std::string group_;
  std::string what_;
  std::shared_ptr<Health> health_;
  std::vector<MPI_Request> requests_;
  std::vector<HostAccess> buffers_;
  std::vector<std::unique_ptr<std::vector<int>>> tables_;
  std::vector<std::function<void(const ExecutionSpace&)>> steps_;
};

/// Tests operations while their caller computes: MPI moves large messages only when it is called.
class ProgressThread {
 public:
  ProgressThread() : thread_([this](const std::stop_token& stop) { run(stop); }) {}

  void add(const std::shared_ptr<MpiWork>& work) {
    {
      const std::lock_guard lock(mutex_);
      works_.push_back(work);
    }
    wake_.notify_one();
  }

 private:
  void run(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    // Operations of a dead communicator never end: the request to stop counts whatever is left.
    while (wake_.wait(lock, stop, [&] { return !works_.empty(); }) && !stop.stop_requested()) {
      std::erase_if(works_, [](const std::weak_ptr<MpiWork>& weak) {
        const std::shared_ptr<MpiWork> work = weak.lock();
        if (work == nullptr) return true;
        try {
          return work->progress();
        } catch (const Error&) {
          return true;  // the caller's wait meets it too
        }
      });
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::vector<std::weak_ptr<MpiWork>> works_;
  std::jthread thread_;  // last: it uses the others
};

/// A text on its way to some ranks.
class Message {
 public:
  Message(std::string text, const std::vector<int>& ranks, int tag, MPI_Comm comm, std::string group)
      : text_(std::make_unique<std::string>(std::move(text))),
        group_(std::move(group)),
        requests_(ranks.size(), MPI_REQUEST_NULL) {
    const auto length = static_cast<int>(text_->size());
    for (std::size_t i = 0; i < ranks.size(); ++i)
      check_mpi(MPI_Isend(text_->data(), length, MPI_CHAR, ranks[i], tag, comm, &requests_[i]), "MPI_Isend", group_);
  }
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;
  ~Message() {
    const auto is_active = [](MPI_Request request) { return request != MPI_REQUEST_NULL; };
    if (std::any_of(requests_.begin(), requests_.end(), is_active)) (void)text_.release();  // MPI may still read it
  }

  bool is_sent() {
    int is_done = 0;
    check_mpi(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &is_done, MPI_STATUSES_IGNORE),
              "MPI_Testall", group_);
    return is_done != 0;
  }

 private:
  std::unique_ptr<std::string> text_;
  std::string group_;
  std::vector<MPI_Request> requests_;
};

/// What of a description fits an error: its beginning, and the place where it differs from another.
std::string excerpt(std::string_view text, std::string_view other) {
  constexpr std::size_t shown = 160;
  constexpr std::size_t before = 40;
  if (text.size() <= 2 * shown) return std::string(text);
  const auto [at, ignored] = std::mismatch(text.begin(), text.end(), other.begin(), other.end());
  const auto difference = static_cast<std::size_t>(at - text.begin());
  const std::size_t begin = std::max(shown, difference - std::min(difference, before));
  std::string result = fmt::format("{} ... {}", text.substr(0, shown), text.substr(begin, shown));
  if (begin + shown < text.size()) result += " ...";
  return result;
}

class MpiCommunicator : public Communicator {
 public:
  /// Takes over `comm`, already a duplicate.
  MpiCommunicator(MPI_Comm comm, std::string name, CommunicatorOptions options)
      : comm_(comm), name_(std::move(name)), options_(options) {
    health_->timeout_seconds = options_.timeout_seconds;
    health_->is_checked = options_.checked;
    if (comm_ == MPI_COMM_NULL) return;
    check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank", name_);
    check_mpi(MPI_Comm_size(comm_, &size_), "MPI_Comm_size", name_);
    if (!options_.progress_thread || is_copy()) return;
    int provided = MPI_THREAD_SINGLE;
    check_mpi(MPI_Query_thread(&provided), "MPI_Query_thread", name_);
    if (provided < MPI_THREAD_MULTIPLE) {
      check_mpi(MPI_Comm_free(&comm_), "MPI_Comm_free", name_);
      throw ConfigError(
          fmt::format("communicator \"{}\" cannot have a progress thread: MPI runs with {}, expected "
                      "MPI_THREAD_MULTIPLE. Ask MPI_Init_thread for it, or set progress_thread = false",
                      name_, thread_level_name(provided)));
    }
    progress_ = std::make_unique<ProgressThread>();
  }

  ~MpiCommunicator() override {
    if (comm_ != MPI_COMM_NULL)
      log(LogLevel::warning, fmt::format("communicator \"{}\" was not closed: MPI_Finalize will free it", name_));
  }

  std::int64_t rank() const override { return rank_; }
  std::int64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }

  Work all_gather(const ExecutionSpace& exec, std::span<const Transfer> transfers) override {
    require_open();
    check_lengths(*this, transfers, "all_gather", 1, size_);
    if (is_copy()) return copy(exec, transfers);
    check_call([&] { return describe("all_gather", transfers); });
    std::unique_ptr<MpiWork> work = start(exec, "all_gather");
    for (const Transfer& transfer : transfers) {
      const std::int64_t bytes = transfer.send.bytes();
      if (bytes == 0) continue;
      const ByteType type(bytes, name_);
      const bool in_place = transfer.send.data() == transfer.receive.data() + rank_ * bytes;
      std::byte* receive = work->target(transfer.receive);
      const void* send = MPI_IN_PLACE;
      if (in_place)
        place_contribution(exec, receive + rank_ * bytes, transfer.send);
      else
        send = work->source(transfer.send);
      check_mpi(MPI_Iallgather(send, type.count(), type.type(), receive, type.count(), type.type(), comm_,
                               &work->add_request()),
                "MPI_Iallgather", name_);
    }
    return finish(std::move(work));
  }

  Work reduce_scatter(const ExecutionSpace& exec, std::span<const Transfer> transfers, ReduceOp op) override {
    require_open();
    check_lengths(*this, transfers, "reduce_scatter", size_, 1);
    for (const Transfer& transfer : transfers) check_op(transfer.send.dtype(), op);
    if (is_copy()) return copy(exec, transfers);
    check_call([&] { return describe(reduce_name("reduce_scatter", op), transfers); });
    std::unique_ptr<MpiWork> work = start(exec, "reduce_scatter");
    const std::vector<Tensor> scratch = take_scratch(transfers);
    for (std::size_t i = 0; i < transfers.size(); ++i) {
      const Transfer& transfer = transfers[i];
      if (transfer.receive.bytes() == 0) continue;
      const std::int64_t count = transfer.receive.numel();
      exchange_others(*work, transfer.send, scratch[i], transfer.receive.bytes());
      work->at_end([receive = transfer.receive, others = scratch[i], own = transfer.send.slice(rank_ * count, {count}),
                    rank = rank_,
                    op](const ExecutionSpace& space) { kernels::reduce_parts(space, receive, others, own, rank, op); });
    }
    return finish(std::move(work));
  }

  Work all_reduce(const ExecutionSpace& exec, const Tensor& buffer, ReduceOp op) override {
    require_open();
    check_op(buffer.dtype(), op);
    if (is_copy()) return {};
    check_call([&] {
      const Transfer transfer{buffer, buffer};
      return describe(reduce_name("all_reduce", op), {&transfer, 1});
    });
    if (buffer.numel() == 0) return {};
    const std::int64_t share = chunk_size(buffer.numel(), size_);
    const Tensor padded = scratch_->take(buffer.dtype(), share * size_);
    const Tensor used = padded.slice(0, {buffer.numel()});
    const Tensor mine = padded.slice(rank_ * share, {share});
    kernels::zero(exec, padded.buffer());
    kernels::copy(exec, used, buffer);
    const Transfer sum{padded, mine};
    reduce_scatter(exec, {&sum, 1}, op).wait();
    std::unique_ptr<MpiWork> work = start(exec, "all_reduce");
    const ByteType type(mine.bytes(), name_);
    std::byte* receive = work->target(padded);
    place_contribution(exec, receive + rank_ * mine.bytes(), mine);
    check_mpi(
        MPI_Iallgather(MPI_IN_PLACE, 0, MPI_BYTE, receive, type.count(), type.type(), comm_, &work->add_request()),
        "MPI_Iallgather", name_);
    work->at_end([buffer, used](const ExecutionSpace& space) { kernels::copy(space, buffer, used); });
    return finish(std::move(work));
  }

  Work broadcast(const ExecutionSpace& exec, const Tensor& buffer, std::int64_t root) override {
    require_open();
    check_root(*this, root);
    if (is_copy()) return {};
    check_call([&] {
      const Transfer transfer{buffer, buffer};
      return describe(fmt::format("broadcast from {}:", root), {&transfer, 1});
    });
    std::unique_ptr<MpiWork> work = start(exec, "broadcast");
    std::byte* data = rank_ == root ? work->source(buffer) : work->target(buffer);
    for (std::int64_t begin = 0; begin < buffer.bytes(); begin += max_call_bytes) {
      const auto count = static_cast<int>(std::min(max_call_bytes, buffer.bytes() - begin));
      check_mpi(MPI_Ibcast(data + begin, count, MPI_BYTE, static_cast<int>(root), comm_, &work->add_request()),
                "MPI_Ibcast", name_);
    }
    return finish(std::move(work));
  }

  Work all_to_all(const ExecutionSpace& exec, std::span<const Transfer> transfers) override {
    require_open();
    check_lengths(*this, transfers, "all_to_all", 1, 1);
    check_parts(*this, transfers);
    if (is_copy()) return copy(exec, transfers);
    check_call([&] { return describe("all_to_all", transfers); });
    std::unique_ptr<MpiWork> work = start(exec, "all_to_all");
    for (const Transfer& transfer : transfers)
      if (transfer.send.bytes() != 0) exchange(*work, transfer.send, transfer.receive, transfer.send.bytes() / size_);
    return finish(std::move(work));
  }

  void barrier() override {
    require_open();
    meet("barrier");
  }

  std::unique_ptr<Communicator> split(std::int64_t color, std::int64_t key, std::string name) override {
    require_open();
    if (comm_ == MPI_COMM_NULL) return std::make_unique<MpiCommunicator>(MPI_COMM_NULL, std::move(name), options_);
    if (color < 0 || color > std::numeric_limits<int>::max() || key < std::numeric_limits<int>::min() ||
        key > std::numeric_limits<int>::max())
      throw CommError(fmt::format("split of group \"{}\": color {} and key {} must fit MPI's int, color not negative",
                                  name_, color, key));
    meet("split");  // MPI_Comm_split itself can wait for ever
    MPI_Comm part = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split(comm_, static_cast<int>(color), static_cast<int>(key), &part), "MPI_Comm_split", name_);
    check_mpi(MPI_Comm_set_errhandler(part, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler", name);
    return std::make_unique<MpiCommunicator>(part, std::move(name), options_);
  }

  void close() override {
    if (is_closed_) return;
    try {
      if (!health_->is_dead()) pending_->drain();
      if (!health_->is_dead() && !is_copy()) synchronize("close");  // a late message to a freed communicator is fatal
    } catch (const CommError& error) {
      if (!health_->is_dead()) throw;
      log(LogLevel::warning, error.what());
    }
    progress_.reset();
    is_closed_ = true;
    if (health_->is_dead()) comm_ = MPI_COMM_NULL;  // freeing it is collective
    if (comm_ != MPI_COMM_NULL) check_mpi(MPI_Comm_free(&comm_), "MPI_Comm_free", name_);
  }

 private:
  /// For the other ranks' parts of each transfer; taken in descending order, see ScratchPool.
  std::vector<Tensor> take_scratch(std::span<const Transfer> transfers) {
    std::vector<std::size_t> order(transfers.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return transfers[a].send.bytes() > transfers[b].send.bytes();
    });
    std::vector<Tensor> scratch(transfers.size());
    for (const std::size_t i : order) {
      const Tensor& receive = transfers[i].receive;
      if (receive.bytes() > 0) scratch[i] = scratch_->take(receive.dtype(), (size_ - 1) * receive.numel());
    }
    return scratch;
  }

  bool is_copy() const { return comm_ == MPI_COMM_NULL || (size_ == 1 && options_.size_one_shortcut); }

  static std::string_view thread_level_name(int level) {
    if (level == MPI_THREAD_SINGLE) return "MPI_THREAD_SINGLE";
    if (level == MPI_THREAD_FUNNELED) return "MPI_THREAD_FUNNELED";
    return "MPI_THREAD_SERIALIZED";
  }

  /// Returns when every rank has come.
  void meet(const char* verb) {
    if (is_copy()) return;
    check_call([&] { return verb; });
    synchronize(verb);
  }
  void synchronize(const char* verb) {
    std::unique_ptr<MpiWork> work = start(ExecutionSpace(), verb);
    check_mpi(MPI_Ibarrier(comm_, &work->add_request()), "MPI_Ibarrier", name_);
    finish(std::move(work)).wait();
  }

  void require_open() const {
    health_->require_alive();
    if (is_closed_) throw CommError(fmt::format("communicator \"{}\" is closed", name_));
  }

  static std::string reduce_name(std::string_view verb, ReduceOp op) {
    constexpr const char* names[] = {"sum", "min", "max"};
    return fmt::format("{} ({})", verb, names[static_cast<int>(op)]);
  }

  static std::string describe(std::string_view verb, std::span<const Transfer> transfers) {
    std::string text(verb);
    for (const Transfer& transfer : transfers)
      text += fmt::format(" {} {}", transfer.send.numel(), to_string(transfer.send.dtype()));
    return text;
  }

  /// Compares with the other ranks what this one is about to do.
  template <class Describe>
  void check_call(Describe&& describe_call) {
    if (!options_.checked || is_copy()) return;
    const std::string purpose = context_.empty() ? "" : fmt::format(" for \"{}\"", context_);
    const std::string own = fmt::format("operation {}{}: {}", ++calls_, purpose, describe_call());
    if (rank_ == 0)
      judge(own);
    else
      ask(own);
  }

  /// The first rank: hears all, tells all what is wrong, and throws it.
  void judge(const std::string& own) {
    std::vector<std::optional<std::string>> calls(static_cast<std::size_t>(size_));
    calls[0] = own;
    std::vector<int> others(static_cast<std::size_t>(size_ - 1));
    std::iota(others.begin(), others.end(), 1);
    std::vector<int> absent = others;
    const bool have_all_come = wait_until(options_.timeout_seconds, [&] {
      while (receive(MPI_ANY_SOURCE, call_tag, calls))
        std::erase_if(absent, [&](int rank) { return calls[static_cast<std::size_t>(rank)].has_value(); });
      return absent.empty();
    });
    if (!have_all_come) {
      const std::string why = fmt::format("on group \"{}\" rank(s) {} did not come to {} within {} s", name_,
                                          fmt::join(absent, ", "), excerpt(own, own), options_.timeout_seconds);
      const Message end(why, others, end_tag, comm_, name_);  // also to those that come later
      health_->die(why);
    }
    const std::string verdict = compare(calls);
    Message answer(verdict, others, verdict_tag, comm_, name_);
    if (!wait_until(options_.timeout_seconds, [&] { return answer.is_sent(); }))
      health_->die(fmt::format("on group \"{}\" a rank did not wait for the others after it had come to {}", name_,
                               excerpt(own, own)));
    if (!verdict.empty()) throw CommError(verdict);
  }

  /// What differs between the ranks' calls; empty: nothing.
  std::string compare(const std::vector<std::optional<std::string>>& calls) const {
    const std::string& first = *calls.front();
    const auto other = std::find_if(calls.begin(), calls.end(), [&](const auto& call) { return *call != first; });
    if (other == calls.end()) return {};
    std::map<std::string_view, std::vector<std::size_t>> callers;
    for (std::size_t rank = 0; rank < calls.size(); ++rank) callers[*calls[rank]].push_back(rank);
    std::string text = fmt::format("the ranks of group \"{}\" do different things:", name_);
    for (const auto& [call, ranks] : callers)
      text += fmt::format("\n  rank(s) {}: {}", fmt::join(ranks, ", "), excerpt(call, call == first ? **other : first));
    return text;
  }

  /// The other ranks: say what they do, and throw what the first one finds wrong.
  void ask(const std::string& own) {
    Message question(own, {0}, call_tag, comm_, name_);
    std::vector<std::optional<std::string>> answer(1);
    bool is_end = false;
    // The first rank needs its own time to miss somebody.
    const double patience = 2 * options_.timeout_seconds + (options_.timeout_seconds > 0 ? 1 : 0);
    const bool has_answer = wait_until(patience, [&] {
      const bool is_sent = question.is_sent();
      if (!answer[0]) is_end = !receive(0, verdict_tag, answer) && receive(0, end_tag, answer);
      return is_end || (is_sent && answer[0]);
    });
    if (!has_answer)
      health_->die(
          fmt::format("on group \"{}\" rank 0 did not come to {} within {} s", name_, excerpt(own, own), patience));
    if (is_end) health_->die(*answer[0]);
    if (!answer[0]->empty()) throw CommError(*answer[0]);
  }

  /// Takes one message, if there is one, to its sender's place.
  bool receive(int source, int tag, std::vector<std::optional<std::string>>& texts) const {
    int is_there = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check_mpi(MPI_Improbe(source, tag, comm_, &is_there, &message, &status), "MPI_Improbe", name_);
    if (is_there == 0) return false;
    int length = 0;
    check_mpi(MPI_Get_count(&status, MPI_CHAR, &length), "MPI_Get_count", name_);
    std::string text(static_cast<std::size_t>(length), ' ');
    check_mpi(MPI_Mrecv(text.data(), length, MPI_CHAR, &message, MPI_STATUS_IGNORE), "MPI_Mrecv", name_);
    texts[static_cast<std::size_t>(status.MPI_SOURCE)] = std::move(text);
    return true;
  }

  Work copy(const ExecutionSpace& exec, std::span<const Transfer> transfers) const {
    for (const Transfer& transfer : transfers) kernels::copy(exec, transfer.receive, transfer.send);
    return {};
  }

  std::unique_ptr<MpiWork> start(const ExecutionSpace& exec, const char* verb) {
    require_open();
    pending_->poll();
    if constexpr (compat::host_accessible<MemorySpace>) compat::fence(exec, "fsdp2::mpi_collective");
    return std::make_unique<MpiWork>(exec, name_,
                                     context_.empty() ? verb : fmt::format("{} for \"{}\"", verb, context_), health_);
  }

  Work finish(std::shared_ptr<MpiWork> work) {
    pending_->add(work);
    if (progress_ != nullptr) progress_->add(work);
    return {std::move(work), pending_};
  }

  /// Puts an in-place contribution where MPI expects it: already there, unless the memory is staged.
  static void place_contribution([[maybe_unused]] const ExecutionSpace& exec, [[maybe_unused]] std::byte* target,
                                 [[maybe_unused]] const Tensor& part) {
    if constexpr (!compat::host_accessible<MemorySpace>) kernels::copy_to_host(exec, target, part);
  }

  void exchange(MpiWork& work, const Tensor& send, const Tensor& receive, std::int64_t part_bytes) {
    const ByteType type(part_bytes, name_);
    const std::byte* from = work.source(send);
    std::byte* to = work.target(receive);
    check_mpi(MPI_Ialltoall(from, type.count(), type.type(), to, type.count(), type.type(), comm_, &work.add_request()),
              "MPI_Ialltoall", name_);
  }

  /// The same without this rank's own part, which stays where it is: `receive` has the others' alone.
  void exchange_others(MpiWork& work, const Tensor& send, const Tensor& receive, std::int64_t part_bytes) {
    const PartType part(part_bytes, name_);
    const auto ranks = static_cast<std::size_t>(size_);
    std::vector<int>& table = work.add_table(3 * ranks);
    const std::span counts(table.data(), ranks);
    const std::span from(table.data() + ranks, ranks);
    const std::span to(table.data() + 2 * ranks, ranks);
    for (int rank = 0; rank < size_; ++rank) {
      const auto i = static_cast<std::size_t>(rank);
      counts[i] = rank == rank_ ? 0 : 1;
      from[i] = rank;
      to[i] = rank < rank_ ? rank : rank - 1;
    }
    to[static_cast<std::size_t>(rank_)] = 0;
    const std::byte* source = work.source(send);
    std::byte* target = work.target(receive);
    check_mpi(MPI_Ialltoallv(source, counts.data(), from.data(), part.type(), target, counts.data(), to.data(),
                             part.type(), comm_, &work.add_request()),
              "MPI_Ialltoallv", name_);
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  std::string name_;
  CommunicatorOptions options_;
  int rank_ = 0;
  int size_ = 1;
  static constexpr int call_tag = 1;
  static constexpr int verdict_tag = 2;
  static constexpr int end_tag = 3;

  bool is_closed_ = false;
  std::int64_t calls_ = 0;
  std::shared_ptr<Health> health_ = std::make_shared<Health>();
  std::shared_ptr<detail::PendingList> pending_ = std::make_shared<detail::PendingList>();
  std::shared_ptr<ScratchPool> scratch_ = std::make_shared<ScratchPool>();
  std::unique_ptr<ProgressThread> progress_;  // last: it ends before anything that it looks at
};

}  // namespace

#if defined(NDEBUG)
const bool checked_by_default = false;
#else
const bool checked_by_default = true;
#endif

std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm comm, std::string name, CommunicatorOptions options) {
  if (!(options.timeout_seconds >= 0))
    throw ConfigError(
        fmt::format("communicator \"{}\" has a time-out of {} s: expected a number above 0, or 0 for none", name,
                    options.timeout_seconds));
  if (comm != MPI_COMM_NULL) comm = duplicate(comm, name);
  return std::make_unique<MpiCommunicator>(comm, std::move(name), options);
}

}  // namespace fsdp2
