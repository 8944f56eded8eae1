// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/columns.hpp"

#include <fmt/format.h>

#include <bit>
#include <cstring>

#include "checkpoint/digest.hpp"
#include "checkpoint/file.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::checkpoint {

static_assert(std::endian::native == std::endian::little,
              "the format is little-endian, and columns are stored as they are");

namespace {
template <class T>
std::vector<std::byte> bytes_of(std::span<const T> values) {
  const auto bytes = std::as_bytes(values);
  return {bytes.begin(), bytes.end()};
}
}  // namespace

Column::Column(std::span<const std::uint64_t> values)
    : type(DType::u64), shape{static_cast<std::int64_t>(values.size())}, bytes(bytes_of(values)) {}

Column::Column(std::span<const std::int64_t> values)
    : type(DType::i64), shape{static_cast<std::int64_t>(values.size())}, bytes(bytes_of(values)) {}

Column::Column(std::span<const std::uint8_t> values)
    : type(DType::u8), shape{static_cast<std::int64_t>(values.size())}, bytes(bytes_of(values)) {}

Column::Column(std::string_view text)
    : type(DType::u8), shape{static_cast<std::int64_t>(text.size())}, bytes(bytes_of(std::span(text))) {}

std::uint64_t Column::u64(std::size_t i) const {
  std::uint64_t value = 0;
  std::memcpy(&value, bytes.data() + 8 * i, 8);
  return value;
}

void Column::set_u64(std::size_t i, std::uint64_t value) {
  std::memcpy(bytes.data() + 8 * i, &value, 8);
}

void ListBuilder::store(Columns& columns, const std::string& pointer_path, const std::string& bytes_path) const {
  columns[pointer_path] = Column(std::span<const std::uint64_t>(pointers_));
  columns[bytes_path] = Column(std::string_view(bytes_));
}

void CheckDigest::add(std::span<const std::byte> bytes) {
  const std::uint64_t length = bytes.size();
  crc_ = crc64(std::as_bytes(std::span(&length, 1)), crc_);
  crc_ = crc64(bytes, crc_);
}

Column read_column(const File& file, const DatasetPlace& place, DType type) {
  Column column;
  column.type = type;
  column.shape = place.shape;
  column.bytes = buffer_for(file.path(), place.bytes);
  file.read(column.bytes, place.offset);
  return column;
}

Column read_column(const File& file, const Hdf5Structure& structure, const std::string& path, DType type,
                   std::size_t dimensions) {
  return read_column(file, structure.require(path, type, dimensions), type);
}

Column read_column(const File& file, const Hdf5Structure& structure, const std::string& path, DType type,
                   const Shape& expected) {
  const DatasetPlace place = structure.require(path, type, expected.size());
  if (place.shape != expected)
    throw CorruptError(fmt::format("{}:{} has another shape than expected: {}, not {}", file.path().string(), path,
                                   to_string(place.shape), to_string(expected)));
  return read_column(file, place, type);
}

void check_pointers(const Column& pointers, std::size_t lists, std::size_t length, const std::string& what) {
  bool is_good =
      pointers.size() != 0 && pointers.size() == lists + 1 && pointers.u64(0) == 0 && pointers.u64(lists) == length;
  for (std::size_t i = 0; is_good && i < lists; ++i) is_good = pointers.u64(i) <= pointers.u64(i + 1);
  if (!is_good)
    throw CorruptError(fmt::format("{}: expected {} ascending entries from 0 to {}, found {} entries", what, lists + 1,
                                   length, pointers.size()));
}

std::string_view list_text(const Column& pointers, const Column& bytes, std::size_t i) {
  return bytes.text().substr(pointers.u64(i), pointers.u64(i + 1) - pointers.u64(i));
}

}  // namespace fsdp2::checkpoint
