#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "interrupt.hpp"
#include "plan_steps.hpp"

namespace riskfield {
namespace {

// Longer blocks would put the states of one item too far apart; of shorter ones there are more ends, where tiles have
// to be gathered.
constexpr Index kLongestBlock = 4096;

struct Placer {
  Plan& plan;
  const Index* num_states;
  const Index* rank;
  const Index* level;
  const std::vector<GroupInput>& input;
  Placement out;
  std::vector<std::int32_t> packed;            // variable -> packed node of the first copy
  std::vector<Index> block;                    // packed node: equal for those that one thread would keep in one block
  std::vector<std::vector<Index>> shared_key;  // group -> factor -> shared table or -1
  mutable Ticker tick;

  Placer(Plan& p, const Index* s, const Index* r, const Index* l, const std::vector<GroupInput>& i)
      : plan(p), num_states(s), rank(r), level(l), input(i) {}

  void run() {
    pack_nodes();
    collect_factors();
    plan.tied_size = plan.table_size;
    for (std::size_t g = 0; g < plan.groups.size(); ++g) sort_factors(g);
    place_nodes();
    out.order.resize(plan.groups.size());
    for (std::size_t g = 0; g < plan.groups.size(); ++g) place_factors(g);
  }

  void pack_nodes() {
    const auto n = static_cast<Index>(plan.node_start.size());
    std::vector<Index> degree(n, 0);
    for (const auto& g : input)
      for (Index k = 0; k < g.layout.count * static_cast<Index>(g.layout.shape.size()); ++k) ++degree[g.variables[k]];
    auto key = [&](Index v) { return std::make_tuple(level[v], num_states[v], degree_bucket(degree[v])); };
    std::vector<std::int32_t> order(n);
    for (Index v = 0; v < n; ++v) order[rank[v]] = static_cast<std::int32_t>(v);
    stable_sort_by(order, [&](Index v) { return Index(degree_bucket(degree[v])); }, tick);
    stable_sort_by(order, [&](Index v) { return num_states[v]; }, tick);
    stable_sort_by(order, [&](Index v) { return level[v]; }, tick);
    const Index nodes = plan.num_nodes;
    packed.resize(n);
    plan.variable.resize(nodes);
    plan.node_address.resize(nodes);
    plan.node_stride.resize(nodes);
    plan.states.resize(nodes);
    out.node_level.resize(nodes);
    for (Index p = 0; p < nodes; ++p) {
      const std::int32_t v = order[p / plan.copies];
      if (plan.copy_of(p) == 0) packed[v] = static_cast<std::int32_t>(p);
      plan.variable[p] = v;
      plan.states[p] = static_cast<std::int32_t>(num_states[v]);
      out.node_level[p] = level[v];
      out.num_levels = std::max(out.num_levels, level[v] + 1);
    }
    divide_levels();
    block.resize(nodes);
    for (Index first = 0, last = 0; first < nodes; first = last) {
      const auto first_key = key(plan.variable[first]);
      while (last < nodes && last - first < kLongestBlock && key(plan.variable[last]) == first_key)
        block[last++] = first;
      tick(1);
    }
  }

  // Where no long run of factors reaches a block of nodes with many states, the states of each node stand together.
  void place_nodes() {
    const Index nodes = plan.num_nodes;
    std::vector<bool> in_rows(nodes, false);  // of the first node of each block
    for (std::size_t g = 0; g < plan.groups.size(); ++g) {
      const Group& group = plan.groups[g];
      if (std::none_of(group.dims.begin(), group.dims.end(), [&](int n) { return plan.has_many(n); })) continue;
      for (Index first = 0, last = 0; first < group.count; first = last) {
        last = end_of_run(group, g, first);
        tick(last - first);
        for (int k = 0; k < group.arity && is_long(group, last - first); ++k)
          in_rows[block[group.position[first * group.arity + k]]] = true;
      }
    }
    // What a thread updates stands together: hardware prefetches what follows, which others may be writing.
    for (int part = 0; part < plan.parts; ++part)
      for (Index first = 0, last = 0; first < nodes; first = last) {
        while (last < nodes && block[last] == block[first] && out.node_part[last] == out.node_part[first]) ++last;
        if (out.node_part[first] != part) continue;
        const bool apart = !in_rows[block[first]] && plan.has_many(plan.states[first]);
        const Index states = plan.states[first], stride = apart ? 1 : row_length(last - first);
        for (Index p = first; p < last; ++p) {
          plan.node_address[p] = plan.node_size + (p - first) * (apart ? states : 1);
          plan.node_stride[p] = static_cast<std::int32_t>(stride);
        }
        plan.node_size += apart ? row_length((last - first) * states) : states * stride;
      }
  }

