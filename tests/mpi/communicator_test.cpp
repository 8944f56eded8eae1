// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "fsdp2/communicator.hpp"

#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp2/error.hpp"
#include "fsdp2/log.hpp"
#include "support/tensor_bytes.hpp"

namespace fsdp2 {
namespace {

using testing::Bytes;
using testing::bytes_of;
using testing::mix;
using testing::set_bytes;
using testing::tensor_of;
using testing::values_of;

constexpr std::int64_t sizes[] = {0, 1, 3, 1000};
constexpr std::int64_t large = 100003;

// Both ways through one rank: the copy, and MPI.
class CommunicatorTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override { comm = make(); }
  void TearDown() override {
    if (comm) comm->close();
  }

  static std::unique_ptr<Communicator> make() { return make_mpi_communicator(MPI_COMM_WORLD, "dp", {GetParam()}); }

  std::int64_t rank() const { return comm->rank(); }
  std::int64_t size() const { return comm->size(); }

  void all_gather(const Tensor& send, const Tensor& receive) { comm->all_gather(exec, one(send, receive)).wait(); }
  void reduce_scatter(const Tensor& send, const Tensor& receive, ReduceOp op) {
    comm->reduce_scatter(exec, one(send, receive), op).wait();
  }

  static std::vector<Transfer> one(const Tensor& send, const Tensor& receive) { return {{send, receive}}; }

