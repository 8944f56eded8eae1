// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "param_group.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <set>

#include "fsdp2/error.hpp"
#include "kernels.hpp"

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

Tensor range_of(const Tensor& buffer, const Range& range) {
  return buffer.slice(range.begin, {range.size()});
}

/// Whether no rank before this one holds the same elements.
bool is_first_replica(const DTensor& tensor) {
  const std::vector<Placement>& placements = tensor.spec().placements;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (std::holds_alternative<Replicate>(placements[axis]) && tensor.mesh().coordinate()[axis] != 0) return false;
  return true;
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

TensorSpec Param::spec(const Config& config) const {
  const MeshSpec& mesh = config.mesh->spec();
  std::vector<Placement> placements(mesh.dimensions(), Replicate{});
  if (is_sharded) placements[mesh.axis(config.mesh_dim_name)] = Shard{0};
  return {DType::f32, shape, std::move(placements), {}};
}

ParamGroup::ParamGroup(std::shared_ptr<ModelState> model, std::string name, Config config)
    : model_(std::move(model)), name_(std::move(name)), config_(std::move(config)) {
  config_.validate();
  model_->add(this);
}

ParamGroup::~ParamGroup() {
  model_->remove(this);
}

std::string ParamGroup::key_of(const std::string& param_name) const {
  return name_.empty() ? param_name : name_ + "." + param_name;
}

std::size_t ParamGroup::find(std::string_view name) const {
  std::string names;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].name == name) return i;
    names += (i == 0 ? "" : ", ") + params_[i].name;
  }
  throw ConfigError(
      fmt::format("module \"{}\" has no parameter \"{}\": it has {}", name_, name, names.empty() ? "none" : names));
}

void ParamGroup::check_new(const std::vector<ParamSpec>& specs) const {
  if (is_used_)
    throw ConfigError(
        fmt::format("parameters cannot be added to module \"{}\" any more: a scope, a gradient or an optimizer has "
                    "used it",
                    name_));
  std::set<std::string> names;
  for (const Param& param : params_) names.insert(param.name);
  for (const ParamSpec& spec : specs) {
    check_name("parameter", spec.name);
    if (!names.insert(spec.name).second)
      throw ConfigError(fmt::format("module \"{}\" would have two parameters \"{}\"", name_, spec.name));
    try {
      (void)checked_multiply(fsdp2::numel(spec.shape), size_of(DType::f32));
    } catch (const ShapeError& error) {
      throw ShapeError(fmt::format("parameter \"{}\" of module \"{}\": {}", spec.name, name_, error.what()));
    }
    if (const auto* full = std::get_if<Tensor>(&spec.value)) {
      if (full->shape() != spec.shape)
        throw ShapeError(fmt::format("parameter \"{}\" of module \"{}\" is declared as {}, but its tensor is {}",
                                     spec.name, name_, to_string(spec.shape), to_string(full->shape())));
      if (full->dtype() != DType::f32)
        throw ShapeError(fmt::format("parameter \"{}\" of module \"{}\" is {}: only f32 parameters are supported yet",
                                     spec.name, name_, to_string(full->dtype())));
    }
  }
}

