// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "page.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <string_view>
#include <vector>

#include "command.hpp"
#include "sums.hpp"

namespace fsdp2::tool {

namespace {

// What a person looks at, and a browser draws without delay.
constexpr std::int64_t most_ranks = 256;
constexpr std::size_t most_tensors = 2000;
constexpr std::size_t most_boxes = 64;

constexpr std::string_view head = R"(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
  :root { color-scheme: light dark; --line: #8884; --quiet: #888; --bar: #4a7fb5; }
  * { box-sizing: border-box; }
  body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 76rem; }
  h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
  h2 { font-size: 1.15rem; margin-top: 2rem; }
  code, .number, td.digest { font-family: ui-monospace, monospace; font-size: 0.9em; }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1rem; margin: 0; }
  dt { color: var(--quiet); }
  dd { margin: 0; overflow-wrap: anywhere; }
  svg { max-width: 100%; height: auto; display: block; }
  svg text { font: 11px system-ui, sans-serif; fill: #000; text-anchor: middle; dominant-baseline: central; }
  table { border-collapse: collapse; width: 100%; }
  th, td { text-align: left; padding: 0.35rem 0.6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
  th { color: var(--quiet); font-weight: normal; }
  td { overflow-wrap: anywhere; }
  .bar { display: grid; grid-template-columns: 4rem 1fr 7rem; align-items: center; gap: 0.6rem; }
  .bar i { display: block; height: 0.8rem; background: var(--bar); border-radius: 2px; min-width: 1px; }
  .number { text-align: right; }
  .meshes { display: flex; flex-wrap: wrap; gap: 2rem; }
  .note { color: var(--quiet); }
  input { font: inherit; padding: 0.3rem 0.6rem; width: min(100%, 24rem); margin-bottom: 0.6rem; }
  @media (max-width: 44rem) {
    thead { display: none; }
    tr { display: block; padding: 0.6rem 0; border-bottom: 1px solid var(--line); }
    td { display: block; border: 0; padding: 0.1rem 0; }
    td[data-label]::before { content: attr(data-label) ": "; color: var(--quiet); }
    .bar { grid-template-columns: 2.5rem 1fr 6rem; }
  }
</style>
)";

constexpr std::string_view tail = R"(<script>
  document.getElementById("filter").addEventListener("input", event => {
    const wanted = event.target.value.toLowerCase();
    for (const row of document.querySelectorAll("#tensors tbody tr"))
      row.hidden = !row.dataset.name.toLowerCase().includes(wanted);
  });
</script>
</body>
</html>
)";

/// Text of the checkpoint in HTML, in attributes too.
std::string escape(std::string_view text) {
  std::string result;
  for (const char c : printable(text)) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      case '\'':
        result += "&#x27;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

/// Neighbours differ, and black text can be read on it.
std::string color_of(std::int64_t number) {
  constexpr double golden_angle = 137.508;
  const double hue = static_cast<double>(number) * golden_angle;
  return fmt::format("hsl({:.0f} 60% 72%)", hue - 360 * static_cast<double>(static_cast<std::int64_t>(hue / 360)));
}

struct Rectangle {
  double x = 0;
  double y = 0;
  double width = 0;
  double height = 0;
};

void draw(std::string& svg, const Rectangle& where, const std::string& color, const std::string& label,
          const std::string& title) {
  svg += fmt::format(R"(<g><title>{}</title><rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="{}" )"
                     R"(stroke="#fff" stroke-width="0.6"/>)",
                     title, where.x, where.y, where.width, where.height, color);
  constexpr double letter = 7;
  if (where.width > letter * static_cast<double>(label.size()) && where.height > 2 * letter)
    svg += fmt::format(R"(<text x="{:.1f}" y="{:.1f}">{}</text>)", where.x + where.width / 2,
                       where.y + where.height / 2, label);
  svg += "</g>";
}

std::string in_svg(double width, double height, const std::string& content) {
  return fmt::format(R"(<svg viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" height="{1:.0f}" role="img">{2}</svg>)",
                     width, height, content);
}

/// Ranks in their places: the last axis to the right, all others downwards.
std::string draw_mesh(const MeshSpec& mesh) {
  constexpr double side = 34;
  const std::int64_t columns = mesh.axes().back().size;
  if (mesh.size() > most_ranks) return fmt::format(R"(<p class="note">{} ranks are not drawn.</p>)", mesh.size());
  std::string content;
  Shape coordinate(mesh.dimensions(), 0);
  for (std::int64_t place = 0; place < mesh.size(); ++place) {
    std::int64_t rest = place;
    std::string title;
    for (std::size_t a = mesh.dimensions(); a-- > 0; rest /= mesh.axes()[a].size)
      coordinate[a] = rest % mesh.axes()[a].size;
    for (std::size_t a = 0; a < mesh.dimensions(); ++a)
      title += fmt::format("{}{} {}", a == 0 ? "" : ", ", escape(mesh.axes()[a].name), coordinate[a]);
    const std::int64_t rank = mesh.rank_at(coordinate);
    const std::int64_t row = place / columns;
    draw(content, {side * static_cast<double>(place % columns), side * static_cast<double>(row), side, side},
         color_of(rank), std::to_string(rank), fmt::format("rank {}: {}", rank, title));
  }
  const std::int64_t rows = mesh.size() / columns;
  return in_svg(side * static_cast<double>(columns), side * static_cast<double>(rows), content);
}

/// The two dimensions that are drawn, down and across: those that are cut, then the first ones.
std::array<std::size_t, 2> drawn_dimensions(const TensorSpec& spec) {
  std::vector<std::size_t> order;
  const auto add = [&](std::size_t d) {
    if (std::find(order.begin(), order.end(), d) == order.end()) order.push_back(d);
  };
  for (const Placement& placement : spec.placements) {
    if (const auto* shard = std::get_if<Shard>(&placement)) add(static_cast<std::size_t>(shard->dim));
    if (const auto* ragged = std::get_if<Ragged>(&placement)) add(static_cast<std::size_t>(ragged->dim));
  }
  for (std::size_t d = 0; d < spec.shape.size() && order.size() < 2; ++d) add(d);
  if (order.size() == 1) order.insert(order.begin(), spec.shape.size());  // none: a vector lies down
  order.resize(2, spec.shape.size());
  if (spec.shape.size() > 1 && order[0] > order[1]) std::swap(order[0], order[1]);
  return {order[0], order[1]};
}

/// Who holds which box.
std::string draw_tensor(const TensorEntry& tensor, const MeshSpec& mesh) {
  const TensorSpec& spec = tensor.spec;
  if (numel(spec.shape) == 0) return "no elements";
  if (mesh.size() > most_ranks) return "not drawn";
  std::map<std::pair<Shape, Shape>, std::vector<std::int64_t>> ranks_of;  // by offset and extent
  for_each_holder(spec, mesh, Box::whole(spec.shape), [&](const Shape& coordinate) {
    Box box = local_box(spec, mesh, coordinate);
    ranks_of[{std::move(box.offset), std::move(box.extent)}].push_back(mesh.rank_at(coordinate));
  });
  if (ranks_of.size() > most_boxes) return fmt::format("{} boxes", ranks_of.size());
  const auto [down, across] = drawn_dimensions(spec);
  const auto extent_of = [&](const Shape& shape, std::size_t d) { return d < shape.size() ? shape[d] : 1; };
  const auto rows = static_cast<double>(extent_of(spec.shape, down));
  const auto columns = static_cast<double>(extent_of(spec.shape, across));
  constexpr double widest = 220;
  constexpr double highest = 120;
  constexpr double least = 60;
  const double scale = std::min({widest / columns, highest / rows, least});
  const double height = std::max(rows * scale, least);
  const double width = std::max(columns * scale, least);
  std::string content;
  for (auto& [box, ranks] : ranks_of) {
    const Shape& offset = box.first;
    const Shape& extent = box.second;
    std::sort(ranks.begin(), ranks.end());
    std::string label;
    for (const std::int64_t rank : ranks) label += (label.empty() ? "" : ",") + std::to_string(rank);
    const auto at = [&](std::size_t d) { return static_cast<double>(d < offset.size() ? offset[d] : 0); };
    draw(content,
         {at(across) / columns * width, at(down) / rows * height,
          static_cast<double>(extent_of(extent, across)) / columns * width,
          static_cast<double>(extent_of(extent, down)) / rows * height},
         color_of(ranks.front()), label, fmt::format("rank {}: {} at {}", label, to_string(extent), to_string(offset)));
  }
  return in_svg(width, height, content);
}

std::string_view role_note(AxisRole role) {
  return role == AxisRole::shard       ? " (FSDP shards over it)"
         : role == AxisRole::replicate ? " (FSDP replicates over it)"
                                       : "";
}

void add_meshes(std::string& page, const CheckpointIndex& index) {
  page += "<h2>Meshes</h2>\n<div class=\"meshes\">\n";
  for (const MeshEntry& mesh : index.meshes) {
    page += fmt::format("<section><p><b>{}</b>", escape(mesh.name));
    for (std::size_t a = 0; a < mesh.spec.dimensions(); ++a)
      page += fmt::format("<br>{} = {}{}", escape(mesh.spec.axes()[a].name), mesh.spec.axes()[a].size,
                          role_note(mesh.roles[a]));
    page += fmt::format("</p>\n{}</section>\n", draw_mesh(mesh.spec));
  }
  page += "</div>\n";
}

void add_ranks(std::string& page, const CheckpointIndex& index) {
  page += "<h2>Tensor bytes by rank</h2>\n";
  const std::vector<std::int64_t> bytes = bytes_of_ranks(index);
  const std::int64_t most = *std::max_element(bytes.begin(), bytes.end());
  const double mean = static_cast<double>(tensor_bytes(index)) / static_cast<double>(index.world_size);
  if (mean > 0)
    page += fmt::format("<p>The largest rank has {:.3f} of the mean.</p>\n", static_cast<double>(most) / mean);
  const std::size_t shown = std::min(bytes.size(), static_cast<std::size_t>(most_ranks));
  for (std::size_t rank = 0; rank < shown; ++rank)
    page += fmt::format(
        "<div class=\"bar\"><span class=\"number\">{}</span><i style=\"width: {:.1f}%\"></i><span "
        "class=\"number\">{}</span></div>\n",
        rank, most == 0 ? 0.0 : 100 * static_cast<double>(bytes[rank]) / static_cast<double>(most),
        format_bytes(bytes[rank]));
  if (shown < bytes.size())
    page += fmt::format("<p class=\"note\">The first {} of {} ranks.</p>\n", shown, bytes.size());
}

void add_tensors(std::string& page, const CheckpointIndex& index) {
  const std::size_t shown = std::min(index.tensors.size(), most_tensors);
  page += fmt::format(
      "<h2>Tensors</h2>\n<input id=\"filter\" type=\"search\" placeholder=\"filter by name\" aria-label=\"filter by "
      "name\">\n{}<table id=\"tensors\">\n<thead><tr><th>name</th><th>dtype, "
      "shape</th><th>placement</th><th>digest</th><th>who holds what</th></tr></thead>\n<tbody>\n",
      shown < index.tensors.size()
          ? fmt::format("<p class=\"note\">The first {} of {} tensors.</p>\n", shown, index.tensors.size())
          : "");
  for (std::size_t t = 0; t < shown; ++t) {
    const TensorEntry& tensor = index.tensors[t];
    const MeshEntry& mesh = index.meshes[tensor.mesh];
    page += fmt::format(
        "<tr data-name=\"{0}\"><td><b>{0}</b></td><td>{1} {2}<br>{3}</td><td data-label=\"placement\">{4}: "
        "{5}</td><td class=\"digest\" data-label=\"digest\">{6:016x}</td><td>{7}</td></tr>\n",
        escape(tensor.name), to_string(tensor.spec.dtype), to_string(tensor.spec.shape), format_bytes(tensor.bytes()),
        escape(mesh.name), escape(placements_text(tensor, mesh)), tensor.digest, draw_tensor(tensor, mesh.spec));
  }
  page += "</tbody>\n</table>\n";
}

}  // namespace

