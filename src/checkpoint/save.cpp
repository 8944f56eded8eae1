// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/save.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "checkpoint/save_job.hpp"
#include "fsdp2/error.hpp"
#include "kokkos_compat.hpp"

namespace fsdp2 {

using checkpoint::PieceRequest;
using checkpoint::SaveJob;

void save(const std::filesystem::path& target, const StateDict& state, const SaveOptions& options) {
  SaveJob job(target, state, options);
  job.prepare(state);
  job.write(checkpoint::source_of(state));
  try {
    job.agree();
    std::vector<std::uint64_t> results = job.results();
    job.host().all_reduce(results, MPI_BXOR);
    job.complete(results);
    if (job.host().rank() == 0) job.publish();
    job.host().agree_with(0, job.error());
  } catch (...) {
    job.discard();  // after an agreement nobody writes any more
    throw;
  }
}

namespace {

/// What all ranks shall know of one rank's error, as bytes of a fixed length; long messages are cut.
class ErrorBytes {
 public:
  ErrorBytes() : bytes_(4096) {}

  std::span<std::byte> bytes() { return bytes_; }
  void set(const std::exception_ptr& error, std::int64_t rank) {
    std::fill(bytes_.begin(), bytes_.end(), std::byte{0});
    if (!error) return;
    const ErrorReport report = describe(error);
    const std::string message = "rank " + std::to_string(rank) + ": " + report.message;
    bytes_[0] = std::byte{1};
    bytes_[1] = static_cast<std::byte>(report.kind);
    std::memcpy(bytes_.data() + 2, message.data(), std::min(message.size(), bytes_.size() - 3));
  }
  /// The error that these bytes describe; null: none.
  std::exception_ptr error() const {
    if (bytes_[0] == std::byte{0}) return nullptr;
    try {
      raise({std::to_integer<std::uint64_t>(bytes_[1]), reinterpret_cast<const char*>(bytes_.data() + 2)});
    } catch (...) {
      return std::current_exception();
    }
  }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace

/// Host memory that devices copy to at full speed, kept from one save to the next: fresh pages cost as much as the
/// copy.
class AsyncSaver::Image {
 public:
  std::byte* reserve(std::int64_t bytes) {
    if (static_cast<std::int64_t>(memory_.size()) < bytes) {
      memory_ = {};
      memory_ =
          Memory(Kokkos::view_alloc("fsdp2::save_image", Kokkos::WithoutInitializing), static_cast<std::size_t>(bytes));
    }
    return memory_.data();
  }

 private:
  using Memory = Kokkos::View<std::byte*, compat::PinnedSpace>;
  Memory memory_;
};

/// A save that goes on in the background. Steps follow one another as their communication completes, on whichever rank
/// first sees it.
class AsyncSaver::Operation {
 public:
  Operation(const std::filesystem::path& target, const StateDict& state, const SaveOptions& options)
      : job_(target, state, options) {}
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  ~Operation() { cancel(); }

  /// Everything that needs the tensors. Collective; throws as save.
  void begin(const StateDict& state, Image& image) {
    comm_ = &job_.host().subgroup("asynchronous saves", 0);
    job_.prepare(state);
    try {
      job_.agree();
      job_.host().collectively([&] { pack(state, image); });
    } catch (...) {
      job_.discard();
      throw;
    }
    thread_ = std::thread([this] {
      job_.write({[this](std::span<const PieceRequest> requests) { copy_from_image(requests); },
                  [this](const Piece& piece) { return view_in_image(piece); }});
      is_written_ = true;
    });
  }

  /// Goes as far as it can without waiting; true at the end.
  bool advance() {
    while (step_ != Step::done) {
      if (step_ == Step::writing ? !is_written_ : !HostCommunicator::test(request_)) return false;
      next();
    }
    return true;
  }

  const std::exception_ptr& error() const { return error_; }
  /// Whether MPI still knows memory of this object.
  bool is_communicating() const { return request_ != MPI_REQUEST_NULL; }
  /// Stops writing.
  void cancel() {
    is_cancelled_ = true;
    if (thread_.joinable()) thread_.join();
  }

 private:
  enum class Step : std::uint8_t { writing, agreeing, failing, exchanging, publishing, done };

