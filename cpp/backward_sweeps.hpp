// Back through the sweeps of one item, by one thread or by several that share its levels.
//
// A message's gradient goes on to the table and the messages of its factor and to the beliefs of the factor's other
// variables. If all variables of a factor belong to one part of the plan, no other part adds to any of them. If not,
// the thread that goes back through a message leaves what it has for the beliefs in parcels, which the other threads
// fetch before their next stage with these variables. (Gradients of tied tables are added up part by part.) One thread
// alone does the same in the same order.
#pragma once

#include "backward_lookahead.hpp"
#include "reverse_pairs.hpp"
#include "workers.hpp"

namespace riskfield::RISKFIELD_ISA {

template <class T>
class BackwardSweeps {
 public:
  BackwardSweeps(const Context<T>& context, const Item<T>& item, GradientBuffers<T>& buffers)
      : context_(context),
        plan_(*context.plan),
        item_(item),
        places_(context, item),
        at_node_(gathers_at_once(context)),
        lookahead_(plan_, item, places_, parts_) {
    for (int part = 0; part < plan_.parts; ++part) {
      parts_.emplace_back(plan_, buffers, part);
      parts_[part].streams = exceeds_cache(item);
    }
  }

  Gradients<T>& part(int number) { return parts_[number]; }
  T* messages() const { return parts_[0].messages[parts_[0].current]; }  // their gradients
  Index rates_size() const { return places_.rates_size; }

  // A member's share in going back through a sweep. `tape` is where its tape ends; `rates` is for Pass::kDeferred.
  template <Pass P>
  void sweep(const T* tape, const Member<T>& member, T* rates = nullptr) {
    const bool at_once = plan_.sweep == Sweep::kAllAtOnce;
    const std::int64_t begun = member.steps();
    tape -= places_.tape_size;
    for (int p = member.first; p < member.last && P == Pass::kDeferred; ++p) lookahead_.begin_deferred(p, tape, rates);
    for (Index s = plan_.num_stages() - 1; s >= 0; --s) {
      const Part* parts = &plan_.stages[s * plan_.parts];
      member.begin_stage(plan_, plan_.waits_back, s, begun);
      for (int p = member.first; p < member.last && P != Pass::kTables; ++p) {
        receive(s, p);
        if (at_node_) continue;
        reverse_nodes(p, parts[p].nodes_begin, parts[p].nodes_end, tape + places_.nodes[s * plan_.parts + p], member);
      }
      // Messages sent all at once were made from beliefs of the same level.
      if (at_once) member.meet();
      for (int p = member.first; p < member.last; ++p)
        for (int r = parts[p].ranges_end - 1; r >= parts[p].ranges_begin; --r)
          reverse_tiles<P>(p, r, plan_.ranges[r].begin, own_end(plan_, plan_.ranges[r]), tape, rates, member);
      if (at_once)
        reverse_between<P>(parts, tape, rates, member);
      else
        member.end_stage();
    }
    if (P == Pass::kDeferred && parts_[member.first].streams) finish_streams();
    member.meet();
  }

  // Adds all parcels for the nodes of one part.
  void receive_all(int p) {
    for (Index s = 0; s < plan_.num_stages(); ++s) receive(s, p);
  }

  // A member's share in adding the gradients of tables of `count` sweeps, where their tapes end. `rates` has what they
  // wrote down, one after the other. Messages to different variables of a factor between parts belong to different
  // threads, so these come one after the other.
  void add_deferred_tables(int count, const T* const* tape, const T* rates, const Member<T>& member) {
    for (const int slot : {1, 0}) {
      for (Index s = 0; s < plan_.num_stages(); ++s)  // in the order of the tape
        for (int p = member.first; p < member.last; ++p) {
          const Part& part = plan_.stages[s * plan_.parts + p];
          for (int r = part.ranges_begin; r < part.ranges_end; ++r) {
            const TileRange& range = plan_.ranges[r];
            if (slot == 1) add_tables(p, r, range.begin, range.between, count, tape, rates, member.scratch);
            if (slot == range.slot) add_tables(p, r, range.between, range.end, count, tape, rates, member.scratch);
          }
        }
      if (plan_.parts == 1) return;
      member.meet();
    }
  }