  ExecutionSpace exec;
  std::unique_ptr<Communicator> comm;
};

INSTANTIATE_TEST_SUITE_P(SizeOneShortcut, CommunicatorTest, ::testing::Bool(),
                         [](const auto& test) { return std::string(test.param ? "On" : "Off"); });

// Bytes that tell the rank that made them and their place: every bit pattern occurs, NaNs included.
Bytes pattern(std::int64_t rank, DType dtype, std::int64_t count) {
  Bytes bytes(static_cast<std::size_t>(count * size_of(dtype)));
  const auto salt = mix(static_cast<std::uint64_t>(rank) << 8 | static_cast<std::uint64_t>(dtype));
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(mix(salt ^ i));
  return bytes;
}

Bytes concatenate(const std::vector<Bytes>& parts) {
  Bytes all;
  for (const Bytes& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Bytes part_of(const Bytes& bytes, std::int64_t index, std::int64_t parts) {
  const auto length = static_cast<std::ptrdiff_t>(bytes.size()) / parts;
  return {bytes.begin() + index * length, bytes.begin() + (index + 1) * length};
}

// Memory to receive into, with guards before and after it that nothing may touch.
struct Guarded {
  static constexpr std::int64_t guard = 16;
  static constexpr std::byte filler{0xa5};

  Guarded(DType dtype, std::int64_t count)
      : whole(tensor_of(dtype, Bytes(static_cast<std::size_t>((count + 2 * guard) * size_of(dtype)), filler))),
        inner(whole.slice(guard, {count})) {}

  bool is_intact() const {
    const Bytes bytes = bytes_of(whole);
    const auto margin = static_cast<std::ptrdiff_t>(guard * size_of(whole.dtype()));
    const auto is_filler = [](std::byte byte) { return byte == filler; };
    return std::all_of(bytes.begin(), bytes.begin() + margin, is_filler) &&
           std::all_of(bytes.end() - margin, bytes.end(), is_filler);
  }

  Tensor whole;
  Tensor inner;
};

Bytes gathered(std::int64_t size, DType dtype, std::int64_t count) {
  std::vector<Bytes> parts;
  for (std::int64_t r = 0; r < size; ++r) parts.push_back(pattern(r, dtype, count));
  return concatenate(parts);
}

TEST_P(CommunicatorTest, KnowsItsPlace) {
  int expected_rank = 0;
  int expected_size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &expected_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &expected_size);
  EXPECT_EQ(rank(), expected_rank);
  EXPECT_EQ(size(), expected_size);
  EXPECT_EQ(comm->name(), "dp");
}

// The copy is done at once; through MPI there is always something left to wait for.
TEST_P(CommunicatorTest, SizeOneShortcutIsAChoice) {
  const auto alone = comm->split(rank(), 0, "alone");
  const Tensor send = tensor_of(DType::f32, pattern(rank(), DType::f32, 3));
  const Guarded receive(DType::f32, 3);
  const auto check = [](Work work) {
    EXPECT_EQ(work.finished(), GetParam());
    work.wait();
  };
  check(alone->all_gather(exec, one(send, receive.inner)));
  check(alone->reduce_scatter(exec, one(send, receive.inner), ReduceOp::sum));
  check(alone->all_to_all(exec, one(send, receive.inner)));
  check(alone->all_reduce(exec, receive.inner, ReduceOp::sum));
  check(alone->broadcast(exec, receive.inner, 0));
  alone->close();
}

TEST_P(CommunicatorTest, AllGatherEveryDtype) {
  const auto check = [&](DType dtype, std::int64_t count) {
    SCOPED_TRACE(std::string(to_string(dtype)) + " " + std::to_string(count));
    const Bytes mine = pattern(rank(), dtype, count);
    const Tensor send = tensor_of(dtype, mine);
    const Guarded receive(dtype, count * size());
    all_gather(send, receive.inner);
    EXPECT_TRUE(bytes_of(receive.inner) == gathered(size(), dtype, count));
    EXPECT_TRUE(receive.is_intact());
    EXPECT_TRUE(bytes_of(send) == mine);
  };
  for (const DType dtype : all_dtypes)
    for (const std::int64_t count : sizes) check(dtype, count);
  for (const DType dtype : {DType::u8, DType::bf16, DType::f32, DType::complex128}) check(dtype, large);
}

TEST_P(CommunicatorTest, AllGatherInPlace) {
  for (const DType dtype : {DType::i8, DType::f16, DType::f64})
    for (const std::int64_t count : {std::int64_t{0}, std::int64_t{1}, std::int64_t{3}, large}) {
      SCOPED_TRACE(count);
      const Guarded receive(dtype, count * size());
      const Tensor send = receive.inner.slice(rank() * count, {count});
      set_bytes(send, pattern(rank(), dtype, count));
      all_gather(send, receive.inner);
      EXPECT_TRUE(bytes_of(receive.inner) == gathered(size(), dtype, count));
      EXPECT_TRUE(receive.is_intact());
    }
}

TEST_P(CommunicatorTest, BroadcastFromEachRoot) {
  const auto check = [&](DType dtype, std::int64_t count, std::int64_t root) {
    const Guarded buffer(dtype, count);
    set_bytes(buffer.inner, pattern(rank(), dtype, count));
    comm->broadcast(exec, buffer.inner, root).wait();
    EXPECT_TRUE(bytes_of(buffer.inner) == pattern(root, dtype, count))
        << to_string(dtype) << " " << count << " " << root;
    EXPECT_TRUE(buffer.is_intact());
  };
  for (std::int64_t root = 0; root < size(); ++root) {
    for (const DType dtype : all_dtypes)
      for (const std::int64_t count : sizes) check(dtype, count, root);
    check(DType::f32, large, root);
  }
}

TEST_P(CommunicatorTest, AllToAllTransposes) {
  const auto check = [&](DType dtype, std::int64_t count) {
    const Tensor send = tensor_of(dtype, pattern(rank(), dtype, count * size()));
    const Guarded receive(dtype, count * size());
    comm->all_to_all(exec, one(send, receive.inner)).wait();
    std::vector<Bytes> parts;
    for (std::int64_t r = 0; r < size(); ++r)
      parts.push_back(part_of(pattern(r, dtype, count * size()), rank(), size()));
    EXPECT_TRUE(bytes_of(receive.inner) == concatenate(parts)) << to_string(dtype) << " " << count;
    EXPECT_TRUE(receive.is_intact());
    EXPECT_TRUE(bytes_of(send) == pattern(rank(), dtype, count * size()));
  };
  for (const DType dtype : all_dtypes)
    for (const std::int64_t count : sizes) check(dtype, count);
  check(DType::f32, large);
}

// Calls f with a value of the element type.
template <class F>
void with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64:
      return f(double{});
    case DType::f32:
      return f(float{});
    case DType::f16:
      return f(float16{});
    case DType::bf16:
      return f(bfloat16{});
    case DType::f8_e4m3:
      return f(float8_e4m3{});
    case DType::f8_e5m2:
      return f(float8_e5m2{});
    case DType::i64:
      return f(std::int64_t{});
    case DType::i32:
      return f(std::int32_t{});
    case DType::i16:
      return f(std::int16_t{});
    case DType::i8:
      return f(std::int8_t{});
    case DType::u64:
      return f(std::uint64_t{});
    case DType::u32:
      return f(std::uint32_t{});
    case DType::u16:
      return f(std::uint16_t{});
    case DType::u8:
      return f(std::uint8_t{});
    case DType::boolean:
      return f(bool{});
    case DType::complex64:
      return f(Kokkos::complex<float>{});
    case DType::complex128:
      return f(Kokkos::complex<double>{});
  }
}

