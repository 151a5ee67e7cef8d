// The forward pass: sweeps over one item, by one thread or by several that share its levels.
#pragma once

#include "binary_sweeps.hpp"
#include "checkpoints.hpp"
#include "copies.hpp"
#include "gap.hpp"
#include "inside.hpp"
#include "packing.hpp"
#include "pair_runs.hpp"
#include "tape_layout.hpp"
#include "workers.hpp"

namespace riskfield::RISKFIELD_ISA {

template <class T>
class Sweeps {
 public:
  Sweeps(const Context<T>& context, const RunInput<T>& input, const Workers<T>& workers)
      : context_(context), plan_(*context.plan), record_(input.record), damping_(input.damping), workers_(workers) {}

  // The beliefs that theta and the first messages make.
  void start_beliefs(Item<T>& item, const Theta<T>& theta, const Start<T>& start, Scratch<T>& scratch) const {
    std::fill(item.beliefs.get(), item.beliefs.get() + plan_.node_size, T(item.state1_possible));
    begin_sweep(scratch, -1, false);
    if (mean_field()) {
      start_mean_field(plan_, item, theta, start);
    } else {
      in_chunks(0, static_cast<Index>(plan_.node_tiles.size()), plan_.max_states, scratch.tick,
                [&](Index a, Index b) { update_nodes(context_, item, a, b, item.messages[0].get(), scratch); });
      for (int c = 0; c < item.num_models(); ++c) item.models[c].impossible |= impossible(scratch, c);
    }
  }

  // Sweeps each model of the item until it has converged to `tol`, at most `sweeps` times. Threads do so in slices:
  // before each of them it is seen whether several are worth it.
  void advance(Item<T>& item, Index sweeps, double tol, int thread, int team) const {
    const bool shared = plan_.parts > 1 && plan_.parts <= team;
    for (Index left = sweeps, slice = 1; left > 0 && converged(item, tol) != item.all_models();) {
      const Index count = shared ? std::min(slice, left) : left;
      advance_some(item, count, left, tol, thread, team);
      left -= count;
      slice = std::min<Index>(2 * slice, kLongestSlice);
    }
  }

  // Repeats the sweeps that follow checkpoint k, with a tape.
  void run_again(Item<T>& item, Index k, int thread, int team) const {
    const Index begin = k * record_, end = std::min(begin + record_, item.sweeps);
    return_to(context_, item, item.checkpoints[k], workers_.scratch(thread));
    item.tape.clear();
    T* tape = nullptr;
    workers_.for_each_part(thread, team, [&](const Member<T>& member) {
      begin_sweep(member.scratch, -1, false);
      for (Index s = begin; s < end; ++s) {
        if (member.leads()) tape = space_on_tape(item, end - s);
        member.meet();
        sweep_some(item, member, item.stopped[s], tape);
        member.meet();
        if (plan_.sweep == Sweep::kAllAtOnce && member.leads()) item.current = 1 - item.current;
      }
    });
  }

 private:
  static constexpr Index kLongestSlice = 8;  // sweeps that threads share before they look again

  bool mean_field() const { return context_.kind == Kind::kMeanField; }

  // Apart from the loop over contiguous tiles, which it would slow down.
  template <class Algebra>
  __attribute__((noinline)) void update_gathered(Item<T>& item, const TileRange& range, const FactorTile& tile,
                                                 const T* in, T* out, Scratch<T>& scratch) const {
    if constexpr (!std::is_void<typename Algebra::OfStates>::value)
      if (plan_.is_inside(plan_.groups[range.group], tile))
        return update_inside<typename Algebra::OfStates, T>(context_, item, range.group, range.slot, tile, in, out,
                                                            scratch);
    update_message<Algebra, T>(context_, item, range.group, range.slot,
                               TileLanes<T, false>(plan_, plan_.groups[range.group], tile), in, out, scratch);
  }

