// For exact inference on forests: items as the lanes of vectors, and products of tables with vectors.
#pragma once

#include <algorithm>
#include <utility>

#include "forest_numbers.hpp"
#include "plan.hpp"

namespace riskfield::RISKFIELD_ISA {

// The rows of a matrix that belong to the lanes of a block; null for lanes without an item.
template <class T, int Width>
struct LaneRows {
  T* row[Width];
};

// Exchanges the off-diagonal blocks of 2x2 blocks of `Step` x `Step` numbers, of which a and b hold one row each.
template <int Step, int... Lane>
RF_INLINE void exchange(V<double>& a, V<double>& b, std::integer_sequence<int, Lane...>) {
  constexpr int n = sizeof...(Lane);
  const V<double> first = __builtin_shufflevector(a, b, (Lane & Step ? n + (Lane ^ Step) : Lane)...);
  b = __builtin_shufflevector(a, b, (Lane & Step ? n + Lane : Lane ^ Step)...);
  a = first;
}
template <int Step = 1>
RF_INLINE void transpose(V<double>* square) {
  if constexpr (Step < kLanes<double>) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes<double>; ++i)
      if (!(i & Step)) exchange<Step>(square[i], square[i + Step], std::make_integer_sequence<int, kLanes<double>>{});
    transpose<2 * Step>(square);
  }
}

template <class T>
struct Consecutive {  // as many numbers as a vector of doubles has
  typedef T V __attribute__((vector_size(kLanes<double> * sizeof(T)), aligned(sizeof(T)), may_alias));
};

template <class Numbers, class T>
RF_INLINE typename Numbers::Reals gather(const LaneRows<const T, Numbers::kWidth>& rows, Index at) {
  double lanes[Numbers::kWidth];
  for (int l = 0; l < Numbers::kWidth; ++l) lanes[l] = rows.row[l][at];
  return Numbers::load(lanes);
}
template <class Numbers, class T>
RF_INLINE void scatter(const LaneRows<T, Numbers::kWidth>& rows, Index at, typename Numbers::Reals values,
                       bool add = false) {
  double lanes[Numbers::kWidth];
  Numbers::store(lanes, values);
  for (int l = 0; l < Numbers::kWidth; ++l)
    if (rows.row[l]) rows.row[l][at] = static_cast<T>(add ? rows.row[l][at] + lanes[l] : lanes[l]);
}

// Calls body(k, the numbers at start + k of all rows) for k in [0, count).
template <class Numbers, class T, class Body>
RF_INLINE void read_rows(const LaneRows<const T, Numbers::kWidth>& rows, Index start, Index count, Body body) {
  Index k = 0;
  if constexpr (Numbers::kWidth > 1)
    for (; k + Numbers::kWidth <= count; k += Numbers::kWidth) {
      V<double> square[Numbers::kWidth];
      for (int l = 0; l < Numbers::kWidth; ++l)
        square[l] = __builtin_convertvector(
            *reinterpret_cast<const typename Consecutive<T>::V*>(rows.row[l] + start + k), V<double>);
      transpose(square);
      for (int i = 0; i < Numbers::kWidth; ++i) body(k + i, square[i]);
    }
  for (; k < count; ++k) body(k, gather<Numbers>(rows, start + k));
}
// Writes value(k) to start + k of all rows.
template <class Numbers, class T, class Value>
RF_INLINE void write_rows(const LaneRows<T, Numbers::kWidth>& rows, Index start, Index count, Value value) {
  Index k = 0;
  if constexpr (Numbers::kWidth > 1)
    for (; k + Numbers::kWidth <= count; k += Numbers::kWidth) {
      V<double> square[Numbers::kWidth];
      for (int i = 0; i < Numbers::kWidth; ++i) square[i] = value(k + i);
      transpose(square);
      for (int l = 0; l < Numbers::kWidth; ++l)
        if (rows.row[l])
          *reinterpret_cast<typename Consecutive<T>::V*>(rows.row[l] + start + k) =
              __builtin_convertvector(square[l], typename Consecutive<T>::V);
    }
  for (; k < count; ++k) scatter<Numbers>(rows, start + k, value(k));
}

// Calls body(first, block) with block an integral_constant, for blocks of nearly equal length, at most `Most`, of [0,
// n).
template <int Most, class Body>
RF_INLINE void in_blocks(Index n, Body body) {
  static_assert(Most == 8 || Most == 4, "");
  const Index blocks = (n + Most - 1) / Most;
  for (Index k = 0; k < blocks; ++k) {
    const Index first = n * k / blocks, last = n * (k + 1) / blocks;
    switch (last - first) {
#define RF_BLOCK(size)                                                            \
  case size:                                                                      \
    if constexpr (size <= Most) body(first, std::integral_constant<int, size>{}); \
    break;
      RF_BLOCK(1)
      RF_BLOCK(2)
      RF_BLOCK(3)
      RF_BLOCK(4)
      RF_BLOCK(5)
      RF_BLOCK(6)
      RF_BLOCK(7)
      RF_BLOCK(8)
#undef RF_BLOCK
    }
  }
}

