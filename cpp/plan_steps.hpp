// The steps of making a plan. First everything gets its place. Then updates are gathered into tiles and stages. The
// last step lists what threads have to wait for.
#pragma once

#include <algorithm>
#include <vector>

#include "interrupt.hpp"
#include "plan.hpp"

namespace riskfield {

// A maximal run of factors that stand next to each other in every slot, or a piece of one not longer than a vector.
struct Piece {
  Index first;
  std::int32_t count;
  bool long_run;   // see Placer::is_long
  Index operands;  // of a long run: start in Group::operands
};

// What the later steps need to know of the first, beside the plan itself.
struct Placement {
  Index num_levels = 0;
  std::vector<Index> node_level;           // packed node
  std::vector<std::int32_t> node_part;     // packed node: which part of its level updates it
  std::vector<std::vector<Piece>> pieces;  // group
  // group -> its factors in an order that does not depend on the parts; empty if there is one part, where it is theirs.
  std::vector<std::vector<std::int32_t>> order;
};

// Give nodes, messages and tables their addresses.
Placement make_placement(Plan& plan, const Index* num_states, const Index* rank, const Index* level,
                         const std::vector<GroupInput>& input);

// Gather the updates into tiles and these into stages.
void make_tiles(Plan& plan, const Placement& placement);

// List what the threads that share the plan have to wait for.
void find_waits(Plan& plan, const Placement& placement);

// Degrees below 8 share a bucket; hubs must not stand in one tile with leaves, which would be padded to their degree.
inline int degree_bucket(Index degree) {
  int bucket = 0;
  for (degree /= 8; degree > 0; degree /= 2) ++bucket;
  return bucket;
}

// What sorting works with, kept from one call to the next.
struct SortSpace {
  std::vector<Index> keys, next;
  std::vector<std::int32_t> result;
};

// Sorts some items by key(item), an integer, and leaves those with equal keys in their order. Keys of a small range, as
// levels and differences of positions are, are counted in place of compared, which takes linear time.
template <class Key>
void stable_sort_by(std::int32_t* items, Index count, Key key, Ticker& tick, SortSpace& space) {
  auto& [keys, next, result] = space;
  if (static_cast<Index>(keys.size()) < count) keys.resize(count);
  tick(count);
  bool sorted = true;
  for (Index k = 0; k < count; ++k) {
    keys[k] = key(items[k]);
    sorted &= k == 0 || keys[k - 1] <= keys[k];
  }
  if (sorted) return;
  const auto [low, high] = std::minmax_element(keys.begin(), keys.begin() + count);
  if (*high - *low > 4 * count) {
    std::stable_sort(items, items + count, [&](Index a, Index b) {
      tick(1);
      return key(a) < key(b);
    });
    return;
  }
  const Index smallest = *low;
  next.assign(*high - smallest + 2, 0);  // where the next item with a key goes
  for (Index k = 0; k < count; ++k) ++next[keys[k] - smallest + 1];
  for (std::size_t k = 1; k < next.size(); ++k) next[k] += next[k - 1];
  if (static_cast<Index>(result.size()) < count) result.resize(count);
  for (Index k = 0; k < count; ++k) result[next[keys[k] - smallest]++] = items[k];
  std::copy(result.begin(), result.begin() + count, items);
}
template <class Key>
void stable_sort_by(std::vector<std::int32_t>& items, Key key, Ticker& tick) {
  SortSpace space;
  stable_sort_by(items.data(), static_cast<Index>(items.size()), key, tick, space);
}

// For each entry of a table whose axes are those of `shape` in the order of `permutation`: which entry it is there.
inline std::vector<Index> entry_map(const std::vector<int>& shape, const std::vector<std::int32_t>& permutation) {
  const int arity = static_cast<int>(shape.size());
  std::vector<Index> stride(arity, 1);
  for (int k = arity - 2; k >= 0; --k) stride[k] = stride[k + 1] * shape[k + 1];
  std::vector<Index> map{0};
  for (const std::int32_t axis : permutation) {
    const std::vector<Index> before = std::move(map);
    map = {};
    for (const Index entry : before)
      for (int x = 0; x < shape[axis]; ++x) map.push_back(entry + x * stride[axis]);
  }
  return map;
}

// Whether the states of node q lie next to those of p, and both are updated together.
inline bool side_by_side(const Plan& plan, const Placement& placement, Index p, Index q) {
  return placement.node_level[p] == placement.node_level[q] && placement.node_part[p] == placement.node_part[q] &&
         plan.states[p] == plan.states[q] && plan.node_stride[p] == plan.node_stride[q] &&
         plan.node_address[q] == plan.node_address[p] + 1;
}

}  // namespace riskfield