  template <class Algebra>
  void update_range(Item<T>& item, const TileRange& range, const T* in, T* out, Scratch<T>& scratch,
                    Lookahead<T>& ahead) const {
    const Group& group = plan_.groups[range.group];
    // Calls body(first, last) for the runs of contiguous tiles.
    auto for_each_run = [&](auto body) RF_LAMBDA {
      for (Index t = range.begin; t < range.end;) {
        const FactorTile& tile = plan_.factor_tiles[t];
        if (!tile.contiguous) {
          update_gathered<Algebra>(item, range, tile, in, out, scratch);
          ++t;
          continue;
        }
        const Index last = std::min<Index>(t + tile.run, range.end) - 1;
        body(t, last);
        t = last + 1;
      }
    };
    with_states<Algebra, Algebra::kFixedInSweeps>(square_states(group), [&](auto states) {
      constexpr int S = decltype(states)::value;
      constexpr bool kWhole = S > 0 || IsLogarithm<Algebra>::value;  // else see `contract`
      // What is done before each tile of the run that begins with `tile`.
      auto next = [&](const FactorTile& tile) RF_LAMBDA {
        const Index fetched = tile.shared || !kWhole ? 0 : numbers_of_tables<T>(item, group);
        return [&ahead, fetched](Index) RF_LAMBDA { ahead.at_factors(fetched); };
      };
      if constexpr (S == 0) {
        for_each_run([&](Index first, Index last) RF_LAMBDA {
          const FactorTile& tile = plan_.factor_tiles[first];
          const Index step = step_of(first, last);
          const auto begin_tile = next(tile);
          TileLanes<T, true> lanes(plan_, group, tile);
          for (Index t = first; t <= last; ++t, lanes.advance(step)) {
            lanes.trim(t == last, plan_.factor_tiles[last]);
            begin_tile((t - first) * kLanes<T>);
            update_message<Algebra, T>(context_, item, range.group, range.slot, lanes, in, out, scratch);
          }
        });
      } else {
        with_loop_kind<Algebra, T, S>(context_, item, range, [&](auto kind) {
          for_each_run([&](Index first, Index last) RF_LAMBDA {
            const FactorTile& tile = plan_.factor_tiles[first];
            PairRun<Algebra, T, S, decltype(kind)>(context_, item, range, tile, in, out, scratch)
                .update(last - first + 1, step_of(first, last), plan_.factor_tiles[last], next(tile));
          });
        });
      }
    });
  }

  // The distance between the tables of the tiles of a run.
  Index step_of(Index first, Index last) const {
    return first < last ? plan_.factor_tiles[first + 1].table - plan_.factor_tiles[first].table : 0;
  }

  // Space on the tape for one more sweep, if `record` says that so many may be recorded; else null.
  T* space_on_tape(Item<T>& item, Index record) const {
    if (record <= 0) return nullptr;
    const Index size = TapeLayout<T>(context_, item).sweep_size();
    if (record_ == kLastSweep) item.tape.reuse(size);
    return item.tape.add(size, record);
  }