  // Each part of a level gets about as many vectors of nodes as the others.
  void divide_levels() {
    out.node_part.assign(plan.num_nodes, 0);
    for (Index first = 0; first < plan.num_nodes && plan.parts > 1;) {
      Index last = first;
      while (last < plan.num_nodes && out.node_level[last] == out.node_level[first]) ++last;
      const Index vectors = (last - first + plan.lanes - 1) / plan.lanes;
      for (int part = 0; part < plan.parts; ++part) {
        const Index begin = first + vectors * part / plan.parts * plan.lanes;
        const Index end = std::min(last, first + vectors * (part + 1) / plan.parts * plan.lanes);
        for (Index p = begin; p < end; ++p) out.node_part[p] = part;
      }
      first = last;
    }
  }

  // Entry x of all members of a block is a row. Vectors are read whole, past the end of a row if they begin near it.
  // Where threads share a plan, rows end with room for that, so that no thread reads what another one may be writing.
  Index row_length(Index members) const { return whole_vectors(plan.parts == 1 ? members : members + plan.lanes - 1); }

  // A row of messages also stands between two neutral ones. They serve the variables at the ends of a level, which have
  // fewer neighbours than those between them (see Tiler::find_run). With batch lanes the copies of a variable are
  // alike.
  Index message_row_length(Index members) const { return row_length(plan.copies == 1 ? members + 1 : members); }

  // Rows and tables begin where a vector may, so that most vectors are in one cache line.
  Index whole_vectors(Index count) const { return (count + plan.lanes - 1) / plan.lanes * plan.lanes; }

  // Sort the variables of every factor by rank and gather factors of equal (re-ordered) shape.
  void collect_factors() {
    std::map<std::vector<int>, int> group_of;
    for (std::size_t u = 0; u < input.size(); ++u) {
      const GroupInput& from = input[u];
      const int arity = static_cast<int>(from.layout.shape.size());
      std::map<std::pair<std::vector<std::int32_t>, Index>, Index> shared_ids;
      std::map<std::vector<std::int32_t>, std::pair<int, std::int32_t>> known;  // permutation -> (group, its number)
      std::vector<std::int32_t> permutation(arity), last_permutation;
      std::pair<int, std::int32_t> place;
      for (Index row = 0; row < from.layout.count; ++row) {
        tick(1);
        const Index* variables = from.variables + row * arity;
        for (int k = 0, at = 0; k < arity; ++k, at = k) {
          for (; at > 0 && rank[variables[permutation[at - 1]]] > rank[variables[k]]; --at)
            permutation[at] = permutation[at - 1];
          permutation[at] = k;
        }
        if (row == 0 || permutation != last_permutation) {
          auto found = known.find(permutation);
          if (found == known.end())
            found = known.emplace(permutation, place_permutation(group_of, from.layout, permutation)).first;
          place = found->second;
          last_permutation = permutation;
          reserve(plan.groups[place.first], from.layout.count - row);
        }
        Group& group = plan.groups[place.first];
        group.user_group.push_back(static_cast<std::int32_t>(u));
        group.user_row.push_back(static_cast<std::int32_t>(row));
        group.permutation.push_back(place.second);
        for (int k = 0; k < arity; ++k) group.position.push_back(packed[variables[permutation[k]]]);
        Index shared = -1;
        if (from.shared) {
          auto inserted = shared_ids.emplace(std::make_pair(permutation, from.shared[row]), plan.shared_tables.size());
          if (inserted.second) {
            plan.shared_tables.push_back({place.first, place.second, plan.table_size, 0});
            plan.table_size += group.table_size * plan.copies;
          }
          shared = inserted.first->second;
        }
        shared_key[place.first].push_back(shared);
        ++group.count;
      }
    }
  }

  static void reserve(Group& group, Index more) {
    for (auto* numbers : {&group.user_group, &group.user_row, &group.permutation}) numbers->reserve(group.count + more);
    group.position.reserve((group.count + more) * group.arity);
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
    group.permutations.push_back(permutation);
    group.entry_maps.push_back(entry_map(from.shape, permutation));
    return {inserted.first->second, static_cast<std::int32_t>(group.permutations.size() - 1)};
  }

