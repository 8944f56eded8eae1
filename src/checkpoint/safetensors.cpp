// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/safetensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/digest.hpp"
#include "checkpoint/file.hpp"
#include "checkpoint/index_file.hpp"
#include "checkpoint/publication.hpp"
#include "checkpoint/safetensors_header.hpp"
#include "checkpoint/selection.hpp"
#include "checkpoint/write_files.hpp"
#include "fsdp2/error.hpp"
#include "fsdp2/version.hpp"

namespace fsdp2 {

namespace checkpoint {

namespace {

using Json = nlohmann::json;
using Metadata = std::map<std::string, std::string>;
namespace fs = std::filesystem;

constexpr const char* step_key = "fsdp2.step";
constexpr const char* own_metadata_key = "fsdp2.metadata";
constexpr const char* index_suffix = ".safetensors.index.json";

/// How much of the memory is left beside the reader's or writer's block, in blocks.
std::int64_t window_for(std::int64_t memory_bytes, std::int64_t block_bytes) {
  return std::max<std::int64_t>(memory_bytes / block_bytes - 1, 1) * block_bytes;
}

// ---- Import ----

/// Safetensors files, opened one at a time, and what is in them.
class Weights {
 public:
  explicit Weights(const fs::path& source) {
    const fs::path index = index_of(source);
    if (index.empty()) {
      add_file(source);
      return;
    }
    const std::map<std::string, std::string> weight_map = read_weight_map(index);
    std::map<std::string, std::size_t> numbers;
    for (const auto& [tensor, name] : weight_map) {
      if (!numbers.emplace(name, paths_.size()).second) continue;
      std::error_code error;
      if (!fs::is_regular_file(index.parent_path() / name, error))
        throw CorruptError(fmt::format("{}: tensor \"{}\" is in {}, which is not there", index.string(), tensor, name));
      add_file(index.parent_path() / name);
    }
    for (const auto& [tensor, name] : weight_map) {
      const auto found = tensors_.find(tensor);
      if (found == tensors_.end() || found->second.file != numbers[name])
        throw CorruptError(fmt::format("{}: tensor \"{}\" is not in {}", index.string(), tensor, name));
    }
    for (const auto& [tensor, place] : tensors_)
      if (!weight_map.contains(tensor))
        throw CorruptError(
            fmt::format("{}: tensor \"{}\" of {} is missing", index.string(), tensor, paths_[place.file].string()));
  }

  struct Place {
    std::size_t file;
    SafetensorsHeader::Tensor tensor;
  };
  const std::map<std::string, Place>& tensors() const { return tensors_; }
  const Metadata& metadata() const { return metadata_; }

  void read(const Place& place, std::int64_t begin, std::span<std::byte> target) {
    if (!open_ || open_number_ != place.file) {
      open_.emplace(File::open(paths_[place.file]));
      open_number_ = place.file;
    }
    open_->read(target, place.tensor.begin + begin);
  }

 private:
  /// The file that says where tensors are; empty where `source` is a file with tensors.
  static fs::path index_of(const fs::path& source) {
    std::error_code error;
    if (!fs::is_directory(source, error)) return source.string().ends_with(index_suffix) ? source : fs::path();
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(source))
      if (entry.path().string().ends_with(index_suffix)) found.push_back(entry.path());
    if (found.size() != 1)
      throw CorruptError(
          fmt::format("{} has {} files *{}: expected 1, or name one", source.string(), found.size(), index_suffix));
    return found.front();
  }

  void add_file(const fs::path& path) {
    SafetensorsHeader header = read_safetensors_header(File::open(path));
    for (auto& [name, tensor] : header.tensors)
      if (const auto [other, is_new] = tensors_.emplace(name, Place{paths_.size(), std::move(tensor)}); !is_new)
        throw CorruptError(
            fmt::format("{}: tensor \"{}\" is in {}, too", path.string(), name, paths_[other->second.file].string()));
    metadata_.merge(header.metadata);  // parts of one model say the same
    paths_.push_back(path);
  }

