// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <mpi.h>

#include <Kokkos_Core.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

/// Every rank runs every test. After each test all ranks learn whether any of them failed; rank 0, the only one that
/// prints, repeats the failures of the others and counts them as its own.
class AgreeOnFailures : public ::testing::EmptyTestEventListener {
 public:
  explicit AgreeOnFailures(MPI_Comm comm) : comm_(comm) {
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
  }

  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed() || is_agreeing_) return;
    failures_ += "[rank " + std::to_string(rank_) + "] " + (result.file_name() != nullptr ? result.file_name() : "?") +
                 ":" + std::to_string(result.line_number()) + ": " + result.message() + "\n";
  }

  void OnTestEnd(const ::testing::TestInfo& info) override {
    is_agreeing_ = true;
    const int length = static_cast<int>(failures_.size());
    int longest = 0;
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Iallreduce(&length, &longest, 1, MPI_INT, MPI_MAX, comm_, &request);
    if (length > 0) abort_unless_joined(request, info);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    if (longest > 0) {
      if (rank_ == 0) {
        for (int source = 1; source < size_; ++source) repeat_failures_of(source);
      } else {
        MPI_Send(failures_.data(), length, MPI_CHAR, 0, 0, comm_);
      }
    }
    failures_.clear();
    is_agreeing_ = false;
  }

 private:
  /// A rank that left a test early may have left the others in a collective call: waiting for them could last for ever.
  void abort_unless_joined(MPI_Request& request, const ::testing::TestInfo& info) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    int done = 0;
    while (done == 0 && std::chrono::steady_clock::now() < deadline) {
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (done != 0) return;
    std::fprintf(stderr, "%s[rank %d] left %s.%s early, and the other ranks did not follow: aborting\n",
                 failures_.c_str(), rank_, info.test_suite_name(), info.name());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }

  void repeat_failures_of(int source) {
    MPI_Status status;
    MPI_Probe(source, 0, comm_, &status);
    int length = 0;
    MPI_Get_count(&status, MPI_CHAR, &length);
    std::string text(static_cast<std::size_t>(length), '\0');
    MPI_Recv(text.data(), length, MPI_CHAR, source, 0, comm_, MPI_STATUS_IGNORE);
    if (!text.empty()) ADD_FAILURE() << text;
  }

  MPI_Comm comm_;
  int rank_ = 0;
  int size_ = 1;
  std::string failures_;
  bool is_agreeing_ = false;
};

int run(int argc, char** argv) {
  const Kokkos::ScopeGuard kokkos(argc, argv);
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  ::testing::TestEventListeners& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (rank != 0) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new AgreeOnFailures(comm));  // owned by GoogleTest
  int failed = RUN_ALL_TESTS();
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, comm);
  MPI_Comm_free(&comm);
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);  // for progress threads
  ::testing::InitGoogleTest(&argc, argv);
  const int failed = run(argc, argv);
  MPI_Finalize();
  return failed;
}
