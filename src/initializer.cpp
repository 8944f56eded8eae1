// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/initializer.hpp"

#include <fmt/format.h>

#include <cmath>
#include <numbers>

#include "fsdp2/error.hpp"

namespace fsdp2::init {

Initializer truncated_normal(double mean, double standard_deviation, double low, double high, std::uint64_t seed) {
  // Sampling by rejection takes 1 / inside attempts.
  const auto below = [&](double x) { return 0.5 * std::erfc((mean - x) / (standard_deviation * std::numbers::sqrt2)); };
  const double inside = below(high) - below(low);
  if (!(standard_deviation > 0 && inside >= 1e-3))
    throw ConfigError(fmt::format(
        "truncated_normal: of a normal distribution of mean {} and deviation {}, the interval [{}, {}] holds {:.3g}: "
        "expected a positive deviation, and at least 0.001",
        mean, standard_deviation, low, high, inside));
  return {Initializer::Kind::truncated_normal, mean, standard_deviation, seed, low, high};
}

}  // namespace fsdp2::init
