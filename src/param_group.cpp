// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "param_group.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <set>

#include "comm/host_communicator.hpp"
#include "fsdp2/error.hpp"
#include "kernels.hpp"
#include "kokkos_compat.hpp"

namespace fsdp2::detail {

namespace {

/// FNV-1a, 64 bits.
std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

std::uint64_t next_number() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

void check_name(std::string_view what, std::string_view name) {
  if (name.empty()) throw ConfigError(fmt::format("a {} needs a name", what));
  if (std::any_of(name.begin(), name.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }))
    throw ConfigError(fmt::format("the name of {} \"{}\" contains a control character", what, name));
}

/// Elements at a byte offset of a buffer.
Tensor part(const Tensor& buffer, std::int64_t offset, DType dtype, const Shape& shape) {
  return buffer.slice(offset, {fsdp2::numel(shape) * size_of(dtype)}).as(dtype, shape);
}

/// Whether no rank before this one holds the same elements.
bool is_first_replica(const DTensor& tensor) {
  const std::vector<Placement>& placements = tensor.spec().placements;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (std::holds_alternative<Replicate>(placements[axis]) && tensor.mesh().coordinate()[axis] != 0) return false;
  return true;
}

/// Host memory that kernels can reach.
Tensor host_memory(std::int64_t bytes, const char* label) {
  const Kokkos::View<std::byte*, compat::PinnedSpace> memory(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, std::string(label)), static_cast<std::size_t>(bytes));
  return Tensor::over(Tensor::Bytes(memory.data(), memory.extent(0)), DType::u8, {bytes},
                      std::make_shared<const Kokkos::View<std::byte*, compat::PinnedSpace>>(memory));
}

double megabytes(std::int64_t bytes) {
  return static_cast<double>(bytes) * 1e-6;
}

}  // namespace

std::string checked_module_name(std::string name) {
  check_name("module", name);
  if (name == "optim" || name.starts_with("optim."))
    throw ConfigError(
        fmt::format("a module cannot be named \"{}\": state dicts keep optimizer state under \"optim\"", name));
  return name;
}

ParamGroup::ParamGroup(std::shared_ptr<ModelState> model, std::string name, Config config)
    : model_(std::move(model)), name_(std::move(name)), config_(std::move(config)) {
  config_.validate();
  model_->add(this);
}

ParamGroup::~ParamGroup() {
  model_->remove(this);
  const auto release = [&](MemoryUse use, std::int64_t bytes) { model_->accounts.add(use, -bytes); };
  release(&MemoryPlan::shards, shards_.bytes());
  release(&MemoryPlan::gradients, gradients_.bytes());
  release(&MemoryPlan::unsharded, own_storage_.bytes() + slice_.bytes());
  release(&MemoryPlan::partials, partials_.bytes());
  release(&MemoryPlan::tables, table_bytes());
}

std::string ParamGroup::key_of(const std::string& name) const {
  return name_.empty() ? name : name_ + "." + name;
}

std::size_t ParamGroup::find(std::string_view name) const {
  if (const auto found = indices_.find(name); found != indices_.end()) return found->second;
  std::string names;
  for (const Param& param : params_) names += (names.empty() ? "" : ", ") + param.name;
  throw ConfigError(
      fmt::format("module \"{}\" has no parameter \"{}\": it has {}", name_, name, names.empty() ? "none" : names));
}

const Tensor& ParamGroup::buffer(std::string_view name) const {
  if (const auto found = buffers_.find(name); found != buffers_.end()) return found->second.local();
  std::string names;
  for (const auto& [other, buffer] : buffers_) names += (names.empty() ? "" : ", ") + other;
  throw ConfigError(
      fmt::format("module \"{}\" has no buffer \"{}\": it has {}", name_, name, names.empty() ? "none" : names));
}

// Memory.

Tensor ParamGroup::allocate(MemoryUse use, std::int64_t bytes, const char* label) const {
  const bool is_on_host = config_.offload_to_cpu && (use == &MemoryPlan::shards || use == &MemoryPlan::gradients);
  Tensor memory = is_on_host ? host_memory(bytes, label) : Tensor::uninitialized(DType::u8, {bytes}, label);
  model_->accounts.add(use, bytes);
  return memory;
}

void ParamGroup::free_memory(MemoryUse use, Tensor& memory) const noexcept {
  model_->accounts.add(use, -memory.bytes());
  memory = {};
}

// Parameters.

void ParamGroup::check_new(const std::vector<ParamSpec>& specs) const {
  if (is_used_)
    throw ConfigError(
        fmt::format("parameters cannot be added to module \"{}\" any more: a scope, a gradient or an optimizer has "
                    "used it",
                    name_));
  std::set<std::string, std::less<>> names;
  std::set<std::string, std::less<>> tensors;  // what can be tied to
  for (const Param& param : params_) tensors.insert(param.name);
  names = tensors;
  for (const auto& [name, index] : indices_) names.insert(name);
  for (const auto& [name, buffer] : buffers_) names.insert(name);
  for (const ParamSpec& spec : specs) {
    check_name("parameter", spec.name);
    if (!names.insert(spec.name).second)
      throw ConfigError(fmt::format("module \"{}\" would have two parameters \"{}\"", name_, spec.name));
    if (const auto* tied = std::get_if<Tied>(&spec.value)) {
      if (!tensors.contains(tied->name))
        throw ConfigError(fmt::format(
            "parameter \"{}\" of module \"{}\" cannot be tied to \"{}\", which is no earlier parameter of this module: "
            "tied parameters must be in one module",
            spec.name, name_, tied->name));
      continue;
    }
    tensors.insert(spec.name);
    if (const auto* full = std::get_if<Tensor>(&spec.value)) {
      if (full->shape() != spec.shape)
        throw ShapeError(fmt::format("parameter \"{}\" of module \"{}\" is declared as {}, but its tensor is {}",
                                     spec.name, name_, to_string(spec.shape), to_string(full->shape())));
    } else if (!is_castable(spec.dtype)) {
      throw ConfigError(
          fmt::format("parameter \"{}\" of module \"{}\" cannot be initialised as {}: expected f64, f32, "
                      "f16 or bf16, or a tensor to copy",
                      spec.name, name_, to_string(spec.dtype)));
    }
  }
}

