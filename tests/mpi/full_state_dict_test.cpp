// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fsdp2/checkpoint/load.hpp"
#include "fsdp2/checkpoint/save.hpp"
#include "fsdp2/error.hpp"
#include "fsdp2/optimizer.hpp"
#include "fsdp2/state_dict.hpp"
#include "support/checkpoint.hpp"
#include "support/fsdp.hpp"

namespace fsdp2::test {
namespace {

std::int64_t live_bytes = 0;
std::int64_t peak_bytes = 0;

class FullStateDictTest : public OnMesh {
 protected:
  static std::vector<ParamSpec> specs(float start) {
    return {{"w", {7, 3}, ramp_tensor({7, 3}, start)},
            {"columns", {2, 9}, ramp_tensor({2, 9}, start), true, DType::f32, {{"dp", Shard{1}}}},
            {"b", {3}, ramp_tensor({3}, start)}};
  }
  Config config() const { return {.mesh = mesh_, .min_shard_size = 4}; }
  static std::vector<float> values(const HostTensor& tensor) {
    const auto* data = reinterpret_cast<const float*>(tensor.data());
    return {data, data + tensor.numel()};
  }
};

TEST_F(FullStateDictTest, WholeTensorsGoToRankZeroOrToAll) {
  Model model(config());
  model.add("m", specs(5));
  for (const bool rank0_only : {true, false}) {
    const FullStateDict full = get_full_state_dict(state_dict(model), rank0_only);
    if (rank0_only && rank_ != 0) {
      EXPECT_TRUE(full.empty());
      continue;
    }
    ASSERT_EQ(full.size(), 3u);
    EXPECT_EQ(values(full.at("m.w")), ramp({7, 3}, 5));
    EXPECT_EQ(values(full.at("m.columns")), ramp({2, 9}, 5));
    EXPECT_EQ(values(full.at("m.b")), ramp({3}, 5));
    EXPECT_EQ(full.at("m.w").shape(), (Shape{7, 3}));
  }
}

TEST_F(FullStateDictTest, RankZerosTensorsReachEveryRank) {
  for (const bool broadcasts : {true, false}) {
    Model source(config());
    source.add("m", specs(5));
    AdamW trained(source, {});
    source.modules()[0]->param("b").set_gradient(ramp_tensor({3}, 1));
    trained.step();
    const FullStateDict full = get_full_state_dict(state_dict(source, trained), broadcasts);
    Model target(config());
    Module& module = target.add("m", specs(0));
    AdamW fresh(target, {});
    (void)module.param("w").all_gather();
    load_full_state_dict(state_dict(target, fresh), full, {.broadcast_from_rank0 = broadcasts});
    EXPECT_FALSE(module.param("w").is_gathered());  // what was gathered is of yesterday
    const StateDict expected = state_dict(source, trained);
    const StateDict found = state_dict(target, fresh);
    for (const auto& [key, tensor] : expected.tensors)
      EXPECT_EQ(to_host<std::uint8_t>(found.tensors.at(key).local().as(DType::u8, {tensor.local().bytes()})),
                to_host<std::uint8_t>(tensor.local().as(DType::u8, {tensor.local().bytes()})))
          << key;
  }
}

TEST_F(FullStateDictTest, AllProblemsAreListedOnAllRanks) {
  Model source(config());
  source.add("m", specs(5));
  source.add("more", {{"x", {2}, init::ones()}});
  FullStateDict full = get_full_state_dict(state_dict(source));
  Model target(config());
  Module& module = target.add("m", {{"w", {7, 4}, init::ones()},
                                    {"b", {3}, Tensor(ExecutionSpace(), DType::f64, {3}, "b")},
                                    {"extra", {1}, init::ones()}});
  const std::string message = message_of<MismatchError>([&] { load_full_state_dict(state_dict(target), full); });
  for (const char* part : {"\"m.w\": shape [7, 3], expected [7, 4]", "\"m.b\": f32, expected f64",
                           "\"m.extra\": missing", "\"m.columns\": unexpected", "\"more.x\": unexpected"})
    EXPECT_TRUE(contains(message, part)) << message;
  EXPECT_EQ(to_host(module.param("w").all_gather()), std::vector<float>(28, 1));
}

/// One tensor is on its way at a time.
TEST_F(FullStateDictTest, LoadingHoldsOneTensor) {
  Model source(config());
  for (int i = 0; i < 8; ++i) source.add("m" + std::to_string(i), {{"w", {40, 25}, init::ones()}});
  const FullStateDict full = get_full_state_dict(state_dict(source));
  live_bytes = peak_bytes = 0;
  Kokkos::Tools::Experimental::set_allocate_data_callback(
      [](Kokkos::Tools::SpaceHandle, const char*, const void*, std::uint64_t bytes) {
        live_bytes += static_cast<std::int64_t>(bytes);
        peak_bytes = std::max(peak_bytes, live_bytes);
      });
  Kokkos::Tools::Experimental::set_deallocate_data_callback(
      [](Kokkos::Tools::SpaceHandle, const char*, const void*, std::uint64_t bytes) {
        live_bytes -= static_cast<std::int64_t>(bytes);
      });
  load_full_state_dict(state_dict(source), full);
  Kokkos::Tools::Experimental::set_allocate_data_callback(nullptr);
  Kokkos::Tools::Experimental::set_deallocate_data_callback(nullptr);
  EXPECT_EQ(live_bytes, 0);
  EXPECT_EQ(peak_bytes, 40 * 25 * 4);
}

/// A user's type.
class Schedule {
 public:
  Schedule(const DeviceMesh& mesh, float rate) : mesh_(mesh), rate_(make_tensor({1}, {rate})) {}
  StateDict state_dict() const {
    StateDict dict;
    dict.tensors.emplace("rate", DTensor::from_local(rate_, {DType::f32, {1}, {Replicate{}}, {}}, mesh_));
    return dict;
  }
  void load_state_dict(const StateDict& dict) {
    ++loads;
    loaded = to_host(dict.tensors.at("rate").local())[0];
  }