template <class T>
constexpr bool is_complex = std::is_same_v<T, Kokkos::complex<float>> || std::is_same_v<T, Kokkos::complex<double>>;

// What values of T are added in.
template <class T>
using Sum = std::conditional_t<std::is_arithmetic_v<T> || is_complex<T>, T, float>;

// Values of many magnitudes, whose sums round differently in every order; small enough to fit every type.
template <class T>
T value(std::int64_t rank, std::int64_t index) {
  const std::uint64_t bits = mix(static_cast<std::uint64_t>(index * 64 + rank));
  if constexpr (std::is_same_v<T, bool>) {
    return bits % 3 == 0;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<int>(bits % 31) - (std::is_signed_v<T> ? 15 : 0));
  } else if constexpr (is_complex<T>) {
    using Part = typename T::value_type;
    return T(value<Part>(rank, 2 * index), value<Part>(rank, 2 * index + 1));
  } else {
    const double fraction = static_cast<double>(bits % 1000003) / 1000003.0 - 0.5;
    return static_cast<T>(fraction * static_cast<double>(1 << (bits >> 32) % 7));
  }
}

// Rank by rank, in order, element by element: what any number of ranks must arrive at, to the bit.
template <class T>
T reduce_serially(std::int64_t ranks, std::int64_t index, ReduceOp op) {
  auto result = static_cast<Sum<T>>(value<T>(0, index));
  for (std::int64_t r = 1; r < ranks; ++r) {
    const auto next = static_cast<Sum<T>>(value<T>(r, index));
    if constexpr (std::is_same_v<T, bool>) {
      result = op == ReduceOp::min ? result && next : result || next;
    } else if constexpr (is_complex<T>) {
      result = result + next;
    } else {
      if (op == ReduceOp::sum) result = static_cast<Sum<T>>(result + next);
      if (op == ReduceOp::min && next < result) result = next;
      if (op == ReduceOp::max && next > result) result = next;
    }
  }
  return static_cast<T>(result);
}

template <class T>
Bytes bytes_of_elements(std::int64_t begin, std::int64_t count, const auto& element) {
  Bytes bytes(static_cast<std::size_t>(count) * sizeof(T));
  for (std::int64_t i = 0; i < count; ++i) {
    const T x = element(begin + i);
    std::memcpy(bytes.data() + static_cast<std::size_t>(i) * sizeof(T), &x, sizeof(T));
  }
  return bytes;
}

Bytes contribution(DType dtype, std::int64_t rank, std::int64_t count) {
  Bytes bytes;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    bytes = bytes_of_elements<T>(0, count, [&](std::int64_t i) { return value<T>(rank, i); });
  });
  return bytes;
}

Bytes reduced(DType dtype, std::int64_t ranks, std::int64_t begin, std::int64_t count, ReduceOp op) {
  Bytes bytes;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    bytes = bytes_of_elements<T>(begin, count, [&](std::int64_t i) { return reduce_serially<T>(ranks, i, op); });
  });
  return bytes;
}

