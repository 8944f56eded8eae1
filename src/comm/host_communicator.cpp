// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "comm/host_communicator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "comm/check_mpi.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2 {

namespace {

int checked_count(std::size_t count) {
  if (count > static_cast<std::size_t>(std::numeric_limits<int>::max()))
    throw CommError(fmt::format("{} metadata values exceed one MPI call", count));
  return static_cast<int>(count);
}

/// The position of the most derived type that an error has is its kind on the wire.
template <class... Types>
struct ErrorKinds {
  static std::uint64_t of(const std::exception& error) {
    std::uint64_t kind = 0;
    std::uint64_t index = 0;
    ((++index, dynamic_cast<const Types*>(&error) != nullptr ? void(kind = index) : void()), ...);
    return kind;
  }
  static void raise(std::uint64_t kind, const std::string& message) {
    std::uint64_t index = 0;
    ((++index == kind ? throw Types(message) : void()), ...);
  }
};
using AllErrors =
    ErrorKinds<Error, ConfigError, ShapeError, CommError, CheckpointError, CorruptError, MismatchError, IoError>;

}  // namespace

ErrorReport describe(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return {AllErrors::of(caught), caught.what()};
  } catch (...) {
    return {0, "an exception of unknown type"};
  }
}

void raise(const ErrorReport& report) {
  AllErrors::raise(report.kind, report.message);
  throw Error(report.message);
}

HostCommunicator::HostCommunicator(MPI_Comm comm, std::string name) : name_(std::move(name)) {
  if (comm == MPI_COMM_NULL) return;
  comm_ = duplicate(comm, name_);
  int rank = 0;
  int size = 0;
  check_mpi(MPI_Comm_rank(comm_, &rank), "MPI_Comm_rank", name_);
  check_mpi(MPI_Comm_size(comm_, &size), "MPI_Comm_size", name_);
  rank_ = rank;
  size_ = size;
}

void HostCommunicator::all_reduce(std::span<std::uint64_t> values, MPI_Op op) const {
  if (size_ == 1) return;
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, values.data(), checked_count(values.size()), MPI_UINT64_T, op, comm_),
            "MPI_Allreduce", name_);
}

void HostCommunicator::broadcast(std::span<std::uint64_t> values, std::int64_t root) const {
  if (size_ == 1) return;
  check_mpi(MPI_Bcast(values.data(), checked_count(values.size()), MPI_UINT64_T, static_cast<int>(root), comm_),
            "MPI_Bcast", name_);
}

void HostCommunicator::broadcast(std::string& text, std::int64_t root) const {
  std::uint64_t length = text.size();
  broadcast({&length, 1}, root);
  text.resize(length);
  if (size_ == 1 || length == 0) return;
  check_mpi(MPI_Bcast(text.data(), checked_count(length), MPI_CHAR, static_cast<int>(root), comm_), "MPI_Bcast", name_);
}

std::vector<std::string> HostCommunicator::all_gather(const std::string& text) const {
  if (size_ == 1) return {text};
  const int length = checked_count(text.size());
  std::vector<int> lengths(static_cast<std::size_t>(size_));
  check_mpi(MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, comm_), "MPI_Allgather", name_);
  std::vector<int> starts(lengths.size());
  const std::size_t total = std::accumulate(lengths.begin(), lengths.end(), std::size_t{0});
  (void)checked_count(total);
  std::exclusive_scan(lengths.begin(), lengths.end(), starts.begin(), 0);
  std::string all(total, '\0');
  check_mpi(MPI_Allgatherv(text.data(), length, MPI_CHAR, all.data(), lengths.data(), starts.data(), MPI_CHAR, comm_),
            "MPI_Allgatherv", name_);
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < lengths.size(); ++i)
    texts.push_back(all.substr(static_cast<std::size_t>(starts[i]), static_cast<std::size_t>(lengths[i])));
  return texts;
}

void HostCommunicator::barrier() const {
  if (size_ > 1) check_mpi(MPI_Barrier(comm_), "MPI_Barrier", name_);
}

void HostCommunicator::start_all_reduce(std::span<std::uint64_t> values, MPI_Op op, MPI_Request& request) const {
  if (size_ == 1) return;
  check_mpi(
      MPI_Iallreduce(MPI_IN_PLACE, values.data(), checked_count(values.size()), MPI_UINT64_T, op, comm_, &request),
      "MPI_Iallreduce", name_);
}

void HostCommunicator::start_broadcast(std::span<std::byte> bytes, std::int64_t root, MPI_Request& request) const {
  if (size_ == 1) return;
  check_mpi(MPI_Ibcast(bytes.data(), checked_count(bytes.size()), MPI_BYTE, static_cast<int>(root), comm_, &request),
            "MPI_Ibcast", name_);
}

bool HostCommunicator::test(MPI_Request& request) {
  if (request == MPI_REQUEST_NULL) return true;  // also without MPI
  int is_done = 0;
  check_mpi(MPI_Test(&request, &is_done, MPI_STATUS_IGNORE), "MPI_Test", "asynchronous");
  return is_done != 0;
}

void HostCommunicator::agree(const std::exception_ptr& error) const {
  if (size_ == 1) {
    if (error) std::rethrow_exception(error);
    return;
  }
  std::uint64_t first_failed = static_cast<std::uint64_t>(error ? rank_ : size_);
  all_reduce({&first_failed, 1}, MPI_MIN);
  if (first_failed != static_cast<std::uint64_t>(size_)) agree_with(static_cast<std::int64_t>(first_failed), error);
}

void HostCommunicator::agree_with(std::int64_t root, const std::exception_ptr& error) const {
  if (size_ == 1) {
    if (error) std::rethrow_exception(error);
    return;
  }
  constexpr std::uint64_t no_error = std::numeric_limits<std::uint64_t>::max();
  ErrorReport report{no_error, ""};
  if (rank_ == root && error) {
    report = describe(error);
    report.message = fmt::format("rank {}: {}", rank_, report.message);
  }
  broadcast({&report.kind, 1}, root);
  if (report.kind == no_error) return;
  broadcast(report.message, root);
  raise(report);
}

const HostCommunicator& HostCommunicator::subgroup(const std::string& name, std::int64_t color) const {
  std::unique_ptr<HostCommunicator>& group = subgroups_[name];
  if (group != nullptr) return *group;
  MPI_Comm part = MPI_COMM_NULL;
  if (size_ > 1)
    check_mpi(MPI_Comm_split(comm_, static_cast<int>(color), static_cast<int>(rank_), &part), "MPI_Comm_split", name_);
  group = std::make_unique<HostCommunicator>(part, name_ + ", " + name);
  if (part != MPI_COMM_NULL) check_mpi(MPI_Comm_free(&part), "MPI_Comm_free", name_);
  return *group;
}

std::int64_t HostCommunicator::node_leader() const {
  if (node_leader_ >= 0) return node_leader_;
  if (size_ == 1) return node_leader_ = 0;
  MPI_Comm node = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, static_cast<int>(rank_), MPI_INFO_NULL, &node),
            "MPI_Comm_split_type", name_);
  std::int64_t leader = rank_;
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &leader, 1, MPI_INT64_T, MPI_MIN, node), "MPI_Allreduce", name_);
  check_mpi(MPI_Comm_free(&node), "MPI_Comm_free", name_);
  return node_leader_ = leader;
}

void HostCommunicator::close() {
  for (const auto& [name, group] : subgroups_) group->close();
  if (comm_ != MPI_COMM_NULL) check_mpi(MPI_Comm_free(&comm_), "MPI_Comm_free", name_);
}

}  // namespace fsdp2