Param ParamGroup::make_param(const ParamSpec& spec) const {
  Param param;
  param.name = spec.name;
  param.binding = model_->bind(spec.mesh);
  const Binding& binding = model_->bindings()[param.binding];
  const MeshSpec& mesh = binding.mesh.spec();
  const std::string what = fmt::format("{}\" of module \"{}", spec.name, name_);
  const auto* full = std::get_if<Tensor>(&spec.value);
  param.dtype = full != nullptr ? full->dtype() : spec.dtype;
  param.requires_grad = spec.requires_grad && is_castable(param.dtype);
  param.is_ignored = spec.is_ignored;

  param.spec = {param.dtype, spec.shape, std::vector<Placement>(mesh.dimensions(), Replicate{}), {}};
  for (const auto& [axis, placement] : spec.placements) {
    if (!mesh.has_axis(axis))
      throw ConfigError(fmt::format("parameter \"{}\" is placed on axis \"{}\", but the axes of the mesh are {}", what,
                                    axis, mesh.to_string()));
    if (std::holds_alternative<Partial>(placement))
      throw ConfigError(fmt::format("parameter \"{}\" cannot be {} on axis \"{}\": expected Replicate, Shard or Ragged",
                                    what, to_string(placement), axis));
    if (binding.replicate_axis && mesh.axis(axis) == *binding.replicate_axis &&
        !std::holds_alternative<Replicate>(placement))
      throw ConfigError(fmt::format("parameter \"{}\" cannot be {} on axis \"{}\", which is the axis of replicas", what,
                                    to_string(placement), axis));
    param.spec.placements[mesh.axis(axis)] = placement;
  }
  if (spec.is_ignored && !spec.placements.empty())
    throw ConfigError(fmt::format("parameter \"{}\" is ignored, and so cannot have placements", what));
  for (std::size_t axis = 0; axis < mesh.dimensions(); ++axis)
    if (axis != binding.axis) param.spec.split_order.push_back(static_cast<std::int64_t>(axis));
  param.spec.split_order.push_back(static_cast<std::int64_t>(binding.axis));

  Placement& own = param.spec.placements[binding.axis];
  const bool is_chosen = spec.placements.contains(mesh.axes()[binding.axis].name);
  if (!is_chosen && !spec.is_ignored && !spec.shape.empty() && fsdp2::numel(spec.shape) >= config_.min_shard_size)
    own = Shard{0};
  validate(param.spec, mesh, what);
  param.is_sharded = !std::holds_alternative<Replicate>(own);

  TensorSpec unsharded = param.spec;
  unsharded.placements[binding.axis] = Replicate{};
  const Shape& coordinate = binding.mesh.coordinate();
  param.full_box = local_box(unsharded, mesh, coordinate);
  param.count = param.shard_count = param.full_box.numel();
  if (!param.is_sharded) return param;
  param.shard_count = 0;
  for (std::int64_t rank = 0; rank < binding.ranks(); ++rank) {
    Shape there = coordinate;
    there[binding.axis] = rank;
    Box piece = local_box(param.spec, mesh, there);
    for (std::size_t d = 0; d < piece.offset.size(); ++d) piece.offset[d] -= param.full_box.offset[d];
    param.shard_count = std::max(param.shard_count, piece.numel());
    param.pieces.push_back(std::move(piece));
  }
  (void)checked_multiply(checked_multiply(param.shard_count, binding.ranks()), size_of(DType::f64));
  // Chunks of dimension 0 lie in the full tensor as they are sent.
  const DType gathered = is_castable(param.dtype) ? config_.mp_policy.param_dtype.value_or(param.dtype) : param.dtype;
  param.is_direct = own == Placement(Shard{0}) && param.count * size_of(gathered) >= config_.direct_bytes;
  return param;
}

void ParamGroup::fill(const Param& param, const ParamSpec& spec, const ExecutionSpace& exec) const {
  const Tensor& local = param.shard.local();
  if (local.numel() == 0) return;
  const Box& box = param.shard.box();
  if (const auto* full = std::get_if<Tensor>(&spec.value)) return kernels::extract_box(exec, local, *full, box);
  Initializer initializer = std::get<Initializer>(spec.value);
  if (initializer.kind == Initializer::Kind::kaiming) {
    const std::int64_t fan_in = spec.shape.empty() ? 1 : fsdp2::numel(spec.shape) / spec.shape[0];
    initializer.kind = Initializer::Kind::normal;
    initializer.second = std::sqrt(2.0 / static_cast<double>(fan_in));
  }
  kernels::initialize(exec, local, initializer, spec.shape, box, hash_of(key_of(param.name)));
}

void ParamGroup::require_one_mesh(const std::vector<Param>& params, const ReshardAfterForward& reshard) const {
  if (!std::holds_alternative<std::int64_t>(reshard)) return;
  for (const Param& param : params)
    if (param.binding != params.front().binding)
      throw ConfigError(fmt::format(
          "module \"{}\" has parameters on several meshes: reshard_after_forward must be true or false", name_));
}

void ParamGroup::add(const std::vector<ParamSpec>& specs, const ExecutionSpace& exec) {
  check_new(specs);
  std::vector<Param> params = params_;
  std::vector<const ParamSpec*> sources;
  std::vector<std::string> keys;
  for (const ParamSpec& spec : specs) {
    keys.push_back(key_of(spec.name));
    if (std::holds_alternative<Tied>(spec.value)) continue;
    try {
      params.push_back(make_param(spec));
    } catch (const ShapeError& error) {
      throw ShapeError(fmt::format("parameter \"{}\" of module \"{}\": {}", spec.name, name_, error.what()));
    }
    sources.push_back(&spec);
  }
  const Layout layout = lay_out(params, model_->bindings(), config_);
  require_one_mesh(params, config_.reshard_after_forward);
  model_->reserve_keys(keys);

  const Tensor shards = allocate(&MemoryPlan::shards, layout.shards,
                                 config_.offload_to_cpu ? "fsdp2::offloaded_shards" : "fsdp2::shards");
  kernels::zero(exec, shards.buffer());
  for (std::size_t i = 0; i < params.size(); ++i) {
    Param& param = params[i];
    const DeviceMesh& mesh = model_->bindings()[param.binding].mesh;
    const Box box = local_box(param.spec, mesh.spec(), mesh.coordinate());
    const Section& section = layout.sections[param.section];
    param.shard = DTensor::from_local(
        part(shards, section.shard_offset + param.start * size_of(param.dtype), param.dtype, box.extent), param.spec,
        mesh);
    if (i < params_.size()) {
      kernels::copy(exec, param.shard.local(), params_[i].shard.local());
    } else {
      param.id = next_number();
      fill(param, *sources[i - params_.size()], exec);
    }
  }
  params_ = std::move(params);
  for (std::size_t i = 0; i < params_.size(); ++i) indices_.emplace(params_[i].name, i);
  for (const ParamSpec& spec : specs)
    if (const auto* tied = std::get_if<Tied>(&spec.value)) indices_.emplace(spec.name, find(tied->name));
  layout_ = layout;
  free_memory(&MemoryPlan::shards, shards_);
  ++additions_;
  shards_ = shards;
  adopt_gradient_layout(exec);

  if (!keeps_unsharded()) model_->gather_slots.reserve(slot_bytes());
  model_->gather_packs.reserve(layout_.gather_pack);
}

