// Products of tables with vectors, for exact inference on forests.
#pragma once

#include "forest_numbers.hpp"
#include "plan.hpp"

namespace riskfield::RISKFIELD_ISA {

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

// out[i] = sum over j of table[i step_out + j step_in] in[j]. An entry of the table is a Number, or one double for all
// items. Blocks of sums stay in registers. A function of its own, as is add_outer: inlined into every pass, the many
// kinds of blocks would take most of the time to compile.
template <class Numbers, class Entry, class Step>
RF_NOINLINE void contract_by(const Entry* table, Step step_out, Index step_in, const typename Numbers::Number* in,
                             Index num_in, typename Numbers::Number* out, Index num_out) {
  using Number = typename Numbers::Number;
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

template <class Numbers, class Entry>
RF_INLINE void contract(const Entry* table, Index step_out, Index step_in, const typename Numbers::Number* in,
                        Index num_in, typename Numbers::Number* out, Index num_out) {
  // A single item has no lanes to fill. Entries side by side let the compiler use vectors all the same.
  if (Numbers::kWidth == 1 && step_out == 1)
    contract_by<Numbers>(table, std::integral_constant<Index, 1>{}, step_in, in, num_in, out, num_out);
  else
    contract_by<Numbers>(table, step_out, step_in, in, num_in, out, num_out);
}

// sum[x, y] += the sum over f of rows[f][x] columns[f][y], for `count` pairs of vectors.
template <class Numbers>
RF_NOINLINE void add_outer(typename Numbers::Number* sum, Index num_rows, Index num_columns,
                           const typename Numbers::Number* const* rows, const typename Numbers::Number* const* columns,
                           int count) {
  using Number = typename Numbers::Number;
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
