// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/selection.hpp"

#include <fmt/format.h>

#include <utility>

#include "castable.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::checkpoint {

namespace {

void cast_elements(DType to, std::byte* target, DType from, const std::byte* source, std::int64_t count) {
  for_castable(from, [&]<class From>(std::type_identity<From>) {
    for_castable(to, [&]<class To>(std::type_identity<To>) {
      const auto* const values = reinterpret_cast<const From*>(source);
      auto* const results = reinterpret_cast<To*>(target);
      for (std::int64_t i = 0; i < count; ++i) results[i] = static_cast<To>(static_cast<Compute<To, From>>(values[i]));
    });
  });
}

}  // namespace

Selection select_tensors(const CheckpointIndex& source, const std::function<bool(const TensorEntry&)>& select,
                         const std::function<DType(const TensorEntry&)>& dtype) {
  Selection selection;
  for (std::size_t t = 0; t < source.tensors.size(); ++t) {
    TensorEntry tensor = source.tensors[t];
    if (select && !select(tensor)) continue;
    const DType from = tensor.spec.dtype;
    if (dtype) tensor.spec.dtype = dtype(tensor);
    if (tensor.spec.dtype != from && (!is_castable(tensor.spec.dtype) || !is_castable(from)))
      throw ConfigError(fmt::format("tensor \"{}\" is {} and cannot be cast to {}: only f64, f32, f16 and bf16 can",
                                    tensor.name, to_string(from), to_string(tensor.spec.dtype)));
    tensor.digest = 0;
    selection.tensors.push_back(std::move(tensor));
    selection.sources.push_back(t);
  }
  if (selection.tensors.empty() && !source.tensors.empty()) throw ConfigError("no tensor is left to copy");
  return selection;
}

void read_elements(CheckpointReader& reader, std::span<const ElementRequest> requests) {
  struct Waiting {
    const ElementRequest* request;
    DType from;
    std::vector<std::byte> bytes;
  };
  std::vector<Waiting> casts;
  std::vector<BoxRequest> boxes;
  for (const ElementRequest& request : requests) {
    const DType from = reader.index().tensors[request.tensor].spec.dtype;
    std::byte* bytes = request.target;
    if (request.to != from) {
      casts.push_back(
          {&request, from, std::vector<std::byte>(static_cast<std::size_t>(request.count * size_of(from)))});
      bytes = casts.back().bytes.data();
    }
    for_each_box(request.box.extent, request.begin, request.begin + request.count, [&](Box box, std::int64_t first) {
      for (std::size_t d = 0; d < box.offset.size(); ++d) box.offset[d] += request.box.offset[d];
      boxes.push_back({request.tensor, std::move(box), bytes + (first - request.begin) * size_of(from)});
    });
  }
  reader.read(boxes);
  for (const auto& [request, from, bytes] : casts)
    cast_elements(request->to, request->target, from, bytes.data(), request->count);
}

}  // namespace fsdp2::checkpoint
