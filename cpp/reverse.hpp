// Reverse-mode differentiation of recorded sweeps (back TRW, back mean field: Domke 2013, algorithms 2 and 3, for factors
// of any arity).
//
// Going back through a stage undoes it: first the beliefs it made hand their gradient to the messages they were made
// from, then the messages it overwrote are put back from the tape, the beliefs are made again from them, and last the
// messages it sent hand their gradient to tables, beliefs and messages they were made from. Gradients are kept with
// respect to logarithms: of beliefs, of stored (powered) messages, of packed tables. A belief does not change when its
// messages are scaled, nor a message when its cavities are, so such gradients sum to zero over states.
#pragma once

#include "packing.hpp"

namespace riskfield::RISKFIELD_ISA {

// Gradients with respect to what an item holds, in the same storage.
template <class T>
struct Gradients {
  Buffer<T> tables, node_theta, beliefs, messages[2];
  int current = 0;  // gradient of the present messages; the other buffer serves schedules that send all at once

  explicit Gradients(const Plan& plan) {
    tables.allocate(plan.table_size);
    node_theta.allocate(plan.node_size);
    beliefs.allocate(plan.node_size);
    for (auto& buffer : messages) buffer.allocate(plan.message_size);
  }
  void clear() {
    for (Buffer<T>* buffer : {&tables, &node_theta, &beliefs, &messages[0], &messages[1]}) buffer->fill(0);
  }
};

// Add the sums of joint[e] over all but one slot to the gradients of that slot's belief and message.
template <class T, class Lanes>
RF_INLINE void spread_to_slot(const Group& group, int slot, const V<T>* joint, const Lanes& lanes, V<T> inverse,
                              bool has_messages, T* beliefs, T* messages, Scratch<T>& scratch) {
  const int n = group.dims[slot];
  Index inner = 1;
  for (int k = slot + 1; k < group.arity; ++k) inner *= group.dims[k];
  V<T>* sum = scratch.cavities;
  for (int x = 0; x < n; ++x) sum[x] = V<T>{};
  for (Index e = 0; e < group.table_size; ++e) sum[(e / inner) % n] += joint[e];
  for (int x = 0; x < n; ++x) {
    lanes.add_node(beliefs, slot, x, sum[x]);
    if (has_messages) lanes.add_message(messages, slot, x, -sum[x] * inverse);
  }
}

// From the gradient of a tile's factor marginals.
template <class Algebra, class T, class Lanes>
void reverse_marginals(const Context<T>& context, const Item<T>& item, int g, const Lanes& lanes, int count,
                       const T* grad_mu, Gradients<T>& grad, Scratch<T>& scratch) {
  constexpr bool kExpectation = std::is_same<Algebra, Expectation<T>>::value;
  const Plan& plan = *context.plan;
  const Group& group = plan.groups[g];
  V<T>* joint = joint_marginals<Algebra, T>(context, item, g, lanes, scratch);
  V<T>* weight = scratch.weights;
  for (Index e = 0; e < group.table_size; ++e) weight[e] = V<T>{};
  for (int l = 0; l < count; ++l) {
    const Index f = lanes.factor(l);
    const T* from = grad_mu + user_marginals(plan, group, f);
    const Index* map = group.entry_maps[group.permutation[f]].data();
    for (Index e = 0; e < group.table_size; ++e) weight[e][l] = from[map[e]];
  }
  if constexpr (!kExpectation) {
    V<T> mean{};
    for (Index e = 0; e < group.table_size; ++e) mean += weight[e] * joint[e];
    for (Index e = 0; e < group.table_size; ++e) weight[e] -= mean;
  }
  for (Index e = 0; e < group.table_size; ++e) {
    weight[e] *= joint[e];
    if constexpr (!kExpectation) lanes.add_table(grad.tables.get(), e, weight[e]);
  }
  const V<T> inverse = lanes.per_factor(context.inverse[g]);
  for (int slot = 0; slot < group.arity; ++slot)
    spread_to_slot<T>(group, slot, weight, lanes, inverse, !kExpectation, grad.beliefs.get(),
                      grad.messages[grad.current].get(), scratch);
}

// From the gradient of a tile's messages to one slot, which is taken out of `from`; gradients of messages go to `to`.
template <class Algebra, class T, int S, class Lanes>
RF_INLINE void reverse_message(const Context<T>& context, const Item<T>& item, int g, int slot, const Lanes& lanes,
                               T* from, T* to, Gradients<T>& grad, Scratch<T>& scratch) {
  constexpr bool kExpectation = std::is_same<Algebra, Expectation<T>>::value;
  const Group& group = context.plan->groups[g];
  const MessageSettings<T> settings{lanes.per_factor(context.counting[g]), lanes.per_factor(context.inverse[g]),
                                    context.damping};
  const int states = S ? S : group.dims[slot];
  V<T> fixed[S ? S : 1], update[S ? S : 1], ratio[S ? S : 1];
  const Incident<T> made = incident<Algebra, T, S>(item, group, slot, lanes, item.messages[item.current].get(),
                                                   settings.inverse, fixed, scratch);
  V<T>* m = S ? update : scratch.out;
  V<T>* r = S ? ratio : scratch.spare;
  if constexpr (!kExpectation) contract<Algebra, T, S>(made, states, m);
  RF_UNROLL for (int x = 0; x < states; ++x) {
    const V<T> stored = lanes.message(from, slot, x);
    lanes.set_message(from, slot, x, V<T>{});
    if (settings.damping > 0) lanes.add_message(to, slot, x, settings.damping * stored);
    r[x] = kExpectation ? stored : settings.counting * (1 - settings.damping) * stored;
  }
  if constexpr (!kExpectation) {
    // These gradients sum to zero but for rounding, which would grow from sweep to sweep if it were let through.
    V<T> sum{}, total{};
    RF_UNROLL for (int x = 0; x < states; ++x) sum += r[x];
    if constexpr (IsLogarithm<Algebra>::value) {
      const V<T> shift = Algebra::finite_or_zero(Algebra::log_total(m, states));
      for (int x = 0; x < states; ++x) r[x] -= vexp<T>(m[x] - shift) * sum;
    } else {
      RF_UNROLL for (int x = 0; x < states; ++x) total += m[x];
      const V<T> excess = sum / total;
      RF_UNROLL for (int x = 0; x < states; ++x) r[x] = r[x] / m[x] - excess;
    }
  }
  if constexpr (S > 0) {
    V<T> sum[S];
    RF_UNROLL for (int y = 0; y < S; ++y) sum[y] = V<T>{};
    RF_UNROLL for (int x = 0; x < S; ++x)
      RF_UNROLL for (int y = 0; y < S; ++y) {
        const Index e = slot == 0 ? x * S + y : y * S + x;
        const V<T> entry = load<T>(made.table + e * made.stride);
        const V<T> weight = fixed[y] * r[x];
        if constexpr (kExpectation) {
          lanes.add_table(grad.tables.get(), e, weight);
          sum[y] = Algebra::multiply_add(sum[y], entry * r[x], fixed[y]);
        } else {
          const V<T> share = entry * weight;
          lanes.add_table(grad.tables.get(), e, share);
          sum[y] += share;
        }
      }
    RF_UNROLL for (int y = 0; y < S; ++y) {
      lanes.add_node(grad.beliefs.get(), 1 - slot, y, sum[y]);
      if constexpr (!kExpectation) lanes.add_message(to, 1 - slot, y, -sum[y] * settings.inverse);
    }
  } else {
    V<T>* weight = scratch.weights;
    Index e = 0;
    for (Index a = 0; a < made.num_before; ++a)
      for (int x = 0; x < states; ++x)
        for (Index b = 0; b < made.num_after; ++b, ++e) {
          const V<T> entry = load<T>(made.table + e * made.stride);
          if constexpr (IsLogarithm<Algebra>::value) {
            const V<T> top = Algebra::finite_or_zero(m[x]);
            weight[e] = vexp<T>(entry + made.before[a] + made.after[b] - top) * r[x];
            lanes.add_table(grad.tables.get(), e, weight[e]);
          } else if constexpr (kExpectation) {
            const V<T> product = made.before[a] * made.after[b];
            lanes.add_table(grad.tables.get(), e, product * r[x]);
            weight[e] = Algebra::multiply_add(V<T>{}, entry * r[x], product);
          } else {
            weight[e] = entry * made.before[a] * made.after[b] * r[x];
            lanes.add_table(grad.tables.get(), e, weight[e]);
          }
        }
    for (int other = 0; other < group.arity; ++other)
      if (other != slot)
        spread_to_slot<T>(group, other, weight, lanes, settings.inverse, !kExpectation, grad.beliefs.get(), to, scratch);
  }
}

// From the gradient of a tile's beliefs, which is taken out, to theta and the messages it was made from.
template <class Algebra, class T>
RF_INLINE void reverse_belief(const Context<T>& context, const Item<T>& item, const NodeTile& tile, Gradients<T>& grad,
                              T* messages, Scratch<T>& scratch) {
  const Plan& plan = *context.plan;
  V<T>* u = scratch.out;
  V<T> total{};
  for (int x = 0; x < tile.states; ++x) {
    u[x] = load<T>(grad.beliefs.get() + tile.address + Index(x) * tile.stride);
    total += u[x];
  }
  const V<T> inverse = load<T>(context.node_inverse.data() + tile.first);
  for (int x = 0; x < tile.states; ++x) {
    const Index at = tile.address + Index(x) * tile.stride;
    u[x] = (u[x] - Algebra::probability(load<T>(item.beliefs.get() + at)) * total) * inverse;
    store_some<T>(grad.beliefs.get() + at, V<T>{}, tile.count);
    store_some<T>(grad.node_theta.get() + at, load<T>(grad.node_theta.get() + at) + u[x], tile.count);
  }
  for (int d = 0; d < tile.degree; ++d) {
    const Connection& connection = plan.connections[tile.connections + d];
    for (int x = 0; x < tile.states; ++x) {
      if (connection.contiguous) {
        T* at = messages + connection.message + Index(x) * connection.stride;
        store_some<T>(at, load<T>(at) + u[x], tile.count);
      } else {
        for (int l = 0; l < tile.count; ++l)
          messages[plan.lane_messages[connection.message + l] +
                   Index(x) * plan.lane_strides[connection.message + l]] += u[x][l];
      }
    }
  }
}

}  // namespace riskfield::RISKFIELD_ISA
