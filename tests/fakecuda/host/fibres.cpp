#include "fibres.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

namespace fake {
namespace {

constexpr std::size_t STACK_BYTES = 128 << 10;
constexpr unsigned SYSTEM_THREADS = 2;

// One thread of the system that runs blocks, one after another. Fibres are made once, with a
// context, and then switched by longjmp, which costs no system call; each runs thread after thread.
class Processor {
 public:
  ~Processor() {
    for (Slot* slot : slots_) {
      munmap(slot->stack, STACK_BYTES);
      delete slot;
    }
  }

  void run_block(Index index, unsigned threads, const std::function<void()>& kernel) {
    kernel_ = &kernel;
    block_.index = index;
    block_.barrier.reset(threads);
    for (unsigned w = 0; w * 32 < threads; w++) block_.warps[w].reset(std::min(32u, threads - w * 32));
    while (slots_.size() < threads) slots_.push_back(new Slot);
    for (unsigned t = 0; t < threads; t++) {
      slots_[t]->fibre = {&block_, {t, 0, 0}, 0};
      slots_[t]->done = false;
    }
    live_ = threads;
    while (live_ > 0)
      for (volatile unsigned t = 0; t < threads; t = t + 1)
        if (!slots_[t]->done) resume(*slots_[t]);
  }

  void yield() {
    if (_setjmp(running_->point) == 0) _longjmp(scheduler_, 1);
  }

  Fibre* fibre() { return &running_->fibre; }

 private:
  struct Slot {
    Fibre fibre;
    bool started = false, done = false;
    jmp_buf point;
    ucontext_t context;
    void* stack = nullptr;
  };

  void resume(Slot& slot) {
    running_ = &slot;
    if (_setjmp(scheduler_)) return;
    if (slot.started) _longjmp(slot.point, 1);
    slot.started = true;
    slot.stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    getcontext(&slot.context);
    slot.context.uc_stack.ss_sp = slot.stack;
    slot.context.uc_stack.ss_size = STACK_BYTES;
    slot.context.uc_link = nullptr;
    makecontext(&slot.context, run_threads, 0);
    setcontext(&slot.context);
  }

  static void run_threads();

  const std::function<void()>* kernel_ = nullptr;
  Block block_;
  std::vector<Slot*> slots_;
  Slot* running_ = nullptr;
  unsigned live_ = 0;
  jmp_buf scheduler_;
};

thread_local Processor* processor;

void Processor::run_threads() {
  for (;;) {
    Processor* self = processor;
    (*self->kernel_)();
    self->running_->done = true;
    self->live_--;
    self->running_->fibre.block->barrier.leave();
    self->running_->fibre.warp()->leave();
    self->yield();
  }
}

}  // namespace

void Barrier::reset(unsigned parties) {
  parties_ = parties;
  waiting_ = 0;
}

void Barrier::open_when_all_are_here() {
  if (waiting_ < parties_) return;
  waiting_ = 0;
  opened_++;
}

void Barrier::wait() {
  const unsigned before = opened_;
  waiting_++;
  open_when_all_are_here();
  while (opened_ == before) fake::yield();
}

void Barrier::leave() {
  parties_--;
  if (parties_ > 0 && waiting_ > 0) open_when_all_are_here();
}

void Warp::reset(unsigned parties) {
  parties_ = parties;
  barrier_.reset(parties);
  for (int slot = 0; slot < 2; slot++) sum_[slot] = left_[slot] = 0;
}

unsigned Warp::reduce_xor(unsigned value) {
  const unsigned slot = this_fibre()->exchanges++ & 1;
  sum_[slot] ^= value;
  barrier_.wait();
  const unsigned sum = sum_[slot];
  if (++left_[slot] == parties_) sum_[slot] = left_[slot] = 0;
  return sum;
}

Fibre* this_fibre() { return processor->fibre(); }

void yield() { processor->yield(); }

void run_grid(const LaunchSize& size, const std::function<void()>& kernel) {
  std::atomic<unsigned> next{0};
  auto work = [&] {
    Processor mine;
    processor = &mine;
    for (unsigned i; (i = next++) < size.grid.x;) mine.run_block({i, 0, 0}, size.block.x, kernel);
    processor = nullptr;
  };
  std::vector<std::thread> others;
  for (unsigned i = 1; i < std::min(SYSTEM_THREADS, size.grid.x); i++) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace fake