std::string html_page(const CheckpointIndex& index, const std::string& path) {
  std::string page(head);
  page += fmt::format("<title>{0}</title>\n</head>\n<body>\n<h1>{0}</h1>\n<dl>\n", escape(path));
  const auto fact = [&](std::string_view name, const std::string& value) {
    page += fmt::format("<dt>{}</dt><dd>{}</dd>\n", name, value);
  };
  fact("step", std::to_string(index.step));
  fact("ranks", std::to_string(index.world_size));
  fact("tensors", fmt::format("{}, {}", index.tensors.size(), format_bytes(tensor_bytes(index))));
  fact("files", fmt::format("{}, {}", index.files.size(), format_bytes(file_bytes(index))));
  fact("written by", escape(index.library));
  fact("save id", fmt::format("<code>{}</code>", escape(index.save_id)));
  if (!index.metadata.empty()) fact("metadata", fmt::format("<code>{}</code>", escape(index.metadata)));
  page += "</dl>\n";
  add_meshes(page, index);
  add_ranks(page, index);
  add_tensors(page, index);
  page += tail;
  return page;
}

void write_page(const std::string& path, const std::string& page) {
  const std::filesystem::path target = path;
  const std::filesystem::path partial =
      target.parent_path() / fmt::format(".{}.partial-{}", target.filename().string(), ::getpid());
  std::ofstream file(partial, std::ios::binary);
  file << page;
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(partial, target, error);
  if (file && !error) return;
  std::error_code ignored;
  std::filesystem::remove(partial, ignored);
  throw Exit{status_failed, fmt::format("writing {} failed{}", path, error ? ": " + error.message() : "")};
}

}  // namespace fsdp2::tool
