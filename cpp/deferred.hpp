// Gradients of tables, for several sweeps at once.
//
// Each sweep adds to the gradient of a pairwise table the product of the table, the gradient r of the unnormalised
// message and the cavity it was made from. With many states, most time would go into reading and writing gradients of
// tables. So the backward pass writes down r; the outer products of r and the cavities, which are on the tape, are
// added up in registers later.
#pragma once

#include "inside.hpp"
#include "reverse.hpp"
#include "tape_layout.hpp"

namespace riskfield::RISKFIELD_ISA {

constexpr int kDeferredSweeps = 32;

// Groups whose tables are worth it. Mean field, logarithms and ratios are not stored in this form.
template <class T>
bool is_deferred(const Context<T>& context, const Item<T>& item, const Group& group) {
  return context.kind == Kind::kSumProduct && !item.log_domain && group.arity == 2 && group.dims[0] > 2 &&
         group.dims[1] > 2;
}

// Where what belongs to a range, or to the nodes of a part, begins in one sweep: on its tape, and among the rates r
// that the way back through it writes down.
template <class T>
class DeferredLayout {
 public:
  struct Place {
    Index tape, rates;
  };

  DeferredLayout(const Context<T>& context, const Item<T>& item)
      : tape(context, item), context_(context), plan_(*context.plan), item_(item) {
    ranges.reserve(plan_.ranges.size());
    nodes.reserve(plan_.stages.size());
    for (Index s = 0; s < plan_.num_stages(); ++s) {
      const Part* parts = &plan_.stages[s * plan_.parts];
      for (int r = parts[0].ranges_begin; r < parts[plan_.parts - 1].ranges_end; ++r) {
        const TileRange& range = plan_.ranges[r];
        ranges.push_back({tape_size, rates_size});
        tape_size += tape.range_size(range);
        rates_size += (range.end - range.begin) * rates_of_tile(range);
      }
      for (int p = 0; p < plan_.parts; ++p) {
        nodes.push_back(tape_size);
        tape_size += tape.nodes_size(parts[p].nodes_begin, parts[p].nodes_end);
      }
    }
  }

  // How many numbers are written down for each tile of a range: none unless its tables are deferred.
  Index rates_of_tile(const TileRange& range) const {
    const Group& group = plan_.groups[range.group];
    return is_deferred(context_, item_, group) ? group.dims[range.slot] * kLanes<T> : 0;
  }

  const TapeLayout<T> tape;
  std::vector<Place> ranges;
  std::vector<Index> nodes;  // (stage, part): on the tape
  Index tape_size = 0, rates_size = 0;