  // Takes the gradient of beliefs out to theta.
  void reverse_nodes(int p, Index begin, Index end, const T* tape, const Member<T>& member) {
    with_gradient_algebra(context_, item_, [&](auto algebra) {
      using Algebra = decltype(algebra);
      for (Index t = begin; t < end; ++t) {
        const NodeTile& tile = plan_.node_tiles[t];
        member.scratch.tick(tile.states);
        if constexpr (!std::is_void<typename Algebra::OfStates>::value)
          if (tile.stride == 1) {
            reverse_belief_inside<T>(context_, tile, parts_[p]);
            continue;
          }
        with_states<Algebra>(tile.states, [&](auto states) {
          reverse_belief<Algebra, T, decltype(states)::value>(context_, tile, tape, parts_[p], member.scratch);
        });
      }
    });
  }

 private:
  // The messages between parts that are sent at once, by one thread alone: threads would write to the messages of each
  // other.
  template <Pass P>
  void reverse_between(const Part* parts, const T* tape, T* rates, const Member<T>& member) {
    member.meet();
    for (int r = parts[plan_.parts - 1].ranges_end - 1; r >= parts[0].ranges_begin && member.leads(); --r)
      reverse_tiles<P>(0, r, plan_.ranges[r].between, plan_.ranges[r].end, tape, rates, member);
    member.meet();
    for (int p = member.first; p < member.last && P != Pass::kTables; ++p) parts_[p].current = 1 - parts_[p].current;
  }

  // Adds the parcels for the nodes of part p at the level of stage s. They are from factors whose messages its two
  // stages send, each of which goes to some slots.
  void receive(Index s, int p) {
    if (plan_.parcels_size == 0) return;
    const Index other = plan_.other_stage[s];
    for (const Index stage : {s, other}) {
      if (stage < 0) continue;
      const Part& part = plan_.stages[stage * plan_.parts + p];
      for (int r = part.ranges_begin; r < part.ranges_end; ++r) receive(plan_.ranges[r], p);
    }
  }
  void receive(const TileRange& range, int p) {
    if (range.between == range.end) return;
    const Group& group = plan_.groups[range.group];
    with_gradient_algebra(context_, item_, [&](auto algebra) {
      using Algebra = decltype(algebra);
      for (Index t = range.between; t < range.end; ++t)
        with_lanes<T>(plan_, group, plan_.factor_tiles[t], [&](const auto& lanes) {
          const auto parcel = lanes.template parcel_rows<Algebra, 0>(parts_[p].parcels, range.slot);
          const auto belief = lanes.node_rows(parts_[p].beliefs, range.slot);
          for (int x = 0; x < Algebra::cavity_rows(group.dims[range.slot]); ++x) {
            belief.add(x, parcel.get(x));
            parcel.set(x, V<T>{});
          }
        });
    });
  }

  // The tiles [begin, end) of range r, for part p.
  void add_tables(int p, int r, Index begin, Index end, int count, const T* const* tape, const T* rates,
                  Scratch<T>& scratch) {
    const TileRange& range = plan_.ranges[r];
    const Index rates_per_tile = places_.rates_of_tile(range), tape_per_tile = places_.tape.tile_size(range);
    if (rates_per_tile == 0 || begin == end) return;
    const Group& group = plan_.groups[range.group];
    const T *cavities[kDeferredSweeps], *gradients[kDeferredSweeps];
    for (int k = 0; k < count; ++k) {
      cavities[k] = tape[k] - places_.tape_size + places_.ranges[r].tape + (begin - range.begin) * tape_per_tile;
      gradients[k] = rates + k * places_.rates_size + places_.ranges[r].rates + (begin - range.begin) * rates_per_tile;
    }
    with_states<LogMessages<T>>(square_states(group), [&](auto states) {
      constexpr int S = decltype(states)::value > 2 ? decltype(states)::value : 0;
      const Index tables_ahead = tiles_ahead<T>(group), last = static_cast<Index>(plan_.factor_tiles.size()) - 1;
      for (Index t = begin; t < end; ++t) {
        scratch.tick(group.table_size);
        const FactorTile& tile = plan_.factor_tiles[t];
        const FactorTile& later = plan_.factor_tiles[std::min(t + tables_ahead, last)];
        const Index ahead = later.contiguous && !later.shared ? later.table : 0;
        if (plan_.is_inside(group, tile))
          add_deferred_inside<T>(plan_, item_, group, range.slot, tile, count, cavities, gradients, parts_[p]);
        else
          with_lanes<T>(plan_, group, tile, [&](const auto& lanes) {
            add_deferred<T, S>(item_, group, range.slot, lanes, count, cavities, gradients, ahead, parts_[p], scratch);
          });
        for (int k = 0; k < count; ++k) {
          cavities[k] += tape_per_tile;
          gradients[k] += rates_per_tile;
        }
      }
    });
  }

