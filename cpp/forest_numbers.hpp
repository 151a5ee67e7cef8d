// The numbers that exact inference on forests computes with: one item or a vector of items, and a vector of numbers
// with unlimited range for models whose probabilities differ by more than a double can hold.
#pragma once

#include <cmath>

#include "exponentials.hpp"
#include "plan.hpp"

namespace riskfield::RISKFIELD_ISA {

// m 2^e in every lane, with e a whole number. Zero has m = 0 and a very small e, so that it disappears from sums.
struct Wide {
  V<double> m, e;
};

constexpr double kExponentOfZero = -1e18;

// 2^d for whole numbers d <= 0; 0 below the range of doubles.
RF_INLINE V<double> power_of_two(V<double> d) {
  const V<double> shifted = d + Format<double>::kRound;
  const U<double> bits = as_bits<double>(shifted) << Format<double>::kMantissa;
  return select<double>(d < -1022.0, V<double>{}, from_bits<double>(bits));
}

// The same number with m in [1, 2), or (-2, -1].
RF_INLINE Wide normalised(Wide a) {
  using F = Format<double>;
  constexpr F::Bits kExponent = F::Bits(0x7ff) << F::kMantissa;
  const U<double> bits = as_bits<double>(a.m);
  const U<double> exponent = (bits & kExponent) >> F::kMantissa;
  const U<double> mantissa = (bits & ~kExponent) | (F::kBias << F::kMantissa);
  const V<double> round = splat<double>(F::kRound);
  const U<double> packed = as_bits<double>(round) + exponent - F::kBias;
  const V<double> e = from_bits<double>(packed) - F::kRound;  // the exponent, from the low bits of kRound
  const I<double> zero = a.m == 0.0;
  return {select<double>(zero, V<double>{}, from_bits<double>(mantissa)),
          select<double>(zero, splat<double>(kExponentOfZero), a.e + e)};
}

RF_INLINE Wide operator*(Wide a, Wide b) { return {a.m * b.m, a.e + b.e}; }
RF_INLINE Wide operator+(Wide a, Wide b) {
  const V<double> top = vmax<double>(a.e, b.e);
  return {a.m * power_of_two(a.e - top) + b.m * power_of_two(b.e - top), top};
}
RF_INLINE Wide operator-(Wide a, Wide b) { return a + Wide{-b.m, b.e}; }
RF_INLINE Wide& operator+=(Wide& a, Wide b) { return a = a + b; }
RF_INLINE Wide& operator-=(Wide& a, Wide b) { return a = a - b; }
RF_INLINE Wide& operator*=(Wide& a, Wide b) { return a = a * b; }

// What the kernels ask of a kind of numbers. `Reals` holds one double per item.
struct VectorNumbers {
  using Number = V<double>;
  using Reals = V<double>;
  static constexpr int kWidth = kLanes<double>;
  static constexpr bool kLimited = true;  // whether numbers can underflow
  static RF_INLINE Number zero() { return Number{}; }
  static RF_INLINE Number one() { return splat<double>(1.0); }
  static RF_INLINE void exp(const Reals* x, Index count, Number* out) {
    for (Index k = 0; k < count; ++k) out[k] = vexp<double>(x[k]);
  }
  static RF_INLINE Reals log(Number x) { return vlog<double>(x); }
  static RF_INLINE Number larger(Number a, Number b) { return select<double>(a > b, a, b); }
  // a / b; 0 where b is.
  static RF_INLINE Number ratio(Number a, Number b) { return select<double>(b == 0.0, Number{}, a / b); }
  // a; 0 where b is.
  static RF_INLINE Number unless_zero(Number b, Number a) { return select<double>(b == 0.0, Number{}, a); }
  static RF_INLINE Number canonical(Number a) { return a; }
  static RF_INLINE Number from_real(Reals x) { return x; }
  static RF_INLINE Reals to_real(Number x) { return x; }
  static RF_INLINE Reals load(const double* p) { return riskfield::RISKFIELD_ISA::load<double>(p); }
  static RF_INLINE void store(double* p, Reals x) { riskfield::RISKFIELD_ISA::store<double>(p, x); }
  // Whether an item has a number between 0 and `least`.
  static RF_INLINE Reals tiny(Number x, double least, Reals so_far) {
    return select<double>((x > 0.0) & (x < least), splat<double>(1.0), so_far);
  }
  // The same of logarithms.
  static RF_INLINE Reals below(Reals x, double lowest, Reals so_far) {
    return select<double>((x > kNegInf<double>)&(x < lowest), splat<double>(1.0), so_far);
  }
  static RF_INLINE Reals finite_or_zero(Reals x) { return select<double>(x == kNegInf<double>, Reals{}, x); }
  static RF_INLINE Reals larger_real(Reals a, Reals b) { return larger(a, b); }
  static RF_INLINE double lane(Reals x, int l) { return x[l]; }
};

struct ScalarNumbers {
  using Number = double;
  using Reals = double;
  static constexpr int kWidth = 1;
  static constexpr bool kLimited = true;
  static RF_INLINE Number zero() { return 0.0; }
  static RF_INLINE Number one() { return 1.0; }
  static RF_INLINE void exp(const Reals* x, Index count, Number* out) {
    constexpr int kStep = kLanes<double>;
    Index k = 0;
    for (; k + kStep <= count; k += kStep)
      riskfield::RISKFIELD_ISA::store<double>(out + k, vexp<double>(riskfield::RISKFIELD_ISA::load<double>(x + k)));
    for (; k < count; ++k) out[k] = vexp<double>(splat<double>(x[k]))[0];
  }
  static RF_INLINE Reals log(Number x) { return std::log(x); }
  static RF_INLINE Number larger(Number a, Number b) { return a > b ? a : b; }
  static RF_INLINE Number ratio(Number a, Number b) { return b == 0.0 ? 0.0 : a / b; }
  static RF_INLINE Number unless_zero(Number b, Number a) { return b == 0.0 ? 0.0 : a; }
  static RF_INLINE Number canonical(Number a) { return a; }
  static RF_INLINE Number from_real(Reals x) { return x; }
  static RF_INLINE Reals to_real(Number x) { return x; }
  static RF_INLINE Reals load(const double* p) { return *p; }
  static RF_INLINE void store(double* p, Reals x) { *p = x; }
  static RF_INLINE Reals tiny(Number x, double least, Reals so_far) { return x > 0.0 && x < least ? 1.0 : so_far; }
  static RF_INLINE Reals below(Reals x, double lowest, Reals so_far) {
    return x > kNegInf<double> && x < lowest ? 1.0 : so_far;
  }
  static RF_INLINE Reals finite_or_zero(Reals x) { return x == kNegInf<double> ? 0.0 : x; }
  static RF_INLINE Reals larger_real(Reals a, Reals b) { return a > b ? a : b; }
  static RF_INLINE double lane(Reals x, int) { return x; }
};

struct WideNumbers {
  using Number = Wide;
  using Reals = V<double>;
  static constexpr int kWidth = kLanes<double>;
  static constexpr bool kLimited = false;
  static constexpr double kLowest = -1e15;  // smaller logarithms are taken for this one
  static RF_INLINE Number zero() { return {V<double>{}, splat<double>(kExponentOfZero)}; }
  static RF_INLINE Number one() { return {splat<double>(1.0), V<double>{}}; }
  static RF_INLINE void exp(const Reals* x, Index count, Number* out) {
    for (Index k = 0; k < count; ++k) out[k] = exp(x[k]);
  }
  static RF_INLINE Number exp(Reals x) {
    using F = Format<double>;
    const V<double> floor = splat<double>(kLowest);
    const V<double> y = select<double>(x < floor, floor, x);
    const V<double> n = (y * 1.4426950408889634074 + F::kRound) - F::kRound;
    const V<double> r = (y - n * F::kLn2Hi) - n * F::kLn2Lo;
    const I<double> zero = x == kNegInf<double>;
    return {select<double>(zero, V<double>{}, vexp<double>(r)),
            select<double>(zero, splat<double>(kExponentOfZero), n)};
  }
  static RF_INLINE Reals log(Number x) {
    const Wide y = normalised(x);
    constexpr double kLn2 = 0.69314718055994530942;
    return select<double>(x.m == 0.0, splat<double>(kNegInf<double>), vlog<double>(y.m) + y.e * kLn2);
  }
  static RF_INLINE Number larger(Number a, Number b) {
    const Wide x = normalised(a), y = normalised(b);
    const I<double> first = (x.e > y.e) | ((x.e == y.e) & (x.m > y.m));
    return {select<double>(first, x.m, y.m), select<double>(first, x.e, y.e)};
  }
  static RF_INLINE Number ratio(Number a, Number b) {
    const I<double> none = (a.m == 0.0) | (b.m == 0.0);
    return normalised({select<double>(none, V<double>{}, a.m / b.m), a.e - b.e});
  }
  static RF_INLINE Number unless_zero(Number b, Number a) {
    const I<double> none = b.m == 0.0;
    return {select<double>(none, V<double>{}, a.m), select<double>(none, splat<double>(kExponentOfZero), a.e)};
  }
  static RF_INLINE Number canonical(Number a) { return normalised(a); }
  static RF_INLINE Number from_real(Reals x) { return normalised({x, V<double>{}}); }
  static RF_INLINE Reals to_real(Number x) {
    // Results are probabilities or gradients, in the range of doubles unless they underflow.
    const Wide y = normalised(x);
    const I<double> large = y.e > 0.0;
    const V<double> up = select<double>(large, -y.e, V<double>{}), down = select<double>(large, V<double>{}, y.e);
    return y.m * power_of_two(down) / power_of_two(up);
  }
  static RF_INLINE Reals load(const double* p) { return VectorNumbers::load(p); }
  static RF_INLINE void store(double* p, Reals x) { VectorNumbers::store(p, x); }
  static RF_INLINE Reals tiny(Number, double, Reals so_far) { return so_far; }
  static RF_INLINE Reals finite_or_zero(Reals x) { return VectorNumbers::finite_or_zero(x); }
  static RF_INLINE Reals larger_real(Reals a, Reals b) { return vmax<double>(a, b); }
  static RF_INLINE double lane(Reals x, int l) { return x[l]; }
};

}  // namespace riskfield::RISKFIELD_ISA
