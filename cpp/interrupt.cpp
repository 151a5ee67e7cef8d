#include "interrupt.hpp"

namespace riskfield {
namespace {

constexpr std::chrono::milliseconds kBetweenChecks{50};

struct Current {
  Call* call = nullptr;
  bool caller = false;  // whether this thread made the call
};
thread_local Current current;

}  // namespace

Call::Call(void (*check)()) : check_(check), outer_(current.call), last_check_(std::chrono::steady_clock::now()) {
  current = {this, true};
}
Call::~Call() { current = {outer_, outer_ != nullptr}; }

Helper::Helper(Call* call) { current = {call, false}; }
Helper::~Helper() { current = {}; }

Call* current_call() { return current.call; }

void poll() {
  Call* call = current.call;
  if (!call) return;
  if (call->stopped_.load(std::memory_order_relaxed)) throw Abandoned();
  if (!current.caller || !call->check_) return;
  const auto now = std::chrono::steady_clock::now();
  if (now - call->last_check_ < kBetweenChecks) return;
  call->last_check_ = now;
  try {
    call->check_();
  } catch (...) {
    call->stop();
    throw;
  }
}

}  // namespace riskfield
