// Products of tables with cavities, summed or maximised over all states but those of one variable.
#pragma once

#include "algebra.hpp"

namespace riskfield::RISKFIELD_ISA {

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

// The same for any number of states; compiled once, not wherever it is used.
template <class Algebra, class T>
RF_NOINLINE void contract_any(const T* table, Index stride, const V<T>* before, Index num_before, int states,
                              const V<T>* after, Index num_after, V<T>* out) {
  contract<Algebra, T, 0>(table, stride, before, num_before, states, after, num_after, out);
}

// The same in logarithms: the largest term first, then, for sum-product, the sum relative to it.
template <class T, bool Max>
RF_NOINLINE void contract_log(const T* table, Index stride, const V<T>* before, Index num_before, int states,
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
