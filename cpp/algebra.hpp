// The arithmetics in which the same sweeps run. Each says how a cavity b_i / m_c is formed, how cavities of different
// slots combine, how a table is contracted into a message, and how messages add up to a belief.
//
// Messages are stored *powered*: as m^c (Probability) or c log m (LogMessages, Logarithm), so that a belief is a plain
// product or sum of what is stored, and one power per message suffices. Probability and LogMessages keep messages and
// beliefs of binary variables as ratios (see ratio.hpp). Arrays here are of vectors: entry x of all lanes at [x].
#pragma once

#include "plan.hpp"
#include "ratio.hpp"
#include "simd_dual.hpp"

namespace riskfield::RISKFIELD_ISA {

// The largest number of states for which loops over them are unrolled; dual numbers would fill the registers.
template <class T>
constexpr int kMostUnrolled = std::is_same<T, Dual>::value ? 2 : 5;

// How m^c is formed for a group of factors. Where neither is enough (kAny), where updates are damped, and where beliefs
// have powers of their own, messages are kept as logarithms (LogMessages).
enum class Power { kOne, kHalf, kAny };

template <class T>
RF_INLINE V<T> reciprocal_or_zero(V<T> x) {
  return select<T>(x == T(0), V<T>{}, T(1) / x);
}

// Of all lanes, in every lane.
template <class T, class Combine>
RF_INLINE V<T> across(V<T> v, Combine combine) {
  T lanes[kLanes<T>];
  store<T>(lanes, v);
  for (int width = kLanes<T> / 2; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) lanes[l] = combine(lanes[l], lanes[l + width]);
  return splat<T>(lanes[0]);
}

// What is summed or compared over states: entry by entry and, where the states of one variable fill the lanes
// (`Inside`, see inside.hpp), over these too.
template <bool Inside, class T>
RF_INLINE V<T> total_of(V<T> v) {
  if constexpr (!Inside) return v;
  return across<T>(v, [](T a, T b) { return a + b; });
}
template <bool Inside, class T>
RF_INLINE V<T> largest_of_states(V<T> v) {
  if constexpr (!Inside) return v;
  return across<T>(v, [](T a, T b) { return a > b || !(a == a) ? a : b; });  // NaN if either is
}

template <class T, int S, class Old>
RF_INLINE V<T> largest_difference(const V<T>* b, int states, Old old) {
  V<T> largest{};
  RF_FOR (x, 0, (S ? S : states)) largest = vmax<T>(largest, vabs<T>(b[x] - old(x)));
  return largest;
}

// Damped, a new log-message is (1 - damping) update + damping old.
template <class T>
struct MessageSettings {
  V<T> counting, inverse;  // c and 1 / c of each lane
  T damping;
};

// Sum-product on probabilities. Only for models whose range of potentials cannot underflow (see Packer);
// then no message is ever zero.
template <class T, Power P, bool Inside = false>
struct Probability {
  static_assert(P != Power::kAny);
  using OfStates = Probability<T, P, true>;
  static constexpr bool kInside = Inside;
  // What stands beyond the last state of a belief and of a message.
  static constexpr T kNoBelief = T(0), kNoMessage = T(1);
  static constexpr bool kNeedsCounting = false;
  static constexpr int kFixedStates = kMostUnrolled<T>, kFixedInSweeps = kFixedStates;
  static RF_INLINE V<T> one() { return splat<T>(1); }

  // out[x] = b(x) / m(x) up to a factor; `belief` and `stored` give the entries.
  template <int S, class Belief, class Stored>
  static RF_INLINE void cavity(V<T>* out, int states, Belief belief, Stored stored, const MessageSettings<T>&) {
    auto root = [&](int x) RF_LAMBDA {
      const V<T> m = stored(x);
      return P == Power::kHalf ? m * m : m;
    };
    const int n = S ? S : states;
    if (keeps_ratio(n))
      Ratio<T>::cavity(out, belief, root(Ratio<T>::kFirstStored));
    else
      RF_FOR (x, 0, n) out[x] = belief(x) / root(x);
  }
  static RF_INLINE V<T> combine(V<T> a, V<T> b) { return a * b; }
  static RF_INLINE V<T> multiply_add(V<T> sum, V<T> table, V<T> weight) { return sum + table * weight; }

