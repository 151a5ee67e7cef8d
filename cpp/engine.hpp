// The engine for one instruction set and one type of number. CMakeLists.txt compiles engine_double.cpp,
// engine_float.cpp and engine_dual.cpp, which instantiate it, once for each instruction set.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>

#include "backward.hpp"
#include "checkpoints.hpp"
#include "gap.hpp"
#include "packing.hpp"

namespace riskfield::RISKFIELD_ISA {

// Relative to mu g, gradients of messages at a fixed point that need not be known to the tolerance: those a saturated
// model makes far smaller than the rounding of others.
constexpr double kNegligible = 1e-8;

template <class T>
class EngineRun final : public Run<T> {
 public:
  EngineRun(const RunInput<T>& input, int threads) : context_(input), plan_(*context_.plan), sizes_(input) {
    items_.resize(input.batch);
    reserve_scratch(threads);
    for_each(input.rows, threads, [&](Index r, int thread, int team) {
      const T* state = input.state ? input.state + r * state_size() : nullptr;
      std::vector<Packed<T>> models;
      for (Index b = r; b < input.batch; b += input.rows) {
        const Index start = r * input.theta_size;
        const Theta<T> theta{input.theta + start, input.direction ? input.direction + start : nullptr,
                             input.direction ? static_cast<T>(input.steps[b]) : T(0)};
        models.push_back({&items_[b], theta});
      }
      Packer<T>(context_, state, models).pack(team);
      for (const auto& [item, theta] : models) start_beliefs(*item, theta, state, *scratch_[thread]);
    });
  }

  void advance(Index sweeps, double tol, int threads, double* residual, Index* ran) override {
    check_whole();
    reserve_scratch(threads);
    whole_ = false;
    for_each_item(threads, [&](Index b, int thread, int team) {
      // A tape is written by one thread.
      const bool together = plan_.parts > 1 && plan_.parts <= team && sizes_.record == 0;
      ran[b] = together ? advance_together(items_[b], sweeps, tol) : advance_alone(items_[b], sweeps, tol, thread);
      residual[b] = items_[b].convergence.residual;
    });
    whole_ = true;
  }

  void marginals(const double* weights, T* mu, int threads) override {
    check_whole();
    reserve_scratch(threads);
    const Index rows = weights ? sizes_.rows : sizes_.batch;
    for_each(rows, threads, [&](Index r, int thread, int team) {
      std::vector<Weighted<T>> items;
      for (Index b = r; b < sizes_.batch; b += rows)
        items.push_back({&items_[b], weights ? static_cast<T>(weights[b]) : T(1)});
      write_marginals(items, mu + r * sizes_.mu_size, thread, team);
    });
  }

  void state(T* out, int threads) override {
    check_whole();
    reserve_scratch(threads);
    for_each_item(threads, [&](Index b, int thread, int team) {
      if (context_.kind == Kind::kMeanField) {
        for_each_node(plan_, items_[b], [&](Index at, int n, const T* values, T) {
          using std::log;
          for (int x = 0; x < n; ++x) out[b * sizes_.node_size + at + x] = log(values[x]);
        });
        return;
      }
      for_each_tile(thread, team, [&](int g, int count, const auto& lanes, Scratch<T>& scratch) {
        unpack_messages<T>(context_, items_[b], g, lanes, count, scratch, out + b * sizes_.message_size);
      });
    });
  }

  void backward(const T* grad_mu, T* grad_theta, int threads) override {
    go_back(grad_mu, grad_theta, threads, [&](Index b, int thread, Backward<T>& back, Gradients<T>&) {
      Item<T>& item = items_[b];
      if (sizes_.record > 0)
        back_by_checkpoints(item, thread, back);
      else
        back_through_tape(item, back);
    });
  }

