// Entry points: device memory, pinned host memory, virtual addresses, copies.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "gate.h"
#include "memory.h"
#include "stream.h"

using fake::Kind;

namespace {

std::uintptr_t value(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

bool on_device(CUdeviceptr start, size_t bytes) {
  return fake::kind_of(start, bytes) == Kind::DEVICE;
}

void copy_now(void* to, const void* from, size_t bytes) {
  if (!fake::fault("copy")) memcpy(to, from, bytes);
}

// A pageable source is read before the call returns, as the driver does; a pinned one is read when
// the stream gets there, so that memory that is reused too early shows.
CUresult copy_in(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  if (!on_device(to, bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (fake::kind_of(value(from), bytes) == Kind::PINNED) {
    fake::enqueue(stream, [=] { copy_now(pointer(to), from, bytes); });
  } else {
    const char* start = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(start, start + bytes);
    fake::enqueue(stream, [=] { copy_now(pointer(to), staged->data(), bytes); });
  }
  return CUDA_SUCCESS;
}

CUresult copy_out(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (!on_device(from, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const fake::Ticket ticket =
      fake::enqueue(stream, [=] { copy_now(to, pointer(from), bytes); });
  if (fake::kind_of(value(to), bytes) != Kind::PINNED) ticket.wait();
  return CUDA_SUCCESS;
}

}  // namespace

// ---- Plain allocations ----

FAKE_API CUresult cuMemAlloc_v2(CUdeviceptr* start, size_t bytes) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  return bytes ? fake::allocate(bytes, start) : CUDA_ERROR_INVALID_VALUE;
}

FAKE_API CUresult cuMemFree_v2(CUdeviceptr start) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  fake::wait_for_all_streams();
  return start ? fake::deallocate(start) : CUDA_SUCCESS;
}

FAKE_API CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  *total = fake::memory_total();
  *free = *total - fake::memory_used(fake::current_device());
  return CUDA_SUCCESS;
}

namespace {

CUresult pointer_attribute(void* out, CUpointer_attribute attribute, CUdeviceptr address) {
  const Kind kind = fake::kind_of(address, 1);
  if (kind == Kind::UNKNOWN) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      if (kind != Kind::DEVICE) return CUDA_ERROR_INVALID_VALUE;
      *static_cast<CUcontext*>(out) = fake::primary_context(fake::device_at(address));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(out) =
          kind == Kind::DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(out) = fake::ordinal(fake::device_at(address));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *static_cast<CUdeviceptr*>(out) = address;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace

FAKE_API CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute,
                                        CUdeviceptr address) {
  FAKE_ENTER;
  return pointer_attribute(out, attribute, address);
}

FAKE_API CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes,
                                         void** out, CUdeviceptr address) {
  FAKE_ENTER;
  for (unsigned i = 0; i < count; i++)
    if (CUresult problem = pointer_attribute(out[i], attributes[i], address)) return problem;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* bytes, CUdeviceptr address) {
  FAKE_ENTER;
  return fake::range_of(address, start, bytes);
}

// ---- Pinned host memory ----

FAKE_API CUresult cuMemHostAlloc(void** start, size_t bytes, unsigned) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  return fake::pin_new(bytes, start);
}

FAKE_API CUresult cuMemFreeHost(void* start) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  fake::wait_for_all_streams();
  return fake::unpin_new(start);
}

FAKE_API CUresult cuMemHostRegister_v2(void* start, size_t bytes, unsigned) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  return fake::pin(start, bytes);
}

FAKE_API CUresult cuMemHostUnregister(void* start) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  fake::wait_for_all_streams();
  return fake::unpin(start);
}

// ---- Virtual memory ----

FAKE_API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                                CUmemAllocationGranularity_flags) {
  FAKE_ENTER;
  *bytes = fake::GRANULARITY;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                              const CUmemAllocationProp* properties, unsigned long long) {
  FAKE_ENTER;
  if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
    return CUDA_ERROR_INVALID_VALUE;
  return fake::create_physical(fake::physical(properties->location.id), bytes, handle);
}

