// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <utility>

namespace fsdp2 {

/// The only owner of raw handles: a value that is released once. `Traits` has `Type`, `invalid()` and `release(Type)`,
/// which must not throw.
template <class Traits>
class UniqueHandle {
 public:
  using Type = typename Traits::Type;

  UniqueHandle() = default;
  explicit UniqueHandle(Type value) : value_(value) {}
  UniqueHandle(UniqueHandle&& other) noexcept : value_(other.detach()) {}
  UniqueHandle& operator=(UniqueHandle&& other) noexcept {
    if (this != &other) {
      reset();
      value_ = other.detach();
    }
    return *this;
  }
  UniqueHandle(const UniqueHandle&) = delete;
  UniqueHandle& operator=(const UniqueHandle&) = delete;
  ~UniqueHandle() { reset(); }

  Type get() const { return value_; }
  bool is_valid() const { return value_ != Traits::invalid(); }
  /// Gives the handle away.
  Type detach() { return std::exchange(value_, Traits::invalid()); }
  void reset() {
    if (is_valid()) Traits::release(detach());
  }

 private:
  Type value_ = Traits::invalid();
};

}  // namespace fsdp2
