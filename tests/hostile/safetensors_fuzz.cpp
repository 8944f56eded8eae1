// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
// Reads safetensors files whose headers were changed at will. The reader may refuse with a CorruptError; what it
// accepts must hold together. safetensors_fuzz [FIRST COUNT] reads these inputs only. Each input is a list of changes
// of four bytes, so that libFuzzer can make inputs too.

#include <algorithm>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors_header.hpp"
#include "fsdp2/error.hpp"
#include "hostile/fuzz.hpp"
#include "support/scratch_folder.hpp"

namespace fsdp2::testing {
namespace {

using checkpoint::SafetensorsHeader;

constexpr const char* some_header =
    R"({"__metadata__":{"format":"pt","a":""},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
    R"("b":{"dtype":"U8","shape":[],"data_offsets":[24,25]},"c\u00e4/\n":{"dtype":"BF16","shape":[0,4],)"
    R"("data_offsets":[25,25]},"d":{"dtype":"BOOL","shape":[1,7],"data_offsets":[25,32]}}   )";
constexpr std::int64_t data_bytes = 32;

/// What changes insert.
constexpr const char* tokens[] = {"{",
                                  "}",
                                  "[",
                                  "]",
                                  ",",
                                  ":",
                                  "\"",
                                  "\\u0000",
                                  "\\",
                                  "-1",
                                  "0",
                                  "1",
                                  "2",
                                  "24",
                                  "25",
                                  "32",
                                  "9223372036854775808",
                                  "18446744073709551616",
                                  "1e3",
                                  "0.5",
                                  "null",
                                  "true",
                                  "\"F64\"",
                                  "\"I8\"",
                                  "\"shape\"",
                                  "\"dtype\"",
                                  "\"__metadata__\"",
                                  "\"a\"",
                                  "\xff",
                                  "\xc3\xa4",
                                  "[[[[[[[[",
                                  "{\"a\":{\"a\":"};

void require(bool condition, const char* what) {
  if (!condition) throw std::logic_error(what);
}

constexpr std::size_t change_bytes = 4;

/// Kind, place (2 bytes), what.
void change(std::string& text, std::span<const std::uint8_t> bytes) {
  const std::size_t at = static_cast<std::size_t>(bytes[1] << 8 | bytes[2]) % (text.size() + 1);
  const std::size_t what = bytes[3];
  switch (bytes[0] % 5) {
    case 0:
      text.insert(at, tokens[what % std::size(tokens)]);
      break;
    case 1:
      text.erase(at, 1 + what % 4);
      break;
    case 2:
      if (at < text.size()) text[at] = static_cast<char>(what);
      break;
    case 3:  // a part twice
      text.insert(at, text.substr(at, what));
      break;
    default:  // a digit for another
      if (at < text.size() && text[at] >= '0' && text[at] <= '9') text[at] = static_cast<char>('0' + what % 10);
  }
}

/// Always the same file, never emptied: file systems write back files that are emptied and filled again at once.
std::filesystem::path write_file(const std::string& header, std::size_t length) {
  static const ScratchFolder scratch;
  static const std::filesystem::path path = scratch / "file";
  static std::ofstream file(path, std::ios::binary);
  file.seekp(0);
  for (int i = 0; i < 8; ++i) file.put(static_cast<char>(length >> (8 * i) & 0xff));
  file << header << std::string(static_cast<std::size_t>(data_bytes), '\1') << std::flush;
  std::filesystem::resize_file(path, static_cast<std::uintmax_t>(file.tellp()));
  return path;
}

/// What was accepted fills the file, and means the same when it is written again.
void check_header(const SafetensorsHeader& header, std::int64_t begin) {
  std::vector<const SafetensorsHeader::Tensor*> order;
  for (const auto& [name, tensor] : header.tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(),
            [](const auto* a, const auto* b) { return std::pair(a->begin, a->end) < std::pair(b->begin, b->end); });
  const std::int64_t end = begin + data_bytes;
  for (const SafetensorsHeader::Tensor* const tensor : order) {
    require(tensor->begin == begin && tensor->end >= begin, "there is a hole, or tensors overlap");
    require(tensor->end - tensor->begin == numel(tensor->shape) * size_of(tensor->dtype), "a tensor has other bytes");
    begin = tensor->end;
  }
  require(begin == end, "something follows the tensors");
}

/// Whether it was accepted.
bool read(std::span<const std::uint8_t> input) {
  std::string text = some_header;
  for (; input.size() >= change_bytes; input = input.subspan(change_bytes)) change(text, input.first(change_bytes));
  const std::size_t length = input.empty() ? text.size() : text.size() + input[0] - 128;
  try {
    const std::filesystem::path path = write_file(text, length);
    const SafetensorsHeader header = checkpoint::read_safetensors_header(checkpoint::File::open(path));
    require(input.empty() || length == text.size(), "a length that is wrong was accepted");
    check_header(header, 8 + static_cast<std::int64_t>(length));
    return true;
  } catch (const CorruptError&) {
    return false;
  }
}

}  // namespace
}  // namespace fsdp2::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  (void)fsdp2::testing::read({data, size});
  return 0;
}

#ifndef FSDP2_LIBFUZZER
int main(int argc, char** argv) {
  using namespace fsdp2::testing;
  const auto make = [](std::mt19937_64& random) {
    const bool has_wrong_length = random() % 16 == 0;
    const std::size_t changes = 1 + random() % 3;
    return random_bytes(random, change_bytes * changes + (has_wrong_length ? 1 : 0));
  };
  return run_fuzz(argc, argv, 20000, make, read);
}
#endif
