// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "checkpoint/digest.hpp"
#include "fsdp2/checkpoint/layout.hpp"

namespace fsdp2::checkpoint {

/// Both digests of one rank's segment of one dtype in one pass over its bytes: the CRC of every block, and the
/// contribution of every piece to its tensor's digest.
class SegmentDigest {
 public:
  /// The index and the plan must outlive it.
  SegmentDigest(const CheckpointIndex& index, const RankPlan& plan, DType dtype);

  /// The CRC of the next block of the segment.
  std::uint64_t add_block(std::span<const std::byte> block);

  /// Writes the contributions of the pieces of this dtype, which must all have gone by, to their numbers in the plan.
  void store(std::vector<std::uint64_t>& by_piece) const;

 private:
  /// The runs of a piece in its tensor, taken in parts of any size.
  class PieceRuns {
   public:
    PieceRuns(const TensorEntry& tensor, const Piece& piece);

    bool is_done() const { return runs_.is_done(); }
    /// Of the next byte, in the piece.
    std::int64_t position() const { return runs_.run().to * width_ + taken_; }
    std::int64_t remaining() const { return runs_.run().count * width_ - taken_; }
    void take(std::uint64_t crc, std::int64_t count);
    std::uint64_t contribution() { return digest_.finish(static_cast<std::uint64_t>(tensor_bytes_)); }

   private:
    std::int64_t width_;
    std::int64_t tensor_bytes_;
    RunCursor runs_;
    std::int64_t taken_ = 0;  // bytes of the current run
    RunDigest digest_;
  };

  const CheckpointIndex& index_;
  const RankPlan& plan_;
  std::vector<std::size_t> pieces_;  // of this dtype, numbers in the plan
  std::vector<std::uint64_t> contributions_;
  std::int64_t block_begin_ = 0;
  std::optional<PieceRuns> runs_;  // of the piece under way: number contributions_.size()
};

}  // namespace fsdp2::checkpoint
