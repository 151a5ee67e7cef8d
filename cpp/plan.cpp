#include "plan.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

namespace riskfield {
namespace {

// Longer blocks would put the states of one item too far apart.
constexpr Index kLongestBlock = 1024;

// Degrees below 8 share a bucket; hubs must not stand in one tile with leaves, which would be padded to their degree.
int degree_bucket(Index degree) {
  int bucket = 0;
  for (degree /= 8; degree > 0; degree /= 2) ++bucket;
  return bucket;
}

// A maximal run of factors that stand next to each other in every slot, or a piece of one not longer than a vector.
struct Piece {
  Index first;
  std::int32_t count;
  bool long_run;  // whether the run it belongs to fills at least half a vector
};

// The messages that reach each packed node, as compressed lists.
struct Incoming {
  std::vector<Index> start, address;
  std::vector<std::int32_t> stride;
};

}  // namespace

struct Plan::Builder {
  Plan& plan;
  const Index* num_states;
  const Index* rank;
  const Index* level;
  const std::vector<UserGroup>& user;
  std::vector<std::int32_t> packed;            // variable -> packed node
  std::vector<Index> node_level;               // packed node
  std::vector<Index> part_tiles;               // (level, part) -> first node tile
  std::vector<std::vector<Index>> shared_key;  // group -> factor -> shared table or -1
  std::vector<std::vector<Piece>> pieces;      // group
  Incoming incoming;
  Index num_levels = 0;

  Builder(Plan& p, const Index* s, const Index* r, const Index* l, const std::vector<UserGroup>& u)
      : plan(p), num_states(s), rank(r), level(l), user(u) {}

  void build() {
    pack_nodes();
    collect_factors();
    for (std::size_t g = 0; g < plan.groups.size(); ++g) {
      sort_factors(g);
      place_factors(g);
    }
    find_incoming();
    tile_nodes();
    for (std::size_t g = 0; g < plan.groups.size(); ++g) tile_all_factors(g);
    build_stages();
  }

  void pack_nodes() {
    const Index n = plan.num_variables;
    std::vector<Index> degree(n, 0);
    for (const auto& g : user)
      for (Index k = 0; k < g.count * static_cast<Index>(g.shape.size()); ++k) ++degree[g.variables[k]];
    std::vector<std::int32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    auto key = [&](Index v) { return std::make_tuple(level[v], num_states[v], degree_bucket(degree[v])); };
    std::sort(order.begin(), order.end(),
              [&](Index a, Index b) { return std::make_tuple(key(a), rank[a]) < std::make_tuple(key(b), rank[b]); });
    plan.variable = order;
    packed.resize(n);
    plan.node_address.resize(n);
    plan.node_stride.resize(n);
    plan.states.resize(n);
    node_level.resize(n);
    Index address = 0;
    for (Index first = 0; first < n;) {
      Index last = first;
      while (last < n && last - first < kLongestBlock && key(order[last]) == key(order[first])) ++last;
      const Index states = num_states[order[first]];
      for (Index p = first; p < last; ++p) {
        packed[order[p]] = static_cast<std::int32_t>(p);
        plan.node_address[p] = address + (p - first);
        plan.node_stride[p] = static_cast<std::int32_t>(last - first);
        plan.states[p] = static_cast<std::int32_t>(states);
        node_level[p] = level[order[p]];
        num_levels = std::max(num_levels, level[order[p]] + 1);
      }
      address += states * (last - first);
      plan.max_states = std::max(plan.max_states, static_cast<int>(states));
      first = last;
    }
    plan.node_size = address;
  }

  // Sort the variables of every factor by rank and gather factors of equal (re-ordered) shape.
  void collect_factors() {
    std::map<std::vector<int>, int> group_of;
    for (std::size_t u = 0; u < user.size(); ++u) {
      const UserGroup& from = user[u];
      const int arity = static_cast<int>(from.shape.size());
      std::map<std::pair<std::vector<std::int32_t>, Index>, Index> shared_ids;
      std::map<std::vector<std::int32_t>, std::pair<int, std::int32_t>> known;  // permutation -> (group, its number)
      std::vector<std::int32_t> permutation(arity), last_permutation;
      std::pair<int, std::int32_t> place;
      for (Index row = 0; row < from.count; ++row) {
        const Index* variables = from.variables + row * arity;
        std::iota(permutation.begin(), permutation.end(), 0);
        std::sort(permutation.begin(), permutation.end(),
                  [&](int a, int b) { return rank[variables[a]] < rank[variables[b]]; });
        if (row == 0 || permutation != last_permutation) {
          auto found = known.find(permutation);
          if (found == known.end())
            found = known.emplace(permutation, place_permutation(group_of, from, permutation)).first;
          place = found->second;
          last_permutation = permutation;
        }
        Group& group = plan.groups[place.first];
        group.user_group.push_back(static_cast<std::int32_t>(u));
        group.user_row.push_back(static_cast<std::int32_t>(row));
        group.permutation.push_back(place.second);
        for (int k = 0; k < arity; ++k) group.position.push_back(packed[variables[permutation[k]]]);
        Index shared = -1;
        if (from.tied) {
          auto inserted = shared_ids.emplace(std::make_pair(permutation, from.shared[row]), plan.shared_tables.size());
          if (inserted.second) {
            plan.shared_tables.push_back({place.first, place.second, plan.table_size, 0});
            plan.table_size += group.table_size;
          }
          shared = inserted.first->second;
        }
        shared_key[place.first].push_back(shared);
        ++group.count;
      }
    }
  }