void ParamGroup::adopt_gradient_layout(const ExecutionSpace& exec) {
  ++layout_version_;
  is_compared_ = false;
  model_->accounts.add(&MemoryPlan::tables, -table_bytes());
  const PackingTables tables = packing_tables(layout_, params_, model_->bindings());
  scatter_table_ = kernels::make_segments(exec, tables.scatter);
  pack_table_ = kernels::make_segments(exec, tables.pack);
  zero_table_ = kernels::make_segments(exec, tables.zero);
  pack_zero_table_ = kernels::make_segments(exec, tables.pack_zero);

  const std::size_t sections = layout_.sections.size();
  std::vector<std::vector<kernels::Segment>> held(sections);
  std::vector<std::vector<kernels::Segment>> counted(sections);
  for (const Param& param : params_) {
    if (!param.requires_grad) continue;
    const kernels::Segment elements{param.train_start, 0, param.shard.local().numel()};
    held[param.section].push_back(elements);
    if (is_first_replica(param.shard)) counted[param.section].push_back(elements);
  }
  held_tables_.clear();
  counted_tables_.clear();
  for (std::size_t s = 0; s < sections; ++s) {
    held_tables_.push_back(kernels::make_segments(exec, held[s]));
    counted_tables_.push_back(kernels::make_segments(exec, counted[s]));
  }
  model_->accounts.add(&MemoryPlan::tables, table_bytes());

  free_memory(&MemoryPlan::gradients, gradients_);
  free_memory(&MemoryPlan::partials, partials_);
  has_gradients_.assign(sections, false);
  bucket_parts_.assign(sections, {});
  needs_bucket_ = std::any_of(layout_.sections.begin(), layout_.sections.end(),
                              [](const Section& section) { return section.is_bucketed(); });
  model_->reduce_slots.reserve(layout_.reduce_slot);
  model_->reduce_packs.reserve(layout_.reduce_pack);
}

std::int64_t ParamGroup::table_bytes() const {
  std::int64_t bytes = scatter_table_.bytes() + pack_table_.bytes() + zero_table_.bytes() + pack_zero_table_.bytes();
  for (const Tensor& table : held_tables_) bytes += table.bytes();
  for (const Tensor& table : counted_tables_) bytes += table.bytes();
  return bytes;
}

void ParamGroup::add_buffer(std::string name, const Tensor& value, const ExecutionSpace& exec) {
  check_name("buffer", name);
  if (buffers_.contains(name) || indices_.contains(name))
    throw ConfigError(fmt::format("module \"{}\" has a parameter or buffer \"{}\" already", name_, name));
  const DType dtype =
      is_castable(value.dtype()) ? config_.mp_policy.buffer_dtype.value_or(value.dtype()) : value.dtype();
  const Tensor local = Tensor::uninitialized(dtype, value.shape(), "fsdp2::buffer");
  kernels::cast(exec, local, value);
  model_->reserve_keys({key_of(name)});
  const DeviceMesh& mesh = model_->mesh();
  const std::vector<Placement> replicated(mesh.spec().dimensions(), Replicate{});
  buffers_.emplace(std::move(name), DTensor::from_local(local, {dtype, value.shape(), replicated, {}}, mesh));
}

void ParamGroup::set_training(bool is_training) {
  if (is_training == is_training_) return;
  is_training_ = is_training;
  is_kept_ = false;
  const ExecutionSpace exec;
  drop_unused(exec);
  if (gather_ == Gather::none && !wants_own_storage()) free_memory(&MemoryPlan::unsharded, own_storage_);
}

MemoryStats ParamGroup::memory_stats() const {
  MemoryStats stats;
  for (const Param& param : params_) {
    ++stats.parameters;
    stats.sharded_parameters += param.is_sharded ? 1 : 0;
    stats.full_bytes += param.spec.bytes();
    stats.local_bytes += param.shard.local().bytes();
  }
  stats.padding_bytes = shards_.bytes() - stats.local_bytes;
  stats.gradient_bytes = gradients_.bytes();
  stats.unsharded_bytes = storage_.bytes() + gather_pack_.bytes();
  stats.reduction_bytes = reduce_slot_.bytes();
  stats.partial_bytes = partials_.bytes();
  return stats;
}

std::string ParamGroup::summary() const {
  const MemoryStats stats = memory_stats();
  return fmt::format("module \"{}\": {} parameter{}, {} sharded over {} ranks, {:.2f} MB -> {:.2f} MB, {:.1f} % less",
                     name_, stats.parameters, stats.parameters == 1 ? "" : "s", stats.sharded_parameters,
                     model_->bindings().front().ranks(), megabytes(stats.full_bytes), megabytes(stats.local_bytes),
                     stats.reduction_percent());
}

// Settings.

void ParamGroup::set_requires_grad(std::size_t index, bool requires_grad, const ExecutionSpace& exec) {
  Param& param = params_[index];
  if (param.requires_grad == requires_grad) return;
  if (requires_grad && !is_castable(param.dtype))
    throw ConfigError(fmt::format("parameter \"{}\" of module \"{}\" is {}, which has no gradient", param.name, name_,
                                  to_string(param.dtype)));
  if (backward_ != Backward::idle || !leases_.empty() || model_->is_reducing(this) || has_partials_ || wants_bucket_ ||
      has_gradient())
    throw Error(
        fmt::format("requires_grad of parameter \"{}\" of module \"{}\" cannot be changed while the module has a "
                    "scope or gradients: finish the iteration, and call zero_grad() before",
                    param.name, name_));
  param.requires_grad = requires_grad;
  lay_out_gradients(layout_, params_, model_->bindings(), config_);
  adopt_gradient_layout(exec);
}

void ParamGroup::set_reshard_after_forward(ReshardAfterForward value) {
  Config changed = config_;
  changed.reshard_after_forward = value;
  changed.validate();
  require_one_mesh(params_, value);
  config_ = std::move(changed);
  has_slice_ = wants_slice_ = false;  // of another size: the next backward gathers from the shards
  if (!keeps_unsharded()) model_->gather_slots.reserve(slot_bytes());
}

void ParamGroup::set_gradient_divide_factor(double factor) {
  if (!(std::isfinite(factor) && factor > 0))
    throw ConfigError(
        fmt::format("the gradient divide factor of module \"{}\" is {}: expected a positive number", name_, factor));
  divide_factor_ = factor;
}

double ParamGroup::divisor(const Section& section) const {
  return divide_factor_.value_or(model_->divisor(model_->bindings()[section.binding]));
}

// Gathers.

std::int64_t ParamGroup::slices() const {
  const auto* slices = std::get_if<std::int64_t>(&config_.reshard_after_forward);
  if (slices == nullptr || params_.empty()) return 0;
  const std::int64_t ranks = model_->bindings()[params_.front().binding].ranks();
  return *slices == 1 || *slices == ranks ? 0 : *slices;
}

