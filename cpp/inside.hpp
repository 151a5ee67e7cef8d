// Updates whose vectors run inside a table: their lanes hold states of one variable.
//
// Other updates put one entry of several factors of a level into a vector. Where levels are short and variables have
// many states, most lanes would be empty and tables would be copied entry by entry. So pairwise factors with many
// states that stand in short runs or alone (Plan::is_inside) are updated one after the other, in sum-product on
// probabilities. Their messages and tables have stride 1, and so have beliefs that no long run reaches. Arrays here are
// of vectors of states; those beyond the last one are neither read nor written.
#pragma once

#include <utility>

#include "updates.hpp"

namespace riskfield::RISKFIELD_ISA {

template <class T>
RF_INLINE constexpr int num_vectors(int states) {
  return (states + kLanes<T> - 1) / kLanes<T>;
}
// Of vector v, those before the last state.
template <class T>
RF_INLINE int lanes_used(int states, int v) {
  return std::min(kLanes<T>, states - v * kLanes<T>);
}

// Numbers for the states of one variable of one factor: vector v of them. Beyond the last state it is 0.
template <class T>
struct StateRow {
  T* first;
  Index stride;
  int states;

  RF_INLINE V<T> get(int v) const {
    const T* from = first + Index(v) * kLanes<T> * stride;
    const int count = lanes_used<T>(states, v);
    if (stride == 1) return load_some<T>(from, count);
    V<T> value{};
    for (int l = 0; l < count; ++l) set_lane<T>(value, l, from[l * stride]);
    return value;
  }
  RF_INLINE V<T> get(int v, T beyond) const {
    return first_lanes<T>(get(v), splat<T>(beyond), lanes_used<T>(states, v));
  }
  RF_INLINE void set(int v, V<T> value) const {
    T* to = first + Index(v) * kLanes<T> * stride;
    const int count = lanes_used<T>(states, v);
    if (stride == 1) return store_some<T>(to, value, count);
    for (int l = 0; l < count; ++l) to[l * stride] = value[l];
  }
  RF_INLINE void add(int v, V<T> value) const { set(v, get(v) + value); }
};

// One factor, as TileLanes shows several.
template <class T>
class StateLanes {
 public:
  StateLanes(const Plan& plan, const Group& group, Index factor) : plan_(plan), group_(group), factor_(factor) {}

  RF_INLINE V<T> per_factor(const std::vector<T>& values) const { return splat<T>(values[factor_]); }
  RF_INLINE const T* table(const T* tables) const { return tables + group_.table[factor_]; }
  RF_INLINE T* table_gradient(T* tables, T* tied) const {
    return (group_.shared[factor_] < 0 ? tables : tied) + group_.table[factor_];
  }
  RF_INLINE StateRow<T> message_row(const T* messages, int slot) const {
    return {const_cast<T*>(messages) + group_.message[factor_ * group_.arity + slot], 1, group_.dims[slot]};
  }
  RF_INLINE StateRow<T> node_rows(const T* nodes, int slot) const {
    const Index p = group_.position[factor_ * group_.arity + slot];
    return {const_cast<T*>(nodes) + plan_.node_address[p], plan_.node_stride[p], group_.dims[slot]};
  }
  template <class Algebra, int S>
  RF_INLINE StateRow<T> gradient_rows(T* gradients, int slot) const {
    const Index width = num_entries<Algebra, 0>(group_, group_.arity), start = first_entry<Algebra, 0>(group_, slot);
    return {gradients + group_.gradients + factor_ * width + start, 1, group_.dims[slot]};
  }
  template <class Algebra, int S>
  RF_INLINE StateRow<T> belief_rows(T* beliefs, T* parcels, int slot) const {
    if (group_.between.empty() || group_.between[factor_] < 0) return node_rows(beliefs, slot);
    const Index width = num_entries<Algebra, 0>(group_, group_.arity), start = num_entries<Algebra, 0>(group_, slot);
    return {parcels + group_.parcels + group_.between[factor_] * width + start, 1, group_.dims[slot]};
  }
  RF_INLINE V<T> valid(V<T> value) const { return value; }

