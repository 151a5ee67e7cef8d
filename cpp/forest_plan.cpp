// The order of exact inference on a forest.
#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "forest.hpp"
#include "interrupt.hpp"

namespace riskfield {
namespace {

// A factor as the caller numbers it.
struct Member {
  std::int32_t group, row;
};

struct ForestPlanner {
  ForestPlan& plan;
  const Index num_variables;
  const Index* num_states;
  const Index* node_start;
  const std::vector<GroupInput>& groups;
  std::vector<Member> members;
  std::vector<Index> degree_start, incident;      // variable -> its factors, in `members`
  std::vector<std::int32_t> position;             // variable -> position, -1 before it is reached
  std::map<std::pair<Index, int>, int> table_of;  // (start in theta, axis of the parent)
  std::map<std::pair<int, int>, int> entries_of;  // (group, axis of the parent)
  Ticker tick;

  void run() {
    collect();
    position.assign(num_variables, -1);
    for (Index v = 0; v < num_variables; ++v)
      if (position[v] < 0) visit_tree(v);
    for (std::size_t i = 0; i < plan.variables.size(); ++i)
      plan.most_states = std::max(plan.most_states, plan.variables[i].states);
    sort_by_table();
  }

  const Index* scope(const Member& m) const {
    return groups[m.group].variables + m.row * static_cast<Index>(groups[m.group].layout.shape.size());
  }
  int arity(const Member& m) const { return static_cast<int>(groups[m.group].layout.shape.size()); }

  void collect() {
    degree_start.assign(num_variables + 1, 0);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const UserGroup& layout = groups[g].layout;
      Index table = 1, states = 0;
      for (int d : layout.shape) {
        table *= d;
        states += d;
      }
      Index last = -1;
      for (Index t : layout.tables) last = std::max(last, t);
      plan.theta_size = std::max(plan.theta_size, layout.theta_start + (last + 1) * table);
      plan.mu_size = std::max(plan.mu_size, layout.mu_start + layout.count * table);
      plan.user_message_size = std::max(plan.user_message_size, layout.message_start + layout.count * states);
      for (Index row = 0; row < layout.count; ++row) {
        members.push_back({static_cast<std::int32_t>(g), static_cast<std::int32_t>(row)});
        for (int k = 0; k < arity(members.back()); ++k) ++degree_start[scope(members.back())[k] + 1];
      }
    }
    for (Index v = 0; v < num_variables; ++v) degree_start[v + 1] += degree_start[v];
    incident.resize(degree_start[num_variables]);
    std::vector<Index> next(degree_start.begin(), degree_start.end() - 1);
    for (std::size_t f = 0; f < members.size(); ++f)
      for (int k = 0; k < arity(members[f]); ++k) incident[next[scope(members[f])[k]]++] = static_cast<Index>(f);
  }

  // Breadth first; every variable reaches its factors but the one it was reached by.
  void visit_tree(Index root) {
    std::vector<std::pair<Index, Index>> queue{{root, -1}};  // variable, the factor it was reached by
    place_variable(root, true);
    for (std::size_t k = 0; k < queue.size(); ++k) {
      const auto [v, from] = queue[k];
      ForestPlan::Variable& variable = plan.variables[position[v]];
      variable.factors_begin = static_cast<int>(plan.factors.size());
      variable.factors_end = variable.factors_begin;
      for (Index e = degree_start[v]; e < degree_start[v + 1]; ++e) {
        tick(1);
        if (incident[e] == from) continue;
        const Member& member = members[incident[e]];
        for (int a = 0; a < arity(member); ++a) {
          const Index child = scope(member)[a];
          if (child == v) continue;
          if (position[child] >= 0) throw std::invalid_argument("the graph has a cycle");
          queue.push_back({child, incident[e]});
          place_variable(child, false);
        }
        place_factor(member, v);
      }
      plan.variables[position[v]].factors_end = static_cast<int>(plan.factors.size());
    }
  }

  void place_variable(Index v, bool root) {
    position[v] = static_cast<std::int32_t>(plan.variables.size());
    plan.variables.push_back({node_start[v], static_cast<int>(num_states[v]), 0, 0, root});
    plan.node_size += num_states[v];
  }

