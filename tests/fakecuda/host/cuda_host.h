// CUDA C++ for g++: include this in front of a .cu file to compile its kernels for the host.
//
// The dialect's keywords, vector types and intrinsics, as far as racerd's kernels use them. Threads
// of a block are fibres (fibres.h) on one thread of the system, so `__shared__` is thread_local.
// What this cannot show: races, the memory model, misaligned vector accesses, bank conflicts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "fibres.h"

#define __global__
#define __device__ static
#define __host__
#define __constant__ static
#define __shared__ thread_local
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#define threadIdx (fake::this_fibre()->thread)
#define blockIdx (fake::this_fibre()->block->index)
#define __syncthreads() fake::this_fibre()->block->barrier.wait()

template <class T>
inline T __ldg(const T* address) {
  // The GPU faults on a vector that is not aligned to its size; the host would not.
  if (reinterpret_cast<std::uintptr_t>(address) % alignof(T)) __builtin_trap();
  return *address;
}

// Byte i of the result is byte `selector >> 4 * i & 7` of the eight bytes of y:x.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; i++)
    result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}

inline unsigned __reduce_xor_sync(unsigned, unsigned value) {
  return fake::this_fibre()->warp()->reduce_xor(value);
}

inline unsigned atomicXor(unsigned* address, unsigned value) {
  return __atomic_fetch_xor(address, value, __ATOMIC_RELAXED);
}
