// Keeps host code out of device memory.
//
// Device memory is ordinary memory here, so code that touched a device pointer by mistake would go
// unnoticed. Behind the gate it faults (and a system call that is handed one gets EFAULT). The
// driver opens the gate while it copies or runs a kernel: for its own threads only where the CPU
// has protection keys, else for everybody as long as any operation runs.
#pragma once

#include <cstddef>

namespace fake {

// Puts mapped memory behind the gate; `protection` is what it allows when open.
void close_off(void* start, std::size_t bytes, int protection);

// Forgets memory that is about to be unmapped.
void forget(void* start);

// While one of these lives, this thread (and those it starts) may touch device memory.
class GateOpening {
 public:
  GateOpening();
  ~GateOpening();
  GateOpening(const GateOpening&) = delete;
};

}  // namespace fake