  void backward_counting(const T* grad_mu, T* grad_theta, double* grad_counting) override {
    if constexpr (std::is_same<T, double>::value) {
      constexpr bool kCounting = true;
      auto sweep_back = [&](Index b, int, Backward<T>& back, Gradients<T>&) {
        const Tape<T>& tape = items_[b].tape;
        for (Index s = tape.size(); s-- > 0;) back.template sweep<Pass::kCounting>(tape.end(s));
        back.finish_counting(grad_counting);
      };
      go_back(grad_mu, grad_theta, 1, sweep_back, kCounting);
    } else {
      throw std::logic_error("gradients of counting numbers are computed in doubles");
    }
  }

  void backward_fixed_point(const T* grad_mu, T* grad_theta, Index steps, double tol, int threads, double* residual,
                            Index* ran) override {
    if constexpr (std::is_same<T, Dual>::value)
      throw std::logic_error("the gradient at a fixed point has no derivative");
    else
      go_back(grad_mu, grad_theta, threads, [&](Index b, int, Backward<T>& back, Gradients<T>& grad) {
        ran[b] = 0;
        residual[b] = std::numeric_limits<double>::infinity();
        if (items_[b].tape.size() == 0) return;
        const T* tape = items_[b].tape.end(items_[b].tape.size() - 1);
        if (!grad.sum.get()) grad.sum.allocate(plan_.message_size);
        grad.sum.fill(0);
        double scale = 0;
        for (int l = 0; l < kLanes<T>; ++l) scale += grad.scale[l];
        for (; ran[b] < steps && residual[b] > tol; ++ran[b]) {
          grad.square = V<T>{};
          back.template sweep<Pass::kSum>(tape);
          double square = 0, total = 0;
          for (int l = 0; l < kLanes<T>; ++l) square += grad.square[l];
          for (Index k = 0; k < grad.sum.size(); ++k) total += double(grad.sum.get()[k]) * grad.sum.get()[k];
          residual[b] = square == 0 ? 0 : std::sqrt(square) / (std::sqrt(total) + kNegligible * std::sqrt(scale));
        }
        back.template sweep<Pass::kTables>(tape);
      });
  }

 private:
  void check_whole() const {
    if (!whole_) throw std::logic_error("this run was interrupted in the middle of a sweep");
  }
  Index state_size() const { return context_.kind == Kind::kMeanField ? sizes_.node_size : sizes_.message_size; }

  void reserve_scratch(int threads) {
    while (static_cast<int>(scratch_.size()) < std::max(threads, 1))
      scratch_.push_back(std::make_unique<Scratch<T>>(plan_));
  }

  // Calls body(item, thread, back, gradients) between the beginning and the end of a way back.
  template <class Body>
  void go_back(const T* grad_mu, T* grad_theta, int threads, Body body, bool counting = false) {
    check_whole();
    // One thread for each item.
    threads = std::max<int>(1, static_cast<int>(std::min<Index>(threads, static_cast<Index>(items_.size()))));
    reserve_scratch(threads);
    while (static_cast<int>(gradients_.size()) < threads) gradients_.push_back(std::make_unique<Gradients<T>>(plan_));
    for_each_item(threads, [&](Index b, int thread, int) {
      T* out = grad_theta + b * sizes_.theta_size;
      std::fill(out, out + sizes_.theta_size, T(0));
      Backward<T> back(context_, items_[b], *gradients_[thread], *scratch_[thread]);
      back.begin(grad_mu + b * sizes_.mu_size, counting);
      body(b, thread, back, *gradients_[thread]);
      back.finish(out);
    });
  }

  void back_through_tape(const Item<T>& item, Backward<T>& back) {
    for (Index s = item.tape.size(); s-- > 0;) back.template sweep<Pass::kWhole>(item.tape.end(s));
  }

  // Stretches between checkpoints are run again, with a tape, from the last to the first.
  void back_by_checkpoints(Item<T>& item, int thread, Backward<T>& back) {
    Buffer<T> messages, beliefs;
    if (!mean_field()) messages.copy(item.messages[item.current]);
    beliefs.copy(item.beliefs);
    auto restore = [&] {
      item.tape.clear();
      if (!mean_field()) item.messages[item.current].copy(messages);
      item.beliefs.copy(beliefs);
    };
    try {
      for (Index k = static_cast<Index>(item.checkpoints.size()); k-- > 0;) {
        run_again(item, k, *scratch_[thread]);
        back_through_tape(item, back);
      }
    } catch (...) {  // out of memory, or interrupted
      restore();
      throw;
    }
    restore();
  }

