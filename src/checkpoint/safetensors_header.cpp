// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/safetensors_header.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp2/error.hpp"

namespace fsdp2::checkpoint {

namespace {

using Json = nlohmann::json;

constexpr std::int64_t max_header_bytes = 100'000'000;  // the format's own limit
constexpr const char* metadata_key = "__metadata__";

constexpr std::pair<DType, std::string_view> dtype_names[] = {
    {DType::f64, "F64"},         {DType::f32, "F32"},         {DType::f16, "F16"},      {DType::bf16, "BF16"},
    {DType::f8_e4m3, "F8_E4M3"}, {DType::f8_e5m2, "F8_E5M2"}, {DType::i64, "I64"},      {DType::i32, "I32"},
    {DType::i16, "I16"},         {DType::i8, "I8"},           {DType::u64, "U64"},      {DType::u32, "U32"},
    {DType::u16, "U16"},         {DType::u8, "U8"},           {DType::boolean, "BOOL"}, {DType::complex64, "C64"}};

/// Integers are little-endian, as those of every machine that HDF5 files are read on by mapping bytes.
std::int64_t header_length(std::span<const std::byte> bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) value = value << 8 | std::to_integer<std::uint64_t>(bytes[i]);
  return value > static_cast<std::uint64_t>(max_header_bytes) ? -1 : static_cast<std::int64_t>(value);
}

/// What our JSON may not be, although it is JSON: deeply nested, or with a key twice, of which Json would keep one.
class JsonRules final : public nlohmann::json_sax<Json> {
 public:
  const std::string& problem() const { return problem_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return enter(); }
  bool key(string_t& value) override {
    return keys_.back().insert(value).second || fail(fmt::format("has \"{}\" twice", value));
  }
  bool end_object() override { return leave(); }
  bool start_array(std::size_t) override { return enter(); }
  bool end_array() override { return leave(); }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    return fail(fmt::format("is no JSON: {}", error.what()));
  }

 private:
  static constexpr std::size_t max_depth = 3;  // a list of a tensor of a header

  bool enter() {
    if (keys_.size() == max_depth) return fail("is nested too deeply");
    keys_.emplace_back();
    return true;
  }
  bool leave() {
    keys_.pop_back();
    return true;
  }
  bool fail(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }

  std::vector<std::set<std::string>> keys_;  // of the objects around a place; those of lists stay empty
  std::string problem_;
};

/// Json that keeps the rules; else what is wrong with it in `problem`.
Json parse_json(const std::string& text, std::string& problem) {
  JsonRules rules;
  if (Json::sax_parse(text, &rules)) return Json::parse(text);
  problem = rules.problem();
  return {};
}

class HeaderParser {
 public:
  explicit HeaderParser(const File& file) : file_(file) {}

  SafetensorsHeader parse() const {
    constexpr std::int64_t prefix = 8;
    const std::int64_t size = file_.size();
    if (size < prefix) refuse(fmt::format("has {} bytes, too few for a header", size));
    std::array<std::byte, prefix> length_bytes{};
    file_.read(length_bytes, 0);
    const std::int64_t length = header_length(length_bytes);
    if (length < 0) refuse(fmt::format("its header is longer than {} bytes", max_header_bytes));
    if (length > size - prefix)
      refuse(fmt::format("has {} bytes, but a header of {} bytes: it is truncated", size, length));
    std::string text(static_cast<std::size_t>(length), '\0');
    file_.read(std::as_writable_bytes(std::span(text)), prefix);
    if (!text.starts_with('{')) refuse("its header does not begin with '{'");
    std::string problem;
    const Json header = parse_json(text, problem);
    if (!problem.empty()) refuse("its header " + problem);
    SafetensorsHeader contents;
    for (const auto& [name, value] : header.items()) {
      if (name == metadata_key)
        contents.metadata = parse_metadata(value);
      else
        contents.tensors.emplace(name, parse_tensor(name, value));
    }
    check_places(contents, size - prefix - length);
    for (auto& [name, tensor] : contents.tensors) {
      tensor.begin += prefix + length;
      tensor.end += prefix + length;
    }
    return contents;
  }

 private:
  [[noreturn]] void refuse(std::string_view why) const {
    throw CorruptError(fmt::format("{}: no valid safetensors file: {}", file_.path().string(), why));
  }
  [[noreturn]] void refuse(const std::string& tensor, std::string_view why) const {
    refuse(fmt::format("tensor \"{}\": {}", tensor, why));
  }

