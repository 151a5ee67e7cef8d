// A lock whose waiters can be interrupted.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "interrupt.hpp"

namespace riskfield {

// For std::lock_guard. `lock` throws if the call of this thread is to stop.
class PollingMutex {
 public:
  void lock() {
    std::unique_lock<std::mutex> guard(mutex_);
    while (!free_.wait_for(guard, std::chrono::milliseconds(20), [&] { return !taken_; })) {
      guard.unlock();
      poll();
      guard.lock();
    }
    taken_ = true;
  }
  void unlock() {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      taken_ = false;
    }
    free_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable free_;
  bool taken_ = false;
};

}  // namespace riskfield
