// AES-256 of counter blocks, four at a time, and their sum with the ciphertext.
//
// The state is four columns as little-endian words. A round is 16 table reads; a column needs
//   T0(row 0) + T1(row 1) + turn16(T0(row 2) + T1(row 3)) + key
// and the key is added inside the turn, so round keys are kept turned.
//
// Counter blocks of one thread differ in few bytes: it takes every 512th block, so of the counter
// only byte 14 of the block changes while the two bytes before it stay. One byte changes one
// column in the first round, and that column one byte of each column in the second: the rest is
// computed once (Bernstein and Schwabe, "New AES software speed records", 2008).
#pragma once

#include "shared_tables.h"

constexpr u32 AES_ROUNDS = 14;

struct State {
  u32 column[4];
};

__device__ inline u32 turn16(u32 word) { return __byte_perm(word, 0, 0x1032); }

// What a thread's counter blocks share: round 2, but for the share of the changing column.
struct CounterPrefix {
  u32 first;      // column 1 after round 1, without byte 14's share
  u32 second[4];  // columns after round 2, without column 1's share
};

// Column `c` of the next round. Bytes of a column come from four different columns (ShiftRows).
__device__ inline u32 next_column(const State& s, u32 c, u32 turned_key, u32 copy) {
  const u32 turned = aes_entry<0, 2>(s.column[(c + 2) & 3], copy) ^
                     aes_entry<1, 3>(s.column[(c + 3) & 3], copy) ^ turned_key;
  return aes_entry<0, 0>(s.column[c], copy) ^ aes_entry<1, 1>(s.column[(c + 1) & 3], copy) ^
         turn16(turned);
}

__device__ inline State next_round(const State& s, uint4 turned_key, u32 copy) {
  return {{next_column(s, 0, turned_key.x, copy), next_column(s, 1, turned_key.y, copy),
           next_column(s, 2, turned_key.z, copy), next_column(s, 3, turned_key.w, copy)}};
}

// The last round has no MixColumns: bytes 1 of T0 and 2 of T1 are the S-box alone.
__device__ inline u32 last_column(const State& s, u32 c, u32 copy) {
  const u32 rows01 = __byte_perm(aes_entry<0, 0>(s.column[c], copy),
                                 aes_entry<0, 1>(s.column[(c + 1) & 3], copy), 0x0051);
  const u32 rows23 = __byte_perm(aes_entry<0, 2>(s.column[(c + 2) & 3], copy),
                                 aes_entry<0, 3>(s.column[(c + 3) & 3], copy), 0x5100);
  return __byte_perm(rows01, rows23, 0x7610);
}

// `counter` is the last word of the block as a number; its byte 14 is left out.
__device__ inline CounterPrefix prepare_counter(const u32* nonce, u32 counter, u32 copy) {
  const u32* keys = shared_at<Scratch>(SCRATCH)->round_keys;
  const u32 last = swap_bytes(counter & 0xffff00ff);
  const State s = {{nonce[0] ^ keys[0], nonce[1] ^ keys[1], nonce[2] ^ keys[2], last ^ keys[3]}};
  State first;
  for (u32 c = 0; c < 4; c++) first.column[c] = next_column(s, c, keys[4 + c], copy);
  // Take byte 14's share (row 2 of column 3, which goes to column 1) out of column 1 …
  CounterPrefix prefix;
  prefix.first = first.column[1] ^ turn16(aes_entry<0, 2>(s.column[3], copy));
  // … and column 1's share out of round 2.
  State second;
  for (u32 c = 0; c < 4; c++) second.column[c] = next_column(first, c, keys[8 + c], copy);
  const u32 changing = first.column[1];
  prefix.second[1] = second.column[1] ^ aes_entry<0, 0>(changing, copy);
  prefix.second[0] = second.column[0] ^ aes_entry<1, 1>(changing, copy);
  prefix.second[3] = second.column[3] ^ turn16(aes_entry<0, 2>(changing, copy));
  prefix.second[2] = second.column[2] ^ turn16(aes_entry<1, 3>(changing, copy));
  return prefix;
}

// The state after two rounds of the block whose byte 14 is bits 8 to 15 of `counter`; `key_14` is
// the round key's share of that byte, at the same bits.
__device__ inline State after_two_rounds(const CounterPrefix& prefix, u32 counter, u32 key_14,
                                         u32 copy) {
  const u32 changing =
      prefix.first ^ turn16(aes_entry<0, 1>(counter ^ key_14, copy));
  return {{prefix.second[0] ^ aes_entry<1, 1>(changing, copy),
           prefix.second[1] ^ aes_entry<0, 0>(changing, copy),
           prefix.second[2] ^ turn16(aes_entry<1, 3>(changing, copy)),
           prefix.second[3] ^ turn16(aes_entry<0, 2>(changing, copy))}};
}

// The key stream of `count` blocks whose counters lie THREADS apart.
template <u32 count>
__device__ inline void key_stream(const CounterPrefix& prefix, u32 counter, u32 copy,
                                  State (&state)[count]) {
  const Scratch* scratch = shared_at<Scratch>(SCRATCH);
  const u32 key_14 = __byte_perm(scratch->round_keys[3], 0, 0x4424);
#pragma unroll
  for (u32 i = 0; i < count; i++)
    state[i] = after_two_rounds(prefix, counter + i * THREADS, key_14, copy);
  const uint4* keys = reinterpret_cast<const uint4*>(scratch->round_keys);
#pragma unroll
  for (u32 round = 3; round < AES_ROUNDS; round++) {
    const uint4 key = keys[round];
#pragma unroll
    for (u32 i = 0; i < count; i++) state[i] = next_round(state[i], key, copy);
  }
  const uint4 key = keys[AES_ROUNDS];
#pragma unroll
  for (u32 i = 0; i < count; i++) {
    const State s = state[i];
    state[i] = {{last_column(s, 0, copy) ^ key.x, last_column(s, 1, copy) ^ key.y,
                 last_column(s, 2, copy) ^ key.z, last_column(s, 3, copy) ^ key.w}};
  }
}
