#include "device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace fake {
namespace {

constexpr int DEVICES_MAX = 16;

std::vector<int> numbers(const std::string& text) {
  std::vector<int> found;
  const char* at = text.c_str();
  while (*at) {
    char* end;
    const long number = strtol(at, &end, 10);
    if (end == at) break;
    found.push_back(static_cast<int>(number));
    at = *end == ',' ? end + 1 : end;
  }
  return found;
}

int device_count() {
  static const std::string text = environment("FAKECUDA_DEVICES");
  return text.empty() ? 1 : std::min(atoi(text.c_str()), DEVICES_MAX);
}

const std::vector<int>& visible() {
  static const std::vector<int>& devices = *[] {
    auto* list = new std::vector<int>;
    if (getenv("CUDA_VISIBLE_DEVICES")) {
      for (int device : numbers(environment("CUDA_VISIBLE_DEVICES")))
        if (device >= 0 && device < device_count()) list->push_back(device);
    } else {
      for (int device = 0; device < device_count(); device++) list->push_back(device);
    }
    return list;
  }();
  return devices;
}

std::atomic<std::size_t> used[DEVICES_MAX];

std::vector<CUcontext>& stack() {
  static thread_local std::vector<CUcontext>& contexts = *new std::vector<CUcontext>;
  return contexts;
}

}  // namespace

int visible_count() { return static_cast<int>(visible().size()); }

int physical(int ordinal) {
  return ordinal < 0 || ordinal >= visible_count() ? -1 : visible()[ordinal];
}

int ordinal(int physical) {
  const auto at = std::find(visible().begin(), visible().end(), physical);
  return at == visible().end() ? -1 : static_cast<int>(at - visible().begin());
}

bool is_broken(int physical) {
  static const std::vector<int>& broken = *new auto(numbers(environment("FAKECUDA_BROKEN")));
  return std::count(broken.begin(), broken.end(), physical) > 0;
}

bool is_exclusive(int physical) {
  static const std::vector<int>& exclusive = *new auto(numbers(environment("FAKECUDA_EXCLUSIVE")));
  return std::count(exclusive.begin(), exclusive.end(), physical) > 0;
}

void fill_uuid(int physical, CUuuid* uuid) {
  memset(uuid->bytes, 0, sizeof uuid->bytes);
  memcpy(uuid->bytes, "stand-in-gpu", 12);
  uuid->bytes[15] = static_cast<char>(physical);
}

CUcontext primary_context(int physical) {
  static CUctx_st* const contexts = [] {
    auto* all = new CUctx_st[DEVICES_MAX];
    for (int device = 0; device < DEVICES_MAX; device++) all[device].device = device;
    return all;
  }();
  return &contexts[physical];
}

CUcontext current_context() { return stack().empty() ? nullptr : stack().back(); }

int current_device() { return current_context() ? current_context()->device : -1; }

void set_current(CUcontext context) {
  if (!stack().empty()) stack().pop_back();
  if (context) stack().push_back(context);
}

void push_current(CUcontext context) { stack().push_back(context); }

CUresult pop_current(CUcontext* context) {
  if (stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = stack().back();
  stack().pop_back();
  return CUDA_SUCCESS;
}

CUresult check_context() {
  if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
  return sticky();
}

std::size_t memory_total() {
  static const std::string text = environment("FAKECUDA_MEM_MB");
  return text.empty() ? 4ull << 30 : static_cast<std::size_t>(atol(text.c_str())) << 20;
}

std::size_t memory_used(int physical) { return used[physical]; }

bool charge(int physical, std::size_t bytes) {
  if ((used[physical] += bytes) <= memory_total()) return true;
  used[physical] -= bytes;
  return false;
}

void refund(int physical, std::size_t bytes) { used[physical] -= bytes; }

}  // namespace fake
