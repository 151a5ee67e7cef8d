#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "interrupt.hpp"
#include "plan_steps.hpp"

namespace riskfield {
namespace {

// The messages that reach each packed node, as compressed lists.
struct Incoming {
  std::vector<Index> start, address;
  std::vector<std::int32_t> stride;
};

struct Tiler {
  Plan& plan;
  const Placement& placement;
  Incoming incoming;
  std::vector<Index> part_tiles;  // (level, part) -> first node tile
  Ticker tick;

  Tiler(Plan& p, const Placement& q) : plan(p), placement(q) {}

  void run() {
    find_incoming();
    tile_nodes();
    for (std::size_t g = 0; g < plan.groups.size(); ++g) tile_all_factors(g);
    build_stages();
  }

  void find_incoming() {
    const Index n = plan.num_nodes;
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
    if (!side_by_side(plan, placement, p, q) || degree(p) != degree(q)) return false;
    for (Index d = 0; d < degree(p); ++d) {
      const Index a = incoming.start[p] + d, b = incoming.start[q] + d;
      if (incoming.address[b] != incoming.address[a] + 1 || incoming.stride[a] != incoming.stride[b]) return false;
    }
    return true;
  }

  // Long runs of nodes whose messages lie side by side get tiles of their own; what stands between them is gathered.
  void tile_nodes() {
    for (Index first = 0; first < plan.num_nodes;) {
      begin_parts(part_of(first) + 1);
      Index last = run_end(first);
      if (2 * (last - first) < plan.lanes) {
        while (last < plan.num_nodes && side_by_side(plan, placement, last - 1, last)) {
          const Index next = run_end(last);
          if (2 * (next - last) >= plan.lanes || next - first > plan.lanes) break;
          last = next;
        }
      }
      tick(last - first);
      for (; first < last; first += plan.lanes) add_node_tile(first, std::min<Index>(plan.lanes, last - first));
      first = last;
    }
    begin_parts(placement.num_levels * plan.parts + 1);
    find_runs(plan.node_tiles, 0, static_cast<Index>(plan.node_tiles.size()),
              [&](const NodeTile& a, const NodeTile& b) { return follows(a, b); });
  }

  // Counts the tiles of each run, from the last on: follows(a, b) says whether tile b continues the run of a.
  template <class Tile, class Follows>
  static void find_runs(std::vector<Tile>& tiles, Index begin, Index end, Follows follows) {
    constexpr std::int16_t kLongest = std::numeric_limits<std::int16_t>::max();
    for (Index t = end - 2; t >= begin; --t)
      if (tiles[t + 1].run < kLongest && follows(tiles[t], tiles[t + 1]))
        tiles[t].run = static_cast<std::int16_t>(tiles[t + 1].run + 1);
  }

  bool follows(const NodeTile& a, const NodeTile& b) const {
    bool found = a.contiguous && b.contiguous && a.count == plan.lanes && b.first == a.first + plan.lanes &&
                 b.address == a.address + plan.lanes && a.stride == b.stride && a.degree == b.degree &&
                 a.states == b.states;
    for (Index d = 0; d < a.degree && found; ++d) {
      const Connection &from = plan.connections[a.connections + d], &to = plan.connections[b.connections + d];
      found = to.message == from.message + plan.lanes && from.stride == to.stride;
    }
    return found;
  }

  // Of factor tiles, in all but their tables.
  bool follows(const Group& group, const FactorTile& a, const FactorTile& b) const {
    bool found = a.contiguous && b.contiguous && a.count == plan.lanes && a.shared == b.shared &&
                 b.first == a.first + plan.lanes;
    for (int k = 0; k < group.arity && found; ++k) {
      const Operand &from = group.operands[a.operands + k], &to = group.operands[b.operands + k];
      found = to.message == from.message + plan.lanes && to.node == from.node + plan.lanes &&
              from.message_stride == to.message_stride && from.node_stride == to.node_stride;
    }
    return found;
  }

  // The level and part of a packed node as one number, which grows along the packed nodes.
  Index part_of(Index p) const { return placement.node_level[p] * plan.parts + placement.node_part[p]; }

  // The first `count` parts of all levels begin at or before the next node tile.
  void begin_parts(Index count) {
    while (static_cast<Index>(part_tiles.size()) < count)
      part_tiles.push_back(static_cast<Index>(plan.node_tiles.size()));
  }

  Index run_end(Index first) const {
    Index last = first + 1;
    while (last < plan.num_nodes && heard_alike(last - 1, last)) ++last;
    return last;
  }

  void add_node_tile(Index first, Index count) {
    Index most = 0;
    for (Index p = first; p < first + count; ++p) most = std::max(most, degree(p));
    plan.node_tiles.push_back({first, plan.node_address[first], static_cast<Index>(plan.connections.size()),
                               plan.node_stride[first], static_cast<std::int32_t>(most), plan.states[first], 1,
                               static_cast<std::int8_t>(count), true});
    for (Index d = 0; d < most; ++d) {
      connect_lanes(plan.node_tiles.back(), d);
      plan.node_tiles.back().contiguous &= plan.connections.back().contiguous;
    }
  }

