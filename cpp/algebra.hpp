// The arithmetics in which the same sweeps run. Each says how a cavity b_i / m_c is formed, how cavities of different
// slots combine, how a table is contracted into a message, and how messages add up to a belief.
//
// Messages are stored *powered*: as m^c (Probability) or c log m (Logarithm), so that a belief is a plain product or
// sum of what is stored, and one power per message suffices. Probability keeps messages and beliefs of binary variables
// as ratios (see ratio.hpp). Arrays here are of vectors: entry x of all lanes at [x].
#pragma once

#include "plan.hpp"
#include "ratio.hpp"
#include "simd_dual.hpp"

namespace riskfield::RISKFIELD_ISA {

// The largest number of states for which loops over them are unrolled; dual numbers would fill the registers.
template <class T>
constexpr int kMostUnrolled = std::is_same<T, Dual>::value ? 2 : 5;

// How m^c is formed for a group of factors. Where powers are expensive (kAny) a run also keeps m itself, or log2 m if
// updates are damped, so that one power per message sent suffices.
enum class Power { kOne, kHalf, kAny };

template <class T>
RF_INLINE V<T> reciprocal_or_zero(V<T> x) {
  return select<T>(x == T(0), V<T>{}, T(1) / x);
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
  T uniform;  // the c of all lanes, or 0
};

// Sum-product on probabilities. Only for models whose range of potentials cannot underflow (see Packer);
// then no message is ever zero.
template <class T, Power P>
struct Probability {
  static constexpr bool kNeedsCounting = P == Power::kAny;
  static constexpr bool kKeepsRoots = P == Power::kAny;
  static constexpr int kFixedStates = kMostUnrolled<T>;
  static RF_INLINE V<T> one() { return splat<T>(1); }

  // m, from m^c or from what is kept beside it.
  template <class Stored, class Kept>
  static RF_INLINE V<T> root(int x, Stored stored, Kept kept, const MessageSettings<T>& s) {
    if constexpr (P == Power::kOne) return stored(x);
    if constexpr (P == Power::kHalf) {
      const V<T> m = stored(x);
      return m * m;
    }
    if (!(s.damping > 0)) return kept(x);
    if (s.uniform == T(1)) return stored(x);
    if (s.uniform == T(0.5)) {
      const V<T> m = stored(x);
      return m * m;
    }
    return vexp2<T>(kept(x));
  }

  // out[x] = b(x) / m(x) up to a factor; `belief`, `stored` and `kept` give the entries.
  template <int S, class Belief, class Stored, class Kept>
  static RF_INLINE void cavity(V<T>* out, int states, Belief belief, Stored stored, Kept kept,
                               const MessageSettings<T>& s) {
    const int n = S ? S : states;
    if (keeps_ratio(n))
      Ratio<T>::cavity(out, belief, root(Ratio<T>::kFirstStored, stored, kept, s));
    else
      RF_FOR (x, 0, n) out[x] = belief(x) / root(x, stored, kept, s);
  }
  static RF_INLINE V<T> combine(V<T> a, V<T> b) { return a * b; }
  static RF_INLINE V<T> multiply_add(V<T> sum, V<T> table, V<T> weight) { return sum + table * weight; }

  // Normalise an update, and power it where that is cheap; elsewhere powers.hpp does it.
  template <int S, class Old>
  static RF_INLINE void finish_message(V<T>* m, int states, const MessageSettings<T>&, Old) {
    const int n = S ? S : states;
    if (keeps_ratio(n)) {
      Ratio<T>::normalise_message(m);
    } else {
      // By the largest entry, not the sum: many factors at one variable would otherwise shrink its belief without
      // bound.
      scale_to_one<S>(m, n);
    }
    if constexpr (P == Power::kHalf)
      RF_FOR (x, first_state<S>(n), n) m[x] = vsqrt<T>(m[x]);
  }

  template <int S>
  static RF_INLINE void scale_to_one(V<T>* m, int n) {
    V<T> top = m[0];
    RF_FOR (x, 1, n) top = vmax<T>(top, m[x]);
    const V<T> scale = T(1) / top;
    RF_FOR (x, 0, n) m[x] *= scale;
  }

  static RF_INLINE constexpr bool keeps_ratio(int states) { return states == Ratio<T>::kStates; }
  // The first state of a message that is stored.
  template <int S>
  static RF_INLINE int first_state(int states) {
    return keeps_ratio(S ? S : states) ? Ratio<T>::kFirstStored : 0;
  }
  static RF_INLINE V<T> join(V<T> belief, V<T> stored) { return belief * stored; }

