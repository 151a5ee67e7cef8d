// The threads that work on a run, each with working memory of its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "context.hpp"
#include "lanes.hpp"
#include "threads.hpp"

namespace riskfield::RISKFIELD_ISA {

// One of the threads that share the parts of a plan, or the one that has all of them: its parts and working memory.
template <class T>
struct Member {
  int first, last;
  Scratch<T>& scratch;
  Team* team;  // null if it has all parts; else its number there is that of its part

  // Whether it does what only one of them can do.
  bool leads() const { return first == 0; }
  // Waits until all members have come this far.
  void meet() const {
    if (team) team->meet(first);
  }
  // How many stages the members have gone through, and met; all of them count alike.
  std::int64_t steps() const { return team ? team->steps(first) : 0; }
  // Its share of some numbers, in whole vectors.
  Share share_of_vectors(const Plan& plan, Index size) const {
    const Index vectors = (size + kLanes<T> - 1) / kLanes<T>;
    const Index begin = share(0, vectors, first, plan.parts).begin, end = share(0, vectors, last - 1, plan.parts).end;
    return {begin * kLanes<T>, std::min(size, end * kLanes<T>)};
  }
  // Before a stage, and after it. `begun` is the number of steps before the first one.
  void begin_stage(const Plan& plan, const Waits& waits, Index stage, std::int64_t begun) const {
    if (!team) return;
    const Index at = stage * plan.parts + first;
    for (Index k = waits.start[at]; k < waits.start[at + 1]; ++k)
      team->wait_for(first, waits.list[k].part, begun + waits.list[k].stage + 1);
  }
  void end_stage() const {
    if (team) team->finish_step(first);
  }
};

template <class T>
class Workers {
 public:
  explicit Workers(const Plan& plan) : plan_(plan) {}

  void reserve(int threads) {
    while (static_cast<int>(scratch_.size()) < std::max(threads, 1))
      scratch_.push_back(std::make_unique<Scratch<T>>(plan_));
  }
  Scratch<T>& scratch(int thread) const { return *scratch_[thread]; }

  // Calls body(number, thread, team) for the numbers below `count`. With at least as many numbers as threads, each
  // number has a team of one thread; with fewer, one number after the other has a team of all threads, if the threads
  // can share the levels of the plan, or if there is only one number.
  template <class Body>
  void for_each(Index count, int threads, Body body) const {
    if (count < threads && (count <= 1 || plan_.parts > 1)) {
      for (Index k = 0; k < count; ++k) body(k, 0, threads);
      return;
    }
    std::atomic<Index> next{0};
    parallel(static_cast<int>(std::min<Index>(threads, count)), [&](int thread) {
      for (Index k = next++; k < count; k = next++) body(k, thread, 1);
    });
  }

  // Calls body(member) for the members of a team that share the parts of the plan. One thread takes all parts if the
  // team is too small for them or is held up by other programs.
  template <class Body>
  void for_each_part(int thread, int team, Body body) const {
    if (plan_.parts == 1 || plan_.parts > team || crowded())
      return body(Member<T>{0, plan_.parts, *scratch_[thread], nullptr});
    Team members(plan_.parts);
    together(plan_.parts, [&](int part) { body(Member<T>{part, part + 1, *scratch_[thread + part], &members}); });
  }

  // Calls body(group, count, lanes, scratch) for tiles that hold every factor once, shared among a team.
  template <class Body>
  void for_each_tile(int thread, int team, Body body) const {
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

 private:
  const Plan& plan_;
  std::vector<std::unique_ptr<Scratch<T>>> scratch_;
};

}  // namespace riskfield::RISKFIELD_ISA
