// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/sharded_param.hpp"

#include "param_group.hpp"

namespace fsdp2 {

ShardedParam ShardedParam::from_tensor(std::string name, const Tensor& full, const Config& config,
                                       const ExecutionSpace& exec) {
  auto group = std::make_shared<detail::ParamGroup>(std::make_shared<detail::ModelState>(config), "", config);
  group->add({{std::move(name), full.shape(), full}}, exec);
  return {std::move(group), 0};
}

const std::string& ShardedParam::name() const {
  return group_->param(index_).name;
}

std::string ShardedParam::key() const {
  return group_->key(group_->param(index_));
}

std::uint64_t ShardedParam::id() const {
  return group_->param(index_).id;
}

const Shape& ShardedParam::full_shape() const {
  return group_->param(index_).full_shape();
}

const Shape& ShardedParam::local_shape() const {
  return local_shard().shape();
}

DType ShardedParam::dtype() const {
  return group_->param(index_).dtype;
}

bool ShardedParam::is_sharded() const {
  return group_->param(index_).is_sharded;
}

bool ShardedParam::requires_grad() const {
  return group_->param(index_).requires_grad;
}

const Tensor& ShardedParam::local_shard() const {
  return dtensor().local();
}

const DTensor& ShardedParam::dtensor() const {
  return group_->param(index_).shard;
}

void ShardedParam::set_requires_grad(bool requires_grad, const ExecutionSpace& exec) {
  group_->set_requires_grad(index_, requires_grad, exec);
}

void ShardedParam::update_local_shard(const Tensor& shard, const ExecutionSpace& exec) {
  group_->update_local_shard(index_, shard, exec);
}

Tensor ShardedParam::all_gather(const ExecutionSpace& exec) {
  group_->cache(exec, false);
  return full();
}

void ShardedParam::unshard(const ExecutionSpace& exec) {
  group_->cache(exec, true);
}

void ShardedParam::clear_cache(const ExecutionSpace& exec) {
  group_->clear_cache(exec);
}

bool ShardedParam::is_gathered() const {
  return group_->is_gathered(group_->param(index_));
}

Tensor ShardedParam::full() const {
  return group_->full(group_->param(index_));
}

Tensor ShardedParam::reduce_scatter_gradient(const Tensor& full_gradient, const ExecutionSpace& exec) {
  return group_->reduce_scatter_gradient(index_, full_gradient, exec);
}

void ShardedParam::set_gradient(const Tensor& gradient, const ExecutionSpace& exec) {
  group_->set_gradient(index_, gradient, exec);
}

std::optional<DTensor> ShardedParam::gradient() const {
  return group_->gradient(group_->param(index_));
}

void ShardedParam::zero_grad(const ExecutionSpace& exec) {
  group_->zero_gradient(index_, exec);
}

}  // namespace fsdp2
