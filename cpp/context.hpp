// What all items of a run share, and the working memory of one thread.
#pragma once

#include <iterator>
#include <memory>
#include <vector>

#include "algebra.hpp"
#include "interrupt.hpp"
#include "item.hpp"

namespace riskfield::RISKFIELD_ISA {

template <class T>
struct Context {
  std::shared_ptr<const Plan> plan;
  Kind kind;
  T damping;
  std::vector<std::vector<T>> counting, inverse;  // group -> factor: c and 1 / c
  std::vector<Power> power;                       // group
  std::vector<T> uniform;                         // group: the c of all its factors, or 0
  std::vector<T> node_inverse;                    // packed node: 1 / c^
  bool node_power = false;                        // whether any c^ differs from 1
  bool log_messages = false;                      // whether powers need logarithms (see LogMessages)

  explicit Context(const RunInput<T>& in) : plan(in.plan), kind(in.kind), damping(static_cast<T>(in.damping)) {
    const bool mean_field = kind == Kind::kMeanField;
    for (const Group& group : plan->groups) {
      std::vector<T> c(group.count + kLanes<T>, T(1)), inverse_c(c);
      bool equal = true;
      for (Index f = 0; f < group.count && !mean_field; ++f) {
        const UserGroup& from = plan->user_groups[group.user_group[f]];
        const double value = in.factor_counting[from.factor_start + group.user_row[f]];
        c[f] = static_cast<T>(value);
        inverse_c[f] = static_cast<T>(1 / value);
        equal &= c[f] == c[0];
      }
      uniform.push_back(equal ? c[0] : T(0));
      power.push_back(damping > 0 || !equal ? Power::kAny
                      : c[0] == T(1)        ? Power::kOne
                      : c[0] == T(0.5)      ? Power::kHalf
                                            : Power::kAny);
      log_messages |= power.back() == Power::kAny;
      counting.push_back(std::move(c));
      inverse.push_back(std::move(inverse_c));
    }
    node_inverse.assign(plan->num_nodes + kLanes<T>, T(1));
    for (Index p = 0; p < plan->num_nodes && !mean_field; ++p) {
      const double total = in.node_counting[plan->variable[p]];
      node_inverse[p] = static_cast<T>(1 / total);
      node_power |= total != 1;
    }
    log_messages |= node_power;
  }
};

// Whether the item computes with probabilities and keeps messages and beliefs as logarithms (see LogMessages).
template <class T>
bool keeps_logarithms(const Context<T>& context, const Item<T>& item) {
  return context.log_messages && context.kind == Kind::kSumProduct && !item.log_domain;
}

// Whether messages to a variable of so many states are kept as ratios (see ratio.hpp).
template <class T>
bool keeps_ratio(const Context<T>& context, const Item<T>& item, int states) {
  return context.kind == Kind::kSumProduct && !item.log_domain && Probability<T, Power::kOne>::keeps_ratio(states);
}

// Entry x of the belief of a variable, from what is stored: up to a factor, its marginal.
template <class T>
T weight_of(const Context<T>& context, const Item<T>& item, int states, int x, T belief) {
  using std::exp;
  if (item.log_domain) return exp(belief);
  if (!keeps_logarithms(context, item) || (x == 1 && keeps_ratio(context, item, states))) return belief;
  return exp(belief * T(kLn2<double>));
}

// How far a state is from a fixed point, lane by lane: see gap.hpp.
template <class T>
struct Gap {
  V<T> marginals{};  // the largest inconsistency, also weighted by its part in the log-partition value
  V<T> messages{};   // the largest undamped step of a log-message
  V<T> size{};       // mean field: of the numbers that updates are the sum of
};

// Arrays of vectors for tables, cavities and messages of one tile.
template <class T>
struct Scratch {
  Buffer<T> storage;
  V<T>*table, *cavities, *before, *after, *spare, *weights, *out, *rates;
  Ticker tick;           // of the thread that uses this
  T* tape = nullptr;     // where to write down what updates were made from; null for none
  bool streams = false;  // whether that is past the cache
  bool measure = false;  // whether to look at the change of beliefs
  V<T> change{};         // the largest one, lane by lane
  Gap<T> gap;
  V<T> least{};  // lane by lane, 0 if an impossible variable was met

  explicit Scratch(const Plan& plan) {
    V<T>** parts[] = {&table, &cavities, &before, &after, &spare, &weights, &out, &rates};
    const Index size = std::max<Index>(plan.max_table, plan.max_states);
    storage.allocate(size * kLanes<T> * std::size(parts));
    V<T>* at = reinterpret_cast<V<T>*>(storage.get());
    for (V<T>** part : parts) {
      *part = at;
      at += size;
    }
  }
};

}  // namespace riskfield::RISKFIELD_ISA