 private:
  const Context<T>& context_;
  const Plan& plan_;
  const Item<T>& item_;
};

// Adds the tables' gradients of one tile. `tape` and `rates` of a sweep start at what belongs to the tile.
template <class T, int S, class Lanes>
RF_INLINE void add_deferred(const Item<T>& item, const Group& group, int slot, const Lanes& lanes, int count,
                            const T* const* tape, const T* const* rates, Index ahead, Gradients<T>& grad,
                            Scratch<T>& scratch) {
  constexpr int kBlock = S ? S : 4, kTilesAhead = 2;
  const int n = S ? S : group.dims[slot], others = S ? S : group.dims[1 - slot];
  Index stride;
  const T* table = lanes.template tables<S>(item.tables.get(), scratch.table, stride);
  for (int x0 = 0; x0 < n; x0 += kBlock)
    for (int y0 = 0; y0 < others; y0 += kBlock) {
      // Beyond the last state a block repeats it.
      V<T> sum[kBlock][kBlock];
      RF_FOR (x, 0, kBlock)
        RF_FOR (y, 0, kBlock) sum[x][y] = V<T>{};
      for (int k = 0; k < count; ++k) {
        // So many places at once are more than the processor foresees.
        if (x0 == 0)
          for (int y = y0; y < std::min(y0 + kBlock, others); ++y)
            __builtin_prefetch(tape[k] + (kTilesAhead * others + y) * kLanes<T>, 0, 2);
        if (y0 == 0)
          for (int x = x0; x < std::min(x0 + kBlock, n); ++x)
            __builtin_prefetch(rates[k] + (kTilesAhead * n + x) * kLanes<T>, 0, 2);
        V<T> cavity[kBlock];
        RF_FOR (y, 0, kBlock) cavity[y] = load<T>(tape[k] + (S ? y : std::min(y0 + y, others - 1)) * kLanes<T>);
        RF_FOR (x, 0, kBlock) {
          const V<T> r = load<T>(rates[k] + (S ? x : std::min(x0 + x, n - 1)) * kLanes<T>);
          RF_FOR (y, 0, kBlock) sum[x][y] += r * cavity[y];
        }
      }
      const int rows = S ? S : std::min(kBlock, n - x0), columns = S ? S : std::min(kBlock, others - y0);
      for (int x = 0; x < rows; ++x)
        for (int y = 0; y < columns; ++y) {
          const Index e = slot == 0 ? Index(x0 + x) * others + y0 + y : Index(y0 + y) * n + x0 + x;
          if (ahead != 0) {
            __builtin_prefetch(item.tables.get() + ahead + e * kLanes<T>, 0, 2);
            __builtin_prefetch(grad.tables + ahead + e * kLanes<T>, 1, 2);
          }
          lanes.add_table(grad.tables, grad.tied, e, load<T>(table + e * stride) * sum[x][y]);
        }
    }
}

// The same inside one table, where vectors hold states: the sum of `count` outer products of `left`, which has a number
// for each row, and `right`.
template <class T>
RF_NOINLINE void add_outer(const Group& group, const T* table, int count, const T* const* left, const T* const* right,
                           T* gradient) {
  constexpr int kRows = 4, kVectors = 2;
  const int rows = group.dims[0], length = group.dims[1], vectors = num_vectors<T>(length);
  auto row = [&](const T* first) RF_LAMBDA { return StateRow<T>{const_cast<T*>(first), 1, length}; };
  for (int a = 0; a < rows; a += kRows)
    for (int v = 0; v < vectors; v += kVectors) {
      // Beyond the last row, and the last vector of it, a block repeats them.
      V<T> sum[kRows][kVectors];
      RF_FOR (i, 0, kRows)
        RF_FOR (j, 0, kVectors) sum[i][j] = V<T>{};
      for (int k = 0; k < count; ++k) {
        V<T> numbers[kVectors];
        RF_FOR (j, 0, kVectors) numbers[j] = row(right[k]).get(std::min(v + j, vectors - 1));
        RF_FOR (i, 0, kRows) {
          const V<T> weight = splat<T>(left[k][std::min(a + i, rows - 1)]);
          RF_FOR (j, 0, kVectors) sum[i][j] += weight * numbers[j];
        }
      }
      for (int i = 0; i < std::min(kRows, rows - a); ++i)
        for (int j = 0; j < std::min(kVectors, vectors - v); ++j) {
          const Index start = Index(a + i) * length;
          row(gradient + start).add(v + j, row(table + start).get(v + j) * sum[i][j]);
        }
    }
}

// The same for a tile of such factors.
template <class T>
void add_deferred_inside(const Plan& plan, const Item<T>& item, const Group& group, int slot, const FactorTile& tile,
                         int count, const T* const* tape, const T* const* rates, Gradients<T>& grad) {
  for (int l = 0; l < tile.count; ++l) {
    const StateLanes<T> lanes(plan, group, group.lanes[tile.first + l]);
    const T *of_slot[kDeferredSweeps], *of_other[kDeferredSweeps];
    for (int k = 0; k < count; ++k) {
      of_slot[k] = rates[k] + l * group.dims[slot];
      of_other[k] = tape[k] + l * group.dims[1 - slot];
    }
    add_outer<T>(group, lanes.table(item.tables.get()), count, slot == 0 ? of_slot : of_other,
                 slot == 0 ? of_other : of_slot, lanes.table_gradient(grad.tables, grad.tied));
  }
}

// reverse_message for such a tile; Pass::kCounting has no form of its own.
template <class T, Pass P>
RF_NOINLINE void reverse_inside(const Context<T>& context, const Item<T>& item, int g, int slot, const FactorTile& tile,
                                const T*& tape, T* from, T* to, Gradients<T>& grad, Scratch<T>& scratch) {
  using Algebra = LogMessages<T, true>;
  static_assert(P != Pass::kCounting);
  const Plan& plan = *context.plan;
  const Group& group = plan.groups[g];
  const int n = group.dims[slot], others = group.dims[1 - slot];
  const int vectors = num_vectors<T>(n), other_vectors = num_vectors<T>(others);
  T *cavity = reinterpret_cast<T*>(scratch.before), *rates = reinterpret_cast<T*>(scratch.after);
  V<T>*m = scratch.out, *r = scratch.rates, *sum = scratch.cavities;
  for (int l = 0; l < tile.count; ++l, tape += others) {
    const StateLanes<T> lanes(plan, group, group.lanes[tile.first + l]);
    const T* table = lanes.table(item.tables.get());
    const MessageSettings<T> settings = settings_of<Algebra, T>(context, g, lanes);
    const V<T> scale = settings.counting * (1 - settings.damping);
    const StateRow<T> written{const_cast<T*>(tape), 1, others};
    for (int v = 0; v < other_vectors; ++v) store<T>(cavity + v * kLanes<T>, written.get(v));
    take_gradient<Algebra, T, 0, P>(lanes, slot, vectors, settings.damping, from, to, grad, r);
    for (int v = 0; v < vectors; ++v) r[v] *= scale;
    contract_states<T>(table, group, slot, cavity, m);
    reverse_normalisation<Algebra, T, 0>(m, vectors, r);
    for (int v = 0; v < vectors; ++v)
      store<T>(rates + v * kLanes<T>, first_lanes<T>(r[v], V<T>{}, lanes_used<T>(n, v)));
    if constexpr (P == Pass::kDeferred) grad.rates = std::copy(rates, rates + n, grad.rates);
    if constexpr (kAddsTables<P>) {
      const T *of_slot[] = {rates}, *of_other[] = {cavity};
      add_outer<T>(group, table, 1, slot == 0 ? of_slot : of_other, slot == 0 ? of_other : of_slot,
                   lanes.table_gradient(grad.tables, grad.tied));
    }
    if constexpr (P != Pass::kTables) {
      contract_states<T>(table, group, 1 - slot, rates, sum);
      for (int v = 0; v < other_vectors; ++v) sum[v] *= load<T>(cavity + v * kLanes<T>);
      add_cavity<Algebra, T, 0>(lanes, 1 - slot, other_vectors, sum, settings.inverse, grad, to);
    }
  }
  tape += (kLanes<T> - tile.count) * others;
  if constexpr (P == Pass::kDeferred) grad.rates += (kLanes<T> - tile.count) * n;
}

// reverse_belief for one variable whose states have stride 1.
template <class T>
RF_NOINLINE void reverse_belief_inside(const Context<T>& context, const NodeTile& tile, Gradients<T>& grad) {
  const StateRow<T> beliefs{grad.beliefs + tile.address, 1, tile.states};
  const StateRow<T> theta{grad.node_theta + tile.address, 1, tile.states};
  const V<T> inverse = splat<T>(context.node_power ? context.node_inverse[tile.first] : T(1));
  for (int v = 0; v < num_vectors<T>(tile.states); ++v) {
    theta.add(v, beliefs.get(v) * inverse);
    beliefs.set(v, V<T>{});
  }
}

// Cavities of such a tile, written down factor by factor, as those of other tiles are.
template <class T>
const T* cavities_by_lanes(const FactorTile& tile, const T* tape, int states, Scratch<T>& scratch) {
  T* out = reinterpret_cast<T*>(scratch.spare);
  for (int x = 0; x < states; ++x)
    for (int l = 0; l < kLanes<T>; ++l) out[x * kLanes<T> + l] = tape[std::min<int>(l, tile.count - 1) * states + x];
  return out;
}

}  // namespace riskfield::RISKFIELD_ISA