  std::pair<int, std::int32_t> place_permutation(std::map<std::vector<int>, int>& group_of, const UserGroup& from,
                                                 const std::vector<std::int32_t>& permutation) {
    const int arity = static_cast<int>(permutation.size());
    std::vector<int> dims(arity);
    for (int k = 0; k < arity; ++k) dims[k] = from.shape[permutation[k]];
    auto inserted = group_of.emplace(dims, static_cast<int>(plan.groups.size()));
    if (inserted.second) {
      Group group;
      group.arity = arity;
      group.dims = dims;
      for (int d : dims) group.table_size *= d;
      plan.max_table = std::max(plan.max_table, group.table_size);
      plan.groups.push_back(std::move(group));
      shared_key.emplace_back();
    }
    Group& group = plan.groups[inserted.first->second];
    for (std::size_t k = 0; k < group.permutations.size(); ++k)
      if (group.permutations[k] == permutation) return {inserted.first->second, static_cast<std::int32_t>(k)};
    std::vector<Index> user_stride(arity, 1);
    for (int k = arity - 2; k >= 0; --k) user_stride[k] = user_stride[k + 1] * from.shape[k + 1];
    std::vector<Index> map(group.table_size);
    for (Index entry = 0; entry < group.table_size; ++entry) {
      Index rest = entry, target = 0;
      for (int k = arity - 1; k >= 0; --k) {
        target += (rest % dims[k]) * user_stride[permutation[k]];
        rest /= dims[k];
      }
      map[entry] = target;
    }
    group.permutations.push_back(permutation);
    group.entry_maps.push_back(std::move(map));
    return {inserted.first->second, static_cast<std::int32_t>(group.permutations.size() - 1)};
  }

