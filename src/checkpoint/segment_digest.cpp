// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/segment_digest.hpp"

#include <algorithm>

namespace fsdp2::checkpoint {

SegmentDigest::PieceRuns::PieceRuns(const TensorEntry& tensor, const Piece& piece)
    : width_(size_of(tensor.spec.dtype)), tensor_bytes_(tensor.bytes()), runs_(runs_of(tensor.spec.shape, piece.box)) {}

void SegmentDigest::PieceRuns::take(std::uint64_t crc, std::int64_t count) {
  taken_ += count;
  digest_.add(crc, static_cast<std::uint64_t>(runs_.run().from * width_ + taken_));
  if (remaining() != 0) return;
  runs_.next();
  taken_ = 0;
}

SegmentDigest::SegmentDigest(const CheckpointIndex& index, const RankPlan& plan, DType dtype)
    : index_(index), plan_(plan) {
  for (std::size_t p = 0; p < plan.pieces.size(); ++p)
    if (index.tensors[plan.pieces[p].tensor].spec.dtype == dtype) pieces_.push_back(p);
}

std::uint64_t SegmentDigest::add_block(std::span<const std::byte> block) {
  const std::int64_t begin = block_begin_;
  const std::int64_t end = begin + static_cast<std::int64_t>(block.size());
  RunDigest digest;
  std::int64_t at = begin;
  const auto digest_up_to = [&](std::int64_t to) {
    const std::uint64_t crc =
        crc64(block.subspan(static_cast<std::size_t>(at - begin), static_cast<std::size_t>(to - at)));
    digest.add(crc, static_cast<std::uint64_t>(to - begin));
    at = to;
    return crc;
  };
  while (contributions_.size() < pieces_.size()) {
    const Piece& piece = plan_.pieces[pieces_[contributions_.size()]];
    if (piece.start >= end) break;
    if (!runs_) runs_.emplace(index_.tensors[piece.tensor], piece);
    while (!runs_->is_done() && piece.start + runs_->position() < end) {
      const std::int64_t from = piece.start + runs_->position();
      const std::int64_t to = std::min(from + runs_->remaining(), end);
      if (from > at) digest_up_to(from);  // the gap before a piece
      runs_->take(digest_up_to(to), to - from);
    }
    if (!runs_->is_done()) break;
    contributions_.push_back(runs_->contribution());
    runs_.reset();
  }
  if (at < end) digest_up_to(end);
  block_begin_ = end;
  return digest.finish(static_cast<std::uint64_t>(block.size()));
}

void SegmentDigest::store(std::vector<std::uint64_t>& by_piece) const {
  for (std::size_t i = 0; i < contributions_.size(); ++i) by_piece[pieces_[i]] = contributions_[i];
}

}  // namespace fsdp2::checkpoint
