// What the host hands to the kernels and what it gets back.
//
// Plain structures with fixed layouts: `racerd/gpu/layout.py` packs the same bytes, and a test
// compares both. Words of keys and hashes keep the order in which their bytes lie in memory, so
// that nothing is byte-swapped on the way.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// Threads of a block: also the stride of GHASH and of the CRC, in 16-byte blocks.
constexpr u32 THREADS = 512;

constexpr u32 ROUND_KEY_WORDS = 60;  // AES-256: 14 rounds and the first addition

// Secret of one record. Wiped by the host when the batch is done.
struct RecordKey {
  u32 round_keys[ROUND_KEY_WORDS];
  u32 hash_key[4];  // H = E(0)
};

// Derived from one RecordKey by `racer_prepare_records`. As secret as the key; wiped with it.
struct RecordTables {
  uint4 stride_basis[128];  // H^THREADS * x^k for k = 0..127
  uint4 powers[THREADS];    // powers[i] = H^(i + 1)
};

// One frame to open. Addresses are of the device.
struct FrameJob {
  u64 source;       // ciphertext, 16-byte aligned
  u64 destination;  // where plaintext byte `skip` of the frame goes; any alignment
  u64 aad;          // 16-byte aligned, zero padded to whole blocks
  u64 crc;          // CRC-64/NVME that the ciphertext must have
  u32 length;       // bytes of the frame
  u32 skip;         // bytes of plaintext in front that are not wanted
  u32 take;         // bytes of plaintext that are wanted
  u32 aad_bytes;
  u32 record;          // which RecordKey and RecordTables
  u32 nonce[3];        // 96 bits; the counter starts at 2
  u32 masked_tag[4];   // tag xor E(nonce, 1): what GHASH must come to
};

static_assert(sizeof(RecordKey) == 256, "packed by the host");
static_assert(sizeof(RecordTables) == 10240, "sized by the host");
static_assert(sizeof(FrameJob) == 80, "packed by the host");

// One word per frame. Memory that no kernel wrote (zero) and anything else unknown is a failure.
enum Verdict : u32 {
  VERDICT_NONE = 0,
  VERDICT_OK = 0x600d600d,
  VERDICT_CRC = 0x0bad0c2c,
  VERDICT_TAG = 0x0bad07a6,
};
