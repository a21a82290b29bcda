#include "stream.h"

#include <set>
#include <thread>
#include <vector>

#include "device.h"
#include "gate.h"

CUstream_st::CUstream_st(int on_device, unsigned with_flags)
    : device(on_device), flags(with_flags) {
  // Detached, and the stream is never freed: a process may end while its streams still work.
  std::thread([this] { run(); }).detach();
}

void CUstream_st::run() {
  std::unique_lock<std::mutex> guard(lock_);
  for (;;) {
    changed_.wait(guard, [this] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::function<void()> operation = std::move(queue_.front());
    queue_.pop_front();
    guard.unlock();
    fake::delay();
    if (!fake::sticky()) {
      const fake::GateOpening opening;
      operation();
    }
    guard.lock();
    finished_++;
    changed_.notify_all();
  }
}

std::uint64_t CUstream_st::push(std::function<void()> operation) {
  std::lock_guard<std::mutex> guard(lock_);
  queue_.push_back(std::move(operation));
  changed_.notify_all();
  return ++pushed_;
}

std::uint64_t CUstream_st::last() {
  std::lock_guard<std::mutex> guard(lock_);
  return pushed_;
}

bool CUstream_st::done(std::uint64_t number) {
  std::lock_guard<std::mutex> guard(lock_);
  return finished_ >= number;
}

void CUstream_st::wait(std::uint64_t number) {
  std::unique_lock<std::mutex> guard(lock_);
  changed_.wait(guard, [&] { return finished_ >= number; });
}

void CUstream_st::close() {
  std::lock_guard<std::mutex> guard(lock_);
  closed_ = true;
  changed_.notify_all();
}

namespace fake {
namespace {

struct Streams {
  std::mutex lock;
  std::set<CUstream> all;
  CUstream legacy = nullptr;
};

Streams& streams() {
  static Streams& streams = *new Streams;
  return streams;
}

std::vector<Ticket> open_tickets(bool blocking_only) {
  std::lock_guard<std::mutex> guard(streams().lock);
  std::vector<Ticket> tickets;
  for (CUstream stream : streams().all)
    if (!blocking_only || !(stream->flags & CU_STREAM_NON_BLOCKING))
      tickets.push_back({stream, stream->last()});
  return tickets;
}

}  // namespace

CUstream resolve(CUstream handle) {
  if (handle != nullptr && handle != CU_STREAM_LEGACY && handle != CU_STREAM_PER_THREAD)
    return handle;
  std::lock_guard<std::mutex> guard(streams().lock);
  if (!streams().legacy) {
    streams().legacy = new CUstream_st(current_device(), CU_STREAM_NON_BLOCKING);
    streams().all.insert(streams().legacy);
  }
  return streams().legacy;
}

Ticket enqueue(CUstream handle, std::function<void()> operation) {
  const CUstream stream = resolve(handle);
  if (stream != handle)
    for (const Ticket& ticket : open_tickets(true)) ticket.wait();
  return {stream, stream->push(std::move(operation))};
}

CUstream create_stream(int device, unsigned flags) {
  const CUstream stream = new CUstream_st(device, flags);
  std::lock_guard<std::mutex> guard(streams().lock);
  streams().all.insert(stream);
  return stream;
}

void destroy_stream(CUstream stream) {
  {
    std::lock_guard<std::mutex> guard(streams().lock);
    streams().all.erase(stream);
  }
  stream->close();
}

void wait_for_all_streams() {
  for (const Ticket& ticket : open_tickets(false)) ticket.wait();
}

}  // namespace fake