  template <Pass P, class Body>
  void with_algebra_of(Body body) const {
    if constexpr (P == Pass::kDeferred)
      body(LogMessages<T>{});
    else
      with_gradient_algebra(context_, item_, body);
  }
  // Only what is done in every sweep is worth unrolling.
  template <class Algebra, Pass P, class Body>
  static void with_unrolled(int states, Body body) {
    if constexpr (IsLogarithm<Algebra>::value)
      body(std::integral_constant<int, 0>{});
    else if (P == Pass::kDeferred && states == kMostDeferred<T>)
      body(std::integral_constant<int, P == Pass::kDeferred ? kMostDeferred<T> : 0>{});
    else if constexpr (P == Pass::kWhole || P == Pass::kSum || P == Pass::kDeferred)
      with_states<Algebra>(states, [&](auto found) {
        constexpr int S = decltype(found)::value;  // tables of binary variables are not deferred
        body(std::integral_constant < int, P == Pass::kDeferred && S == 2 ? 0 : S > {});
      });
    else if (P == Pass::kTables && states == 2)
      body(std::integral_constant<int, 2>{});
    else
      body(std::integral_constant<int, 0>{});
  }

  // The tiles [begin, end) of range r, for part p. `tape` and `rates` are those of the sweep.
  template <Pass P>
  void reverse_tiles(int p, int r, Index begin, Index end, const T* tape, T* rates, const Member<T>& member) {
    if (begin == end) return;
    const TileRange& range = plan_.ranges[r];
    tape += places_.ranges[r].tape + (begin - range.begin) * places_.tape.tile_size(range);
    if constexpr (P == Pass::kDeferred) {
      const Index rates_per_tile = places_.rates_of_tile(range);
      if (rates_per_tile == 0) return reverse_range<Pass::kWhole>(p, r, begin, end, tape, member);
      parts_[p].rates = rates + places_.ranges[r].rates + (begin - range.begin) * rates_per_tile;
    }
    reverse_range<P>(p, r, begin, end, tape, member);
  }

