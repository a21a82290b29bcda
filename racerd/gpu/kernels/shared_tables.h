// The lookup tables in shared memory, and how a thread reads them.
//
// Shared memory has 32 banks of four bytes, and a lane that always reads from its own bank never
// waits for another: so every table is replicated, a copy for each lane that reads at once (32
// lanes for 4-byte entries, 16 for 8, 8 for 16). Reads then take the same time whatever the
// index, which makes them fast and, in this respect, constant in time.
//
// An entry lies at  digit << k | position << j | copy,  with digit and copy each inside one byte:
// a single PRMT instruction puts both in place, and the position is the load's immediate offset.
//
//   offset       bytes    pass     entry                           address
//   0            64 KiB   verify   GHASH: 16 digits x 32 nibbles   digit << 12 | nibble << 7 | copy << 4
//   0            64 KiB   decrypt  AES: 256 bytes x 2 tables       byte << 8 | table << 7 | copy << 2
//   64 KiB       32 KiB   verify   CRC: 16 digits x 16 nibbles     digit << 11 | nibble << 7 | copy << 3
//   96 KiB       < 1 KiB  both     Scratch
//
// The AES table overwrites the GHASH table, which depends on the key. The whole fits twice in the
// 228 KiB of sm_90 and once in the 100 KiB of sm_86, sm_89 and sm_120.
#pragma once

#include "tables.h"

constexpr u32 GHASH_TABLE = 0;
constexpr u32 AES_TABLE = 0;
constexpr u32 CRC_TABLE = 64 << 10;
constexpr u32 SCRATCH = 96 << 10;

struct Scratch {
  FrameJob job;
  u32 round_keys[ROUND_KEY_WORDS];
  u32 hash_sum[8];  // GHASH before reduction, most significant word first
  u32 crc_sum[4];   // CRC before reduction
  u32 verdict;
};

constexpr u32 SHARED_BYTES = SCRATCH + 1024;
static_assert(sizeof(Scratch) <= 1024, "SHARED_BYTES is what the host asks for");

extern __shared__ __align__(1024) u8 shared_bytes[];

template <class T>
__device__ inline T* shared_at(u32 offset) {
  return reinterpret_cast<T*>(shared_bytes + offset);
}

// Byte `n` of `word` at bits 8 to 15, over the low byte of `copy`.
template <u32 n>
__device__ inline u32 address(u32 word, u32 copy) {
  return __byte_perm(word, copy, 0x5504 | n << 4);
}

// ---- GHASH: multiplication by H^THREADS ----

// Thread t makes entry (nibble t / 16, digit t % 16): the sum of up to four elements of the basis.
__device__ inline void fill_ghash_table(const uint4* basis) {
  static_assert(THREADS == 32 * 16, "a thread for each entry");
  const u32 nibble = threadIdx.x >> 4, digit = threadIdx.x & 15;
  uint4 sum = make_uint4(0, 0, 0, 0);
  for (u32 bit = 0; bit < 4; bit++) {
    const uint4 term = basis[4 * nibble + bit];
    const u32 mask = 0 - (digit >> (3 - bit) & 1);
    sum.x ^= term.x & mask;
    sum.y ^= term.y & mask;
    sum.z ^= term.z & mask;
    sum.w ^= term.w & mask;
  }
  for (u32 i = 0; i < 8; i++) {
    const u32 copy = (i + threadIdx.x) & 7;  // Neighbours write to different banks.
    *shared_at<uint4>(GHASH_TABLE + (digit << 12 | nibble << 7 | copy << 4)) = sum;
  }
}

template <u32 nibble, u32 n>
__device__ inline void add_ghash_entry(uint4& sum, u32 digits, u32 copy) {
  const uint4 entry = *shared_at<const uint4>(GHASH_TABLE + nibble * 128 + address<n>(digits, copy));
  sum.x ^= entry.x;
  sum.y ^= entry.y;
  sum.z ^= entry.z;
  sum.w ^= entry.w;
}

template <u32 word>
__device__ inline void add_ghash_word(uint4& sum, u32 value, u32 copy) {
  const u32 high = value & 0xf0f0f0f0, low = value << 4 & 0xf0f0f0f0;
  add_ghash_entry<8 * word + 0, 0>(sum, high, copy);
  add_ghash_entry<8 * word + 1, 0>(sum, low, copy);
  add_ghash_entry<8 * word + 2, 1>(sum, high, copy);
  add_ghash_entry<8 * word + 3, 1>(sum, low, copy);
  add_ghash_entry<8 * word + 4, 2>(sum, high, copy);
  add_ghash_entry<8 * word + 5, 2>(sum, low, copy);
  add_ghash_entry<8 * word + 6, 3>(sum, high, copy);
  add_ghash_entry<8 * word + 7, 3>(sum, low, copy);
}