bool has_order(DType dtype) {
  return dtype != DType::complex64 && dtype != DType::complex128;
}

std::string describe(DType dtype, std::int64_t count, ReduceOp op) {
  return std::string(to_string(dtype)) + " " + std::to_string(count) + " " + to_string(Placement{Partial{op}});
}

TEST_P(CommunicatorTest, ReduceScatterEqualsTheSerialSumInRankOrder) {
  const auto check = [&](DType dtype, std::int64_t count, ReduceOp op) {
    const Bytes mine = contribution(dtype, rank(), count * size());
    const Tensor send = tensor_of(dtype, mine);
    const Guarded receive(dtype, count);
    reduce_scatter(send, receive.inner, op);
    EXPECT_TRUE(bytes_of(receive.inner) == reduced(dtype, size(), rank() * count, count, op))
        << describe(dtype, count, op);
    EXPECT_TRUE(receive.is_intact());
    EXPECT_TRUE(bytes_of(send) == mine) << "the send buffer belongs to the caller";
  };
  for (const DType dtype : all_dtypes)
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max})
      if (op == ReduceOp::sum || has_order(dtype))
        for (const std::int64_t count : sizes) check(dtype, count, op);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) check(dtype, large, ReduceOp::sum);
}

TEST_P(CommunicatorTest, SumsOfTheTestRoundDifferentlyInOtherOrders) {
  if (size() < 3) GTEST_SKIP() << "two numbers have one order";
  std::int64_t different = 0;
  for (std::int64_t i = 0; i < 1000; ++i) {
    float backwards = value<float>(size() - 1, i);
    for (std::int64_t r = size() - 1; r-- > 0;) backwards += value<float>(r, i);
    if (backwards != reduce_serially<float>(size(), i, ReduceOp::sum)) ++different;
  }
  EXPECT_GT(different, 50);
}

TEST_P(CommunicatorTest, AllReduceAnyLengthSameBitsEverywhere) {
  const auto check = [&](DType dtype, std::int64_t count, ReduceOp op) {
    const Guarded buffer(dtype, count);
    set_bytes(buffer.inner, contribution(dtype, rank(), count));
    comm->all_reduce(exec, buffer.inner, op).wait();
    EXPECT_TRUE(bytes_of(buffer.inner) == reduced(dtype, size(), 0, count, op)) << describe(dtype, count, op);
    EXPECT_TRUE(buffer.is_intact());
  };
  for (const DType dtype : all_dtypes)
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max})
      if (op == ReduceOp::sum || has_order(dtype))
        for (const std::int64_t count : {0, 1, 2, 3, 4, 5, 7, 13, 1000}) check(dtype, count, op);
  for (const DType dtype : {DType::f32, DType::bf16}) check(dtype, large, ReduceOp::sum);
}

// Groups: several dtypes and lengths at once, empty transfers among them, and no transfers at all.
const std::vector<std::pair<DType, std::int64_t>> group = {
    {DType::f32, 1000}, {DType::i8, 0}, {DType::bf16, 3}, {DType::f64, 0}, {DType::complex128, 77}, {DType::f16, 1}};

