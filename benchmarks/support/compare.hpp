// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

namespace fsdp2::bench {

/// Something to time. `run` is collective over the ranks; `clean` undoes it, untimed.
struct Contender {
  std::string name;
  std::function<void()> run;
  std::function<void()> clean = [] {};
};

inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Times the contenders in rotated order, so that drift of the machine hits all alike, and prints on rank 0 the median
/// of each, its rate for `bytes` bytes, and the limit's time over its own. The first contender is the limit; it runs
/// twice a round, and its ratio with itself is the noise. A round's time is that of the slowest rank.
inline void compare(const std::string& title, double bytes, int rounds, std::vector<Contender> contenders) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  contenders.push_back(contenders.front());
  contenders.back().name += " (again)";
  std::vector<std::vector<double>> seconds(contenders.size());
  for (int round = -1; round < rounds; ++round)  // round -1 warms up
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      const std::size_t who = (i + static_cast<std::size_t>(round + 1)) % contenders.size();
      MPI_Barrier(MPI_COMM_WORLD);
      const double begin = MPI_Wtime();
      contenders[who].run();
      double elapsed = MPI_Wtime() - begin;
      MPI_Allreduce(MPI_IN_PLACE, &elapsed, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
      contenders[who].clean();
      if (round >= 0) seconds[who].push_back(elapsed);
    }
  if (rank != 0) return;
  const double limit = median(seconds.front());
  std::printf("%s (%d rounds, medians)\n", title.c_str(), rounds);
  for (std::size_t i = 0; i < contenders.size(); ++i) {
    const double mine = median(seconds[i]);
    std::printf("  %-28s %10.3f ms %9.1f MB/s   limit/this %.2f\n", contenders[i].name.c_str(), mine * 1e3,
                bytes / mine / 1e6, limit / mine);
  }
}

}  // namespace fsdp2::bench
