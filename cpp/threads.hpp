// A pool of worker threads and a barrier light enough for the levels of a sweep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

namespace riskfield {

// Run body(0) ... body(count - 1) at the same time, body(0) on the calling thread; returns when all are done. They may
// wait for each other. An exception thrown by any of them is thrown again here; the others notice when they next
// `poll`.
void together(int count, const std::function<void(int)>& body);

// The same for bodies that do not wait for each other. While the processors are crowded they run one after the other.
void parallel(int count, const std::function<void(int)>& body);

// Whether other programs have lately kept our threads from running at the same time, so that one thread would have been
// as fast as all of them. Asked again after a while.
bool crowded();
// Takes the processors for crowded from now on for so long, in seconds; for tests.
void assume_crowded(double seconds);

// The part of [begin, end) that falls to one of several threads.
struct Share {
  std::int64_t begin, end;
};
inline Share share(std::int64_t begin, std::int64_t end, int thread, int threads) {
  const std::int64_t count = end - begin;
  return {begin + count * thread / threads, begin + count * (thread + 1) / threads};
}

// Waiting threads spin for about as long as a level takes, then sleep: if one of them has lost its processor to another
// program, spinning on the other processors would keep it from getting one of those.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  // Throws if the call of this thread is to stop (see interrupt.hpp).
  void wait() {
    const unsigned round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1);
      if (sleepers_.load() > 0) wake();
      return;
    }
    for (int spins = 0; spins < kSpins; ++spins) {
      if (round_.load(std::memory_order_acquire) != round) return;
      pause();
    }
    sleep(round);
  }

 private:
  static constexpr int kSpins = 1000;
  static void pause();
  void sleep(unsigned round);
  void wake();

  const int count_;
  std::atomic<int> arrived_{0}, sleepers_{0};
  std::atomic<unsigned> round_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace riskfield
