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
  std::vector<bool> first, last;  // whether a neutral message stands before, or after, this one
};

// A message to each node of a run: their addresses follow each other. Where the first or the last node of the run has
// no such message, a neutral one stands in its place.
struct Channel {
  Index address;  // for the first node
  std::int32_t stride;
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
    incoming.first.resize(incoming.start[n]);
    incoming.last.resize(incoming.start[n]);
    for (std::size_t g = 0; g < plan.groups.size(); ++g) {
      const Group& group = plan.groups[g];
      const std::vector<std::int32_t>& order = placement.order[g];
      const auto count = static_cast<Index>(group.position.size());
      for (Index k = 0; k < count; ++k) {
        const Index c = order.empty() ? k : order[k / group.arity] * group.arity + k % group.arity;
        const Index at = fill[group.position[c]]++, address = group.message[c];
        const std::int32_t stride = group.message_stride[c / group.arity];
        const bool in_row = plan.copies == 1 && stride >= plan.lanes;
        incoming.address[at] = address;
        incoming.stride[at] = stride;
        incoming.first[at] = in_row && (c < group.arity || group.message[c - group.arity] != address - 1);
        incoming.last[at] = in_row && (c + group.arity >= count || group.message[c + group.arity] != address + 1);
      }
    }
  }

  Index degree(Index p) const { return incoming.start[p + 1] - incoming.start[p]; }

  // Nodes from `first` on whose incoming messages lie side by side: each message to a node lies next to one to the node
  // before. The first and the last node may lack some messages, at most half, if neutral ones take their place. Returns
  // where the run ends and, in `channels`, its messages.
  Index find_run(Index first, std::vector<Channel>& channels) const {
    channels.clear();
    std::vector<Index> latest;  // of each channel, the place in `incoming` of its message to the last node so far
    for (Index at = incoming.start[first]; at < incoming.start[first + 1]; ++at) {
      channels.push_back({incoming.address[at], incoming.stride[at]});
      latest.push_back(at);
    }
    std::vector<Channel> wider;
    std::vector<Index> next;
    for (Index last = first + 1;; ++last) {
      if (last == plan.num_nodes || !side_by_side(plan, placement, last - 1, last)) return last;
      wider.clear();
      next.clear();
      Index ended = 0, begun = 0;
      Index at = incoming.start[last];
      const Index end = incoming.start[last + 1];
      auto begin_channel = [&] {
        wider.push_back({incoming.address[at] - 1, incoming.stride[at]});
        next.push_back(at);
        ++begun;
        return last == first + 1 && incoming.first[at++];
      };
      bool alike = true;
      for (std::size_t k = 0; k < channels.size() && alike; ++k) {
        const Channel& channel = channels[k];
        auto continues = [&](Index place) {
          return place < end && incoming.stride[place] == channel.stride &&
                 incoming.address[place] == channel.address + (last - first);
        };
        if (continues(at + 1)) alike = begin_channel();
        wider.push_back(channel);
        if (continues(at)) {
          next.push_back(at++);
        } else {  // the run ends here
          alike &= incoming.last[latest[k]];
          ++ended;
        }
      }
      while (at < end && alike) alike = begin_channel();
      if (!alike || 2 * (begun + ended) > static_cast<Index>(wider.size())) return last;
      if (begun > 0) channels = wider;
      latest = next;
      if (ended > 0) return last + 1;
    }
  }

  // Long runs of nodes whose messages lie side by side get tiles of their own; what stands between them is gathered.
  void tile_nodes() {
    std::vector<Channel> channels, others;
    for (Index first = 0; first < plan.num_nodes;) {
      begin_parts(part_of(first) + 1);
      const Index run = find_run(first, channels);
      Index last = run;
      if (2 * (run - first) < plan.lanes) {
        while (last < plan.num_nodes && side_by_side(plan, placement, last - 1, last)) {
          const Index next = find_run(last, others);
          if (2 * (next - last) >= plan.lanes || next - first > plan.lanes) break;
          last = next;
        }
      }
      tick(last - first);
      for (Index at = first; at < last; at += plan.lanes)
        add_node_tile(at, std::min<Index>(plan.lanes, last - at), last == run ? &channels : nullptr, at - first);
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

  // `shift` is the distance from where the channels begin; without channels, messages are gathered one by one.
  void add_node_tile(Index first, Index count, const std::vector<Channel>* channels, Index shift) {
    Index most = 0;
    for (Index p = first; p < first + count; ++p) most = std::max(most, degree(p));
    if (channels) most = static_cast<Index>(channels->size());
    plan.node_tiles.push_back({first, plan.node_address[first], static_cast<Index>(plan.connections.size()),
                               plan.node_stride[first], static_cast<std::int32_t>(most), plan.states[first], 1,
                               static_cast<std::int8_t>(count), true});
    for (Index d = 0; d < most; ++d) {
      if (channels)
        connect((*channels)[d], shift, count);
      else
        connect(first, count, d);
      plan.node_tiles.back().contiguous &= plan.connections.back().contiguous;
    }
  }

  // A vector may be read past the last lane only in rows that end with room for it (see Placer::row_length).
  bool has_room(std::int32_t stride) const { return plan.parts == 1 || stride >= plan.lanes; }

  void connect(const Channel& channel, Index shift, Index count) {
    if (has_room(channel.stride)) {
      plan.connections.push_back({channel.address + shift, channel.stride, true});
      return;
    }
    begin_gathering();
    for (Index l = 0; l < count; ++l) gather(channel.address + shift + l, channel.stride);
  }

  // The same for the d-th message of each node, if it has so many.
  void connect(Index first, Index count, Index d) {
    const auto& [start, address, stride, is_first, is_last] = incoming;
    const Index base = start[first] + d;
    bool contiguous = base < start[first + 1] && has_room(stride[base]);
    for (Index p = first; p < first + count && contiguous; ++p) {
      const Index at = start[p] + d;
      contiguous = d < degree(p) && address[at] == address[base] + (p - first) && stride[at] == stride[base];
    }
    if (contiguous) {
      plan.connections.push_back({address[base], stride[base], true});
      return;
    }
    begin_gathering();
    for (Index p = first; p < first + count; ++p)
      d < degree(p) ? gather(address[start[p] + d], stride[start[p] + d]) : gather(Plan::kNeutral, 1);
  }

  void begin_gathering() { plan.connections.push_back({static_cast<Index>(plan.lane_messages.size()), 0, false}); }
  void gather(Index address, std::int32_t stride) {
    plan.lane_messages.push_back(address);
    plan.lane_strides.push_back(stride);
  }

  // Collects factors that stand alone into tiles whose lanes are gathered one by one.
  struct Pool {
    Group& group;
    std::vector<FactorTile>& tiles;
    int width;
    bool between = false;
    std::vector<std::int32_t> waiting = {};
    void add(Index first, Index count) {
      for (Index i = 0; i < count; ++i) {
        waiting.push_back(static_cast<std::int32_t>(first + i));
        if (static_cast<int>(waiting.size()) == width) flush();
      }
    }
    void flush() {
      if (waiting.empty()) return;
      tiles.push_back({static_cast<Index>(group.lanes.size()), 0, 0, 0, 1, static_cast<std::int8_t>(waiting.size()),
                       false, false, between, false});
      group.lanes.insert(group.lanes.end(), waiting.begin(), waiting.end());
      waiting.clear();
    }
  };

  // The factors of a long run lie side by side in every respect.
  void add_piece(Group& group, const Piece& piece, Pool& pool) const {
    if (piece.long_run)
      pool.tiles.push_back({piece.first, group.table[piece.first], piece.operands, group.table_stride[piece.first], 1,
                            static_cast<std::int8_t>(piece.count), true,
                            plan.copies == 1 && group.shared[piece.first] >= 0, pool.between,
                            plan.copies > 1 && group.shared[piece.first] >= 0});
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
    Pool pool{group, group.all_tiles, plan.lanes};
    if (plan.parts > 1) group.between.assign(group.count, -1);
    std::int32_t number = 0;
    auto begin_parts = [&](int count) {
      while (static_cast<int>(group.part_tiles.size()) < count) {
        pool.flush();
        group.part_tiles.push_back(static_cast<Index>(group.all_tiles.size()));
      }
    };
    for (const std::int32_t k : order) {
      begin_parts(only_part(group, pieces[k]) + 1);
      pool.between = only_part(group, pieces[k]) == plan.parts;
      add_piece(group, pieces[k], pool);
      for (Index f = pieces[k].first; f < pieces[k].first + pieces[k].count && pool.between; ++f)
        group.between[f] = number++;
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
      Pool pool{group, plan.factor_tiles, plan.lanes};
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
      pool.between = true;
      for (const Piece& piece : between) add_piece(group, piece, pool);
      pool.flush();
      const auto end = static_cast<Index>(plan.factor_tiles.size());
      find_runs(plan.factor_tiles, begin, end, [&](const FactorTile& a, const FactorTile& b) {
        return follows(group, a, b) && (b.table == a.table || b.table == a.table + group.table_step(plan.lanes));
      });
      found.push_back({key, {static_cast<std::int32_t>(g), slot, begin, end, middle}});
    }
  }
};

}  // namespace

void make_tiles(Plan& plan, const Placement& placement) { Tiler(plan, placement).run(); }

}  // namespace riskfield
