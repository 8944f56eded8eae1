// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <mpi.h>

#include <functional>

namespace fsdp2::tool {

/// The processes of this program that an MPI launcher has started, if one has: then, and only then, MPI is initialized.
class Launch {
 public:
  Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  ~Launch() = default;

  /// MPI_COMM_NULL for one process.
  MPI_Comm comm() const { return comm_; }
  bool is_first() const { return rank_ == 0; }
  /// Runs `body` in every process, and goes on only if none ended the subcommand: else all end it, with the largest
  /// status.
  void together(const std::function<void()>& body) const;
  /// Ends all processes where this one has failed alone.
  void abort(int status) const;
  /// Ends MPI; all processes together.
  void finish();

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  bool is_initialized_ = false;
};

}  // namespace fsdp2::tool
