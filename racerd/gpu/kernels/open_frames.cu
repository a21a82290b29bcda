// Opens sealed frames: CRC-64/NVME and AES-256-GCM, a block of threads for each frame.
//
// Verify first, then decrypt. A first pass over the ciphertext takes its CRC and its GHASH; only
// if both are right does a second pass read it again, decrypt it and write the destination. So the
// destination never holds a byte of a frame that was not verified; that of a frame that failed is
// zeroed. What the host may rely on is the verdict word, written last.
//
// Launch: THREADS threads a block, SHARED_BYTES of dynamic shared memory (racer_open_frames only),
// one block per record or per frame. Kernels of one batch run in one stream, in this order.
// Sources: NIST SP 800-38D (GCM), FIPS 197 (AES), NVM Command Set Specification (CRC-64).
#include "aes.h"

// ---- Powers of H ----

// For each record: H^1 … H^THREADS, and H^THREADS times each power of x up to x^127.
extern "C" __global__ void __launch_bounds__(THREADS)
    racer_prepare_records(const RecordKey* keys, RecordTables* tables) {
  __shared__ Wide powers[THREADS];
  const u32* hash_key = keys[blockIdx.x].hash_key;
  RecordTables* table = tables + blockIdx.x;
  const u32 t = threadIdx.x;
  if (t == 0) powers[0] = to_element(hash_key[0], hash_key[1], hash_key[2], hash_key[3]);
  for (u32 known = 1; known < THREADS; known *= 2) {
    __syncthreads();
    if (t >= known && t < 2 * known)
      powers[t] = multiply_gcm(powers[t - known], powers[known - 1]);
  }
  __syncthreads();
  table->powers[t] = to_block(powers[t]);
  if (t < 128) {
    const Wide x_to_t = t < 64 ? Wide{1ull << (63 - t), 0} : Wide{0, 1ull << (127 - t)};
    table->stride_basis[t] = to_block(multiply_gcm(powers[THREADS - 1], x_to_t));
  }
  __syncthreads();
  powers[t] = {0, 0};
}

// ---- First pass: is the frame what it should be? ----

// GHASH takes the blocks: AAD, ciphertext, the cut block if any, the lengths. Counted from the
// end, thread t takes blocks t, t + THREADS, … by Horner's rule in H^THREADS, and at last brings
// its sum to its place by H^(t + 1).
struct BlockCounts {
  u32 aad, whole, cut;  // whole and cut: of the ciphertext; cut is 0 or 1
};

__device__ inline const uint4* block_at(u64 base, u32 index) {
  return reinterpret_cast<const uint4*>(base) + index;
}

// The last block of a frame whose length is no multiple of 16, zero padded.
__device__ inline uint4 cut_block(u64 source, u32 length) {
  const u8* tail = reinterpret_cast<const u8*>(source) + (length & ~15u);
  u64 low = 0, high = 0;
#pragma unroll 1
  for (u32 i = 0; i < (length & 15); i++) {
    const u64 byte = (u64)tail[i] << 8 * (i & 7);
    if (i < 8)
      low |= byte;
    else
      high |= byte;
  }
  return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
}

__device__ inline uint4 lengths_block(const FrameJob& job) {
  return to_block({(u64)job.aad_bytes * 8, (u64)job.length * 8});
}

__device__ inline void add_to_sum(u32* sum, u32 share) {
  const u32 together = __reduce_xor_sync(0xffffffff, share);
  if ((threadIdx.x & 31) == 0) atomicXor(sum, together);
}

__device__ inline void add_words(u32* sums, u64 share) {
  add_to_sum(sums, (u32)(share >> 32));
  add_to_sum(sums + 1, (u32)share);
}