  std::map<std::string, std::string> parse_metadata(const Json& value) const {
    if (!value.is_object()) refuse("its metadata is no object");
    std::map<std::string, std::string> metadata;
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) refuse(fmt::format("its metadata \"{}\" is no string", key));
      metadata.emplace(key, text.get<std::string>());
    }
    return metadata;
  }

  std::vector<std::int64_t> parse_numbers(const std::string& name, const Json& value, const char* key) const {
    const Json& list = value.at(key);
    std::vector<std::int64_t> numbers;
    if (!list.is_array()) refuse(name, fmt::format("{} is no list", key));
    for (const Json& number : list) {
      if (!number.is_number_unsigned() || number.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX))
        refuse(name, fmt::format("{} has {}, which is no number of elements or bytes", key, number.dump()));
      numbers.push_back(number.get<std::int64_t>());
    }
    return numbers;
  }

  SafetensorsHeader::Tensor parse_tensor(const std::string& name, const Json& value) const {
    if (name.empty()) refuse("a tensor has no name");
    if (!value.is_object() || value.size() != 3 || !value.contains("dtype") || !value.contains("shape") ||
        !value.contains("data_offsets"))
      refuse(name, "expected dtype, shape and data_offsets");
    if (!value["dtype"].is_string()) refuse(name, "its dtype is no string");
    const std::string dtype = value["dtype"].get<std::string>();
    const auto* const known = std::find_if(std::begin(dtype_names), std::end(dtype_names),
                                           [&](const auto& pair) { return pair.second == dtype; });
    if (known == std::end(dtype_names)) refuse(name, fmt::format("checkpoints have no dtype {}", dtype));
    SafetensorsHeader::Tensor tensor{known->first, parse_numbers(name, value, "shape"), 0, 0};
    const std::vector<std::int64_t> offsets = parse_numbers(name, value, "data_offsets");
    if (offsets.size() != 2 || offsets[0] > offsets[1]) refuse(name, "its data_offsets are no begin and end");
    tensor.begin = offsets[0];
    tensor.end = offsets[1];
    std::int64_t bytes = 0;
    try {
      bytes = checked_multiply(numel(tensor.shape), size_of(tensor.dtype));
    } catch (const ShapeError& error) {
      refuse(name, error.what());
    }
    if (bytes != tensor.end - tensor.begin)
      refuse(name, fmt::format("{} of shape {} has {} bytes, but its data_offsets {}", dtype, to_string(tensor.shape),
                               bytes, tensor.end - tensor.begin));
    return tensor;
  }

  /// The tensors follow one another, without holes, to the end of the file.
  void check_places(const SafetensorsHeader& contents, std::int64_t data_bytes) const {
    std::vector<std::pair<const std::string*, const SafetensorsHeader::Tensor*>> order;
    for (const auto& [name, tensor] : contents.tensors) order.emplace_back(&name, &tensor);
    std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
      return std::pair(a.second->begin, a.second->end) < std::pair(b.second->begin, b.second->end);
    });
    std::int64_t end = 0;
    for (const auto& [name, tensor] : order) {
      if (tensor->begin != end)
        refuse(*name, fmt::format("begins at byte {}, but the one before it ends at {}: {}", tensor->begin, end,
                                  tensor->begin < end ? "they overlap" : "there is a hole"));
      end = tensor->end;
    }
    if (end != data_bytes)
      refuse(fmt::format("its tensors end at byte {}, but it has {} bytes of data: {}", end, data_bytes,
                         end > data_bytes ? "it is truncated" : "something follows them"));
  }

  const File& file_;
};

}  // namespace

SafetensorsHeader read_safetensors_header(const File& file) {
  return HeaderParser(file).parse();
}

std::map<std::string, std::string> read_weight_map(const std::filesystem::path& index) {
  const auto refuse = [&](std::string_view why) {
    throw CorruptError(fmt::format("{}: no index of safetensors files: {}", index.string(), why));
  };
  const File file = File::open(index);
  const std::int64_t size = file.size();
  if (size > max_header_bytes) refuse(fmt::format("it is longer than {} bytes", max_header_bytes));
  std::string text(static_cast<std::size_t>(size), '\0');
  file.read(std::as_writable_bytes(std::span(text)), 0);
  std::string problem;
  const Json document = parse_json(text, problem);
  if (!problem.empty()) refuse("it " + problem);
  if (!document.is_object() || !document.contains("weight_map") || !document["weight_map"].is_object())
    refuse("it has no object weight_map");
  std::map<std::string, std::string> files;
  for (const auto& [tensor, value] : document["weight_map"].items()) {
    const std::string name = value.is_string() ? value.get<std::string>() : "";
    if (name.empty() || name == "." || name == ".." ||
        name.find_first_of(std::string_view("/\0", 2)) != std::string::npos)
      refuse(fmt::format("tensor \"{}\" is in {}, which is no name of a file beside it", tensor, value.dump()));
    files.emplace(tensor, name);
  }
  return files;
}

std::string encode_safetensors_header(std::span<const TensorEntry* const> tensors,
                                      const std::map<std::string, std::string>& metadata) {
  Json header{{metadata_key, metadata}};
  std::int64_t end = 0;
  for (const TensorEntry* const tensor : tensors) {
    const auto* const known = std::find_if(std::begin(dtype_names), std::end(dtype_names),
                                           [&](const auto& pair) { return pair.first == tensor->spec.dtype; });
    if (known == std::end(dtype_names))
      throw ConfigError(
          fmt::format("tensor \"{}\": safetensors has no dtype for {}", tensor->name, to_string(tensor->spec.dtype)));
    if (tensor->name == metadata_key)
      throw ConfigError(fmt::format("a tensor called \"{}\" cannot be in a safetensors file", tensor->name));
    header[tensor->name] = {
        {"dtype", known->second}, {"shape", tensor->spec.shape}, {"data_offsets", {end, end + tensor->bytes()}}};
    end += tensor->bytes();
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception&) {
    throw ConfigError("a tensor's name or the metadata are no UTF-8, which safetensors files need");
  }
  constexpr std::int64_t alignment = 8;
  text.resize(static_cast<std::size_t>(align_up(static_cast<std::int64_t>(text.size()), alignment)), ' ');
  if (static_cast<std::int64_t>(text.size()) > max_header_bytes)
    throw ConfigError(fmt::format("the header of a safetensors file with {} tensors is longer than {} bytes",
                                  tensors.size(), max_header_bytes));
  std::string all;
  for (int i = 0; i < alignment; ++i) all += static_cast<char>(text.size() >> (8 * i) & 0xff);
  return all + text;
}

}  // namespace fsdp2::checkpoint