Layout ParamGroup::lay_out(std::vector<Param>& params, std::int64_t ranks) {
  Layout layout;
  std::int64_t cursor = 0;
  const auto place = [&](bool is_sharded, bool is_direct, bool requires_grad, std::int64_t alignment) {
    for (Param& param : params) {
      if (param.is_sharded != is_sharded || param.is_direct != is_direct || param.requires_grad != requires_grad)
        continue;
      param.shard_start = align_up(cursor, alignment);
      cursor = checked_add(param.shard_start, param.shard_count);
    }
    return cursor;
  };
  layout.packed_trainable.begin = place(true, false, false, 1);
  layout.packed = layout.packed_trainable.end = place(true, false, true, 1);
  place(true, true, true, buffer_alignment);
  place(false, false, true, buffer_alignment);
  place(false, false, false, buffer_alignment);
  layout.shards = place(true, true, false, buffer_alignment);

  const auto extend = [](std::optional<Range>& range, const Param& param) {
    const Range own{param.shard_start, param.shard_start + param.shard_count};
    range = range ? Range{std::min(range->begin, own.begin), std::max(range->end, own.end)} : own;
  };
  std::optional<Range> trainable;
  std::optional<Range> sharded;
  std::optional<Range> replicated;
  for (Param& param : params) {
    const std::int64_t unsharded_count = checked_multiply(param.shard_count, ranks);
    if (param.is_sharded) {
      param.slot_start = align_up(layout.gather_slot, buffer_alignment);
      layout.gather_slot = checked_add(param.slot_start, unsharded_count);
    }
    if (!param.requires_grad) continue;
    extend(trainable, param);
    extend(param.is_sharded ? sharded : replicated, param);
    if (param.is_sharded) {
      param.lent_start = align_up(layout.lent, buffer_alignment);
      layout.lent = checked_add(param.lent_start, unsharded_count);
    }
  }
  layout.trainable = trainable.value_or(Range{});
  layout.replicated = replicated.value_or(Range{layout.trainable.begin, layout.trainable.begin});
  for (Param& param : params)
    if (param.requires_grad && !param.is_sharded) param.lent_start = param.shard_start - layout.replicated.begin;
  layout.trainable_sharded = sharded.value_or(Range{}).size();
  layout.reduce_slot = checked_add(align_up(layout.lent, buffer_alignment), layout.trainable_sharded);
  return layout;
}

void ParamGroup::make_tables(const ExecutionSpace& exec) {
  const std::int64_t ranks = model_->ranks();
  const std::int64_t packed_gradients = layout_.packed_trainable.size();
  std::vector<kernels::Segment> scatter;
  std::vector<kernels::Segment> pack;
  std::vector<kernels::Segment> zero;
  std::vector<kernels::Segment> held;
  std::vector<kernels::Segment> counted;
  std::vector<const Param*> received;  // in the order of the shard buffer
  for (const Param& param : params_) {
    if (param.requires_grad) {
      held.push_back({param.shard_start - layout_.trainable.begin, 0, param.shard.local().numel()});
      if (is_first_replica(param.shard)) counted.push_back(held.back());
    }
    if (!param.is_sharded) continue;
    for (std::int64_t rank = 0; rank < ranks && !param.is_direct; ++rank) {
      const std::int64_t piece = rank * param.shard_count;
      scatter.push_back({rank * layout_.packed + param.shard_start, param.slot_start + piece, param.shard_count});
      if (param.requires_grad)
        pack.push_back({param.lent_start + piece,
                        rank * packed_gradients + param.shard_start - layout_.packed_trainable.begin,
                        param.shard_count});
    }
    if (!param.requires_grad) continue;
    zero.push_back({0, param.lent_start + param.count, param.shard_count * ranks - param.count});
    received.push_back(&param);
  }
  std::sort(received.begin(), received.end(),
            [](const Param* a, const Param* b) { return a->shard_start < b->shard_start; });
  const std::int64_t receive_start = layout_.reduce_slot - layout_.trainable_sharded - layout_.trainable.begin;
  std::int64_t cursor = layout_.trainable.begin;
  for (const Param* param : received) {
    zero.push_back({0, receive_start + cursor, param->shard_start - cursor});
    cursor = param->shard_start + param->shard_count;
  }
  scatter_table_ = kernels::make_segments(exec, scatter);
  pack_table_ = kernels::make_segments(exec, pack);
  zero_table_ = kernels::make_segments(exec, zero);
  held_table_ = kernels::make_segments(exec, held);
  counted_table_ = kernels::make_segments(exec, counted);
}

