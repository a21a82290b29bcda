// Stand-in libcufile.so.0: reads files into the memory of the stand-in driver.
//
// Faults and the log are the driver's (driver/faults.h), by the names of the entry points:
//   FAKECUDA_FAIL=cuFileDriverOpen:5011:1    a call that returns a status fails with that code
//   FAKECUDA_FAIL=cuFileRead:5:2             a read fails with errno 5, or with a code above 5000
//   FAKECUFILE_SHORT=bytes                   every read stops after that many bytes
//   FAKECUFILE_HANG=path                     cuFileDriverOpen does not return while the file exists
//   FAKECUFILE_NO_GPUDIRECT=1                a machine where only compatibility mode can read
// As the real one it refuses a descriptor that was opened with O_NOFOLLOW (5019).
#include <cuda.h>
#include <cufile.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <string>

#include "faults.h"

extern "C" ssize_t fakecuda_read(int descriptor, CUdeviceptr to, size_t bytes, off_t offset);

namespace {

struct File {
  int descriptor;
};

std::atomic<int> opened{0};
std::atomic<bool> compat_mode{true};  // As the real one's default.

CUfileError_t status(int code) { return {static_cast<CUfileOpError>(code), CUDA_SUCCESS}; }

ssize_t failed_read(int code) {
  if (code > CUFILEOP_BASE_ERR) return -code;
  errno = code;
  return -1;
}

}  // namespace

FAKE_API CUfileError_t cuFileDriverOpen() {
  if (int code = fake::enter("cuFileDriverOpen")) return status(code);
  const std::string hang = fake::environment("FAKECUFILE_HANG");
  while (!hang.empty() && access(hang.c_str(), F_OK) == 0) usleep(1000);
  if (!fake::environment("FAKECUFILE_NO_GPUDIRECT").empty() && !compat_mode)
    return status(CU_FILE_DRIVER_NOT_INITIALIZED);
  opened++;
  return status(CU_FILE_SUCCESS);
}

FAKE_API CUfileError_t cuFileDriverClose_v2() {
  if (int code = fake::enter("cuFileDriverClose")) return status(code);
  opened--;
  return status(CU_FILE_SUCCESS);
}

FAKE_API long cuFileUseCount() { return opened; }

FAKE_API CUfileError_t cuFileGetVersion(int* version) {
  *version = 1200;
  return status(CU_FILE_SUCCESS);
}

FAKE_API CUfileError_t cuFileSetParameterBool(CUFileBoolConfigParameter_t which, bool value) {
  if (int code = fake::enter("cuFileSetParameterBool")) return status(code);
  if (which == CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE) compat_mode = value;
  return status(CU_FILE_SUCCESS);
}

FAKE_API CUfileError_t cuFileHandleRegister(CUfileHandle_t* handle, CUfileDescr_t* description) {
  if (int code = fake::enter("cuFileHandleRegister")) return status(code);
  if (!opened) return status(CU_FILE_DRIVER_NOT_INITIALIZED);
  const int flags = fcntl(description->handle.fd, F_GETFL);
  if (flags < 0) return status(CU_FILE_INVALID_FILE_OPEN_FLAG);
  if (flags & O_NOFOLLOW) return status(CU_FILE_INVALID_FILE_OPEN_FLAG);
  *handle = new File{description->handle.fd};
  return status(CU_FILE_SUCCESS);
}

FAKE_API void cuFileHandleDeregister(CUfileHandle_t handle) {
  fake::enter("cuFileHandleDeregister");
  delete static_cast<File*>(handle);
}

FAKE_API CUfileError_t cuFileBufRegister(const void*, size_t, int) {
  return status(fake::enter("cuFileBufRegister"));
}

FAKE_API CUfileError_t cuFileBufDeregister(const void*) {
  return status(fake::enter("cuFileBufDeregister"));
}

FAKE_API ssize_t cuFileRead(CUfileHandle_t handle, void* buffer, size_t bytes, off_t file_offset,
                            off_t buffer_offset) {
  if (int code = fake::enter("cuFileRead")) return failed_read(code);
  const std::string limit = fake::environment("FAKECUFILE_SHORT");
  if (!limit.empty() && bytes > strtoul(limit.c_str(), nullptr, 10))
    bytes = strtoul(limit.c_str(), nullptr, 10);
  const CUdeviceptr to = reinterpret_cast<CUdeviceptr>(buffer) + buffer_offset;
  const ssize_t read =
      fakecuda_read(static_cast<File*>(handle)->descriptor, to, bytes, file_offset);
  return read == -2 ? -CU_FILE_CUDA_MEMORY_TYPE_INVALID : read;
}