TEST_P(CommunicatorTest, GroupsOfTransfers) {
  std::vector<Transfer> gather;
  std::vector<Transfer> scatter;
  std::vector<Transfer> exchange;
  for (const auto& [dtype, count] : group) {
    gather.push_back({tensor_of(dtype, pattern(rank(), dtype, count)), Guarded(dtype, count * size()).inner});
    scatter.push_back({tensor_of(dtype, contribution(dtype, rank(), count * size())), Guarded(dtype, count).inner});
    exchange.push_back(
        {tensor_of(dtype, pattern(rank(), dtype, count * size())), Guarded(dtype, count * size()).inner});
  }
  // all in flight together, completed in another order
  Work gathering = comm->all_gather(exec, gather);
  Work scattering = comm->reduce_scatter(exec, scatter, ReduceOp::sum);
  Work exchanging = comm->all_to_all(exec, exchange);
  exchanging.wait();
  gathering.wait();
  scattering.wait();
  for (std::size_t i = 0; i < group.size(); ++i) {
    const auto& [dtype, count] = group[i];
    EXPECT_TRUE(bytes_of(gather[i].receive) == gathered(size(), dtype, count)) << i;
    EXPECT_TRUE(bytes_of(scatter[i].receive) == reduced(dtype, size(), rank() * count, count, ReduceOp::sum)) << i;
    std::vector<Bytes> parts;
    for (std::int64_t r = 0; r < size(); ++r)
      parts.push_back(part_of(pattern(r, dtype, count * size()), rank(), size()));
    EXPECT_TRUE(bytes_of(exchange[i].receive) == concatenate(parts)) << i;
  }
}

TEST_P(CommunicatorTest, EmptyGroups) {
  comm->all_gather(exec, {}).wait();
  comm->reduce_scatter(exec, {}, ReduceOp::sum).wait();
  comm->all_to_all(exec, {}).wait();
  const std::vector<Transfer> nothing = one(Tensor(), Tensor());
  comm->all_gather(exec, nothing).wait();
  comm->reduce_scatter(exec, nothing, ReduceOp::max).wait();
  comm->all_to_all(exec, nothing).wait();
  comm->all_reduce(exec, Tensor(), ReduceOp::sum).wait();
  comm->broadcast(exec, Tensor(), 0).wait();
}

TEST_P(CommunicatorTest, TestPollsUntilWaitWouldNotBlock) {
  const Tensor send = tensor_of(DType::f32, pattern(rank(), DType::f32, large));
  const Guarded receive(DType::f32, large * size());
  Work work = comm->all_gather(exec, one(send, receive.inner));
  while (!work.test()) std::this_thread::yield();
  work.wait();
  EXPECT_TRUE(work.finished());
  EXPECT_TRUE(bytes_of(receive.inner) == gathered(size(), DType::f32, large));
}

TEST_P(CommunicatorTest, MovedFromAndDefaultWorkIsFinished) {
  Work none;
  EXPECT_TRUE(none.finished());
  EXPECT_TRUE(none.test());
  none.wait();

  const Guarded receive(DType::f32, 1000 * size());
  Work first = comm->all_gather(exec, one(tensor_of(DType::f32, pattern(rank(), DType::f32, 1000)), receive.inner));
  Work second = std::move(first);
  EXPECT_TRUE(first.finished());  // NOLINT(bugprone-use-after-move): a moved-from Work is defined
  EXPECT_TRUE(first.test());
  first.wait();
  second.wait();
  EXPECT_TRUE(second.finished());
  second.wait();
  EXPECT_TRUE(bytes_of(receive.inner) == gathered(size(), DType::f32, 1000));
}

TEST_P(CommunicatorTest, DroppedWorkCompletesAtClose) {
  const Guarded gathering(DType::f32, large * size());
  const Guarded scattering(DType::bf16, 1000);
  const Guarded replaced(DType::i32, 1000 * size());
  const Guarded reducing(DType::f64, 1001);
  set_bytes(reducing.inner, contribution(DType::f64, rank(), 1001));
  {
    // The send buffers have no other owner than the operation.
    const auto contribute = [&] { return tensor_of(DType::bf16, contribution(DType::bf16, rank(), 1000 * size())); };
    const Work dropped =
        comm->all_gather(exec, one(tensor_of(DType::f32, pattern(rank(), DType::f32, large)), gathering.inner));
    Work overwritten = comm->reduce_scatter(exec, one(contribute(), scattering.inner), ReduceOp::sum);
    overwritten = comm->all_gather(exec, one(tensor_of(DType::i32, pattern(rank(), DType::i32, 1000)), replaced.inner));
    comm->all_reduce(exec, reducing.inner, ReduceOp::sum);
  }
  comm->close();
  EXPECT_TRUE(bytes_of(gathering.inner) == gathered(size(), DType::f32, large));
  EXPECT_TRUE(bytes_of(replaced.inner) == gathered(size(), DType::i32, 1000));
  EXPECT_TRUE(bytes_of(scattering.inner) == reduced(DType::bf16, size(), rank() * 1000, 1000, ReduceOp::sum));
  EXPECT_TRUE(bytes_of(reducing.inner) == reduced(DType::f64, size(), 0, 1001, ReduceOp::sum));
}