void ParamGroup::fill(const Param& param, const ParamSpec& spec, const ExecutionSpace& exec) const {
  const Tensor& local = param.shard.local();
  if (local.numel() == 0) return;
  const Box& box = param.shard.box();
  const std::int64_t first = param.is_sharded ? box.offset[0] * (param.count / param.shape[0]) : 0;
  if (const auto* full = std::get_if<Tensor>(&spec.value))
    return kernels::copy(exec, local, full->slice(first, local.shape()));
  Initializer initializer = std::get<Initializer>(spec.value);
  if (initializer.kind == Initializer::Kind::kaiming) {
    const std::int64_t fan_in = param.shape.empty() ? 1 : param.count / param.shape[0];
    initializer.kind = Initializer::Kind::normal;
    initializer.second = std::sqrt(2.0 / static_cast<double>(fan_in));
  }
  kernels::initialize(exec, local, initializer, first, hash_of(key_of(param.name)));
}

void ParamGroup::add(const std::vector<ParamSpec>& specs, const ExecutionSpace& exec) {
  check_new(specs);
  const std::int64_t ranks = model_->ranks();
  std::vector<Param> params = params_;
  std::vector<std::string> keys;
  for (const ParamSpec& spec : specs) {
    Param param;
    param.name = spec.name;
    param.shape = spec.shape;
    param.requires_grad = spec.requires_grad;
    param.id = next_number();
    param.count = fsdp2::numel(spec.shape);
    param.is_sharded = !spec.shape.empty() && param.count >= config_.min_shard_size;
    param.is_direct = param.is_sharded && param.count * size_of(DType::f32) >= config_.direct_bytes;
    param.shard_count = param.count;
    if (param.is_sharded && param.count > 0)
      param.shard_count = checked_multiply(chunk_size(spec.shape[0], ranks), param.count / spec.shape[0]);
    params.push_back(std::move(param));
    keys.push_back(key_of(spec.name));
  }
  const Layout layout = lay_out(params, ranks);
  const Tensor shards(exec, DType::f32, {layout.shards}, "fsdp2::shards");
  for (std::size_t i = 0; i < params.size(); ++i) {
    Param& param = params[i];
    const TensorSpec spec = param.spec(config_);
    const Box box = local_box(spec, model_->mesh().spec(), model_->mesh().coordinate());
    param.shard = DTensor::from_local(shards.slice(param.shard_start, box.extent), spec, model_->mesh());
    if (i < params_.size())
      kernels::copy(exec, param.shard.local(), params_[i].shard.local());
    else
      fill(param, specs[i - params_.size()], exec);
  }
  model_->reserve_keys(keys);
  params_ = std::move(params);
  layout_ = layout;
  shards_ = shards;
  make_tables(exec);

  if (std::get<bool>(config_.reshard_after_forward)) model_->gather_slots.reserve(layout_.gather_slot);
  model_->gather_packs.reserve(layout_.packed * ranks);
  model_->reduce_slots.reserve(layout_.reduce_slot);
  model_->reduce_packs.reserve(layout_.packed_trainable.size() * ranks);
}

void ParamGroup::set_training(bool is_training) {
  if (is_training == is_training_) return;
  is_training_ = is_training;
  is_kept_ = false;
  drop_unused();
  if (gather_ == Gather::none && !keeps_unsharded()) own_storage_ = {};
}

MemoryStats ParamGroup::memory_stats() const {
  MemoryStats stats;
  for (const Param& param : params_) {
    ++stats.parameters;
    stats.sharded_parameters += param.is_sharded ? 1 : 0;
    stats.full_bytes += param.count * size_of(DType::f32);
    stats.local_bytes += param.shard.local().bytes();
  }
  stats.padding_bytes = shards_.bytes() - stats.local_bytes;
  stats.gradient_bytes = gradients_.bytes();
  stats.unsharded_bytes = storage_.bytes() + gather_pack_.bytes();
  stats.reduction_bytes = reduce_slot_.bytes();
  return stats;
}

