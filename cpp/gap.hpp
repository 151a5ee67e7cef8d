// The gap of an item, measured on one tile of factors after another: how inconsistent factor and node marginals are,
// and how far undamped updates would move the log-messages. `MessagePassingRun.gap` in kernels/torch_reference.py
// derives it.
#pragma once

#include "unpacking.hpp"

namespace riskfield::RISKFIELD_ISA {

template <class T>
constexpr double kEpsilon =
    std::is_same<T, float>::value ? std::numeric_limits<float>::epsilon() : std::numeric_limits<double>::epsilon();

// Logarithms of a variable's belief, normalised, and of the message it has from a factor, up to a constant. A state
// that either rules out is -inf in the belief and 0 in the message. Returns the expected size of both.
template <class Algebra, class T, class Lanes>
V<T> log_operands(const Item<T>& item, const Group& group, const Lanes& lanes, int slot, V<T> inverse, V<T>* belief,
                  V<T>* message) {
  const int n = group.dims[slot], first = Algebra::template first_state<0>(n);
  for (int x = 0; x < n; ++x) belief[x] = Algebra::log_belief(n, x, lanes.belief(item.beliefs.get(), slot, x));
  Logarithm<T, false>::normalise(belief, n);
  V<T> size{};
  for (int x = 0; x < n; ++x) {
    message[x] = V<T>{};
    if (x >= first)
      message[x] = Algebra::log_message(lanes.message(item.messages[item.current].get(), slot, x)) * inverse;
    if (x == 1) message[x] -= growth_of<Algebra, T>(item, group, lanes, slot);
    const I<T> possible = (belief[x] > kNegInf<T>)&(message[x] > kNegInf<T>);
    belief[x] = select<T>(possible, belief[x], splat<T>(kNegInf<T>));
    message[x] = select<T>(possible, message[x], V<T>{});
    size += select<T>(possible, vexp<T>(belief[x]) * (vabs<T>(belief[x]) + vabs<T>(message[x])), V<T>{});
  }
  return size;
}

// How inconsistent one variable's belief is with a factor's own marginal of it, and the step of the message, from
// logarithms: see `log_operands`. `update` is the undamped message; `next` is for working. `size` is that of the
// numbers that updates are the sum of.
template <class T>
RF_NOINLINE void measure_slot(int n, bool sum_product, V<T> size, const V<T>& counting, const V<T>* belief,
                              const V<T>* message, V<T>* update, V<T>* next, V<T>& inconsistency, V<T>& largest) {
  V<T> best = splat<T>(kNegInf<T>), best_cavity{};
  for (int x = 0; x < n; ++x) {
    const I<T> possible = belief[x] > kNegInf<T>;
    const V<T> value = update[x];
    size += select<T>(possible & (value > kNegInf<T>), vexp<T>(belief[x]) * vabs<T>(value), V<T>{});
    update[x] = select<T>(possible, value - message[x], V<T>{});
    next[x] = belief[x] + update[x];  // the factor's own marginal of the variable, up to a factor
    best_cavity = select<T>(belief[x] > best, belief[x] - message[x], best_cavity);
    best = vmax<T>(best, belief[x]);
  }
  const V<T> shift = Logarithm<T, false>::finite_or_zero(Logarithm<T, false>::log_total(next, n));
  const V<T> rounding = size * T(kRounding * kEpsilon<T>);
  V<T> of_value{};
  for (int x = 0; x < n; ++x) {
    const I<T> possible = belief[x] > kNegInf<T>;
    const V<T> step = update[x] - shift, weight = vexp<T>(belief[x]);
    V<T> moved = vabs<T>(step);
    moved = select<T>(possible & (moved > rounding), moved, V<T>{});
    const V<T> share = select<T>(moved < T(1), moved, splat<T>(1));
    const V<T> violation = select<T>(step < T(1), weight * share, vexp<T>(belief[x] + step));
    const V<T> multiplier = select<T>(possible, vabs<T>(belief[x] - message[x] - best_cavity), V<T>{});
    inconsistency = vmax<T>(inconsistency, violation);
    of_value += multiplier * violation;
    largest = vmax<T>(largest, moved);
  }
  // A max-product run has no log-partition value of this kind.
  if (sum_product) inconsistency = vmax<T>(inconsistency, of_value * counting);
}

// Message passing. For mean field, below, the node marginals are all there is.
template <class Algebra, class T, class Lanes>
void measure_gap(const Context<T>& context, const Item<T>& item, int g, const Lanes& lanes, Scratch<T>& scratch) {
  const Group& group = context.plan->groups[g];
  const V<T> inverse = lanes.per_factor(context.inverse[g]), counting = lanes.per_factor(context.counting[g]);
  V<T>*belief = scratch.weights, *message = scratch.rates, *update = scratch.out;
  V<T> size = splat<T>(1);
  for (int slot = 0; slot < group.arity; ++slot)
    size += log_operands<Algebra, T>(item, group, lanes, slot, inverse, belief, message);
  const MessageSettings<T> settings = settings_of<Algebra, T>(context, g, lanes);
  auto cavity = [&](int k, V<T>* to) {
    cavity_of<Algebra, T, 0>(lanes, group, k, item, item.messages[item.current].get(), settings, to);
  };
  for (int slot = 0; slot < group.arity; ++slot) {
    const int n = group.dims[slot];
    contract<Algebra, T, 0>(incident<Algebra, T, 0>(item, group, slot, lanes, cavity, update, scratch), n, update);
    for (int x = 0; x < n; ++x) update[x] = Algebra::logarithm(update[x]);
    if (n > 1) update[1] -= growth_of<Algebra, T>(item, group, lanes, slot);
    log_operands<Algebra, T>(item, group, lanes, slot, inverse, belief, message);
    V<T> inconsistency{}, largest{};
    measure_slot<T>(n, context.kind == Kind::kSumProduct, size, counting, belief, message, update, scratch.cavities,
                    inconsistency, largest);
    scratch.gap.marginals = vmax<T>(scratch.gap.marginals, lanes.valid(inconsistency));
    scratch.gap.messages = vmax<T>(scratch.gap.messages, lanes.valid(largest * counting));
  }
}

// Mean field: the size of the numbers that updates are the sum of, which says what is rounding.
template <class T, class Lanes>
void measure_size(const Context<T>& context, const Item<T>& item, int g, const Lanes& lanes, Scratch<T>& scratch) {
  const V<T>* joint = joint_marginals<Expectation<T>, T>(context, item, g, lanes, scratch);
  Index stride;
  const T* table = lanes.tables(item.tables.get(), scratch.table, stride);
  V<T> size = splat<T>(1);
  for (Index e = 0; e < context.plan->groups[g].table_size; ++e)
    size += select<T>(joint[e] > T(0), joint[e] * vabs<T>(load<T>(table + e * stride)), V<T>{});
  scratch.gap.size = vmax<T>(scratch.gap.size, lanes.valid(size));
}

}  // namespace riskfield::RISKFIELD_ISA
