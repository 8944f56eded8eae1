// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/checkpoint/diff.hpp"

#include <fmt/format.h>

#include <limits>
#include <memory>

#include "command.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::tool {

namespace {

struct Options {
  std::string a;
  std::string b;
  DiffOptions diff;
  bool json = false;
};

const char* kind_text(DifferenceKind kind) {
  switch (kind) {
    case DifferenceKind::only_in_a:
      return "only_in_a";
    case DifferenceKind::only_in_b:
      return "only_in_b";
    case DifferenceKind::dtype:
      return "dtype";
    case DifferenceKind::shape:
      return "shape";
    case DifferenceKind::values:
      return "values";
  }
  return "";
}

const TensorSpec& spec_of(const CheckpointIndex& index, const std::string& name) {
  return index.tensors[index.find(name)].spec;
}

std::string describe(const Options& options, const DiffReport& report, const TensorDifference& difference) {
  switch (difference.kind) {
    case DifferenceKind::only_in_a:
      return fmt::format("only in {}", options.a);
    case DifferenceKind::only_in_b:
      return fmt::format("only in {}", options.b);
    case DifferenceKind::dtype:
      return fmt::format("dtype {} and {}", to_string(spec_of(report.a, difference.name).dtype),
                         to_string(spec_of(report.b, difference.name).dtype));
    case DifferenceKind::shape:
      return fmt::format("shape {} and {}", to_string(spec_of(report.a, difference.name).shape),
                         to_string(spec_of(report.b, difference.name).shape));
    case DifferenceKind::values:
      break;
  }
  std::string text = fmt::format("{} of {} elements differ, the first at {}", difference.count,
                                 numel(spec_of(report.a, difference.name).shape), to_string(difference.first));
  if (difference.not_finite < difference.count)
    text += fmt::format("; max abs {:g}, max rel {:g}", difference.max_absolute, difference.max_relative);
  if (difference.not_finite > 0) text += fmt::format("; {} where one is NaN or infinite", difference.not_finite);
  return text;
}

void print_text(const Options& options, const DiffReport& report) {
  for (const TensorDifference& difference : report.differences)
    fmt::print("{}: {}\n", printable(difference.name), printable(describe(options, report, difference)));
  const std::string close = report.close == 0 ? "" : fmt::format(", {} within the tolerance", report.close);
  fmt::print("{} and {} {}: {} tensors equal in all bits{}, {} differences; {} read\n", printable(options.a),
             printable(options.b), report.is_equal() ? "are equal" : "DIFFER", report.equal, close,
             report.differences.size(), format_bytes(report.bytes));
}

void print_document(const Options& options, const DiffReport& report) {
  using Json = nlohmann::ordered_json;
  Json differences = Json::array();
  for (const TensorDifference& difference : report.differences) {
    Json entry{{"name", difference.name}, {"kind", kind_text(difference.kind)}};
    if (difference.kind == DifferenceKind::dtype) {
      entry["a"] = to_string(spec_of(report.a, difference.name).dtype);
      entry["b"] = to_string(spec_of(report.b, difference.name).dtype);
    } else if (difference.kind == DifferenceKind::shape) {
      entry["a"] = spec_of(report.a, difference.name).shape;
      entry["b"] = spec_of(report.b, difference.name).shape;
    } else if (difference.kind == DifferenceKind::values) {
      entry["elements"] = difference.count;
      entry["not_finite"] = difference.not_finite;
      entry["max_absolute"] = difference.max_absolute;
      entry["max_relative"] = difference.max_relative;
      entry["first"] = difference.first;
    }
    differences.push_back(std::move(entry));
  }
  print_json({{"a", options.a},
              {"b", options.b},
              {"equal", report.is_equal()},
              {"tensors_equal", report.equal},
              {"tensors_close", report.close},
              {"bytes_read", report.bytes},
              {"differences", std::move(differences)}});
}

void run(const Options& options) {
  (void)open_checkpoint(options.a);
  (void)open_checkpoint(options.b);
  DiffReport report;
  try {
    report = diff(options.a, options.b, options.diff);
  } catch (const ConfigError& error) {
    throw Exit{status_usage, error.what()};
  } catch (const Error& error) {
    throw Exit{status_failed, error.what()};
  }
  if (options.json)
    print_document(options, report);
  else
    print_text(options, report);
  if (!report.is_equal()) throw Exit{status_differs, ""};
}

}  // namespace

void add_diff(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "diff",
      "Compares the tensors of two checkpoints of any ranks and meshes: by digest, and by value where those differ.");
  const auto options = std::make_shared<Options>();
  const CLI::Range not_negative(0.0, std::numeric_limits<double>::max());
  command->add_option("A", options->a, "checkpoint directory")->required();
  command->add_option("B", options->b, "checkpoint directory")->required();
  command->add_option("--rtol", options->diff.relative_tolerance, "finite elements may differ by atol + rtol*|b|")
      ->check(not_negative)
      ->capture_default_str();
  command->add_option("--atol", options->diff.absolute_tolerance, "see --rtol; without both, all bits must be equal")
      ->check(not_negative)
      ->capture_default_str();
  add_memory(*command, options->diff.memory_bytes);
  command->add_flag("--json", options->json,
                    "print one JSON document; an infinite max_relative is null, as JSON has no such number");
  command->callback([options] { run(*options); });
}

}  // namespace fsdp2::tool
