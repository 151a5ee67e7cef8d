// Exponentials, logarithms and powers of vectors.
//
// Both reduce their argument to a short interval, on which a polynomial is accurate; its error is below a tenth of the
// rounding. With AVX-512, tables of one or two registers make that interval so short that the polynomial is half as
// long.
#pragma once

#include "simd.hpp"

namespace riskfield::RISKFIELD_ISA {

// Constants of the two formats. Adding kRound to a small number n leaves the bits of n + kBias, n rounded to an
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
};
template <>
struct Format<float> {
  using Bits = std::uint32_t;
  static constexpr int kMantissa = 23;
  static constexpr Bits kBias = 127;
  static constexpr float kRound = 12582912.0f + 127;  // 1.5 * 2^23 + kBias
  static constexpr float kLn2Hi = 6.93359375e-01f, kLn2Lo = -2.12194440e-04f;
};

// Polynomials that interpolate at the Chebyshev nodes, and the number that rounds arguments when it is added.
template <class T>
struct Reduced;
#if defined(__AVX512F__)
// Arguments of powers are rounded to multiples of 1 / N, where N is the number of entries of a table, and mantissas to
// 4 bits. kExp is 2^r for |r| <= 1 / 2N, kLog is log2((1 + s) / (1 - s)) / s as a function of s^2 <= 1 / 63^2.
template <>
struct Reduced<double> {
  static constexpr double kRound = 422212465065984.0;  // 1.5 * 2^52 / 16
  static constexpr double kSmallest = -1022;           // powers of 2 below this one are 0
  static constexpr double kExp[] = {1.0,
                                    0.69314718055994686313,
                                    0.24022650695910084695,
                                    0.055504108652093572248,
                                    0.0096181291065256816657,
                                    0.0013333818815389239315,
                                    0.00015403756245457708718};
  static constexpr double kLog[] = {2.8853900817779268046, 0.96179669392725803886, 0.57707799090656884056,
                                    0.41236018038680685425};
};
template <>
struct Reduced<float> {
  static constexpr float kRound = 393216.0f;  // 1.5 * 2^23 / 32
  static constexpr float kSmallest = -126;
  static constexpr float kExp[] = {1.0f, 0.69314718055f, 0.240228855143f, 0.0555044341919f};
  static constexpr float kLog[] = {2.8853900772f, 0.96194211315f};
};

// 2^(k / N) for all k < N, two registers full; and log2(1 + k / 16).
template <class T>
struct Tables;
template <>
struct Tables<double> {
  alignas(64) static constexpr double kPower[] = {1.0,
                                                  1.04427378242741384,
                                                  1.09050773266525766,
                                                  1.13878863475669165,
                                                  1.18920711500272107,
                                                  1.24185781207348405,
                                                  1.29683955465100967,
                                                  1.35425554693689273,
                                                  1.41421356237309505,
                                                  1.47682614593949931,
                                                  1.54221082540794082,
                                                  1.61049033194925431,
                                                  1.68179283050742909,
                                                  1.75625216037329948,
                                                  1.83400808640934246,
                                                  1.91520656139714729};
  alignas(64) static constexpr double kLog2[] = {0.0,
                                                 0.087462841250339408,
                                                 0.16992500144231236,
                                                 0.24792751344358549,
                                                 0.32192809488736235,
                                                 0.39231742277876029,
                                                 0.45943161863729726,
                                                 0.52356195605701287,
                                                 0.58496250072115618,
                                                 0.6438561897747247,
                                                 0.70043971814109216,
                                                 0.75488750216346854,
                                                 0.80735492205760411,
                                                 0.85798099512757212,
                                                 0.90689059560851853,
                                                 0.95419631038687521};
};
template <>
struct Tables<float> {
  alignas(64) static constexpr float kPower[] = {
      1.0f,        1.02189715f, 1.04427378f, 1.0671404f,  1.09050773f, 1.11438674f, 1.13878863f, 1.16372486f,
      1.18920712f, 1.21524736f, 1.24185781f, 1.26905096f, 1.29683955f, 1.32523664f, 1.35425555f, 1.38390988f,
      1.41421356f, 1.44518081f, 1.47682615f, 1.50916443f, 1.54221083f, 1.57598085f, 1.61049033f, 1.64575548f,
      1.68179283f, 1.7186193f,  1.75625216f, 1.79470908f, 1.83400809f, 1.87416763f, 1.91520656f, 1.95714412f};
  alignas(64) static constexpr float kLog2[] = {
      0.0f,         0.0874628413f, 0.169925001f, 0.247927513f, 0.321928095f, 0.392317423f, 0.459431619f, 0.523561956f,
      0.584962501f, 0.64385619f,   0.700439718f, 0.754887502f, 0.807354922f, 0.857980995f, 0.906890596f, 0.95419631f};
};

