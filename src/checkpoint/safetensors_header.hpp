// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// The safetensors format, https://github.com/huggingface/safetensors: 8 bytes with the length of a header, the header
// in JSON, and the bytes of the tensors, row-major.

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>

#include "checkpoint/file.hpp"
#include "fsdp2/checkpoint/layout.hpp"

namespace fsdp2::checkpoint {

/// The header of a file that keeps every rule: its tensors follow one another without holes to the end of the file.
struct SafetensorsHeader {
  struct Tensor {
    DType dtype;
    Shape shape;
    std::int64_t begin;  ///< in the file
    std::int64_t end;
  };
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;
};

/// Throws CorruptError, which names file and tensor, where the file breaks a rule or has a dtype that checkpoints lack.
SafetensorsHeader read_safetensors_header(const File& file);

/// The weight_map of a model.safetensors.index.json: in which file of its directory each tensor is. Throws
/// CorruptError, which names the tensor, for anything else, names of files in other directories among it.
std::map<std::string, std::string> read_weight_map(const std::filesystem::path& index);

/// Length and header of a file with these tensors, in this order, padded so that the data are aligned where tensors of
/// wider elements come first. Throws ConfigError for what the format has no dtype or name for.
std::string encode_safetensors_header(std::span<const TensorEntry* const> tensors,
                                      const std::map<std::string, std::string>& metadata);

}  // namespace fsdp2::checkpoint
