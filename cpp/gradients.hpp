// What the backward pass accumulates.
#pragma once

#include "context.hpp"

namespace riskfield::RISKFIELD_ISA {

// Gradients with respect to what an item holds, in the same storage.
//
// A belief is a sum over its messages, so whatever gradient it gets is also one of each of them. It is not added to
// them one by one: `messages` holds the rest, what a message's own gradient has more than `node_theta`, which has
// gathered the gradients of the belief since the beginning.
template <class T>
struct Gradients {
  Buffer<T> tables, node_theta, beliefs, messages[2];
  Buffer<T> sum;       // of the gradients of all messages sent, for Pass::kSum
  T* rates = nullptr;  // for Pass::kDeferred: where to write the gradients of unnormalised messages
  // For Pass::kCounting: what counting numbers have got (group -> factor); of a message, how much `node_theta` had when
  // it was last looked at, and the gradient of its belief.
  std::vector<std::vector<T>> counting;
  Buffer<T> seen, of_belief;
  V<T> square{};    // of those of the last sweep, lane by lane
  V<T> scale{};     // squares of mu g, lane by lane, to compare it with
  int current = 0;  // gradient of the present messages; the other buffer serves schedules that send all at once

  explicit Gradients(const Plan& plan) {
    tables.allocate(plan.table_size);
    node_theta.allocate(plan.node_size);
    beliefs.allocate(plan.node_size);
    messages[0].allocate(plan.message_size);
    if (plan.sweep == Sweep::kAllAtOnce) messages[1].allocate(plan.message_size);
  }
  void begin_counting(const Plan& plan) {
    counting.clear();
    for (const Group& group : plan.groups) counting.emplace_back(group.count + kLanes<T>, T(0));
    for (Buffer<T>* buffer : {&seen, &of_belief}) {
      buffer->allocate(plan.message_size);
      buffer->fill(0);
    }
  }
  void clear() {
    counting.clear();
    scale = V<T>{};
    for (Buffer<T>* buffer : {&tables, &node_theta, &beliefs, &messages[0], &messages[1]}) buffer->fill(0);
    current = 0;
  }
};

}  // namespace riskfield::RISKFIELD_ISA
