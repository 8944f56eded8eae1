// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// What every backend asks of the arguments of a collective, before anything is sent.

#include <fmt/format.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "fsdp2/communicator.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2 {

/// Every transfer must hold send · receive_factor = receive · send_factor elements of one dtype; else ShapeError.
inline void check_lengths(const Communicator& group, std::span<const Transfer> transfers, std::string_view verb,
                          std::int64_t send_factor, std::int64_t receive_factor) {
  for (const Transfer& transfer : transfers)
    if (transfer.send.dtype() != transfer.receive.dtype() ||
        checked_multiply(transfer.send.numel(), receive_factor) !=
            checked_multiply(transfer.receive.numel(), send_factor))
      throw ShapeError(fmt::format("{} on group \"{}\" of {} ranks: {} {} cannot be sent into {} {}", verb,
                                   group.name(), group.size(), transfer.send.numel(), to_string(transfer.send.dtype()),
                                   transfer.receive.numel(), to_string(transfer.receive.dtype())));
}

/// The parts of an all-to-all must be equal; else ShapeError.
inline void check_parts(const Communicator& group, std::span<const Transfer> transfers) {
  for (const Transfer& transfer : transfers)
    if (transfer.send.numel() % group.size() != 0)
      throw ShapeError(fmt::format("all_to_all on group \"{}\": {} elements are not {} equal parts", group.name(),
                                   transfer.send.numel(), group.size()));
}

/// Complex numbers have no order; else ShapeError.
inline void check_op(DType dtype, ReduceOp op) {
  if (op != ReduceOp::sum && (dtype == DType::complex64 || dtype == DType::complex128))
    throw ShapeError(fmt::format("{} has no minimum or maximum: only a sum", to_string(dtype)));
}

inline void check_root(const Communicator& group, std::int64_t root) {
  if (root < 0 || root >= group.size())
    throw CommError(
        fmt::format("broadcast on group \"{}\": root {} is not one of its {} ranks", group.name(), root, group.size()));
}

}  // namespace fsdp2
