// Runs a grid on the host: blocks on a few threads of the system, a block's threads as fibres.
//
// A fibre runs until it waits at a barrier or ends; then the block's next one goes on. So there is
// no parallelism inside a block, and the order is always the same.
#pragma once

#include <functional>

namespace fake {

struct Index {
  unsigned x, y, z;
};

struct LaunchSize {
  Index grid, block;
  std::size_t shared_bytes;
};

// Everybody waits until all have come. Those that have ended are no longer waited for.
class Barrier {
 public:
  void reset(unsigned parties);
  void wait();
  void leave();

 private:
  void open_when_all_are_here();
  unsigned parties_ = 0, waiting_ = 0, opened_ = 0;
};

// 32 threads that exchange values. Two slots take turns: nobody can be two exchanges ahead.
class Warp {
 public:
  void reset(unsigned parties);
  void leave() { barrier_.leave(); }
  unsigned reduce_xor(unsigned value);

 private:
  Barrier barrier_;
  unsigned sum_[2] = {0, 0}, left_[2] = {0, 0}, parties_ = 0;
};

struct Block {
  Index index;
  Barrier barrier;
  Warp warps[32];
};

struct Fibre {
  Block* block;
  Index thread;
  unsigned exchanges;  // with its warp, so far
  Warp* warp() const { return &block->warps[thread.x / 32]; }
};

Fibre* this_fibre();

// Lets the block's other threads run; comes back when it is this one's turn again.
void yield();

// Runs `kernel` once for each thread of the grid. Returns when all have ended.
void run_grid(const LaunchSize& size, const std::function<void()>& kernel);

}  // namespace fake
