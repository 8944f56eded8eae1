// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/mesh.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "fsdp2/error.hpp"

namespace fsdp2 {
namespace {

// All meshes of up to 8 ranks and 4 axes, axes of size 1 included.
std::vector<std::vector<MeshAxis>> small_meshes() {
  std::vector<std::vector<MeshAxis>> meshes;
  std::vector<MeshAxis> axes;
  auto extend = [&](auto& self, std::int64_t size) -> void {
    if (!axes.empty()) meshes.push_back(axes);
    if (axes.size() == 4) return;
    for (std::int64_t next = 1; size * next <= 8; ++next) {
      axes.push_back({std::string(1, static_cast<char>('a' + axes.size())), next});
      self(self, size * next);
      axes.pop_back();
    }
  };
  extend(extend, 1);
  return meshes;
}

// Row-major order by counting: the last axis turns fastest.
void advance(Shape& coordinate, const std::vector<MeshAxis>& axes) {
  for (std::size_t i = axes.size(); i-- > 0;) {
    if (++coordinate[i] < axes[i].size) return;
    coordinate[i] = 0;
  }
}

template <class F>
std::string config_error(F&& f) {
  try {
    f();
  } catch (const ConfigError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no ConfigError";
  return "";
}

bool mentions(const std::string& message, const std::string& part) {
  if (message.find(part) != std::string::npos) return true;
  std::cerr << "\"" << message << "\" does not mention \"" << part << "\"\n";
  return false;
}

TEST(MeshSpec, CoordinatesAreRowMajorAndInvertible) {
  const auto meshes = small_meshes();
  EXPECT_GT(meshes.size(), 80u);
  for (const auto& axes : meshes) {
    const MeshSpec mesh(axes);
    Shape coordinate(axes.size(), 0);
    for (std::int64_t rank = 0; rank < mesh.size(); ++rank) {
      EXPECT_EQ(mesh.coordinate_of(rank), coordinate) << mesh.to_string();
      EXPECT_EQ(mesh.rank_at(coordinate), rank) << mesh.to_string();
      EXPECT_TRUE(mesh.contains(rank));
      advance(coordinate, axes);
    }
    EXPECT_EQ(coordinate, Shape(axes.size(), 0)) << "size() counts every coordinate of " << mesh.to_string();
    EXPECT_FALSE(mesh.contains(mesh.size()));
    EXPECT_FALSE(mesh.contains(-1));
  }
}

TEST(MeshSpec, RankListsPlaceRanks) {
  for (const auto& axes : small_meshes()) {
    const std::int64_t size = MeshSpec(axes).size();
    if (size == 1) continue;
    std::vector<std::int64_t> ranks(static_cast<std::size_t>(size));
    for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i] = 10 + 3 * ((static_cast<std::int64_t>(i) + 1) % size);
    const MeshSpec mesh(axes, ranks);
    EXPECT_EQ(mesh.ranks(), ranks);
    Shape coordinate(axes.size(), 0);
    for (const std::int64_t rank : ranks) {
      EXPECT_EQ(mesh.coordinate_of(rank), coordinate);
      EXPECT_EQ(mesh.rank_at(coordinate), rank);
      EXPECT_TRUE(mesh.contains(rank));
      advance(coordinate, axes);
    }
    EXPECT_FALSE(mesh.contains(0)) << "an index is not a rank";
    EXPECT_FALSE(mesh.contains(11));
    EXPECT_THROW(mesh.coordinate_of(0), ConfigError);
  }
}

TEST(MeshSpec, RowMajorRankListIsNoRankList) {
  const std::vector<MeshAxis> axes{{"dp", 2}, {"tp", 2}};
  EXPECT_EQ(MeshSpec(axes, {0, 1, 2, 3}), MeshSpec(axes));
  EXPECT_TRUE(MeshSpec(axes, {0, 1, 2, 3}).ranks().empty());
  EXPECT_FALSE(MeshSpec(axes, {0, 2, 1, 3}) == MeshSpec(axes));
  EXPECT_FALSE(MeshSpec(axes) == MeshSpec({{"tp", 2}, {"dp", 2}}));
}

TEST(MeshSpec, AxesByName) {
  const MeshSpec mesh({{"dp", 3}, {"tp", 2}});
  EXPECT_EQ(mesh.axis("dp"), 0u);
  EXPECT_EQ(mesh.axis("tp"), 1u);
  EXPECT_TRUE(mesh.has_axis("tp"));
  EXPECT_FALSE(mesh.has_axis("t"));
  EXPECT_FALSE(mesh.has_axis(""));
  EXPECT_EQ(mesh.size(), 6);
  EXPECT_EQ(mesh.dimensions(), 2u);
  EXPECT_EQ(mesh.to_string(), "dp=3,tp=2");
  const std::string message = config_error([&] { mesh.axis("pp"); });
  EXPECT_TRUE(mentions(message, "\"pp\""));
  EXPECT_TRUE(mentions(message, "dp=3,tp=2"));
}

TEST(MeshSpec, FlattenJoinsNeighbours) {
  for (const auto& axes : small_meshes())
    for (std::size_t first = 0; first < axes.size(); ++first)
      for (std::size_t last = first; last < axes.size(); ++last) {
        const MeshSpec mesh(axes);
        std::vector<std::string> names;
        for (std::size_t i = first; i <= last; ++i) names.push_back(axes[i].name);
        const MeshSpec flat = mesh.flatten(names, "flat");
        EXPECT_EQ(flat.size(), mesh.size());
        EXPECT_EQ(flat.dimensions(), axes.size() - (last - first));
        EXPECT_EQ(flat.axis("flat"), first);
        // The flat coordinate counts through the coordinates that it replaces, in row-major order.
        for (std::int64_t rank = 0; rank < mesh.size(); ++rank) {
          const Shape whole = mesh.coordinate_of(rank);
          Shape expected(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(first));
          Shape inner(last - first + 1, 0);
          std::int64_t count = 0;
          const std::vector<MeshAxis> joined(axes.begin() + static_cast<std::ptrdiff_t>(first),
                                             axes.begin() + static_cast<std::ptrdiff_t>(last) + 1);
          while (!std::equal(inner.begin(), inner.end(), whole.begin() + static_cast<std::ptrdiff_t>(first))) {
            advance(inner, joined);
            ++count;
          }
          expected.push_back(count);
          expected.insert(expected.end(), whole.begin() + static_cast<std::ptrdiff_t>(last) + 1, whole.end());
          EXPECT_EQ(flat.coordinate_of(rank), expected) << mesh.to_string() << " -> " << flat.to_string();
        }
      }
}

TEST(MeshSpec, FlattenKeepsRankList) {
  const MeshSpec mesh({{"a", 2}, {"b", 2}}, {7, 5, 6, 4});
  const MeshSpec flat = mesh.flatten({"a", "b"}, "ab");
  EXPECT_EQ(flat, MeshSpec({{"ab", 4}}, {7, 5, 6, 4}));
  EXPECT_EQ(flat.coordinate_of(6), Shape{2});
}

TEST(MeshSpec, FlattenRefusesWhatIsNotAdjacentAndInOrder) {
  const MeshSpec mesh({{"a", 2}, {"b", 1}, {"c", 2}});
  EXPECT_TRUE(mentions(config_error([&] { mesh.flatten({"a", "c"}, "ac"); }), "a=2,b=1,c=2"));
  EXPECT_THROW(mesh.flatten({"b", "a"}, "ba"), ConfigError);
  EXPECT_THROW(mesh.flatten({"a", "a"}, "aa"), ConfigError);
  EXPECT_THROW(mesh.flatten({"a", "x"}, "ax"), ConfigError);
  EXPECT_THROW(mesh.flatten({}, "none"), ConfigError);
  EXPECT_THROW(mesh.flatten({"a", "b"}, "c"), ConfigError) << "the name is taken";
  EXPECT_EQ(mesh.flatten({"a", "b"}, "a").to_string(), "a=2,c=2");
}

TEST(MeshSpec, RefusesBadAxes) {
  EXPECT_THROW(MeshSpec({}), ConfigError);
  EXPECT_THROW(MeshSpec({{"", 2}}), ConfigError);
  EXPECT_TRUE(mentions(config_error([] { MeshSpec({{"dp", 2}, {"tp", 1}, {"dp", 3}}); }), "\"dp\""));
  EXPECT_TRUE(mentions(config_error([] { MeshSpec({{"dp", 0}}); }), "size 0"));
  EXPECT_TRUE(mentions(config_error([] { MeshSpec({{"dp", -3}}); }), "size -3"));
  for (const char* name : {"d=p", "d,p", "m:dp"})
    EXPECT_TRUE(mentions(config_error([&] { MeshSpec({{name, 2}}); }), name));
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(MeshSpec({{"a", huge}, {"b", 1}}).size(), huge);
  EXPECT_TRUE(mentions(config_error([&] { MeshSpec({{"a", huge}, {"b", 2}}); }), "overflows"));
}

TEST(MeshSpec, RefusesBadRankLists) {
  const std::vector<MeshAxis> axes{{"dp", 2}, {"tp", 2}};
  const std::string message = config_error([&] { MeshSpec(axes, {0, 1, 2}); });
  EXPECT_TRUE(mentions(message, "needs 4"));
  EXPECT_TRUE(mentions(message, "has 3"));
  EXPECT_THROW(MeshSpec(axes, {0, 1, 2, 3, 4}), ConfigError);
  EXPECT_THROW(MeshSpec(axes, {0, 1, 2, 2}), ConfigError);
  EXPECT_THROW(MeshSpec(axes, {0, 1, 2, -1}), ConfigError);
}

TEST(MeshSpec, RefusesPlacesOutsideTheMesh) {
  const MeshSpec mesh({{"dp", 2}, {"tp", 3}});
  for (const std::int64_t rank : {std::int64_t{-1}, std::int64_t{6}, std::numeric_limits<std::int64_t>::max()}) {
    const std::string message = config_error([&] { mesh.coordinate_of(rank); });
    EXPECT_TRUE(mentions(message, std::to_string(rank)));
    EXPECT_TRUE(mentions(message, "dp=2,tp=3"));
  }
  EXPECT_THROW(mesh.rank_at({2, 0}), ConfigError);
  EXPECT_THROW(mesh.rank_at({0, 3}), ConfigError);
  EXPECT_THROW(mesh.rank_at({0, -1}), ConfigError);
  EXPECT_TRUE(mentions(config_error([&] { mesh.rank_at({0}); }), "[0]"));
  EXPECT_THROW(mesh.rank_at({0, 0, 0}), ConfigError);
}

}  // namespace
}  // namespace fsdp2
