// Exponentials, logarithms and powers of vectors.
//
// Both reduce their argument to a short interval, on which a polynomial is accurate; its error is below a tenth of the
// rounding. With AVX-512, tables of two registers make that interval so short that the polynomial is half as long, and
// the logarithm needs no division.
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
// Arguments are rounded to multiples of 1 / N, where N is the number of entries of a table. kExp is 2^r for
// |r| <= 1 / 2N, kLog is log2(1 + r) / r for -1 / 2N <= r <= 1 / N.
template <>
struct Reduced<double> {
  static constexpr double kRound = 422212465065984.0;  // 1.5 * 2^52 / 16
  static constexpr double kSmallest = -1100;           // powers of 2 below this one are taken for it, which is 0
  static constexpr double kExp[] = {1.0,
                                    0.69314718055994686313,
                                    0.24022650695910084695,
                                    0.055504108652093572248,
                                    0.0096181291065256816657,
                                    0.0013333818815389239315,
                                    0.00015403756245457708718};
  static constexpr double kLog[] = {1.4426950408889633963,   -0.72134752044448235055, 0.48089834696327410816,
                                    -0.36067376021923846757, 0.28853900697211695457,  -0.24044916650970578239,
                                    0.20610093926961401506,  -0.18036454819547687695, 0.15969697793533685713,
                                    -0.1258599543459523544};
};
template <>
struct Reduced<float> {
  static constexpr float kRound = 393216.0f;  // 1.5 * 2^23 / 32
  static constexpr float kSmallest = -160;
  static constexpr float kExp[] = {1.0f, 0.69314718055f, 0.240228855143f, 0.0555044341919f};
  static constexpr float kLog[] = {1.44269504079f, -0.721347523337f, 0.4809009845f, -0.360693771474f, 0.279467169794f};
};

// Tables of N numbers, two registers full: 2^(k / N); and, for the mantissas m in [0.75, 1.5) whose first bits are k, a
// number close to 1 / m and minus its logarithm. Near m = 1 that number is 1, so that logarithms are accurate there.
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
  alignas(64) static constexpr double kInverse[] = {1.0,
                                                    0.914285714285714257,
                                                    0.864864864864864913,
                                                    0.820512820512820484,
                                                    0.780487804878048808,
                                                    0.744186046511627897,
                                                    0.711111111111111138,
                                                    0.680851063829787218,
                                                    1.30612244897959173,
                                                    1.25490196078431371,
                                                    1.20754716981132071,
                                                    1.16363636363636358,
                                                    1.12280701754385959,
                                                    1.0847457627118644,
                                                    1.04918032786885251,
                                                    1.0};
  alignas(64) static constexpr double kLog2[] = {0.0,
                                                 0.1292830169449665,
                                                 0.209453365628949702,
                                                 0.285402218862248392,
                                                 0.357552004618083643,
                                                 0.426264754702097959,
                                                 0.491853096329674656,
                                                 0.554588851677637407,
                                                 -0.38529015588479167,
                                                 -0.32757465802850439,
                                                 -0.272079545436800766,
                                                 -0.218640286475340326,
                                                 -0.167109985835258245,
                                                 -0.117356950638158736,
                                                 -0.0692626624371137986,
                                                 0.0};
};
template <>
struct Tables<float> {
  alignas(64) static constexpr float kPower[] = {
      1.0f,        1.02189715f, 1.04427378f, 1.0671404f,  1.09050773f, 1.11438674f, 1.13878863f, 1.16372486f,
      1.18920712f, 1.21524736f, 1.24185781f, 1.26905096f, 1.29683955f, 1.32523664f, 1.35425555f, 1.38390988f,
      1.41421356f, 1.44518081f, 1.47682615f, 1.50916443f, 1.54221083f, 1.57598085f, 1.61049033f, 1.64575548f,
      1.68179283f, 1.7186193f,  1.75625216f, 1.79470908f, 1.83400809f, 1.87416763f, 1.91520656f, 1.95714412f};
  alignas(64) static constexpr float kInverse[] = {
      1.0f,         0.955223858f, 0.927536249f, 0.901408434f, 0.876712322f, 0.853333354f, 0.83116883f,  0.810126603f,
      0.790123463f, 0.771084309f, 0.752941191f, 0.735632181f, 0.719101131f, 0.703296721f, 0.688172042f, 0.673684239f,
      1.31958759f,  1.29292929f,  1.26732671f,  1.24271846f,  1.21904767f,  1.19626164f,  1.17431188f,  1.15315318f,
      1.13274336f,  1.11304343f,  1.09401715f,  1.07563031f,  1.0578512f,   1.04065037f,  1.02400005f,  1.0f};
  alignas(64) static constexpr float kLog2[] = {
      0.0f,           0.066089224f,   0.10852443f,    0.149747146f,  0.18982457f,   0.228818656f,  0.266786542f,
      0.303780712f,   0.339849992f,   0.375039485f,   0.409390908f,  0.442943501f,  0.475733416f,  0.507794604f,
      0.539158812f,   0.569855547f,   -0.400087113f,  -0.370643379f, -0.341788494f, -0.313499486f, -0.285754537f,
      -0.258532968f,  -0.231815613f,  -0.205584169f,  -0.179821032f, -0.154509883f, -0.129635352f, -0.105182311f,
      -0.0811367023f, -0.0574854409f, -0.0342157839f, 0.0f};
};