  // Normalise an update, and power it.
  template <int S, class Old>
  static RF_INLINE void finish_message(V<T>* m, int states, const MessageSettings<T>&, Old) {
    const int n = S ? S : states;
    if (keeps_ratio(n)) {
      Ratio<T>::normalise_message(m);
    } else {
      // By the largest entry, not the sum: many factors at one variable would otherwise shrink its belief without
      // bound.
      V<T> top = m[0];
      RF_FOR (x, 1, n) top = vmax<T>(top, m[x]);
      const V<T> scale = T(1) / largest_of_states<Inside, T>(top);
      RF_FOR (x, 0, n) m[x] *= scale;
    }
    if constexpr (P == Power::kHalf)
      RF_FOR (x, first_state<S>(n), n) m[x] = vsqrt<T>(m[x]);
  }

  static RF_INLINE constexpr bool keeps_ratio(int states) { return !Inside && states == Ratio<T>::kStates; }
  // The first state of a message that is stored.
  template <int S>
  static RF_INLINE int first_state(int states) {
    return keeps_ratio(S ? S : states) ? Ratio<T>::kFirstStored : 0;
  }
  static RF_INLINE V<T> join(V<T> belief, V<T> stored) { return belief * stored; }

  // Scale a belief. Returns a number above 0 in the lanes that are possible.
  template <int S>
  static RF_INLINE V<T> finish_belief(V<T>* b, int states, bool, V<T>) {
    const int n = S ? S : states;
    if (keeps_ratio(n)) return Ratio<T>::normalise_belief(b);
    V<T> total = b[0];
    RF_FOR (x, 1, n) total += b[x];
    total = total_of<Inside, T>(total);
    const V<T> scale = T(1) / total;
    RF_FOR (x, 0, n) b[x] *= scale;
    return total;
  }
  // The same for ratios where state 1 is known to be possible.
  static RF_INLINE void finish_possible_belief(V<T>* b, bool, V<T>) { Ratio<T>::normalise_possible_belief(b); }
  // The largest change of a marginal between two beliefs.
  template <int S, class Old>
  static RF_INLINE V<T> change(const V<T>* b, int states, Old old) {
    const int n = S ? S : states;
    if (keeps_ratio(n)) return Ratio<T>::change(b, old);
    return largest_difference<T, S>(b, n, old);
  }
  // Entries of a cavity that have to be written down to know it.
  static RF_INLINE int cavity_rows(int states) { return keeps_ratio(states) ? Ratio<T>::kCavityRows : states; }
  // Natural logarithms: of a table entry or an update, of state x of a belief, of a stored message.
  static RF_INLINE V<T> logarithm(V<T> entry) { return vlog<T>(entry); }
  static RF_INLINE V<T> log_belief(int, int, V<T> belief) { return vlog<T>(belief); }
  static RF_INLINE V<T> log_message(V<T> stored) { return vlog<T>(stored); }
};

// Sum-product on probabilities, with messages and beliefs kept as logarithms to the base 2. A cavity then costs an
// exponential and an update a logarithm, whatever the counting numbers and the damping. The belief of state 1 of a
// binary variable, which is 1 or 0 (see ratio.hpp), is kept as it is. Gradients are the same as those of Probability,
// so the backward pass uses this arithmetic for both.
template <class T, bool Inside = false>
struct LogMessages {
  using Plain = Probability<T, Power::kOne, Inside>;
  using OfStates = LogMessages<T, true>;
  static constexpr bool kInside = Inside;
  static constexpr T kNoBelief = kNegInf<T>, kNoMessage = T(0);
  static constexpr bool kNeedsCounting = true;
  static constexpr int kFixedStates = kMostUnrolled<T>, kFixedInSweeps = kFixedStates;
  static RF_INLINE V<T> one() { return splat<T>(1); }
  static RF_INLINE V<T> combine(V<T> a, V<T> b) { return a * b; }
  static RF_INLINE V<T> multiply_add(V<T> sum, V<T> table, V<T> weight) { return sum + table * weight; }
  static RF_INLINE constexpr bool keeps_ratio(int states) { return Plain::keeps_ratio(states); }
  template <int S>
  static RF_INLINE int first_state(int states) {
    return Plain::template first_state<S>(states);
  }
  static RF_INLINE int cavity_rows(int states) { return Plain::cavity_rows(states); }