  // Factors between the same levels stand together; among them, those with equal distances between their variables, so
  // that consecutive factors join consecutive nodes. On a grid each direction becomes one run per level. Then every
  // factor is followed by its other copies.
  void sort_factors(std::size_t g) {
    Group& group = plan.groups[g];
    const int arity = group.arity;
    const auto& position = group.position;
    const auto& shared = shared_key[g];
    std::vector<std::int32_t> order(group.count);
    std::iota(order.begin(), order.end(), 0);
    const int last = arity - 1;
    auto node = [&](Index f, int slot) { return Index(position[f * arity + slot]); };
    auto level_of = [&](Index f, int slot) { return out.node_level[node(f, slot)]; };
    stable_sort_by(order, [&](Index f) { return level_of(f, last); }, tick);
    SortSpace space;
    for (Index first = 0, end = 0; first < group.count; first = end) {  // the factors of a level, which a cache holds
      while (end < group.count && level_of(order[end], last) == level_of(order[first], last)) ++end;
      if (end == first + 1) continue;
      // The last key is the first to compare.
      auto sort = [&](auto key) { stable_sort_by(&order[first], end - first, key, tick, space); };
      sort([&](Index f) { return node(f, last); });
      for (int k = 0; k < last; ++k) sort([&](Index f) { return node(f, last) - node(f, k); });
      sort([&](Index f) { return shared[f]; });
      for (int k = 0; k < last; ++k) sort([&](Index f) { return level_of(f, k); });
    }
    reorder(g, order, plan.copies);
    group.count *= plan.copies;
    for (Index f = 0; f < group.count; ++f)
      for (int k = 0; k < arity; ++k) group.position[f * arity + k] += plan.copy_of(f);
  }

  // Puts the factors of a group into an order, each as often as it has copies.
  void reorder(std::size_t g, const std::vector<std::int32_t>& order, int copies) {
    Group& group = plan.groups[g];
    auto apply = [&](auto& values, int width) {
      const auto old = std::move(values);
      values = {};
      values.reserve(old.size() * copies);
      for (Index f : order)
        for (int c = 0; c < copies; ++c)
          values.insert(values.end(), old.begin() + f * width, old.begin() + (f + 1) * width);
    };
    for (auto* values : {&group.user_group, &group.user_row, &group.permutation}) apply(*values, 1);
    apply(group.position, group.arity);
    apply(shared_key[g], 1);
  }

  bool adjacent(const Group& group, std::size_t g, Index f) const {
    if (shared_key[g][f] != shared_key[g][f + 1]) return false;
    for (int k = 0; k < group.arity; ++k) {
      const Index p = group.position[f * group.arity + k], q = group.position[(f + 1) * group.arity + k];
      if (q != p + 1 || block[p] != block[q]) return false;
    }
    return true;
  }

  // Where the factors end that stand next to each other in every slot, from `first` on.
  Index end_of_run(const Group& group, std::size_t g, Index first) const {
    Index last = first + 1;
    while (last < group.count && adjacent(group, g, last - 1)) ++last;
    return last;
  }
  // Whether tiles hold several factors of a run: if these fill half a vector and, unless they fill a whole one, if one
  // by one, which asks for no table ahead, they would not clearly take less time.
  bool is_long(const Group& group, Index run) const {
    constexpr double kClearly = 1.5;
    if (2 * run < plan.lanes || run >= plan.lanes || !plan.has_many(group)) return 2 * run >= plan.lanes;
    return kClearly * static_cast<double>(run) * plan.inside_cost(group) >= static_cast<double>(group.table_size);
  }

  // Whether factors f and f + 1, which are adjacent, are sent messages by different threads.
  bool parted(const Group& group, Index f) const {
    for (int k = 0; k < group.arity; ++k) {
      const Index p = group.position[f * group.arity + k];
      if (out.node_part[p] != out.node_part[p + 1]) return true;
    }
    return false;
  }

  // Factors whose messages form a block: a long run, as far as the same threads send them, or one alone.
  struct Block {
    Index first, size;
    bool long_run;
    int part;  // that of all their variables, or the number of parts
  };

