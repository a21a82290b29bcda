// Constants that the compiler computes: AES's S-box, and powers of x modulo the CRC's polynomial.
#pragma once

#include "field.h"

struct SBox {
  u8 of[256];
};

// FIPS 197, 5.1.1: the inverse in GF(2^8), then an affine map. `p` runs through all non-zero
// elements as powers of 3 while `q` runs through their inverses.
__host__ __device__ constexpr SBox make_sbox() {
  SBox box = {};
  u8 p = 1, q = 1;
  do {
    p = (u8)(p ^ p << 1 ^ (p & 0x80 ? 0x1b : 0));
    q = (u8)(q ^ q << 1);
    q = (u8)(q ^ q << 2);
    q = (u8)(q ^ q << 4);
    if (q & 0x80) q ^= 0x09;
    const u8 a = (u8)(q << 1 | q >> 7), b = (u8)(q << 2 | q >> 6), c = (u8)(q << 3 | q >> 5),
             d = (u8)(q << 4 | q >> 4);
    box.of[p] = (u8)(q ^ a ^ b ^ c ^ d ^ 0x63);
  } while (p != 1);
  box.of[0] = 0x63;
  return box;
}

// The factor by which a thread's CRC register advances from one of its blocks to the next.
constexpr u32 CRC_STRIDE_BITS = 128 * THREADS;

struct CrcStride {
  u64 basis[64];  // register bit b, times x^CRC_STRIDE_BITS
  u64 start;      // becomes the initial register (all ones) after one multiplication
};

__host__ __device__ constexpr CrcStride make_crc_stride() {
  CrcStride stride = {};
  u64 v = 1ull << 63, start = ~0ull;  // v = x^0
  for (u32 i = 0; i < CRC_STRIDE_BITS; i++) {
    v = crc_times_x(v);
    start = crc_over_x(start);
  }
  for (int power = 0; power < 64; power++) {  // Register bit b stands for x^(63 - b).
    stride.basis[63 - power] = v;
    v = crc_times_x(v);
  }
  stride.start = start;
  return stride;
}

struct CrcShifts {
  u64 by_words[2 * THREADS];  // by_words[i] = x^(64 * (i + 1))
};

__host__ __device__ constexpr CrcShifts make_crc_shifts() {
  CrcShifts shifts = {};
  u64 v = 1ull << 63;
  for (u32 i = 0; i < 2 * THREADS; i++) {
    for (int bit = 0; bit < 64; bit++) v = crc_times_x(v);
    shifts.by_words[i] = v;
  }
  return shifts;
}

__device__ constexpr SBox SBOX = make_sbox();
__device__ constexpr CrcStride CRC_STRIDE = make_crc_stride();
__device__ constexpr CrcShifts CRC_SHIFTS = make_crc_shifts();
