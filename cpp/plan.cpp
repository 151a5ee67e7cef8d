#include "plan.hpp"

#include <algorithm>
#include <numeric>

#include "plan_steps.hpp"

namespace riskfield {

Plan::Plan(int lanes_, int copies_, int parts_, Sweep sweep_, Index num_variables, const Index* num_states,
           const Index* node_start_, const Index* rank, const Index* level, const std::vector<GroupInput>& input)
    : lanes(lanes_),
      copies(copies_),
      parts(parts_),
      sweep(sweep_),
      num_nodes(num_variables * copies_),
      node_start(node_start_, node_start_ + num_variables) {
  for (Index v = 0; v < num_variables; ++v) max_states = std::max(max_states, static_cast<int>(num_states[v]));
  message_size = (max_states + 2 * lanes - 1) / lanes * lanes;  // the neutral message, with room for a vector
  make_tiles(*this, make_placement(*this, num_states, rank, level, input));
  for (Group& group : groups) {
    group.gradients = gradient_size;
    gradient_size += group.count * std::accumulate(group.dims.begin(), group.dims.end(), Index(0));
  }
  if (copies == 1) estimate_costs();
  for (const GroupInput& group : input) user_groups.push_back(group.layout);
}

// The constants were measured on grids and random graphs with 2 to 8 states.
void Plan::estimate_costs() {
  constexpr double kRange = 10, kTile = 4, kGathered = 0.5;
  auto add = [&](double work, int count, bool contiguous) {
    level_cost += work * (contiguous ? 1 : 1 + kGathered * lanes);
    batch_cost += work * count;  // each member of the tile has one of its own
  };
  level_cost = batch_cost = kRange * static_cast<double>(ranges.size());
  for (const TileRange& range : ranges) {
    const double work = kTile + static_cast<double>(groups[range.group].table_size);
    for (Index t = range.begin; t < range.end; ++t) add(work, factor_tiles[t].count, factor_tiles[t].contiguous);
  }
  for (const Part& part : stages)
    for (Index t = part.nodes_begin; t < part.nodes_end; ++t)
      add(node_tiles[t].states * (1.0 + node_tiles[t].degree), node_tiles[t].count, node_tiles[t].contiguous);
}

}  // namespace riskfield