  void place_factor(const Member& member, Index parent) {
    const UserGroup& layout = groups[member.group].layout;
    const Index* variables = scope(member);
    const int n = arity(member);
    const int axis = static_cast<int>(std::find(variables, variables + n, parent) - variables);
    std::vector<Index> starts(n);
    Index start = layout.message_start;
    for (int k = 0; k < n; ++k) {
      starts[k] = start + member.row * layout.shape[k];
      start += layout.count * layout.shape[k];
    }
    ForestPlan::Factor factor;
    factor.parent = position[parent];
    factor.arity = n;
    factor.children = static_cast<int>(plan.children.size());
    factor.messages = static_cast<Index>(plan.message_starts.size());
    plan.message_starts.push_back(starts[axis]);
    for (int k = 0; k < n; ++k)
      if (k != axis) {
        plan.children.push_back(position[variables[k]]);
        plan.message_starts.push_back(starts[k]);
      }
    factor.table = find_table(member, axis);
    const ForestPlan::Table& table = plan.tables[factor.table];
    factor.place = plan.message_size;
    plan.message_size += table.rows;
    factor.mu = layout.mu_start + member.row * table.size();
    plan.most_arity = std::max(plan.most_arity, n);
    plan.most_columns = std::max(plan.most_columns, table.columns);
    plan.largest_table = std::max(plan.largest_table, table.size());
    plan.factors.push_back(factor);
  }

  int find_table(const Member& member, int axis) {
    const UserGroup& layout = groups[member.group].layout;
    Index size = 1;
    for (int d : layout.shape) size *= d;
    const Index theta = layout.theta_start + layout.tables[member.row] * size;
    const auto found = table_of.emplace(std::make_pair(theta, axis), static_cast<int>(plan.tables.size()));
    if (!found.second) {
      ++plan.tables[found.first->second].factors;
      return found.first->second;
    }
    bool adds = false;
    for (int k = 0; k < static_cast<int>(layout.shape.size()); ++k)
      adds |= k != axis && table_of.count(std::make_pair(theta, k)) > 0;
    const auto map = entries_of.emplace(std::make_pair(member.group, axis), static_cast<int>(plan.entry_maps.size()));
    if (map.second) plan.entry_maps.push_back(entries(layout.shape, axis));
    const int rows = layout.shape[axis];
    plan.tables.push_back({theta, plan.table_size, rows, size / rows, map.first->second, 1, adds, axis == 0});
    plan.table_size += size;
    return found.first->second;
  }

  static std::vector<Index> entries(const std::vector<int>& shape, int axis) {
    const int n = static_cast<int>(shape.size());
    std::vector<Index> stride(n, 1);
    for (int k = n - 2; k >= 0; --k) stride[k] = stride[k + 1] * shape[k + 1];
    std::vector<int> order{axis};
    for (int k = 0; k < n; ++k)
      if (k != axis) order.push_back(k);
    std::vector<Index> map{0};
    for (int k : order) {
      std::vector<Index> longer;
      for (Index from : map)
        for (int x = 0; x < shape[k]; ++x) longer.push_back(from + x * stride[k]);
      map = std::move(longer);
    }
    return map;
  }

  void sort_by_table() {
    plan.by_table.resize(plan.factors.size());
    std::iota(plan.by_table.begin(), plan.by_table.end(), 0);
    std::stable_sort(plan.by_table.begin(), plan.by_table.end(),
                     [&](Index a, Index b) { return plan.factors[a].table < plan.factors[b].table; });
  }
};

}  // namespace

ForestPlan::ForestPlan(Index num_variables, const Index* num_states, const Index* node_start,
                       const std::vector<GroupInput>& groups) {
  for (Index v = 0; v < num_variables; ++v) theta_size = std::max(theta_size, node_start[v] + num_states[v]);
  mu_size = theta_size;
  ForestPlanner{*this, num_variables, num_states, node_start, groups, {}, {}, {}, {}, {}, {}, {}}.run();
}

}  // namespace riskfield
