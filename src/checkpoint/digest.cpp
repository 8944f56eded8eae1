// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/digest.hpp"

#include <isa-l/crc64.h>

#include <array>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fsdp2::checkpoint {

namespace {

constexpr std::uint64_t polynomial = 0xc96c5795d7870f42;  // CRC-64/XZ (ECMA-182), reflected

/// c·x modulo the polynomial.
constexpr std::uint64_t times_x(std::uint64_t c) {
  return (c >> 1) ^ ((c & 1) != 0 ? polynomial : 0);
}

constexpr std::uint64_t multiply_bitwise(std::uint64_t a, std::uint64_t b) {
  std::uint64_t product = 0;
  for (; a != 0; a <<= 1) {
    if ((a >> 63) != 0) product ^= b;
    b = times_x(b);
  }
  return product;
}

#if defined(__x86_64__)

/// reduction[k][v]: byte k of a word c, times x^64 modulo the polynomial ("slicing by 8").
constexpr auto reduction = [] {
  std::array<std::array<std::uint64_t, 256>, 8> table{};
  for (std::uint64_t v = 0; v < 256; ++v) {
    std::uint64_t c = v;
    for (int bit = 0; bit < 8; ++bit) c = times_x(c);
    table[7][v] = c;
  }
  for (std::size_t k = 7; k-- > 0;)
    for (std::size_t v = 0; v < 256; ++v) table[k][v] = (table[k + 1][v] >> 8) ^ table[7][table[k + 1][v] & 0xff];
  return table;
}();

__attribute__((target("pclmul"))) std::uint64_t multiply_carryless(std::uint64_t a, std::uint64_t b) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(a)),
                                               _mm_cvtsi64_si128(static_cast<long long>(b)), 0);
  const auto low = static_cast<std::uint64_t>(_mm_cvtsi128_si64(product));
  const auto high = static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_srli_si128(product, 8)));
  // The reflected product of two words has 127 bits: one up, its upper half is the terms below x^64.
  std::uint64_t result = (high << 1) | (low >> 63);
  const std::uint64_t excess = low << 1;
  for (std::size_t k = 0; k < 8; ++k) result ^= reduction[k][(excess >> (8 * k)) & 0xff];
  return result;
}

#endif

/// power[k] = x^(8·2^k) modulo the polynomial.
constexpr auto powers = [] {
  std::array<std::uint64_t, 64> power{};
  power[0] = std::uint64_t{1} << (63 - 8);
  for (std::size_t k = 1; k < 64; ++k) power[k] = multiply_bitwise(power[k - 1], power[k - 1]);
  return power;
}();

}  // namespace

std::uint64_t crc64(std::span<const std::byte> bytes, std::uint64_t before) {
  return crc64_ecma_refl(before, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

std::uint64_t multiply_mod(std::uint64_t a, std::uint64_t b) {
#if defined(__x86_64__)
  static const bool has_carryless = __builtin_cpu_supports("pclmul") != 0;
  if (has_carryless) return multiply_carryless(a, b);
#endif
  return multiply_bitwise(a, b);
}

std::uint64_t shift_factor(std::uint64_t bytes) {
  std::uint64_t factor = std::uint64_t{1} << 63;
  for (std::size_t k = 0; bytes != 0; ++k, bytes >>= 1)
    if ((bytes & 1) != 0) factor = multiply_mod(factor, powers[k]);
  return factor;
}

}  // namespace fsdp2::checkpoint