bool ParamGroup::keeps_unsharded() const {
  if (!is_training_) return config_.keep_unsharded_in_eval;
  if (const auto* slices = std::get_if<std::int64_t>(&config_.reshard_after_forward)) return *slices == 1;
  return !std::get<bool>(config_.reshard_after_forward);
}

std::int64_t ParamGroup::slot_bytes() const {
  const std::int64_t n = std::max<std::int64_t>(1, slices());
  return align_up((layout_.gather_slot + n - 1) / n, buffer_alignment) * n;
}

Tensor ParamGroup::shards_of(const Section& section, const Range& range) const {
  return part(shards_, section.shard_offset + range.begin * size_of(section.dtype), section.dtype, {range.size()});
}

void ParamGroup::issue_gather(const ExecutionSpace& exec, TraceEvent::Kind kind) {
  if (layout_.sections.empty() ||
      std::all_of(params_.begin(), params_.end(), [](const Param& param) { return param.slot_offset < 0; }))
    return;
  is_used_ = true;
  if (config_.checked && !is_compared_) compare_ranks();
  storage_is_own_ = wants_own_storage();
  if (storage_is_own_) {
    if (own_storage_.numel() != slot_bytes()) {
      free_memory(&MemoryPlan::unsharded, own_storage_);
      own_storage_ = allocate(&MemoryPlan::unsharded, slot_bytes(), "fsdp2::unsharded");
    }
    storage_ = own_storage_;
    model_->unsharded.add(storage_.bytes());
  } else {
    storage_ = model_->gather_slots.acquire(slot_bytes());
  }
  try {
    start_gather(exec);
  } catch (...) {
    release_storage();
    throw;
  }
  gather_ = Gather::in_flight;
  model_->trace(kind, name_);
}

void ParamGroup::start_gather(const ExecutionSpace& exec) {
  if (has_slice_) {
    const std::size_t binding = params_.front().binding;
    const Transfer transfer{slice_, storage_.slice(0, {slot_bytes()})};
    Communicator& neighbours = model_->neighbours(binding, slices());
    neighbours.set_context(name_);
    gather_works_.push_back(neighbours.all_gather(exec, {&transfer, 1}));
    return;
  }
  gather_pack_ = model_->gather_packs.acquire(layout_.gather_pack);
  std::vector<std::vector<Transfer>> transfers(model_->bindings().size());
  for (const Section& section : layout_.sections) {
    if (!section.is_sharded) continue;
    const std::int64_t size = size_of(section.gather_dtype);
    const Communicator& ranks = *model_->bindings()[section.binding].shard;
    // What is cast, or leaves host memory, goes straight to this rank's part of the result.
    const auto transfer = [&](const Tensor& shard, const Tensor& result) {
      if (shard.numel() == 0) return;
      const Tensor own = result.slice(ranks.rank() * shard.numel(), {shard.numel()});
      if (section.is_staged) kernels::cast(exec, own, shard);
      transfers[section.binding].push_back({section.is_staged ? own : shard, result});
    };
    for (const Range& bucket : section.buckets)
      transfer(shards_of(section, bucket), part(gather_pack_, section.pack_offset + bucket.begin * ranks.size() * size,
                                                section.gather_dtype, {bucket.size() * ranks.size()}));
    for (const Param& param : params_)
      if (param.is_direct && &layout_.sections[param.section] == &section)
        transfer(shards_of(section, {param.start, param.start + param.shard_count}),
                 part(storage_, param.slot_offset, section.gather_dtype, {param.shard_count * ranks.size()}));
  }
  for (const Param& param : params_)
    if (!param.is_sharded && param.slot_offset >= 0)
      kernels::cast(exec,
                    part(storage_, param.slot_offset, layout_.sections[param.section].gather_dtype, {param.count}),
                    param.shard.local().slice(0, {param.count}));
  for (std::size_t binding = 0; binding < transfers.size(); ++binding) {
    if (transfers[binding].empty()) continue;
    Communicator& ranks = *model_->bindings()[binding].shard;
    ranks.set_context(name_);
    gather_works_.push_back(ranks.all_gather(exec, transfers[binding]));
  }
}

void ParamGroup::compare_ranks() {
  std::string own;
  for (const Param& param : params_) {
    std::string placements;
    for (const Placement& placement : param.spec.placements) placements += " " + to_string(placement);
    const Section& section = layout_.sections[param.section];
    own += fmt::format("\n    \"{}\" {} {}{}, gathered as {}, reduced as {}{}", param.name, to_string(param.dtype),
                       to_string(param.spec.shape), placements, to_string(section.gather_dtype),
                       to_string(section.reduce_dtype), param.requires_grad ? "" : ", frozen");
  }
  const HostCommunicator& host = model_->mesh().host();
  const std::vector<std::string> all = host.all_gather(own);
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank] != all[0])
      throw ConfigError(
          fmt::format("module \"{}\" is not the same on all ranks: rank 0 has{}\n  rank {} has{}\n  Add the "
                      "same parameters with the same settings everywhere",
                      name_, all[0], rank, all[rank]));
  is_compared_ = true;
}

void ParamGroup::complete_gather(const ExecutionSpace& exec) {
  if (gather_ != Gather::in_flight) return;
  try {
    for (Work& work : gather_works_) work.wait();
  } catch (...) {
    release_storage();
    throw;
  }
  gather_works_.clear();
  if (has_slice_)
    has_slice_ = false;
  else
    kernels::copy_segments(exec, storage_, gather_pack_, scatter_table_);
  model_->gather_packs.release(gather_pack_);
  gather_ = Gather::gathered;
  model_->trace(TraceEvent::Kind::gather_completed, name_);
}

void ParamGroup::poke() {
  for (Work& work : gather_works_) work.test();
}

void ParamGroup::gather(const ExecutionSpace& exec) {
  if (gather_ == Gather::none) {
    model_->complete_ahead(exec);  // so that two never need temporaries at once
    issue_gather(exec, TraceEvent::Kind::gather_issued);
  }
  use_gather(exec);
}

void ParamGroup::gather_ahead(const ExecutionSpace& exec, TraceEvent::Kind kind) {
  if (gather_ != Gather::none) return;
  issue_gather(exec, kind);
  if (gather_ == Gather::in_flight) model_->add_ahead(this);
}

void ParamGroup::prefetch(const ExecutionSpace& exec) {
  if (!model_->may_prefetch() || gather_ != Gather::none) return;
  gather_ahead(exec, TraceEvent::Kind::prefetch_issued);
  is_prefetched_ = gather_ == Gather::in_flight;
}

