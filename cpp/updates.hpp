// The updates of one tile: messages of up to a vector of factors, beliefs of up to a vector of nodes.
#pragma once

#include "context.hpp"
#include "contraction.hpp"
#include "lookahead.hpp"

namespace riskfield::RISKFIELD_ISA {

// Whether entry 1 of the beliefs of variables of so many states, and of their potentials, is 1 throughout a run.
template <class Algebra, class T>
RF_INLINE bool is_one(const Item<T>& item, int states) {
  return Algebra::keeps_ratio(states) && item.state1_possible;
}

// Whether the tables of a group between two binary variables are kept as one number (see ratio.hpp).
template <class Algebra>
RF_INLINE bool keeps_coupling(const Group& group) {
  return Algebra::keeps_ratio(2) && group.in_rows();
}

// The tables of all lanes as `lanes.tables` gives them, whatever is kept of them.
template <class Algebra, class T, int S, class Lanes>
RF_INLINE const T* whole_tables(const Item<T>& item, const Group& group, const Lanes& lanes, V<T>* scratch,
                                Index& stride) {
  if (!keeps_coupling<Algebra>(group)) return lanes.template tables<S>(item.tables.get(), scratch, stride);
  T* copy = reinterpret_cast<T*>(scratch);
  const V<T> w = lanes.table_entry(item.tables.get(), 0);
  for (int e = 0; e < 4; ++e) store<T>(copy + e * kLanes<T>, e % 3 == 0 ? w : splat<T>(1));
  stride = kLanes<T>;
  return copy;
}

// What the logarithm of a message's ratio has grown by where tables are kept as one number: d in ratio.hpp.
template <class Algebra, class T, class Lanes>
V<T> growth_of(const Item<T>& item, const Group& group, const Lanes& lanes, int slot) {
  return keeps_coupling<Algebra>(group) ? lanes.table_entry(item.tables.get(), 1 + slot) : V<T>{};
}

template <class Algebra, class T, int S, class Lanes>
RF_INLINE void cavity_of(const Lanes& lanes, const Group& group, int slot, const Item<T>& item, const T* messages,
                         const MessageSettings<T>& settings, V<T>* out) {
  const int n = S ? S : group.dims[slot];
  auto belief = [&](int x) RF_LAMBDA {
    if (x == 1 && is_one<Algebra>(item, n)) return splat<T>(1);
    return lanes.belief(item.beliefs.get(), slot, x);
  };
  Algebra::template cavity<S>(
      out, n, belief, [&](int x) RF_LAMBDA { return lanes.message(messages, slot, x); }, settings);
}

// Writes down one vector after the other, past the cache if `streams`.
template <class T>
RF_INLINE void write_rows(const V<T>* values, int rows, bool streams, T*& to) {
  if (streams)
    RF_FOR (x, 0, rows) stream<T>(to + x * kLanes<T>, values[x]);
  else
    RF_FOR (x, 0, rows) store<T>(to + x * kLanes<T>, values[x]);
  to += rows * kLanes<T>;
}

// Cavities written down one after the other, and read again.
template <class Algebra, class T, int S>
RF_INLINE void write_cavity(const V<T>* cavity, int states, Scratch<T>& scratch) {
  write_rows<T>(cavity, Algebra::cavity_rows(S ? S : states), scratch.streams, scratch.tape);
}

template <class Algebra, class T, int S, class Lanes>
RF_INLINE void read_cavity(const Lanes& lanes, const T* beliefs, int slot, int states, const T*& tape, V<T>* out) {
  const int n = S ? S : states, rows = Algebra::cavity_rows(n);
  RF_FOR (x, 0, rows) out[x] = load<T>(tape + x * kLanes<T>);
  if (rows < n) out[1] = lanes.belief(beliefs, slot, 1);
  tape += rows * kLanes<T>;
}

// out[(s, x)] = left[s] combined with right[x]
template <class Algebra, class T>
RF_NOINLINE void outer(const V<T>* left, Index num_left, const V<T>* right, int num_right, V<T>* out) {
  for (Index s = 0; s < num_left; ++s)
    for (int x = 0; x < num_right; ++x) out[s * num_right + x] = Algebra::combine(left[s], right[x]);
}

// The combined cavities of slots [first, last): their joint states in row-major order. Returns how many.
// cavity(slot, out) gives the cavity of one slot.
template <class Algebra, class T, class Cavity>
RF_INLINE Index joint_cavity(const Group& group, int first, int last, Cavity cavity, Scratch<T>& scratch,
                             V<T>*& result) {
  V<T>* other = scratch.spare;
  result[0] = Algebra::one();
  Index count = 1;
  for (int slot = first; slot < last; ++slot) {
    cavity(slot, slot == first ? result : scratch.cavities);
    if (slot > first) {
      outer<Algebra, T>(result, count, scratch.cavities, group.dims[slot], other);
      std::swap(result, other);
    }
    count *= group.dims[slot];
  }
  scratch.spare = other;
  return count;
}

template <class Algebra>
struct IsLogarithm : std::false_type {};
template <class T, bool Max, bool Inside>
struct IsLogarithm<Logarithm<T, Max, Inside>> : std::true_type {
  static constexpr bool kMax = Max;
};

// How many tiles ahead small tables are fetched. Large ones are while others are read (see contract).
template <class T>
Index tiles_ahead(const Group& group) {
  constexpr Index kBytes = 4096;
  return std::max<Index>(1, kBytes / (group.table_size * kVectorBytes));
}

// Ask for the tables of the tile that comes next: hardware prefetching stops at page ends, and large tables fill pages.
// Of tables in rows, only the first row is worth it.
template <class T>
RF_INLINE void prefetch_tables(const Group& group, const FactorTile& tile, const T* tables) {
  constexpr int kLine = 64 / sizeof(T);
  if (!tile.contiguous || tile.shared) return;
  const T* from = tables + tile.table;
  const Index size = group.in_rows() ? kLanes<T> : group.table_size * tile.table_stride;
  for (Index k = 0; k < size; k += kLine) __builtin_prefetch(from + k, 0, 2);
}

// The settings of the factors of a tile.
template <class Algebra, class T, class Lanes>
RF_INLINE MessageSettings<T> settings_of(const Context<T>& context, int g, const Lanes& lanes) {
  MessageSettings<T> settings{splat<T>(1), splat<T>(1), context.damping};
  if constexpr (Algebra::kNeedsCounting) {
    const T c = context.uniform[g];
    settings.counting = c > T(0) ? splat<T>(c) : lanes.per_factor(context.counting[g]);
    settings.inverse = c > T(0) ? splat<T>(T(1) / c) : lanes.per_factor(context.inverse[g]);
  }
  return settings;
}

// The table of a tile and the combined cavities of the slots before and after the one that receives a message.
template <class T>
struct Incident {
  const T* table;
  Index stride, ahead;  // between entries; to a table that is read soon, or 0
  const V<T>*before, *after;
  Index num_before, num_after;
};

// S > 0: a pairwise factor between variables of S states each; its one cavity is put into `fixed`.
template <class Algebra, class T, int S, class Lanes, class Cavity>
RF_INLINE Incident<T> incident(const Item<T>& item, const Group& group, int slot, const Lanes& lanes, Cavity cavity,
                               V<T>* fixed, Scratch<T>& scratch) {
  Incident<T> from;
  from.table = whole_tables<Algebra, T, S>(item, group, lanes, scratch.table, from.stride);
  from.ahead = S ? 0 : lanes.tables_ahead();
  if constexpr (S > 0) {
    cavity(1 - slot, fixed);
    from.before = from.after = fixed;
    from.num_before = slot == 1 ? S : 1;
    from.num_after = slot == 1 ? 1 : S;
  } else {
    for (const bool after : {false, true})  // a loop, so that what forms a cavity is compiled once
      (after ? from.num_after : from.num_before) =
          joint_cavity<Algebra, T>(group, after ? slot + 1 : 0, after ? group.arity : slot, cavity, scratch,
                                   after ? scratch.after : scratch.before);
    from.before = scratch.before;
    from.after = scratch.after;
  }
  return from;
}

// The message before normalisation.
template <class Algebra, class T, int S>
RF_INLINE void contract(const Incident<T>& from, int states, V<T>* out) {
  if constexpr (IsLogarithm<Algebra>::value)
    contract_log<T, IsLogarithm<Algebra>::kMax>(from.table, from.stride, from.before, from.num_before, states,
                                                from.after, from.num_after, out);
  else if constexpr (S == 0)
    contract_any<Sums<Algebra, T>, T>(from.table, from.stride, from.before, from.num_before, states, from.after,
                                      from.num_after, from.ahead, out);
  else
    contract<Algebra, T, S>(from.table, from.stride, from.before, from.num_before, states, from.after, from.num_after,
                            from.ahead, out);
}

// Makes the message to `slot`, for factors of any kind; pair_runs.hpp does so for most pairwise ones.
template <class Algebra, class T, class Lanes>
RF_INLINE void update_message(const Context<T>& context, const Item<T>& item, int g, int slot, const Lanes& lanes,
                              const T* in, T* out, Scratch<T>& scratch) {
  const Group& group = context.plan->groups[g];
  const MessageSettings<T> settings = settings_of<Algebra, T>(context, g, lanes);
  const int states = group.dims[slot];
  V<T> none[1], *m = scratch.out;
  auto cavity = [&](int k, V<T>* to) RF_LAMBDA {
    cavity_of<Algebra, T, 0>(lanes, group, k, item, in, settings, to);
    if (scratch.tape) write_cavity<Algebra, T, 0>(to, group.dims[k], scratch);
  };
  if (keeps_coupling<Algebra>(group)) {
    cavity(1 - slot, scratch.before);
    Ratio<T>::contract(lanes.table_entry(item.tables.get(), 0), scratch.before, m);
  } else {
    contract<Algebra, T, 0>(incident<Algebra, T, 0>(item, group, slot, lanes, cavity, none, scratch), states, m);
  }
  Algebra::template finish_message<0>(m, states, settings, [&](int x) { return lanes.message(in, slot, x); });
  RF_FOR (x, Algebra::template first_state<0>(states), states) lanes.set_message(out, slot, x, m[x]);
}

// The change beliefs would have made without damping, which shortens the steps of their logarithms by one factor.
template <class Algebra, class T, class Old>
V<T> undamped_change(const V<T>* belief, Old old, int states, T damping, Scratch<T>& scratch) {
  using Log = Logarithm<T, false, Algebra::kInside>;
  auto whole_step = [damping](V<T> from, V<T> to) RF_LAMBDA {
    // An impossible state takes no steps: the difference of infinities would be NaN.
    return select<T>((from > kNegInf<T>)&(to > kNegInf<T>), from + (to - from) / (1 - damping), to);
  };
  if constexpr (std::is_same<Algebra, LogMessages<T>>::value)
    if (Algebra::keeps_ratio(states)) {
      const V<T> before = old(0);
      return Ratio<T>::log_change(belief, whole_step(before, belief[0]), before);
    }
  V<T>*whole = scratch.cavities, *before = scratch.before;
  for (int x = 0; x < states; ++x) {
    before[x] = Algebra::log_belief(states, x, old(x));
    whole[x] = whole_step(before[x], Algebra::log_belief(states, x, belief[x]));
  }
  Log::template finish_belief<0>(whole, states, false, splat<T>(1));
  Log::template finish_belief<0>(before, states, false, splat<T>(1));
  return Log::template change<0>(whole, states, [&](int x) { return before[x]; });
}

// One: see is_one.
template <class Algebra, class T, int S, bool Contiguous, bool One>
RF_INLINE void update_belief(const Context<T>& context, Item<T>& item, const NodeTile& tile, const T* messages,
                             Scratch<T>& scratch, Index shift, int count) {
  const Plan& plan = *context.plan;
  const int states = S ? S : tile.states;
  V<T> fixed[S ? S : 1];
  V<T>* b = S ? fixed : scratch.out;
  const int first = Algebra::template first_state<S>(states);
  RF_FOR (x, 0, states)
    b[x] = x == 1 && One ? splat<T>(std::is_same<Algebra, LogMessages<T>>::value ? T(0) : T(1))
                         : load<T>(item.node_theta.get() + tile.address + shift + Index(x) * tile.stride);
  for (int d = 0; d < tile.degree; ++d) {
    const Connection& connection = plan.connections[tile.connections + d];
    if (Contiguous || connection.contiguous) {
      RF_FOR (x, first, states)
        b[x] = Algebra::join(b[x], load<T>(messages + connection.message + shift + Index(x) * connection.stride));
    } else {
      const Index* address = &plan.lane_messages[connection.message];
      const std::int32_t* stride = &plan.lane_strides[connection.message];
      RF_FOR (x, first, states) {
        V<T> m = splat<T>(1);
        for (int l = 0; l < count; ++l) set_lane<T>(m, l, messages[address[l] + Index(x) * stride[l]]);
        b[x] = Algebra::join(b[x], m);
      }
    }
  }
  V<T> possible = splat<T>(1);
  const V<T> inverse_total = load<T>(context.node_inverse.data() + tile.first + shift);
  if constexpr (One)
    Algebra::finish_possible_belief(b, context.node_power, inverse_total);
  else
    possible = Algebra::template finish_belief<S>(b, states, context.node_power, inverse_total);
  T* beliefs = item.beliefs.get() + tile.address + shift;
  if (scratch.measure) {
    V<T> change{};
    auto stored = [&](int x) { return load<T>(beliefs + Index(x) * tile.stride); };
    if (context.damping > 0)
      change = undamped_change<Algebra, T>(b, stored, states, context.damping, scratch);
    else
      change = Algebra::template change<S>(b, states, [&](int x) { return x == 1 && One ? splat<T>(1) : stored(x); });
    scratch.change = vmax<T>(scratch.change, first_lanes<T>(change, V<T>{}, count));
  }
  RF_FOR (x, 0, states)
    if (x != 1 || !One) store_some<T>(beliefs + Index(x) * tile.stride, b[x], count);
  if (std::is_same<Algebra, Expectation<T>>::value && scratch.tape)
    for (int x = 0; x < states; ++x, scratch.tape += kLanes<T>) store<T>(scratch.tape, b[x]);
  if constexpr (One) return;
  possible = first_lanes<T>(possible, splat<T>(1), count);
  scratch.least = select<T>(possible < scratch.least, possible, scratch.least);
}

// Calls `body` with a value of the arithmetic that group g of the item uses. Here and below it is not copied: short
// levels would wait for that.
template <class T, class Body>
void with_algebra(const Context<T>& context, const Item<T>& item, int g, const Body& body) {
  if (context.kind == Kind::kMeanField)
    body(Expectation<T>{});
  else if (context.kind == Kind::kMaxProduct)
    body(Logarithm<T, true>{});
  else if (item.log_domain)
    body(Logarithm<T, false>{});
  else if (context.log_messages)
    body(LogMessages<T>{});
  else if (context.power[g] == Power::kOne)
    body(Probability<T, Power::kOne>{});
  else
    body(Probability<T, Power::kHalf>{});
}

// The arithmetic of beliefs, which is the same for all groups.
template <class T, class Body>
void with_node_algebra(const Context<T>& context, const Item<T>& item, const Body& body) {
  if (context.kind == Kind::kMeanField)
    body(Expectation<T>{});
  else if (item.log_domain)
    body(Logarithm<T, false>{});
  else if (context.log_messages)
    body(LogMessages<T>{});
  else
    body(Probability<T, Power::kOne>{});
}

// The arithmetic of gradients, which is the same for all groups, too: they need no powers.
template <class T, class Body>
void with_gradient_algebra(const Context<T>& context, const Item<T>& item, const Body& body) {
  if (context.kind == Kind::kMeanField)
    body(Expectation<T>{});
  else if (item.log_domain)
    body(Logarithm<T, false>{});
  else
    body(LogMessages<T>{});
}

// Calls `body` with the state count as a compile-time constant where that is worth it, else with 0.
template <class Algebra, int Most = Algebra::kFixedStates, class Body>
void with_states(int states, const Body& body) {
  if constexpr (Most >= 2)
    if (states == 2) return body(std::integral_constant<int, 2>{});
  if constexpr (Most >= 5) switch (states) {
      case 3:
        return body(std::integral_constant<int, 3>{});
      case 4:
        return body(std::integral_constant<int, 4>{});
      case 5:
        return body(std::integral_constant<int, 5>{});
    }
  body(std::integral_constant<int, 0>{});
}

// S of a pairwise group between variables of equally many states, else 0.
inline int square_states(const Group& group) {
  return group.arity == 2 && group.dims[0] == group.dims[1] ? group.dims[0] : 0;
}

// Messages are gathered one by one, so that unrolling more than two states would not be worth it.
template <class Algebra, class T, int S, bool One>
RF_NOINLINE void update_gathered_belief(const Context<T>& context, Item<T>& item, const NodeTile& tile,
                                        const T* messages, Scratch<T>& scratch) {
  update_belief<Algebra, T, S, false, One>(context, item, tile, messages, scratch, 0, tile.count);
}

template <class Algebra, class T>
void update_belief_inside(const Context<T>&, Item<T>&, const NodeTile&, const T* messages, Scratch<T>&);  // inside.hpp

template <class T>
void update_nodes(const Context<T>& context, Item<T>& item, Index begin, Index end, const T* messages,
                  Scratch<T>& scratch, Lookahead<T>* ahead = nullptr) {
  with_node_algebra(context, item, [&](auto algebra) {
    using Algebra = decltype(algebra);
    for (Index t = begin; t < end;) {
      const NodeTile& tile = context.plan->node_tiles[t];
      if constexpr (!std::is_void<typename Algebra::OfStates>::value)
        if (tile.stride == 1) {  // of one variable
          update_belief_inside<typename Algebra::OfStates, T>(context, item, tile, messages, scratch);
          ++t;
          continue;
        }
      with_states<Algebra, Algebra::kFixedInSweeps>(tile.states, [&](auto states) {
        constexpr int S = decltype(states)::value;
        auto update = [&](auto is_one) RF_LAMBDA {
          constexpr bool kOne = decltype(is_one)::value;
          if (tile.contiguous) {
            const Index last = std::min<Index>(t + tile.run, end) - 1;
            Index shift = 0;
            if (ahead) ahead->begin_nodes(tile);
            for (; t <= last; ++t, shift += kLanes<T>) {
              if (ahead) ahead->at_nodes();
              update_belief<Algebra, T, S, true, kOne>(context, item, tile, messages, scratch, shift,
                                                       t == last ? context.plan->node_tiles[last].count : kLanes<T>);
            }
          } else {
            update_gathered_belief<Algebra, T, S == 2 ? 2 : 0, kOne>(context, item, tile, messages, scratch);
            ++t;
          }
        };
        if constexpr (Algebra::keeps_ratio(S))
          if (item.state1_possible) return update(std::true_type{});
        update(std::false_type{});
      });
    }
  });
}

}  // namespace riskfield::RISKFIELD_ISA