  // Scale a belief. Returns a number above 0 in the lanes that are possible.
  template <int S>
  static RF_INLINE V<T> finish_belief(V<T>* b, int states, bool power, V<T> inverse_total) {
    const int n = S ? S : states;
    if (power)
      RF_FOR (x, 0, n) b[x] = vpow<T>(b[x], inverse_total);
    if (keeps_ratio(n)) return Ratio<T>::normalise_belief(b);
    V<T> total = b[0];
    RF_FOR (x, 1, n) total += b[x];
    const V<T> scale = T(1) / total;
    RF_FOR (x, 0, n) b[x] *= scale;
    return total;
  }
  // The largest change of a marginal between two beliefs.
  template <int S, class Old>
  static RF_INLINE V<T> change(const V<T>* b, int states, Old old) {
    const int n = S ? S : states;
    if (keeps_ratio(n)) return Ratio<T>::change(b, old);
    return largest_difference<T, S>(b, n, old);
  }
  // Entries of a cavity that have to be written down to know it.
  static RF_INLINE int cavity_rows(int states) { return keeps_ratio(states) ? Ratio<T>::kCavityRows : states; }
  static RF_INLINE V<T> logarithm(V<T> belief) { return vlog<T>(belief); }
};

// Sum-product and max-product on logarithms: right for any potentials, at the price of an exponential per table entry.
template <class T, bool Max>
struct Logarithm {
  static constexpr bool kNeedsCounting = true;
  static constexpr bool kKeepsRoots = false;
  static constexpr int kFixedStates = Max ? 0 : 2;
  static RF_INLINE V<T> one() { return V<T>{}; }
  template <int S, class Belief, class Stored, class Kept>
  static RF_INLINE void cavity(V<T>* out, int states, Belief belief, Stored stored, Kept, const MessageSettings<T>& s) {
    for (int x = 0; x < states; ++x) {
      const V<T> m = stored(x);
      // An impossible state stays impossible: 0 / 0 is 0 here.
      out[x] = select<T>(m == kNegInf<T>, splat<T>(kNegInf<T>), belief(x) - m * s.inverse);
    }
  }
  static RF_INLINE V<T> combine(V<T> a, V<T> b) { return a + b; }

  static RF_INLINE V<T> largest(const V<T>* m, int n) {
    V<T> top = m[0];
    for (int x = 1; x < n; ++x) top = vmax<T>(top, m[x]);
    return top;
  }
  static RF_INLINE V<T> log_total(const V<T>* m, int n) {
    const V<T> finite_top = finite_or_zero(largest(m, n));
    V<T> total{};
    for (int x = 0; x < n; ++x) total += vexp<T>(m[x] - finite_top);
    return finite_top + vlog<T>(total);
  }
  static RF_INLINE V<T> finite_or_zero(V<T> x) { return select<T>(x == kNegInf<T>, V<T>{}, x); }

  template <int S, class Old>
  static RF_INLINE void finish_message(V<T>* m, int states, const MessageSettings<T>& s, Old old) {
    // The scale is free. The largest entry is cheaper than the sum, which needs exponentials.
    V<T> shift = finite_or_zero(largest(m, states));
    if (s.damping > 0) {
      for (int x = 0; x < states; ++x)
        m[x] = select<T>(m[x] == kNegInf<T>, m[x], (1 - s.damping) * (m[x] - shift) + s.damping * (old(x) * s.inverse));
      shift = finite_or_zero(largest(m, states));
    }
    for (int x = 0; x < states; ++x) m[x] = (m[x] - shift) * s.counting;
  }

  static RF_INLINE constexpr bool keeps_ratio(int) { return false; }
  template <int S>
  static RF_INLINE int first_state(int) {
    return 0;
  }
  static RF_INLINE V<T> join(V<T> belief, V<T> stored) { return belief + stored; }

