// Gradients of tables, for several sweeps at once.
//
// Each sweep adds to the gradient of a pairwise table the product of the table, the gradient r of the unnormalised
// message and the cavity it was made from. With many states, most time would go into reading and writing gradients of
// tables. So the backward pass writes down r; the outer products of r and the cavities, which are on the tape, are
// added up in registers later.
#pragma once

#include "reverse.hpp"

namespace riskfield::RISKFIELD_ISA {

constexpr int kDeferredSweeps = 32;

// Groups whose tables are worth it. Mean field, logarithms and ratios are not stored in this form.
template <class T>
bool is_deferred(const Context<T>& context, const Item<T>& item, const Group& group) {
  return context.kind == Kind::kSumProduct && !item.log_domain && group.arity == 2 && group.dims[0] > 2 &&
         group.dims[1] > 2;
}

// Adds the tables' gradients of one tile. `tape` and `rates` of a sweep start at what belongs to the tile.
template <class T, int S, class Lanes>
RF_INLINE void add_deferred(const Item<T>& item, const Group& group, int slot, const Lanes& lanes, int count,
                            const T* const* tape, const T* const* rates, Gradients<T>& grad, Scratch<T>& scratch) {
  constexpr int kBlock = S ? S : 4, kTilesAhead = 2;
  const int n = S ? S : group.dims[slot], others = S ? S : group.dims[1 - slot];
  Index stride;
  const T* table = lanes.template tables<S>(item.tables.get(), scratch.table, stride);
  for (int x0 = 0; x0 < n; x0 += kBlock)
    for (int y0 = 0; y0 < others; y0 += kBlock) {
      // Beyond the last state a block repeats it.
      V<T> sum[kBlock][kBlock];
      RF_FOR (x, 0, kBlock)
        RF_FOR (y, 0, kBlock) sum[x][y] = V<T>{};
      for (int k = 0; k < count; ++k) {
        if (x0 == 0 && y0 == 0) {  // so many places at once are more than the processor foresees
          for (int y = 0; y < others; ++y) __builtin_prefetch(tape[k] + (kTilesAhead * others + y) * kLanes<T>, 0, 2);
          for (int x = 0; x < n; ++x) __builtin_prefetch(rates[k] + (kTilesAhead * n + x) * kLanes<T>, 0, 2);
        }
        V<T> cavity[kBlock];
        RF_FOR (y, 0, kBlock) cavity[y] = load<T>(tape[k] + (S ? y : std::min(y0 + y, others - 1)) * kLanes<T>);
        RF_FOR (x, 0, kBlock) {
          const V<T> r = load<T>(rates[k] + (S ? x : std::min(x0 + x, n - 1)) * kLanes<T>);
          RF_FOR (y, 0, kBlock) sum[x][y] += r * cavity[y];
        }
      }
      const int rows = S ? S : std::min(kBlock, n - x0), columns = S ? S : std::min(kBlock, others - y0);
      for (int x = 0; x < rows; ++x)
        for (int y = 0; y < columns; ++y) {
          const Index e = slot == 0 ? Index(x0 + x) * others + y0 + y : Index(y0 + y) * n + x0 + x;
          lanes.add_table(grad.tables, grad.tied, e, load<T>(table + e * stride) * sum[x][y]);
        }
    }
}

}  // namespace riskfield::RISKFIELD_ISA