  // Factors between the same levels stand together; among them, those with equal distances between their variables, so
  // that consecutive factors join consecutive nodes. On a grid each direction becomes one run per level.
  void sort_factors(std::size_t g) {
    Group& group = plan.groups[g];
    const int arity = group.arity;
    const auto& position = group.position;
    const auto& shared = shared_key[g];
    auto less = [&](Index a, Index b) {
      const std::int32_t *pa = &position[a * arity], *pb = &position[b * arity];
      for (int k = arity - 1; k >= 0; --k)
        if (node_level[pa[k]] != node_level[pb[k]]) return node_level[pa[k]] < node_level[pb[k]];
      if (shared[a] != shared[b]) return shared[a] < shared[b];
      for (int k = arity - 2; k >= 0; --k) {
        const Index da = pa[arity - 1] - pa[k], db = pb[arity - 1] - pb[k];
        if (da != db) return da < db;
      }
      if (pa[arity - 1] != pb[arity - 1]) return pa[arity - 1] < pb[arity - 1];
      return a < b;
    };
    std::vector<Index> order(group.count);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), less);
    auto apply = [&](auto& values, int width) {
      auto old = values;
      for (Index f = 0; f < group.count; ++f)
        for (int k = 0; k < width; ++k) values[f * width + k] = old[order[f] * width + k];
    };
    apply(group.user_group, 1);
    apply(group.user_row, 1);
    apply(group.permutation, 1);
    apply(group.position, arity);
    apply(shared_key[g], 1);
  }

  bool side_by_side(Index p, Index q) const {
    return node_level[p] == node_level[q] && plan.states[p] == plan.states[q] &&
           plan.node_stride[p] == plan.node_stride[q] && plan.node_address[q] == plan.node_address[p] + 1;
  }

  bool adjacent(const Group& group, std::size_t g, Index f) const {
    if (shared_key[g][f] != shared_key[g][f + 1]) return false;
    for (int k = 0; k < group.arity; ++k) {
      const Index p = group.position[f * group.arity + k], q = group.position[(f + 1) * group.arity + k];
      if (q != p + 1 || !side_by_side(p, q)) return false;
    }
    return true;
  }

  // Messages of a long run form one block; tables one block per vector, so that a tile streams through its tables.
  void place_factors(std::size_t g) {
    Group& group = plan.groups[g];
    group.table.resize(group.count);
    group.table_stride.resize(group.count);
    group.message.resize(group.count * group.arity);
    group.message_stride.resize(group.count);
    group.shared.resize(group.count);
    pieces.emplace_back();
    for (Index first = 0; first < group.count;) {
      Index last = first + 1;
      while (last < group.count && adjacent(group, g, last - 1)) ++last;
      const bool long_run = 2 * (last - first) >= plan.lanes;
      for (Index f = first; f < last;) {
        const Index block = long_run ? std::min(kLongestBlock, last - f) : 1;
        for (int k = 0; k < group.arity; ++k) {
          for (Index i = 0; i < block; ++i) {
            group.message[(f + i) * group.arity + k] = plan.message_size + i;
            group.message_stride[f + i] = static_cast<std::int32_t>(block);
          }
          plan.message_size += block * group.dims[k];
        }
        for (Index start = f; start < f + block; start += plan.lanes) {
          const Index count = std::min<Index>(plan.lanes, f + block - start);
          pieces[g].push_back({start, static_cast<std::int32_t>(count), long_run});
          place_tables(group, g, start, count);
        }
        f += block;
      }
      first = last;
    }
  }

  void place_tables(Group& group, std::size_t g, Index start, Index count) {
    for (Index i = 0; i < count; ++i) {
      const Index shared = shared_key[g][start + i];
      group.shared[start + i] = static_cast<std::int32_t>(shared);
      if (shared >= 0) plan.shared_tables[shared].factor = start + i;
      group.table[start + i] = shared >= 0 ? plan.shared_tables[shared].address : plan.table_size + i;
      group.table_stride[start + i] = shared >= 0 ? 1 : static_cast<std::int32_t>(count);
    }
    if (shared_key[g][start] < 0) plan.table_size += count * group.table_size;
  }

  void find_incoming() {
    const Index n = plan.num_variables;
    incoming.start.assign(n + 1, 0);
    for (const auto& group : plan.groups)
      for (auto p : group.position) ++incoming.start[p + 1];
    std::partial_sum(incoming.start.begin(), incoming.start.end(), incoming.start.begin());
    std::vector<Index> fill(incoming.start.begin(), incoming.start.end() - 1);
    incoming.address.resize(incoming.start[n]);
    incoming.stride.resize(incoming.start[n]);
    for (const auto& group : plan.groups)
      for (Index c = 0; c < static_cast<Index>(group.position.size()); ++c) {
        const Index at = fill[group.position[c]]++;
        incoming.address[at] = group.message[c];
        incoming.stride[at] = group.message_stride[c / group.arity];
      }
  }

  Index degree(Index p) const { return incoming.start[p + 1] - incoming.start[p]; }

  // Whether all messages to q lie next to those to p.
  bool heard_alike(Index p, Index q) const {
    if (!side_by_side(p, q) || degree(p) != degree(q)) return false;
    for (Index d = 0; d < degree(p); ++d) {
      const Index a = incoming.start[p] + d, b = incoming.start[q] + d;
      if (incoming.address[b] != incoming.address[a] + 1 || incoming.stride[a] != incoming.stride[b]) return false;
    }
    return true;
  }

  // Long runs of nodes whose messages lie side by side get tiles of their own; what stands between them is gathered.
  void tile_nodes() {
    std::vector<Index> level_tiles(num_levels + 1, 0);
    Index current = 0;
    for (Index first = 0; first < plan.num_variables;) {
      while (current < node_level[first]) level_tiles[++current] = static_cast<Index>(plan.node_tiles.size());
      Index last = run_end(first);
      if (2 * (last - first) < plan.lanes) {
        while (last < plan.num_variables && side_by_side(last - 1, last)) {
          const Index next = run_end(last);
          if (2 * (next - last) >= plan.lanes || next - first > plan.lanes) break;
          last = next;
        }
      }
      for (; first < last; first += plan.lanes) add_node_tile(first, std::min<Index>(plan.lanes, last - first));
      first = last;
    }
    while (current < num_levels) level_tiles[++current] = static_cast<Index>(plan.node_tiles.size());
    for (Index l = 0; l < num_levels; ++l)
      for (int part = 0; part < plan.parts; ++part)
        part_tiles.push_back(level_tiles[l] + (level_tiles[l + 1] - level_tiles[l]) * part / plan.parts);
    part_tiles.push_back(static_cast<Index>(plan.node_tiles.size()));
  }

  // The packed node at which a part of a level begins.
  Index part_begin(Index level_and_part) const {
    const Index tile = part_tiles[level_and_part];
    return tile < static_cast<Index>(plan.node_tiles.size()) ? plan.node_tiles[tile].first : plan.num_variables;
  }

  Index run_end(Index first) const {
    Index last = first + 1;
    while (last < plan.num_variables && heard_alike(last - 1, last)) ++last;
    return last;
  }

  void add_node_tile(Index first, Index count) {
    Index most = 0;
    for (Index p = first; p < first + count; ++p) most = std::max(most, degree(p));
    plan.node_tiles.push_back({first, plan.node_address[first], static_cast<Index>(plan.connections.size()),
                               plan.node_stride[first], static_cast<std::int32_t>(most), plan.states[first],
                               static_cast<std::int16_t>(count), true});
    for (Index d = 0; d < most; ++d) {
      connect_lanes(plan.node_tiles.back(), d);
      plan.node_tiles.back().contiguous &= plan.connections.back().contiguous;
    }
  }

  void connect_lanes(const NodeTile& tile, Index d) {
    const auto& [start, address, stride] = incoming;
    const Index first = start[tile.first] + d;
    bool contiguous = true;
    for (Index l = 0; l < tile.count && contiguous; ++l) {
      const Index p = tile.first + l, at = start[p] + d;
      contiguous = at < start[p + 1] && address[at] == address[first] + l && stride[at] == stride[first];
    }
    if (contiguous) {
      plan.connections.push_back({address[first], stride[first], true});
      return;
    }
    plan.connections.push_back({static_cast<Index>(plan.lane_messages.size()), 0, false});
    for (Index l = 0; l < tile.count; ++l) {
      const Index p = tile.first + l, at = start[p] + d;
      const bool exists = at < start[p + 1];
      plan.lane_messages.push_back(exists ? address[at] : kNeutral);
      plan.lane_strides.push_back(exists ? stride[at] : 1);
    }
  }

  // A tile of `count` factors from `first` on, which lie side by side in every respect.
  FactorTile contiguous_tile(Group& group, Index first, Index count) const {
    const auto operands = static_cast<Index>(group.operands.size());
    for (int k = 0; k < group.arity; ++k) {
      const Index c = first * group.arity + k;
      const Index p = group.position[c];
      group.operands.push_back(
          {group.message[c], plan.node_address[p], group.message_stride[first], plan.node_stride[p]});
    }
    return {first, group.table[first],      operands, group.table_stride[first], static_cast<std::int16_t>(count),
            true,  group.shared[first] >= 0};
  }

  // Collects factors that stand alone into tiles whose lanes are gathered one by one.
  struct Pool {
    Group& group;
    std::vector<FactorTile>& tiles;
    int width;
    std::vector<std::int32_t> waiting;
    void add(Index first, Index count) {
      for (Index i = 0; i < count; ++i) {
        waiting.push_back(static_cast<std::int32_t>(first + i));
        if (static_cast<int>(waiting.size()) == width) flush();
      }
    }
    void flush() {
      if (waiting.empty()) return;
      tiles.push_back(
          {static_cast<Index>(group.lanes.size()), 0, 0, 0, static_cast<std::int16_t>(waiting.size()), false, false});
      group.lanes.insert(group.lanes.end(), waiting.begin(), waiting.end());
      waiting.clear();
    }
  };

  void tile_all_factors(std::size_t g) {
    Group& group = plan.groups[g];
    Pool pool{group, group.all_tiles, plan.lanes, {}};
    for (const Piece& piece : pieces[g]) {
      if (piece.long_run)
        group.all_tiles.push_back(contiguous_tile(group, piece.first, piece.count));
      else
        pool.add(piece.first, piece.count);
    }
    pool.flush();
  }

  void build_stages() {
    if (plan.sweep == Sweep::kForwardBackward) {
      add_stages(+1, [](int slot, int arity) { return slot > 0 || arity == 1; });
      add_stages(-1, [](int slot, int arity) { return slot < arity - 1; });
    } else {
      add_stages(+1, [](int, int) { return true; });
    }
    double entries = 0;
    for (const auto& range : plan.ranges)
      for (Index t = range.begin; t < range.end; ++t)
        entries += static_cast<double>(plan.factor_tiles[t].count * plan.groups[range.group].table_size);
    plan.mean_stage_entries = plan.stages.empty() ? 0 : entries / static_cast<double>(plan.num_stages());
  }

  template <class Updated>
  void add_stages(int direction, Updated updated) {
    std::vector<std::pair<Index, TileRange>> found;  // (level and part, range)
    for (std::size_t g = 0; g < plan.groups.size(); ++g) {
      Group& group = plan.groups[g];
      for (int slot = 0; slot < group.arity; ++slot)
        if (updated(slot, group.arity)) tile_slot(g, slot, found);
    }
    auto level_in_order = [&](Index level_and_part) {
      const Index l = level_and_part / plan.parts;
      return direction > 0 ? l : num_levels - 1 - l;
    };
    std::stable_sort(found.begin(), found.end(), [&](const auto& a, const auto& b) {
      return std::make_pair(level_in_order(a.first), a.first) < std::make_pair(level_in_order(b.first), b.first);
    });
    const bool every_level = plan.sweep == Sweep::kLevelByLevel;
    std::size_t at = 0;
    for (Index step = 0; step < num_levels; ++step) {
      const Index current = direction > 0 ? step : num_levels - 1 - step;
      const bool sends = at < found.size() && found[at].first / plan.parts == current;
      if (!sends && !every_level) continue;
      for (int part = 0; part < plan.parts; ++part) {
        const Index key = current * plan.parts + part;
        const auto begin = static_cast<std::int32_t>(plan.ranges.size());
        for (; at < found.size() && found[at].first == key; ++at) plan.ranges.push_back(found[at].second);
        plan.stages.push_back(
            {begin, static_cast<std::int32_t>(plan.ranges.size()), part_tiles[key], part_tiles[key + 1]});
      }
    }
  }

  // Tiles for the messages to one slot, level by level of the receiving nodes and part by part.
  void tile_slot(std::size_t g, int slot, std::vector<std::pair<Index, TileRange>>& found) {
    Group& group = plan.groups[g];
    auto node_of = [&](Index f) { return static_cast<Index>(group.position[f * group.arity + slot]); };
    auto level_of = [&](Index k) { return node_level[node_of(pieces[g][k].first)]; };
    std::vector<Index> order(pieces[g].size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) { return level_of(a) < level_of(b); });
    for (std::size_t first = 0; first < order.size();) {
      const Index current = level_of(order[first]);
      std::size_t last = first;
      while (last < order.size() && level_of(order[last]) == current) ++last;
      for (int part = 0; part < plan.parts; ++part) {
        const Index key = current * plan.parts + part;
        const Index low = part_begin(key), high = part == plan.parts - 1 ? plan.num_variables : part_begin(key + 1);
        const Index begin = static_cast<Index>(plan.factor_tiles.size());
        Pool pool{group, plan.factor_tiles, plan.lanes, {}};
        for (std::size_t k = first; k < last; ++k) {
          const Piece& piece = pieces[g][order[k]];
          // Consecutive factors of a piece reach consecutive nodes.
          const Index node = node_of(piece.first);
          const Index skip = std::max<Index>(0, low - node);
          const Index count = std::min<Index>(piece.count, high - node) - skip;
          if (count <= 0) continue;
          if (piece.long_run)
            plan.factor_tiles.push_back(contiguous_tile(group, piece.first + skip, count));
          else
            pool.add(piece.first + skip, count);
        }
        pool.flush();
        const Index end = static_cast<Index>(plan.factor_tiles.size());
        if (begin < end) found.push_back({key, {static_cast<std::int32_t>(g), slot, begin, end}});
      }
      first = last;
    }
  }
};

Plan::Plan(int lanes_, int parts_, Sweep sweep_, Index num_variables_, const Index* num_states,
           const Index* node_start_, const Index* rank, const Index* level, const std::vector<UserGroup>& user)
    : lanes(lanes_),
      parts(parts_),
      sweep(sweep_),
      num_variables(num_variables_),
      node_start(node_start_, node_start_ + num_variables_) {
  for (Index v = 0; v < num_variables; ++v) max_states = std::max(max_states, static_cast<int>(num_states[v]));
  message_size = max_states + lanes;  // the neutral message
  Builder(*this, num_states, rank, level, user).build();
  user_groups = user;
  for (auto& group : user_groups) {
    user_tables.emplace_back(group.tables, group.tables + group.count);
    group.variables = group.tables = group.shared = nullptr;
  }
}

}  // namespace riskfield