  template <Pass P>
  void reverse_range(int p, int r, Index begin, Index end, const T* tape, const Member<T>& member) {
    const TileRange& range = plan_.ranges[r];
    const Group& group = plan_.groups[range.group];
    Gradients<T>& grad = parts_[p];
    T* from = P == Pass::kTables ? grad.sum : grad.messages[grad.current];
    T* to = grad.messages[plan_.sweep == Sweep::kAllAtOnce ? 1 - grad.current : grad.current];
    with_algebra_of<P>([&](auto algebra) {
      using Algebra = decltype(algebra);
      const bool small = lookahead_.is_small(group), leads = begin == range.begin;
      const Index ahead = tiles_ahead<T>(group), lead = leads ? lookahead_.lead_of_tile(range) : 0;
      PairsAhead<T> next = lookahead_.pairs_after(p, r);
      with_unrolled<Algebra, P>(square_states(group), [&](auto states) {
        constexpr bool kWhole = decltype(states)::value > 0 || IsLogarithm<Algebra>::value;
        auto look_ahead = [&](Index t) RF_LAMBDA {
          member.scratch.tick(group.table_size);
          if constexpr (P == Pass::kDeferred) {
            grad.next_table = !small && leads ? lookahead_.next_table(p) : nullptr;
            lookahead_.at_deferred(p, lead);
          } else {
            lookahead_.fetch_tape(tape);
            next.fetch();
            if (t + ahead >= end) return;
            if (kWhole) prefetch_tables(group, plan_.factor_tiles[t + ahead], item_.tables.get());
            if (kAddsTables<P>) prefetch_tables(group, plan_.factor_tiles[t + ahead], grad.tables);
          }
        };
        for (Index t = begin; t < end;) {
          const FactorTile& tile = plan_.factor_tiles[t];
          if (!tile.contiguous) {
            look_ahead(t++);
            reverse_gathered<Algebra, P, decltype(states)::value == 2 && P != Pass::kDeferred ? 2 : 0>(
                range, tile, tape, from, to, grad, member.scratch);
            continue;
          }
          const Index last = std::min<Index>(t + tile.run, end) - 1;
          if constexpr (P == Pass::kWhole && decltype(states)::value == 2 && Algebra::keeps_ratio(2))
            if (from == to && ReversePairs<T>::suits(group, tile)) {
              ReversePairs<T> pairs(context_, item_, range, tile, from, grad);
              pairs.run(last + 1 - t, plan_.factor_tiles[last].count, tape, [&](const T* at) RF_LAMBDA {
                lookahead_.fetch_tape(at);
                next.fetch();
              });
              member.scratch.tick((last + 1 - t) * group.table_size);
              t = last + 1;
              continue;
            }
          const Index step = t < last ? plan_.factor_tiles[t + 1].table - tile.table : 0;
          for (TileLanes<T, true> lanes(plan_, group, tile); t <= last; ++t, lanes.advance(step)) {
            lanes.trim(t == last, plan_.factor_tiles[last]);
            look_ahead(t);
            reverse_message<Algebra, T, decltype(states)::value, P>(context_, item_, range.group, range.slot, lanes,
                                                                    tape, from, to, grad, member.scratch);
          }
        }
      });
    });
  }
  template <class Algebra, Pass P, int S>
  __attribute__((noinline)) void reverse_gathered(const TileRange& range, const FactorTile& tile, const T*& tape,
                                                  T* from, T* to, Gradients<T>& grad, Scratch<T>& scratch) {
    const Group& group = plan_.groups[range.group];
    if constexpr (!std::is_void<typename Algebra::OfStates>::value)
      if (plan_.is_inside(group, tile)) {
        if constexpr (P != Pass::kCounting)
          return reverse_inside<T, P>(context_, item_, range.group, range.slot, tile, tape, from, to, grad, scratch);
        const int others = group.dims[1 - range.slot];
        const T* cavities = cavities_by_lanes<T>(tile, tape, others, scratch);
        tape += others * kLanes<T>;
        return reverse_lanes<Algebra, P, S>(range, tile, cavities, from, to, grad, scratch);
      }
    reverse_lanes<Algebra, P, S>(range, tile, tape, from, to, grad, scratch);
  }
  template <class Algebra, Pass P, int S>
  void reverse_lanes(const TileRange& range, const FactorTile& tile, const T*& tape, T* from, T* to, Gradients<T>& grad,
                     Scratch<T>& scratch) {
    reverse_message<Algebra, T, S, P>(context_, item_, range.group, range.slot,
                                      TileLanes<T, false>(plan_, plan_.groups[range.group], tile), tape, from, to, grad,
                                      scratch);
  }

  const Context<T>& context_;
  const Plan& plan_;
  const Item<T>& item_;
  const DeferredLayout<T> places_;
  const bool at_node_;  // whether the gradients of beliefs are where their messages look for them
  std::vector<Gradients<T>> parts_;
  BackwardLookahead<T> lookahead_;
};

}  // namespace riskfield::RISKFIELD_ISA
