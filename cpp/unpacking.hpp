// Out of the storage of a plan: marginals and messages in the caller's layout.
#pragma once

#include "copies.hpp"
#include "updates.hpp"
#include "user_layout.hpp"

namespace riskfield::RISKFIELD_ISA {

// mu_c propto table_c prod_i b_i / m_c of a tile, an array of vectors in `scratch`.
template <class Algebra, class T, class Lanes>
V<T>* joint_marginals(const Context<T>& context, const Item<T>& item, int g, const Lanes& lanes, Scratch<T>& scratch) {
  const Group& group = context.plan->groups[g];
  const MessageSettings<T> settings = settings_of<Algebra, T>(context, g, lanes);
  auto cavity = [&](int slot, V<T>* out) {
    cavity_of<Algebra, T, 0>(lanes, group, slot, item, item.messages[item.current].get(), settings, out);
  };
  joint_cavity<Algebra, T>(group, 0, group.arity, cavity, scratch, scratch.before);
  V<T>* joint = scratch.before;
  if constexpr (!std::is_same<Algebra, Expectation<T>>::value) {
    Index stride;
    const T* table = whole_tables<Algebra, T, 0>(item, group, lanes, scratch.table, stride);
    for (Index e = 0; e < group.table_size; ++e) joint[e] = Algebra::combine(joint[e], load<T>(table + e * stride));
    if constexpr (IsLogarithm<Algebra>::value) {
      V<T> top = joint[0];
      for (Index e = 1; e < group.table_size; ++e) top = vmax<T>(top, joint[e]);
      for (Index e = 0; e < group.table_size; ++e) joint[e] = vexp<T>(joint[e] - top);
    }
    V<T> total{};
    for (Index e = 0; e < group.table_size; ++e) total += joint[e];
    const V<T> scale = T(1) / total;
    for (Index e = 0; e < group.table_size; ++e) joint[e] *= scale;
  }
  return joint;
}

// An item, and the weight of its marginals in a sum, lane by lane.
template <class T>
struct Weighted {
  const Item<T>* item;
  V<T> weight;

  // `weights` has one for each model of the batch; null means 1.
  Weighted(const Item<T>& from, const double* weights) : item(&from), weight(splat<T>(1)) {
    for (int l = 0; l < kLanes<T> && weights; ++l)
      set_lane<T>(weight, l, static_cast<T>(weights[from.model_in(l).number]));
  }
};

// Writes the weighted sum of the items' marginals of a tile.
template <class Algebra, class T, class Lanes>
void unpack_factor(const Context<T>& context, const std::vector<Weighted<T>>& items, int g, const Lanes& lanes,
                   int count, Scratch<T>& scratch, const Rows<T>& mu) {
  const Plan& plan = *context.plan;
  const Group& group = plan.groups[g];
  V<T>* sum = scratch.weights;
  for (Index e = 0; e < group.table_size; ++e) sum[e] = V<T>{};
  for (const auto& [item, weight] : items) {
    const V<T>* joint = joint_marginals<Algebra, T>(context, *item, g, lanes, scratch);
    for (Index e = 0; e < group.table_size; ++e) sum[e] += joint[e] * weight;
  }
  for (int l = 0; l < count; ++l) {
    const Index f = lanes.factor(l);
    if (plan.copy_of(f) >= items[0].item->num_models()) continue;
    T* to = mu[plan.copy_of(f)] + user_marginals(plan, group, f);
    const Index* map = group.entry_maps[group.permutation[f]].data();
    for (Index e = 0; e < group.table_size; ++e) to[map[e]] = sum[e][l];
  }
}

// Normalised log-messages of a tile, scattered into the caller's layout.
template <class T, class Lanes>
void unpack_messages(const Context<T>& context, const Item<T>& item, int g, const Lanes& lanes, int count,
                     Scratch<T>& scratch, const Rows<T>& out) {
  using Log = Logarithm<T, false>;
  const Plan& plan = *context.plan;
  const Group& group = plan.groups[g];
  const V<T> inverse = lanes.per_factor(context.inverse[g]);
  const bool base_two = keeps_logarithms(context, item), as_logarithms = item.log_domain || base_two;
  const T unit = base_two ? T(kLn2<double>) : T(1);
  const bool coupling = keeps_ratio(context, item, Ratio<T>::kStates) && group.in_rows();
  for (int slot = 0; slot < group.arity; ++slot) {
    const int n = group.dims[slot];
    V<T>* m = scratch.out;
    for (int x = 0; x < n; ++x) {
      const V<T> stored = lanes.message(item.messages[item.current].get(), slot, x);
      const V<T> logarithm = as_logarithms ? stored * unit : vlog<T>(stored);
      m[x] = logarithm * inverse;
    }
    if (coupling) m[1] -= lanes.table_entry(item.tables.get(), 1 + slot);
    const V<T> shift = Log::finite_or_zero(Log::log_total(m, n));
    for (int x = 0; x < n; ++x) m[x] -= shift;
    for (int l = 0; l < count; ++l) {
      const Index f = lanes.factor(l);
      if (plan.copy_of(f) >= item.num_models()) continue;
      T* to = out[plan.copy_of(f)] + user_message(plan, group, f, slot);
      for (int x = 0; x < n; ++x) to[x] = m[x][l];
    }
  }
}

// Calls body(copy, place in the caller's layout, states, beliefs up to a factor, their sum).
template <class T, class Body>
void for_each_node(const Context<T>& context, const Item<T>& item, Body body) {
  const Plan& plan = *context.plan;
  std::vector<T> values(plan.max_states);
  Ticker tick;
  for (Index p = 0; p < plan.num_nodes; ++p) {
    tick(plan.states[p]);
    const int copy = plan.copy_of(p);
    if (copy >= item.num_models()) continue;
    const T* b = item.beliefs.get() + plan.node_address[p];
    const int n = plan.states[p];
    T total = 0;
    for (int x = 0; x < n; ++x) total += values[x] = weight_of(context, item, n, x, b[Index(x) * plan.node_stride[p]]);
    body(copy, plan.node_start[plan.variable[p]], n, values.data(), total);
  }
}

}  // namespace riskfield::RISKFIELD_ISA
