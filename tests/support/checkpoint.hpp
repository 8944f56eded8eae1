// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Helpers of the checkpoint tests: tensors whose bytes tell their place, a shared scratch directory, equal errors.

#include <gtest/gtest.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/digest.hpp"
#include "comm/host_communicator.hpp"
#include "fsdp2/checkpoint/load.hpp"
#include "fsdp2/checkpoint/save.hpp"
#include "fsdp2/error.hpp"
#include "support/tensor_bytes.hpp"

namespace fsdp2::testing {

/// Small blocks, so that small tensors have many.
inline FormatSizes small_blocks() {
  return {4096, 4096, std::int64_t{4} << 20};
}

/// The exponent bits of a floating-point type, of one part of a complex one, and a bit of the payload: what makes a
/// NaN. 0 for other types.
inline std::uint64_t nan_bits(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::complex128:
      return 0x7ff0000000000001;
    case DType::f32:
    case DType::complex64:
      return 0x7f800001;
    case DType::f16:
      return 0x7c01;
    case DType::bf16:
      return 0x7f81;
    case DType::f8_e4m3:
      return 0x7f;
    case DType::f8_e5m2:
      return 0x7d;
    default:
      return 0;
  }
}

/// The part `box` of the tensor with this name and shape, row-major. An element's bytes follow from the name and its
/// global index: any bit pattern, and every third a NaN with any sign and payload, quiet or signalling; bools are 0
/// or 1.
inline Bytes box_bytes(const std::string& name, DType dtype, const Shape& shape, const Box& box) {
  const std::uint64_t seed = checkpoint::crc64(std::as_bytes(std::span(name)));
  const bool is_complex = dtype == DType::complex64 || dtype == DType::complex128;
  const std::int64_t part_bytes = is_complex ? size_of(dtype) / 2 : size_of(dtype);
  Bytes bytes;
  bytes.reserve(static_cast<std::size_t>(box.numel() * size_of(dtype)));
  for (RunCursor cursor = runs_of(shape, box); !cursor.is_done(); cursor.next())
    for (std::int64_t index = cursor.run().from; index < cursor.run().from + cursor.run().count; ++index)
      for (std::int64_t i = 0; i < size_of(dtype); ++i) {
        std::uint64_t bits = mix(seed + static_cast<std::uint64_t>(index * 16 + i));
        if (index % 3 == 1) bits |= nan_bits(dtype) >> (8 * (i % part_bytes));
        bytes.push_back(static_cast<std::byte>(dtype == DType::boolean ? bits & 1 : bits & 0xff));
      }
  return bytes;
}

/// A tensor of a dict, with the values of its name, or zeros.
inline void add_tensor(StateDict& state, const DeviceMesh& mesh, const std::string& name, DType dtype,
                       const Shape& shape, std::vector<Placement> placements, bool has_values,
                       std::vector<std::int64_t> split_order = {}) {
  TensorSpec spec{dtype, shape, std::move(placements), std::move(split_order)};
  const Box box = local_box(spec, mesh.spec(), mesh.coordinate());
  const Tensor local(ExecutionSpace(), dtype, box.extent, name);
  if (has_values) set_bytes(local, box_bytes(name, dtype, shape, box));
  state.tensors[name] = DTensor::from_local(local, std::move(spec), mesh);
}

/// Whether every tensor of a dict has the values of its name.
inline void expect_values(const StateDict& state) {
  for (const auto& [name, tensor] : state.tensors)
    EXPECT_EQ(bytes_of(tensor.local()), box_bytes(name, tensor.spec().dtype, tensor.spec().shape, tensor.box()))
        << name << " on rank " << tensor.mesh().rank();
}

/// A directory that all ranks share, gone when every rank has destroyed its object. Collective.
class ScratchDirectory {
 public:
  explicit ScratchDirectory(MPI_Comm comm = MPI_COMM_WORLD) : host_(comm, "scratch") {
    std::string path;
    if (host_.rank() == 0) {
      path = (std::filesystem::temp_directory_path() / "fsdp2-test-XXXXXX").string();
      if (::mkdtemp(path.data()) == nullptr) path.clear();
    }
    host_.broadcast(path, 0);
    if (path.empty()) throw IoError("cannot make a scratch directory");
    path_ = path;
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  ~ScratchDirectory() {
    host_.barrier();
    std::error_code ignored;
    if (host_.rank() == 0) std::filesystem::remove_all(path_, ignored);
    host_.close();
  }

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  HostCommunicator host_;
  std::filesystem::path path_;
};

/// The names in a directory, hidden ones included.
inline std::vector<std::string> names_in(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

inline Bytes file_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

inline void write_file(const std::filesystem::path& path, const Bytes& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

/// Runs a collective call that must throw the same `ErrorType` with the same message on every rank; returns the
/// message.
template <class ErrorType, class Call>
std::string same_error(const HostCommunicator& host, Call&& call) {
  std::string message;
  try {
    std::forward<Call>(call)();
    ADD_FAILURE() << "nothing was thrown on rank " << host.rank();
  } catch (const ErrorType& error) {
    message = error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another type of error on rank " << host.rank() << ": " << error.what();
    message = error.what();
  }
  for (const std::string& other : host.all_gather(message)) EXPECT_EQ(other, message);
  return message;
}

}  // namespace fsdp2::testing
