// cuda.h with the names as they are exported (`cuMemAlloc_v2`), not as they are written.
#pragma once

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#define FAKE_API extern "C" __attribute__((visibility("default")))
