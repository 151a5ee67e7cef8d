// From the gradient of factor marginals to that of beliefs, messages and tables: where the backward pass begins.
#pragma once

#include "reverse.hpp"

namespace riskfield::RISKFIELD_ISA {

template <class T>
bool all_zero(const T* numbers, Index count) {
  bool found = false;
  for (Index k = 0; k < count; ++k) found |= !is_zero(numbers[k]);
  return !found;
}

// Where the gradients of a tile's factor marginals lie, lane by lane; null for spare lanes and copies.
template <class T>
struct MarginalGradients {
  const T* from[kLanes<T>] = {};
  bool any = false;  // whether any is not zero

  template <class Lanes>
  MarginalGradients(const Plan& plan, const Item<T>& item, const Group& group, const Lanes& lanes, int count,
                    const ConstRows<T>& grad_mu) {
    for (int l = 0; l < count; ++l) {
      const Index f = lanes.factor(l);
      if (plan.copy_of(f) >= item.num_models()) continue;
      from[l] = grad_mu[plan.copy_of(f)] + user_marginals(plan, group, f);
      any = any || !all_zero(from[l], group.table_size);
    }
  }
};

// From the gradient of a tile's factor marginals.
template <class Algebra, class T, class Lanes>
void reverse_marginals(const Context<T>& context, const Item<T>& item, int g, const Lanes& lanes, int count,
                       const ConstRows<T>& grad_mu, Gradients<T>& grad, Scratch<T>& scratch) {
  constexpr bool kExpectation = kIsExpectation<Algebra, T>;
  const Plan& plan = *context.plan;
  const Group& group = plan.groups[g];
  const MarginalGradients<T> given(plan, item, group, lanes, count, grad_mu);
  if (!given.any) return;
  V<T>* weight = scratch.weights;
  for (Index e = 0; e < group.table_size; ++e) weight[e] = V<T>{};
  for (int l = 0; l < count; ++l) {
    if (!given.from[l]) continue;
    const Index* map = group.entry_maps[group.permutation[lanes.factor(l)]].data();
    for (Index e = 0; e < group.table_size; ++e) set_lane<T>(weight[e], l, given.from[l][map[e]]);
  }
  V<T>* joint = joint_marginals<Algebra, T>(context, item, g, lanes, scratch);
  V<T> mean{}, scale{};
  for (Index e = 0; e < group.table_size; ++e) {
    const V<T> share = weight[e] * joint[e];
    mean += share;
    scale += share * share;
  }
  grad.scale += lanes.valid(scale);
  if constexpr (kExpectation) mean = V<T>{};
  for (Index e = 0; e < group.table_size; ++e) {
    weight[e] = (weight[e] - mean) * joint[e];
    if (!kExpectation) lanes.add_table(grad.tables, grad.tied, e, weight[e]);
  }
  if constexpr (!kExpectation)
    if (grad.counting) add_counting_of_table<Algebra, T>(context, item, g, lanes, weight, grad, scratch);
  const V<T> inverse = lanes.per_factor(context.inverse[g]);
  for (int slot = 0; slot < group.arity; ++slot)
    spread_to_slot<Algebra, T>(group, slot, weight, lanes, inverse, grad, grad.messages[grad.current], scratch);
}

// The same for pairs of variables of S states each, in probabilities.
template <class Algebra, class T, int S, class Lanes>
RF_NOINLINE void reverse_pair_marginals(const Context<T>& context, const Item<T>& item, int g, const Lanes& lanes,
                                        int count, const ConstRows<T>& grad_mu, Gradients<T>& grad,
                                        Scratch<T>& scratch) {
  const Group& group = context.plan->groups[g];
  const MarginalGradients<T> given(*context.plan, item, group, lanes, count, grad_mu);
  if (!given.any) return;
  T weights[S * S][kLanes<T>] = {};
  for (int l = 0; l < count; ++l) {
    if (!given.from[l]) continue;
    const Index* map = group.entry_maps[group.permutation[lanes.factor(l)]].data();
    for (int e = 0; e < S * S; ++e) weights[e][l] = given.from[l][map[e]];
  }
  const MessageSettings<T> settings = settings_of<Algebra, T>(context, g, lanes);
  V<T> cavity[2][S], joint[S * S], total{}, mean{}, squares{};
  for (int slot = 0; slot < 2; ++slot)
    cavity_of<Algebra, T, S>(lanes, group, slot, item, item.messages[item.current].get(), settings, cavity[slot]);
  Index stride;
  const T* table = whole_tables<Algebra, T, S>(item, group, lanes, scratch.table, stride);
  for (int x = 0; x < S; ++x)
    RF_FOR (y, 0, S) {
      const int e = x * S + y;
      joint[e] = cavity[0][x] * cavity[1][y] * load<T>(table + e * stride);
      total += joint[e];
    }
  const V<T> scale = T(1) / total;
  for (int e = 0; e < S * S; ++e) {
    joint[e] *= scale;
    const V<T> share = load<T>(weights[e]) * joint[e];
    mean += share;
    squares += share * share;
  }
  grad.scale += lanes.valid(squares);
  const bool sums = keeps_sums(context, item, group, grad.counting != nullptr);
  const V<T> inverse = lanes.per_factor(context.inverse[g]);
  V<T> sum[2][S] = {};
  for (int x = 0; x < S; ++x)
    RF_FOR (y, 0, S) {
      const int e = x * S + y;
      joint[e] *= load<T>(weights[e]) - mean;
      sum[0][x] += joint[e];
      sum[1][y] += joint[e];
      if (!sums || e == 0) lanes.add_table(grad.tables, grad.tied, e, joint[e]);
    }
  if (sums)
    for (int slot = 0; slot < 2; ++slot) lanes.add_tied(grad.tied, 1 + slot, sum[slot][0]);
  if (grad.counting) add_counting_of_table<Algebra, T>(context, item, g, lanes, joint, grad, scratch);
  for (int slot = 0; slot < 2; ++slot)
    add_cavity<Algebra, T, S>(lanes, slot, S, sum[slot], inverse, grad, grad.messages[grad.current]);
}

}  // namespace riskfield::RISKFIELD_ISA
