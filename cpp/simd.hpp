// Vectors one register wide, with the few functions the kernels need. Everything is written on GCC/Clang vector
// extensions; the instruction set is whatever this translation unit is compiled for (see CMakeLists.txt).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

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

// Store past the caches, for numbers that are not read soon: a cache would fetch what they replace, and drop something
// else. `p` is aligned to a vector. Where other threads read them, finish_streams() comes first.
template <class T>
RF_INLINE void stream(T* p, V<T> v) {
#if defined(__AVX512F__)
  if constexpr (std::is_same<T, double>::value) return _mm512_stream_pd(p, v);
  if constexpr (std::is_same<T, float>::value) return _mm512_stream_ps(p, v);
#elif defined(__AVX2__)
  if constexpr (std::is_same<T, double>::value) return _mm256_stream_pd(p, v);
  if constexpr (std::is_same<T, float>::value) return _mm256_stream_ps(p, v);
#endif
  store<T>(p, v);
}
RF_INLINE void finish_streams() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

template <class T>
RF_INLINE void set_lane(V<T>& v, int lane, T x) {
  v[lane] = x;
}

// Load the first `count` lanes, and no memory beyond them.
template <class T>
RF_INLINE V<T> load_some(const T* p, int count) {
  if (count == kLanes<T>) return load<T>(p);
#if defined(__AVX512F__)
  if constexpr (std::is_same<T, double>::value)
    return _mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << count) - 1), p);
  if constexpr (std::is_same<T, float>::value)
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p);
#elif defined(__AVX2__)
  if constexpr (std::is_same<T, double>::value)
    return _mm256_maskload_pd(p, _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3)));
  if constexpr (std::is_same<T, float>::value)
    return _mm256_maskload_ps(p,
                              _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
#endif
  V<T> v{};
  for (int l = 0; l < count; ++l) set_lane<T>(v, l, p[l]);
  return v;
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
  // GCC 12 fails to compile some conditional vectors for plain SSE2, so there the bits are chosen.
  U<T> bits;
  std::memcpy(&bits, &mask, sizeof(mask));
  return from_bits<T>((as_bits<T>(yes) & bits) | (as_bits<T>(no) & ~bits));
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

// a where a > b, else b: b if either is NaN.
template <class T>
RF_INLINE V<T> larger_or_second(V<T> a, V<T> b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same<T, double>::value)
    return _mm512_maskz_max_pd(-1, a, b);
  else if constexpr (std::is_same<T, float>::value)
    return _mm512_maskz_max_ps(-1, a, b);
#endif
  return select<T>(a > b, a, b);
}

// The larger one; NaN if either is.
template <class T>
RF_INLINE V<T> vmax(V<T> a, V<T> b) {
  return select<T>(a != a, a, larger_or_second<T>(a, b));
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

}  // namespace riskfield::RISKFIELD_ISA
