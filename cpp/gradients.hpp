// What the backward pass accumulates.
#pragma once

#include "context.hpp"
#include "threads.hpp"

namespace riskfield::RISKFIELD_ISA {

// Whether the gradient of a belief can be added to `node_theta` at once: the log-belief is a plain sum of messages,
// and no message that the same stage sends was made from the belief before.
template <class T>
bool gathers_at_once(const Context<T>& context) {
  return context.kind == Kind::kSumProduct && !context.node_power && context.plan->sweep != Sweep::kAllAtOnce;
}

// Gradients with respect to what an item holds, in the same storage.
//
// A belief is a sum over its messages, so whatever gradient it gets is also one of each of them. It is not added to
// them one by one: `messages` holds the rest, what a message's own gradient has more than `node_theta`, which has
// gathered the gradients of the belief since the beginning. `beliefs` has what `node_theta` is still to get when the
// update of the belief is reached. Of variables whose messages are ratios, both hold the gradient of state 0 only.
template <class T>
struct GradientBuffers {
  Buffer<T> tables, node_theta, beliefs, messages[2];
  Buffer<T> tied;     // of each part but the first, what it adds to tables that factors share
  Buffer<T> parcels;  // see TileLanes::belief_rows
  Buffer<T> sum;      // of the gradients of all messages sent, for Pass::kSum
  // For Pass::kCounting: what counting numbers have got (group -> factor); of a message, how much `node_theta` had when
  // it was last looked at, and the gradient of its belief.
  std::vector<std::vector<T>> counting;
  Buffer<T> seen, of_belief;

  explicit GradientBuffers(const Context<T>& context) {
    const Plan& plan = *context.plan;
    tables.allocate(plan.table_size);
    node_theta.allocate(plan.node_size);
    if (!gathers_at_once(context)) beliefs.allocate(plan.node_size);
    messages[0].allocate(plan.gradient_size);
    if (plan.sweep == Sweep::kAllAtOnce) messages[1].allocate(plan.gradient_size);
    tied.allocate((plan.parts - 1) * tied_size(plan));
    parcels.allocate(plan.parcels_size);
  }
  // Of one part, with room so that no cache line belongs to two of them.
  static Index tied_size(const Plan& plan) {
    constexpr Index kLine = 64 / sizeof(T);
    return (plan.tied_size + 2 * kLine - 1) / kLine * kLine;
  }
  void begin_counting(const Plan& plan) {
    for (const Group& group : plan.groups) counting.emplace_back(group.count + kLanes<T>, T(0));
    for (Buffer<T>* buffer : {&seen, &of_belief}) {
      buffer->allocate(plan.gradient_size);
      buffer->fill(0);
    }
  }
  // One of several threads' share in setting everything to zero.
  void clear(int part, int parts, Ticker& tick) {
    for (Buffer<T>* buffer : {&tables, &node_theta, &beliefs, &messages[0], &messages[1], &tied, &parcels}) {
      const Share own = share(0, buffer->size(), part, parts);
      fill(buffer->get() + own.begin, buffer->get() + own.end, T(0), tick);
    }
  }
};

// The same as the thread that works on one part of the plan sees it, and what this thread adds up on its own.
template <class T>
struct Gradients {
  T *tables, *tied, *node_theta, *beliefs, *parcels, *messages[2], *sum, *seen, *of_belief;
  std::vector<std::vector<T>>* counting;  // or null
  const T* next_table = nullptr;          // to ask for while that of a tile is read
  T* rates = nullptr;                     // for Pass::kDeferred: where to write the gradients of unnormalised messages
  bool streams = false;                   // whether that is past the cache
  V<T> square{};                          // of those of the last sweep, lane by lane
  V<T> scale{};                           // squares of mu g, lane by lane, to compare it with
  int current = 0;  // gradient of the present messages; the other buffer serves schedules that send all at once

  Gradients(const Plan& plan, GradientBuffers<T>& in, int part)
      : tables(in.tables.get()),
        tied(part == 0 ? tables : in.tied.get() + (part - 1) * in.tied_size(plan)),
        node_theta(in.node_theta.get()),
        beliefs(in.beliefs.get() ? in.beliefs.get() : in.node_theta.get()),
        parcels(in.parcels.get()),
        messages{in.messages[0].get(), in.messages[1].get()},
        sum(in.sum.get()),
        seen(in.seen.get()),
        of_belief(in.of_belief.get()),
        counting(in.counting.empty() ? nullptr : &in.counting) {}
};

}  // namespace riskfield::RISKFIELD_ISA