std::string ParamGroup::summary() const {
  const MemoryStats stats = memory_stats();
  return fmt::format("module \"{}\": {} parameters, {} sharded over {} ranks, {:.2f} MB -> {:.2f} MB, {:.1f} % less",
                     name_, stats.parameters, stats.sharded_parameters, model_->ranks(), megabytes(stats.full_bytes),
                     megabytes(stats.local_bytes), stats.reduction_percent());
}

// Gathers.

bool ParamGroup::keeps_unsharded() const {
  return is_training_ ? !std::get<bool>(config_.reshard_after_forward) : config_.keep_unsharded_in_eval;
}

void ParamGroup::issue_gather(const ExecutionSpace& exec, TraceEvent::Kind kind) {
  if (std::none_of(params_.begin(), params_.end(), [](const Param& param) { return param.is_sharded; })) return;
  is_used_ = true;
  const std::int64_t ranks = model_->ranks();
  storage_is_own_ = keeps_unsharded();
  if (storage_is_own_) {
    if (own_storage_.numel() != layout_.gather_slot)
      own_storage_ = Tensor::uninitialized(DType::f32, {layout_.gather_slot}, "fsdp2::unsharded");
    storage_ = own_storage_;
    model_->unsharded.add(storage_.bytes());
  } else {
    storage_ = model_->gather_slots.acquire(layout_.gather_slot);
  }
  try {
    gather_pack_ = model_->gather_packs.acquire(layout_.packed * ranks);
    std::vector<Transfer> transfers;
    if (layout_.packed > 0)
      transfers.push_back({shards_.slice(0, {layout_.packed}), gather_pack_.slice(0, {layout_.packed * ranks})});
    for (const Param& param : params_)
      if (param.is_direct && param.shard_count > 0)
        transfers.push_back({shards_.slice(param.shard_start, {param.shard_count}),
                             storage_.slice(param.slot_start, {param.shard_count * ranks})});
    if (!transfers.empty()) gather_work_ = model_->communicator().all_gather(exec, transfers);
  } catch (...) {
    release_storage();
    throw;
  }
  gather_ = Gather::in_flight;
  model_->trace(kind, name_);
}

void ParamGroup::complete_gather(const ExecutionSpace& exec) {
  if (gather_ != Gather::in_flight) return;
  model_->remove_ahead(this);
  try {
    gather_work_.wait();
  } catch (...) {
    release_storage();
    throw;
  }
  kernels::copy_segments(exec, storage_, gather_pack_, scatter_table_);
  model_->gather_packs.release(gather_pack_);
  gather_ = Gather::gathered;
  model_->trace(TraceEvent::Kind::gather_completed, name_);
}

void ParamGroup::gather(const ExecutionSpace& exec) {
  if (gather_ == Gather::none) issue_gather(exec, TraceEvent::Kind::gather_issued);
  complete_gather(exec);
}

void ParamGroup::gather_ahead(const ExecutionSpace& exec, TraceEvent::Kind kind) {
  if (gather_ != Gather::none) return;
  issue_gather(exec, kind);
  if (gather_ == Gather::in_flight) model_->add_ahead(this);
}

void ParamGroup::prefetch(const ExecutionSpace& exec) {
  if (model_->may_prefetch()) gather_ahead(exec, TraceEvent::Kind::prefetch_issued);
}

void ParamGroup::release_storage() noexcept {
  if (storage_is_own_) {
    model_->unsharded.add(-storage_.bytes());
    storage_ = {};
  } else {
    model_->gather_slots.release(storage_);
  }
  model_->gather_packs.release(gather_pack_);
  gather_ = Gather::none;
}

void ParamGroup::drop_unused() noexcept {
  // A gather in flight writes into its storage: it is used by the next scope, or drained.
  if (gather_ != Gather::gathered || !leases_.empty() || is_kept_ || is_cached_) return;
  release_storage();
  model_->trace(TraceEvent::Kind::resharded, name_);
}

void ParamGroup::drain(const ExecutionSpace& exec) {
  if (leases_.empty() && !is_cached_) complete_gather(exec);
  drop_unused();
}