TEST_P(CommunicatorTest, DroppedWorkCompletesAtLaterCalls) {
  const Guarded receive(DType::f32, 1000);
  {
    const Work dropped = comm->reduce_scatter(
        exec, one(tensor_of(DType::f32, contribution(DType::f32, rank(), 1000 * size())), receive.inner),
        ReduceOp::sum);
  }
  const Bytes expected = reduced(DType::f32, size(), rank() * 1000, 1000, ReduceOp::sum);
  bool is_done = false;
  // All ranks leave the loop together: the sum of those that are not done is 0.
  std::int64_t waiting = 1;
  for (int call = 0; waiting != 0 && call < 100000; ++call) {
    is_done = bytes_of(receive.inner) == expected;
    const Tensor flag = tensor_of(DType::i64, bytes_of(std::vector<std::int64_t>{is_done ? 0 : 1}));
    comm->all_reduce(exec, flag, ReduceOp::sum).wait();
    waiting = values_of<std::int64_t>(flag)[0];
  }
  EXPECT_TRUE(is_done);
}

TEST_P(CommunicatorTest, ManyOperationsReuseScratchMemory) {
  for (int round = 0; round < 20; ++round) {
    std::vector<Guarded> receives;
    std::vector<Work> works;
    for (const std::int64_t count : {1000, 3, 500}) {
      receives.emplace_back(DType::f32, count);
      works.push_back(comm->reduce_scatter(
          exec, one(tensor_of(DType::f32, contribution(DType::f32, rank(), count * size())), receives.back().inner),
          ReduceOp::sum));
    }
    while (!works.empty()) {
      works.back().wait();
      const std::int64_t count = receives.back().inner.numel();
      ASSERT_TRUE(bytes_of(receives.back().inner) == reduced(DType::f32, size(), rank() * count, count, ReduceOp::sum));
      works.pop_back();
      receives.pop_back();
    }
  }
}

// A counter in memory that all ranks of a node share.
TEST_P(CommunicatorTest, BarrierWaitsForEveryRank) {
  MPI_Comm node = MPI_COMM_NULL;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
  int node_size = 0;
  MPI_Comm_size(node, &node_size);
  if (node_size != size()) {
    MPI_Comm_free(&node);
    GTEST_SKIP() << "the ranks are not on one node";
  }
  MPI_Win window = MPI_WIN_NULL;
  int* shared = nullptr;
  MPI_Win_allocate_shared(rank() == 0 ? sizeof(int) : 0, sizeof(int), MPI_INFO_NULL, node, static_cast<void*>(&shared),
                          &window);
  MPI_Aint length = 0;
  int unit = 0;
  MPI_Win_shared_query(window, 0, &length, &unit, static_cast<void*>(&shared));
  if (rank() == 0) *shared = 0;
  MPI_Barrier(node);
  std::atomic_ref<int> counter(*shared);
  for (int round = 1; round <= 10; ++round) {
    if (rank() == round % size()) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // one rank comes late
    ++counter;
    comm->barrier();
    EXPECT_EQ(counter.load(), round * size());
    comm->barrier();
  }
  MPI_Win_free(&window);
  MPI_Comm_free(&node);
}

// The world ranks of a communicator's members, in their order.
std::vector<std::int64_t> members(Communicator& comm) {
  int world_rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  const ExecutionSpace exec;
  const Tensor all = Tensor(exec, DType::i64, {comm.size()}, "test");
  const Transfer transfer{tensor_of(DType::i64, bytes_of(std::vector<std::int64_t>{world_rank})), all};
  comm.all_gather(exec, {&transfer, 1}).wait();
  return values_of<std::int64_t>(all);
}

