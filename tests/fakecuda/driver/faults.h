// Faults, delays and the log of calls: what a test asks of the stand-in, by environment.
//
//   FAKECUDA_FAIL=name:code:nth[,…]  the nth call of `name` returns `code`. Versions (`_v2`) are left
//                                    out of names. `kernel` means the nth kernel to run, and `copy`
//                                    the nth copy: those fail when they run, not when they are queued.
//   FAKECUDA_DELAY_US=n              every operation of a stream takes that much longer
//   FAKECUDA_HOLD=path               a kernel waits while the file exists; `path`.reached is made
//                                    when one begins to wait
//   FAKECUDA_LOG=path                one line per call: "pid name device"; device is - without context
//   FAKECUDA_DEVICES=n  CUDA_VISIBLE_DEVICES=i,j  FAKECUDA_BROKEN=i,j  FAKECUDA_EXCLUSIVE=i,j  FAKECUDA_MEM_MB=n
//                                    (device.h)
//   FAKECUDA_OPEN=1                  device memory is not closed to the host (gate.h)
#pragma once

#include <string>

#include "cuda_types.h"

namespace fake {

// Returns the code that this call must fail with, or CUDA_SUCCESS. A code that is sticky on real
// hardware is from then on what every call of this process returns.
CUresult fault(const char* name);

// What every entry point does first.
CUresult enter(const char* name);

// The sticky error of this process, or CUDA_SUCCESS.
CUresult sticky();

void delay();
void hold_kernel();

std::string environment(const char* name);

}  // namespace fake

#define FAKE_ENTER                                                     \
  do {                                                                 \
    if (CUresult injected = fake::enter(__func__)) return injected;    \
  } while (0)
