#include "threads.hpp"

#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace riskfield {
namespace {

class Pool {
 public:
  void run(int count, const std::function<void(int)>& body) {
    const std::lock_guard<std::mutex> one_caller(callers_);
    while (static_cast<int>(workers_) < count - 1) start_worker();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      body_ = &body;
      wanted_ = count;
      running_ = count - 1;
      error_ = nullptr;
      ++job_;
    }
    start_.notify_all();
    execute(0, body);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return running_ == 0; });
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
        {
          std::unique_lock<std::mutex> lock(mutex_);
          start_.wait(lock, [&] { return job_ != seen; });
          seen = job_;
          if (number >= wanted_) continue;
          body = body_;
        }
        execute(number, *body);
        {
          const std::lock_guard<std::mutex> lock(mutex_);
          --running_;
        }
        done_.notify_one();
      }
    }).detach();
    ++workers_;  // only now: starting a thread may fail
  }

  void execute(int number, const std::function<void(int)>& body) {
    try {
      body(number);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }

  std::mutex callers_, mutex_;
  std::condition_variable start_, done_;
  const std::function<void(int)>* body_ = nullptr;
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
  if (count <= 1)
    body(0);
  else
    pool().run(count, body);
}

void Barrier::pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

void Barrier::yield() { std::this_thread::yield(); }

}  // namespace riskfield