// The sum of a[k] b[k]; the two halves of it do not wait for each other.
template <class Numbers>
RF_INLINE typename Numbers::Number dot(const typename Numbers::Number* a, const typename Numbers::Number* b,
                                       Index size) {
  typename Numbers::Number even = Numbers::zero(), odd = Numbers::zero();
  Index k = 0;
  for (; k + 1 < size; k += 2) {
    even += a[k] * b[k];
    odd += a[k + 1] * b[k + 1];
  }
  if (k < size) even += a[k] * b[k];
  return Numbers::canonical(even + odd);
}

// out[i] = sum over j of table[i + j step] in[j] for a single item, whose states fill the lanes. Reads up to one vector
// past the end of the table.
RF_INLINE void contract_rows(const double* table, Index step, const double* in, Index num_in, double* out,
                             Index num_out) {
  constexpr int kStep = kLanes<double>;
  for (Index first = 0; first < num_out; first += kStep) {
    V<double> even{}, odd{};
    Index j = 0;
    for (; j + 1 < num_in; j += 2) {
      even += in[j] * load<double>(table + first + j * step);
      odd += in[j + 1] * load<double>(table + first + (j + 1) * step);
    }
    if (j < num_in) even += in[j] * load<double>(table + first + j * step);
    store_some<double>(out + first, even + odd, static_cast<int>(std::min<Index>(kStep, num_out - first)));
  }
}

// out[i] = sum over j of table[i step_out + j step_in] in[j]. An entry of the table is a Number, or one double for all
// items. Blocks of sums stay in registers. A function of its own, as is add_outer: inlined into every pass, the many
// kinds of blocks would take most of the time to compile.
template <class Numbers, class Entry>
RF_NOINLINE void contract(const Entry* table, Index step_out, Index step_in, const typename Numbers::Number* in,
                          Index num_in, typename Numbers::Number* out, Index num_out) {
  using Number = typename Numbers::Number;
  if constexpr (Numbers::kWidth == 1)
    if (step_out == 1) {
      contract_rows(table, step_in, in, num_in, out, num_out);
      return;
    }
  in_blocks<8>(num_out, [&](Index first, auto block) RF_LAMBDA {
    constexpr int kBlock = decltype(block)::value;
    Number sum[kBlock];
    const Entry* rows = table + first * step_out;
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; ++i) sum[i] = Numbers::zero();
    for (Index j = 0; j < num_in; ++j) {
      const Number x = in[j];
#pragma GCC unroll 8
      for (int i = 0; i < kBlock; ++i) sum[i] += x * rows[i * step_out + j * step_in];
    }
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; ++i) out[first + i] = Numbers::canonical(sum[i]);
  });
}

// sum[x, y] += the sum over f of rows[f][x] columns[f][y], for `count` pairs of vectors. For a single item, whose
// states fill the lanes, it reads up to one vector past the ends of the columns and of the sum.
template <class Numbers>
RF_NOINLINE void add_outer(typename Numbers::Number* sum, Index num_rows, Index num_columns,
                           const typename Numbers::Number* const* rows, const typename Numbers::Number* const* columns,
                           int count) {
  using Number = typename Numbers::Number;
  if constexpr (Numbers::kWidth == 1) {
    in_blocks<4>(num_rows, [&](Index x, auto height) RF_LAMBDA {
      constexpr int kHeight = decltype(height)::value, kStep = kLanes<double>;
      for (Index y = 0; y < num_columns; y += kStep) {
        V<double> total[kHeight];
#pragma GCC unroll 4
        for (int i = 0; i < kHeight; ++i) total[i] = load<double>(sum + (x + i) * num_columns + y);
        for (int f = 0; f < count; ++f) {
          const V<double> b = load<double>(columns[f] + y);
#pragma GCC unroll 4
          for (int i = 0; i < kHeight; ++i) total[i] += rows[f][x + i] * b;
        }
        const int some = static_cast<int>(std::min<Index>(kStep, num_columns - y));
#pragma GCC unroll 4
        for (int i = 0; i < kHeight; ++i) store_some<double>(sum + (x + i) * num_columns + y, total[i], some);
      }
    });
    return;
  }
  in_blocks<4>(num_rows, [&](Index x, auto height) RF_LAMBDA {
    in_blocks<4>(num_columns, [&](Index y, auto width) RF_LAMBDA {
      constexpr int kHeight = decltype(height)::value, kWidth = decltype(width)::value;
      Number total[kHeight][kWidth];
#pragma GCC unroll 4
      for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < kWidth; ++j) total[i][j] = sum[(x + i) * num_columns + y + j];
      for (int f = 0; f < count; ++f) {
        const Number *a = rows[f] + x, *b = columns[f] + y;
#pragma GCC unroll 4
        for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 4
          for (int j = 0; j < kWidth; ++j) total[i][j] += a[i] * b[j];
      }
#pragma GCC unroll 4
      for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < kWidth; ++j) sum[(x + i) * num_columns + y + j] = Numbers::canonical(total[i][j]);
    });
  });
}

}  // namespace riskfield::RISKFIELD_ISA
