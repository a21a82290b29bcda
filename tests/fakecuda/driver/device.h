// Devices and the contexts on them.
//
// FAKECUDA_DEVICES devices exist; CUDA_VISIBLE_DEVICES says which of them this process sees, in
// which order, so that one GPU can have different ordinals in two processes. Those in
// FAKECUDA_BROKEN are listed but cannot be used: a context on one, or memory, is refused.
#pragma once

#include <atomic>
#include <cstddef>

#include "faults.h"

struct CUctx_st {
  int device;  // physical
  int retained = 0;
};

namespace fake {

constexpr std::size_t GRANULARITY = 2u << 20;

int visible_count();
int physical(int ordinal);  // -1 where there is no such device
int ordinal(int physical);  // -1 where this process does not see it
bool is_broken(int physical);
bool is_exclusive(int physical);  // FAKECUDA_EXCLUSIVE: compute mode Exclusive_Process
void fill_uuid(int physical, CUuuid* uuid);

CUcontext primary_context(int physical);

// The physical device of this thread's current context, or -1.
int current_device();
CUcontext current_context();
void set_current(CUcontext context);
void push_current(CUcontext context);
CUresult pop_current(CUcontext* context);

// CUDA_ERROR_INVALID_CONTEXT without a context, or the sticky error.
CUresult check_context();

// Device memory, bounded by FAKECUDA_MEM_MB (4 GiB) for each device of a process.
std::size_t memory_total();
std::size_t memory_used(int physical);
bool charge(int physical, std::size_t bytes);
void refund(int physical, std::size_t bytes);

}  // namespace fake

#define FAKE_CONTEXT                                                 \
  do {                                                               \
    if (CUresult problem = fake::check_context()) return problem;    \
  } while (0)