TEST_P(CommunicatorTest, SplitByColorOrdersByKeyThenRank) {
  const auto backwards = comm->split(rank() % 2, -rank(), "half");
  std::vector<std::int64_t> expected;
  for (std::int64_t r = size(); r-- > 0;)
    if (r % 2 == rank() % 2) expected.push_back(r);
  EXPECT_EQ(backwards->size(), static_cast<std::int64_t>(expected.size()));
  EXPECT_EQ(backwards->name(), "half");
  EXPECT_EQ(expected[static_cast<std::size_t>(backwards->rank())], rank());
  EXPECT_EQ(members(*backwards), expected);

  const auto ties = comm->split(7, 0, "all");
  EXPECT_EQ(ties->rank(), rank());
  EXPECT_EQ(ties->size(), size());

  const auto alone = comm->split(rank(), 0, "alone");
  EXPECT_EQ(alone->size(), 1);
  EXPECT_EQ(members(*alone), std::vector<std::int64_t>{rank()});

  // A part lives on its own: the parent may close first.
  comm->close();
  EXPECT_EQ(members(*backwards), expected);
  for (const auto* part : {&backwards, &ties, &alone}) (*part)->close();
}

TEST_P(CommunicatorTest, SplitRefusesColorsThatMpiCannotTake) {
  EXPECT_THROW(comm->split(-1, 0, "x"), CommError);
  EXPECT_THROW(comm->split(std::int64_t{1} << 40, 0, "x"), CommError);
  EXPECT_THROW(comm->split(0, std::int64_t{1} << 40, "x"), CommError);
}

template <class E, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

bool mentions(const std::string& message, const std::string& part) {
  return message.find(part) != std::string::npos;
}

TEST_P(CommunicatorTest, EverythingAfterCloseIsAnError) {
  comm->close();
  const std::vector<Transfer> transfers =
      one(Tensor(exec, DType::f32, {1}, "test"), Tensor(exec, DType::f32, {size()}, "test"));
  const std::vector<Transfer> back = one(transfers[0].receive, transfers[0].send);
  const std::string message = message_of<CommError>([&] { comm->all_gather(exec, transfers); });
  EXPECT_TRUE(mentions(message, "\"dp\"") && mentions(message, "closed")) << message;
  EXPECT_THROW(comm->reduce_scatter(exec, back, ReduceOp::sum), CommError);
  EXPECT_THROW(comm->all_reduce(exec, transfers[0].send, ReduceOp::sum), CommError);
  EXPECT_THROW(comm->all_reduce(exec, Tensor(), ReduceOp::sum), CommError);
  EXPECT_THROW(comm->broadcast(exec, transfers[0].send, 0), CommError);
  EXPECT_THROW(comm->all_to_all(exec, one(transfers[0].receive, transfers[0].receive)), CommError);
  EXPECT_THROW(comm->barrier(), CommError);
  EXPECT_THROW(comm->split(0, 0, "x"), CommError);
  EXPECT_EQ(comm->name(), "dp");
  EXPECT_GE(comm->rank(), 0);
  EXPECT_GE(comm->size(), 1);
  comm->close();
}

