// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace fsdp2 {

/// The metadata plane: small host values among a group of ranks, and agreement on errors. Every member but rank() and
/// size() is collective. Tensor data goes through Communicator.
class HostCommunicator {
 public:
  /// Duplicates `comm` (collective); MPI_COMM_NULL is a group of one rank that never enters MPI.
  HostCommunicator(MPI_Comm comm, std::string name);
  HostCommunicator(const HostCommunicator&) = delete;
  HostCommunicator& operator=(const HostCommunicator&) = delete;
  /// Leaves an unclosed communicator to MPI_Finalize.
  ~HostCommunicator() = default;

  std::int64_t rank() const { return rank_; }
  std::int64_t size() const { return size_; }
  const std::string& name() const { return name_; }
  /// MPI_COMM_NULL for a group of one rank without MPI.
  MPI_Comm mpi() const { return comm_; }

  /// In place, element-wise, with MPI_MIN, MPI_MAX, MPI_SUM or MPI_BXOR. Lengths must be equal on all ranks.
  void all_reduce(std::span<std::uint64_t> values, MPI_Op op) const;
  void broadcast(std::span<std::uint64_t> values, std::int64_t root) const;
  void broadcast(std::string& text, std::int64_t root) const;
  /// Every rank's text, by rank, on every rank.
  std::vector<std::string> all_gather(const std::string& text) const;
  void barrier() const;

  /// The same without waiting: the values are lent, and `request` is not to be touched, until test says true.
  void start_all_reduce(std::span<std::uint64_t> values, MPI_Op op, MPI_Request& request) const;
  void start_broadcast(std::span<std::byte> bytes, std::int64_t root, MPI_Request& request) const;
  static bool test(MPI_Request& request);

  /// Runs `body` on every rank; if it throws on any, the error of the lowest such rank is thrown on all of them, with
  /// its type, and its rank in front of the message. The one way in which an error of one rank becomes everybody's.
  template <class Body>
  void collectively(Body&& body) const {
    std::exception_ptr error;
    try {
      std::forward<Body>(body)();
    } catch (...) {
      error = std::current_exception();
    }
    agree(error);
  }

  /// The agreement alone, for an error caught earlier (null: none).
  void agree(const std::exception_ptr& error) const;

  /// Throws rank `root`'s error on every rank; what the others pass is ignored. One small broadcast if there is none.
  void agree_with(std::int64_t root, const std::exception_ptr& error) const;

  /// The ranks of one color, ordered by rank: made when it is first asked for by this name, and closed with this one.
  /// Collective. The color must be the same every time.
  const HostCommunicator& subgroup(const std::string& name, std::int64_t color) const;
  /// The lowest rank that shares this rank's memory. Collective when first called.
  std::int64_t node_leader() const;

  void close();

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
  std::string name_;
  std::int64_t rank_ = 0;
  std::int64_t size_ = 1;
  mutable std::map<std::string, std::unique_ptr<HostCommunicator>> subgroups_;
  mutable std::int64_t node_leader_ = -1;
};

/// Which exception type an error has, and its message: what crosses between ranks.
struct ErrorReport {
  std::uint64_t kind = 0;
  std::string message;
};
ErrorReport describe(const std::exception_ptr& error);
/// Throws the exception that `report` describes.
[[noreturn]] void raise(const ErrorReport& report);

}  // namespace fsdp2