  /// The current step is over: what it means, and the start of the next.
  void next() {
    const bool is_first = comm_->rank() == 0;
    switch (step_) {
      case Step::writing:
        thread_.join();
        values_ = {job_.status()};
        comm_->start_all_reduce(values_, MPI_MIN, request_);
        step_ = Step::agreeing;
        return;
      case Step::agreeing:
        if (values_[0] != job_.clean_status()) {
          const std::int64_t culprit = job_.culprit(values_[0]);
          report_.set(job_.error(), comm_->rank());
          comm_->start_broadcast(report_.bytes(), culprit, request_);
          step_ = Step::failing;
          return;
        }
        values_ = job_.results();
        comm_->start_all_reduce(values_, MPI_BXOR, request_);
        step_ = Step::exchanging;
        return;
      case Step::exchanging:
        job_.complete(values_);
        if (is_first) job_.publish();
        report_.set(job_.error(), 0);
        comm_->start_broadcast(report_.bytes(), 0, request_);
        step_ = Step::publishing;
        return;
      case Step::failing:
      case Step::publishing:
        error_ = report_.error();
        if (error_) job_.discard();
        step_ = Step::done;
        return;
      case Step::done:
        return;
    }
  }

  void pack(const StateDict& state, Image& image) {
    std::int64_t bytes = 0;
    for (const DType dtype : all_dtypes) {
      starts_[dtype] = bytes;
      bytes += job_.plan().used[dtype];
    }
    image_ = image.reserve(bytes);
    std::vector<PieceRequest> requests;
    for (const Piece& piece : job_.plan().pieces)
      requests.push_back({&piece, 0, {place(piece), static_cast<std::size_t>(piece.bytes)}});
    checkpoint::source_of(state).fill(requests);
  }
  std::byte* place(const Piece& piece) const {
    return image_ + starts_[job_.index().tensors[piece.tensor].spec.dtype] + piece.start;
  }
  const std::byte* view_in_image(const Piece& piece) const {
    if (is_cancelled_) throw Error("the save was given up");
    return place(piece);
  }
  void copy_from_image(std::span<const PieceRequest> requests) const {
    for (const PieceRequest& request : requests)
      std::memcpy(request.target.data(), view_in_image(*request.piece) + request.begin, request.target.size());
  }

  SaveJob job_;
  const HostCommunicator* comm_ = nullptr;
  std::byte* image_ = nullptr;
  PerDType<std::int64_t> starts_{};  // of the dtypes' segments in the image
  std::thread thread_;
  std::atomic<bool> is_written_ = false;
  std::atomic<bool> is_cancelled_ = false;
  Step step_ = Step::writing;
  std::vector<std::uint64_t> values_;
  ErrorBytes report_;
  MPI_Request request_ = MPI_REQUEST_NULL;
  std::exception_ptr error_;
};

AsyncSaver::AsyncSaver() : image_(std::make_unique<Image>()) {}

AsyncSaver::AsyncSaver(AsyncSaver&&) noexcept = default;

AsyncSaver& AsyncSaver::operator=(AsyncSaver&& other) noexcept {
  abandon();
  operation_ = std::move(other.operation_);
  image_ = std::move(other.image_);
  return *this;
}

AsyncSaver::~AsyncSaver() {
  abandon();
}

void AsyncSaver::abandon() noexcept {
  if (operation_ == nullptr) return;
  operation_->cancel();
  if (operation_->is_communicating()) (void)operation_.release();  // MPI may still write
  operation_.reset();
}

void AsyncSaver::save(const std::filesystem::path& target, const StateDict& state, const SaveOptions& options) {
  if (is_saving()) throw Error("a checkpoint is being saved already: wait() for it before you save " + target.string());
  if (options.io == Io::mpio)
    throw ConfigError("Io::mpio communicates while it writes: save " + target.string() +
                      " with fsdp2::save, or with Io::direct");
  operation_ = std::make_unique<Operation>(target, state, options);
  try {
    operation_->begin(state, *image_);
  } catch (...) {
    operation_.reset();
    throw;
  }
}

bool AsyncSaver::poll() {
  return operation_ == nullptr || operation_->advance();
}

void AsyncSaver::wait() {
  using namespace std::chrono_literals;
  while (!poll()) std::this_thread::sleep_for(100us);
  if (operation_ == nullptr) return;
  const std::exception_ptr error = operation_->error();
  operation_.reset();
  if (error) std::rethrow_exception(error);
}

}  // namespace fsdp2
