// Vectors one register wide, with the few functions the kernels need. Everything is written on GCC/Clang vector
// extensions; the instruction set is whatever this translation unit is compiled for (see CMakeLists.txt).
#pragma once

#include <cmath>
#include <cstddef>
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
  const V<T> larger = select<T>(a > b, a, b);  // b if either is NaN
  return select<T>(a != a, a, larger);
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
// integer, at the low end of the mantissa. The polynomials interpolate at the Chebyshev nodes: 2^r for |r| <= 1/2, and
// log2((1 + s) / (1 - s)) / s as a function of s^2 <= 0.04; their errors are below a tenth of the rounding.
template <class T>
struct Format;
template <>
struct Format<double> {
  using Bits = std::uint64_t;
  static constexpr int kMantissa = 52;
  static constexpr Bits kBias = 1023;
  static constexpr double kRound = 6755399441055744.0 + 1023;  // 1.5 * 2^52 + kBias
  static constexpr double kLn2Hi = 6.93147180369123816490e-01, kLn2Lo = 1.90821492927058770002e-10;
  static constexpr double kSmallest = -1021;  // the power of 2 below which results are 0
  static constexpr double kExp[] = {1.0,
                                    0.69314718055994530925,
                                    0.24022650695910159567,
                                    0.055504108664821627039,
                                    0.0096181291075872566681,
                                    0.0013333558146406470697,
                                    0.00015403530463724354209,
                                    0.000015252733841556772589,
                                    1.3215432535912376166e-6,
                                    1.0178057087733941105e-7,
                                    7.0741942972885210056e-9,
                                    4.455817908336064493e-10};
  static constexpr double kLog[] = {2.8853900817779267747,  0.96179669392610344009, 0.57707801628873501882,
                                    0.41219859641080538801, 0.32059760106403796278, 0.26237665726344221516,
                                    0.21996230763577031752, 0.2220682292004327294};
};
template <>
struct Format<float> {
  using Bits = std::uint32_t;
  static constexpr int kMantissa = 23;
  static constexpr Bits kBias = 127;
  static constexpr float kRound = 12582912.0f + 127;  // 1.5 * 2^23 + kBias
  static constexpr float kLn2Hi = 6.93359375e-01f, kLn2Lo = -2.12194440e-04f;
  static constexpr float kSmallest = -125;
  static constexpr float kExp[] = {1.0f,           0.693147206703f,   0.240226509223f,   0.0555032722667f,
                                   0.00961805668f, 0.00134004281776f, 0.000154614446986f};
  static constexpr float kLog[] = {2.88539007486f, 0.961802212023f, 0.576393791555f, 0.439118898075f};
};

template <class T>
constexpr T kLog2E = T(1.44269504088896340736);
template <class T>
constexpr T kLn2 = T(0.69314718055994530942);

// A polynomial; the sums of its even and of its odd terms do not wait for each other.
template <class T, std::size_t N>
RF_INLINE V<T> polynomial(const T (&coefficients)[N], V<T> x) {
  constexpr int n = static_cast<int>(N);
  const V<T> square = x * x;
  V<T> first = splat<T>(coefficients[n - 1]), second = splat<T>(coefficients[n - 2]);
#pragma GCC unroll 16
  for (int k = n - 3; k >= 0; k -= 2) {
    first = first * square + coefficients[k];
    if (k > 0) second = second * square + coefficients[k - 1];
  }
  return n % 2 == 1 ? first + second * x : second + first * x;
}