FAKE_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  FAKE_ENTER;
  return fake::release_physical(handle);
}

FAKE_API CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                               CUmemAllocationHandleType type,
                                               unsigned long long) {
  FAKE_ENTER;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  return fake::export_physical(handle, static_cast<int*>(out));
}

FAKE_API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shared,
                                                 CUmemAllocationHandleType type) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  return fake::import_physical(static_cast<int>(value(shared)), handle);
}

FAKE_API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                         CUmemGenericAllocationHandle handle) {
  FAKE_ENTER;
  const int device = fake::device_of(handle);
  if (device < 0) return CUDA_ERROR_INVALID_VALUE;
  memset(properties, 0, sizeof *properties);
  properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties->location = {CU_MEM_LOCATION_TYPE_DEVICE, {fake::ordinal(device)}};
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemAddressReserve(CUdeviceptr* start, size_t bytes, size_t, CUdeviceptr,
                                      unsigned long long) {
  FAKE_ENTER;
  return fake::reserve_addresses(bytes, start);
}

FAKE_API CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  return fake::free_addresses(start, bytes);
}

FAKE_API CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t offset,
                           CUmemGenericAllocationHandle handle, unsigned long long) {
  FAKE_ENTER;
  return offset ? CUDA_ERROR_INVALID_VALUE : fake::map_physical(start, bytes, handle);
}

FAKE_API CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  return fake::unmap(start, bytes);
}

FAKE_API CUresult cuMemSetAccess(CUdeviceptr start, size_t bytes, const CUmemAccessDesc* access,
                                 size_t count) {
  FAKE_ENTER;
  int protection = PROT_NONE;
  for (size_t i = 0; i < count; i++) {
    if (fake::physical(access[i].location.id) < 0) return CUDA_ERROR_INVALID_DEVICE;
    if (access[i].flags & CU_MEM_ACCESS_FLAGS_PROT_READ) protection |= PROT_READ;
    if (access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) protection |= PROT_WRITE;
  }
  return fake::set_access(start, bytes, protection);
}

// ---- Copies ----

FAKE_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes,
                                       CUstream stream) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  return copy_in(to, from, bytes, stream);
}

FAKE_API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  return copy_out(to, from, bytes, stream);
}

FAKE_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                                       CUstream stream) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  if (!on_device(to, bytes) || !on_device(from, bytes)) return CUDA_ERROR_INVALID_VALUE;
  fake::enqueue(stream, [=] { copy_now(pointer(to), pointer(from), bytes); });
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  if (CUresult problem = copy_in(to, from, bytes, nullptr)) return problem;
  fake::enqueue(nullptr, [] {}).wait();
  return fake::sticky();
}

FAKE_API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  if (CUresult problem = copy_out(to, from, bytes, nullptr)) return problem;
  fake::enqueue(nullptr, [] {}).wait();
  return fake::sticky();
}

FAKE_API CUresult cuMemsetD8Async(CUdeviceptr start, unsigned char byte, size_t bytes,
                                  CUstream stream) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  if (!on_device(start, bytes)) return CUDA_ERROR_INVALID_VALUE;
  fake::enqueue(stream, [=] { memset(pointer(start), byte, bytes); });
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuMemsetD8_v2(CUdeviceptr start, unsigned char byte, size_t bytes) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  if (!on_device(start, bytes)) return CUDA_ERROR_INVALID_VALUE;
  fake::enqueue(nullptr, [=] { memset(pointer(start), byte, bytes); }).wait();
  return fake::sticky();
}

// What the stand-in cuFile uses: a read from `descriptor` into device memory, past the gate.
// Returns the bytes read, or -1 with errno.
FAKE_API ssize_t fakecuda_read(int descriptor, CUdeviceptr to, size_t bytes, off_t offset) {
  if (!on_device(to, bytes)) return -2;
  const fake::GateOpening opening;
  return pread(descriptor, pointer(to), bytes, offset);
}