  void connect_lanes(const NodeTile& tile, Index d) {
    const auto& [start, address, stride] = incoming;
    const Index first = start[tile.first] + d;
    // A vector may be read past the last lane only in rows that end with room for it (see Placer::row_length).
    bool contiguous = plan.parts == 1 || (first < start[tile.first + 1] && stride[first] >= plan.lanes);
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
      plan.lane_messages.push_back(exists ? address[at] : Plan::kNeutral);
      plan.lane_strides.push_back(exists ? stride[at] : 1);
    }
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
      tiles.push_back({static_cast<Index>(group.lanes.size()), 0, 0, 0, 1, static_cast<std::int16_t>(waiting.size()),
                       false, false});
      group.lanes.insert(group.lanes.end(), waiting.begin(), waiting.end());
      waiting.clear();
    }
  };

  // The factors of a long run lie side by side in every respect.
  void add_piece(Group& group, const Piece& piece, Pool& pool) const {
    if (piece.long_run)
      pool.tiles.push_back({piece.first, group.table[piece.first], piece.operands,
                            static_cast<std::int16_t>(group.table_stride[piece.first]), 1,
                            static_cast<std::int16_t>(piece.count), true,
                            plan.copies == 1 && group.shared[piece.first] >= 0});
    else
      pool.add(piece.first, piece.count);
  }

  // The part that all nodes of a piece belong to, or the number of parts if they belong to several. All factors of a
  // piece are alike in this.
  int only_part(const Group& group, const Piece& piece) const {
    const std::int32_t* nodes = &group.position[piece.first * group.arity];
    const int part = placement.node_part[nodes[0]];
    for (int k = 1; k < group.arity; ++k)
      if (placement.node_part[nodes[k]] != part) return plan.parts;
    return part;
  }

  void tile_all_factors(std::size_t g) {
    Group& group = plan.groups[g];
    const auto& pieces = placement.pieces[g];
    std::vector<std::int32_t> order(pieces.size());
    std::iota(order.begin(), order.end(), 0);
    if (plan.parts > 1) stable_sort_by(order, [&](Index k) { return Index(only_part(group, pieces[k])); }, tick);
    Pool pool{group, group.all_tiles, plan.lanes, {}};
    auto begin_parts = [&](int count) {
      while (static_cast<int>(group.part_tiles.size()) < count) {
        pool.flush();
        group.part_tiles.push_back(static_cast<Index>(group.all_tiles.size()));
      }
    };
    for (const std::int32_t k : order) {
      begin_parts(only_part(group, pieces[k]) + 1);
      add_piece(group, pieces[k], pool);
    }
    begin_parts(plan.parts + 2);
  }

  void build_stages() {
    if (plan.sweep == Sweep::kForwardBackward) {
      add_stages(+1, [](int slot, int arity) { return slot > 0 || arity == 1; });
      add_stages(-1, [](int slot, int arity) { return slot < arity - 1; });
    } else {
      add_stages(+1, [](int, int) { return true; });
    }
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
      return direction > 0 ? l : placement.num_levels - 1 - l;
    };
    std::stable_sort(found.begin(), found.end(), [&](const auto& a, const auto& b) {
      return std::make_pair(level_in_order(a.first), a.first) < std::make_pair(level_in_order(b.first), b.first);
    });
    const bool every_level = plan.sweep == Sweep::kLevelByLevel;
    std::size_t at = 0;
    for (Index step = 0; step < placement.num_levels; ++step) {
      const Index current = direction > 0 ? step : placement.num_levels - 1 - step;
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
    const auto& pieces = placement.pieces[g];
    // The factors of a piece reach nodes of one part.
    auto key_of = [&](Index k) { return part_of(group.position[pieces[k].first * group.arity + slot]); };
    std::vector<std::int32_t> order(pieces.size());
    std::iota(order.begin(), order.end(), 0);
    stable_sort_by(order, key_of, tick);
    for (std::size_t k = 0; k < order.size();) {
      const Index key = key_of(order[k]), begin = static_cast<Index>(plan.factor_tiles.size());
      Pool pool{group, plan.factor_tiles, plan.lanes, {}};
      std::vector<Piece> between;
      for (; k < order.size() && key_of(order[k]) == key; ++k) {
        const Piece& piece = pieces[order[k]];
        if (only_part(group, piece) < plan.parts)
          add_piece(group, piece, pool);
        else
          between.push_back(piece);
      }
      pool.flush();
      const auto middle = static_cast<Index>(plan.factor_tiles.size());
      for (const Piece& piece : between) add_piece(group, piece, pool);
      pool.flush();
      const auto end = static_cast<Index>(plan.factor_tiles.size());
      find_runs(plan.factor_tiles, begin, end, [&](const FactorTile& a, const FactorTile& b) {
        return follows(group, a, b) && (b.table == a.table || b.table == a.table + plan.lanes * group.table_size);
      });
      found.push_back({key, {static_cast<std::int32_t>(g), slot, begin, end, middle}});
    }
  }
};

}  // namespace

void make_tiles(Plan& plan, const Placement& placement) { Tiler(plan, placement).run(); }

}  // namespace riskfield
