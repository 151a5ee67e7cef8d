#include "plan.hpp"

#include <algorithm>
#include <numeric>

#include "plan_steps.hpp"

namespace riskfield {

Plan::Plan(int lanes_, int copies_, int parts_, bool inside_, Sweep sweep_, Index num_variables,
           const Index* num_states, const Index* node_start_, const Index* rank, const Index* level,
           const std::vector<GroupInput>& input)
    : lanes(lanes_),
      copies(copies_),
      parts(parts_),
      inside(inside_),
      sweep(sweep_),
      num_nodes(num_variables * copies_),
      node_start(node_start_, node_start_ + num_variables) {
  for (Index v = 0; v < num_variables; ++v) max_states = std::max(max_states, static_cast<int>(num_states[v]));
  all_binary = std::all_of(num_states, num_states + num_variables, [](Index n) { return n == 2; });
  message_size = (max_states + 2 * lanes - 1) / lanes * lanes;  // the neutral message, with room for a vector
  const Placement placement = make_placement(*this, num_states, rank, level, input);
  make_tiles(*this, placement);
  find_waits(*this, placement);
  for (Group& group : groups) {
    const Index each = std::accumulate(group.dims.begin(), group.dims.end(), Index(0));
    group.gradients = gradient_size;
    gradient_size += group.count * each;
    group.parcels = parcels_size;
    for (Index t = group.part_tiles[parts]; t < group.part_tiles[parts + 1]; ++t)
      parcels_size += group.all_tiles[t].count * each;
  }
  if (copies == 1) estimate_costs();
  for (const GroupInput& group : input) user_groups.push_back(group.layout);
}

// The constants were measured on grids and random graphs with 2 to 8 states.
void Plan::estimate_costs() {
  constexpr double kRange = 10, kTile = 4, kGathered = 0.5;
  auto of_tile = [&](double work, bool contiguous) { return work * (contiguous ? 1 : 1 + kGathered * lanes); };
  level_cost = batch_cost = kRange * static_cast<double>(ranges.size());
  for (const TileRange& range : ranges) {
    const Group& group = groups[range.group];
    const double work = kTile + static_cast<double>(group.table_size);
    for (Index t = range.begin; t < range.end; ++t) {
      const FactorTile& tile = factor_tiles[t];
      level_cost += is_inside(group, tile) ? inside_cost(group) * tile.count : of_tile(work, tile.contiguous);
      batch_cost += work * tile.count;  // each member of the tile has one of its own
    }
  }
  for (const Part& part : stages)
    for (Index t = part.nodes_begin; t < part.nodes_end; ++t) {
      const NodeTile& tile = node_tiles[t];
      const double work = tile.states * (1.0 + tile.degree);
      level_cost += tile.stride == 1 ? work / lanes : of_tile(work, tile.contiguous);
      batch_cost += work * tile.count;
    }
}

}  // namespace riskfield