// Adds this thread's share of GHASH and CRC to the sums in Scratch.
__device__ inline void hash_share(const FrameJob& job, const RecordTables& tables) {
  const u32 t = threadIdx.x;
  const BlockCounts count = {(job.aad_bytes + 15) / 16, job.length / 16, (job.length & 15) != 0};
  const u32 behind = 1 + count.cut;  // blocks behind the last whole one
  const u32 first_whole = behind + count.whole - 1, first = first_whole + count.aad;
  uint4 hash = make_uint4(0, 0, 0, 0);
  // From here `at` counts blocks from the end; it goes down by THREADS, past zero to "negative".
  int at = t <= first ? (int)(first - (first - t) % THREADS) : -1;
  for (; at > (int)first_whole; at -= THREADS)
    hash = ghash_step(hash, __ldg(block_at(job.aad, first - at)));

  // Even and odd 8-byte words have a CRC register each. The register starts as all ones: the
  // thread of the first block starts with what one multiplication turns into that.
  uint2 even = make_uint2(0, 0), odd = make_uint2(0, 0);
  if (at == (int)first_whole && count.whole)
    even = make_uint2((u32)CRC_STRIDE.start, (u32)(CRC_STRIDE.start >> 32));
#pragma unroll 1
  for (const uint4* next = block_at(job.source, first_whole - at); at >= (int)behind;
       at -= THREADS, next += THREADS) {
    const uint4 block = __ldg(next);
    hash = ghash_step(hash, block);
    even = crc_step(even, make_uint2(block.x, block.y));
    odd = crc_step(odd, make_uint2(block.z, block.w));
  }

  if (at >= 0) hash = ghash_step(hash, at == 0 ? lengths_block(job) : cut_block(job.source, job.length));
  const Product product = carryless_128(to_element(hash), to_element(tables.powers[t]));
  u32* hash_sum = shared_at<Scratch>(SCRATCH)->hash_sum;
  add_words(hash_sum, product.high.high);
  add_words(hash_sum + 2, product.high.low);
  add_words(hash_sum + 4, product.low.high);
  add_words(hash_sum + 6, product.low.low);

  // This thread's last whole block has so many whole blocks behind it.
  const u32 rest = t >= behind ? t - behind : t + THREADS - behind;
  const Wide crc = carryless_64((u64)even.y << 32 | even.x, CRC_SHIFTS.by_words[2 * rest + 1]) ^
                   carryless_64((u64)odd.y << 32 | odd.x, CRC_SHIFTS.by_words[2 * rest]);
  u32* crc_sum = shared_at<Scratch>(SCRATCH)->crc_sum;
  add_words(crc_sum, crc.high);
  add_words(crc_sum + 2, crc.low);
}

// Finishes the CRC: the bytes of the cut block, one at a time.
__device__ inline bool crc_is_right(const FrameJob& job, const u32* sum) {
  u64 crc = job.length < 16 ? ~0ull
                            : reduce_crc({(u64)sum[0] << 32 | sum[1], (u64)sum[2] << 32 | sum[3]});
  const u8* tail = reinterpret_cast<const u8*>(job.source) + (job.length & ~15u);
#pragma unroll 1
  for (u32 i = 0; i < (job.length & 15); i++) {
    crc ^= tail[i];
#pragma unroll 1
    for (u32 bit = 0; bit < 8; bit++) crc = crc_times_x(crc);
  }
  return (crc ^ ~0ull) == job.crc;
}

// Compares all 16 bytes whatever they are: how long it takes tells nothing about the tag.
__device__ inline bool tag_is_right(const FrameJob& job, const u32* sum) {
  const Product product = {{(u64)sum[0] << 32 | sum[1], (u64)sum[2] << 32 | sum[3]},
                           {(u64)sum[4] << 32 | sum[5], (u64)sum[6] << 32 | sum[7]}};
  const uint4 hash = to_block(reduce_gcm(product));
  const u32 difference = (hash.x ^ job.masked_tag[0]) | (hash.y ^ job.masked_tag[1]) |
                         (hash.z ^ job.masked_tag[2]) | (hash.w ^ job.masked_tag[3]);
  return difference == 0;
}

__device__ inline u32 verify(const FrameJob& job, const RecordTables& tables) {
  Scratch* scratch = shared_at<Scratch>(SCRATCH);
  fill_ghash_table(tables.stride_basis);
  fill_crc_table();
  if (threadIdx.x < 8) scratch->hash_sum[threadIdx.x] = 0;
  if (threadIdx.x < 4) scratch->crc_sum[threadIdx.x] = 0;
  __syncthreads();
  hash_share(job, tables);
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool crc = crc_is_right(job, scratch->crc_sum);
    const bool tag = tag_is_right(job, scratch->hash_sum);
    scratch->verdict = !crc ? VERDICT_CRC : !tag ? VERDICT_TAG : VERDICT_OK;
  }
  __syncthreads();
  return scratch->verdict;
}

// ---- Second pass: decrypt what is wanted ----

// Plaintext of a whole block, in the widest units that the address allows.
__device__ inline void store_whole(u64 to, uint4 plain) {
  if ((to & 15) == 0) {
    *reinterpret_cast<uint4*>(to) = plain;
  } else if ((to & 3) == 0) {
    u32* words = reinterpret_cast<u32*>(to);
    words[0] = plain.x;
    words[1] = plain.y;
    words[2] = plain.z;
    words[3] = plain.w;
  } else {
    u8* bytes = reinterpret_cast<u8*>(to);
    const u32 words[4] = {plain.x, plain.y, plain.z, plain.w};
#pragma unroll
    for (u32 i = 0; i < 16; i++) bytes[i] = (u8)(words[i / 4] >> 8 * (i & 3));
  }
}

