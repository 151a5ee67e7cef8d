// Where the caller keeps the numbers of a factor.
#pragma once

#include "plan.hpp"

namespace riskfield {

// Its table.
inline Index user_table(const Plan& plan, const Group& group, Index f) {
  const UserGroup& from = plan.user_groups[group.user_group[f]];
  return from.theta_start + from.tables[group.user_row[f]] * group.table_size;
}

// Its message to one slot.
inline Index user_message(const Plan& plan, const Group& group, Index f, int slot) {
  const UserGroup& from = plan.user_groups[group.user_group[f]];
  const int axis = group.permutations[group.permutation[f]][slot];
  Index start = from.message_start;
  for (int k = 0; k < axis; ++k) start += from.count * from.shape[k];
  return start + group.user_row[f] * from.shape[axis];
}

// Its marginals.
inline Index user_marginals(const Plan& plan, const Group& group, Index f) {
  return plan.user_groups[group.user_group[f]].mu_start + group.user_row[f] * group.table_size;
}

}  // namespace riskfield
