// A pool of worker threads and a barrier light enough for the levels of a sweep.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace riskfield {

// Run body(0) ... body(count - 1) at the same time, body(0) on the calling thread; returns when all are done.
// An exception thrown by any of them is thrown again here.
void parallel(int count, const std::function<void(int)>& body);

// The part of [begin, end) that falls to one of several threads.
struct Share {
  std::int64_t begin, end;
};
inline Share share(std::int64_t begin, std::int64_t end, int thread, int threads) {
  const std::int64_t count = end - begin;
  return {begin + count * thread / threads, begin + count * (thread + 1) / threads};
}

// Spins briefly, then yields: levels take microseconds, so sleeping would cost more than it saves.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void wait() {
    const unsigned round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < 4096)
        pause();
      else
        yield();
    }
  }

 private:
  static void pause();
  static void yield();
  const int count_;
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> round_{0};
};

}  // namespace riskfield
