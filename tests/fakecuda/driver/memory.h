// Device memory: physical allocations, each a memfd, and where they are mapped.
//
// A memfd's name says which device it belongs to ("fakegpu-2"), so that another process that
// imports it learns that too. Host memory that was registered or allocated as pinned is known by
// its range.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device.h"

namespace fake {

// Physical memory, counted by handles and mappings. Handles are never re-used: one that was
// released is refused for ever.
CUresult create_physical(int device, std::size_t bytes, CUmemGenericAllocationHandle* handle);
CUresult import_physical(int descriptor, CUmemGenericAllocationHandle* handle);
CUresult export_physical(CUmemGenericAllocationHandle handle, int* descriptor);
CUresult release_physical(CUmemGenericAllocationHandle handle);
int device_of(CUmemGenericAllocationHandle handle);  // physical device, or -1

CUresult reserve_addresses(std::size_t bytes, CUdeviceptr* start);
CUresult free_addresses(CUdeviceptr start, std::size_t bytes);
CUresult map_physical(CUdeviceptr start, std::size_t bytes, CUmemGenericAllocationHandle handle);
CUresult unmap(CUdeviceptr start, std::size_t bytes);
CUresult set_access(CUdeviceptr start, std::size_t bytes, int protection);

// Plain allocations: created, mapped and made accessible at once.
CUresult allocate(std::size_t bytes, CUdeviceptr* start);
CUresult deallocate(CUdeviceptr start);

CUresult pin_new(std::size_t bytes, void** start);
CUresult unpin_new(void* start);
CUresult pin(void* start, std::size_t bytes);
CUresult unpin(void* start);

enum class Kind { UNKNOWN, DEVICE, PINNED };

// What [start, start + bytes) lies in; UNKNOWN unless it lies in one range entirely.
Kind kind_of(std::uintptr_t start, std::size_t bytes);
CUresult range_of(CUdeviceptr address, CUdeviceptr* start, std::size_t* bytes);
int device_at(CUdeviceptr address);  // physical device, or -1

}  // namespace fake
