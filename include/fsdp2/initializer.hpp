// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

namespace fsdp2 {

/// How the elements of a new parameter are computed. Random values come from Philox4x32-10, keyed by the seed and
/// counted by the element's row-major index in the full tensor and a hash of "<module>.<parameter>": each rank computes
/// its own rows, the full tensor never exists, and it is the same at any number of ranks. Parameters of other names are
/// independent.
struct Initializer {
  enum class Kind : std::uint8_t { constant, uniform, normal, kaiming, truncated_normal };

  Kind kind = Kind::constant;
  double first = 0;   ///< the constant, the lower bound, or the mean
  double second = 0;  ///< the upper bound, or the standard deviation
  std::uint64_t seed = 0;
  double low = 0;  ///< bounds of truncated_normal
  double high = 0;
};

namespace init {

inline Initializer constant(double value) {
  return {Initializer::Kind::constant, value};
}
inline Initializer zeros() {
  return constant(0);
}
inline Initializer ones() {
  return constant(1);
}
/// Between low and high, in steps of (high − low)·2⁻³².
inline Initializer uniform(double low, double high, std::uint64_t seed) {
  return {Initializer::Kind::uniform, low, high, seed};
}
inline Initializer normal(double mean, double standard_deviation, std::uint64_t seed) {
  return {Initializer::Kind::normal, mean, standard_deviation, seed};
}
/// He initialisation for layers followed by a rectifier: normal, mean 0, standard deviation √(2 / fan_in), where fan_in
/// is the number of elements of one row: numel / shape[0].
inline Initializer kaiming(std::uint64_t seed) {
  return {Initializer::Kind::kaiming, 0, 0, seed};
}

/// Normal numbers of which those outside [low, high] are drawn again. Throws ConfigError unless the deviation is
/// positive and at least one number in a thousand is inside.
Initializer truncated_normal(double mean, double standard_deviation, double low, double high, std::uint64_t seed);

}  // namespace init

}  // namespace fsdp2
