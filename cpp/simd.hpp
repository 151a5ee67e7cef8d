// Vectors one register wide, with the few functions the kernels need. Everything is written on GCC/Clang vector
// extensions; the instruction set is whatever this translation unit is compiled for (see CMakeLists.txt).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace riskfield::RISKFIELD_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T>
struct Simd;

template <>
struct Simd<double> {
  typedef double V __attribute__((vector_size(kVectorBytes)));
  typedef double Unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(double))));
  typedef std::int64_t I __attribute__((vector_size(kVectorBytes)));
  typedef std::uint64_t U __attribute__((vector_size(kVectorBytes)));
};
template <>
struct Simd<float> {
  typedef float V __attribute__((vector_size(kVectorBytes)));
  typedef float Unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(float))));
  typedef std::int32_t I __attribute__((vector_size(kVectorBytes)));
  typedef std::uint32_t U __attribute__((vector_size(kVectorBytes)));
};

// Numbers in a vector.
template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));
template <class T>
using V = typename Simd<T>::V;
template <class T>
using I = typename Simd<T>::I;  // results of comparisons
template <class T>
using U = typename Simd<T>::U;  // bit patterns; unsigned, so that arithmetic on them may wrap around

#define RF_INLINE inline __attribute__((always_inline))
#define RF_NOINLINE __attribute__((noinline))
// After the parameters of a lambda.
#define RF_LAMBDA __attribute__((always_inline))
// A loop over states: unrolled, the arrays of vectors it indexes stay in registers.
#define RF_FOR(x, first, end) _Pragma("GCC unroll 8") for (int x = first; x < (end); ++x)

// Through a vector type, which aliases numbers of its own kind only: after a memcpy the compiler would read the
// addresses of everything else again.
template <class T>
RF_INLINE V<T> load(const T* p) {
  return *reinterpret_cast<const typename Simd<T>::Unaligned*>(p);
}

template <class T>
RF_INLINE void store(T* p, V<T> v) {
  *reinterpret_cast<typename Simd<T>::Unaligned*>(p) = v;
}

// Store the first `count` lanes.
template <class T>
RF_INLINE void store_some(T* p, V<T> v, int count) {
  if (count == kLanes<T>) {
    store<T>(p, v);
    return;
  }
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 8)
    _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1u << count) - 1), v);
  else
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), v);
#else
  for (int l = 0; l < count; ++l) p[l] = v[l];
#endif
}

template <class T>
RF_INLINE void set_lane(V<T>& v, int lane, T x) {
  v[lane] = x;
}

template <class T>
RF_INLINE V<T> splat(T x) {
  return x - V<T>{};
}

template <class T>
RF_INLINE U<T> as_bits(V<T> v) {
  U<T> bits;
  std::memcpy(&bits, &v, sizeof(v));
  return bits;
}

template <class T>
RF_INLINE V<T> from_bits(U<T> bits) {
  V<T> v;
  std::memcpy(&v, &bits, sizeof(v));
  return v;
}

// yes where the mask is set, no elsewhere.
template <class T>
RF_INLINE V<T> select(I<T> mask, V<T> yes, V<T> no) {
#if defined(__AVX2__)
  return mask ? yes : no;
#else
  // GCC 12 fails to compile some conditional vectors for plain SSE2, so there the lanes are chosen one by one.
  V<T> result{};
  for (int l = 0; l < kLanes<T>; ++l) result[l] = mask[l] ? yes[l] : no[l];
  return result;
#endif
}

// a in the first `count` lanes, b in the others.
template <class T>
RF_INLINE V<T> first_lanes(V<T> a, V<T> b, int count) {
  if (count == kLanes<T>) return a;
  V<T> lane{};  // floating-point, because plain SSE2 cannot compare 64-bit integers
  for (int l = 0; l < kLanes<T>; ++l) lane[l] = T(l);
  return select<T>(lane < T(count), a, b);
}

// The larger one; NaN if either is.
template <class T>
RF_INLINE V<T> vmax(V<T> a, V<T> b) {
  return select<T>((a > b) | (a != a), a, b);
}

template <class T>
RF_INLINE V<T> vabs(V<T> a) {
  return select<T>(a < T(0), -a, a);
}

template <class T>
RF_INLINE V<T> vsqrt(V<T> a) {
  V<T> r{};
  for (int l = 0; l < kLanes<T>; ++l) r[l] = std::sqrt(a[l]);
  return r;
}

template <class T>
constexpr T kNegInf = -std::numeric_limits<T>::infinity();