  // The sweeps that follow checkpoint k.
  void run_again(Item<T>& item, Index k, Scratch<T>& scratch) {
    const Index begin = k * sizes_.record, end = std::min(begin + sizes_.record, item.sweeps);
    return_to(context_, item, item.checkpoints[k], scratch);
    item.tape.clear();
    for (Index s = begin; s < end; ++s) {
      begin_sweep(scratch, -1, false);
      sweep(item, scratch, 0, plan_.parts, nullptr, end - s);
      if (plan_.sweep == Sweep::kAllAtOnce) item.current = 1 - item.current;
    }
  }

  bool mean_field() const { return context_.kind == Kind::kMeanField; }

  // Calls body(number, thread, team): numbers in parallel while there are enough of them, each by a team of one; else
  // one after the other, each by a team of all threads.
  template <class Body>
  static void for_each(Index count, int threads, Body body) {
    if (count < threads) {
      for (Index k = 0; k < count; ++k) body(k, 0, threads);
      return;
    }
    std::atomic<Index> next{0};
    parallel(threads, [&](int thread) {
      for (Index k = next++; k < count; k = next++) body(k, thread, 1);
    });
  }

  template <class Body>
  void for_each_item(int threads, Body body) {
    for_each(static_cast<Index>(items_.size()), threads, body);
  }

  // Calls body(group, count, lanes, scratch) for tiles that hold every factor once, shared among a team.
  template <class Body>
  void for_each_tile(int thread, int team, Body body) {
    parallel(team, [&](int member) {
      for (int g = 0; g < static_cast<int>(plan_.groups.size()); ++g) {
        const auto& tiles = plan_.groups[g].all_tiles;
        const Share part = share(0, static_cast<Index>(tiles.size()), member, team);
        Scratch<T>& scratch = *scratch_[thread + member];
        for (Index t = part.begin; t < part.end; ++t) {
          with_lanes<T>(plan_, plan_.groups[g], tiles[t],
                        [&](const auto& lanes) { body(g, tiles[t].count, lanes, scratch); });
          scratch.tick(plan_.groups[g].table_size * kLanes<T>);
        }
      }
    });
  }

  // Apart from the loop over contiguous tiles, which it would slow down.
  template <class Algebra>
  __attribute__((noinline)) void update_gathered(Item<T>& item, const TileRange& range, const FactorTile& tile,
                                                 const T* in, T* out, Scratch<T>& scratch) {
    update_message<Algebra, T, 0>(context_, item, range.group, range.slot,
                                  TileLanes<T, false>(plan_, plan_.groups[range.group], tile), in, out, scratch);
  }

  template <class Algebra>
  void update_range(Item<T>& item, const TileRange& range, const T* in, T* out, Scratch<T>& scratch) {
    const Group& group = plan_.groups[range.group];
    with_states<Algebra>(square_states(group), [&](auto states) {
      const Index ahead = tiles_ahead<T>(group);
      for (Index t = range.begin; t < range.end; ++t) {
        if (t + ahead < range.end) prefetch_tables(group, plan_.factor_tiles[t + ahead], item.tables.get());
        const FactorTile& tile = plan_.factor_tiles[t];
        if (tile.contiguous)
          update_message<Algebra, T, decltype(states)::value>(context_, item, range.group, range.slot,
                                                              TileLanes<T, true>(plan_, group, tile), in, out, scratch);
        else
          update_gathered<Algebra>(item, range, tile, in, out, scratch);
      }
    });
  }