TEST_P(CommunicatorTest, WrongArgumentsAreRefusedBeforeAnythingIsSent) {
  const Tensor three(exec, DType::f32, {3}, "test");
  const Tensor right(exec, DType::f32, {3 * size()}, "test");
  const Tensor wrong(exec, DType::f32, {3 * size() + 1}, "test");
  const Tensor integers(exec, DType::i32, {3 * size()}, "test");
  const Tensor complex(exec, DType::complex64, {size()}, "test");
  const Tensor one_complex(exec, DType::complex64, {1}, "test");

  const std::string message = message_of<ShapeError>([&] { comm->all_gather(exec, one(three, wrong)); });
  for (const std::string& part : {std::string("all_gather"), std::string("\"dp\""), std::to_string(3 * size() + 1)})
    EXPECT_TRUE(mentions(message, part)) << message;
  EXPECT_THROW(comm->all_gather(exec, one(three, integers)), ShapeError);
  EXPECT_THROW(comm->reduce_scatter(exec, one(wrong, three), ReduceOp::sum), ShapeError);
  EXPECT_THROW(comm->reduce_scatter(exec, one(integers, three), ReduceOp::sum), ShapeError);
  EXPECT_THROW(comm->all_to_all(exec, one(right, wrong)), ShapeError);
  EXPECT_THROW(comm->all_to_all(exec, one(right, integers)), ShapeError);
  // a bad transfer at the end of a group: those before it must not have started
  EXPECT_THROW(comm->all_gather(exec, std::vector<Transfer>{{three, right}, {three, wrong}}), ShapeError);
  if (size() > 1) {
    EXPECT_THROW(comm->all_to_all(exec, std::vector<Transfer>{{right, right}, {wrong, wrong}}), ShapeError);
  }

  for (const std::int64_t root : {std::int64_t{-1}, size(), std::int64_t{1} << 40}) {
    const std::string text = message_of<CommError>([&] { comm->broadcast(exec, three, root); });
    EXPECT_TRUE(mentions(text, std::to_string(root))) << text;
  }
  for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    EXPECT_THROW(comm->reduce_scatter(exec, one(complex, one_complex), op), ShapeError);
    EXPECT_THROW(comm->all_reduce(exec, complex, op), ShapeError);
  }

  // and the communicator is as good as before
  set_bytes(three, pattern(rank(), DType::f32, 3));
  all_gather(three, right);
  EXPECT_TRUE(bytes_of(right) == gathered(size(), DType::f32, 3));
}

TEST_P(CommunicatorTest, DuplicateLeavesTheCallersCommunicatorAlone) {
  MPI_Comm own = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &own);
  const auto other = make_mpi_communicator(own, "other", {GetParam()});
  MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(own, &handler);
  EXPECT_EQ(handler, MPI_ERRORS_ARE_FATAL);
  MPI_Errhandler_free(&handler);
  MPI_Comm_free(&own);
  std::vector<std::int64_t> everyone;
  for (std::int64_t r = 0; r < size(); ++r) everyone.push_back(r);
  EXPECT_EQ(members(*other), everyone);
  other->close();
}

TEST_P(CommunicatorTest, DestructionWithoutCloseIsLogged) {
  std::vector<std::string> messages;
  set_log_sink([&](LogLevel level, std::string_view message) {
    if (level == LogLevel::warning) messages.emplace_back(message);
  });
  make()->close();
  EXPECT_TRUE(messages.empty());
  make_mpi_communicator(MPI_COMM_WORLD, "forgotten", {GetParam()}).reset();
  set_log_sink({});
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_TRUE(mentions(messages[0], "\"forgotten\"")) << messages[0];
}

// MPI_COMM_NULL: one rank, of which every rank of the world has its own.
TEST_P(CommunicatorTest, NullCommunicatorIsOneRank) {
  const auto alone = make_mpi_communicator(MPI_COMM_NULL, "alone", {GetParam()});
  EXPECT_EQ(alone->rank(), 0);
  EXPECT_EQ(alone->size(), 1);
  const Bytes mine = pattern(rank(), DType::bf16, 7);
  const Tensor send = tensor_of(DType::bf16, mine);
  const Tensor receive(exec, DType::bf16, {7}, "test");
  alone->all_gather(exec, one(send, receive)).wait();
  EXPECT_TRUE(bytes_of(receive) == mine);
  alone->all_reduce(exec, receive, ReduceOp::sum).wait();
  alone->broadcast(exec, receive, 0).wait();
  alone->barrier();
  EXPECT_TRUE(bytes_of(receive) == mine);
  alone->split(0, 0, "part")->close();
  alone->close();
  EXPECT_THROW(alone->barrier(), CommError);
}

}  // namespace
}  // namespace fsdp2