 private:
  const Plan& plan_;
  const Group& group_;
  const Index factor_;
};

// Half the lanes of a and b each: sums of pairs of parts of B / 2 lanes.
template <class T, int B, std::size_t... P>
RF_INLINE V<T> fold(V<T> a, V<T> b, std::index_sequence<P...>) {
  constexpr int kHalf = B / 2, kB = kLanes<T>;  // where lanes of b begin
  return __builtin_shufflevector(a, b, (int(P) % B < kHalf ? int(P) : kB + int(P) - kHalf)...) +
         __builtin_shufflevector(a, b, (int(P) % B < kHalf ? int(P) + kHalf : kB + int(P))...);
}
// Lane l of the result is the sum of the lanes of v[l].
template <class T, int B = kLanes<T>>
RF_INLINE V<T> sums_of_lanes(V<T>* v) {
  if constexpr (std::is_same<T, Dual>::value) {
    V<T> sums{};
    for (int l = 0; l < kLanes<T>; ++l) set_lane<T>(sums, l, total_of<true, T>(v[l])[0]);
    return sums;
  } else if constexpr (B > 1) {
    RF_FOR (l, 0, B / 2) v[l] = fold<T, B>(v[l], v[l + B / 2], std::make_index_sequence<kLanes<T>>());
    return sums_of_lanes<T, B / 2>(v);
  } else {
    return v[0];
  }
}

// Adds up C vectors of each row of a table, times the row's weight. The last of them has `last` lanes.
template <class T, int C>
RF_INLINE void add_rows(const T* table, int rows, Index length, int last, const T* weight, V<T>* out) {
  constexpr int kRows = std::max(1, 8 / C);
  V<T> sum[kRows][C];
  RF_FOR (k, 0, kRows)
    RF_FOR (c, 0, C) sum[k][c] = V<T>{};
  auto add = [&](int k, int a) RF_LAMBDA {
    const T* row = table + a * length;
    const V<T> w = splat<T>(weight[a]);
    RF_FOR (c, 0, C - 1) sum[k][c] += load<T>(row + c * kLanes<T>) * w;
    sum[k][C - 1] += load_some<T>(row + (C - 1) * kLanes<T>, last) * w;
  };
  int a = 0;
  for (; a + kRows <= rows; a += kRows)
    RF_FOR (k, 0, kRows) add(k, a + k);
  for (; a < rows; ++a) add(0, a);
  RF_FOR (k, 1, kRows)
    RF_FOR (c, 0, C) sum[0][c] += sum[k][c];
  RF_FOR (c, 0, C) out[c] = sum[0][c];
}

// The message before normalisation; 0 beyond the last state. `weight` holds the cavity of the other slot, and 0 to the
// end of a vector.
template <class T>
RF_NOINLINE void contract_states(const T* table, const Group& group, int slot, const T* weight, V<T>* out) {
  const int rows = group.dims[0], length = group.dims[1];
  if (slot == 1) {
    constexpr int kMost = 8;
    for (int v = 0; v < num_vectors<T>(length); v += kMost) {
      const int count = std::min(kMost, num_vectors<T>(length) - v);
      const int last = lanes_used<T>(length, v + count - 1);
      const T* from = table + v * kLanes<T>;
      auto add = [&](auto c) { add_rows<T, decltype(c)::value>(from, rows, length, last, weight, out + v); };
      switch (count) {
        case 1:
          add(std::integral_constant<int, 1>{});
          break;
        case 2:
          add(std::integral_constant<int, 2>{});
          break;
        case 3:
          add(std::integral_constant<int, 3>{});
          break;
        case 4:
          add(std::integral_constant<int, 4>{});
          break;
        case 5:
          add(std::integral_constant<int, 5>{});
          break;
        case 6:
          add(std::integral_constant<int, 6>{});
          break;
        case 7:
          add(std::integral_constant<int, 7>{});
          break;
        default:
          add(std::integral_constant<int, 8>{});
      }
    }
    return;
  }
  constexpr int kRows = 8, kBlock = std::max(kRows, kLanes<T>);  // rows side by side, and before sums over lanes
  const int whole = length / kLanes<T>, rest = length % kLanes<T>;
  for (int a = 0; a < rows; a += kBlock) {
    V<T> sum[kBlock];
    for (int b = 0; b < kBlock; b += kRows) {
      const T* row[kRows];  // beyond the last one it is repeated
      RF_FOR (k, 0, kRows) {
        row[k] = table + Index(std::min(a + b + k, rows - 1)) * length;
        sum[b + k] = V<T>{};
      }
      for (int v = 0; v < whole; ++v) {
        const V<T> w = load<T>(weight + v * kLanes<T>);
        RF_FOR (k, 0, kRows) sum[b + k] += load<T>(row[k] + v * kLanes<T>) * w;
      }
      if (rest == 0) continue;
      const V<T> w = load<T>(weight + whole * kLanes<T>);
      RF_FOR (k, 0, kRows) sum[b + k] += load_some<T>(row[k] + whole * kLanes<T>, rest) * w;
    }
    for (int b = 0; b < kBlock && a + b < rows; b += kLanes<T>)
      out[(a + b) / kLanes<T>] = first_lanes<T>(sums_of_lanes<T>(sum + b), V<T>{}, std::min(kLanes<T>, rows - a - b));
  }
}

// The messages of a gathered tile. Cavities are written down factor by factor.
template <class Algebra, class T>
RF_NOINLINE void update_inside(const Context<T>& context, const Item<T>& item, int g, int slot, const FactorTile& tile,
                               const T* in, T* out, Scratch<T>& scratch) {
  const Plan& plan = *context.plan;
  const Group& group = plan.groups[g];
  const int n = group.dims[slot], others = group.dims[1 - slot];
  T* weights = reinterpret_cast<T*>(scratch.before);
  for (int l = 0; l < tile.count; ++l) {
    const StateLanes<T> lanes(plan, group, group.lanes[tile.first + l]);
    const MessageSettings<T> settings = settings_of<Algebra, T>(context, g, lanes);
    const StateRow<T> beliefs = lanes.node_rows(item.beliefs.get(), 1 - slot);
    const StateRow<T> incoming = lanes.message_row(in, 1 - slot), old = lanes.message_row(in, slot);
    Algebra::template cavity<0>(
        scratch.cavities, num_vectors<T>(others), [&](int v) RF_LAMBDA { return beliefs.get(v, Algebra::kNoBelief); },
        [&](int v) RF_LAMBDA { return incoming.get(v, Algebra::kNoMessage); }, settings);
    for (int v = 0; v < num_vectors<T>(others); ++v) store<T>(weights + v * kLanes<T>, scratch.cavities[v]);
    if (scratch.tape) std::copy(weights, weights + others, scratch.tape + l * others);
    V<T>* m = scratch.out;
    contract_states<T>(lanes.table(item.tables.get()), group, slot, weights, m);
    Algebra::template finish_message<0>(m, num_vectors<T>(n), settings,
                                        [&](int v) RF_LAMBDA { return old.get(v, Algebra::kNoMessage); });
    const StateRow<T> to = lanes.message_row(out, slot);
    for (int v = 0; v < num_vectors<T>(n); ++v) to.set(v, m[v]);
  }
  if (scratch.tape) scratch.tape += others * kLanes<T>;
}

// The belief of one variable whose states and messages have stride 1.
template <class Algebra, class T>
RF_NOINLINE void update_belief_inside(const Context<T>& context, Item<T>& item, const NodeTile& tile, const T* messages,
                                      Scratch<T>& scratch) {
  const Plan& plan = *context.plan;
  const int count = num_vectors<T>(tile.states);
  auto row = [&](const T* from) RF_LAMBDA { return StateRow<T>{const_cast<T*>(from), 1, tile.states}; };
  V<T>* b = scratch.out;
  const StateRow<T> theta = row(item.node_theta.get() + tile.address);
  for (int v = 0; v < count; ++v) b[v] = theta.get(v, Algebra::kNoBelief);
  for (int d = 0; d < tile.degree; ++d) {
    const Connection& connection = plan.connections[tile.connections + d];
    const StateRow<T> message =
        row(messages + (connection.contiguous ? connection.message : plan.lane_messages[connection.message]));
    for (int v = 0; v < count; ++v) b[v] = Algebra::join(b[v], message.get(v, Algebra::kNoMessage));
  }
  const V<T> possible =
      Algebra::template finish_belief<0>(b, count, context.node_power, splat<T>(context.node_inverse[tile.first]));
  const StateRow<T> beliefs = row(item.beliefs.get() + tile.address);
  auto old = [&](int v) RF_LAMBDA { return beliefs.get(v, Algebra::kNoBelief); };
  if (scratch.measure)
    scratch.change = vmax<T>(scratch.change, context.damping > 0
                                                 ? undamped_change<Algebra, T>(b, old, count, context.damping, scratch)
                                                 : Algebra::template change<0>(b, count, old));
  for (int v = 0; v < count; ++v) beliefs.set(v, b[v]);
  scratch.least = select<T>(possible < scratch.least, possible, scratch.least);
}

}  // namespace riskfield::RISKFIELD_ISA
