// Pools of worker threads, and how they wait for each other, lightly enough for the levels of a sweep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

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

// How far the threads that work together have come, each in steps that all of them count alike. A thread waits for
// those whose steps it needs, and for no others.
//
// Waiting threads spin for about as long as a level takes, then sleep: if one of them has lost its processor to another
// program, spinning on the other processors would keep it from getting one of those.
class Team {
 public:
  explicit Team(int size);

  // How many steps a member has finished, for that member to ask.
  std::int64_t steps(int member) const { return places_[member].steps.load(std::memory_order_relaxed); }
  void finish_step(int member) {
    Place& own = places_[member];
    const std::int64_t steps = own.steps.load(std::memory_order_relaxed) + 1;
    own.steps.store(steps, std::memory_order_release);
    // A sleeper that this thread does not see yet looks again soon.
    if (own.wanted.load(std::memory_order_relaxed) <= steps) wake(own);
  }
  // Lets a member wait until another one has finished so many steps. Throws if the call of this thread is to stop (see
  // interrupt.hpp).
  void wait_for(int member, int other, std::int64_t steps) {
    // To look where another thread writes takes long.
    std::int64_t& seen = places_[member].seen[other];
    for (int spins = 0; seen < steps; ++spins) {
      seen = places_[other].steps.load(std::memory_order_acquire);
      if (seen >= steps) return;
      if (spins == kSpins) return sleep(places_[other], steps);
      pause();
    }
  }
  // Lets a member wait until all of them have come this far, which is a step.
  void meet(int member) {
    finish_step(member);
    const std::int64_t here = steps(member);
    for (int other = 0; other < size_; ++other)
      if (other != member) wait_for(member, other, here);
  }

 private:
  static constexpr int kSpins = 1000;
  static constexpr std::int64_t kNobody = INT64_MAX;
  // On cache lines of its own, as is what `seen` points to.
  struct alignas(128) Place {
    std::atomic<std::int64_t> steps{0};
    std::atomic<std::int64_t> wanted{kNobody};  // the fewest steps that a sleeper waits for
    std::int64_t* seen = nullptr;               // of the other members, when this one last looked
  };
  static void pause();
  void sleep(Place& other, std::int64_t steps);
  void wake(Place& own);

  const int size_;
  std::vector<Place> places_;
  std::vector<std::int64_t> seen_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace riskfield
