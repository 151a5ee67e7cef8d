// How the backward pass asks early for what it will need. Hardware prefetching ends with the tiles of a range, which
// are few.
#pragma once

#include "deferred.hpp"

namespace riskfield::RISKFIELD_ISA {

// What the pass reads and writes at the pairs of binary variables of the range that comes next, tile by tile.
template <class T>
struct PairsAhead {
  Index tiles = 0;
  const T *messages, *table, *gradient, *nodes[2];

  RF_INLINE void fetch() {
    if (tiles == 0) return;
    __builtin_prefetch(messages, 1, 2);
    __builtin_prefetch(messages + kLanes<T>, 1, 2);
    __builtin_prefetch(table, 0, 2);
    __builtin_prefetch(gradient, 1, 2);
    for (const T*& node : nodes) {
      __builtin_prefetch(node, 1, 2);
      node += kLanes<T>;
    }
    messages += 2 * kLanes<T>;
    table += kLanes<T>;
    gradient += kLanes<T>;
    --tiles;
  }
};

// Where the tiles of a range end that the thread of its part goes back through.
inline Index own_end(const Plan& plan, const TileRange& range) {
  return plan.sweep == Sweep::kAllAtOnce ? range.between : range.end;
}

template <class T>
class BackwardLookahead {
 public:
  BackwardLookahead(const Plan& plan, const Item<T>& item, const DeferredLayout<T>& places,
                    const std::vector<Gradients<T>>& parts)
      : plan_(plan), item_(item), places_(places), parts_(parts), leads_(plan.parts), next_(plan.ranges.size(), -1) {
    for (int p = 0; p < plan.parts; ++p)
      for (Index s = 0, last = -1; s < plan.num_stages(); ++s) {
        const Part& part = plan.stages[s * plan.parts + p];
        for (int r = part.ranges_begin; r < part.ranges_end; ++r) {
          next_[r] = static_cast<std::int32_t>(last);
          last = r;
        }
      }
  }

  // The tape is read backwards, but for the tiles of a range, which are fewer than this.
  RF_INLINE static void fetch_tape(const T* tape) { __builtin_prefetch(tape - 32768 / sizeof(T), 0, 2); }

  // For the range that part p goes back through after range r. Small models are in the cache.
  PairsAhead<T> pairs_after(int p, int r) const {
    PairsAhead<T> found;
    if (!parts_[p].streams || !item_.couplings || next_[r] < 0) return found;
    const TileRange& range = plan_.ranges[next_[r]];
    const Group& group = plan_.groups[range.group];
    if (!group.in_rows() || range.begin == range.end) return found;
    const FactorTile& tile = plan_.factor_tiles[range.begin];
    if (!tile.contiguous || tile.shared) return found;
    const Gradients<T>& grad = parts_[p];
    found.tiles = std::min<Index>(tile.run, range.end - range.begin);
    found.messages = grad.messages[grad.current] + group.gradients + 2 * tile.first;
    found.table = item_.tables.get() + tile.table;
    found.gradient = grad.tables + tile.table;
    for (int slot = 0; slot < 2; ++slot) found.nodes[slot] = grad.beliefs + group.operands[tile.operands + slot].node;
    return found;
  }

  // A part begins a deferred sweep. `tape` and `rates` are those of the sweep.
  void begin_deferred(int p, const T* tape, const T* rates) {
    Position end;
    end.stage = plan_.num_stages();
    leads_[p] = {tape, rates, end, end, 0};
    for (int k = 0; k < kTablesAhead; ++k) next_table(p);
  }
  // It is about to update a tile, for which `numbers` were asked for, or 0 if it was left out.
  RF_INLINE void at_deferred(int p, Index numbers) {
    if ((leads_[p].numbers -= numbers) < kLead - kStep) fetch(p);
  }

  // Larger tables are fetched bit by bit while others are read (see `contract`).
  static bool is_small(const Group& group) { return group.table_size <= 32; }