// The entries at the low bits of the indices, of a table of one or two registers.
template <class T, std::size_t N>
RF_INLINE V<T> look_up(const T (&table)[N], U<T> index) {
  const auto at = reinterpret_cast<__m512i>(index);
  if constexpr (sizeof(T) == 8)
    return _mm512_permutex2var_pd(load<T>(table), at, load<T>(table + kLanes<T>));
  else if constexpr (N == kLanes<T>)
    return _mm512_maskz_permutexvar_ps(-1, at, load<T>(table));
  else
    return _mm512_permutex2var_ps(load<T>(table), at, load<T>(table + kLanes<T>));
}
#else
// Arguments are rounded to integers. kExp is 2^r for |r| <= 1/2, kLog is log2((1 + s) / (1 - s)) / s as a function of
// s^2 <= 0.04.
template <>
struct Reduced<double> {
  static constexpr double kRound = Format<double>::kRound;
  static constexpr double kSmallest = -1021;  // as above
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
struct Reduced<float> {
  static constexpr float kRound = Format<float>::kRound;
  static constexpr float kSmallest = -125;
  static constexpr float kExp[] = {1.0f,           0.693147206703f,   0.240226509223f,   0.0555032722667f,
                                   0.00961805668f, 0.00134004281776f, 0.000154614446986f};
  static constexpr float kLog[] = {2.88539007486f, 0.961802212023f, 0.576393791555f, 0.439118898075f};
};
#endif

template <class T>
constexpr T kLog2E = T(1.44269504088896340736);
template <class T>
constexpr T kLn2 = T(0.69314718055994530942);

// A polynomial, in pairs of terms that do not wait for each other, then pairs of pairs, and so on.
template <class T, std::size_t N>
RF_INLINE V<T> polynomial(const T (&coefficients)[N], V<T> x) {
  constexpr int n = static_cast<int>(N);
  V<T> terms[n];
  RF_FOR (k, 0, n / 2) terms[k] = splat<T>(coefficients[2 * k]) + splat<T>(coefficients[2 * k + 1]) * x;
  if (n % 2 == 1) terms[n / 2] = splat<T>(coefficients[n - 1]);
#pragma GCC unroll 4
  for (int left = (n + 1) / 2; left > 1; left = (left + 1) / 2) {
    x *= x;
    RF_FOR (k, 0, left / 2) terms[k] = terms[2 * k] + terms[2 * k + 1] * x;
    if (left % 2 == 1) terms[left / 2] = terms[left - 1];
  }
  return terms[0];
}

// The same in the fewest operations, each of which waits for the one before.
template <class T, std::size_t N>
RF_INLINE V<T> horner(const T (&coefficients)[N], V<T> x) {
  V<T> sum = splat<T>(coefficients[N - 1]);
#pragma GCC unroll 16
  for (int k = static_cast<int>(N) - 2; k >= 0; --k) sum = sum * x + coefficients[k];
  return sum;
}

// x = n + r with a small r, and 2^n. With AVX-512, n is a multiple of 1 / N, else an integer.
template <class T>
struct Rounded {
  V<T> n, r;

  RF_INLINE explicit Rounded(V<T> x) : shifted_(x + Reduced<T>::kRound) {
    n = shifted_ - Reduced<T>::kRound;
    r = x - n;
  }
  RF_INLINE V<T> power() const {
#if defined(__AVX512F__)
    const V<T> mantissa = look_up<T>(Tables<T>::kPower, as_bits<T>(shifted_));
    if constexpr (sizeof(T) == 8)
      return _mm512_maskz_scalef_pd(-1, mantissa, n);  // times 2^floor(n)
    else
      return _mm512_maskz_scalef_ps(-1, mantissa, n);
#else
    return from_bits<T>(as_bits<T>(shifted_) << Format<T>::kMantissa);
#endif
  }

 private:
  V<T> shifted_;
};

// a b, but 0 where x < kSmallest, whatever a and b are.
template <class T>
RF_INLINE V<T> product_or_zero(V<T> x, V<T> a, V<T> b) {
  const V<T> smallest = splat<T>(Reduced<T>::kSmallest);
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 8)
    return _mm512_maskz_mul_pd(_mm512_cmp_pd_mask(x, smallest, _CMP_NLT_UQ), a, b);
  else
    return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(x, smallest, _CMP_NLT_UQ), a, b);
#else
  return select<T>(x < smallest, V<T>{}, a * b);
#endif
}

// 2^x. Results below the normal range are 0: many processors take hundreds of cycles for subnormal ones. NaN stays NaN.
// Not for x whose power overflows.
template <class T>
RF_INLINE V<T> vexp2(V<T> x) {
  const Rounded<T> rounded(x);
  return product_or_zero<T>(x, rounded.power(), polynomial<T>(Reduced<T>::kExp, rounded.r));
}