  // A member's parts of every stage. Unless `tape` is null, what they are made from is written there: first the ranges
  // of a stage, then its nodes, each at the same place whatever the threads.
  void sweep(Item<T>& item, const Member<T>& member, T* tape) const {
    const bool at_once = plan_.sweep == Sweep::kAllAtOnce;
    const int first = member.first, last = member.last;
    const std::int64_t begun = member.steps();
    Scratch<T>& scratch = member.scratch;
    const T* in = item.messages[item.current].get();
    T* out = item.messages[at_once ? 1 - item.current : item.current].get();
    const TapeLayout<T> layout(context_, item);
    Lookahead<T> ahead(plan_, item, first, last);
    scratch.streams = tape && exceeds_cache(item);
    if (is_binary(plan_, item)) {
      with_algebra(context_, item, 0, [&](auto algebra) {
        using Algebra = decltype(algebra);
        if constexpr (Algebra::keeps_ratio(2))
          with_loop_kind<Algebra, T, 2>(context_, item, TileRange{}, [&](auto kind) {
            BinarySweep<Algebra, T, decltype(kind)>(context_, item, member)
                .run(tape, layout, [&](const TileRange& range, const FactorTile& tile) {
                  update_gathered<Algebra>(item, range, tile, in, out, scratch);
                });
          });
      });
      if (scratch.streams) finish_streams();
      return;
    }
    for (Index s = 0; s < plan_.num_stages(); ++s) {
      const Part* parts = &plan_.stages[s * plan_.parts];
      member.begin_stage(plan_, plan_.waits, s, begun);
      scratch.tape = tape ? tape + layout.ranges_size(parts[0].ranges_begin, parts[first].ranges_begin) : nullptr;
      for (int r = parts[first].ranges_begin; r < parts[last - 1].ranges_end; ++r) {
        const TileRange& range = plan_.ranges[r];
        with_algebra(context_, item, range.group, [&](auto algebra) {
          in_chunks(range.begin, range.end, plan_.groups[range.group].table_size, scratch.tick, [&](Index a, Index b) {
            update_range<decltype(algebra)>(item, {range.group, range.slot, a, b}, in, out, scratch, ahead);
          });
        });
      }
      // Messages sent all at once are made from the beliefs that are about to change.
      if (at_once) member.meet();
      if (tape) {
        tape += layout.ranges_size(parts[0].ranges_begin, parts[plan_.parts - 1].ranges_end);
        scratch.tape = tape + layout.nodes_size(parts[0].nodes_begin, parts[first].nodes_begin);
        tape += layout.nodes_size(parts[0].nodes_begin, parts[plan_.parts - 1].nodes_end);
      }
      in_chunks(parts[first].nodes_begin, parts[last - 1].nodes_end, plan_.max_states, scratch.tick,
                [&](Index a, Index b) { update_nodes(context_, item, a, b, out, scratch, &ahead); });
      at_once ? member.meet() : member.end_stage();
    }
    if (scratch.streams) finish_streams();
    scratch.tape = nullptr;
  }

  // The same, but the models in `stopped` stay as they are.
  void sweep_some(Item<T>& item, const Member<T>& member, LaneSet stopped, T* tape) const {
    if (!stopped) return sweep(item, member, tape);
    const int next = plan_.sweep == Sweep::kAllAtOnce ? 1 - item.current : item.current;
    std::vector<KeptLanes<T>> kept;
    auto keep = [&](T* from, T* to, Index size) {
      const Share own = member.share_of_vectors(plan_, size);
      kept.emplace_back(stopped, from + own.begin, to + own.begin, own.end - own.begin);
    };
    keep(item.messages[item.current].get(), item.messages[next].get(), item.messages[0].size());
    keep(item.beliefs.get(), item.beliefs.get(), item.beliefs.size());
    if (record_ == kLastSweep && tape) keep(tape, tape, TapeLayout<T>(context_, item).sweep_size());
    member.meet();
    sweep(item, member, tape);
    member.meet();
    for (const KeptLanes<T>& lanes : kept) lanes.restore();
  }

  // Only a run with a tolerance looks at every sweep; others at the last one, to report.
  void begin_sweep(Scratch<T>& scratch, double tol, bool last) const {
    scratch.measure = tol >= 0 || last;
    scratch.change = V<T>{};
    scratch.least = splat<T>(1);
  }

  // Whether a model has met an impossible variable.
  bool impossible(const Scratch<T>& scratch, int copy) const {
    bool found = false;
    for (int l = 0; l < kLanes<T>; ++l)
      if (plan_.copies == 1 || l == copy) found |= !(scratch.least[l] > 0);
    return found;
  }

  // The models that have converged to `tol`.
  static LaneSet converged(const Item<T>& item, double tol) {
    LaneSet found = 0;
    for (int c = 0; c < item.num_models(); ++c)
      if (item.models[c].convergence.done(tol)) found |= LaneSet(1) << c;
    return found;
  }

