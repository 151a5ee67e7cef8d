#include "threads.hpp"

#include <unistd.h>

#include <chrono>
#include <exception>
#include <thread>

#include "interrupt.hpp"
#include "polling_mutex.hpp"

namespace riskfield {
namespace {

// How long threads sleep before they look whether their call has stopped.
constexpr std::chrono::milliseconds kNap{20};

class Pool {
 public:
  void run(int count, const std::function<void(int)>& body) {
    const std::lock_guard<PollingMutex> one_caller(callers_);
    while (static_cast<int>(workers_) < count - 1) start_worker();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      body_ = &body;
      call_ = current_call();
      wanted_ = count;
      running_ = count - 1;
      error_ = nullptr;
      ++job_;
    }
    start_.notify_all();
    execute([&] { body(0); });
    std::unique_lock<std::mutex> lock(mutex_);
    while (!done_.wait_for(lock, kNap, [&] { return running_ == 0; })) {
      lock.unlock();
      execute(poll);
      lock.lock();
    }
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void start_worker() {
    const int number = workers_ + 1;
    unsigned seen;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      seen = job_;
    }
    std::thread([this, number, seen]() mutable {
      while (true) {
        const std::function<void(int)>* body;
        Call* call;
        {
          std::unique_lock<std::mutex> lock(mutex_);
          start_.wait(lock, [&] { return job_ != seen; });
          seen = job_;
          if (number >= wanted_) continue;
          body = body_;
          call = call_;
        }
        {
          const Helper helper(call);
          execute([&] { (*body)(number); });
        }
        {
          const std::lock_guard<std::mutex> lock(mutex_);
          --running_;
        }
        done_.notify_one();
      }
    }).detach();
    ++workers_;  // only now: starting a thread may fail
  }

  template <class Body>
  void execute(Body body) {
    try {
      body();
    } catch (const Abandoned&) {
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
      current_call()->stop();
    }
  }

  PollingMutex callers_;
  std::mutex mutex_;
  std::condition_variable start_, done_;
  const std::function<void(int)>* body_ = nullptr;
  Call* call_ = nullptr;
  std::exception_ptr error_;
  int wanted_ = 0, running_ = 0, workers_ = 0;
  unsigned job_ = 0;
};

// Never destroyed: its workers may still wait when the process ends. A forked child has no workers and gets a new one.
Pool& pool() {
  static std::mutex mutex;
  static Pool* current = nullptr;
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!current || owner != getpid()) {
    current = new Pool;
    owner = getpid();
  }
  return *current;
}

}  // namespace

void parallel(int count, const std::function<void(int)>& body) {
  if (count <= 1) {
    body(0);
  } else if (current_call()) {
    pool().run(count, body);
  } else {
    Call call(nullptr);
    pool().run(count, body);
  }
}

void Barrier::pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

void Barrier::sleep(unsigned round) {
  std::unique_lock<std::mutex> lock(mutex_);
  ++sleepers_;
  // Either the last thread to arrive sees a sleeper and wakes it, or this thread sees the new round.
  while (!changed_.wait_for(lock, kNap, [&] { return round_.load() != round; })) {
    lock.unlock();
    try {
      poll();
    } catch (...) {
      --sleepers_;
      throw;
    }
    lock.lock();
  }
  --sleepers_;
}

void Barrier::wake() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
  }  // whoever counts as a sleeper now waits for the notification
  changed_.notify_all();
}

}  // namespace riskfield
