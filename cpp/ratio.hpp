// The arithmetic of binary variables in probabilities (see Probability in algebra.hpp): one number in place of two.
//
// The scale of messages and beliefs is free. Messages to a binary variable are kept relative to its state 0, so that
// only the entry of state 1 is ever read or written, and its belief relative to state 1. So the cavity b / m needs no
// division and is known from its entry of state 0: the other is 1, or 0 throughout a run where state 1 is impossible.
// Potentials are relative to state 1, too. If state 1 is possible everywhere in an item, sweeps touch neither entry
// (see Item::state1_possible).
// Gradients are with respect to the logarithm of the ratio that is kept.
//
// A table between two binary variables takes one number, too. Any finite theta_c(x, y) is a constant, a function of x,
// a function of y, and gamma / 4 times the product of two signs, with gamma = theta_c(0, 0) - theta_c(0, 1) -
// theta_c(1, 0) + theta_c(1, 1). The functions of one variable move to its potentials, and out of its message:
//
//     theta_i(0) - theta_i(1) grows by c d,   log m(1) / m(0) grows by d,   the table is (w, 1; 1, w)
//
// with w = exp(gamma / 2c) and d = (theta(0, 0) + theta(0, 1) - theta(1, 0) - theta(1, 1)) / 2c for the first variable.
// Beliefs, marginals and the derivatives of each update stay what they are; only messages given and returned, and the
// measurement of convergence, have to take out d. A packed table has w in row 0, and d of its variables in rows 1
// and 2.
#pragma once

#include "simd_dual.hpp"

namespace riskfield::RISKFIELD_ISA {

template <class T>
struct Ratio {
  static constexpr int kStates = 2;
  static constexpr int kFirstStored = 1;  // messages store the states from this one on
  static constexpr int kCavityRows = 1;   // cavities, and gradients of beliefs, the states below this one

  // From a belief and m(1).
  template <class Belief>
  static RF_INLINE void cavity(V<T>* out, Belief belief, V<T> message) {
    out[0] = belief(0) * message;
    out[1] = belief(1);
  }
  // The message that a table makes of the cavity of its other variable.
  static RF_INLINE void contract(V<T> w, const V<T>* cavity, V<T>* m) {
    m[0] = w * cavity[0] + cavity[1];
    m[1] = cavity[0] + w * cavity[1];
  }
  static RF_INLINE void normalise_message(V<T>* m) {
    m[1] /= m[0];
    m[0] = splat<T>(1);
  }
  // Returns a number above 0 in the lanes that are possible.
  static RF_INLINE V<T> normalise_belief(V<T>* b) {
    const V<T> possible = b[0] + b[1];
    const I<T> zero = b[1] == T(0);
    b[0] = select<T>(zero, splat<T>(1), b[0] / b[1]);
    b[1] = select<T>(zero, V<T>{}, splat<T>(1));
    return possible;
  }
  // The same where state 1 is known to be possible.
  static RF_INLINE void normalise_possible_belief(V<T>* b) {
    b[0] /= b[1];
    b[1] = splat<T>(1);
  }
  // The change of the marginal between two beliefs.
  template <class Old>
  static RF_INLINE V<T> change(const V<T>* b, Old old) {
    return vabs<T>(b[0] / (b[0] + b[1]) - old(0) / (old(0) + old(1)));
  }

  // The same with beliefs as logarithms to the base 2, except that of state 1, which is 1 or 0.
  static RF_INLINE V<T> normalise_log_belief(V<T>* b) {
    const I<T> zero = b[1] == kNegInf<T>;
    const V<T> possible = select<T>((b[0] > kNegInf<T>) | (b[1] > kNegInf<T>), splat<T>(1), V<T>{});
    b[0] = select<T>(zero, V<T>{}, b[0] - b[1]);
    b[1] = select<T>(zero, V<T>{}, splat<T>(1));
    return possible;
  }
  static RF_INLINE void normalise_possible_log_belief(V<T>* b) {
    b[0] -= b[1];
    b[1] = splat<T>(1);
  }
  // The change of the marginal between the ratios 2^after and 2^before; an impossible state 1 stays impossible.
  static RF_INLINE V<T> log_change(const V<T>* b, V<T> after, V<T> before) {
    auto marginal = [](V<T> ratio) RF_LAMBDA {
      const V<T> largest = splat<T>(T(100));  // where the marginal is 1 and powers do not overflow yet
      const V<T> power = vexp2<T>(select<T>(ratio > largest, largest, ratio));
      return power / (power + T(1));
    };
    return select<T>(b[1] == T(0), V<T>{}, vabs<T>(marginal(after) - marginal(before)));
  }

  // From the gradient r[1] of the normalised message to those of its entries before that.
  static RF_INLINE void reverse_normalisation(const V<T>* m, V<T>* r) {
    r[0] = -r[1] / m[0];
    r[1] = r[1] / m[1];
  }
};

}  // namespace riskfield::RISKFIELD_ISA
