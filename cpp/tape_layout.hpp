// How much of the tape each stage of a sweep takes.
#pragma once

#include "context.hpp"

namespace riskfield::RISKFIELD_ISA {

// How many numbers updates write down: the cavities of every message sent and, for mean field, the beliefs made.
template <class T>
class TapeLayout {
 public:
  TapeLayout(const Context<T>& context, const Item<T>& item)
      : plan_(*context.plan),
        mean_field_(context.kind == Kind::kMeanField),
        ratios_(keeps_ratio(context, item, Ratio<T>::kStates)) {}

  // Of each tile of a range.
  Index tile_size(const TileRange& range) const {
    const Group& group = plan_.groups[range.group];
    Index rows = 0;
    for (int k = 0; k < group.arity; ++k)
      if (k != range.slot)
        rows += ratios_ && group.dims[k] == Ratio<T>::kStates ? Ratio<T>::kCavityRows : group.dims[k];
    return rows * kLanes<T>;
  }
  Index range_size(const TileRange& range) const { return (range.end - range.begin) * tile_size(range); }
  Index ranges_size(int begin, int end) const {
    Index total = 0;
    for (int r = begin; r < end; ++r) total += range_size(plan_.ranges[r]);
    return total;
  }
  Index nodes_size(Index begin, Index end) const {
    Index rows = 0;
    if (mean_field_)
      for (Index t = begin; t < end; ++t) rows += plan_.node_tiles[t].states;
    return rows * kLanes<T>;
  }
  Index sweep_size() const {
    Index total = 0;
    total += ranges_size(0, static_cast<int>(plan_.ranges.size()));
    for (const Part& part : plan_.stages) total += nodes_size(part.nodes_begin, part.nodes_end);
    return total;
  }

 private:
  const Plan& plan_;
  const bool mean_field_, ratios_;
};

}  // namespace riskfield::RISKFIELD_ISA
