#include "faults.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

#include "device.h"

namespace fake {
namespace {

struct Rule {
  int code, nth, calls = 0;
};

std::string without_version(const std::string& name) {
  const std::size_t at = name.rfind("_v");
  const bool version = at != std::string::npos && at + 3 == name.size() && isdigit(name[at + 2]);
  return version ? name.substr(0, at) : name;
}

std::multimap<std::string, Rule> read_rules() {
  std::multimap<std::string, Rule> rules;
  const std::string text = environment("FAKECUDA_FAIL");
  for (std::size_t start = 0; start < text.size();) {
    std::size_t stop = text.find(',', start);
    if (stop == std::string::npos) stop = text.size();
    char name[128];
    Rule rule{0, 1};
    if (sscanf(text.substr(start, stop - start).c_str(), "%127[^:]:%d:%d", name, &rule.code,
               &rule.nth) < 2) {
      fprintf(stderr, "FAKECUDA_FAIL: cannot read %s\n", text.c_str() + start);
      abort();
    }
    rules.emplace(without_version(name), rule);
    start = stop + 1;
  }
  return rules;
}

// Errors after which the driver's documentation says that the process must be terminated.
bool is_sticky(int code) {
  return code == CUDA_ERROR_ILLEGAL_ADDRESS || code == CUDA_ERROR_LAUNCH_TIMEOUT ||
         code == CUDA_ERROR_ECC_UNCORRECTABLE ||
         (code >= CUDA_ERROR_ASSERT && code <= CUDA_ERROR_LAUNCH_FAILED &&
          code != CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED &&
          code != CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED && code != CUDA_ERROR_TOO_MANY_PEERS);
}

std::atomic<int> sticky_code{CUDA_SUCCESS};

void log_call(const char* name) {
  static const std::string path = environment("FAKECUDA_LOG");
  if (path.empty()) return;
  static const int log = open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  char line[160];
  const int device = current_device();
  const int bytes = device < 0 ? snprintf(line, sizeof line, "%d %s -\n", getpid(), name)
                               : snprintf(line, sizeof line, "%d %s %d\n", getpid(), name, device);
  if (write(log, line, bytes) != bytes) abort();
}

}  // namespace

std::string environment(const char* name) {
  const char* value = getenv(name);
  return value ? value : "";
}

CUresult fault(const char* name) {
  static std::multimap<std::string, Rule>& rules = *new auto(read_rules());
  static std::mutex& lock = *new std::mutex;
  if (rules.empty()) return CUDA_SUCCESS;
  std::lock_guard<std::mutex> guard(lock);
  int code = CUDA_SUCCESS;
  const auto range = rules.equal_range(without_version(name));
  for (auto rule = range.first; rule != range.second; ++rule)
    if (++rule->second.calls == rule->second.nth) code = rule->second.code;
  if (is_sticky(code)) sticky_code = code;
  return static_cast<CUresult>(code);
}

CUresult enter(const char* name) {
  log_call(without_version(name).c_str());
  return fault(name);
}

CUresult sticky() { return static_cast<CUresult>(sticky_code.load()); }

void delay() {
  static const int microseconds = atoi(environment("FAKECUDA_DELAY_US").c_str());
  if (microseconds) usleep(microseconds);
}

void hold_kernel() {
  static const std::string path = environment("FAKECUDA_HOLD");
  if (path.empty() || access(path.c_str(), F_OK)) return;
  close(open((path + ".reached").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  while (access(path.c_str(), F_OK) == 0) usleep(1000);
}

}  // namespace fake
