// racerd's kernels, compiled for the host: the "module" that the stand-in driver loads.
#include "cuda_host.h"

#include "open_frames.cu"

#include "kernel_table.h"

thread_local u8 shared_bytes[SHARED_BYTES];

extern "C" fake::KernelTable fake_kernel_table() {
  static const fake::Kernel kernels[] = {
      fake::Adapter<racer_prepare_records>::kernel("racer_prepare_records"),
      fake::Adapter<racer_open_frames>::kernel("racer_open_frames"),
  };
  return {kernels, sizeof kernels / sizeof *kernels};
}
