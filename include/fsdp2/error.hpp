// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <stdexcept>
#include <string>

namespace fsdp2 {

/// Base of every exception that the library throws. The message says what was being done, to which tensor, file and
/// rank, what was found, what was expected, and what to do about it. An error that one rank meets inside a collective
/// call is thrown on every rank of that call, with the same type and the same message.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A setting is missing, contradictory or not supported: nothing was changed.
class ConfigError : public Error {
 public:
  using Error::Error;
};

/// A shape, dtype, layout, name or index does not fit, or an element count overflows 64 bits: nothing was changed.
class ShapeError : public Error {
 public:
  using Error::Error;
};

/// A collective failed, or ranks disagree about one. The communicator may be unusable afterwards.
class CommError : public Error {
 public:
  using Error::Error;
};

/// Base of everything that saving, loading and resharding throw.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

/// The bytes of a checkpoint contradict their digests, its tables contradict each other, or a part is absent.
class CorruptError : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

/// The checkpoint is sound, but is not what the caller asked for: missing or unexpected keys, other shapes or dtypes.
class MismatchError : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

/// The operating system refused: the message carries the call, the path and errno's text.
class IoError : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

}  // namespace fsdp2