void ParamGroup::release_storage() noexcept {
  if (config_.checked && storage_.bytes() > 0) kernels::poison(storage_);
  is_prefetched_ = false;
  model_->remove_ahead(this);
  gather_works_.clear();
  if (storage_is_own_) {
    model_->unsharded.add(-storage_.bytes());
    storage_ = {};
    if (!wants_own_storage()) free_memory(&MemoryPlan::unsharded, own_storage_);
  } else {
    model_->gather_slots.release(storage_);
  }
  model_->gather_packs.release(gather_pack_);
  gather_ = Gather::none;
}

void ParamGroup::keep_slice(const ExecutionSpace& exec) noexcept {
  if (!wants_slice_) return;
  wants_slice_ = false;
  const std::int64_t position = model_->bindings()[params_.front().binding].shard->rank() % slices();
  kernels::copy(exec, slice_, storage_.slice(position * slice_.numel(), {slice_.numel()}));
  has_slice_ = true;
}

void ParamGroup::drop_unused(const ExecutionSpace& exec) noexcept {
  // A gather in flight writes into its storage: it is used by the next scope, or drained.
  if (gather_ != Gather::gathered || !leases_.empty() || is_kept_ || is_cached_) return;
  keep_slice(exec);
  release_storage();
  model_->trace(TraceEvent::Kind::resharded, name_);
}

void ParamGroup::drain(const ExecutionSpace& exec) {
  if (leases_.empty() && !is_cached_) complete_gather(exec);
  drop_unused(exec);
}

Tensor ParamGroup::full(const Param& param) const {
  if (param.slot_offset < 0) return param.shard.local();
  if (gather_ != Gather::gathered)
    throw Error(
        fmt::format("parameter \"{}\" of module \"{}\" is not gathered: full parameters exist in a scope, between the "
                    "hooks, or after all_gather",
                    param.name, name_));
  return part(storage_, param.slot_offset, layout_.sections[param.section].gather_dtype, param.full_shape());
}

void ParamGroup::cache(const ExecutionSpace& exec, bool is_async) {
  if (is_async)
    gather_ahead(exec, TraceEvent::Kind::gather_issued);
  else
    gather(exec);
  is_cached_ = true;
}

void ParamGroup::clear_cache(const ExecutionSpace& exec) {
  is_cached_ = false;
  drop_unused(exec);
}

// Phases.

std::uint64_t ParamGroup::new_lease() {
  is_used_ = true;
  if (leases_.empty()) casts_used_ = 0;
  leases_.push_back(next_number());
  return leases_.back();
}

bool ParamGroup::is_live(std::uint64_t lease) const {
  return std::find(leases_.begin(), leases_.end(), lease) != leases_.end();
}

std::uint64_t ParamGroup::begin_forward(const ExecutionSpace& exec) {
  model_->poke();
  gather(exec);
  if (backward_ == Backward::open) return new_lease();  // a recomputation
  ++forward_count_;
  is_kept_ = keeps_unsharded() && gather_ == Gather::gathered;
  if (is_training_) {
    model_->record(this);
    wants_slice_ = slices() > 0 && gather_ == Gather::gathered;
    if (wants_slice_ && slice_.numel() != slot_bytes() / slices()) {
      free_memory(&MemoryPlan::unsharded, slice_);
      slice_ = allocate(&MemoryPlan::unsharded, slot_bytes() / slices(), "fsdp2::unsharded_slice");
    }
  }
  if (forward_prefetch_) {
    for (ParamGroup* group : *forward_prefetch_) group->gather_ahead(exec, TraceEvent::Kind::prefetch_issued);
  } else if (config_.forward_prefetch && is_training_) {
    if (ParamGroup* const next = model_->next_forward()) next->prefetch(exec);
  }
  return new_lease();
}

std::uint64_t ParamGroup::begin_backward(const ExecutionSpace& exec, bool gathers) {
  if (backward_ == Backward::open)
    throw Error(fmt::format("a backward scope of module \"{}\" is open already: end it by reduce() or hold()", name_));
  if (backward_ == Backward::abandoned)
    throw Error(fmt::format(
        "the last backward of module \"{}\" ended without reduce() or hold(): call Model::reset() to drop its "
        "gradients",
        name_));
  model_->poke();
  if (needs_bucket_) model_->prepare_buckets(exec);
  ParamGroup* const previous = model_->take_from_order(this);
  prefetch_after_ = nullptr;
  if (gathers) {
    if (unshards_in_backward_) gather(exec);
    const BackwardPrefetch policy = config_.backward_prefetch;
    if (backward_prefetch_) {
      for (ParamGroup* group : *backward_prefetch_) group->gather_ahead(exec, TraceEvent::Kind::prefetch_issued);
    } else if (previous != nullptr && previous->unshards_in_backward_) {
      if (policy == BackwardPrefetch::pre) previous->prefetch(exec);
      if (policy == BackwardPrefetch::post) prefetch_after_ = previous;
    }
  }
  // What no reduction follows stays as it is until the shards change.
  is_kept_ = gather_ == Gather::gathered && (!reshards_after_backward_ || (!has_trainable() && keeps_unsharded()));
  backward_ = Backward::open;
  backward_lease_ = new_lease();
  return backward_lease_;
}

std::uint64_t ParamGroup::begin_unshard(const ExecutionSpace& exec, bool is_async) {
  model_->poke();
  if (is_async)
    gather_ahead(exec, TraceEvent::Kind::gather_issued);
  else
    gather(exec);
  return new_lease();
}

std::uint64_t ParamGroup::begin_writeback(const ExecutionSpace& exec) {
  require_no_scope("its parameters cannot be unsharded to be written");
  for (const Param& param : params_) {
    const Section& section = layout_.sections[param.section];
    if (section.gather_dtype != section.dtype)
      throw Error(
          fmt::format("parameter \"{}\" of module \"{}\" is gathered as {}, but kept as {}: what is written could "
                      "not be kept. Write to its shard",
                      param.name, name_, to_string(section.gather_dtype), to_string(section.dtype)));
  }
  has_slice_ = false;
  writeback_lease_ = begin_unshard(exec, false);
  return writeback_lease_;
}

void ParamGroup::write_back(const ExecutionSpace& exec) noexcept {
  for (const Param& param : params_) {
    if (param.slot_offset < 0) continue;  // the scope showed the shard
    const std::size_t rank =
        param.is_sharded ? static_cast<std::size_t>(model_->bindings()[param.binding].shard->rank()) : 0;
    const Box own = param.is_sharded ? param.pieces[rank] : Box::whole(param.full_shape());
    kernels::extract_box(exec, param.shard.local(), full(param), own);
  }
}

void ParamGroup::end(std::uint64_t lease, const ExecutionSpace& exec) noexcept {
  if (std::erase(leases_, lease) == 0) return;  // ended by reset
  if (lease == writeback_lease_) write_back(exec);
  if (lease == backward_lease_ && backward_ == Backward::open) backward_ = Backward::abandoned;
  drop_unused(exec);
}