  std::vector<fs::path> paths_;
  std::map<std::string, Place> tensors_;
  Metadata metadata_;
  std::optional<File> open_;
  std::size_t open_number_ = 0;
};

/// The metadata of an import: that of the files, without what export_safetensors added.
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

MeshEntry describe_mesh(const ImportOptions& options) {
  MeshEntry mesh{options.mesh_name, options.mesh ? *options.mesh : MeshSpec({{"dp", options.world_size}}), {}};
  if (options.world_size != 0 && options.world_size != mesh.spec.size())
    throw ConfigError(fmt::format("mesh {} has {} ranks, but the world size is {}", mesh.spec.to_string(),
                                  mesh.spec.size(), options.world_size));
  for (const MeshAxis& axis : mesh.spec.axes())
    mesh.roles.push_back(axis.name == "replicate" ? AxisRole::replicate : AxisRole::none);
  mesh.roles[mesh.spec.has_axis("dp") ? mesh.spec.axis("dp") : 0] = AxisRole::shard;
  return mesh;
}

CheckpointIndex describe_import(const Weights& weights, const ImportOptions& options) {
  if (options.ranks_per_file < 1)
    throw ConfigError(fmt::format("{} ranks a file: expected at least 1", options.ranks_per_file));
  CheckpointIndex index;
  index.library = fmt::format("fsdp2 {}", version());
  index.save_id = random_save_id();
  index.meshes.push_back(describe_mesh(options));
  const MeshEntry& mesh = index.meshes.front();
  index.world_size = mesh.spec.size();
  take_metadata(index, weights.metadata());
  for (const auto& [name, place] : weights.tensors()) {
    TensorEntry tensor{name, {place.tensor.dtype, place.tensor.shape, {}, {}}, 0, 0};
    const std::int64_t dim = options.shard_dim ? options.shard_dim(tensor) : 0;
    for (const AxisRole role : mesh.roles)
      tensor.spec.placements.push_back(role == AxisRole::shard && !tensor.spec.shape.empty() ? Placement(Shard{dim})
                                                                                             : Placement(Replicate{}));
    tensor.spec.split_order = split_order(tensor.spec);
    index.tensors.push_back(std::move(tensor));
  }
  validate(index);
  return index;
}

// ---- Export ----

Metadata metadata_for(const CheckpointIndex& index) {
  const Json own = Json::accept(index.metadata) ? Json::parse(index.metadata) : Json();
  const bool is_plain = own.is_object() && !own.empty() &&
                        std::all_of(own.begin(), own.end(), [](const Json& value) { return value.is_string(); }) &&
                        !own.contains(step_key) && !own.contains(own_metadata_key);
  Metadata metadata;
  if (is_plain) metadata = own.get<Metadata>();
  if (!is_plain && !index.metadata.empty()) metadata[own_metadata_key] = index.metadata;
  metadata[step_key] = std::to_string(index.step);
  return metadata;
}

/// One file to be written: its header, and numbers in the selection.
struct ExportFile {
  std::string name;  // empty: the target itself
  std::vector<std::size_t> tensors;
  std::string header = {};
};

/// The tensors of widest elements come first: all are aligned then.
std::vector<ExportFile> plan_files(const Selection& selection, std::int64_t max_shard_bytes) {
  std::vector<std::size_t> order(selection.tensors.size());
  for (std::size_t t = 0; t < order.size(); ++t) order[t] = t;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return size_of(selection.tensors[a].spec.dtype) > size_of(selection.tensors[b].spec.dtype);
  });
  std::vector<ExportFile> files(1);
  std::int64_t bytes = 0;
  for (const std::size_t t : order) {
    const std::int64_t more = selection.tensors[t].bytes();
    if (max_shard_bytes != 0 && bytes + more > max_shard_bytes && !files.back().tensors.empty()) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().tensors.push_back(t);
    bytes += more;
  }
  if (max_shard_bytes == 0) return files;
  for (std::size_t f = 0; f < files.size(); ++f)
    files[f].name =
        files.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", f + 1, files.size());
  return files;
}

