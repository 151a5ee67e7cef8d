// Exact inference on forests, for the program `exercise`.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "../forest.hpp"
#include "../interrupt.hpp"
#include "../run.hpp"
#include "random_graphs.hpp"

namespace riskfield {

// Everything a run computes.
template <class T>
std::vector<T> forest_results(const Engine& engine, const Graph& graph, const std::shared_ptr<const ForestPlan>& plan,
                              const std::vector<T>& theta, Index batch, bool wide, int threads) {
  const Call call(nullptr);
  const ForestInput<T> input{plan, theta.data(), batch, wide};
  std::unique_ptr<ForestRun<T>> run;
  if constexpr (std::is_same<T, double>::value)
    run = engine.forest_double(input, threads);
  else
    run = engine.forest_float(input, threads);
  std::vector<T> out;
  // Returns where to write so many numbers for every item.
  auto more = [&](Index size) {
    out.resize(out.size() + static_cast<std::size_t>(batch * size));
    return out.data() + out.size() - batch * size;
  };
  run->marginals(more(graph.node_size), true, threads);
  run->marginals(more(graph.mu_size), false, threads);
  run->statistics(more(graph.theta_size), threads);
  run->messages(more(graph.message_size), threads);
  std::vector<T> cotangents(batch * graph.mu_size);
  for (std::size_t k = 0; k < cotangents.size(); ++k) cotangents[k] = static_cast<T>(k % 7) - 3;
  run->backward(cotangents.data(), false, more(graph.theta_size), threads);
  run->backward(cotangents.data(), true, more(graph.theta_size), threads);
  std::vector<double> log_z(batch);
  run->log_partition(log_z.data());
  for (double value : log_z) out.push_back(static_cast<T>(value));
  return out;
}

template <class T>
void exercise_forest(const Engine& engine, const Graph& graph, const std::shared_ptr<const ForestPlan>& plan,
                     bool same_tables) {
  const Index batch = draw(1, 20);
  const bool wide = draw(0, 3) == 0, impossible = draw(0, 4) == 0;
  std::vector<T> theta = random_numbers<T>(batch * graph.theta_size, draw(0, 3) == 0 ? 400 : 2);
  if (impossible) theta[static_cast<std::size_t>(draw(0, batch * graph.theta_size - 1))] = T(-INFINITY);
  if (same_tables)
    for (Index b = 1; b < batch; ++b)
      std::copy(theta.begin() + graph.node_size, theta.begin() + graph.theta_size,
                theta.begin() + b * graph.theta_size + graph.node_size);
  const auto alone = forest_results<T>(engine, graph, plan, theta, batch, wide, 1);
  for (int threads : {2, 3}) {
    const auto together = forest_results<T>(engine, graph, plan, theta, batch, wide, threads);
    require(
        together.size() == alone.size() && std::memcmp(together.data(), alone.data(), alone.size() * sizeof(T)) == 0,
        "threads give the same results on forests");
  }
  const double tolerance = std::is_same<T, float>::value ? 1e-4 : 1e-9;
  for (Index b = 0; b < batch && !impossible; ++b)
    for (Index v = 0; v < graph.num_variables(); ++v) {
      double total = 0;
      for (Index x = 0; x < graph.num_states[v]; ++x) total += alone[b * graph.node_size + graph.node_start[v] + x];
      require(std::abs(total - 1) < tolerance, "exact marginals sum to one");
    }
}

inline void exercise_forests(const Engine& engine, const Graph& graph) {
  const auto plan = std::make_shared<const ForestPlan>(graph.num_variables(), graph.num_states.data(),
                                                       graph.node_start.data(), graph.input);
  const bool same_tables = draw(0, 1) == 0;
  exercise_forest<double>(engine, graph, plan, same_tables);
  exercise_forest<float>(engine, graph, plan, same_tables);
}

}  // namespace riskfield