void ParamGroup::end_backward(Backward next, const ExecutionSpace& exec) noexcept {
  backward_ = next;
  end(backward_lease_, exec);
}

Tensor ParamGroup::cast_for_scope(const Tensor& tensor, std::optional<DType> dtype, const ExecutionSpace& exec) {
  if (!dtype || *dtype == tensor.dtype() || !is_castable(tensor.dtype())) return tensor;
  const std::int64_t bytes = tensor.numel() * size_of(*dtype);
  if (casts_used_ == casts_.size()) casts_.emplace_back();
  Tensor& memory = casts_[casts_used_++];
  if (memory.bytes() < bytes) memory = Tensor::uninitialized(DType::u8, {bytes}, "fsdp2::cast");
  const Tensor result = part(memory, 0, *dtype, tensor.shape());
  kernels::cast(exec, result, tensor);
  return result;
}

void ParamGroup::borrow_reduce_slot(const ExecutionSpace& exec) {
  if (has_reduce_slot_) return;
  reduce_slot_ = model_->reduce_slots.acquire(layout_.reduce_slot);
  has_reduce_slot_ = true;
  kernels::zero_segments(exec, reduce_slot_, zero_table_);
  for (Param& param : params_) param.is_written = false;
}

Tensor ParamGroup::bucket_part(std::size_t section) const {
  const BucketPart& place = bucket_parts_[section];
  return model_->bucket(place.bucket).gradients.slice(place.start, {layout_.sections[section].trainable});
}

LentTensor ParamGroup::lend(std::size_t index, const ExecutionSpace& exec) {
  Param& param = params_[index];
  const Section& section = layout_.sections[param.section];
  if (!param.requires_grad)
    throw Error(fmt::format("parameter \"{}\" of module \"{}\" does not require a gradient", param.name, name_));
  if (param.is_ignored) {
    make_gradients(exec);
    param.has_gradient = true;
    return {gradient_of(param), 1.0f};
  }
  if (!param.is_sharded) return {bucket_part(param.section).slice(param.train_start, param.full_shape()), 1.0f};
  borrow_reduce_slot(exec);
  const float beta = param.is_written ? 1.0f : 0.0f;
  param.is_written = true;
  return {part(reduce_slot_, param.lent_offset, section.reduce_dtype, param.full_shape()), beta};
}

void ParamGroup::zero_unwritten(const ExecutionSpace& exec) {
  if (!has_reduction()) return;
  borrow_reduce_slot(exec);
  for (Param& param : params_) {
    if (!param.requires_grad || !param.is_sharded || param.is_written) continue;
    const DType dtype = layout_.sections[param.section].reduce_dtype;
    kernels::zero(exec, part(reduce_slot_, param.lent_offset, dtype, {param.count}).buffer());
    param.is_written = true;
  }
}

void ParamGroup::release_reduce_slot() noexcept {
  model_->reduce_slots.release(reduce_slot_);
  has_reduce_slot_ = false;
}

void ParamGroup::hold(const ExecutionSpace& exec) {
  zero_unwritten(exec);
  end_backward(Backward::held, exec);
}

void ParamGroup::reduce(const ExecutionSpace& exec) {
  if (!requires_gradient_sync_) return hold(exec);
  wants_bucket_ = wants_bucket_ || std::any_of(layout_.sections.begin(), layout_.sections.end(),
                                               [](const Section& section) { return section.is_bucketed(); });
  if (has_reduction()) {
    zero_unwritten(exec);
    end_backward(Backward::idle, exec);
    start_reduction(exec);
  } else {
    end_backward(Backward::idle, exec);
  }
  for (std::size_t s = 0; s < layout_.sections.size(); ++s)  // those without elements
    if (layout_.sections[s].trainable == 0) mark_gradients(s);
  if (prefetch_after_ != nullptr) prefetch_after_->prefetch(exec);
  prefetch_after_ = nullptr;
}

template <class VisitBucket, class VisitDirect>
void ParamGroup::for_each_reduced(VisitBucket&& visit_bucket, VisitDirect&& visit_direct) const {
  for (std::size_t s = 0; s < layout_.sections.size(); ++s) {
    const Section& section = layout_.sections[s];
    if (!section.is_sharded) continue;
    for (const Range& bucket : section.trainable_buckets)
      if (bucket.size() > 0) visit_bucket(section, bucket);
    for (const Param& param : params_)
      if (param.section == s && param.is_direct && param.lent_offset >= 0 && param.shard_count > 0)
        visit_direct(section, param);
  }
}

void ParamGroup::start_reduction(const ExecutionSpace& exec) {
  model_->complete_reduction(exec);
  PendingReduction next;
  next.group = this;
  next.all_reduces = requires_all_reduce_;
  next.slot = reduce_slot_;
  next.packed = model_->reduce_packs.acquire(layout_.reduce_pack);
  reduce_slot_ = {};
  has_reduce_slot_ = false;

  for (const Param& param : params_) {
    if (param.lent_offset < 0) continue;
    const Section& section = layout_.sections[param.section];
    const Divisors divisors = split_divisor(section.reduce_dtype, divisor(section));
    if (divisors.before != 1)
      kernels::scale(exec, part(next.slot, param.lent_offset, section.reduce_dtype, {param.count}),
                     1.0 / divisors.before);
  }
  kernels::copy_segments(exec, next.packed, next.slot, pack_table_);
  kernels::zero_segments(exec, next.packed, pack_zero_table_);

  std::vector<std::vector<Transfer>> transfers(model_->bindings().size());
  for_each_reduced(
      [&](const Section& section, const Range& bucket) {
        const std::int64_t ranks = model_->bindings()[section.binding].ranks();
        const std::int64_t begin = section.reduce_pack_offset + bucket.begin * ranks * size_of(section.reduce_dtype);
        transfers[section.binding].push_back({part(next.packed, begin, section.reduce_dtype, {bucket.size() * ranks}),
                                              received(next.slot, 0, section).slice(bucket.begin, {bucket.size()})});
      },
      [&](const Section& section, const Param& param) {
        const std::int64_t ranks = model_->bindings()[section.binding].ranks();
        transfers[section.binding].push_back(
            {part(next.slot, param.lent_offset, section.reduce_dtype, {param.shard_count * ranks}),
             received(next.slot, 0, section).slice(param.train_start, {param.shard_count})});
      });
  for (std::size_t binding = 0; binding < transfers.size(); ++binding) {
    if (transfers[binding].empty()) continue;
    Communicator& ranks = *model_->bindings()[binding].reduce;
    ranks.set_context(name_);
    next.works.push_back(ranks.reduce_scatter(exec, transfers[binding], ReduceOp::sum));
  }
  model_->start_reduction(std::move(next));
}

