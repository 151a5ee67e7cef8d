#include "threads.hpp"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

#include "interrupt.hpp"

namespace riskfield {
namespace {

// How long threads sleep before they look whether their call has stopped, and whether they have missed being woken.
constexpr std::chrono::milliseconds kNap{20}, kShortNap{1};

double seconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

thread_local double slept = 0;  // seconds for which this thread has waited for others
std::atomic<double> crowded_until{0};

// What a team has used.
struct Usage {
  double busy = 0;       // seconds of processor time of all threads
  double displaced = 0;  // the longest time for which a thread could have run, but had no processor

  // Calls body(), which should have started at `began`, and returns what it used.
  template <class Body>
  static Usage of(double began, Body body) {
    const double busy = seconds(CLOCK_THREAD_CPUTIME_ID), waited = slept;
    body();
    Usage usage;
    usage.busy = seconds(CLOCK_THREAD_CPUTIME_ID) - busy;
    usage.displaced = seconds(CLOCK_MONOTONIC) - began - usage.busy - (slept - waited);
    return usage;
  }
  void add(const Usage& other) {
    busy += other.busy;
    displaced = std::max(displaced, other.displaced);
  }
};

// Looks whether one thread would have done the work of a team in about the same time, because others of the team were
// displaced. If so, the next attempt is so much later that it costs little.
void judge(double began, const Usage& usage) {
  constexpr double kShortest = 2e-4;  // what is shorter says nothing
  const double now = seconds(CLOCK_MONOTONIC), wall = now - began;
  if (wall > kShortest && usage.displaced > 0.25 * wall && wall > 0.8 * usage.busy)
    crowded_until = now + std::max(0.02, 10 * wall);
}

class Pool {
 public:
  void run(int count, const std::function<void(int)>& body) {
    while (static_cast<int>(workers_) < count - 1) start_worker();
    const double began = seconds(CLOCK_MONOTONIC);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      body_ = &body;
      call_ = current_call();
      wanted_ = count;
      running_ = count - 1;
      error_ = nullptr;
      usage_ = {};
      began_ = began;
      ++job_;
    }
    start_.notify_all();
    const Usage own = Usage::of(began, [&] { execute([&] { body(0); }); });
    std::unique_lock<std::mutex> lock(mutex_);
    while (!done_.wait_for(lock, kNap, [&] { return running_ == 0; })) {
      lock.unlock();
      execute(poll);
      lock.lock();
    }
    if (error_) std::rethrow_exception(error_);
    usage_.add(own);
    judge(began, usage_);
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
        double began;
        {
          std::unique_lock<std::mutex> lock(mutex_);
          start_.wait(lock, [&] { return job_ != seen; });
          seen = job_;
          if (number >= wanted_) continue;
          body = body_;
          call = call_;
          began = began_;
        }
        Usage own;
        {
          const Helper helper(call);
          own = Usage::of(began, [&] { execute([&] { (*body)(number); }); });
        }
        {
          const std::lock_guard<std::mutex> lock(mutex_);
          usage_.add(own);
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

  std::mutex mutex_;
  std::condition_variable start_, done_;
  const std::function<void(int)>* body_ = nullptr;
  Call* call_ = nullptr;
  std::exception_ptr error_;
  Usage usage_;
  double began_ = 0;
  int wanted_ = 0, running_ = 0, workers_ = 0;
  unsigned job_ = 0;
};

// Lends a pool to one call at a time, so that calls of several threads do not wait for each other. Pools are never
// destroyed: their workers may still wait when the process ends. A forked child has no workers and gets new pools.
class Lease {
 public:
  Lease() {
    const std::lock_guard<std::mutex> lock(mutex());
    static pid_t owner = 0;
    if (owner != getpid()) idle() = {};
    owner = getpid();
    if (idle().empty()) idle().push_back(new Pool);
    pool_ = idle().back();
    idle().pop_back();
  }
  ~Lease() {
    const std::lock_guard<std::mutex> lock(mutex());
    idle().push_back(pool_);
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  Pool& pool() { return *pool_; }

 private:
  static std::mutex& mutex() {
    static std::mutex* const one = new std::mutex;
    return *one;
  }
  static std::vector<Pool*>& idle() {
    static auto* const pools = new std::vector<Pool*>;
    return *pools;
  }

  Pool* pool_;
};

}  // namespace

bool crowded() { return crowded_until.load() > 0 && seconds(CLOCK_MONOTONIC) < crowded_until.load(); }

void assume_crowded(double duration) { crowded_until = seconds(CLOCK_MONOTONIC) + duration; }

void parallel(int count, const std::function<void(int)>& body) {
  if (!crowded()) return together(count, body);
  for (int k = 0; k < count; ++k) body(k);
}

void together(int count, const std::function<void(int)>& body) {
  if (count <= 1) {
    body(0);
  } else if (current_call()) {
    Lease().pool().run(count, body);
  } else {
    Call call(nullptr);
    Lease().pool().run(count, body);
  }
}

Team::Team(int size) : size_(size), places_(size) {
  constexpr std::size_t kLine = 128 / sizeof(std::int64_t);
  const std::size_t each = (static_cast<std::size_t>(size) + 2 * kLine - 1) / kLine * kLine;
  seen_.assign(each * size, 0);
  for (int member = 0; member < size; ++member) places_[member].seen = seen_.data() + each * member;
}

void Team::pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void Team::sleep(Place& other, std::int64_t steps) {
  const double began = seconds(CLOCK_MONOTONIC);
  std::unique_lock<std::mutex> lock(mutex_);
  while (other.steps.load(std::memory_order_acquire) < steps) {
    other.wanted.store(std::min(other.wanted.load(std::memory_order_relaxed), steps), std::memory_order_relaxed);
    changed_.wait_for(lock, kShortNap);
    lock.unlock();
    poll();
    lock.lock();
  }
  slept += seconds(CLOCK_MONOTONIC) - began;
}

void Team::wake(Place& own) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    own.wanted.store(kNobody, std::memory_order_relaxed);
  }
  changed_.notify_all();
}

}  // namespace riskfield