  // How many numbers a deferred pass reads and writes for each tile of a range, about.
  Index lead_of_tile(const TileRange& range) const {
    const Group& group = plan_.groups[range.group];
    return places_.tape.tile_size(range) + places_.rates_of_tile(range) +
           (is_small(group) ? group.table_size * kLanes<T> : 0);
  }

  // The table to ask for while that of a part's next tile is read, or null.
  const T* next_table(int p) {
    Position& at = leads_[p].table;
    while (find_tile(at, p) && is_small(plan_.groups[plan_.ranges[at.range].group])) at.tile = at.end;
    if (at.tile == at.end) return nullptr;
    const FactorTile& tile = plan_.factor_tiles[at.tile++];
    return tile.contiguous && !tile.shared ? item_.tables.get() + tile.table : nullptr;
  }

 private:
  static constexpr Index kLead = 16384 / sizeof(T), kStep = 1024 / sizeof(T);  // numbers
  static constexpr int kTablesAhead = 2;

  // A place among the tiles of a part whose tables are deferred, in the order of a sweep back.
  struct Position {
    Index stage = 0;
    int range = 0, first = 0;  // of the stage; that of the tiles [tile, end), which are next
    Index tile = 0, end = 0;
  };
  // Goes on to where there is a tile; false after the last.
  bool find_tile(Position& at, int p) const {
    while (at.tile == at.end) {
      if (at.range > at.first) {
        const TileRange& range = plan_.ranges[--at.range];
        at.tile = range.begin;
        at.end = places_.rates_of_tile(range) > 0 ? own_end(plan_, range) : range.begin;
      } else {
        if (at.stage == 0) return false;
        const Part& part = plan_.stages[--at.stage * plan_.parts + p];
        at.range = part.ranges_end;
        at.first = part.ranges_begin;
      }
    }
    return true;
  }

  // How far a part has gone ahead of its messages, to ask for what they will need.
  struct Lead {
    const T *tape = nullptr, *rates = nullptr;  // of the sweep
    Position at, table;                         // of what is asked for at once, and of large tables
    Index numbers = 0;                          // asked for that the sweep has not come to yet
  };

  // Asks for what a part needs soon in a deferred pass.
  RF_NOINLINE void fetch(int p) {
    constexpr int kLine = 64 / sizeof(T);
    auto ask = [](const T* from, Index count) {
      for (const T* end = from + count; from < end; from += kLine) __builtin_prefetch(from, 0, 2);
    };
    Lead& lead = leads_[p];
    Position& at = lead.at;
    while (lead.numbers < kLead && find_tile(at, p)) {
      const TileRange& range = plan_.ranges[at.range];
      const Group& group = plan_.groups[range.group];
      const Index number = at.tile - range.begin, on_tape = places_.tape.tile_size(range),
                  of_rates = places_.rates_of_tile(range);
      const FactorTile& tile = plan_.factor_tiles[at.tile++];
      lead.numbers += lead_of_tile(range);
      ask(lead.tape + places_.ranges[at.range].tape + number * on_tape, on_tape);
      if (!parts_[p].streams) ask(lead.rates + places_.ranges[at.range].rates + number * of_rates, of_rates);
      if (!tile.contiguous) continue;
      const Index width = num_entries<LogMessages<T>, 0>(group, group.arity);
      ask(parts_[p].messages[parts_[p].current] + group.gradients + tile.first * width, width * tile.count);
      const int other = 1 - plan_.ranges[at.range].slot;
      const Operand& operand = group.operands[tile.operands + other];
      for (int x = 0; x < group.dims[other]; ++x)
        __builtin_prefetch(parts_[p].beliefs + operand.node + Index(x) * operand.node_stride, 1, 2);
      if (!tile.shared && is_small(group)) ask(item_.tables.get() + tile.table, group.table_size * kLanes<T>);
    }
  }

  const Plan& plan_;
  const Item<T>& item_;
  const DeferredLayout<T>& places_;
  const std::vector<Gradients<T>>& parts_;
  std::vector<Lead> leads_;         // part
  std::vector<std::int32_t> next_;  // range: the one that its part goes back through after it, or -1
};

}  // namespace riskfield::RISKFIELD_ISA