std::vector<std::vector<std::int64_t>> ParamGroup::reduction_transfers() const {
  std::vector<std::vector<std::int64_t>> bytes(model_->bindings().size());
  const auto add = [&](const Section& section, std::int64_t count) {
    bytes[section.binding].push_back(count * size_of(section.reduce_dtype) *
                                     model_->bindings()[section.binding].ranks());
  };
  for_each_reduced([&](const Section& section, const Range& bucket) { add(section, bucket.size()); },
                   [&](const Section& section, const Param& param) { add(section, param.shard_count); });
  return bytes;
}

const char* ParamGroup::unfinished() const {
  switch (backward_) {
    case Backward::open:
      return "its backward scope is still open";
    case Backward::abandoned:
      return "its backward scope ended without reduce() or hold()";
    case Backward::held:
      return "its gradients are held";
    case Backward::idle:
      break;
  }
  if (has_partials_ && !model_->is_reducing(this))
    return "its gradients are not reduced over the replicas: the last backward needs set_requires_all_reduce(true)";
  return nullptr;
}

// Gradients.

Tensor ParamGroup::section_gradients(const Section& section) const {
  return part(gradients_, section.gradient_offset, section.gradient_dtype, {section.trainable});
}

Tensor ParamGroup::gradient_of(const Param& param) const {
  return section_gradients(layout_.sections[param.section]).slice(param.train_start, param.shard.local().shape());
}

void ParamGroup::allocate_gradients(const ExecutionSpace& exec) {
  is_used_ = true;
  if (gradients_.bytes() == layout_.gradients) return;
  gradients_ = allocate(&MemoryPlan::gradients, layout_.gradients,
                        config_.offload_to_cpu ? "fsdp2::offloaded_gradients" : "fsdp2::gradients");
  kernels::zero(exec, gradients_.buffer());
  has_gradients_.assign(layout_.sections.size(), false);
}

Tensor ParamGroup::allocate_state(const ExecutionSpace& exec, std::int64_t bytes) const {
  if (!config_.offload_to_cpu) return {exec, DType::u8, {bytes}, "fsdp2::optimizer_state"};
  Tensor memory = host_memory(bytes, "fsdp2::offloaded_optimizer_state");
  kernels::zero(exec, memory.buffer());
  return memory;
}

void ParamGroup::make_gradients(const ExecutionSpace& exec) {
  allocate_gradients(exec);
  for (std::size_t s = 0; s < layout_.sections.size(); ++s) {
    if (has_gradients_[s]) continue;
    kernels::zero(exec, section_gradients(layout_.sections[s]).buffer());
    has_gradients_[s] = true;
  }
}

Tensor ParamGroup::received(const Tensor& slot, std::int64_t slot_start, const Section& section) const {
  return part(slot, section.receive_offset - slot_start, section.reduce_dtype, {section.trainable});
}

void ParamGroup::place_in_buckets(std::vector<ReplicatedBucket>& buckets) {
  needs_bucket_ = false;
  for (std::size_t s = 0; s < layout_.sections.size(); ++s) {
    const Section& section = layout_.sections[s];
    BucketPart& place = bucket_parts_[s];
    if (!section.is_bucketed() || place.start >= 0) continue;
    std::tie(place.bucket, place.start) =
        ModelState::place_in_bucket(buckets, section.binding, section.reduce_dtype, section.trainable);
  }
}

void ParamGroup::mark_gradients(std::size_t section) {
  for (Param& param : params_)
    if (param.requires_grad && param.section == section && !param.is_ignored) param.has_gradient = true;
}

void ParamGroup::report_gradients(bool is_sharded, const ExecutionSpace& exec) {
  if (!model_->on_gradient_ready) return;
  require_no_scope("its gradients cannot be handed to on_gradient_ready");
  invalidate(exec);
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i].has_gradient || params_[i].is_sharded != is_sharded) continue;
    ShardedParam param = handle(i);
    model_->on_gradient_ready(param);
  }
}

void ParamGroup::take_reduction(const Tensor& slot, bool all_reduces, const ExecutionSpace& exec) {
  if (has_partials_)
    for (const Section& section : layout_.sections)
      if (section.is_sharded && section.trainable > 0)
        kernels::accumulate(exec, received(slot, 0, section), received(partials_, layout_.receive_start, section), 1.0,
                            true);
  if (!all_reduces) {
    const std::int64_t bytes = layout_.reduce_slot - layout_.receive_start;
    if (partials_.numel() != bytes) partials_ = allocate(&MemoryPlan::partials, bytes, "fsdp2::partial_gradients");
    kernels::copy(exec, partials_, slot.slice(layout_.receive_start, {bytes}));
    has_partials_ = true;
    return;
  }
  has_partials_ = false;
  bool is_replicated = false;
  for (const Section& section : layout_.sections) {
    Communicator* const replicas = model_->bindings()[section.binding].replicate;
    if (!section.is_sharded || section.trainable == 0 || replicas == nullptr) continue;
    replicas->set_context(name_);
    replicas->all_reduce(exec, received(slot, 0, section), ReduceOp::sum).wait();
    is_replicated = true;
  }
  if (is_replicated) model_->trace(TraceEvent::Kind::all_reduced, name_);

  allocate_gradients(exec);
  for (std::size_t s = 0; s < layout_.sections.size(); ++s) {
    const Section& section = layout_.sections[s];
    if (!section.is_sharded || section.trainable == 0) continue;
    kernels::accumulate(exec, section_gradients(section), received(slot, 0, section),
                        split_divisor(section.reduce_dtype, divisor(section)).after, has_gradients_[s]);
    has_gradients_[s] = true;
    mark_gradients(s);
  }
}

void ParamGroup::divide_buckets(const ExecutionSpace& exec) const {
  if (!wants_bucket_) return;
  for (std::size_t s = 0; s < layout_.sections.size(); ++s) {
    const Section& section = layout_.sections[s];
    const double before = split_divisor(section.reduce_dtype, divisor(section)).before;
    if (bucket_parts_[s].start >= 0 && before != 1) kernels::scale(exec, bucket_part(s), 1.0 / before);
  }
}

void ParamGroup::take_buckets(const ExecutionSpace& exec) {
  if (!wants_bucket_) return;
  allocate_gradients(exec);
  for (std::size_t s = 0; s < layout_.sections.size(); ++s) {
    const Section& section = layout_.sections[s];
    if (bucket_parts_[s].start < 0) continue;
    kernels::accumulate(exec, section_gradients(section), bucket_part(s),
                        split_divisor(section.reduce_dtype, divisor(section)).after, has_gradients_[s]);
    has_gradients_[s] = true;
    mark_gradients(s);
  }
  wants_bucket_ = false;
}

bool ParamGroup::has_trainable() const {
  return std::any_of(layout_.sections.begin(), layout_.sections.end(),
                     [](const Section& section) { return section.trainable > 0; });
}

bool ParamGroup::has_gradient() const {
  return std::any_of(params_.begin(), params_.end(), [](const Param& param) { return param.has_gradient; });
}