// The entries at the low bits of the indices.
template <class T>
RF_INLINE V<T> look_up(const T* table, U<T> index) {
  if constexpr (sizeof(T) == 8)
    return _mm512_permutex2var_pd(load<T>(table), reinterpret_cast<__m512i>(index), load<T>(table + kLanes<T>));
  else
    return _mm512_permutex2var_ps(load<T>(table), reinterpret_cast<__m512i>(index), load<T>(table + kLanes<T>));
}
#else
// Arguments are rounded to integers. kExp is 2^r for |r| <= 1/2, kLog is log2((1 + s) / (1 - s)) / s as a function of
// s^2 <= 0.04.
template <>
struct Reduced<double> {
  static constexpr double kRound = Format<double>::kRound;
  static constexpr double kSmallest = -1021;  // powers of 2 below this one are 0
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

// x = n + r with a small r, and a 2^n. With AVX-512, n is a multiple of 1 / N, else an integer.
template <class T>
struct Rounded {
  V<T> n, r;

  RF_INLINE explicit Rounded(V<T> x) : shifted_(x + Reduced<T>::kRound) {
    n = shifted_ - Reduced<T>::kRound;
    r = x - n;
  }
  RF_INLINE V<T> times_power(V<T> a) const {
#if defined(__AVX512F__)
    a *= look_up<T>(Tables<T>::kPower, as_bits<T>(shifted_));
    if constexpr (sizeof(T) == 8)
      return _mm512_maskz_scalef_pd(-1, a, n);  // times 2^floor(n)
    else
      return _mm512_maskz_scalef_ps(-1, a, n);
#else
    const U<T> power = as_bits<T>(shifted_) << Format<T>::kMantissa;  // the bits of 2^n
    return a * from_bits<T>(power);
#endif
  }

 private:
  V<T> shifted_;
};

// x, but at least `floor`; NaN stays NaN.
template <class T>
RF_INLINE V<T> at_least(V<T> floor, V<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 8)
    return _mm512_maskz_max_pd(-1, floor, x);
  else
    return _mm512_maskz_max_ps(-1, floor, x);
#else
  return select<T>(x < floor, floor, x);
#endif
}

// `power` where x is not below `floor`, and 0 elsewhere.
template <class T>
RF_INLINE V<T> zero_below([[maybe_unused]] V<T> floor, [[maybe_unused]] V<T> x, V<T> power) {
#if defined(__AVX512F__)
  return power;  // 2^kSmallest is 0
#else
  return select<T>(x < floor, V<T>{}, power);
#endif
}

// 2^x. Results far below the normal range are 0; NaN stays NaN. Not for x whose power overflows.
template <class T>
RF_INLINE V<T> vexp2(V<T> x) {
  const V<T> floor = splat<T>(Reduced<T>::kSmallest);
  const Rounded<T> rounded(at_least<T>(floor, x));
  return zero_below<T>(floor, x, rounded.times_power(polynomial<T>(Reduced<T>::kExp, rounded.r)));
}

// exp(x), likewise: the remainder of x by ln 2 is taken before x is rounded.
template <class T>
RF_INLINE V<T> vexp(V<T> x) {
  using F = Format<T>;
  const V<T> floor = splat<T>(Reduced<T>::kSmallest * kLn2<T>), y = at_least<T>(floor, x);
  const Rounded<T> rounded(y * kLog2E<T>);
  const V<T> r = (y - rounded.n * F::kLn2Hi) - rounded.n * F::kLn2Lo;
  return zero_below<T>(floor, x, rounded.times_power(polynomial<T>(Reduced<T>::kExp, r * kLog2E<T>)));
}

// x = m 2^e with m in [0.75, 1.5), for x > 0: e, and log2(m).
template <class T>
struct Binary {
  V<T> exponent, log2_mantissa;
  RF_INLINE explicit Binary(V<T> x) {
    using F = Format<T>;
    V<T> m;
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 8) {
      m = _mm512_maskz_getmant_pd(-1, x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_zero);
      exponent = _mm512_maskz_getexp_pd(-1, x);
    } else {
      m = _mm512_maskz_getmant_ps(-1, x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_zero);
      exponent = _mm512_maskz_getexp_ps(-1, x);
    }
    exponent = select<T>(m < T(1), exponent + T(1), exponent);
    const U<T> first_bits = as_bits<T>(m) >> (F::kMantissa - (sizeof(T) == 8 ? 4 : 5));
    const V<T> r = m * look_up<T>(Tables<T>::kInverse, first_bits) - T(1);
    log2_mantissa = look_up<T>(Tables<T>::kLog2, first_bits) + r * polynomial<T>(Reduced<T>::kLog, r);
#else
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

template <class T>
RF_INLINE V<T> vlog(V<T> x) {
  using F = Format<T>;
  const Binary<T> parts(x);
  const V<T> result = parts.exponent * F::kLn2Hi + (parts.log2_mantissa * kLn2<T> + parts.exponent * F::kLn2Lo);
  return select<T>(x > T(0), result, x + kNegInf<T>);
}

}  // namespace riskfield::RISKFIELD_ISA
