// Damping and powers of messages, where powers are expensive: Power::kAny.
//
// The messages of many tiles are made first, then damped and raised to their powers in a loop of its own. It is short,
// so that the processor works on several powers at the same time, with all constants in registers.
#pragma once

#include "updates.hpp"

namespace riskfield::RISKFIELD_ISA {

// One state of a row of messages: from a normalised update u to what is stored and what is kept beside it.
template <class T, bool Damped>
RF_NOINLINE void raise_row(T* stored, T* kept, const T* old, Index count, T damping, T uniform, const T* counting) {
  const V<T> every = splat<T>(uniform);
  for (Index k = 0; k < count; k += kLanes<T>) {
    const int lanes = static_cast<int>(std::min<Index>(kLanes<T>, count - k));
    const V<T> c = uniform > T(0) ? every : load<T>(counting + k);
    V<T> u = load<T>(stored + k), powered;
    if constexpr (Damped) {
      u = (1 - damping) * vlog2<T>(u) + damping * load<T>(old + k);
      powered = vexp2<T>(c * u);
    } else {
      powered = vpow<T>(u, c);
    }
    store_some<T>(kept + k, u, lanes);
    store_some<T>(stored + k, powered, lanes);
  }
}

// The same for one tile, wherever its messages lie. Only here can damped messages be scaled, which those that are kept
// as ratios need not be.
template <class Algebra, class T, class Lanes>
RF_NOINLINE void raise_tile(const Context<T>& context, int g, int slot, const Lanes& lanes, const T* in, T* out,
                            Scratch<T>& scratch) {
  const Index roots = context.plan->message_size;
  const MessageSettings<T> s = settings_of<Algebra, T>(context, g, lanes);
  const int n = context.plan->groups[g].dims[slot], first = Algebra::template first_state<0>(n);
  V<T>* kept = scratch.out;
  V<T> top = splat<T>(kNegInf<T>);
  for (int x = first; x < n; ++x) {
    kept[x] = lanes.message(out, slot, x);
    if (!(s.damping > 0)) continue;
    kept[x] = (1 - s.damping) * vlog2<T>(kept[x]) + s.damping * lanes.message(in + roots, slot, x);
    top = vmax<T>(top, kept[x]);
  }
  for (int x = first; x < n; ++x) {
    if (s.damping > 0 && !Algebra::keeps_ratio(n)) kept[x] -= top;
    lanes.set_message(out + roots, slot, x, kept[x]);
    lanes.set_message(out, slot, x, s.damping > 0 ? vexp2<T>(s.counting * kept[x]) : vpow<T>(kept[x], s.counting));
  }
}

// The tiles [begin, end) of a range. `in` holds the old messages, `out` normalised updates.
template <class Algebra, class T>
void raise_range(const Context<T>& context, const TileRange& range, const T* in, T* out, Scratch<T>& scratch) {
  const Plan& plan = *context.plan;
  const Group& group = plan.groups[range.group];
  const Index roots = plan.message_size;
  const int n = group.dims[range.slot], first = Algebra::template first_state<0>(n);
  const bool in_rows = !(context.damping > 0) || Algebra::keeps_ratio(n);
  auto operand = [&](const FactorTile& tile) { return group.operands[tile.operands + range.slot]; };
  for (Index t = range.begin; t < range.end;) {
    const FactorTile& tile = plan.factor_tiles[t];
    if (!tile.contiguous || !in_rows) {
      with_lanes<T>(plan, group, tile, [&](const auto& lanes) {
        raise_tile<Algebra, T>(context, range.group, range.slot, lanes, in, out, scratch);
      });
      ++t;
      continue;
    }
    // Tiles whose messages follow each other form a row.
    const Operand start = operand(tile);
    Index count = 0;
    for (; t < range.end; ++t) {
      const FactorTile& next = plan.factor_tiles[t];
      if (!next.contiguous || next.first != tile.first + count) break;
      const Operand here = operand(next);
      if (here.message != start.message + count || here.message_stride != start.message_stride) break;
      count += next.count;
    }
    const T* counting = context.counting[range.group].data() + tile.first;
    for (int x = first; x < n; ++x) {
      const Index at = start.message + Index(x) * start.message_stride;
      if (context.damping > 0)
        raise_row<T, true>(out + at, out + roots + at, in + roots + at, count, context.damping,
                           context.uniform[range.group], counting);
      else
        raise_row<T, false>(out + at, out + roots + at, nullptr, count, T(0), context.uniform[range.group], counting);
    }
  }
}

}  // namespace riskfield::RISKFIELD_ISA
