// A plan is a schedule compiled for one graph and one vector width: where everything is stored, and which updates run
// together. It holds no numbers, so one plan serves every run on the graph.
//
// Nodes are packed level by level, factors by the levels of their variables, so that the updates of a level touch
// contiguous memory. Variables of a factor are re-ordered by their rank in the schedule ("slots" below are in that
// order). Storage is structure-of-arrays in blocks: entry x of item f lies at address(f) + x * stride(f), and
// neighbouring items of a block at neighbouring addresses.
//
// The lanes of a vector are filled in one of three ways. Level lanes (copies == 1): with members of a level. Batch
// lanes (copies == lanes): with as many models of a batch. Then the plan is that of so many copies of the graph. Nodes
// and factors exist once per copy, their copies next to each other, so that lane l of every tile belongs to copy l.
// Where levels are short, the states of one variable fill them, if there are enough (see inside.hpp).
#pragma once

#include <cstdint>
#include <vector>

namespace riskfield {

using Index = std::int64_t;

// Factors of one shape as the caller lays them out.
struct UserGroup {
  std::vector<int> shape;
  Index count = 0;
  std::vector<Index> tables;  // factor -> table of theta
  Index theta_start = 0, mu_start = 0, message_start = 0, factor_start = 0;
};

// The same with what only the making of a plan reads. The arrays belong to the caller.
struct GroupInput {
  UserGroup layout;
  const Index* variables;  // (count, arity)
  const Index* shared;  // (count,): factors with the same number have one table and counting number; null if not tied
};

enum class Sweep { kForwardBackward, kAllAtOnce, kLevelByLevel };

// Up to one vector of factors whose message to one slot is updated together. Contiguous tiles carry the addresses of
// their first factor; others list their factors in `lanes`. Sweeps read the first tile of a run only.
struct FactorTile {
  Index first;     // first factor, or start in Group::lanes
  Index table;     // address of the first table
  Index operands;  // contiguous tiles: start in Group::operands, one per slot
  std::int32_t table_stride;
  std::int16_t run;  // so many tiles from this one on are a vector apart in every respect; all but the last are full
  std::int8_t count;
  bool contiguous : 1;
  bool shared : 1;   // all lanes use one table, stored once
  bool between : 1;  // its factors join nodes of several parts
  bool tied : 1;     // each lane uses a table of its own that other tiles use, too
};

struct Operand {
  Index message, node;
  std::int32_t message_stride, node_stride;
};

struct Group {
  int arity = 0;
  std::vector<int> dims;  // states per slot
  Index table_size = 1;
  Index count = 0;
  Index gradients = 0;  // where the gradients of its messages begin (see TileLanes::gradient_rows)
  Index parcels = 0;    // where those begin that its factors between parts send to beliefs (see TileLanes::belief_rows)
  Index tables = 0, tables_size = 0;  // where the tables begin that belong to one factor each, and their size
  std::vector<std::int32_t> user_group, user_row, permutation;  // per factor
  std::vector<std::int32_t> position;                           // (factor, slot): packed node
  std::vector<Index> table;                                     // per factor
  std::vector<std::int32_t> table_stride;
  std::vector<Index> message;                           // (factor, slot)
  std::vector<std::int32_t> message_stride;             // per factor
  std::vector<std::int32_t> shared;                     // per factor: its table in Plan::shared_tables, or -1
  std::vector<std::int32_t> between;                    // per factor between parts: its number among them
  std::vector<std::vector<std::int32_t>> permutations;  // slot -> axis of the caller's table
  std::vector<std::vector<Index>> entry_maps;           // permutation -> entry -> entry of the caller's table
  std::vector<Operand> operands;
  std::vector<std::int32_t> lanes;
  // Every factor once, for marginals and packing: first those within each part, part by part, then those between parts.
  std::vector<FactorTile> all_tiles;
  std::vector<Index> part_tiles;  // part -> its first tile; then where those between parts begin and end