// Bytes [from, until) of a block.
__device__ inline void store_part(u64 to, uint4 plain, u32 from, u32 until) {
  u8* bytes = reinterpret_cast<u8*>(to);
#pragma unroll 1
  for (u32 i = from; i < until; i++) {
    const u32 word = i < 8 ? (i < 4 ? plain.x : plain.y) : (i < 12 ? plain.z : plain.w);
    bytes[i] = (u8)(word >> 8 * (i & 3));
  }
}

__device__ inline uint4 add(const State& stream, uint4 cipher) {
  return make_uint4(stream.column[0] ^ cipher.x, stream.column[1] ^ cipher.y,
                    stream.column[2] ^ cipher.z, stream.column[3] ^ cipher.w);
}

constexpr u32 BLOCKS_AT_ONCE = 4;

// Blocks [first, stop), all whole and wanted whole. `to`: where byte 0 of the frame goes.
__device__ inline void decrypt_whole(const FrameJob& job, u64 to, u32 first, u32 stop) {
  const u32 copy = aes_copy();
  const u64 source = job.source;
  u32 block = first + threadIdx.x;
  while (block < stop) {
    // The counter's upper half stays until `turn`: up to there one prefix serves.
    const u32 turn = ((block + 2) | 0xffff) - 1, until = stop < turn ? stop : turn;
    const u32 next = block + (until - block + THREADS - 1) / THREADS * THREADS;
    const CounterPrefix prefix = prepare_counter(job.nonce, block + 2, copy);
#pragma unroll 1
    for (; block < until; block += BLOCKS_AT_ONCE * THREADS) {
      State stream[BLOCKS_AT_ONCE];
      key_stream(prefix, block + 2, copy, stream);
#pragma unroll
      for (u32 i = 0; i < BLOCKS_AT_ONCE; i++) {
        const u32 b = block + i * THREADS;
        if (b < until) store_whole(to + 16ull * b, add(stream[i], __ldg(block_at(source, b))));
      }
    }
    block = next;
  }
}

// The wanted bytes of one block that is cut by the window or by the frame's end.
__device__ inline void decrypt_cut(const FrameJob& job, u64 to, u32 block) {
  const u32 copy = aes_copy(), start = 16 * block, stop = job.skip + job.take;
  const CounterPrefix prefix = prepare_counter(job.nonce, block + 2, copy);
  State stream[1];
  key_stream(prefix, block + 2, copy, stream);
  const uint4 cipher = start + 16 <= job.length ? __ldg(block_at(job.source, block))
                                                : cut_block(job.source, job.length);
  store_part(to + start, add(stream[0], cipher), start < job.skip ? job.skip - start : 0,
             start + 16 <= stop ? 16 : stop - start);
}

__device__ inline void decrypt(const FrameJob& job) {
  const u32 stop = job.skip + job.take;
  const u64 to = job.destination - job.skip;
  decrypt_whole(job, to, (job.skip + 15) / 16, stop / 16);
  // Thread 0 has the block that the window's start cuts, thread 1 the one that its end cuts.
  const u32 edge = threadIdx.x == 0 ? job.skip : stop;
  const bool same = threadIdx.x == 1 && (job.skip & 15) && job.skip / 16 == stop / 16;
  if (threadIdx.x < 2 && (edge & 15) && !same && job.take) decrypt_cut(job, to, edge / 16);
}

__device__ inline void wipe(const FrameJob& job) {
  u8* to = reinterpret_cast<u8*>(job.destination);
  for (u32 i = threadIdx.x; i < job.take; i += THREADS) to[i] = 0;
}

__device__ inline void load_round_keys(const RecordKey& key) {
  const u32 t = threadIdx.x;
  if (t >= ROUND_KEY_WORDS) return;
  const bool inner = t >= 4 && t < ROUND_KEY_WORDS - 4;
  shared_at<Scratch>(SCRATCH)->round_keys[t] =
      inner ? turn16(key.round_keys[t]) : key.round_keys[t];
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    racer_open_frames(const FrameJob* jobs, const RecordKey* keys, const RecordTables* tables,
                      u32* verdicts) {
  if (threadIdx.x == 0) shared_at<Scratch>(SCRATCH)->job = jobs[blockIdx.x];
  __syncthreads();
  const FrameJob& job = shared_at<Scratch>(SCRATCH)->job;
  load_round_keys(keys[job.record]);
  const u32 verdict = verify(job, tables[job.record]);
  if (verdict == VERDICT_OK) {
    fill_aes_table();
    __syncthreads();
    decrypt(job);
  } else {
    wipe(job);
  }
  __syncthreads();
  // The last to leave shared memory is no key.
  if (threadIdx.x < ROUND_KEY_WORDS) shared_at<Scratch>(SCRATCH)->round_keys[threadIdx.x] = 0;
  if (threadIdx.x == 0) verdicts[blockIdx.x] = verdict;
}