/// The data of one file, through a window that holds as many tensors, or as much of one, as fit.
class DataWriter {
 public:
  DataWriter(CheckpointReader& reader, const Selection& selection, File& file, std::int64_t offset,
             std::span<std::byte> window, const std::function<void(std::int64_t bytes)>& count)
      : reader_(reader), selection_(selection), file_(file), offset_(offset), window_(window), count_(count) {}

  void add(std::size_t number) {
    const TensorSpec& spec = selection_.tensors[number].spec;
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
      requests_.push_back({selection_.sources[number], Box::whole(spec.shape), begin, count, spec.dtype, target});
      used_ += count * width;
      begin += count;
    }
  }

  /// Writes what waits, and proves the tensors that were not cast.
  void finish() {
    flush();
    for (const auto& [number, digest] : digests_) {
      const TensorEntry& tensor = reader_.index().tensors[number];
      if (digest != tensor.digest)
        throw CorruptError(fmt::format("{}: tensor \"{}\" has content digest {:016x}, but its index says {:016x}",
                                       reader_.directory().string(), tensor.name, digest, tensor.digest));
    }
  }

 private:
  void flush() {
    read_elements(reader_, requests_);
    for (const ElementRequest& request : requests_)
      if (request.to == reader_.index().tensors[request.tensor].spec.dtype) {
        std::uint64_t& digest = digests_[request.tensor];
        digest = crc64({request.target, static_cast<std::size_t>(request.count * size_of(request.to))}, digest);
      }
    file_.write(window_.first(static_cast<std::size_t>(used_)), offset_);
    offset_ += used_;
    count_(used_);
    used_ = 0;
    requests_.clear();
  }

  CheckpointReader& reader_;
  const Selection& selection_;
  File& file_;
  std::int64_t offset_;  // in the file, of the window
  std::span<std::byte> window_;
  const std::function<void(std::int64_t bytes)>& count_;
  std::int64_t used_ = 0;
  std::vector<ElementRequest> requests_;
  std::map<std::size_t, std::uint64_t> digests_;  // by number in the checkpoint, of what was written of it
};

void write_weight_map(const fs::path& path, const Selection& selection, std::span<const ExportFile> files) {
  std::int64_t bytes = 0;
  Json map = Json::object();
  for (const ExportFile& file : files)
    for (const std::size_t t : file.tensors) {
      map[selection.tensors[t].name] = file.name;
      bytes += selection.tensors[t].bytes();
    }
  constexpr int indent = 2;
  const std::string text = Json{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}.dump(indent) + "\n";
  File file = File::create(path);
  file.write(std::as_bytes(std::span(text)), 0);
  file.sync();
  file.close();
}

}  // namespace

}  // namespace checkpoint