  // Whether entry e of all tables is a row, but for shared tables: sweeps mostly need one entry (see ratio.hpp).
  bool in_rows() const { return arity == 2 && dims[0] == 2 && dims[1] == 2; }
  // The distance between the tables of neighbouring vectors of factors that have tables of their own.
  Index table_step(int lanes) const { return in_rows() ? lanes : lanes * table_size; }
};

// Messages of one group to one slot. The tiles from `between` on join nodes of this part to others.
struct TileRange {
  std::int32_t group, slot;
  Index begin, end;  // in Plan::factor_tiles
  Index between = 0;
};

// Node tiles read the messages of their variables connection by connection.
struct Connection {
  Index message;  // contiguous: address for the first lane; else start in Plan::lane_messages
  std::int32_t stride;
  bool contiguous;
};

struct NodeTile {
  Index first;  // packed node
  Index address;
  Index connections;
  std::int32_t stride, degree, states;
  std::int16_t run;  // as in FactorTile
  std::int8_t count;
  bool contiguous;  // all connections are
};

// What one of the threads that share a plan does in a stage: messages to its own nodes, then their beliefs. Other
// threads read neither before the next stage, unless all messages are sent at once. Each node belongs to one part, and
// rows of numbers (see Placer::row_length) are not shared by parts.
struct Part {
  std::int32_t ranges_begin, ranges_end;
  Index nodes_begin, nodes_end;
};

// Which stages of other parts a part waits for before each of its stages.
struct Waits {
  struct Wait {
    std::int32_t part, stage;
  };
  std::vector<Wait> list;
  std::vector<Index> start;  // (stage, part); then where the list ends
};

// A table that several factors use, stored once per copy.
struct SharedTable {
  std::int32_t group, permutation;
  Index address;  // in the first copy
  Index factor;   // one of the first copy that uses it
};

struct Plan {
  Plan(int lanes, int copies, int parts, bool inside, Sweep sweep, Index num_variables, const Index* num_states,
       const Index* node_start, const Index* rank, const Index* level, const std::vector<GroupInput>& groups);

  int lanes, copies, parts;
  bool inside;  // whether states may fill the lanes: see is_inside
  Sweep sweep;
  Index num_nodes;  // packed: the variables of all copies
  Index node_size = 0, message_size = 0, gradient_size = 0, parcels_size = 0, table_size = 0;
  Index tied_size = 0;  // so much of the tables, from address 0 on, is those that several factors share
  int max_states = 1;
  bool all_binary = false;  // whether all variables are
  Index max_table = 1;
  std::vector<UserGroup> user_groups;
  std::vector<Index> node_start;                  // variable, in the caller's layout
  std::vector<std::int32_t> variable;             // packed node -> variable
  std::vector<Index> node_address;                // packed node
  std::vector<std::int32_t> node_stride, states;  // packed node
  std::vector<Group> groups;
  std::vector<SharedTable> shared_tables;
  std::vector<FactorTile> factor_tiles;
  std::vector<TileRange> ranges;
  std::vector<NodeTile> node_tiles;
  std::vector<Connection> connections;
  std::vector<Index> lane_messages;
  std::vector<std::int32_t> lane_strides;
  std::vector<Part> stages;               // (stage, part)
  std::vector<std::int32_t> other_stage;  // stage: the other one of its level, or -1
  Waits waits, waits_back;                // in a sweep, and on the way back through it; not for Sweep::kAllAtOnce

  Index num_stages() const { return static_cast<Index>(stages.size()) / parts; }

  // Of a plan with level lanes: about how long a sweep takes, and how long it would take on the plan with batch lanes,
  // in units of one table entry for a vector of factors.
  double level_cost = 0, batch_cost = 0;

  // The copy that a packed node or a factor of a group belongs to.
  int copy_of(Index node_or_factor) const { return static_cast<int>(node_or_factor & (copies - 1)); }

  // Whether the states of one variable fill the lanes where no long run would (see inside.hpp).
  bool has_many(int states) const { return inside && copies == 1 && states >= (lanes > 4 ? lanes : 4); }
  bool has_many(const Group& group) const {
    return group.arity == 2 && has_many(group.dims[0]) && has_many(group.dims[1]);
  }
  // About how long the update of one such message takes, in units of a table entry for a vector of factors.
  double inside_cost(const Group& group) const {
    return 45.0 + 0.55 * group.dims[0] * ((group.dims[1] + lanes - 1) / lanes);
  }
  bool is_inside(const Group& group, const FactorTile& tile) const { return !tile.contiguous && has_many(group); }

  // Address of the neutral message that pads variables of lower degree; max_states entries, stride 1.
  static constexpr Index kNeutral = 0;

 private:
  void estimate_costs();
};

}  // namespace riskfield