  int loads = 0;
  float loaded = 0;

 private:
  DeviceMesh mesh_;
  Tensor rate_;
};
static_assert(Stateful<Schedule>);
static_assert(!Stateful<Model>);

TEST_F(FullStateDictTest, AUsersTypeJoins) {
  const testing::ScratchDirectory scratch;
  const auto dict_of = [&](Model& model, Schedule& schedule) {
    StateDict dict = state_dict(model);
    add(dict, "schedule", schedule);
    return dict;
  };
  Model saved(config());
  saved.add("m", specs(5));
  Schedule before(mesh_, 0.25f);
  save(scratch / "c", dict_of(saved, before));
  Model loaded(config());
  Module& module = loaded.add("m", specs(0));
  Schedule after(mesh_, 0);
  load(scratch / "c", dict_of(loaded, after));
  EXPECT_EQ(after.loads, 1);
  EXPECT_EQ(after.loaded, 0.25f);
  EXPECT_EQ(before.loads, 0);
  EXPECT_EQ(to_host(module.param("w").all_gather()), ramp({7, 3}, 5));
  StateDict dict = state_dict(loaded);
  add(dict, "schedule", after);
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { add(dict, "schedule", after); }), "\"schedule.rate\""));
}

TEST_F(FullStateDictTest, ValuesStayCurrentOrSayThatTheyAreStale) {
  const testing::ScratchDirectory scratch;
  Model model(config());
  Module& module = model.add("m", specs(5));
  const StateDict early = state_dict(model);
  module.param("b").update_local_shard(ramp_tensor({3}, 40));
  EXPECT_EQ(to_host(early.tensors.at("m.b").local()), ramp({3}, 40));
  module.add_param({"late", {2}, init::ones()});
  for (const auto& use :
       std::vector<std::function<void()>>{[&] { get_full_state_dict(early); }, [&] { load_full_state_dict(early, {}); },
                                          [&] { save(scratch / "c", early); }})
    EXPECT_TRUE(contains(message_of<Error>(use), "stale"));
  EXPECT_EQ(state_dict(model).tensors.size(), 4u);
}

}  // namespace
}  // namespace fsdp2::test