// Returns hash * H^THREADS + block.
__device__ inline uint4 ghash_step(uint4 hash, uint4 block) {
  const u32 copy = (threadIdx.x & 7) << 4;
  add_ghash_word<0>(block, hash.x, copy);
  add_ghash_word<1>(block, hash.y, copy);
  add_ghash_word<2>(block, hash.z, copy);
  add_ghash_word<3>(block, hash.w, copy);
  return block;
}

// ---- CRC: multiplication by x^CRC_STRIDE_BITS ----

// Threads 2e and 2e + 1 make entry e = (nibble e / 16, digit e % 16), eight copies each.
__device__ inline void fill_crc_table() {
  static_assert(THREADS == 2 * 16 * 16, "two threads for each entry");
  const u32 nibble = threadIdx.x >> 5, digit = threadIdx.x >> 1 & 15;
  u64 sum = 0;
  for (u32 bit = 0; bit < 4; bit++)
    sum ^= CRC_STRIDE.basis[4 * nibble + bit] & (0 - (u64)(digit >> bit & 1));
  for (u32 i = 0; i < 8; i++) {
    const u32 copy = ((i + (threadIdx.x >> 1)) & 7) + 8 * (threadIdx.x & 1);
    *shared_at<u64>(CRC_TABLE + (digit << 11 | nibble << 7 | copy << 3)) = sum;
  }
}

template <u32 nibble, u32 n>
__device__ inline void add_crc_entry(uint2& sum, u32 digits, u32 copy) {
  const uint2 entry = *shared_at<const uint2>(CRC_TABLE + nibble * 128 + address<n>(digits, copy));
  sum.x ^= entry.x;
  sum.y ^= entry.y;
}

template <u32 word>
__device__ inline void add_crc_word(uint2& sum, u32 value, u32 copy) {
  const u32 low = value << 3 & 0x78787878, high = value >> 1 & 0x78787878;
  add_crc_entry<8 * word + 0, 0>(sum, low, copy);
  add_crc_entry<8 * word + 1, 0>(sum, high, copy);
  add_crc_entry<8 * word + 2, 1>(sum, low, copy);
  add_crc_entry<8 * word + 3, 1>(sum, high, copy);
  add_crc_entry<8 * word + 4, 2>(sum, low, copy);
  add_crc_entry<8 * word + 5, 2>(sum, high, copy);
  add_crc_entry<8 * word + 6, 3>(sum, low, copy);
  add_crc_entry<8 * word + 7, 3>(sum, high, copy);
}

// Returns crc * x^CRC_STRIDE_BITS + block. Words are little-endian, as the register is.
__device__ inline uint2 crc_step(uint2 crc, uint2 block) {
  const u32 copy = (threadIdx.x & 15) << 3;
  add_crc_word<0>(block, crc.x, copy);
  add_crc_word<1>(block, crc.y, copy);
  return block;
}

// ---- AES: SubBytes and MixColumns of one byte ----

// Row 0 and row 1 of a column; rows 2 and 3 are the same words turned by 16 bits.
__device__ inline void fill_aes_table() {
  const u32 lane = threadIdx.x & 31;
  for (u32 byte = threadIdx.x >> 5; byte < 256; byte += THREADS / 32) {
    const u32 s = SBOX.of[byte], twice = s << 1 ^ (s >> 7) * 0x11b, thrice = twice ^ s;
    *shared_at<u32>(AES_TABLE + (byte << 8 | lane << 2)) = twice | s << 8 | s << 16 | thrice << 24;
    *shared_at<u32>(AES_TABLE + (byte << 8 | 128 | lane << 2)) =
        thrice | twice << 8 | s << 16 | s << 24;
  }
}

__device__ inline u32 aes_copy() { return (threadIdx.x & 31) << 2; }

// The entry of byte `n` of `word` in table 0 or 1.
template <u32 table, u32 n>
__device__ inline u32 aes_entry(u32 word, u32 copy) {
  return *shared_at<const u32>(AES_TABLE + table * 128 + address<n>(word, copy));
}
