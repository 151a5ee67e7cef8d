#include <algorithm>
#include <array>
#include <utility>

#include "plan_steps.hpp"

namespace riskfield {
namespace {

// A thread updates the nodes of its part of a level from the messages and beliefs of their neighbours, and other
// threads update those. So what a part does in the stages of a level, and another part in those of a level that it has
// neighbours in, is to happen in the order of the sweep, or on the way back in the opposite order.
class WaitFinder {
 public:
  WaitFinder(Plan& plan, const Placement& placement) : plan_(plan), placement_(placement) {}

  void run() {
    if (plan_.parts == 1) return;
    find_stages();
    plan_.waits.start.assign(plan_.stages.size() + 1, 0);
    plan_.waits_back.start.assign(plan_.stages.size() + 1, 0);
    if (plan_.sweep == Sweep::kAllAtOnce) return;
    find_neighbours();
    waited_.assign(plan_.parts * plan_.parts, -1);
    const auto stages = static_cast<std::int32_t>(plan_.num_stages());
    std::vector<std::vector<Waits::Wait>> found(plan_.stages.size());
    for (std::int32_t s = 0; s < stages; ++s) find_waits(s, [&](std::int32_t t) { return t < s ? t : -1; }, found);
    gather(found, plan_.waits);
    // The same in stages counted from the last one on.
    for (std::int32_t s = stages - 1; s >= 0; --s)
      find_waits(s, [&](std::int32_t t) { return t > s ? stages - 1 - t : -1; }, found);
    gather(found, plan_.waits_back);
  }

 private:
  using Neighbour = std::pair<Index, std::int32_t>;  // level and part

  void find_stages() {
    stages_.assign(placement_.num_levels, {-1, -1});
    plan_.other_stage.assign(plan_.num_stages(), -1);
    level_.assign(plan_.num_stages(), 0);
    for (std::size_t k = 0; k < plan_.stages.size(); ++k) {
      const Part& part = plan_.stages[k];
      const auto s = static_cast<std::int32_t>(k / plan_.parts);
      if (part.nodes_begin == part.nodes_end) continue;
      level_[s] = placement_.node_level[plan_.node_tiles[part.nodes_begin].first];
      auto& [first, second] = stages_[level_[s]];
      if (first < 0) {
        first = s;
      } else if (first != s && second < 0) {
        second = s;
        plan_.other_stage[first] = second;
        plan_.other_stage[second] = first;
      }
    }
  }

  // Of each part of each level: the parts of other levels that it has neighbours in.
  void find_neighbours() {
    neighbours_.resize(placement_.num_levels * plan_.parts);
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      const Group& group = plan_.groups[g];
      for (const Piece& piece : placement_.pieces[g]) {  // whose factors are alike in this
        const std::int32_t* nodes = &group.position[piece.first * group.arity];
        for (int k = 0; k < group.arity; ++k)
          for (int j = 0; j < group.arity; ++j) {
            const Index own = nodes[k], other = nodes[j];
            const Neighbour neighbour{placement_.node_level[other], placement_.node_part[other]};
            if (neighbour.second == placement_.node_part[own]) continue;
            auto& found = neighbours_[placement_.node_level[own] * plan_.parts + placement_.node_part[own]];
            if (found.empty() || found.back() != neighbour) found.push_back(neighbour);
          }
      }
    }
    for (auto& found : neighbours_) {
      std::sort(found.begin(), found.end());
      found.erase(std::unique(found.begin(), found.end()), found.end());
    }
  }

  // What the parts wait for before stage s: the latest stages of their neighbours. time(t) counts stages in the order
  // in which they happen, and is -1 for those that come after s. What a part has waited for once it does not wait for
  // again.
  template <class Time>
  void find_waits(std::int32_t s, Time time, std::vector<std::vector<Waits::Wait>>& found) {
    for (int p = 0; p < plan_.parts; ++p) {
      std::vector<std::int32_t> latest(plan_.parts, -1);
      for (const auto& [level, part] : neighbours_[level_[s] * plan_.parts + p])
        for (const std::int32_t t : stages_[level])
          if (t >= 0) latest[part] = std::max(latest[part], time(t));
      for (int q = 0; q < plan_.parts; ++q) {
        std::int32_t& before = waited_[p * plan_.parts + q];
        if (latest[q] <= before) continue;
        before = latest[q];
        found[s * plan_.parts + p].push_back({q, latest[q]});
      }
    }
  }

  void gather(std::vector<std::vector<Waits::Wait>>& found, Waits& waits) {
    for (std::size_t k = 0; k < found.size(); ++k) {
      waits.list.insert(waits.list.end(), found[k].begin(), found[k].end());
      waits.start[k + 1] = static_cast<Index>(waits.list.size());
      found[k].clear();
    }
    std::fill(waited_.begin(), waited_.end(), -1);
  }

  Plan& plan_;
  const Placement& placement_;
  std::vector<std::array<std::int32_t, 2>> stages_;  // level -> its stages, or -1
  std::vector<Index> level_;                         // of each stage
  std::vector<std::vector<Neighbour>> neighbours_;   // (level, part)
  std::vector<std::int32_t> waited_;                 // (part, other part): the latest stage so far
};

}  // namespace

void find_waits(Plan& plan, const Placement& placement) { WaitFinder(plan, placement).run(); }

}  // namespace riskfield
