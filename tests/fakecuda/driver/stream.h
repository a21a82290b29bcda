// Streams and events: a worker thread per stream runs its operations in order.
//
// After a sticky error queued operations are skipped, as on hardware: their effects never come.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "faults.h"

struct CUstream_st {
 public:
  CUstream_st(int device, unsigned flags);

  const int device;  // physical
  const unsigned flags;

  // Queues an operation and returns its number.
  std::uint64_t push(std::function<void()> operation);
  std::uint64_t last();
  bool done(std::uint64_t number);
  void wait(std::uint64_t number);
  // Lets the worker end once the queue is empty.
  void close();

 private:
  void run();
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::uint64_t pushed_ = 0, finished_ = 0;
  bool closed_ = false;
};

namespace fake {

// A point in a stream.
struct Ticket {
  CUstream stream = nullptr;
  std::uint64_t number = 0;
  bool done() const { return !stream || stream->done(number); }
  void wait() const {
    if (stream) stream->wait(number);
  }
};

struct Event {
  std::mutex lock;
  Ticket ticket;
  Ticket point() {
    std::lock_guard<std::mutex> guard(lock);
    return ticket;
  }
};

// The stream behind a handle: 0 and the legacy handles mean the default stream.
CUstream resolve(CUstream handle);

// Queues on `handle`. The default stream first waits for all blocking streams.
Ticket enqueue(CUstream handle, std::function<void()> operation);

CUstream create_stream(int device, unsigned flags);
void destroy_stream(CUstream stream);
void wait_for_all_streams();

}  // namespace fake

struct CUevent_st {
  std::shared_ptr<fake::Event> event = std::make_shared<fake::Event>();
};
