// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>

#include "fsdp2/communicator.hpp"

namespace fsdp2 {

namespace detail {

void PendingList::wait(const std::shared_ptr<PendingWork>& work) {
  std::erase(works_, work);  // first: wait may throw
  work->wait();
}

void PendingList::poll() {
  std::vector<std::shared_ptr<PendingWork>> finished;
  for (const std::shared_ptr<PendingWork>& work : works_)
    if (work.use_count() == 1 && work->test()) finished.push_back(work);
  for (const std::shared_ptr<PendingWork>& work : finished) wait(work);
}

void PendingList::drain() {
  while (!works_.empty()) wait(std::shared_ptr<PendingWork>(works_.front()));
}

}  // namespace detail

void Work::wait() {
  if (!pending_) return;
  const std::shared_ptr<detail::PendingWork> pending = std::move(pending_);
  list_->wait(pending);
}

bool Work::test() {
  return !pending_ || pending_->test();
}

}  // namespace fsdp2