Tensor ParamGroup::full(const Param& param) const {
  if (!param.is_sharded) return param.shard.local();
  if (gather_ != Gather::gathered)
    throw Error(
        fmt::format("parameter \"{}\" of module \"{}\" is not gathered: full parameters exist in a scope, between the "
                    "hooks, or after all_gather",
                    param.name, name_));
  return storage_.slice(param.slot_start, param.shape);
}

void ParamGroup::cache(const ExecutionSpace& exec, bool is_async) {
  if (is_async)
    gather_ahead(exec, TraceEvent::Kind::gather_issued);
  else
    gather(exec);
  is_cached_ = true;
}

void ParamGroup::clear_cache() {
  is_cached_ = false;
  drop_unused();
}

// Phases.

std::uint64_t ParamGroup::new_lease() {
  is_used_ = true;
  leases_.push_back(next_number());
  return leases_.back();
}

bool ParamGroup::is_live(std::uint64_t lease) const {
  return std::find(leases_.begin(), leases_.end(), lease) != leases_.end();
}

std::uint64_t ParamGroup::begin_forward(const ExecutionSpace& exec) {
  model_->poke();
  gather(exec);
  if (backward_ != Backward::open) {  // otherwise it is a recomputation
    ++forward_count_;
    is_kept_ = keeps_unsharded();
    if (is_training_) model_->record(this);
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
  if (layout_.replicated.size() > 0 && bucket_start_ < 0) model_->prepare_bucket(exec);
  ParamGroup* const previous = model_->take_from_order(this);
  prefetch_after_ = nullptr;
  if (gathers) {
    gather(exec);
    const BackwardPrefetch policy = model_->config().backward_prefetch;
    if (policy == BackwardPrefetch::pre && previous != nullptr) previous->prefetch(exec);
    if (policy == BackwardPrefetch::post) prefetch_after_ = previous;
  }
  is_kept_ = false;
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

void ParamGroup::end(std::uint64_t lease) noexcept {
  if (std::erase(leases_, lease) == 0) return;  // ended by reset
  if (lease == backward_lease_ && backward_ == Backward::open) backward_ = Backward::abandoned;
  drop_unused();
}

void ParamGroup::end_backward(Backward next) noexcept {
  backward_ = next;
  end(backward_lease_);
}

void ParamGroup::borrow_reduce_slot(const ExecutionSpace& exec) {
  if (has_reduce_slot_) return;
  reduce_slot_ = model_->reduce_slots.acquire(layout_.reduce_slot);
  has_reduce_slot_ = true;
  kernels::zero_segments(exec, reduce_slot_, zero_table_);
  for (Param& param : params_) param.is_written = false;
}

LentTensor ParamGroup::lend(std::size_t index, const ExecutionSpace& exec) {
  Param& param = params_[index];
  if (!param.requires_grad)
    throw Error(fmt::format("parameter \"{}\" of module \"{}\" does not require a gradient", param.name, name_));
  if (!param.is_sharded) return {bucket_part().slice(param.lent_start, param.shape), 1.0f};
  borrow_reduce_slot(exec);
  const float beta = param.is_written ? 1.0f : 0.0f;
  param.is_written = true;
  return {reduce_slot_.slice(param.lent_start, param.shape), beta};
}

void ParamGroup::zero_unwritten(const ExecutionSpace& exec) {
  borrow_reduce_slot(exec);
  for (Param& param : params_) {
    if (!param.requires_grad || !param.is_sharded || param.is_written) continue;
    kernels::zero(exec, reduce_slot_.slice(param.lent_start, {param.count}).buffer());
    param.is_written = true;
  }
}

void ParamGroup::release_reduce_slot() noexcept {
  model_->reduce_slots.release(reduce_slot_);
  has_reduce_slot_ = false;
}

void ParamGroup::hold(const ExecutionSpace& exec) {
  zero_unwritten(exec);
  end_backward(Backward::held);
}

void ParamGroup::reduce(const ExecutionSpace& exec) {
  make_gradients(exec);
  wants_bucket_ = wants_bucket_ || layout_.replicated.size() > 0;
  if (layout_.trainable_sharded > 0) {
    zero_unwritten(exec);
    end_backward(Backward::idle);
    start_reduction(exec);
  } else {
    end_backward(Backward::idle);
    mark_gradients(true);  // those without elements
  }
  if (layout_.replicated.size() == 0) mark_gradients(false);
  if (prefetch_after_ != nullptr) prefetch_after_->prefetch(exec);
  prefetch_after_ = nullptr;
}

void ParamGroup::start_reduction(const ExecutionSpace& exec) {
  const std::int64_t ranks = model_->ranks();
  const std::int64_t packed_count = layout_.packed_trainable.size();
  model_->complete_reduction(exec);
  PendingReduction next;
  next.group = this;
  next.slot = reduce_slot_;
  next.packed = model_->reduce_packs.acquire(packed_count * ranks);
  reduce_slot_ = {};
  has_reduce_slot_ = false;

  kernels::copy_segments(exec, next.packed, next.slot, pack_table_);
  const Tensor received = next.slot.slice(layout_.reduce_slot - layout_.trainable_sharded, {layout_.trainable_sharded});
  std::vector<Transfer> transfers;
  if (packed_count > 0)
    transfers.push_back({next.packed.slice(0, {packed_count * ranks}), received.slice(0, {packed_count})});
  for (const Param& param : params_)
    if (param.is_direct && param.requires_grad && param.shard_count > 0)
      transfers.push_back({next.slot.slice(param.lent_start, {param.shard_count * ranks}),
                           received.slice(param.shard_start - layout_.trainable.begin, {param.shard_count})});
  model_->start_reduction(std::move(next), transfers, exec);
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
  return nullptr;
}

// Gradients.

Tensor ParamGroup::trainable_shards() const {
  return range_of(shards_, layout_.trainable);
}

DTensor ParamGroup::trainable_part(const Tensor& buffer, const Param& param) const {
  return DTensor::from_local(buffer.slice(param.shard_start - layout_.trainable.begin, param.shard.local().shape()),
                             param.shard.spec(), param.shard.mesh());
}

void ParamGroup::make_gradients(const ExecutionSpace& exec) {
  if (gradients_.numel() == layout_.trainable.size()) return;
  is_used_ = true;
  gradients_ = Tensor(exec, DType::f32, {layout_.trainable.size()}, "fsdp2::gradients");
}

Tensor ParamGroup::sharded_gradients() const {
  return gradients_.slice(0, {layout_.trainable_sharded});
}

Tensor ParamGroup::replicated_gradients() const {
  return gradients_.slice(layout_.replicated.begin - layout_.trainable.begin, {layout_.replicated.size()});
}

Tensor ParamGroup::bucket_part() const {
  return model_->bucket().slice(bucket_start_, {layout_.replicated.size()});
}

std::int64_t ParamGroup::place_in_bucket(std::int64_t used) {
  if (bucket_start_ >= 0 || layout_.replicated.size() == 0) return used;
  bucket_start_ = used;
  return align_up(used + layout_.replicated.size(), buffer_alignment);
}

void ParamGroup::mark_gradients(bool is_sharded) {
  for (Param& param : params_)
    if (param.requires_grad && param.is_sharded == is_sharded) param.has_gradient = true;
}

void ParamGroup::take_reduction(const Tensor& slot, const ExecutionSpace& exec) {
  const Tensor received = slot.slice(layout_.reduce_slot - layout_.trainable_sharded, {layout_.trainable_sharded});
  kernels::accumulate(exec, sharded_gradients(), received, model_->divisor(), sharded_gradients_valid_);
  sharded_gradients_valid_ = true;
  mark_gradients(true);
}

void ParamGroup::take_bucket(const ExecutionSpace& exec) {
  if (!wants_bucket_) return;
  kernels::accumulate(exec, replicated_gradients(), bucket_part(), model_->divisor(), replicated_gradients_valid_);
  replicated_gradients_valid_ = true;
  wants_bucket_ = false;
  mark_gradients(false);
}

const Tensor& ParamGroup::trainable_gradients(const ExecutionSpace& exec) {
  make_gradients(exec);
  if (!sharded_gradients_valid_) kernels::zero(exec, sharded_gradients().buffer());
  if (!replicated_gradients_valid_) kernels::zero(exec, replicated_gradients().buffer());
  sharded_gradients_valid_ = replicated_gradients_valid_ = true;
  return gradients_;
}

bool ParamGroup::has_gradient() const {
  return std::any_of(params_.begin(), params_.end(), [](const Param& param) { return param.has_gradient; });
}

std::optional<DTensor> ParamGroup::gradient(const Param& param) const {
  if (!param.has_gradient) return std::nullopt;
  return trainable_part(gradients_, param);
}

void ParamGroup::check_gradient(const Param& param, const Tensor& gradient, const Shape& expected,
                                const char* what) const {
  if (!param.requires_grad)
    throw Error(fmt::format("parameter \"{}\" of module \"{}\" does not require a gradient", param.name, name_));
  if (gradient.dtype() != DType::f32 || gradient.shape() != expected)
    throw ShapeError(fmt::format("the {} gradient of parameter \"{}\" of module \"{}\" is {} {}: expected f32 {}", what,
                                 param.name, name_, to_string(gradient.dtype()), to_string(gradient.shape()),
                                 to_string(expected)));
}

Tensor ParamGroup::reduce_scatter_gradient(std::size_t index, const Tensor& full_gradient, const ExecutionSpace& exec) {
  const Param& param = params_[index];
  check_gradient(param, full_gradient, param.shape, "full");
  Communicator& communicator = model_->communicator();
  const std::int64_t sent = param.is_sharded ? param.shard_count * model_->ranks() : param.count;
  const Tensor padded(exec, DType::f32, {sent}, "fsdp2::full_gradient");
  kernels::copy(exec, padded.slice(0, {param.count}), full_gradient);
  Tensor sum = padded;
  if (param.is_sharded) {
    sum = Tensor::uninitialized(DType::f32, {param.shard_count}, "fsdp2::reduced_gradient");
    const Transfer transfer{padded, sum};
    if (param.shard_count > 0) communicator.reduce_scatter(exec, {&transfer, 1}, ReduceOp::sum).wait();
  } else if (param.count > 0) {
    communicator.all_reduce(exec, sum, ReduceOp::sum).wait();
  }
  kernels::accumulate(exec, sum, sum, model_->divisor(), false);
  return sum.slice(0, param.shard.local().shape());
}

void ParamGroup::set_gradient(std::size_t index, const Tensor& gradient, const ExecutionSpace& exec) {
  Param& param = params_[index];
  check_gradient(param, gradient, param.shard.local().shape(), "local");
  kernels::copy(exec, trainable_part(trainable_gradients(exec), param).local(), gradient);
  param.has_gradient = true;
}

void ParamGroup::zero_gradient(std::size_t index, const ExecutionSpace& exec) {
  Param& param = params_[index];
  if (!param.has_gradient) return;
  kernels::zero(exec, trainable_part(gradients_, param).local().buffer());
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
  if (wants_bucket_) kernels::zero(exec, bucket_part().buffer());
  wants_bucket_ = false;
}

void ParamGroup::forget_gradients() noexcept {
  for (Param& param : params_) param.has_gradient = false;
  sharded_gradients_valid_ = replicated_gradients_valid_ = false;
}

void ParamGroup::reset(const ExecutionSpace& exec) {
  leases_.clear();
  backward_ = Backward::idle;
  prefetch_after_ = nullptr;
  release_reduce_slot();
  is_kept_ = is_cached_ = false;
  wants_bucket_ = false;
  forget_gradients();
  drain(exec);
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
  is_kept_ = is_cached_ = false;
  drain(exec);
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
