// Entry points: streams, events, modules and launches.
#include <dlfcn.h>
#include <elf.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "device.h"
#include "kernel_table.h"
#include "stream.h"

// ---- Streams ----

FAKE_API CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  *stream = fake::create_stream(fake::current_device(), flags);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuStreamDestroy_v2(CUstream stream) {
  FAKE_ENTER;
  fake::destroy_stream(stream);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuStreamSynchronize(CUstream handle) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  const CUstream stream = fake::resolve(handle);
  stream->wait(stream->last());
  return fake::sticky();
}

FAKE_API CUresult cuStreamQuery(CUstream handle) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  const CUstream stream = fake::resolve(handle);
  return stream->done(stream->last()) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

FAKE_API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  const fake::Ticket point = event->event->point();
  fake::enqueue(stream, [=] { point.wait(); });
  return CUDA_SUCCESS;
}

// ---- Events ----

FAKE_API CUresult cuEventCreate(CUevent* event, unsigned) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  *event = new CUevent_st;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuEventDestroy_v2(CUevent event) {
  FAKE_ENTER;
  delete event;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuEventRecord(CUevent event, CUstream stream) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  const fake::Ticket point = fake::enqueue(stream, [] {});
  std::lock_guard<std::mutex> guard(event->event->lock);
  event->event->ticket = point;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuEventQuery(CUevent event) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  return event->event->point().done() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

FAKE_API CUresult cuEventSynchronize(CUevent event) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  event->event->point().wait();
  return fake::sticky();
}

// ---- Modules: shared objects that g++ made of the kernels ----

struct CUmod_st {
  void* library;
  int file;
  fake::KernelTable table;
};

namespace {

constexpr size_t DEFAULT_SHARED_BYTES = 48 << 10, SHARED_BYTES_MAX = 227 << 10;

struct Function {
  const fake::Kernel* kernel;
  size_t shared_bytes_max = DEFAULT_SHARED_BYTES;
};

CUfunction handle(Function* function) { return reinterpret_cast<CUfunction>(function); }
Function* function(CUfunction handle) { return reinterpret_cast<Function*>(handle); }

CUresult load(CUmod_st* module, const void* image) {
  const auto* header = static_cast<const Elf64_Ehdr*>(image);
  if (memcmp(header->e_ident, ELFMAG, SELFMAG)) return CUDA_ERROR_INVALID_IMAGE;
  // A cubin is an ELF file too, of a machine that this is not.
  if (header->e_machine != EM_X86_64 && header->e_machine != EM_AARCH64)
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  const size_t bytes = header->e_shoff + static_cast<size_t>(header->e_shnum) * header->e_shentsize;
  module->file = memfd_create("fakemodule", MFD_CLOEXEC);
  if (module->file < 0 || write(module->file, image, bytes) != static_cast<ssize_t>(bytes))
    return CUDA_ERROR_OPERATING_SYSTEM;
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", module->file);
  module->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!module->library) {
    fprintf(stderr, "fakecuda: %s\n", dlerror());
    return CUDA_ERROR_INVALID_IMAGE;
  }
  const auto table = reinterpret_cast<fake::KernelTableFunction>(
      dlsym(module->library, fake::KERNEL_TABLE_SYMBOL));
  if (!table) return CUDA_ERROR_INVALID_IMAGE;
  module->table = table();
  return CUDA_SUCCESS;
}

}  // namespace

FAKE_API CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  auto* loaded = new CUmod_st{nullptr, -1, {}};
  const CUresult problem = load(loaded, image);
  if (!problem) {
    *module = loaded;
    return CUDA_SUCCESS;
  }
  if (loaded->library) dlclose(loaded->library);
  if (loaded->file >= 0) close(loaded->file);
  delete loaded;
  return problem;
}

FAKE_API CUresult cuModuleUnload(CUmodule module) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  fake::wait_for_all_streams();
  dlclose(module->library);
  close(module->file);
  delete module;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  for (unsigned i = 0; i < module->table.count; i++)
    if (!strcmp(module->table.kernels[i].name, name)) {
      *out = handle(new Function{&module->table.kernels[i]});
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_NOT_FOUND;
}

FAKE_API CUresult cuFuncSetAttribute(CUfunction kernel, CUfunction_attribute attribute, int value) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  if (value < 0 || static_cast<size_t>(value) > SHARED_BYTES_MAX) return CUDA_ERROR_INVALID_VALUE;
  function(kernel)->shared_bytes_max = value;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y,
                                 unsigned grid_z, unsigned block_x, unsigned block_y,
                                 unsigned block_z, unsigned shared_bytes, CUstream stream,
                                 void** arguments, void**) {
  FAKE_ENTER;
  FAKE_CONTEXT;
  const fake::Kernel* kernel = function(handle)->kernel;
  if (!grid_x || grid_y != 1 || grid_z != 1 || !block_x || block_x > 1024 || block_y != 1 ||
      block_z != 1 || shared_bytes > function(handle)->shared_bytes_max)
    return CUDA_ERROR_INVALID_VALUE;
  // Arguments are copied at launch, as the driver does.
  std::vector<std::vector<char>> copies;
  for (unsigned i = 0; i < kernel->argument_count; i++) {
    const char* start = static_cast<const char*>(arguments[i]);
    copies.emplace_back(start, start + kernel->argument_bytes[i]);
  }
  const fake::LaunchSize size = {{grid_x, 1, 1}, {block_x, 1, 1}, shared_bytes};
  fake::enqueue(stream, [=]() mutable {
    fake::hold_kernel();
    if (fake::fault("kernel")) return;
    std::vector<void*> pointers;
    for (auto& copy : copies) pointers.push_back(copy.data());
    kernel->run(pointers.data(), size);
  });
  return CUDA_SUCCESS;
}
