// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/safetensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/digest.hpp"
#include "checkpoint/file.hpp"
#include "checkpoint/index_file.hpp"
#include "checkpoint/publication.hpp"
#include "checkpoint/reader.hpp"
#include "checkpoint/write_files.hpp"
#include "fsdp2/error.hpp"
#include "fsdp2/version.hpp"

namespace fsdp2 {

namespace checkpoint {

namespace {

using Json = nlohmann::json;

constexpr std::int64_t max_header_bytes = 100'000'000;  // the format's own limit
constexpr const char* metadata_key = "__metadata__";
constexpr const char* step_key = "fsdp2.step";
constexpr const char* own_metadata_key = "fsdp2.metadata";

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

// ---- Reading ----

/// A file whose header keeps every rule.
struct Contents {
  struct Tensor {
    DType dtype;
    Shape shape;
    std::int64_t begin;  // in the file
    std::int64_t end;
  };
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;
};

/// What a header may not be, although it is JSON: deeply nested, or with a key twice, of which Json would keep one.
class HeaderRules final : public nlohmann::json_sax<Json> {
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
    return keys_.back().insert(value).second || fail(fmt::format("its header has \"{}\" twice", value));
  }
  bool end_object() override { return leave(); }
  bool start_array(std::size_t) override { return enter(); }
  bool end_array() override { return leave(); }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    return fail(fmt::format("its header is no JSON: {}", error.what()));
  }

 private:
  static constexpr std::size_t max_depth = 3;  // a list of a tensor of the header