  // Returns the models whose gap is to be measured, by the same threads. Those in `stopped` did not take part.
  LaneSet end_sweep(Item<T>& item, double tol, LaneSet stopped, int threads, int first) const {
    LaneSet due = 0;
    for (int c = 0; c < item.num_models(); ++c) {
      if (stopped >> c & 1) continue;
      Model& model = item.models[c];
      ++model.sweeps;
      double change = 0;
      for (int k = first; k < first + threads; ++k) {
        model.impossible |= impossible(workers_.scratch(k), c);
        change = std::max(change, largest_of<T>(plan_, workers_.scratch(k).change, c));
      }
      if (model.convergence.swept(model.impossible ? std::numeric_limits<double>::quiet_NaN() : change, tol))
        due |= LaneSet(1) << c;
    }
    ++item.sweeps;
    if (plan_.sweep == Sweep::kAllAtOnce && !plan_.stages.empty()) item.current = 1 - item.current;
    return due;
  }

  // A member's share in measuring the gap.
  void measure(const Item<T>& item, Scratch<T>& scratch, int member, int team) const {
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

  void end_measuring(Item<T>& item, double tol, LaneSet due, int threads, int first) const {
    for (int c = 0; c < item.num_models(); ++c) {
      if (!(due >> c & 1)) continue;
      double marginals = 0, messages = 0, size = 1, change = 0;
      for (int k = first; k < first + threads; ++k) {
        const Scratch<T>& scratch = workers_.scratch(k);
        marginals = std::max(marginals, largest_of<T>(plan_, scratch.gap.marginals, c));
        messages = std::max(messages, largest_of<T>(plan_, scratch.gap.messages, c));
        size = std::max(size, largest_of<T>(plan_, scratch.gap.size, c));
        change = std::max(change, largest_of<T>(plan_, scratch.change, c));
      }
      if (mean_field()) marginals = change > kRounding * kEpsilon<T> * size ? change : 0;
      item.models[c].convergence.estimate(marginals, messages, tol, damping_);
    }
  }

  // How many of the sweeps that are left may go to the tape.
  Index to_record(Index left) const { return record_ == kEverySweep ? left : record_ == kLastSweep ? 1 : 0; }

  void begin_recording(Item<T>& item, LaneSet stopped) const {
    if (record_ > 0 && item.sweeps % record_ == 0) keep_checkpoint(context_, item);
    if (record_ != 0) item.stopped.push_back(stopped);
  }

  // `count` sweeps of the `left` that may still follow.
  void advance_some(Item<T>& item, Index count, Index left, double tol, int thread, int team) const {
    LaneSet due = 0;
    T* tape = nullptr;
    workers_.for_each_part(thread, team, [&](const Member<T>& member) {
      const int threads = member.team ? plan_.parts : 1;
      for (Index s = 0; s < count; ++s) {
        const LaneSet stopped = converged(item, tol);
        if (stopped == item.all_models()) return;
        if (record_ != 0) {
          member.meet();  // all threads have seen that the run goes on
          if (member.leads()) {
            begin_recording(item, stopped);
            tape = space_on_tape(item, to_record(left - s));
          }
          member.meet();
        }
        begin_sweep(member.scratch, tol, s == left - 1);
        sweep_some(item, member, stopped, tape);
        member.meet();
        if (member.leads()) due = end_sweep(item, tol, stopped, threads, thread);
        member.meet();
        if (!due) continue;
        measure(item, member.scratch, member.first, threads);
        member.meet();
        if (member.leads()) end_measuring(item, tol, due, threads, thread);
        member.meet();
      }
    });
  }

  const Context<T>& context_;
  const Plan& plan_;
  const Index record_;
  const double damping_;
  const Workers<T>& workers_;
};

}  // namespace riskfield::RISKFIELD_ISA