std::optional<DTensor> ParamGroup::gradient(const Param& param) const {
  if (!param.has_gradient) return std::nullopt;
  TensorSpec spec = param.spec;
  spec.dtype = layout_.sections[param.section].gradient_dtype;
  return DTensor::from_local(gradient_of(param), std::move(spec), param.shard.mesh());
}

void ParamGroup::check_gradient(const Param& param, const Tensor& gradient, const Shape& expected, DType dtype,
                                const char* what) const {
  if (!param.requires_grad)
    throw Error(fmt::format("parameter \"{}\" of module \"{}\" does not require a gradient", param.name, name_));
  if (gradient.dtype() != dtype || gradient.shape() != expected)
    throw ShapeError(fmt::format("the {} gradient of parameter \"{}\" of module \"{}\" is {} {}: expected {} {}", what,
                                 param.name, name_, to_string(gradient.dtype()), to_string(gradient.shape()),
                                 to_string(dtype), to_string(expected)));
}

void ParamGroup::check_full_gradient(const Param& param, const Tensor& gradient) const {
  const Section& section = layout_.sections[param.section];
  // What a backward in param_dtype makes is welcome too: it is widened as it is copied.
  const bool is_gathered_dtype = gradient.dtype() == section.gather_dtype && is_castable(gradient.dtype());
  check_gradient(param, gradient, param.full_shape(), is_gathered_dtype ? section.gather_dtype : section.reduce_dtype,
                 "full");
}

Tensor ParamGroup::reduce_scatter_gradient(std::size_t index, const Tensor& full_gradient, const ExecutionSpace& exec) {
  const Param& param = params_[index];
  const Section& section = layout_.sections[param.section];
  const DType dtype = section.reduce_dtype;
  check_gradient(param, full_gradient, param.full_shape(), dtype, "full");
  const Binding& binding = model_->bindings()[param.binding];
  const std::int64_t pieces = param.is_sharded ? binding.ranks() : 1;
  const Tensor sent(exec, dtype, {param.shard_count * pieces}, "fsdp2::full_gradient");
  for (std::int64_t rank = 0; rank < pieces; ++rank) {
    const Box piece = param.is_sharded ? param.pieces[static_cast<std::size_t>(rank)] : Box::whole(param.full_shape());
    kernels::extract_box(exec, sent.slice(rank * param.shard_count, piece.extent), full_gradient, piece);
  }
  const Divisors divisors = split_divisor(dtype, divisor(section));
  if (divisors.before != 1) kernels::scale(exec, sent, 1.0 / divisors.before);
  Tensor sum = sent;
  if (param.shard_count > 0 && !param.is_ignored) {
    if (param.is_sharded) {
      sum = Tensor::uninitialized(dtype, {param.shard_count}, "fsdp2::reduced_gradient");
      const Transfer transfer{sent, sum};
      binding.reduce->reduce_scatter(exec, {&transfer, 1}, ReduceOp::sum).wait();
    } else {
      binding.reduce->all_reduce(exec, sum, ReduceOp::sum).wait();
    }
    if (binding.replicate != nullptr) binding.replicate->all_reduce(exec, sum, ReduceOp::sum).wait();
  }
  const Tensor result = Tensor::uninitialized(section.gradient_dtype, {param.shard_count}, "fsdp2::reduced_gradient");
  kernels::accumulate(exec, result, sum, divisors.after, false);
  return result.slice(0, param.shard.local().shape());
}

void ParamGroup::set_gradient(std::size_t index, const Tensor& gradient, const ExecutionSpace& exec) {
  Param& param = params_[index];
  check_gradient(param, gradient, param.shard.local().shape(), layout_.sections[param.section].gradient_dtype, "local");
  make_gradients(exec);
  kernels::copy(exec, gradient_of(param), gradient);
  param.has_gradient = true;
}

void ParamGroup::zero_gradient(std::size_t index, const ExecutionSpace& exec) {
  Param& param = params_[index];
  if (!param.has_gradient) return;
  kernels::zero(exec, gradient_of(param).buffer());
  param.has_gradient = false;
}

void ParamGroup::require_finished() const {
  if (const char* reason = unfinished())
    throw Error(
        fmt::format("the gradients of module \"{}\" cannot be zeroed: {}. Reduce them first, or call Model::reset()",
                    name_, reason));
}

void ParamGroup::zero_gradients(const ExecutionSpace& exec) {
  require_finished();
  model_->drop_reduction(this);
  forget_gradients();
  if (wants_bucket_)
    for (std::size_t s = 0; s < bucket_parts_.size(); ++s)
      if (bucket_parts_[s].start >= 0) kernels::zero(exec, bucket_part(s).buffer());
  wants_bucket_ = false;
}

void ParamGroup::forget_gradients() noexcept {
  for (Param& param : params_) param.has_gradient = false;
  std::fill(has_gradients_.begin(), has_gradients_.end(), false);
}

void ParamGroup::reset(const ExecutionSpace& exec) {
  leases_.clear();
  backward_ = Backward::idle;
  prefetch_after_ = nullptr;
  release_reduce_slot();
  is_kept_ = is_cached_ = has_partials_ = wants_slice_ = false;
  wants_bucket_ = false;
  forget_gradients();
  drain(exec);
  has_slice_ = false;
}

// Changes of the shards.

void ParamGroup::require_no_scope(std::string_view action) const {
  if (!leases_.empty())
    throw Error(fmt::format("module \"{}\" is unsharded by a live scope, so {}: end the scope first", name_, action));
}

void ParamGroup::step(const StepFunction& update, bool by_key, const ExecutionSpace& exec) {
  require_no_scope("it cannot be updated");
  if (!has_gradient()) return;
  invalidate(exec);
  for (const Param& param : params_)
    if (param.has_gradient) update(by_key ? key(param) : param.name, param.shard.local(), gradient(param)->local());
}

void ParamGroup::invalidate(const ExecutionSpace& exec) {
  is_kept_ = is_cached_ = wants_slice_ = false;
  drain(exec);
  has_slice_ = false;
}

void ParamGroup::update_local_shard(std::size_t index, const Tensor& shard, const ExecutionSpace& exec) {
  const Param& param = params_[index];
  const Tensor& local = param.shard.local();
  if (shard.dtype() != local.dtype() || shard.shape() != local.shape())
    throw ShapeError(
        fmt::format("the shard of parameter \"{}\" of module \"{}\" on rank {} cannot become {} {}: expected {} {}",
                    param.name, name_, model_->mesh().rank(), to_string(shard.dtype()), to_string(shard.shape()),
                    to_string(local.dtype()), to_string(local.shape())));
  require_no_scope("its shards cannot be changed");
  invalidate(exec);
  kernels::copy(exec, local, shard);
}

}  // namespace fsdp2::detail