  template <int S>
  static RF_INLINE V<T> finish_belief(V<T>* b, int states, bool power, V<T> inverse_total) {
    if (power)
      for (int x = 0; x < states; ++x) b[x] *= inverse_total;
    const V<T> top = largest(b, states), shift = finite_or_zero(top);
    for (int x = 0; x < states; ++x) b[x] -= shift;
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
    const V<T> scale = reciprocal_or_zero<T>(total), old_scale = reciprocal_or_zero<T>(old_total);
    V<T> most{};
    for (int x = 0; x < states; ++x) most = vmax<T>(most, vabs<T>(vexp<T>(b[x]) * scale - vexp<T>(old(x)) * old_scale));
    return most;
  }
  static RF_INLINE int cavity_rows(int states) { return states; }
  static RF_INLINE V<T> logarithm(V<T> belief) { return belief; }
};

// Mean field: a "message" is the expected log-potential, a belief the softmax of their sum.
template <class T>
struct Expectation {
  static constexpr bool kNeedsCounting = false;
  static constexpr bool kKeepsRoots = false;
  static constexpr int kFixedStates = kMostUnrolled<T>;
  static RF_INLINE V<T> one() { return splat<T>(1); }
  template <int S, class Belief, class Stored, class Kept>
  static RF_INLINE void cavity(V<T>* out, int states, Belief belief, Stored, Kept, const MessageSettings<T>&) {
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
  static RF_INLINE V<T> logarithm(V<T> belief) { return vlog<T>(belief); }
};

// out[x] = sum over a, b of before[a] table[(a, x, b)] after[b], where a runs over the joint states of the slots before
// x's and b over those after it. `stride` is the distance of consecutive table entries.
template <class Algebra, class T, int S>
RF_INLINE void contract(const T* table, Index stride, const V<T>* before, Index num_before, int states,
                        const V<T>* after, Index num_after, V<T>* out) {
  const int n = S ? S : states;
  if (num_after == 1) {
    // Blocks of accumulators stay in registers while the table streams by.
    constexpr int kBlock = S ? S : 8;
    for (int x0 = 0; x0 < n; x0 += kBlock) {
      const int block = S ? S : (n - x0 < kBlock ? n - x0 : kBlock);
      V<T> sum[kBlock];
      for (int x = 0; x < kBlock; ++x) sum[x] = V<T>{};
      if (block == kBlock) {
        for (Index a = 0; a < (S ? S : num_before); ++a)
#pragma GCC unroll 8
          for (int x = 0; x < kBlock; ++x)
            sum[x] = Algebra::multiply_add(sum[x], load<T>(table + (a * n + x0 + x) * stride), before[a]);
      } else {
        for (Index a = 0; a < num_before; ++a)
          for (int x = 0; x < block; ++x)
            sum[x] = Algebra::multiply_add(sum[x], load<T>(table + (a * n + x0 + x) * stride), before[a]);
      }
      for (int x = 0; x < block; ++x) out[x0 + x] = sum[x];
    }
    return;
  }
  for (int x = 0; x < n; ++x) out[x] = V<T>{};
  const Index na = S ? 1 : num_before, nb = S ? S : num_after;
  for (Index a = 0; a < na; ++a)
    for (int x = 0; x < n; ++x) {
      const T* row = table + (a * n + x) * nb * stride;
      V<T> sum{};
      if (na == 1) {
        for (Index b = 0; b < nb; ++b) sum = Algebra::multiply_add(sum, load<T>(row + b * stride), after[b]);
      } else {
        for (Index b = 0; b < nb; ++b)
          sum = Algebra::multiply_add(sum, load<T>(row + b * stride), before[a] * after[b]);
      }
      out[x] += sum;
    }
}

// The same in logarithms: the largest term first, then, for sum-product, the sum relative to it.
template <class T, bool Max>
RF_INLINE void contract_log(const T* table, Index stride, const V<T>* before, Index num_before, int states,
                            const V<T>* after, Index num_after, V<T>* out) {
  for (int x = 0; x < states; ++x) {
    V<T> top = splat<T>(kNegInf<T>);
    for (Index a = 0; a < num_before; ++a) {
      const T* row = table + (a * states + x) * num_after * stride;
      for (Index b = 0; b < num_after; ++b) top = vmax<T>(top, load<T>(row + b * stride) + before[a] + after[b]);
    }
    out[x] = top;
    if constexpr (!Max) {
      const V<T> shift = select<T>(top == kNegInf<T>, V<T>{}, top);
      V<T> total{};
      for (Index a = 0; a < num_before; ++a) {
        const T* row = table + (a * states + x) * num_after * stride;
        for (Index b = 0; b < num_after; ++b)
          total += vexp<T>(load<T>(row + b * stride) + before[a] + after[b] - shift);
      }
      out[x] = shift + vlog<T>(total);
    }
  }
}

// The same between two binary variables, up to a constant: one logarithm, of the ratio of both sums, and no exponential
// of a largest term. The cavity is that of the other slot.
template <class T>
RF_INLINE void contract_log_binary(const T* table, Index stride, int slot, const V<T>* cavity, V<T>* out) {
  V<T> total[2];
  RF_FOR (x, 0, 2) {
    auto term = [&](int y)
                    RF_LAMBDA { return load<T>(table + (slot == 0 ? x * 2 + y : y * 2 + x) * stride) + cavity[y]; };
    const V<T> one = term(0), other = term(1);
    out[x] = vmax<T>(one, other);
    const V<T> low = select<T>(one > other, other, one);
    total[x] = vexp<T>(low - select<T>(out[x] == kNegInf<T>, V<T>{}, out[x])) + T(1);
  }
  out[1] += vlog<T>(total[1] / total[0]);
}

}  // namespace riskfield::RISKFIELD_ISA