// The same where many powers are computed side by side.
template <class T>
RF_INLINE V<T> vexp2_of_many(V<T> x) {
  const Rounded<T> rounded(x);
  return product_or_zero<T>(x, rounded.power(), horner<T>(Reduced<T>::kExp, rounded.r));
}

// exp(x), likewise: the remainder of x by ln 2 is taken before x is rounded.
template <class T>
RF_INLINE V<T> vexp(V<T> x) {
  using F = Format<T>;
  const V<T> y = x * kLog2E<T>;
  const Rounded<T> rounded(y);
  const V<T> r = (x - rounded.n * F::kLn2Hi) - rounded.n * F::kLn2Lo;
  return product_or_zero<T>(y, rounded.power(), polynomial<T>(Reduced<T>::kExp, r * kLog2E<T>));
}

#if defined(__AVX512F__)
// x > 0 with a mantissa of 4 bits, the nearest.
template <class T>
RF_INLINE V<T> short_mantissa(V<T> x) {
  using Bits = typename Format<T>::Bits;
  constexpr Bits kLast = Bits(1) << (Format<T>::kMantissa - 4);
  return from_bits<T>((as_bits<T>(x) + kLast / 2) & ~(kLast - 1));
}

template <class T>
RF_INLINE V<T> exponent_of(V<T> x) {
  if constexpr (sizeof(T) == 8)
    return _mm512_maskz_getexp_pd(-1, x);
  else
    return _mm512_maskz_getexp_ps(-1, x);
}

// log2(a / b) from `near`, a short mantissa times a power of 2 close to a / b: the logarithm of the mantissa, and that
// of a / (b near) as the product of two factors.
template <class T>
struct Near {
  V<T> log2_mantissa, s, slope;
  RF_INLINE Near(V<T> near, V<T> a, V<T> b) {
    s = (a - b * near) / (a + b * near);  // log2(a / (b near)) = 2 atanh(s) / ln 2
    log2_mantissa = look_up<T>(Tables<T>::kLog2, as_bits<T>(near) >> (Format<T>::kMantissa - 4));
    slope = polynomial<T>(Reduced<T>::kLog, s * s);
  }
};
#endif

// x = m 2^e with m close to 1 or between 1 and 2, for x > 0: e, and log2(m).
template <class T>
struct Binary {
  V<T> exponent, log2_mantissa;
  RF_INLINE explicit Binary(V<T> x) {
    V<T> m;
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 8)
      m = _mm512_maskz_getmant_pd(-1, x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
    else
      m = _mm512_maskz_getmant_ps(-1, x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
    const V<T> near = short_mantissa<T>(m);  // may be 2
    exponent = exponent_of<T>(x) + exponent_of<T>(near);
    const Near<T> parts(near, m, splat<T>(1));
    log2_mantissa = parts.log2_mantissa + parts.s * parts.slope;
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
    const V<T> s = (m - T(1)) / (m + T(1));  // log2(m) = 2 atanh(s) / ln 2
    log2_mantissa = s * polynomial<T>(Reduced<T>::kLog, s * s);
#endif
  }
};

// The logarithm of 0 is -inf; NaN stays NaN.
template <class T>
RF_INLINE V<T> vlog2(V<T> x) {
  const Binary<T> parts(x);
  const V<T> result = parts.exponent + parts.log2_mantissa;
#if defined(__AVX512F__)
  return result;  // the exponent of 0 is -inf
#else
  return select<T>(x > T(0), result, x + kNegInf<T>);
#endif
}

// offset + scale log2(a / b) for positive normal a, b and a / b. Little is left to do after the division.
template <class T>
RF_INLINE V<T> scaled_log2_ratio(V<T> a, V<T> b, V<T> scale, V<T> offset) {
#if defined(__AVX512F__)
  V<T> inverse;
  if constexpr (sizeof(T) == 8)
    inverse = _mm512_maskz_rcp14_pd(-1, b);
  else
    inverse = _mm512_maskz_rcp14_ps(-1, b);
  const V<T> near = short_mantissa<T>(a * inverse);
  const Near<T> parts(near, a, b);
  const V<T> of_near = offset + scale * (exponent_of<T>(near) + parts.log2_mantissa);
  return of_near + (scale * parts.s) * parts.slope;
#else
  return offset + scale * vlog2<T>(a / b);
#endif
}

template <class T>
RF_INLINE V<T> vlog(V<T> x) {
  using F = Format<T>;
  const Binary<T> parts(x);
  const V<T> result = parts.exponent * F::kLn2Hi + (parts.log2_mantissa * kLn2<T> + parts.exponent * F::kLn2Lo);
  return select<T>(x > T(0), result, x + kNegInf<T>);
}

}  // namespace riskfield::RISKFIELD_ISA
