// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "support/text.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t window = 5;
constexpr std::int64_t context = 3;

/// Each byte is its position.
std::vector<std::uint8_t> counting_text(std::size_t size) {
  std::vector<std::uint8_t> text(size);
  for (std::size_t i = 0; i < size; ++i) text[i] = static_cast<std::uint8_t>(i);
  return text;
}

/// One row after another: the context, then the target.
std::vector<int> rows_of(const fsdp2::Range& samples, std::int64_t step, std::size_t text_size = 200) {
  examples::Batches batches(counting_text(text_size), samples, window, context);
  const fsdp2::ExecutionSpace exec;
  batches.load(exec, step);
  exec.fence();
  const auto inputs = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), batches.inputs());
  const auto targets = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), batches.targets());
  std::vector<int> result;
  for (std::size_t row = 0; row < static_cast<std::size_t>(batches.rows()); ++row) {
    for (std::size_t c = 0; c < static_cast<std::size_t>(context); ++c) result.push_back(inputs(row, c));
    result.push_back(targets(row));
  }
  return result;
}

TEST(Batches, ASamplePredictsConsecutiveBytesFromThoseBefore) {
  const std::vector<int> rows = rows_of({0, 1}, 1);
  ASSERT_EQ(rows.size(), static_cast<std::size_t>(window * (context + 1)));
  for (std::int64_t row = 0; row < window; ++row)
    for (std::int64_t c = 0; c <= context; ++c)
      EXPECT_EQ(rows[static_cast<std::size_t>(row * (context + 1) + c)], rows[0] + row + c);
}

TEST(Batches, AreTheSameHoweverTheyAreSplit) {
  constexpr std::int64_t batch = 9;
  const std::vector<int> whole = rows_of({0, batch}, 17);
  for (std::int64_t ranks = 1; ranks <= 8; ++ranks) {
    std::vector<int> joined;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      const std::vector<int> part = rows_of(fsdp2::chunk(batch, ranks, rank), 17);
      joined.insert(joined.end(), part.begin(), part.end());
    }
    EXPECT_EQ(joined, whole) << ranks << " ranks";
  }
}

TEST(Batches, DifferFromStepToStep) {
  EXPECT_NE(rows_of({0, 4}, 1), rows_of({0, 4}, 2));
}

TEST(Batches, ReachEveryPositionOfTheTextAndNoOther) {
  constexpr int positions = 20;
  std::vector<int> seen(positions, 0);
  for (std::int64_t step = 1; step <= 50; ++step) {
    const std::vector<int> rows = rows_of({0, 8}, step, positions - 1 + window + context);
    for (std::size_t sample = 0; sample < 8; ++sample)
      ++seen.at(static_cast<std::size_t>(rows[sample * window * (context + 1)]));
  }
  EXPECT_GT(*std::min_element(seen.begin(), seen.end()), 0);
}

/// One sample after another: its bytes, then its targets.
std::vector<int> samples_of(const fsdp2::Range& samples, std::int64_t step, std::uint64_t seed,
                            const fsdp2::Range& part) {
  examples::Sequences sequences(counting_text(200), samples, context, seed);
  sequences.load(fsdp2::ExecutionSpace(), step);
  const auto inputs = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), sequences.inputs(part));
  const auto targets = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), sequences.targets(part));
  EXPECT_EQ(targets.extent(0), inputs.extent(0) * inputs.extent(1));
  std::vector<int> result;
  for (std::size_t sample = 0; sample < inputs.extent(0); ++sample) {
    for (std::size_t i = 0; i < inputs.extent(1); ++i) result.push_back(inputs(sample, i));
    for (std::size_t i = 0; i < inputs.extent(1); ++i) result.push_back(targets(sample * inputs.extent(1) + i));
  }
  return result;
}

TEST(Sequences, TargetsAreTheNextBytes) {
  const std::vector<int> values = samples_of({0, 4}, 1, 1, {0, 4});
  ASSERT_EQ(values.size(), static_cast<std::size_t>(4 * 2 * context));
  for (std::size_t sample = 0; sample < 4; ++sample)
    for (std::int64_t i = 0; i < context; ++i) {
      const std::size_t at = sample * 2 * static_cast<std::size_t>(context);
      EXPECT_EQ(values[at + static_cast<std::size_t>(i)], values[at] + i);
      EXPECT_EQ(values[at + static_cast<std::size_t>(context + i)], values[at] + i + 1);
    }
}

TEST(Sequences, AreTheSameHoweverTheyAreSplit) {
  constexpr std::int64_t batch = 7;
  const std::vector<int> whole = samples_of({0, batch}, 17, 1, {0, batch});
  for (std::int64_t ranks = 1; ranks <= 8; ++ranks)
    for (std::int64_t parts = 1; parts <= 3; ++parts) {
      std::vector<int> joined;
      for (std::int64_t rank = 0; rank < ranks; ++rank)
        for (std::int64_t part = 0; part < parts; ++part) {
          const fsdp2::Range own = fsdp2::chunk(batch, ranks, rank);
          const std::vector<int> some = samples_of(own, 17, 1, fsdp2::chunk(own.size(), parts, part));
          joined.insert(joined.end(), some.begin(), some.end());
        }
      EXPECT_EQ(joined, whole) << ranks << " ranks, " << parts << " parts";
    }
}

TEST(Sequences, DifferByStepAndSeed) {
  const std::vector<int> values = samples_of({0, 4}, 1, 1, {0, 4});
  EXPECT_NE(samples_of({0, 4}, 2, 1, {0, 4}), values);
  EXPECT_NE(samples_of({0, 4}, 1, 2, {0, 4}), values);
}

TEST(Batches, ReadTextRefusesWhatItCannotUse) {
  EXPECT_THROW(examples::read_text("/nonexistent/text", 1), std::runtime_error);
  EXPECT_THROW(examples::read_text("/", 1), std::runtime_error);
  const std::string path = ::testing::TempDir() + "fsdp2_text_test";
  std::ofstream(path) << "abc";
  EXPECT_EQ(examples::read_text(path, 3), (std::vector<std::uint8_t>{'a', 'b', 'c'}));
  EXPECT_THROW(examples::read_text(path, 4), std::runtime_error);
  std::filesystem::remove(path);
}

}  // namespace
