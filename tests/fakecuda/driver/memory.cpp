#include "memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>

#include "gate.h"

namespace fake {
namespace {

struct Physical {
  Physical(int owned_descriptor, std::size_t size, int on_device)
      : descriptor(owned_descriptor), bytes(size), device(on_device) {}
  ~Physical() {
    close(descriptor);
    refund(device, bytes);
  }
  const int descriptor;
  const std::size_t bytes;
  const int device;
};

struct Mapping {
  std::size_t bytes;
  std::shared_ptr<Physical> physical;
};

struct Pinned {
  std::size_t bytes;
  bool owned;  // allocated here, not registered
};

struct Memory {
  std::mutex lock;
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<Physical>> handles;
  CUmemGenericAllocationHandle next_handle = 0x1000;
  std::map<std::uintptr_t, std::size_t> reservations;
  std::map<std::uintptr_t, Mapping> mappings;
  std::map<std::uintptr_t, Pinned> pinned;

  CUmemGenericAllocationHandle add(std::shared_ptr<Physical> physical) {
    handles[next_handle] = std::move(physical);
    return next_handle++;
  }
};

// Never destroyed: other libraries call in while the process ends.
Memory& memory() {
  static Memory& memory = *new Memory;
  return memory;
}

// The entry of `map` whose range holds [start, start + bytes).
template <class Map>
typename Map::iterator holding(Map& map, std::uintptr_t start, std::size_t bytes) {
  auto at = map.upper_bound(start);
  if (at == map.begin()) return map.end();
  --at;
  return start + bytes <= at->first + at->second.bytes ? at : map.end();
}

void* address(std::uintptr_t value) { return reinterpret_cast<void*>(value); }

bool replace_by_nothing(std::uintptr_t start, std::size_t bytes) {
  return mmap(address(start), bytes, PROT_NONE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
}

}  // namespace

CUresult create_physical(int device, std::size_t bytes, CUmemGenericAllocationHandle* handle) {
  if (bytes == 0 || bytes % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
  if (device < 0) return CUDA_ERROR_INVALID_DEVICE;
  if (is_broken(device)) return CUDA_ERROR_DEVICE_UNAVAILABLE;
  if (!charge(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  char name[32];
  snprintf(name, sizeof name, "fakegpu-%d", device);
  const int descriptor = memfd_create(name, MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(bytes))) {
    if (descriptor >= 0) close(descriptor);
    refund(device, bytes);
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  std::lock_guard<std::mutex> guard(memory().lock);
  *handle = memory().add(std::make_shared<Physical>(descriptor, bytes, device));
  return CUDA_SUCCESS;
}

CUresult import_physical(int descriptor, CUmemGenericAllocationHandle* handle) {
  char link[64], name[64] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t length = readlink(link, name, sizeof name - 1);
  int device = -1;
  struct stat status;
  if (length <= 0 || sscanf(name, "/memfd:fakegpu-%d", &device) != 1 || ordinal(device) < 0 ||
      fstat(descriptor, &status))
    return CUDA_ERROR_INVALID_VALUE;
  const int own = fcntl(descriptor, F_DUPFD_CLOEXEC, 3);
  if (own < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  const std::size_t bytes = static_cast<std::size_t>(status.st_size);
  std::lock_guard<std::mutex> guard(memory().lock);
  // The exporter paid for it; the charge here is what the destructor refunds.
  if (!charge(device, bytes)) {
    close(own);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = memory().add(std::make_shared<Physical>(own, bytes, device));
  return CUDA_SUCCESS;
}

CUresult export_physical(CUmemGenericAllocationHandle handle, int* descriptor) {
  std::lock_guard<std::mutex> guard(memory().lock);
  const auto at = memory().handles.find(handle);
  if (at == memory().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  *descriptor = fcntl(at->second->descriptor, F_DUPFD_CLOEXEC, 3);
  return *descriptor < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

CUresult release_physical(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> guard(memory().lock);
  return memory().handles.erase(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

int device_of(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> guard(memory().lock);
  const auto at = memory().handles.find(handle);
  return at == memory().handles.end() ? -1 : at->second->device;
}

CUresult reserve_addresses(std::size_t bytes, CUdeviceptr* start) {
  if (bytes == 0 || bytes % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
  void* mapped = mmap(nullptr, bytes + GRANULARITY, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto first = reinterpret_cast<std::uintptr_t>(mapped);
  const std::uintptr_t aligned = (first + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  if (aligned > first) munmap(mapped, aligned - first);
  const std::size_t behind = first + GRANULARITY - aligned;
  if (behind) munmap(address(aligned + bytes), behind);
  std::lock_guard<std::mutex> guard(memory().lock);
  memory().reservations[aligned] = bytes;
  *start = aligned;
  return CUDA_SUCCESS;
}

CUresult free_addresses(CUdeviceptr start, std::size_t bytes) {
  std::lock_guard<std::mutex> guard(memory().lock);
  const auto at = memory().reservations.find(start);
  if (at == memory().reservations.end() || at->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  if (holding(memory().mappings, start, 1) != memory().mappings.end())
    return CUDA_ERROR_INVALID_VALUE;
  memory().reservations.erase(at);
  munmap(address(start), bytes);
  return CUDA_SUCCESS;
}

CUresult map_physical(CUdeviceptr start, std::size_t bytes, CUmemGenericAllocationHandle handle) {
  if (start % GRANULARITY || bytes == 0 || bytes % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> guard(memory().lock);
  const auto at = memory().handles.find(handle);
  if (at == memory().handles.end() || bytes > at->second->bytes) return CUDA_ERROR_INVALID_VALUE;
  auto reserved = memory().reservations.upper_bound(start);
  if (reserved == memory().reservations.begin()) return CUDA_ERROR_INVALID_VALUE;
  --reserved;
  if (start + bytes > reserved->first + reserved->second) return CUDA_ERROR_INVALID_VALUE;
  if (holding(memory().mappings, start, 1) != memory().mappings.end())
    return CUDA_ERROR_ALREADY_MAPPED;
  if (mmap(address(start), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, at->second->descriptor, 0) ==
      MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  memory().mappings[start] = {bytes, at->second};
  return CUDA_SUCCESS;
}

CUresult unmap(CUdeviceptr start, std::size_t bytes) {
  std::lock_guard<std::mutex> guard(memory().lock);
  const auto at = memory().mappings.find(start);
  if (at == memory().mappings.end() || at->second.bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
  forget(address(start));
  replace_by_nothing(start, bytes);
  memory().mappings.erase(at);
  return CUDA_SUCCESS;
}

CUresult set_access(CUdeviceptr start, std::size_t bytes, int protection) {
  std::lock_guard<std::mutex> guard(memory().lock);
  if (holding(memory().mappings, start, bytes) == memory().mappings.end())
    return CUDA_ERROR_INVALID_VALUE;
  close_off(address(start), bytes, protection);
  return CUDA_SUCCESS;
}

CUresult allocate(std::size_t bytes, CUdeviceptr* start) {
  const std::size_t whole = (bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  CUmemGenericAllocationHandle handle;
  if (CUresult problem = create_physical(current_device(), whole, &handle)) return problem;
  CUresult problem = reserve_addresses(whole, start);
  if (!problem) problem = map_physical(*start, whole, handle);
  if (!problem) problem = set_access(*start, whole, PROT_READ | PROT_WRITE);
  release_physical(handle);
  return problem;
}

CUresult deallocate(CUdeviceptr start) {
  std::size_t bytes;
  {
    std::lock_guard<std::mutex> guard(memory().lock);
    const auto at = memory().mappings.find(start);
    if (at == memory().mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    bytes = at->second.bytes;
  }
  if (CUresult problem = unmap(start, bytes)) return problem;
  return free_addresses(start, bytes);
}

CUresult pin_new(std::size_t bytes, void** start) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  *start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard<std::mutex> guard(memory().lock);
  memory().pinned[reinterpret_cast<std::uintptr_t>(*start)] = {bytes, true};
  return CUDA_SUCCESS;
}

CUresult unpin_new(void* start) {
  std::lock_guard<std::mutex> guard(memory().lock);
  const auto at = memory().pinned.find(reinterpret_cast<std::uintptr_t>(start));
  if (at == memory().pinned.end() || !at->second.owned) return CUDA_ERROR_INVALID_VALUE;
  munmap(start, at->second.bytes);
  memory().pinned.erase(at);
  return CUDA_SUCCESS;
}

CUresult pin(void* start, std::size_t bytes) {
  const auto value = reinterpret_cast<std::uintptr_t>(start);
  if (bytes == 0 || value % 4096) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> guard(memory().lock);
  if (holding(memory().pinned, value, 1) != memory().pinned.end())
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  memory().pinned[value] = {bytes, false};
  return CUDA_SUCCESS;
}

CUresult unpin(void* start) {
  std::lock_guard<std::mutex> guard(memory().lock);
  const auto at = memory().pinned.find(reinterpret_cast<std::uintptr_t>(start));
  if (at == memory().pinned.end() || at->second.owned)
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  memory().pinned.erase(at);
  return CUDA_SUCCESS;
}

Kind kind_of(std::uintptr_t start, std::size_t bytes) {
  std::lock_guard<std::mutex> guard(memory().lock);
  if (holding(memory().mappings, start, bytes) != memory().mappings.end()) return Kind::DEVICE;
  if (holding(memory().pinned, start, bytes) != memory().pinned.end()) return Kind::PINNED;
  return Kind::UNKNOWN;
}

CUresult range_of(CUdeviceptr inside, CUdeviceptr* start, std::size_t* bytes) {
  std::lock_guard<std::mutex> guard(memory().lock);
  const auto at = holding(memory().mappings, inside, 1);
  if (at == memory().mappings.end()) return CUDA_ERROR_NOT_FOUND;
  if (start) *start = at->first;
  if (bytes) *bytes = at->second.bytes;
  return CUDA_SUCCESS;
}

int device_at(CUdeviceptr start) {
  std::lock_guard<std::mutex> guard(memory().lock);
  const auto at = holding(memory().mappings, start, 1);
  return at == memory().mappings.end() ? -1 : at->second.physical->device;
}

}  // namespace fake
