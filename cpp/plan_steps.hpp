// The two steps of making a plan: first everything gets its place, then updates are gathered into tiles and stages.
#pragma once

#include <vector>

#include "plan.hpp"

namespace riskfield {

// A maximal run of factors that stand next to each other in every slot, or a piece of one not longer than a vector.
struct Piece {
  Index first;
  std::int32_t count;
  bool long_run;  // whether the run it belongs to fills at least half a vector
};

// What the second step needs to know of the first, beside the plan itself.
struct Placement {
  Index num_levels = 0;
  std::vector<Index> node_level;           // packed node
  std::vector<std::int32_t> node_part;     // packed node: which part of its level updates it
  std::vector<std::vector<Piece>> pieces;  // group
};

// Give nodes, messages and tables their addresses.
Placement make_placement(Plan& plan, const Index* num_states, const Index* rank, const Index* level,
                         const std::vector<GroupInput>& input);

// Gather the updates into tiles and these into stages.
void make_tiles(Plan& plan, const Placement& placement);

// Whether the states of node q lie next to those of p, and both are updated together.
inline bool side_by_side(const Plan& plan, const Placement& placement, Index p, Index q) {
  return placement.node_level[p] == placement.node_level[q] && placement.node_part[p] == placement.node_part[q] &&
         plan.states[p] == plan.states[q] && plan.node_stride[p] == plan.node_stride[q] &&
         plan.node_address[q] == plan.node_address[p] + 1;
}

}  // namespace riskfield
