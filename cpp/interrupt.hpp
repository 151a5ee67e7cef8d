// Interrupting a long call. The thread that made the call asks now and then whether it should stop; the threads that
// help it notice when it does, or when any of them fails.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace riskfield {

// One call of the engine. While it exists, `poll` on this thread and on those that `parallel` starts for it may throw.
class Call {
 public:
  // `check` throws if the call should stop; null if nobody can ask for that. Only the thread that made the call runs
  // it.
  explicit Call(void (*check)());
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void stop() { stopped_.store(true, std::memory_order_relaxed); }

 private:
  friend class Helper;
  friend void poll();
  void (*const check_)();
  Call* const outer_;
  std::chrono::steady_clock::time_point last_check_;
  std::atomic<bool> stopped_{false};
};

// Makes this thread a helper of a call.
class Helper {
 public:
  explicit Helper(Call* call);
  ~Helper();
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;
};

// The call this thread works for, or null.
Call* current_call();

// Thrown out of helpers when their call has stopped. The reason is thrown by another thread.
struct Abandoned {};

// Throws if the call of this thread should stop or has stopped.
void poll();

// Polls whenever enough work has been done: work is counted in table entries times vectors, of which a processor does
// at least a few per microsecond.
class Ticker {
 public:
  static constexpr std::int64_t kWorkBetweenPolls = std::int64_t(1) << 16;
  void operator()(std::int64_t work) {
    left_ -= work;
    if (left_ < 0) {
      left_ = kWorkBetweenPolls;
      poll();
    }
  }

 private:
  std::int64_t left_ = kWorkBetweenPolls;
};

// Calls body(a, b) for pieces [a, b) of [begin, end) and ticks after each. `work` is that of one member.
template <class Body>
inline void in_chunks(std::int64_t begin, std::int64_t end, std::int64_t work, Ticker& tick, const Body& body) {
  constexpr std::int64_t kMost = Ticker::kWorkBetweenPolls;
  // Most pieces are whole; then no time is lost by a division.
  const std::int64_t chunk = (end - begin) * work <= kMost ? end - begin : work < kMost ? kMost / work : 1;
  while (begin < end) {
    const std::int64_t next = end - begin < chunk ? end : begin + chunk;
    body(begin, next);
    tick((next - begin) * work);
    begin = next;
  }
}

}  // namespace riskfield