  template <int S, class Belief, class Stored>
  static RF_INLINE void cavity(V<T>* out, int states, Belief belief, Stored stored, const MessageSettings<T>& s) {
    const int n = S ? S : states;
    if (keeps_ratio(n)) {
      out[0] = vexp2<T>(belief(0) + stored(Ratio<T>::kFirstStored) * s.inverse);
      out[1] = belief(1);
    } else {
      RF_FOR (x, 0, n) out[x] = vexp2<T>(belief(x) - stored(x) * s.inverse);
    }
  }

  template <int S, class Old>
  static RF_INLINE void finish_message(V<T>* m, int states, const MessageSettings<T>& s, Old old) {
    const int n = S ? S : states;
    const V<T> rate = (1 - s.damping) * s.counting;
    if (keeps_ratio(n)) {
      m[1] = scaled_log2_ratio<T>(m[1], m[0], rate, s.damping > 0 ? s.damping * old(1) : V<T>{});
      return;
    }
    RF_FOR (x, 0, n) m[x] = vlog2<T>(m[x]) * rate;
    if (s.damping > 0)
      RF_FOR (x, 0, n) m[x] += s.damping * old(x);
    shift_to_zero<S>(m, n);
  }
  static RF_INLINE V<T> join(V<T> belief, V<T> stored) { return belief + stored; }

  template <int S>
  static RF_INLINE V<T> finish_belief(V<T>* b, int states, bool power, V<T> inverse_total) {
    const int n = S ? S : states;
    if (power)
      RF_FOR (x, 0, n) b[x] *= inverse_total;
    if (keeps_ratio(n)) return Ratio<T>::normalise_log_belief(b);
    const V<T> top = shift_to_zero<S>(b, n);
    return select<T>(top > kNegInf<T>, splat<T>(1), V<T>{});
  }
  static RF_INLINE void finish_possible_belief(V<T>* b, bool power, V<T> inverse_total) {
    if (power)
      RF_FOR (x, 0, Ratio<T>::kStates) b[x] *= inverse_total;
    Ratio<T>::normalise_possible_log_belief(b);
  }
  template <int S, class Old>
  static RF_INLINE V<T> change(const V<T>* b, int states, Old old) {
    const int n = S ? S : states;
    if (keeps_ratio(n)) return Ratio<T>::log_change(b, b[0], old(0));
    V<T> total{}, old_total{}, most{};
    RF_FOR (x, 0, n) {
      total += vexp2<T>(b[x]);
      old_total += vexp2<T>(old(x));
    }
    const V<T> scale = reciprocal_or_zero<T>(total_of<Inside, T>(total)),
               old_scale = reciprocal_or_zero<T>(total_of<Inside, T>(old_total));
    RF_FOR (x, 0, n) most = vmax<T>(most, vabs<T>(vexp2<T>(b[x]) * scale - vexp2<T>(old(x)) * old_scale));
    return most;
  }
  static RF_INLINE V<T> logarithm(V<T> entry) { return vlog<T>(entry); }
  static RF_INLINE V<T> log_belief(int states, int x, V<T> belief) {
    return keeps_ratio(states) && x == 1 ? vlog<T>(belief) : belief * kLn2<T>;
  }
  static RF_INLINE V<T> log_message(V<T> stored) { return stored * kLn2<T>; }