  // The parts [first, last) of every stage. With `record` > 0 it goes to the tape; so many sweeps may do so.
  void sweep(Item<T>& item, Scratch<T>& scratch, int first, int last, Barrier* barrier, Index record) {
    const bool at_once = plan_.sweep == Sweep::kAllAtOnce;
    const T* in = item.messages[item.current].get();
    T* out = item.messages[at_once ? 1 - item.current : item.current].get();
    scratch.tape = nullptr;
    if (record > 0) {
      const Index size = TapeLayout<T>(context_, item).sweep_size();
      if (sizes_.record == kLastSweep) item.tape.reuse(size);
      scratch.tape = item.tape.add(size, record);
    }
    for (Index s = 0; s < plan_.num_stages(); ++s) {
      const Part* parts = &plan_.stages[s * plan_.parts];
      for (int r = parts[first].ranges_begin; r < parts[last - 1].ranges_end; ++r) {
        const TileRange& range = plan_.ranges[r];
        with_algebra(context_, item, range.group, [&](auto algebra) {
          in_chunks(range.begin, range.end, plan_.groups[range.group].table_size, scratch.tick, [&](Index a, Index b) {
            update_range<decltype(algebra)>(item, {range.group, range.slot, a, b}, in, out, scratch);
          });
        });
      }
      // Messages sent all at once are made from the beliefs that are about to change.
      if (barrier && at_once) barrier->wait();
      in_chunks(parts[first].nodes_begin, parts[last - 1].nodes_end, plan_.max_states, scratch.tick,
                [&](Index a, Index b) { update_nodes(context_, item, a, b, out, scratch); });
      if (barrier) barrier->wait();
    }
    scratch.tape = nullptr;
  }

  // Only a run with a tolerance looks at every sweep; others at the last one, to report.
  void begin_sweep(Scratch<T>& scratch, double tol, bool last) {
    scratch.measure = tol >= 0 || last;
    scratch.change = V<T>{};
    scratch.least = splat<T>(1);
  }

  // The largest number in any lane.
  static double largest(const V<T>& values) {
    double found = 0;
    for (int l = 0; l < kLanes<T>; ++l) found = std::max(found, double(values[l]));
    return found;
  }

  bool impossible(const Scratch<T>& scratch) const {
    bool found = false;
    for (int l = 0; l < kLanes<T>; ++l) found |= !(scratch.least[l] > 0);
    return found;
  }

  // Returns whether the gap is to be measured, by the same threads.
  bool end_sweep(Item<T>& item, double tol, int threads, int first) {
    ++item.sweeps;
    double change = 0;
    for (int k = first; k < first + threads; ++k) {
      item.impossible |= impossible(*scratch_[k]);
      change = std::max(change, largest(scratch_[k]->change));
    }
    if (plan_.sweep == Sweep::kAllAtOnce && !plan_.stages.empty()) item.current = 1 - item.current;
    return item.convergence.swept(item.impossible ? std::numeric_limits<double>::quiet_NaN() : change, tol);
  }

  // A member's share in measuring the gap.
  void measure(const Item<T>& item, Scratch<T>& scratch, int member, int team) {
    scratch.gap = Gap<T>{};
    for (int g = 0; g < static_cast<int>(plan_.groups.size()); ++g) {
      const auto& tiles = plan_.groups[g].all_tiles;
      const Share part = share(0, static_cast<Index>(tiles.size()), member, team);
      for (Index t = part.begin; t < part.end; ++t) {
        scratch.tick(plan_.groups[g].table_size);
        with_lanes<T>(plan_, plan_.groups[g], tiles[t], [&](const auto& lanes) {
          with_algebra(context_, item, g, [&](auto algebra) {
            if constexpr (std::is_same<decltype(algebra), Expectation<T>>::value)
              measure_size<T>(context_, item, g, lanes, scratch);
            else
              measure_gap<decltype(algebra), T>(context_, item, g, lanes, scratch);
          });
        });
      }
    }
  }

  void end_measuring(Item<T>& item, double tol, int threads, int first) {
    double marginals = 0, messages = 0, size = 1, change = 0;
    for (int k = first; k < first + threads; ++k) {
      marginals = std::max(marginals, largest(scratch_[k]->gap.marginals));
      messages = std::max(messages, largest(scratch_[k]->gap.messages));
      size = std::max(size, largest(scratch_[k]->gap.size));
      change = std::max(change, largest(scratch_[k]->change));
    }
    if (mean_field()) marginals = change > kRounding * kEpsilon<T> * size ? change : 0;
    item.convergence.estimate(marginals, messages, tol, sizes_.damping);
  }