// x = n + r with an integer n and |r| <= 1/2, and a 2^n. Vectors with AVX-512 have instructions for that.
template <class T>
struct Rounded {
  V<T> n, r;
#if defined(__AVX512F__)
  RF_INLINE explicit Rounded(V<T> x) {
    if constexpr (sizeof(T) == 8)
      n = _mm512_maskz_roundscale_pd(-1, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    else
      n = _mm512_maskz_roundscale_ps(-1, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    r = x - n;
  }
  RF_INLINE V<T> times_power(V<T> a) const {
    if constexpr (sizeof(T) == 8)
      return _mm512_maskz_scalef_pd(-1, a, n);
    else
      return _mm512_maskz_scalef_ps(-1, a, n);
  }
#else
  RF_INLINE explicit Rounded(V<T> x) : shifted_(x + Format<T>::kRound) {
    n = shifted_ - Format<T>::kRound;
    r = x - n;
  }
  RF_INLINE V<T> times_power(V<T> a) const {
    const U<T> power = as_bits<T>(shifted_) << Format<T>::kMantissa;  // the bits of 2^n
    return a * from_bits<T>(power);
  }

 private:
  V<T> shifted_;
#endif
};

// 2^x. Results below the normal range are 0; NaN stays NaN. Not for x whose power overflows.
template <class T>
RF_INLINE V<T> vexp2(V<T> x) {
  const V<T> floor = splat<T>(Format<T>::kSmallest);
  const Rounded<T> rounded(select<T>(x < floor, floor, x));
  return select<T>(x < floor, V<T>{}, rounded.times_power(polynomial<T>(Format<T>::kExp, rounded.r)));
}

// exp(x), likewise: the remainder of x by ln 2 is taken before x is rounded.
template <class T>
RF_INLINE V<T> vexp(V<T> x) {
  using F = Format<T>;
  const V<T> floor = splat<T>(F::kSmallest * kLn2<T>);
  const V<T> y = select<T>(x < floor, floor, x);
  const Rounded<T> rounded(y * kLog2E<T>);
  const V<T> r = (y - rounded.n * F::kLn2Hi) - rounded.n * F::kLn2Lo;
  return select<T>(x < floor, V<T>{}, rounded.times_power(polynomial<T>(F::kExp, r * kLog2E<T>)));
}

// x = m 2^e with m in [0.75, 1.5), for x > 0: e, and log2(m) = 2 atanh((m - 1) / (m + 1)) / ln 2.
template <class T>
struct Binary {
  V<T> exponent, log2_mantissa;
  RF_INLINE explicit Binary(V<T> x) {
    V<T> m;
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 8) {
      m = _mm512_maskz_getmant_pd(-1, x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
      exponent = _mm512_maskz_getexp_pd(-1, x);
    } else {
      m = _mm512_maskz_getmant_ps(-1, x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
      exponent = _mm512_maskz_getexp_ps(-1, x);
    }
    exponent = select<T>(m < T(1), exponent + T(1), exponent);
#else
    using F = Format<T>;
    using Bits = typename F::Bits;
    const U<T> bits = as_bits<T>(x);
    constexpr Bits kOneBits = F::kBias << F::kMantissa;
    constexpr Bits kMask = (Bits(1) << F::kMantissa) - 1;
    U<T> biased = bits >> F::kMantissa;
    const U<T> mantissa_bits = (bits & kMask) | kOneBits;
    m = from_bits<T>(mantissa_bits);
    const I<T> large = m >= T(1.5);
    m = select<T>(large, m * T(0.5), m);
    biased -= reinterpret_cast<U<T> >(large);  // a true lane is -1
    // The exponent as a number, by putting it into the low bits of kRound.
    const V<T> round = splat<T>(F::kRound);
    const U<T> packed = as_bits<T>(round) + biased - F::kBias;
    exponent = from_bits<T>(packed) - F::kRound;
#endif
    const V<T> s = (m - T(1)) / (m + T(1));
    log2_mantissa = s * polynomial<T>(Format<T>::kLog, s * s);
  }
};

// For x = 0 logarithms are -inf; NaN stays NaN.
template <class T>
RF_INLINE V<T> vlog2(V<T> x) {
  const Binary<T> parts(x);
  return select<T>(x > T(0), parts.exponent + parts.log2_mantissa, x + kNegInf<T>);
}

template <class T>
RF_INLINE V<T> vlog(V<T> x) {
  using F = Format<T>;
  const Binary<T> parts(x);
  const V<T> result = parts.exponent * F::kLn2Hi + (parts.log2_mantissa * kLn2<T> + parts.exponent * F::kLn2Lo);
  return select<T>(x > T(0), result, x + kNegInf<T>);
}

// x^c for x >= 0 and c > 0.
template <class T>
RF_INLINE V<T> vpow(V<T> x, V<T> c) {
  return vexp2<T>(c * vlog2<T>(x));
}

}  // namespace riskfield::RISKFIELD_ISA