 private:
  // So that the largest is 0. Returns what it was.
  template <int S>
  static RF_INLINE V<T> shift_to_zero(V<T>* m, int n) {
    V<T> top = m[0];
    RF_FOR (x, 1, n) top = vmax<T>(top, m[x]);
    top = largest_of_states<Inside, T>(top);
    const V<T> shift = select<T>(top == kNegInf<T>, V<T>{}, top);
    RF_FOR (x, 0, n) m[x] -= shift;
    return top;
  }
};

// Sum-product and max-product on logarithms: right for any potentials, at the price of an exponential per table entry.
template <class T, bool Max, bool Inside = false>
struct Logarithm {
  using OfStates = void;  // no updates with states in the lanes, but the comparison of beliefs
  static constexpr bool kInside = Inside;
  static constexpr bool kNeedsCounting = true;
  static constexpr int kFixedStates = Max ? 0 : 2, kFixedInSweeps = Max ? 0 : kMostUnrolled<T>;
  static RF_INLINE V<T> one() { return V<T>{}; }
  template <int S, class Belief, class Stored>
  static RF_INLINE void cavity(V<T>* out, int states, Belief belief, Stored stored, const MessageSettings<T>& s) {
    RF_FOR (x, 0, (S ? S : states)) {
      const V<T> m = stored(x);
      // An impossible state stays impossible: 0 / 0 is 0 here.
      out[x] = select<T>(m == kNegInf<T>, splat<T>(kNegInf<T>), belief(x) - m * s.inverse);
    }
  }
  static RF_INLINE V<T> combine(V<T> a, V<T> b) { return a + b; }

  template <int S = 0>
  static RF_INLINE V<T> largest(const V<T>* m, int states) {
    V<T> top = m[0];
    RF_FOR (x, 1, (S ? S : states)) top = vmax<T>(top, m[x]);
    return largest_of_states<Inside, T>(top);
  }
  static RF_NOINLINE V<T> log_total(const V<T>* m, int n) {
    const V<T> finite_top = finite_or_zero(largest(m, n));
    V<T> total{};
    for (int x = 0; x < n; ++x) total += vexp<T>(m[x] - finite_top);
    return finite_top + vlog<T>(total_of<Inside, T>(total));
  }
  static RF_INLINE V<T> finite_or_zero(V<T> x) { return select<T>(x == kNegInf<T>, V<T>{}, x); }

  template <int S, class Old>
  static RF_INLINE void finish_message(V<T>* m, int states, const MessageSettings<T>& s, Old old) {
    // The scale is free. The largest entry is cheaper than the sum, which needs exponentials.
    const int n = S ? S : states;
    V<T> shift = finite_or_zero(largest<S>(m, n));
    if (s.damping > 0) {
      RF_FOR (x, 0, n)
        m[x] = select<T>(m[x] == kNegInf<T>, m[x], (1 - s.damping) * (m[x] - shift) + s.damping * (old(x) * s.inverse));
      shift = finite_or_zero(largest<S>(m, n));
    }
    RF_FOR (x, 0, n) m[x] = (m[x] - shift) * s.counting;
  }

  static RF_INLINE constexpr bool keeps_ratio(int) { return false; }
  template <int S>
  static RF_INLINE int first_state(int) {
    return 0;
  }
  static RF_INLINE V<T> join(V<T> belief, V<T> stored) { return belief + stored; }

