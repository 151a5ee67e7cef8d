// Vectors of dual numbers: the functions of simd.hpp once more, by the rules of differentiation.
#pragma once

#include "dual.hpp"
#include "exponentials.hpp"

namespace riskfield::RISKFIELD_ISA {

struct DualVector {
  V<double> value, slope;
  Dual operator[](int lane) const { return {value[lane], slope[lane]}; }
  RF_INLINE DualVector& operator+=(DualVector b);
  RF_INLINE DualVector& operator-=(DualVector b);
  RF_INLINE DualVector& operator*=(DualVector b);
  RF_INLINE DualVector& operator/=(DualVector b);
};

template <>
struct Simd<Dual> {
  typedef DualVector V;
  typedef Simd<double>::I I;
};
template <>
constexpr int kLanes<Dual> = kLanes<double>;

RF_INLINE DualVector operator-(DualVector a) { return {-a.value, -a.slope}; }
RF_INLINE DualVector operator+(DualVector a, DualVector b) { return {a.value + b.value, a.slope + b.slope}; }
RF_INLINE DualVector operator-(DualVector a, DualVector b) { return {a.value - b.value, a.slope - b.slope}; }
RF_INLINE DualVector operator*(DualVector a, DualVector b) {
  return {a.value * b.value, a.slope * b.value + a.value * b.slope};
}
RF_INLINE DualVector operator/(DualVector a, DualVector b) {
  const V<double> inverse = 1.0 / b.value, quotient = a.value * inverse;
  return {a.value / b.value, (a.slope - quotient * b.slope) * inverse};
}
template <>
RF_INLINE DualVector splat<Dual>(Dual x) {
  return {splat<double>(x.value), splat<double>(x.slope)};
}
RF_INLINE DualVector operator+(DualVector a, Dual b) { return a + splat<Dual>(b); }
RF_INLINE DualVector operator-(DualVector a, Dual b) { return a - splat<Dual>(b); }
RF_INLINE DualVector operator*(DualVector a, Dual b) { return a * splat<Dual>(b); }
RF_INLINE DualVector operator/(DualVector a, Dual b) { return a / splat<Dual>(b); }
RF_INLINE DualVector operator*(Dual a, DualVector b) { return splat<Dual>(a) * b; }
RF_INLINE DualVector operator/(Dual a, DualVector b) { return splat<Dual>(a) / b; }
RF_INLINE DualVector& DualVector::operator+=(DualVector b) { return *this = *this + b; }
RF_INLINE DualVector& DualVector::operator-=(DualVector b) { return *this = *this - b; }
RF_INLINE DualVector& DualVector::operator*=(DualVector b) { return *this = *this * b; }
RF_INLINE DualVector& DualVector::operator/=(DualVector b) { return *this = *this / b; }
RF_INLINE I<double> operator<(DualVector a, DualVector b) { return a.value < b.value; }
RF_INLINE I<double> operator>(DualVector a, DualVector b) { return a.value > b.value; }
RF_INLINE I<double> operator<(DualVector a, Dual b) { return a.value < b.value; }
RF_INLINE I<double> operator>(DualVector a, Dual b) { return a.value > b.value; }

RF_INLINE I<double> operator==(DualVector a, Dual b) { return a.value == b.value; }
RF_INLINE I<double> operator!=(DualVector a, DualVector b) { return a.value != b.value; }

template <>
constexpr Dual kNegInf<Dual> = Dual(-std::numeric_limits<double>::infinity());

// Values and slopes alternate in memory.
template <>
RF_INLINE DualVector load<Dual>(const Dual* p) {
  DualVector v;
  for (int l = 0; l < kLanes<double>; ++l) {
    v.value[l] = p[l].value;
    v.slope[l] = p[l].slope;
  }
  return v;
}
template <>
RF_INLINE void store_some<Dual>(Dual* p, DualVector v, int count) {
  for (int l = 0; l < count; ++l) p[l] = v[l];
}
template <>
RF_INLINE void store<Dual>(Dual* p, DualVector v) {
  store_some<Dual>(p, v, kLanes<double>);
}
template <>
RF_INLINE void set_lane<Dual>(DualVector& v, int lane, Dual x) {
  v.value[lane] = x.value;
  v.slope[lane] = x.slope;
}
template <>
RF_INLINE DualVector select<Dual>(I<double> mask, DualVector yes, DualVector no) {
  return {select<double>(mask, yes.value, no.value), select<double>(mask, yes.slope, no.slope)};
}
template <>
RF_INLINE DualVector first_lanes<Dual>(DualVector a, DualVector b, int count) {
  return {first_lanes<double>(a.value, b.value, count), first_lanes<double>(a.slope, b.slope, count)};
}
template <>
RF_INLINE DualVector vsqrt<Dual>(DualVector a) {
  const V<double> root = vsqrt<double>(a.value);
  return {root, 0.5 * a.slope / root};
}
template <>
RF_INLINE DualVector vexp<Dual>(DualVector a) {
  const V<double> value = vexp<double>(a.value);
  return {value, select<double>(value == 0.0, V<double>{}, a.slope * value)};
}
template <>
RF_INLINE DualVector vlog<Dual>(DualVector a) {
  return {vlog<double>(a.value), select<double>(a.value == 0.0, V<double>{}, a.slope / a.value)};
}
template <>
RF_INLINE DualVector vexp2<Dual>(DualVector a) {
  const V<double> value = vexp2<double>(a.value);
  return {value, select<double>(value == 0.0, V<double>{}, kLn2<double> * a.slope * value)};
}
template <>
RF_INLINE DualVector vexp2_of_many<Dual>(DualVector a) {
  return vexp2<Dual>(a);
}
template <>
RF_INLINE DualVector vlog2<Dual>(DualVector a) {
  const V<double> slope = kLog2E<double> * a.slope / a.value;
  return {vlog2<double>(a.value), select<double>(a.value == 0.0, V<double>{}, slope)};
}
template <>
RF_INLINE DualVector scaled_log2_ratio<Dual>(DualVector a, DualVector b, DualVector scale, DualVector offset) {
  const V<double> slope = kLog2E<double> * (a.slope / a.value - b.slope / b.value);
  return offset + scale * DualVector{vlog2<double>(a.value / b.value), slope};
}

}  // namespace riskfield::RISKFIELD_ISA