  // What counts as long, and with it the arithmetic, does not depend on the threads. Blocks of one part stand together,
  // as its nodes do.
  std::vector<Block> find_blocks(std::size_t g) {
    const Group& group = plan.groups[g];
    std::vector<Block> blocks;
    for (Index first = 0; first < group.count;) {
      const Index last = end_of_run(group, g, first);
      tick(last - first);
      const bool long_run = is_long(group, last - first);
      for (Index f = first, size = 1; f < last; f += size) {
        size = 1;
        while (long_run && size < std::min(kLongestBlock, last - f) && !parted(group, f + size - 1)) ++size;
        blocks.push_back({f, size, long_run, part_of_factor(group, f)});
      }
      first = last;
    }
    if (plan.parts == 1) return blocks;
    std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) { return a.part < b.part; });
    std::vector<std::int32_t> order;
    out.order[g].resize(group.count);
    for (Block& block : blocks) {
      for (Index f = block.first; f < block.first + block.size; ++f) {
        out.order[g][f] = static_cast<std::int32_t>(order.size());
        order.push_back(static_cast<std::int32_t>(f));
      }
      block.first = static_cast<Index>(order.size()) - block.size;
    }
    reorder(g, order, 1);
    return blocks;
  }
  int part_of_factor(const Group& group, Index f) const {
    const int part = out.node_part[group.position[f * group.arity]];
    for (int k = 1; k < group.arity; ++k)
      if (out.node_part[group.position[f * group.arity + k]] != part) return plan.parts;
    return part;
  }

  // Messages of a block stand in rows; tables one vector of them after the other, so that a tile streams through its
  // tables, or each of their entries in a row (see Group::in_rows).
  void place_factors(std::size_t g) {
    const std::vector<Block> blocks = find_blocks(g);
    Group& group = plan.groups[g];
    group.table.resize(group.count);
    group.message.resize(group.count * group.arity);
    for (auto* numbers : {&group.table_stride, &group.message_stride, &group.shared}) numbers->resize(group.count);
    out.pieces.emplace_back();
    group.tables = plan.table_size = whole_vectors(plan.table_size);
    bool after_row = plan.copies > 1;  // whether the last message so far is a neutral one, or none is needed
    for (const auto& [f, size, long_run, part] : blocks) {
      const Index stride = long_run ? message_row_length(size) : 1;
      if (long_run) plan.message_size = whole_vectors(plan.message_size + (after_row ? 0 : 1));
      after_row = long_run;
      for (int k = 0; k < group.arity; ++k) {
        for (Index i = 0; i < size; ++i) {
          group.message[(f + i) * group.arity + k] = plan.message_size + i;
          group.message_stride[f + i] = static_cast<std::int32_t>(stride);
        }
        plan.message_size += stride * group.dims[k];
      }
      for (Index start = f; start < f + size; start += plan.lanes) {
        const Index count = std::min<Index>(plan.lanes, f + size - start);
        out.pieces[g].push_back(
            {start, static_cast<std::int32_t>(count), long_run, static_cast<Index>(group.operands.size())});
        for (int k = 0; k < group.arity && long_run; ++k) {
          const Index c = start * group.arity + k, p = group.position[c];
          group.operands.push_back(
              {group.message[c], plan.node_address[p], group.message_stride[start], plan.node_stride[p]});
        }
        // As rows do, tables end with room where threads share a plan: the backward pass writes their gradients.
        place_tables(group, g, start, count, plan.parts > 1 && long_run ? plan.lanes - count : 0);
      }
    }
    plan.table_size = whole_vectors(plan.table_size);
    if (group.in_rows()) {  // so far, the first row
      const Index row = plan.table_size - group.tables;
      plan.table_size += (group.table_size - 1) * row;
      for (Index f = 0; f < group.count; ++f)
        if (group.shared[f] < 0) group.table_stride[f] = static_cast<std::int32_t>(row);
    }
    group.tables_size = plan.table_size - group.tables;
  }

  void place_tables(Group& group, std::size_t g, Index start, Index count, Index room) {
    if (shared_key[g][start] < 0 && 2 * count >= plan.lanes) plan.table_size = whole_vectors(plan.table_size);
    for (Index i = 0; i < count; ++i) {
      const Index shared = shared_key[g][start + i];
      group.shared[start + i] = static_cast<std::int32_t>(shared);
      const int copy = plan.copy_of(start + i);
      if (shared >= 0) plan.shared_tables[shared].factor = start + i - copy;
      group.table[start + i] = shared >= 0 ? plan.shared_tables[shared].address + copy : plan.table_size + i;
      group.table_stride[start + i] = static_cast<std::int32_t>(shared >= 0 ? plan.copies : count);
    }
    if (shared_key[g][start] < 0) plan.table_size += count * (group.in_rows() ? 1 : group.table_size) + room;
  }
};

}  // namespace

Placement make_placement(Plan& plan, const Index* num_states, const Index* rank, const Index* level,
                         const std::vector<GroupInput>& input) {
  Placer placer(plan, num_states, rank, level, input);
  placer.run();
  return std::move(placer.out);
}

}  // namespace riskfield