  bool enter() {
    if (keys_.size() == max_depth) return fail("its header is nested too deeply");
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

class HeaderParser {
 public:
  explicit HeaderParser(const File& file) : file_(file) {}

  Contents parse() const {
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
    const Json header = parse_json(text);
    Contents contents;
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

  Json parse_json(const std::string& text) const {
    HeaderRules rules;
    if (!Json::sax_parse(text, &rules)) refuse(rules.problem());
    return Json::parse(text);
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

  Contents::Tensor parse_tensor(const std::string& name, const Json& value) const {
    if (name.empty()) refuse("a tensor has no name");
    if (!value.is_object() || value.size() != 3 || !value.contains("dtype") || !value.contains("shape") ||
        !value.contains("data_offsets"))
      refuse(name, "expected dtype, shape and data_offsets");
    if (!value["dtype"].is_string()) refuse(name, "its dtype is no string");
    const std::string dtype = value["dtype"].get<std::string>();
    const auto* const known = std::find_if(std::begin(dtype_names), std::end(dtype_names),
                                           [&](const auto& pair) { return pair.second == dtype; });
    if (known == std::end(dtype_names)) refuse(name, fmt::format("checkpoints have no dtype {}", dtype));
    Contents::Tensor tensor{known->first, parse_numbers(name, value, "shape"), 0, 0};
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
  void check_places(const Contents& contents, std::int64_t data_bytes) const {
    std::vector<std::pair<const std::string*, const Contents::Tensor*>> order;
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

/// The metadata of an import: that of the file, without what export_safetensors added.
void take_metadata(CheckpointIndex& index, std::map<std::string, std::string> metadata) {
  if (const auto step = metadata.find(step_key); step != metadata.end()) {
    const char* const end = step->second.data() + step->second.size();
    const auto [parsed, error] = std::from_chars(step->second.data(), end, index.step);
    if (error == std::errc() && parsed == end) metadata.erase(step);
  }
  const auto own = metadata.find(own_metadata_key);
  if (own != metadata.end() && metadata.size() == 1 && Json::accept(own->second))
    index.metadata = own->second;
  else if (!metadata.empty())
    index.metadata = Json(metadata).dump();
}

// ---- Writing ----

Json metadata_for(const CheckpointIndex& index) {
  const Json own = Json::accept(index.metadata) ? Json::parse(index.metadata) : Json();
  const bool is_plain = own.is_object() && !own.empty() &&
                        std::all_of(own.begin(), own.end(), [](const Json& value) { return value.is_string(); }) &&
                        !own.contains(step_key) && !own.contains(own_metadata_key);
  Json metadata = is_plain ? own : Json::object();
  if (!is_plain && !index.metadata.empty()) metadata[own_metadata_key] = index.metadata;
  metadata[step_key] = std::to_string(index.step);
  return metadata;
}

/// The tensors of widest elements come first: all are aligned then.
std::vector<std::size_t> order_of(const CheckpointIndex& index) {
  std::vector<std::size_t> order(index.tensors.size());
  for (std::size_t t = 0; t < order.size(); ++t) order[t] = t;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return size_of(index.tensors[a].spec.dtype) > size_of(index.tensors[b].spec.dtype);
  });
  return order;
}

/// Length and header, padded so that the data are aligned.
std::string encode_header(const CheckpointIndex& index, std::span<const std::size_t> order) {
  Json header{{metadata_key, metadata_for(index)}};
  std::int64_t end = 0;
  for (const std::size_t t : order) {
    const TensorEntry& tensor = index.tensors[t];
    const auto* const known = std::find_if(std::begin(dtype_names), std::end(dtype_names),
                                           [&](const auto& pair) { return pair.first == tensor.spec.dtype; });
    if (known == std::end(dtype_names))
      throw ConfigError(
          fmt::format("tensor \"{}\": safetensors has no dtype for {}", tensor.name, to_string(tensor.spec.dtype)));
    if (tensor.name == metadata_key)
      throw ConfigError(fmt::format("a tensor called \"{}\" cannot be in a safetensors file", tensor.name));
    header[tensor.name] = {
        {"dtype", known->second}, {"shape", tensor.spec.shape}, {"data_offsets", {end, end + tensor.bytes()}}};
    end += tensor.bytes();
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
                                  index.tensors.size(), max_header_bytes));
  std::string all;
  for (int i = 0; i < alignment; ++i) all += static_cast<char>(text.size() >> (8 * i) & 0xff);
  return all + text;
}

/// The data of a file, through a window that holds as many tensors, or as much of one, as fit.
class DataWriter {
 public:
  DataWriter(CheckpointReader& reader, File& file, std::int64_t offset, std::span<std::byte> window)
      : reader_(reader), file_(file), offset_(offset), window_(window), digests_(reader.index().tensors.size(), 0) {}

  void add(std::size_t number) {
    const TensorSpec& spec = reader_.index().tensors[number].spec;
    const std::int64_t width = size_of(spec.dtype);
    const std::int64_t elements = numel(spec.shape);
    for (std::int64_t begin = 0; begin < elements;) {
      const std::int64_t room = (static_cast<std::int64_t>(window_.size()) - used_) / width;
      if (room == 0) {
        flush();
        continue;
      }
      const std::int64_t count = std::min(room, elements - begin);
      std::byte* const target = window_.data() + used_;
      for_each_box(spec.shape, begin, begin + count, [&](Box box, std::int64_t first) {
        requests_.push_back({number, std::move(box), target + (first - begin) * width});
      });
      parts_.emplace_back(number, std::span(target, static_cast<std::size_t>(count * width)));
      used_ += count * width;
      begin += count;
    }
  }

  /// Writes what is left, and proves every tensor.
  void finish() {
    flush();
    for (std::size_t t = 0; t < digests_.size(); ++t)
      if (const TensorEntry& tensor = reader_.index().tensors[t]; digests_[t] != tensor.digest)
        throw CorruptError(fmt::format("{}: tensor \"{}\" has content digest {:016x}, but its index says {:016x}",
                                       reader_.directory().string(), tensor.name, digests_[t], tensor.digest));
  }

 private:
  void flush() {
    reader_.read(requests_);
    for (const auto& [number, bytes] : parts_) digests_[number] = crc64(bytes, digests_[number]);
    file_.write(window_.first(static_cast<std::size_t>(used_)), offset_);
    offset_ += used_;
    used_ = 0;
    requests_.clear();
    parts_.clear();
  }

  CheckpointReader& reader_;
  File& file_;
  std::int64_t offset_;  // in the file, of the window
  std::span<std::byte> window_;
  std::int64_t used_ = 0;
  std::vector<BoxRequest> requests_;
  std::vector<std::pair<std::size_t, std::span<const std::byte>>> parts_;
  std::vector<std::uint64_t> digests_;  // by tensor, of what was written of it
};

/// How much of the memory is left beside the reader's or writer's block, in blocks.
std::int64_t window_for(std::int64_t memory_bytes, std::int64_t block_bytes) {
  return std::max<std::int64_t>(memory_bytes / block_bytes - 1, 1) * block_bytes;
}

}  // namespace

}  // namespace checkpoint

CheckpointIndex export_safetensors(const std::filesystem::path& source, const std::filesystem::path& path,
                                   std::int64_t memory_bytes) {
  using namespace checkpoint;
  CheckpointReader reader(source);
  const CheckpointIndex& index = reader.index();
  const std::vector<std::size_t> order = order_of(index);
  const std::string header = encode_header(index, order);
  const std::filesystem::path parent = path.has_parent_path() ? path.parent_path() : ".";
  const std::filesystem::path partial =
      parent / fmt::format(".{}.partial-{}", path.filename().string(), random_save_id());
  std::int64_t bytes = 0;
  for (const TensorEntry& tensor : index.tensors) bytes += tensor.bytes();
  std::vector<std::byte> window = buffer_for(path, std::min(window_for(memory_bytes, index.sizes.block_bytes), bytes));
  File file = File::create(partial);
  try {
    file.write(std::as_bytes(std::span(header)), 0);
    DataWriter data(reader, file, static_cast<std::int64_t>(header.size()), window);
    for (const std::size_t t : order) data.add(t);
    data.finish();
    file.sync();
    file.close();
    rename_to_new(partial, path);
    sync_directory(parent);
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(partial, ignored);
    throw;
  }
  return index;
}

CheckpointIndex import_safetensors(const std::filesystem::path& path, const std::filesystem::path& target,
                                   const ImportOptions& options) {
  using namespace checkpoint;
  const File file = File::open(path);
  const Contents contents = HeaderParser(file).parse();
  if (options.ranks_per_file < 1)
    throw ConfigError(fmt::format("{} ranks a file: expected at least 1", options.ranks_per_file));
  CheckpointIndex index;
  index.library = fmt::format("fsdp2 {}", version());
  index.save_id = random_save_id();
  index.world_size = options.world_size;
  index.meshes.push_back({"mesh", MeshSpec({{"dp", options.world_size}}), {AxisRole::shard}});
  take_metadata(index, contents.metadata);
  std::vector<std::int64_t> begins;
  for (const auto& [name, tensor] : contents.tensors) {
    const Placement placement = tensor.shape.empty() ? Placement{Replicate{}} : Placement{Shard{0}};
    index.tensors.push_back({name, {tensor.dtype, tensor.shape, {placement}, {0}}, 0, 0});
    begins.push_back(tensor.begin);
  }
  validate(index);
  const auto read = [&](std::span<const PieceRequest> requests) {
    for (const PieceRequest& request : requests) {
      const Piece& piece = *request.piece;
      const TensorSpec& spec = index.tensors[piece.tensor].spec;
      // Rows of dimension 0 are adjacent in the file: the piece is one run of it.
      const std::int64_t start = runs_of(spec.shape, piece.box).run().from * size_of(spec.dtype);
      file.read(request.target, begins[piece.tensor] + start + request.begin);
    }
  };
  const Publication publication(target, index.save_id);
  publication.prepare();
  try {
    publication.note_owner();
    const auto no_values = [](std::int64_t) { return RankLocalValues(); };
    write_files(publication.partial(), index, options.ranks_per_file,
                window_for(options.memory_bytes, index.sizes.block_bytes), no_values, read);
    write_index(publication.partial(), index);
    publication.publish();
  } catch (...) {
    publication.discard();
    throw;
  }
  return index;
}

}  // namespace fsdp2
