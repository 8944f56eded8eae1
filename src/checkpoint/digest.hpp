// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fsdp2::checkpoint {

/// CRC-64/XZ of bytes that follow others whose CRC is `before` (0 for none).
std::uint64_t crc64(std::span<const std::byte> bytes, std::uint64_t before = 0);

/// a·b modulo the polynomial of CRC-64/XZ, in the reflected representation, where bit 63 is x^0.
std::uint64_t multiply_mod(std::uint64_t a, std::uint64_t b);

/// x^(8·bytes) modulo the polynomial: multiplying a CRC by it shifts the CRC over that many following bytes.
std::uint64_t shift_factor(std::uint64_t bytes);

/// The CRC of a byte string from CRCs of its runs, given in ascending order with anything between them: the runs' part
/// of the whole, so that the xor over disjoint sets of runs that cover the string is its CRC. One multiplication a run.
class RunDigest {
 public:
  /// A run with CRC `crc` that ends at byte `end` of the string.
  void add(std::uint64_t crc, std::uint64_t end) {
    value_ = multiply_mod(value_, factor_over(end - end_)) ^ crc;
    end_ = end;
  }
  /// The contribution to the CRC of a string of `length` bytes.
  std::uint64_t finish(std::uint64_t length) { return multiply_mod(value_, factor_over(length - end_)); }

 private:
  /// Runs of a box are mostly equally far apart.
  std::uint64_t factor_over(std::uint64_t distance) {
    if (distance != distance_) {
      distance_ = distance;
      factor_ = shift_factor(distance);
    }
    return factor_;
  }

  std::uint64_t value_ = 0;
  std::uint64_t end_ = 0;
  std::uint64_t distance_ = 0;
  std::uint64_t factor_ = std::uint64_t{1} << 63;
};

}  // namespace fsdp2::checkpoint