ExportReport export_safetensors(const std::filesystem::path& source, const std::filesystem::path& target,
                                const ExportOptions& options) {
  using namespace checkpoint;
  if (options.max_shard_bytes < 0)
    throw ConfigError(
        fmt::format("files of {} bytes: expected at least 1, or 0 for one file", options.max_shard_bytes));
  CheckpointReader reader(source);
  const Selection selection = select_tensors(reader.index(), options.select, options.dtype);
  std::vector<ExportFile> files = plan_files(selection, options.max_shard_bytes);
  ExportReport report;
  report.tensors = static_cast<std::int64_t>(selection.tensors.size());
  report.files = static_cast<std::int64_t>(files.size());
  std::int64_t total = 0;    // data of all files
  std::int64_t longest = 0;  // of one
  std::int64_t widest = 0;   // of an element in the checkpoint, against one in the file
  for (ExportFile& file : files) {
    std::vector<const TensorEntry*> tensors;
    std::int64_t bytes = 0;
    for (const std::size_t t : file.tensors) {
      const TensorEntry& tensor = selection.tensors[t];
      tensors.push_back(&tensor);
      bytes += tensor.bytes();
      const DType from = reader.index().tensors[selection.sources[t]].spec.dtype;
      if (from == tensor.spec.dtype) continue;
      ++report.casts;
      widest = std::max(widest, (size_of(from) + size_of(tensor.spec.dtype) - 1) / size_of(tensor.spec.dtype));
    }
    file.header = encode_safetensors_header(tensors, metadata_for(reader.index()));
    longest = std::max(longest, bytes);
    total += bytes;
    report.bytes += static_cast<std::int64_t>(file.header.size()) + bytes;
  }
  std::vector<std::byte> window = buffer_for(
      target, std::min(window_for(options.memory_bytes / (1 + widest), reader.index().sizes.block_bytes), longest));
  std::int64_t done = 0;
  const std::function<void(std::int64_t)> count = [&](std::int64_t bytes) {
    done += bytes;
    if (options.progress) options.progress(done, total);
  };
  const bool is_directory = options.max_shard_bytes != 0;
  const fs::path parent = target.has_parent_path() ? target.parent_path() : ".";
  const fs::path partial = parent / fmt::format(".{}.partial-{}", target.filename().string(), random_save_id());
  try {
    if (is_directory) (void)make_directory(partial);
    for (const ExportFile& part : files) {
      File file = File::create(is_directory ? partial / part.name : partial);
      file.write(std::as_bytes(std::span(part.header)), 0);
      DataWriter data(reader, selection, file, static_cast<std::int64_t>(part.header.size()), window, count);
      for (const std::size_t t : part.tensors) data.add(t);
      data.finish();
      file.sync();
      file.close();
    }
    if (files.size() > 1) write_weight_map(partial / fmt::format("model{}", index_suffix), selection, files);
    if (is_directory) sync_directory(partial);
    rename_to_new(partial, target);
    sync_directory(parent);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(partial, ignored);
    throw;
  }
  return report;
}

CheckpointIndex import_safetensors(const std::filesystem::path& source, const std::filesystem::path& target,
                                   const ImportOptions& options) {
  using namespace checkpoint;
  Weights weights(source);
  CheckpointIndex index = describe_import(weights, options);
  std::vector<const Weights::Place*> places;  // by tensor: index and map have one order
  for (const auto& [name, place] : weights.tensors()) places.push_back(&place);
  std::int64_t done = 0;
  std::int64_t total = 0;
  for (const TensorEntry& tensor : index.tensors) total += tensor.bytes();
  const auto read = [&](std::span<const PieceRequest> requests) {
    for (const PieceRequest& request : requests) {
      done += static_cast<std::int64_t>(request.target.size());
      if (options.progress) options.progress(done, total);
      const Piece& piece = *request.piece;
      const TensorSpec& spec = index.tensors[piece.tensor].spec;
      const std::int64_t width = size_of(spec.dtype);
      const std::int64_t begin = request.begin / width;
      const std::int64_t end = begin + static_cast<std::int64_t>(request.target.size()) / width;
      for_each_box(piece.box.extent, begin, end, [&](Box box, std::int64_t first) {
        for (std::size_t d = 0; d < box.offset.size(); ++d) box.offset[d] += piece.box.offset[d];
        for (RunCursor runs = runs_of(spec.shape, box); !runs.is_done(); runs.next())
          weights.read(*places[piece.tensor], runs.run().from * width,
                       request.target.subspan(static_cast<std::size_t>((first - begin + runs.run().to) * width),
                                              static_cast<std::size_t>(runs.run().count * width)));
      });
    }
  };
  const Publication publication(target, index.save_id);
  publication.prepare();
  try {
    publication.note_owner();
    const auto no_values = [](std::int64_t) { return RankLocalValues(); };
    const HostCommunicator alone(MPI_COMM_NULL, "import");
    write_files(alone, publication.partial(), index, options.ranks_per_file,
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
