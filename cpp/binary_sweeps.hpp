// Sweeps over graphs of binary variables in pairs, in probabilities: what the levels of such a graph have in common is
// decided once, because on short levels that would cost more than the updates.
#pragma once

#include "pair_runs.hpp"
#include "tape_layout.hpp"
#include "workers.hpp"

namespace riskfield::RISKFIELD_ISA {

// Whether all variables are binary and all factors pairs of them whose tables are kept as one number.
template <class T>
bool is_binary(const Plan& plan, const Item<T>& item) {
  return item.couplings && plan.all_binary && plan.groups.size() == 1 && plan.sweep != Sweep::kAllAtOnce;
}

// Asks for what the level after this one will need, while this one is updated tile by tile: `rows` begin at the first
// tile of a run there.
template <class T>
struct LevelAhead {
  static constexpr int kMostRows = 10;
  Index tiles = 0;
  int count = 0;
  const T* rows[kMostRows] = {};

  void add(const T* row) {
    if (count < kMostRows) rows[count++] = row;
  }
  RF_INLINE void fetch(Index shift) const {
    if (shift >= tiles * kLanes<T>) return;
    for (int k = 0; k < count; ++k) __builtin_prefetch(rows[k] + shift, 0, 3);
  }
};

template <class Algebra, class T, class Kind>
class BinarySweep {
 public:
  BinarySweep(const Context<T>& context, Item<T>& item, const Member<T>& member)
      : context_(context),
        plan_(*context.plan),
        item_(item),
        member_(member),
        scratch_(member.scratch),
        messages_(item.messages[item.current].get()),
        far_(exceeds_cache(item)) {}

  // The same as Sweeps::sweep; gathered(range, tile) updates messages that do not lie side by side.
  template <class Gathered>
  void run(T* tape, const TapeLayout<T>& layout, Gathered gathered) {
    const int first = member_.first, last = member_.last;
    const std::int64_t begun = member_.steps();
    for (Index s = 0; s < plan_.num_stages(); ++s) {
      const Part* parts = &plan_.stages[s * plan_.parts];
      const Part* later = s + 1 < plan_.num_stages() ? parts + plan_.parts : nullptr;
      member_.begin_stage(plan_, plan_.waits, s, begun);
      scratch_.tape = tape ? tape + layout.ranges_size(parts[0].ranges_begin, parts[first].ranges_begin) : nullptr;
      for (int r = parts[first].ranges_begin; r < parts[last - 1].ranges_end; ++r) {
        const bool alike = later && later[last - 1].ranges_end - later[first].ranges_begin ==
                                        parts[last - 1].ranges_end - parts[first].ranges_begin;
        send(plan_.ranges[r], far_ && alike ? later[first].ranges_begin + r - parts[first].ranges_begin : -1, gathered);
      }
      if (tape) tape += layout.ranges_size(parts[0].ranges_begin, parts[plan_.parts - 1].ranges_end);
      scratch_.tape = nullptr;
      update(parts[first].nodes_begin, parts[last - 1].nodes_end, far_ && later ? later[first].nodes_begin : -1);
      member_.end_stage();
    }
  }

 private:
  using OfNodes = std::conditional_t<Algebra::kNeedsCounting, LogMessages<T>, Probability<T, Power::kOne>>;

  template <class Gathered>
  RF_INLINE void send(const TileRange& range, int later, Gathered gathered) {
    const Group& group = plan_.groups[0];
    Index next = later >= 0 ? plan_.ranges[later].begin : 0;
    const Index next_end = later >= 0 ? plan_.ranges[later].end : 0;
    for (Index t = range.begin; t < range.end;) {
      const FactorTile& tile = plan_.factor_tiles[t];
      if (!tile.contiguous) {
        gathered(range, tile);
        scratch_.tick(group.table_size * kLanes<T>);
        ++t;
        continue;
      }
      while (next < next_end && !plan_.factor_tiles[next].contiguous) ++next;
      LevelAhead<T> ahead;
      if (next < next_end && !plan_.factor_tiles[next].shared) {
        const FactorTile& begin = plan_.factor_tiles[next];
        ahead.tiles = std::min<Index>(begin.run, next_end - next);
        ahead.add(item_.tables.get() + begin.table);
        next += ahead.tiles;
      }
      const Index last = std::min<Index>(t + tile.run, range.end) - 1;
      const Index step = t < last ? plan_.factor_tiles[t + 1].table - tile.table : 0;
      PairRun<Algebra, T, 2, Kind>(context_, item_, range, tile, messages_, messages_, scratch_)
          .update(last - t + 1, step, plan_.factor_tiles[last], [&](Index shift) RF_LAMBDA { ahead.fetch(shift); });
      scratch_.tick((last - t + 1) * group.table_size);
      t = last + 1;
    }
  }

  RF_INLINE void update(Index begin, Index end, Index next) {
    LevelAhead<T> ahead;
    if (next >= 0 && next < static_cast<Index>(plan_.node_tiles.size()) && plan_.node_tiles[next].contiguous) {
      const NodeTile& tile = plan_.node_tiles[next];
      ahead.tiles = tile.run;
      ahead.add(item_.node_theta.get() + tile.address);
      ahead.add(item_.beliefs.get() + tile.address);
      for (int d = 0; d < tile.degree; ++d) {
        const Connection& connection = plan_.connections[tile.connections + d];
        ahead.add(messages_ + connection.message + Ratio<T>::kFirstStored * connection.stride);
      }
    }
    for (Index t = begin; t < end;) {
      const NodeTile& tile = plan_.node_tiles[t];
      if (!tile.contiguous) {
        update_gathered_belief<OfNodes, T, 2, Kind::kOne>(context_, item_, tile, messages_, scratch_);
        scratch_.tick(tile.degree * kLanes<T>);
        ++t;
        continue;
      }
      const Index last = std::min<Index>(t + tile.run, end) - 1;
      scratch_.tick(2 * (last - t + 1));
      for (Index shift = 0; t <= last; ++t, shift += kLanes<T>) {
        ahead.fetch(shift);
        update_belief<OfNodes, T, 2, true, Kind::kOne>(context_, item_, tile, messages_, scratch_, shift,
                                                       t == last ? plan_.node_tiles[last].count : kLanes<T>);
      }
    }
  }

  const Context<T>& context_;
  const Plan& plan_;
  Item<T>& item_;
  const Member<T>& member_;
  Scratch<T>& scratch_;
  T* const messages_;
  const bool far_;  // whether the model does not stay in the cache
};

}  // namespace riskfield::RISKFIELD_ISA
