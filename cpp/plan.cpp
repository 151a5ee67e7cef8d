#include "plan.hpp"

#include <algorithm>

#include "plan_steps.hpp"

namespace riskfield {

Plan::Plan(int lanes_, int parts_, Sweep sweep_, Index num_variables_, const Index* num_states,
           const Index* node_start_, const Index* rank, const Index* level, const std::vector<GroupInput>& input)
    : lanes(lanes_),
      parts(parts_),
      sweep(sweep_),
      num_variables(num_variables_),
      node_start(node_start_, node_start_ + num_variables_) {
  for (Index v = 0; v < num_variables; ++v) max_states = std::max(max_states, static_cast<int>(num_states[v]));
  message_size = max_states + lanes;  // the neutral message
  make_tiles(*this, make_placement(*this, num_states, rank, level, input));
  for (const GroupInput& group : input) user_groups.push_back(group.layout);
}

}  // namespace riskfield
