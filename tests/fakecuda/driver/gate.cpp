#include "gate.h"

#include <sys/mman.h>

#include <map>
#include <mutex>

#include "faults.h"

namespace fake {
namespace {

struct Range {
  std::size_t bytes;
  int protection;
};

struct Gate {
  std::mutex lock;
  std::map<void*, Range> ranges;
  unsigned openings = 0;
  int key = pkey_alloc(0, PKEY_DISABLE_ACCESS);  // -1 where the CPU has no keys
  bool always_open = !environment("FAKECUDA_OPEN").empty();

  void apply(void* start, const Range& range) {
    if (key >= 0)
      pkey_mprotect(start, range.bytes, range.protection, always_open ? 0 : key);
    else
      mprotect(start, range.bytes, openings || always_open ? range.protection : PROT_NONE);
  }
  void apply_all() {
    for (auto& [start, range] : ranges) apply(start, range);
  }
};

// Never destroyed: other libraries call in while the process ends.
Gate& gate() {
  static Gate& gate = *new Gate;
  return gate;
}

}  // namespace

void close_off(void* start, std::size_t bytes, int protection) {
  std::lock_guard<std::mutex> guard(gate().lock);
  gate().ranges[start] = {bytes, protection};
  gate().apply(start, gate().ranges[start]);
}

void forget(void* start) {
  std::lock_guard<std::mutex> guard(gate().lock);
  gate().ranges.erase(start);
}

GateOpening::GateOpening() {
  if (gate().key >= 0) {
    pkey_set(gate().key, 0);
    return;
  }
  std::lock_guard<std::mutex> guard(gate().lock);
  if (gate().openings++ == 0) gate().apply_all();
}

GateOpening::~GateOpening() {
  if (gate().key >= 0) {
    pkey_set(gate().key, PKEY_DISABLE_ACCESS);
    return;
  }
  std::lock_guard<std::mutex> guard(gate().lock);
  if (--gate().openings == 0) gate().apply_all();
}

}  // namespace fake
