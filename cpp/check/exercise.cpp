// Exercises the engine on random graphs, for the sanitizers: plans, sweeps, marginals, messages, gradients through
// tapes, checkpoints, fixed points and counting numbers, dual numbers, steps along a direction, exact inference on
// forests, one thread and several.
//
//     exercise ISA SEED ROUNDS
//
// Compares marginals and messages on one thread with those on several, bit by bit, and gradients up to rounding; all
// of them bit by bit where one thread takes over the work of several. Checks that marginals sum to one. The values
// themselves are tested from Python against other implementations.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>

#include "../interrupt.hpp"
#include "../run.hpp"
#include "../threads.hpp"
#include "exercise_forests.hpp"
#include "random_graphs.hpp"

namespace {

using namespace riskfield;

template <class T>
std::unique_ptr<Run<T>> make_run(const Engine& engine, const RunInput<T>& input, int threads) {
  if constexpr (std::is_same<T, double>::value) return engine.run_double(input, threads);
  if constexpr (std::is_same<T, float>::value) return engine.run_float(input, threads);
  if constexpr (std::is_same<T, Dual>::value) return engine.run_dual(input, threads);
}

// In a stage, a thread reads no message that another one writes, unless a barrier stands between.
void check_parts(const Plan& plan) {
  if (plan.sweep == Sweep::kAllAtOnce) return;
  for (Index s = 0; s < plan.num_stages(); ++s) {
    std::map<Index, int> writer;  // address of a message's first entry -> part
    for (int part = 0; part < plan.parts; ++part) {
      const Part& work = plan.stages[s * plan.parts + part];
      for (int r = work.ranges_begin; r < work.ranges_end; ++r) {
        const TileRange& range = plan.ranges[r];
        const Group& group = plan.groups[range.group];
        for (Index t = range.begin; t < range.end; ++t) {
          const FactorTile& tile = plan.factor_tiles[t];
          for (int l = 0; l < tile.count; ++l) {
            const Index f = tile.contiguous ? tile.first + l : group.lanes[tile.first + l];
            const bool first = writer.emplace(group.message[f * group.arity + range.slot], part).second;
            require(first, "a message is written once in a stage");
          }
        }
      }
    }
    for (int part = 0; part < plan.parts; ++part) {
      const Part& work = plan.stages[s * plan.parts + part];
      for (Index t = work.nodes_begin; t < work.nodes_end; ++t) {
        const NodeTile& tile = plan.node_tiles[t];
        for (int d = 0; d < tile.degree; ++d) {
          const Connection& connection = plan.connections[tile.connections + d];
          for (int l = 0; l < (connection.contiguous ? plan.lanes : tile.count); ++l) {
            const auto found = writer.find(connection.contiguous ? connection.message + l
                                                                 : plan.lane_messages[connection.message + l]);
            require(found == writer.end() || found->second == part, "a thread reads only the messages it writes");
          }
        }
      }
    }
  }
}

// What the backward pass of one part reaches before the tiles between parts belongs to no other part.
void check_between(const Plan& plan) {
  std::vector<int> owner(plan.num_nodes, -1);
  for (std::size_t k = 0; k < plan.stages.size(); ++k)
    for (Index t = plan.stages[k].nodes_begin; t < plan.stages[k].nodes_end; ++t)
      for (int l = 0; l < plan.node_tiles[t].count; ++l)
        owner[plan.node_tiles[t].first + l] = static_cast<int>(k) % plan.parts;
  auto check_tile = [&](const Group& group, const FactorTile& tile, int part) {
    for (int l = 0; l < tile.count; ++l) {
      const Index f = tile.contiguous ? tile.first + l : group.lanes[tile.first + l];
      for (int k = 0; k < group.arity; ++k) {
        const int found = owner[group.position[f * group.arity + k]];
        require(found == part || found < 0, "a thread goes back to nodes of its own part");
      }
    }
  };
  for (std::size_t k = 0; k < plan.stages.size(); ++k)
    for (int r = plan.stages[k].ranges_begin; r < plan.stages[k].ranges_end; ++r) {
      const TileRange& range = plan.ranges[r];
      require(range.begin <= range.between && range.between <= range.end, "tiles between parts come last");
      for (Index t = range.begin; t < range.between; ++t)
        check_tile(plan.groups[range.group], plan.factor_tiles[t], static_cast<int>(k) % plan.parts);
    }
  for (const Group& group : plan.groups) {
    require(group.part_tiles.back() == static_cast<Index>(group.all_tiles.size()), "every factor has a tile");
    for (int part = 0; part < plan.parts; ++part)
      for (Index t = group.part_tiles[part]; t < group.part_tiles[part + 1]; ++t)
        check_tile(group, group.all_tiles[t], part);
  }
}

struct Settings {
  Kind kind;
  double damping, scale;
  Index record, batch;
  bool uniform_counting, along, impossible, batch_lanes;
};

template <class T>
struct Results {
  std::vector<T> numbers, gradients;  // marginals and messages; of theta
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Asks a run for everything.
template <class T>
Results<T> results(const Engine& engine, const Graph& graph, const Settings& settings, int threads,
                   const std::vector<T>& theta, const std::vector<T>& grad_mu,
                   const std::vector<double>& factor_counting, const std::vector<double>& node_counting) {
  const Call call(nullptr);
  const int lanes = std::is_same<T, float>::value ? engine.lanes_float : engine.lanes_double;
  RunInput<T> input;
  const Index items = settings.batch_lanes ? (settings.batch + lanes - 1) / lanes : settings.batch;
  const int parts = items < threads ? threads : 1;
  input.plan =
      std::make_shared<Plan>(lanes, settings.batch_lanes ? lanes : 1, parts, settings.kind == Kind::kSumProduct,
                             graph.sweep, graph.num_variables(), graph.num_states.data(), graph.node_start.data(),
                             graph.rank.data(), graph.level.data(), graph.input);
  check_parts(*input.plan);
  check_between(*input.plan);
  input.kind = settings.kind;
  input.damping = settings.damping;
  input.record = settings.record;
  const std::vector<double> steps{-0.1, 0.0, 0.2};
  const std::vector<T> direction = theta;
  input.rows = settings.batch;
  input.batch = settings.along ? 3 * settings.batch : settings.batch;
  std::vector<double> each_step;
  for (double step : steps) each_step.insert(each_step.end(), settings.batch, step);
  input.direction = settings.along ? direction.data() : nullptr;
  input.steps = settings.along ? each_step.data() : nullptr;
  input.theta_size = graph.theta_size;
  input.node_size = graph.node_size;
  input.message_size = graph.message_size;
  input.mu_size = graph.mu_size;
  input.theta = theta.data();
  input.factor_counting = factor_counting.data();
  input.node_counting = node_counting.data();
  input.state = nullptr;
  const Index batch = input.batch;
  Results<T> out;
  std::vector<T> mu(batch * graph.mu_size);
  auto append = [](std::vector<T>& to, const std::vector<T>& from) { to.insert(to.end(), from.begin(), from.end()); };
  auto keep = [&](const std::vector<T>& numbers) { append(out.numbers, numbers); };
  std::vector<double> residual(batch);
  std::vector<Index> ran(batch);
  const Index state_size = settings.kind == Kind::kMeanField ? graph.node_size : graph.message_size;
  std::vector<T> state(batch * state_size);
  {
    auto run = make_run<T>(engine, input, threads);
    run->advance(2, -1, threads, residual.data(), ran.data());
    run->advance(2, 1e-4, threads, residual.data(), ran.data());
    run->marginals(nullptr, mu.data(), threads);
    keep(mu);
    run->state(state.data(), threads);
    keep(state);
    if (settings.along) {
      run->marginals(each_step.data(), mu.data(), threads);
      keep(mu);
    }
    std::vector<T> grad_theta(batch * graph.theta_size);
    if (settings.kind != Kind::kMaxProduct && settings.record != 0 && settings.record != kLastSweep)
      run->backward(grad_mu.data(), grad_theta.data(), threads);
    append(out.gradients, grad_theta);
    if constexpr (std::is_same<T, double>::value)
      if (settings.kind == Kind::kSumProduct && settings.record == kEverySweep) {
        std::vector<double> grad_counting(graph.num_factors);
        run->backward_counting(grad_mu.data(), grad_theta.data(), grad_counting.data(), threads);
        append(out.gradients, grad_theta);
        append(out.gradients, grad_counting);
      }
    if constexpr (!std::is_same<T, Dual>::value)
      if (settings.kind != Kind::kMaxProduct && settings.record == kLastSweep) {
        run->backward_fixed_point(grad_mu.data(), grad_theta.data(), 4, 1e-6, threads, residual.data(), ran.data());
        append(out.gradients, grad_theta);
      }
  }
  input.state = state.data();  // a warm start
  auto run = make_run<T>(engine, input, threads);
  run->advance(1, -1, threads, residual.data(), ran.data());
  run->marginals(nullptr, mu.data(), threads);
  keep(mu);
  return out;
}

double value(double number) { return number; }
double value(Dual number) { return number.value; }

template <class T>
void exercise(const Engine& engine, const Graph& graph, Settings settings) {
  std::vector<T> theta = random_numbers<T>(settings.batch * graph.theta_size, settings.scale);
  if (settings.impossible) theta[static_cast<std::size_t>(draw(0, graph.theta_size - 1))] = T(-INFINITY);
  const Index items = settings.along ? 3 * settings.batch : settings.batch;
  const std::vector<T> grad_mu = random_numbers<T>(items * graph.mu_size, 1);
  std::vector<double> factor_counting, node_counting;
  for (Index f = 0; f < graph.num_factors; ++f)
    factor_counting.push_back(settings.uniform_counting ? 0.5 : uniform(0.3, 1.2));
  if (!settings.uniform_counting)  // tied factors share a counting number
    for (const GroupInput& group : graph.input)
      for (Index f = 0; group.shared && f < group.layout.count; ++f)
        factor_counting[group.layout.factor_start + f] = 0.4 + 0.1 * static_cast<double>(group.shared[f] % 5);
  for (Index v = 0; v < graph.num_variables(); ++v)
    node_counting.push_back(settings.uniform_counting ? 1 : uniform(0.8, 1.5));
  const auto alone = results<T>(engine, graph, settings, 1, theta, grad_mu, factor_counting, node_counting);
  for (int threads : {2, 3}) {
    assume_crowded(1000);
    const auto crowded = results<T>(engine, graph, settings, threads, theta, grad_mu, factor_counting, node_counting);
    assume_crowded(0);
    const auto together = results<T>(engine, graph, settings, threads, theta, grad_mu, factor_counting, node_counting);
    require(same_bits(together.numbers, crowded.numbers) && same_bits(together.gradients, crowded.gradients),
            "one thread takes over the work of several");
    // Steps and slopes are packed by vector or by scalar arithmetic, which round differently, as tiles happen to be
    // cut.
    if (std::is_same<T, Dual>::value || settings.along) continue;
    require(same_bits(together.numbers, alone.numbers), "threads give the same marginals and messages");
    if constexpr (std::is_same<T, double>::value)  // strong couplings magnify rounding
      if (settings.scale <= 1 && !settings.impossible) {
        double largest = 0, apart = 0;
        for (std::size_t k = 0; k < alone.gradients.size(); ++k) {
          largest = std::max(largest, std::abs(alone.gradients[k]));
          apart = std::max(apart, std::abs(together.gradients[k] - alone.gradients[k]));
        }
        require(apart <= 1e-8 * largest, "threads give the same gradients");
      }
  }
  const double tolerance = std::is_same<T, float>::value ? 1e-4 : 1e-9;
  for (Index v = 0; v < graph.num_variables() && !settings.impossible; ++v) {
    double total = 0;
    for (Index x = 0; x < graph.num_states[v]; ++x) total += value(alone.numbers[graph.node_start[v] + x]);
    require(std::abs(total - 1) < tolerance, "marginals sum to one");
  }
}

void round(const Engine& engine) {
  const Kind kinds[] = {Kind::kSumProduct, Kind::kSumProduct, Kind::kMaxProduct, Kind::kMeanField};
  const Kind kind = kinds[draw(0, 3)];
  Graph graph;
  graph.sweep = kind == Kind::kMeanField ? Sweep::kLevelByLevel
                : draw(0, 3) == 0        ? Sweep::kAllAtOnce
                                         : Sweep::kForwardBackward;
  if (draw(0, 1) == 0)
    make_grid(graph, draw(1, 40), draw(1, 40), static_cast<int>(draw(2, draw(0, 2) == 0 ? 20 : 6)), draw(0, 2) == 0);
  else
    make_irregular(graph, draw(3, 60));
  const Index records[] = {0, kEverySweep, kLastSweep, 2};
  Settings settings;
  settings.kind = kind;
  settings.damping = settings.kind == Kind::kSumProduct && draw(0, 1) == 0 ? 0.3 : 0.0;
  settings.scale = draw(0, 1) == 0 ? 1 : 200;
  settings.record = records[draw(0, 3)];
  settings.batch_lanes = draw(0, 1) == 0;
  settings.batch = draw(1, settings.batch_lanes ? 20 : 3);
  settings.uniform_counting = draw(0, 1) == 0;
  settings.along = draw(0, 3) == 0;
  settings.impossible = draw(0, 4) == 0;
  exercise<double>(engine, graph, settings);
  exercise<float>(engine, graph, settings);
  exercise<Dual>(engine, graph, settings);

  Graph forest;
  make_forest(forest, draw(1, 60), draw(0, 1) == 0);
  exercise_forests(engine, forest);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: exercise ISA SEED ROUNDS\n");
    return 2;
  }
  try {
    const Engine& chosen = engine(arguments[1]);
    const long first = std::atol(arguments[2]), rounds = std::atol(arguments[3]);
    for (long seed = first; seed < first + rounds; ++seed) {
      generator.seed(static_cast<std::uint64_t>(seed));
      round(chosen);
    }
    std::printf("%s: seeds %ld to %ld, nothing found\n", chosen.name, first, first + rounds - 1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