  template <int S>
  static RF_INLINE V<T> finish_belief(V<T>* b, int states, bool power, V<T> inverse_total) {
    const int n = S ? S : states;
    if (power)
      RF_FOR (x, 0, n) b[x] *= inverse_total;
    const V<T> top = largest<S>(b, n), shift = finite_or_zero(top);
    RF_FOR (x, 0, n) b[x] -= shift;
    return select<T>(top > kNegInf<T>, splat<T>(1), V<T>{});
  }
  static RF_INLINE void normalise(V<T>* b, int states) {
    const V<T> shift = finite_or_zero(log_total(b, states));
    for (int x = 0; x < states; ++x) b[x] -= shift;
  }
  // Both beliefs are finished, so that exponentials do not overflow.
  template <int S, class Old>
  static RF_INLINE V<T> change(const V<T>* b, int states, Old old) {
    V<T> total{}, old_total{};
    for (int x = 0; x < states; ++x) {
      total += vexp<T>(b[x]);
      old_total += vexp<T>(old(x));
    }
    const V<T> scale = reciprocal_or_zero<T>(total_of<Inside, T>(total)),
               old_scale = reciprocal_or_zero<T>(total_of<Inside, T>(old_total));
    V<T> most{};
    for (int x = 0; x < states; ++x) most = vmax<T>(most, vabs<T>(vexp<T>(b[x]) * scale - vexp<T>(old(x)) * old_scale));
    return most;
  }
  static RF_INLINE int cavity_rows(int states) { return states; }
  static RF_INLINE V<T> logarithm(V<T> entry) { return entry; }
  static RF_INLINE V<T> log_belief(int, int, V<T> belief) { return belief; }
  static RF_INLINE V<T> log_message(V<T> stored) { return stored; }
};

// Mean field: a "message" is the expected log-potential, a belief the softmax of their sum.
template <class T>
struct Expectation {
  using OfStates = void;
  static constexpr bool kInside = false;
  static constexpr bool kNeedsCounting = false;
  static constexpr int kFixedStates = kMostUnrolled<T>, kFixedInSweeps = kFixedStates;
  static RF_INLINE V<T> one() { return splat<T>(1); }
  template <int S, class Belief, class Stored>
  static RF_INLINE void cavity(V<T>* out, int states, Belief belief, Stored, const MessageSettings<T>&) {
    for (int x = 0; x < (S ? S : states); ++x) out[x] = belief(x);
  }
  static RF_INLINE V<T> combine(V<T> a, V<T> b) { return a * b; }
  static RF_INLINE V<T> multiply_add(V<T> sum, V<T> table, V<T> weight) { return sum + expected(table, weight); }
  // 0 * -inf is 0: a joint state that has no probability costs nothing.
  static RF_INLINE V<T> expected(V<T> table, V<T> weight) {
    const V<T> product = table * weight;
    return select<T>(table > kNegInf<T>, product, select<T>(weight == T(0), V<T>{}, product));
  }
  template <int S, class Old>
  static RF_INLINE void finish_message(V<T>*, int, const MessageSettings<T>&, Old) {}
  static RF_INLINE constexpr bool keeps_ratio(int) { return false; }
  template <int S>
  static RF_INLINE int first_state(int) {
    return 0;
  }
  static RF_INLINE V<T> join(V<T> belief, V<T> stored) { return belief + stored; }

  template <int S>
  static RF_INLINE V<T> finish_belief(V<T>* b, int states, bool, V<T>) {
    const int n = S ? S : states;
    V<T> top = b[0];
    for (int x = 1; x < n; ++x) top = vmax<T>(top, b[x]);
    const V<T> shift = select<T>(top == kNegInf<T>, V<T>{}, top);
    V<T> total{};
    for (int x = 0; x < n; ++x) total += b[x] = vexp<T>(b[x] - shift);
    const V<T> scale = reciprocal_or_zero<T>(total);
    RF_FOR (x, 0, n) b[x] *= scale;
    return total;
  }
  template <int S, class Old>
  static RF_INLINE V<T> change(const V<T>* b, int states, Old old) {
    return largest_difference<T, S>(b, states, old);
  }
  static RF_INLINE int cavity_rows(int states) { return states; }
  static RF_INLINE V<T> logarithm(V<T> entry) { return vlog<T>(entry); }
  static RF_INLINE V<T> log_belief(int, int, V<T> belief) { return vlog<T>(belief); }
};

}  // namespace riskfield::RISKFIELD_ISA
