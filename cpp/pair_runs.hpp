// The inner loop of sweeps over pairwise factors between variables of equally many states: along one run of contiguous
// tiles. What is the same for all tiles of a run is looked up before it, and what decides between few kinds of loops is
// known when they are compiled. Short levels gain from that as well as long runs.
#pragma once

#include "updates.hpp"

namespace riskfield::RISKFIELD_ISA {

// One kind of loop: the slot that messages are sent to, if tables have several entries; whether entry 1 of beliefs is 1
// (see is_one); whether all factors have one counting number; whether updates are damped.
template <int Slot, bool One, bool Uniform, bool Damped>
struct LoopKind {
  static constexpr int kSlot = Slot;
  static constexpr bool kOne = One, kUniform = Uniform, kDamped = Damped;
};

// Calls `body` with the kind of loop that a range needs. With more than two states the last three make no difference
// that is worth compiling more loops.
template <class Algebra, class T, int S, class Body>
RF_INLINE void with_loop_kind(const Context<T>& context, const Item<T>& item, const TileRange& range,
                              const Body& body) {
  constexpr bool kChosen = S == 2 && Algebra::keeps_ratio(S), kLogs = kChosen && Algebra::kNeedsCounting;
  auto known = [](auto wanted, bool value, auto next) RF_LAMBDA {
    if constexpr (decltype(wanted)::value) {
      if (value) return next(std::true_type{});
    }
    next(std::false_type{});
  };
  known(std::bool_constant<!Algebra::keeps_ratio(S)>{}, range.slot == 1, [&](auto slot) RF_LAMBDA {
    known(std::bool_constant<kChosen>{}, is_one<Algebra>(item, S), [&](auto one) RF_LAMBDA {
      known(std::bool_constant<kLogs>{}, context.uniform[range.group] > T(0), [&](auto uniform) RF_LAMBDA {
        known(std::bool_constant<kLogs>{}, context.damping > 0, [&](auto damped) RF_LAMBDA {
          constexpr bool kDamped = decltype(damped)::value || (Algebra::kNeedsCounting && !kLogs);
          body(LoopKind<decltype(slot)::value, decltype(one)::value, decltype(uniform)::value, kDamped>{});
        });
      });
    });
  });
}

template <class Algebra, class T, int S, class Kind>
class PairRun {
 public:
  // The run that begins with `tile`.
  RF_INLINE PairRun(const Context<T>& context, const Item<T>& item, const TileRange& range, const FactorTile& tile,
                    const T* in, T* out, Scratch<T>& scratch)
      : scratch_(scratch), tables_(item.tables.get() + tile.table) {
    const Group& group = context.plan->groups[range.group];
    const Operand *operands = &group.operands[tile.operands], &from = operands[1 - range.slot],
                  &to = operands[range.slot];
    beliefs_ = item.beliefs.get() + from.node;
    belief_stride_ = from.node_stride;
    stride_ = from.message_stride;
    received_ = in + from.message + kFirst * stride_;
    old_ = in + to.message + kFirst * stride_;
    sent_ = out + to.message + kFirst * stride_;
    if constexpr (Algebra::kNeedsCounting) {
      uniform_ = context.uniform[range.group] > T(0);
      counting_ = context.counting[range.group].data() + tile.first;
      inverse_ = context.inverse[range.group].data() + tile.first;
      settings_ = {load<T>(counting_), load<T>(inverse_), Kind::kDamped ? context.damping : T(0)};
    }
    table_stride_ = S > 2 || tile.shared ? kLanes<T> : tile.table_stride;
    if (tile.shared) {
      T* copy = reinterpret_cast<T*>(scratch.table);
      for (int e = 0; e < S * S; ++e) store<T>(copy + e * kLanes<T>, splat<T>(tables_[e]));
      tables_ = copy;
    }
  }

  // Sends the messages of its tiles, whose tables lie `step` apart; `last` is the last of the `tiles`. Before each,
  // next(shift) is called with the distance from the first tile.
  template <class Next>
  RF_INLINE void update(Index tiles, Index step, const FactorTile& last, Next next) {
    const T* tables = tables_;
    for (Index shift = 0; tiles > 0; --tiles, shift += kLanes<T>, tables += step) {
      next(shift);
      if (S > 2 && tiles == 1 && !last.shared && last.table_stride < kLanes<T>)
        tables = whole_rows(tables, last.table_stride);
      send(shift, tables, tiles > 1 ? kLanes<T> : last.count);
    }
  }

 private:
  static constexpr int kFirst = Algebra::keeps_ratio(S) ? Ratio<T>::kFirstStored : 0;

  RF_INLINE MessageSettings<T> settings(Index shift) const {
    if constexpr (Algebra::kNeedsCounting && !Kind::kUniform)
      if (!uniform_) return {load<T>(counting_ + shift), load<T>(inverse_ + shift), settings_.damping};
    return settings_;
  }

  // That of the other slot.
  RF_INLINE void cavity(Index shift, V<T>* cavity) {
    auto belief = [&](int x) RF_LAMBDA {
      return Kind::kOne && x == 1 ? splat<T>(1) : load<T>(beliefs_ + shift + x * belief_stride_);
    };
    auto message = [&](int x) RF_LAMBDA { return load<T>(received_ + shift + (x - kFirst) * stride_); };
    Algebra::template cavity<S>(cavity, S, belief, message, settings(shift));
    if (scratch_.tape) write_cavity<Algebra, T, S>(cavity, S, scratch_);
  }

  RF_INLINE void send(Index shift, const T* table, int count) {
    const Index stride = S > 2 ? kLanes<T> : table_stride_;
    V<T> other[S], m[S];
    cavity(shift, other);
    if constexpr (Algebra::keeps_ratio(S))
      Ratio<T>::contract(load<T>(table), other, m);
    else if constexpr (IsLogarithm<Algebra>::value && S == 2)
      contract_log_binary<T>(table, stride, Kind::kSlot, other, m);
    else if constexpr (IsLogarithm<Algebra>::value)
      contract_log_square<T, S>(table, stride, Kind::kSlot, other, m);
    else
      contract_pair<Algebra, T, S>(table, stride, Kind::kSlot, other, S, S, m);
    auto old = [&](int x) RF_LAMBDA { return load<T>(old_ + shift + (x - kFirst) * stride_); };
    Algebra::template finish_message<S>(m, S, settings(shift), old);
    RF_FOR (x, kFirst, S) store_some<T>(sent_ + shift + (x - kFirst) * stride_, m[x], count);
  }

  // The tables of a tile of few factors, copied so that the distance between entries is known.
  RF_INLINE const T* whole_rows(const T* tables, Index stride) const {
    T* copy = reinterpret_cast<T*>(scratch_.table);
    for (int e = 0; e < S * S; ++e) store<T>(copy + e * kLanes<T>, load<T>(tables + e * stride));
    return copy;
  }

  Scratch<T>& scratch_;
  const T *tables_, *beliefs_, *received_, *old_, *counting_ = nullptr, *inverse_ = nullptr;
  T* sent_;
  Index belief_stride_, stride_, table_stride_;
  MessageSettings<T> settings_;
  bool uniform_ = true;
};

}  // namespace riskfield::RISKFIELD_ISA