// Constants of the two formats: adding kRound to a small number n leaves the bits of n + kBias, n rounded to an
// integer, at the low end of the mantissa.
template <class T>
struct Format;
template <>
struct Format<double> {
  using Bits = std::uint64_t;
  static constexpr int kMantissa = 52;
  static constexpr Bits kBias = 1023;
  static constexpr double kRound = 6755399441055744.0 + 1023;  // 1.5 * 2^52 + kBias
  static constexpr double kLn2Hi = 6.93147180369123816490e-01, kLn2Lo = 1.90821492927058770002e-10;
  static constexpr double kSmallest = -708.0;
  static constexpr int kExpTerms = 13, kLogTerms = 11;
};
template <>
struct Format<float> {
  using Bits = std::uint32_t;
  static constexpr int kMantissa = 23;
  static constexpr Bits kBias = 127;
  static constexpr float kRound = 12582912.0f + 127;  // 1.5 * 2^23 + kBias
  static constexpr float kLn2Hi = 6.93359375e-01f, kLn2Lo = -2.12194440e-04f;
  static constexpr float kSmallest = -87.0f;
  static constexpr int kExpTerms = 7, kLogTerms = 5;
};

// exp(x) = 2^n exp(r) with |r| <= ln(2)/2 and the Taylor series of exp(r). Results below the normal range are 0; NaN
// stays NaN. Not for x whose exponential overflows.
template <class T>
RF_INLINE V<T> vexp(V<T> x) {
  using F = Format<T>;
  const V<T> floor = splat<T>(F::kSmallest);
  const V<T> y = select<T>(x < floor, floor, x);
  const V<T> shifted = y * T(1.4426950408889634074) + F::kRound;
  const V<T> n = shifted - F::kRound;
  const V<T> r = (y - n * F::kLn2Hi) - n * F::kLn2Lo;
  constexpr T inverse_factorial[] = {T(1.0),
                                     T(1.0),
                                     T(1.0 / 2),
                                     T(1.0 / 6),
                                     T(1.0 / 24),
                                     T(1.0 / 120),
                                     T(1.0 / 720),
                                     T(1.0 / 5040),
                                     T(1.0 / 40320),
                                     T(1.0 / 362880),
                                     T(1.0 / 3628800),
                                     T(1.0 / 39916800),
                                     T(1.0 / 479001600),
                                     T(1.0 / 6227020800)};
  V<T> p = splat<T>(inverse_factorial[F::kExpTerms]);
#pragma GCC unroll 16
  for (int k = F::kExpTerms - 1; k >= 0; --k) p = p * r + inverse_factorial[k];
  const U<T> power = as_bits<T>(shifted) << F::kMantissa;  // the bits of 2^n
  return select<T>(x < floor, V<T>{}, p * from_bits<T>(power));
}

// log(x) = e ln 2 + 2 atanh((m - 1) / (m + 1)) with x = m 2^e, m in [sqrt(1/2), sqrt(2)). For x = 0 it is -inf; NaN
// stays NaN.
template <class T>
RF_INLINE V<T> vlog(V<T> x) {
  using F = Format<T>;
  using Bits = typename F::Bits;
  const U<T> bits = as_bits<T>(x);
  constexpr Bits kOneBits = F::kBias << F::kMantissa;
  constexpr Bits kMask = (Bits(1) << F::kMantissa) - 1;
  U<T> exponent = bits >> F::kMantissa;  // biased
  const U<T> mantissa_bits = (bits & kMask) | kOneBits;
  V<T> m = from_bits<T>(mantissa_bits);
  const I<T> large = m > T(1.41421356237309504880);
  m = select<T>(large, m * T(0.5), m);
  exponent -= reinterpret_cast<U<T>>(large);  // a true lane is -1
  // The exponent as a number, by putting it into the low bits of kRound.
  const V<T> round = splat<T>(F::kRound);
  const U<T> packed = as_bits<T>(round) + exponent - F::kBias;
  const V<T> e = from_bits<T>(packed) - F::kRound;
  const V<T> s = (m - T(1)) / (m + T(1));
  const V<T> s2 = s * s;
  V<T> p = splat<T>(T(1) / T(2 * F::kLogTerms + 1));
#pragma GCC unroll 16
  for (int k = F::kLogTerms - 1; k >= 0; --k) p = p * s2 + T(1) / T(2 * k + 1);
  const V<T> result = e * F::kLn2Hi + (T(2) * s * p + e * F::kLn2Lo);
  return select<T>(x > T(0), result, x + kNegInf<T>);
}

}  // namespace riskfield::RISKFIELD_ISA
