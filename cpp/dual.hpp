// Dual numbers: a value and its slope along one direction, which arithmetic carries along. Sweeps on them, forwards and
// backwards, give the product of the Hessian with that direction (Pearlmutter 1994). Comparisons look at values alone,
// so a run on dual numbers takes the same branches as one on their values.
#pragma once

#include <cmath>
#include <limits>

namespace riskfield {

// Two doubles side by side, as in a complex number.
struct Dual {
  double value = 0, slope = 0;
  constexpr Dual() = default;
  constexpr Dual(double v) : value(v) {}  // NOLINT: a number is a constant dual number
  constexpr Dual(double v, double s) : value(v), slope(s) {}
  explicit operator double() const { return value; }
  Dual& operator+=(Dual b) { return *this = {value + b.value, slope + b.slope}; }
  Dual& operator*=(Dual b) { return *this = {value * b.value, slope * b.value + value * b.slope}; }
  Dual& operator/=(Dual b) {
    const double quotient = value / b.value;
    return *this = {quotient, (slope - quotient * b.slope) / b.value};
  }
};

inline Dual operator-(Dual a) { return {-a.value, -a.slope}; }
inline Dual operator+(Dual a, Dual b) { return a += b; }
inline Dual operator-(Dual a, Dual b) { return a += -b; }
inline Dual operator*(Dual a, Dual b) { return a *= b; }
inline Dual operator/(Dual a, Dual b) { return a /= b; }
inline bool operator<(Dual a, Dual b) { return a.value < b.value; }
inline bool operator>(Dual a, Dual b) { return a.value > b.value; }
inline bool operator==(Dual a, Dual b) { return a.value == b.value; }
inline bool is_zero(double a) { return a == 0; }
inline bool is_zero(Dual a) { return a.value == 0 && a.slope == 0; }
inline Dual exp(Dual a) {
  const double value = std::exp(a.value);
  return {value, value > 0 ? a.slope * value : 0};
}
inline Dual log(Dual a) { return {std::log(a.value), a.value > 0 ? a.slope / a.value : 0}; }

}  // namespace riskfield

template <>
struct std::numeric_limits<riskfield::Dual> {
  static constexpr riskfield::Dual infinity() { return std::numeric_limits<double>::infinity(); }
  static constexpr riskfield::Dual quiet_NaN() { return std::numeric_limits<double>::quiet_NaN(); }
};
