// Arithmetic in GF(2^128) as GCM uses it, and in GF(2)[x] modulo the polynomial of CRC-64/NVME.
//
// Both standards write polynomials with the lowest power in the highest bit ("reflected").
// A product of two reflected factors of n bits comes out one bit too low, hence the shifts by one.
// GPUs have no carry-less multiplier: the integer one is used on operands with holes, wide enough
// that carries die in them (Pornin, BearSSL `ghash_ctmul32`). No branch and no address depends on
// a value.
#pragma once

#include "layout.h"

struct Wide {  // 128 bits; `high` holds the lowest powers
  u64 high, low;
};

struct Product {  // 256 bits, before reduction, most significant word first
  Wide high, low;
};

__device__ inline Wide operator^(Wide a, Wide b) { return {a.high ^ b.high, a.low ^ b.low}; }

// Carry-less product of 32-bit factors. Every fourth bit survives: at most eight ones meet in a
// column, so a sum needs four bits and never reaches the next column.
__device__ inline u64 carryless_32(u32 a, u32 b) {
  const u32 a0 = a & 0x11111111, a1 = a & 0x22222222, a2 = a & 0x44444444, a3 = a & 0x88888888;
  const u32 b0 = b & 0x11111111, b1 = b & 0x22222222, b2 = b & 0x44444444, b3 = b & 0x88888888;
  const u64 c0 = (u64)a0 * b0 ^ (u64)a1 * b3 ^ (u64)a2 * b2 ^ (u64)a3 * b1;
  const u64 c1 = (u64)a0 * b1 ^ (u64)a1 * b0 ^ (u64)a2 * b3 ^ (u64)a3 * b2;
  const u64 c2 = (u64)a0 * b2 ^ (u64)a1 * b1 ^ (u64)a2 * b0 ^ (u64)a3 * b3;
  const u64 c3 = (u64)a0 * b3 ^ (u64)a1 * b2 ^ (u64)a2 * b1 ^ (u64)a3 * b0;
  return (c0 & 0x1111111111111111) | (c1 & 0x2222222222222222) | (c2 & 0x4444444444444444) |
         (c3 & 0x8888888888888888);
}

// Karatsuba: three products instead of four.
__device__ inline Wide carryless_64(u64 a, u64 b) {
  const u32 a1 = (u32)(a >> 32), a0 = (u32)a, b1 = (u32)(b >> 32), b0 = (u32)b;
  const u64 high = carryless_32(a1, b1), low = carryless_32(a0, b0);
  const u64 middle = carryless_32(a1 ^ a0, b1 ^ b0) ^ high ^ low;
  return {high ^ middle >> 32, low ^ middle << 32};
}

__device__ inline Product carryless_128(Wide a, Wide b) {
  const Wide high = carryless_64(a.high, b.high), low = carryless_64(a.low, b.low);
  const Wide middle = carryless_64(a.high ^ a.low, b.high ^ b.low) ^ high ^ low;
  return {{high.high, high.low ^ middle.high}, {low.high ^ middle.low, low.low}};
}

// Reduces modulo x^128 + x^7 + x^2 + x + 1. Linear: sums of products may be reduced at once.
__device__ inline Wide reduce_gcm(Product p) {
  const Wide kept = {p.high.high << 1 | p.high.low >> 63, p.high.low << 1 | p.low.high >> 63};
  const Wide over = {p.low.high << 1 | p.low.low >> 63, p.low.low << 1};
  // over * (1 + x + x^2 + x^7); what falls off the end is x^128 and more once again.
  const u64 again = over.low << 63 ^ over.low << 62 ^ over.low << 57;
  const u64 high = over.high ^ again;
  const u64 low = over.low;
  return {kept.high ^ high ^ high >> 1 ^ high >> 2 ^ high >> 7,
          kept.low ^ low ^ (high << 63 | low >> 1) ^ (high << 62 | low >> 2) ^
              (high << 57 | low >> 7)};
}

__device__ inline Wide multiply_gcm(Wide a, Wide b) { return reduce_gcm(carryless_128(a, b)); }

// Blocks as they lie in memory (four little-endian words) and as field elements.
__device__ inline u32 swap_bytes(u32 word) { return __byte_perm(word, 0, 0x0123); }
__device__ inline Wide to_element(u32 w0, u32 w1, u32 w2, u32 w3) {
  return {(u64)swap_bytes(w0) << 32 | swap_bytes(w1), (u64)swap_bytes(w2) << 32 | swap_bytes(w3)};
}
__device__ inline Wide to_element(uint4 block) {
  return to_element(block.x, block.y, block.z, block.w);
}
__device__ inline uint4 to_block(Wide e) {
  return make_uint4(swap_bytes((u32)(e.high >> 32)), swap_bytes((u32)e.high),
                    swap_bytes((u32)(e.low >> 32)), swap_bytes((u32)e.low));
}

// Reflected polynomial of CRC-64/NVME. Source: NVM Command Set Specification 1.0, 5.2.1.3.4.
constexpr u64 CRC_POLYNOMIAL = 0x9a6c9329ac4bc9b5;

__host__ __device__ constexpr u64 crc_times_x(u64 v) {
  return v >> 1 ^ (CRC_POLYNOMIAL & (0 - (v & 1)));
}
// The inverse of crc_times_x: the polynomial's own top bit tells whether it was added.
__host__ __device__ constexpr u64 crc_over_x(u64 v) {
  return v >> 63 ? (v ^ CRC_POLYNOMIAL) << 1 | 1 : v << 1;
}

// Reduces a sum of carryless_64 products of reflected factors to 64 bits.
__device__ inline u64 reduce_crc(Wide p) {
  u64 over = p.low << 1;
#pragma unroll 1
  for (int bit = 0; bit < 64; bit++) over = crc_times_x(over);
  return (p.high << 1 | p.low >> 63) ^ over;
}
