// Random graphs and numbers for the program `exercise`.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>

#include "../run.hpp"

namespace riskfield {

inline std::mt19937_64 generator;

inline Index draw(Index low, Index high) { return std::uniform_int_distribution<Index>(low, high)(generator); }
inline double uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(generator); }

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// A graph in the layout of the Python package, with all variables and factors in groups of equal shape.
struct Graph {
  std::vector<Index> num_states, node_start, rank, level;
  struct Factors {
    std::vector<int> shape;
    std::vector<Index> variables, tables, shared;
    bool tied;
  };
  std::vector<Factors> groups;
  Index theta_size = 0, mu_size = 0, node_size = 0, message_size = 0, num_factors = 0;
  std::vector<GroupInput> input;
  Sweep sweep = Sweep::kForwardBackward;

  Index num_variables() const { return static_cast<Index>(num_states.size()); }

  void add(std::vector<int> shape, bool tied) { groups.push_back({std::move(shape), {}, {}, {}, tied}); }
  void connect(std::size_t group, const std::vector<Index>& variables) {
    groups[group].variables.insert(groups[group].variables.end(), variables.begin(), variables.end());
  }

  // Adds a factor to the group of its shape, which may be new; `shapes` are those of the groups.
  void connect_by_shape(std::vector<std::vector<int>>& shapes, const std::vector<Index>& variables, bool tied) {
    std::vector<int> shape;
    for (Index v : variables) shape.push_back(static_cast<int>(num_states[v]));
    auto found = std::find(shapes.begin(), shapes.end(), shape);
    if (found == shapes.end()) {
      found = shapes.insert(shapes.end(), shape);
      add(shape, tied);
    }
    connect(static_cast<std::size_t>(found - shapes.begin()), variables);
  }

  // Numbers everything; `order` is that of the updates.
  void finish(const std::vector<Index>& order) {
    for (Index states : num_states) {
      node_start.push_back(node_size);
      node_size += states;
    }
    theta_size = mu_size = node_size;
    for (Factors& group : groups) {
      const Index arity = static_cast<Index>(group.shape.size());
      const Index count = static_cast<Index>(group.variables.size()) / arity;
      const Index entries = std::accumulate(group.shape.begin(), group.shape.end(), Index(1), std::multiplies<>());
      const Index num_tables = group.tied ? std::min<Index>(count, 3) : count;
      for (Index f = 0; f < count; ++f) group.tables.push_back(group.tied ? f % num_tables : f);
      group.shared = group.tables;
      UserGroup layout{group.shape, count, group.tables, theta_size, mu_size, message_size, num_factors};
      input.push_back({layout, group.variables.data(), group.tied ? group.shared.data() : nullptr});
      theta_size += num_tables * entries;
      mu_size += count * entries;
      for (int states : group.shape) message_size += count * states;
      num_factors += count;
    }
    rank.resize(order.size());
    for (std::size_t k = 0; k < order.size(); ++k) rank[order[k]] = static_cast<Index>(k);
    level.assign(order.size(), 0);
    if (sweep == Sweep::kAllAtOnce) return;
    std::vector<std::vector<Index>> neighbours(order.size());
    for (const Factors& group : groups) {
      const std::size_t arity = group.shape.size();
      for (std::size_t f = 0; f < group.variables.size(); f += arity)
        for (std::size_t a = 0; a < arity; ++a)
          for (std::size_t b = 0; b < arity; ++b)
            if (a != b) neighbours[group.variables[f + a]].push_back(group.variables[f + b]);
    }
    for (Index v : order)
      for (Index w : neighbours[v])
        if (rank[w] < rank[v]) level[v] = std::max(level[v], level[w] + 1);
  }
};

inline std::vector<Index> natural_order(Index n) {
  std::vector<Index> order(n);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

inline void make_grid(Graph& graph, Index rows, Index columns, int states, bool tied) {
  graph.num_states.assign(rows * columns, states);
  graph.add({states, states}, tied);
  for (Index r = 0; r < rows; ++r)
    for (Index c = 0; c < columns; ++c) {
      if (c + 1 < columns) graph.connect(0, {r * columns + c, r * columns + c + 1});
      if (r + 1 < rows) graph.connect(0, {r * columns + c, (r + 1) * columns + c});
    }
  graph.finish(natural_order(rows * columns));
}

// Variables of 2 to 4 states, factors of one to three variables.
inline void make_irregular(Graph& graph, Index n) {
  for (Index v = 0; v < n; ++v) graph.num_states.push_back(2 + v % 3);
  std::vector<std::vector<int>> shapes;
  for (Index f = 0; f < 2 * n; ++f) {
    std::vector<Index> variables;
    const std::size_t arity = static_cast<std::size_t>(draw(1, 3));
    while (variables.size() < arity) {
      const Index v = draw(0, n - 1);
      if (std::find(variables.begin(), variables.end(), v) == variables.end()) variables.push_back(v);
    }
    graph.connect_by_shape(shapes, variables, draw(0, 3) == 0);
  }
  std::vector<Index> order = natural_order(n);
  std::shuffle(order.begin(), order.end(), generator);
  graph.finish(order);
}

// Trees of variables of 1 to 5 states, joined by factors of two to four variables.
inline void make_forest(Graph& graph, Index n, bool tied) {
  for (Index v = 0; v < n; ++v) graph.num_states.push_back(draw(1, 5));
  std::vector<std::vector<int>> shapes;
  for (Index v = 1; v < n;) {
    std::vector<Index> variables{draw(0, v - 1)};
    const Index arity = std::min(draw(2, 4), n - v + 1);
    while (static_cast<Index>(variables.size()) < arity) variables.push_back(v++);
    std::shuffle(variables.begin(), variables.end(), generator);
    if (draw(0, 9) == 0) continue;  // the next factor starts a tree of its own, or joins another one
    graph.connect_by_shape(shapes, variables, tied);
  }
  graph.finish(natural_order(n));
}

template <class T>
std::vector<T> random_numbers(Index count, double scale) {
  std::vector<T> numbers;
  for (Index k = 0; k < count; ++k) {
    if constexpr (std::is_same<T, Dual>::value)
      numbers.push_back(Dual(uniform(-scale, scale), uniform(-1, 1)));
    else
      numbers.push_back(static_cast<T>(uniform(-scale, scale)));
  }
  return numbers;
}

}  // namespace riskfield
