// Entry points: devices, contexts, errors by name, and the lookup of entry points themselves.
#include <dlfcn.h>
#include <stdio.h>

#include <map>
#include <string>

#include "device.h"
#include "stream.h"

namespace {

int device_or_none(CUdevice ordinal) { return fake::physical(ordinal); }

}  // namespace

FAKE_API CUresult cuInit(unsigned) {
  FAKE_ENTER;
  return fake::visible_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

FAKE_API CUresult cuDriverGetVersion(int* version) {
  FAKE_ENTER;
  *version = 13050;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGetCount(int* count) {
  FAKE_ENTER;
  *count = fake::visible_count();
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  FAKE_ENTER;
  if (device_or_none(ordinal) < 0) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  FAKE_ENTER;
  if (device_or_none(device) < 0) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(name, bytes, "Stand-in GPU %d", device_or_none(device));
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  FAKE_ENTER;
  if (device_or_none(device) < 0) return CUDA_ERROR_INVALID_DEVICE;
  fake::fill_uuid(device_or_none(device), uuid);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  FAKE_ENTER;
  *bytes = fake::memory_total();
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGetPCIBusId(char* id, int bytes, CUdevice device) {
  FAKE_ENTER;
  snprintf(id, bytes, "0000:%02x:00.0", device_or_none(device) + 1);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  FAKE_ENTER;
  if (device_or_none(device) < 0) return CUDA_ERROR_INVALID_DEVICE;
  static const std::map<int, int>& values = *new std::map<int, int>{
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 2},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 48 << 10},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 227 << 10},
      {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
      {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
      {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
  };
  if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_MODE) {
    const bool exclusive = fake::is_exclusive(device_or_none(device));
    *value = exclusive ? CU_COMPUTEMODE_EXCLUSIVE_PROCESS : CU_COMPUTEMODE_DEFAULT;
    return CUDA_SUCCESS;
  }
  const auto at = values.find(attribute);
  *value = at == values.end() ? 0 : at->second;
  return CUDA_SUCCESS;
}

// ---- Contexts ----

FAKE_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  FAKE_ENTER;
  const int physical = device_or_none(device);
  if (physical < 0) return CUDA_ERROR_INVALID_DEVICE;
  if (fake::is_broken(physical)) return CUDA_ERROR_DEVICE_UNAVAILABLE;
  *context = fake::primary_context(physical);
  (*context)->retained++;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  FAKE_ENTER;
  const int physical = device_or_none(device);
  if (physical < 0) return CUDA_ERROR_INVALID_DEVICE;
  return fake::primary_context(physical)->retained-- > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

FAKE_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  FAKE_ENTER;
  if (device_or_none(device) < 0) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = fake::primary_context(device_or_none(device))->retained > 0;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxSetCurrent(CUcontext context) {
  FAKE_ENTER;
  fake::set_current(context);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxGetCurrent(CUcontext* context) {
  FAKE_ENTER;
  *context = fake::current_context();
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxPushCurrent_v2(CUcontext context) {
  FAKE_ENTER;
  fake::push_current(context);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  FAKE_ENTER;
  return fake::pop_current(context);
}

FAKE_API CUresult cuCtxGetDevice(CUdevice* device) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  *device = fake::ordinal(fake::current_device());
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxSynchronize() {
  FAKE_ENTER;
  FAKE_CONTEXT;
  fake::wait_for_all_streams();
  return fake::sticky();
}

// ---- Errors ----

FAKE_API CUresult cuGetErrorName(CUresult error, const char** name) {
  static const std::map<int, const char*>& names = *new std::map<int, const char*>{
      {CUDA_SUCCESS, "CUDA_SUCCESS"},
      {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
      {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
      {CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE"},
      {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
      {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
      {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
      {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
      {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE"},
      {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
      {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY"},
      {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {CUDA_ERROR_LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT"},
      {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
      {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
  };
  const auto at = names.find(error);
  *name = at == names.end() ? "CUDA_ERROR_UNKNOWN" : at->second;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuGetErrorString(CUresult error, const char** text) {
  return cuGetErrorName(error, text);
}

// ---- Lookup: how cuda.bindings finds everything else ----

FAKE_API CUresult cuGetProcAddress_v2(const char* name, void** address, int, cuuint64_t,
                                      CUdriverProcAddressQueryResult* result) {
  static void* const self = [] {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(cuInit), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  *address = nullptr;
  for (const char* version : {"_v4", "_v3", "_v2", ""})
    if ((*address = dlsym(self, (std::string(name) + version).c_str()))) break;
  if (result)
    *result = *address ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *address ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

FAKE_API CUresult cuGetProcAddress(const char* name, void** address, int version,
                                   cuuint64_t flags) {
  return cuGetProcAddress_v2(name, address, version, flags, nullptr);
}