  Index advance_alone(Item<T>& item, Index sweeps, double tol, int thread) {
    Index ran = 0;
    for (; ran < sweeps && !item.convergence.done(tol); ++ran) {
      if (sizes_.record > 0 && item.sweeps % sizes_.record == 0) keep_checkpoint(context_, item);
      begin_sweep(*scratch_[thread], tol, ran == sweeps - 1);
      const Index to_record = sizes_.record == kEverySweep ? sweeps - ran : sizes_.record == kLastSweep ? 1 : 0;
      sweep(item, *scratch_[thread], 0, plan_.parts, nullptr, to_record);
      if (end_sweep(item, tol, 1, thread)) {
        measure(item, *scratch_[thread], 0, 1);
        end_measuring(item, tol, 1, thread);
      }
    }
    return ran;
  }

  Index advance_together(Item<T>& item, Index sweeps, double tol) {
    Barrier barrier(plan_.parts);
    Index ran = 0;
    bool due = false;
    parallel(plan_.parts, [&](int thread) {
      for (Index s = 0; s < sweeps && !item.convergence.done(tol); ++s) {
        begin_sweep(*scratch_[thread], tol, s == sweeps - 1);
        sweep(item, *scratch_[thread], thread, thread + 1, &barrier, 0);
        barrier.wait();
        if (thread == 0) {
          due = end_sweep(item, tol, plan_.parts, 0);
          ++ran;
        }
        barrier.wait();
        if (!due) continue;
        measure(item, *scratch_[thread], thread, plan_.parts);
        barrier.wait();
        if (thread == 0) end_measuring(item, tol, plan_.parts, 0);
        barrier.wait();
      }
    });
    return ran;
  }

  void start_beliefs(Item<T>& item, const Theta<T>& theta, const T* state, Scratch<T>& scratch) {
    std::fill(item.beliefs.get(), item.beliefs.get() + plan_.node_size, T(0));
    begin_sweep(scratch, -1, false);
    if (mean_field()) {
      start_mean_field(plan_, item, theta, state);
    } else {
      in_chunks(0, static_cast<Index>(plan_.node_tiles.size()), plan_.max_states, scratch.tick,
                [&](Index a, Index b) { update_nodes(context_, item, a, b, item.messages[0].get(), scratch); });
      item.impossible |= impossible(scratch);
    }
  }

  // Writes the weighted sum of the items' marginals.
  void write_marginals(const std::vector<Weighted<T>>& items, T* out, int thread, int team) {
    for (const auto& [item, weight] : items)
      if (item->impossible) {
        std::fill(out, out + sizes_.mu_size, std::numeric_limits<T>::quiet_NaN());
        return;
      }
    std::fill(out, out + sizes_.node_size, T(0));
    for (const auto& [item, w] : items)
      for_each_node(plan_, *item, [&, weight = w](Index at, int n, const T* values, T total) {
        for (int x = 0; x < n; ++x) out[at + x] += weight * (values[x] / total);
      });
    // Items of a row share their domain.
    for_each_tile(thread, team, [&](int g, int count, const auto& lanes, Scratch<T>& scratch) {
      with_algebra(context_, *items[0].item, g, [&](auto algebra) {
        unpack_factor<decltype(algebra), T>(context_, items, g, lanes, count, scratch, out);
      });
    });
  }

  Context<T> context_;
  const Plan& plan_;
  const RunInput<T> sizes_;  // sizes of the caller's vectors; its pointers are not used after construction
  bool whole_ = true;        // whether the last `advance` came to its end
  std::vector<Item<T>> items_;
  std::vector<std::unique_ptr<Scratch<T>>> scratch_;
  std::vector<std::unique_ptr<Gradients<T>>> gradients_;
};

template <class T>
std::unique_ptr<Run<T>> make_run(const RunInput<T>& input, int threads) {
  return std::make_unique<EngineRun<T>>(input, threads);
}

}  // namespace riskfield::RISKFIELD_ISA
