// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <Kokkos_Core.hpp>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp2/shape.hpp"
#include "fsdp2/tensor.hpp"

namespace examples {

/// All bytes of a file. Throws std::runtime_error where it cannot be read or has fewer than `least` of them.
inline std::vector<std::uint8_t> read_text(const std::string& path, std::int64_t least) {
  std::error_code error;
  std::vector<std::uint8_t> bytes;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (!error) {
    bytes.resize(size);
    errno = 0;
    std::ifstream file(path, std::ios::binary);
    if (!file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size)))
      error = std::error_code(errno, std::generic_category());
  }
  if (error) throw std::runtime_error("cannot read \"" + path + "\": " + error.message());
  if (static_cast<std::int64_t>(size) < least)
    throw std::runtime_error("\"" + path + "\" has " + std::to_string(size) + " bytes: a sample needs " +
                             std::to_string(least));
  return bytes;
}

/// The final mix of SplitMix64 (Steele, Lea, Flood 2014): every bit of the result depends on every bit of `x`.
inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// This rank's samples of the global batches of a text. A sample is a stretch of `window` bytes, each of which is
/// predicted from the `context` bytes before it; where it lies depends on the step and its number in the global batch
/// alone.
class Batches {
 public:
  /// `text` has at least window + context bytes.
  Batches(std::vector<std::uint8_t> text, fsdp2::Range samples, std::int64_t window, std::int64_t context)
      : text_(std::move(text)),
        samples_(samples),
        window_(window),
        positions_(text_.size() - static_cast<std::size_t>(window + context) + 1),
        inputs_("inputs", static_cast<std::size_t>(rows()), static_cast<std::size_t>(context)),
        targets_("targets", static_cast<std::size_t>(rows())),
        host_inputs_(Kokkos::create_mirror_view(inputs_)),
        host_targets_(Kokkos::create_mirror_view(targets_)) {}

  using Inputs = Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, fsdp2::MemorySpace>;
  using Targets = Kokkos::View<std::uint8_t*, fsdp2::MemorySpace>;

  /// Predicted bytes on this rank.
  std::int64_t rows() const { return samples_.size() * window_; }
  /// One row for each predicted byte: the bytes before it, and the byte.
  const Inputs& inputs() const { return inputs_; }
  const Targets& targets() const { return targets_; }

  /// Fills inputs and targets with the batch of a step, ordered on `exec`. The batch before must not be in use any
  /// more.
  void load(const fsdp2::ExecutionSpace& exec, std::int64_t step) {
    const std::size_t context = inputs_.extent(1);
    std::size_t row = 0;
    for (std::int64_t sample = samples_.begin; sample < samples_.end; ++sample) {
      const std::uint64_t random = mix(mix(static_cast<std::uint64_t>(step)) + static_cast<std::uint64_t>(sample));
      std::size_t at = random % positions_;
      for (std::int64_t i = 0; i < window_; ++i, ++at, ++row) {
        for (std::size_t c = 0; c < context; ++c) host_inputs_(row, c) = text_[at + c];
        host_targets_(row) = text_[at + context];
      }
    }
    Kokkos::deep_copy(exec, inputs_, host_inputs_);
    Kokkos::deep_copy(exec, targets_, host_targets_);
  }

 private:
  std::vector<std::uint8_t> text_;
  fsdp2::Range samples_;
  std::int64_t window_;
  std::uint64_t positions_;  // where a sample may begin
  Inputs inputs_;
  Targets targets_;
  Inputs::HostMirror host_inputs_;
  Targets::HostMirror host_targets_;
};

/// This rank's samples of the global batches of a text, each of which is a stretch of `context` bytes and, one further,
/// the bytes to predict. Where it lies depends on the seed, the step and its number in the global batch alone.
class Sequences {
 public:
  using Inputs = Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, fsdp2::MemorySpace>;
  using Targets = Kokkos::View<std::uint8_t*, Kokkos::LayoutRight, fsdp2::MemorySpace>;

  /// `text` has more than `context` bytes.
  Sequences(std::vector<std::uint8_t> text, fsdp2::Range samples, std::int64_t context, std::uint64_t seed)
      : text_(std::move(text)),
        samples_(samples),
        seed_(mix(seed)),
        positions_(text_.size() - static_cast<std::size_t>(context)),
        inputs_("inputs", static_cast<std::size_t>(samples.size()), static_cast<std::size_t>(context)),
        targets_("targets", static_cast<std::size_t>(samples.size() * context)),
        host_inputs_(Kokkos::create_mirror_view(inputs_)),
        host_targets_(Kokkos::create_mirror_view(targets_)) {}

  /// On this rank.
  std::int64_t size() const { return samples_.size(); }

  /// Bytes [samples, context] and targets [samples · context] of some of this rank's samples, counted from 0.
  Inputs inputs(const fsdp2::Range& part) const { return Kokkos::subview(inputs_, pair(part, 1), Kokkos::ALL()); }
  Targets targets(const fsdp2::Range& part) const {
    return Kokkos::subview(targets_, pair(part, static_cast<std::int64_t>(inputs_.extent(1))));
  }

  /// Fills inputs and targets with the batch of a step, ordered on `exec`. The batch before must not be in use any
  /// more.
  void load(const fsdp2::ExecutionSpace& exec, std::int64_t step) {
    const std::size_t context = inputs_.extent(1);
    for (std::size_t row = 0; row < inputs_.extent(0); ++row) {
      const std::uint64_t sample = static_cast<std::uint64_t>(samples_.begin) + row;
      const std::size_t at = mix(mix(seed_ + static_cast<std::uint64_t>(step)) + sample) % positions_;
      for (std::size_t i = 0; i < context; ++i) {
        host_inputs_(row, i) = text_[at + i];
        host_targets_(row * context + i) = text_[at + i + 1];
      }
    }
    Kokkos::deep_copy(exec, inputs_, host_inputs_);
    Kokkos::deep_copy(exec, targets_, host_targets_);
  }

 private:
  static std::pair<std::int64_t, std::int64_t> pair(const fsdp2::Range& part, std::int64_t factor) {
    return {part.begin * factor, part.end * factor};
  }

  std::vector<std::uint8_t> text_;
  fsdp2::Range samples_;
  std::uint64_t seed_;
  std::uint64_t positions_;  // where a sample may begin
  Inputs inputs_;
  Targets targets_;
  Inputs::HostMirror host_inputs_;
  Targets::HostMirror host_targets_;
};

}  // namespace examples
