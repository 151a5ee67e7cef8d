// Products of tables with cavities, summed or maximised over all states but those of one variable.
#pragma once

#include "algebra.hpp"

namespace riskfield::RISKFIELD_ISA {

// Asks for `count` table entries from `entry` on in the table `ahead` numbers further; no table if that is 0.
template <class T>
RF_INLINE void prefetch_ahead(const T* entry, Index stride, Index count, Index ahead) {
  if (ahead == 0) return;
  for (Index e = 0; e < count; ++e) __builtin_prefetch(entry + ahead + e * stride, 0, 2);
}

// out[x] = sum over a, b of before[a] table[(a, x, b)] after[b], where a runs over the joint states of the slots before
// x's and b over those after it. `stride` is the distance of consecutive table entries. The table `ahead` numbers
// further is fetched meanwhile: bit by bit, because a processor that is asked for all of a large table at once waits.
template <class Algebra, class T, int S>
RF_INLINE void contract(const T* table, Index stride, const V<T>* before, Index num_before, int states,
                        const V<T>* after, Index num_after, Index ahead, V<T>* out) {
  const int n = S ? S : states;
  for (int x = 0; x < n; ++x) out[x] = V<T>{};
  if (num_after == 1) {
    // A few rows of the table at a time, so that it is read in order.
    constexpr int kRows = S ? S : 4;
    Index a = 0;
    for (; a + kRows <= (S ? S : num_before); a += kRows) {
      const T* rows = table + a * n * stride;
      prefetch_ahead(rows, stride, kRows * n, ahead);
      V<T> weight[kRows];
      RF_FOR (k, 0, kRows) weight[k] = before[a + k];
      RF_FOR (x, 0, n)
        RF_FOR (k, 0, kRows)
          out[x] = Algebra::multiply_add(out[x], load<T>(rows + (Index(k) * n + x) * stride), weight[k]);
    }
    for (; a < (S ? S : num_before); ++a) {
      const T* row = table + a * n * stride;
      prefetch_ahead(row, stride, n, ahead);
      for (int x = 0; x < n; ++x) out[x] = Algebra::multiply_add(out[x], load<T>(row + x * stride), before[a]);
    }
    return;
  }
  const Index na = S ? 1 : num_before, nb = S ? S : num_after;
  for (Index a = 0; a < na; ++a)
    for (int x = 0; x < n; ++x) {
      const T* row = table + (a * n + x) * nb * stride;
      prefetch_ahead(row, stride, nb, ahead);
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

// The same for any number of states. Compiled once, not wherever it is used; powers make no difference here.
template <class Algebra, class T>
RF_NOINLINE void contract_any(const T* table, Index stride, const V<T>* before, Index num_before, int states,
                              const V<T>* after, Index num_after, Index ahead, V<T>* out) {
  contract<Algebra, T, 0>(table, stride, before, num_before, states, after, num_after, ahead, out);
}

// The same for a pairwise factor between variables of S states each, in short. `weight` is that of the other slot.
template <class Algebra, class T, int S>
RF_INLINE void contract_square(const T* table, Index stride, int slot, const V<T>* weight, Index ahead, V<T>* out) {
  RF_FOR (x, 0, S) {
    auto entry = [&](int y) RF_LAMBDA {
      const T* from = table + (slot == 1 ? y * S + x : x * S + y) * stride;
      if (ahead != 0) __builtin_prefetch(from + ahead, 0, 2);
      return load<T>(from);
    };
    // From 0 on, as `contract` does: the compiler fuses the same products, and results are the same to the last bit.
    out[x] = V<T>{};
    RF_FOR (y, 0, S) out[x] = Algebra::multiply_add(out[x], entry(y), weight[y]);
  }
}

template <class Algebra, class T>
using Sums = std::conditional_t<std::is_same<Algebra, Expectation<T>>::value, Algebra, Probability<T, Power::kOne>>;

// The same for a pairwise factor. `weight` is that of the states of the other slot, of which there are `others`.
template <class Algebra, class T, int S>
RF_INLINE void contract_pair(const T* table, Index stride, int slot, const V<T>* weight, int others, int states,
                             V<T>* out, Index ahead = 0) {
  if constexpr (S == 0)
    contract_any<Sums<Algebra, T>, T>(table, stride, slot == 1 ? weight : nullptr, slot == 1 ? others : 1, states,
                                      slot == 1 ? nullptr : weight, slot == 1 ? 1 : others, ahead, out);
  else
    contract_square<Algebra, T, S>(table, stride, slot, weight, ahead, out);
}

// Exponentials relative to a largest one, where an error of a rounding of that is small enough: in sums with a 1. The
// difference is taken first: it is exact for the largest one, however large that is.
template <class T>
class Relative {
 public:
  RF_INLINE explicit Relative(V<T> top) : shift_(select<T>(top == kNegInf<T>, V<T>{}, top)) {}
  RF_INLINE V<T> exp(V<T> x) const { return vexp2_of_many<T>((x - shift_) * T(kLog2E<double>)); }

 private:
  V<T> shift_;
};

// The largest term of a sum and the sum relative to it.
template <class T>
struct LogSum {
  V<T> top, total;
  RF_INLINE V<T> logarithm() const { return top + vlog2<T>(total) * T(kLn2<double>); }
};

// term(i) gives the i-th of N terms, as a logarithm.
template <class T, int N, class Term>
RF_INLINE LogSum<T> log_sum(Term term) {
  V<T> terms[N];
  RF_FOR (i, 0, N) terms[i] = term(i);
  LogSum<T> sum{terms[0], V<T>{}};
  RF_FOR (i, 1, N) sum.top = larger_or_second<T>(sum.top, terms[i]);
  const Relative<T> relative(sum.top);
  RF_FOR (i, 0, N) sum.total += relative.exp(terms[i]);
  return sum;
}

// The same in logarithms: the largest term first, then, for sum-product, the sum relative to it.
template <class T, bool Max>
RF_NOINLINE void contract_log(const T* table, Index stride, const V<T>* before, Index num_before, int states,
                              const V<T>* after, Index num_after, V<T>* out) {
  // The inner loop is over slots on one side, over those after if there are any.
  const bool swap = num_after == 1;
  const V<T>*outer = swap ? after : before, *inner = swap ? before : after;
  const Index num_outer = swap ? 1 : num_before, num_inner = swap ? num_before : num_after;
  const Index step = swap ? states * stride : stride, outer_step = states * num_after * stride;
  constexpr int kMost = 8;  // logarithms that are taken side by side, so that they do not wait for each other
  LogSum<T> sums[kMost];
  for (int x = 0; x < states; ++x) {
    const T* row = table + x * num_after * stride;
    auto for_each_term = [&](auto body) RF_LAMBDA {
      for (Index o = 0; o < num_outer; ++o) {
        const V<T> weight = outer[o];
#pragma GCC unroll 2
        for (Index i = 0; i < num_inner; ++i) body(load<T>(row + o * outer_step + i * step) + weight + inner[i]);
      }
    };
    LogSum<T>& sum = sums[x % kMost];
    auto of_few = [&](auto count) RF_LAMBDA {  // terms that fit into registers
      sum = log_sum<T, decltype(count)::value>([&](int i) RF_LAMBDA { return load<T>(row + i * step) + inner[i]; });
    };
    if (!Max && num_outer == 1 && num_inner == 3) {
      of_few(std::integral_constant<int, 3>{});
    } else if (!Max && num_outer == 1 && num_inner == 4) {
      of_few(std::integral_constant<int, 4>{});
    } else if (!Max && num_outer == 1 && num_inner == 5) {
      of_few(std::integral_constant<int, 5>{});
    } else {
      V<T> top = splat<T>(kNegInf<T>);
      for_each_term([&](V<T> term) RF_LAMBDA {
        // A NaN would come out of the sum below.
        top = Max ? vmax<T>(top, term) : larger_or_second<T>(top, term);
      });
      sum = {top, V<T>{}};
      const Relative<T> relative(top);
      if constexpr (!Max) for_each_term([&](V<T> term) RF_LAMBDA { sum.total += relative.exp(term); });
    }
    if constexpr (Max)
      out[x] = sum.top;
    else if (x % kMost == kMost - 1 || x == states - 1)
      for (int y = x - x % kMost; y <= x; ++y) out[y] = sums[y % kMost].logarithm();
  }
}

// The same between two variables of S states each. The cavity is that of the other slot. The loop is not unrolled, so
// that what exponentials and logarithms need stays in registers.
template <class T, int S>
RF_INLINE void contract_log_square(const T* table, Index stride, int slot, const V<T>* cavity, V<T>* out) {
  const Index step = (slot == 0 ? 1 : S) * stride, next = (slot == 0 ? S : 1) * stride;
  LogSum<T> sums[S];
#pragma GCC unroll 1
  for (int x = 0; x < S; ++x, table += next)
    sums[x] = log_sum<T, S>([&](int y) RF_LAMBDA { return load<T>(table + y * step) + cavity[y]; });
#pragma GCC unroll 1
  for (int x = 0; x < S; ++x) out[x] = sums[x].logarithm();
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
    total[x] = Relative<T>(out[x]).exp(low) + T(1);
  }
  out[1] = scaled_log2_ratio<T>(total[1], total[0], splat<T>(T(kLn2<double>)), out[1]);
}

}  // namespace riskfield::RISKFIELD_ISA
