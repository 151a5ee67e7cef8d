// Where the operands of a factor tile lie.
#pragma once

#include <algorithm>
#include <vector>

#include "item.hpp"
#include "plan.hpp"
#include "ratio.hpp"
#include "simd_dual.hpp"

namespace riskfield::RISKFIELD_ISA {

// The lanes of a factor tile: how to read and write each operand, contiguous or gathered one by one.
template <class T, bool Contiguous>
class TileLanes;

// Stored entries of the messages to the first `slots` slots; S, if it is not 0, is the number of states of all of them.
template <class Algebra, int S>
RF_INLINE Index num_entries(const Group& group, int slots) {
  if constexpr (S > 0) return slots * (S - Algebra::template first_state<S>(S));
  Index total = 0;
  for (int k = 0; k < slots; ++k) total += group.dims[k] - Algebra::template first_state<0>(group.dims[k]);
  return total;
}

// Where, among the stored entries of a factor's messages, that of state 0 of a slot is, or would be.
template <class Algebra, int S>
RF_INLINE Index first_entry(const Group& group, int slot) {
  return num_entries<Algebra, S>(group, slot) - Algebra::template first_state<S>(S ? S : group.dims[slot]);
}

// Gradients of what a contiguous tile holds for the states of one of its variables: entry x in row x. Loops over states
// keep the address in registers, which they could not do with that in a plan, because what they write might change it.
template <class T>
struct TileRows {
  T* first;
  Index stride;
  int count;

  RF_INLINE V<T> get(int x) const { return load_some<T>(first + x * stride, count); }
  RF_INLINE void set(int x, V<T> value) const { store_some<T>(first + x * stride, value, count); }
  RF_INLINE void add(int x, V<T> value) const { set(x, get(x) + value); }
};

template <class T>
class TileLanes<T, true> {
 public:
  RF_INLINE TileLanes(const Plan&, const Group& group, const FactorTile& tile)
      : group_(group), tile_(tile), operands_(&group.operands[tile.operands]) {}

  // Goes on to the next tile of a run, whose tables lie `step` further.
  RF_INLINE void advance(Index step) {
    shift_ += kLanes<T>;
    tile_.first += kLanes<T>;
    tile_.table += step;
  }
  // The last tile of a run may have spare lanes.
  RF_INLINE void trim(bool is_last, const FactorTile& last) {
    tile_.count = is_last ? last.count : tile_.count;
    tile_.table_stride = is_last ? last.table_stride : tile_.table_stride;
  }

  RF_INLINE Index factor(int lane) const { return tile_.first + lane; }
  RF_INLINE V<T> per_factor(const std::vector<T>& values) const { return load<T>(values.data() + tile_.first); }

  // The tables of all lanes: where entry 0 lies and the distance between entries; copied to `scratch` if need be. With
  // S, a table of S states each way, that distance is known when this is compiled.
  template <int S = 0>
  RF_INLINE const T* tables(const T* packed, V<T>* scratch, Index& stride) const {
    const T* from = packed + tile_.table;
    stride = S || tile_.shared ? kLanes<T> : tile_.table_stride;
    if (!tile_.shared && (S == 0 || tile_.table_stride == kLanes<T>)) return from;
    T* copy = reinterpret_cast<T*>(scratch);
    for (Index e = 0; e < (S ? S * S : group_.table_size); ++e)
      store<T>(copy + e * kLanes<T>, tile_.shared ? splat<T>(from[e]) : load<T>(from + e * tile_.table_stride));
    return copy;
  }
  // One entry of the tables of all lanes.
  RF_INLINE V<T> table_entry(const T* packed, Index e) const {
    return tile_.shared ? splat<T>(packed[tile_.table + e]) : load<T>(packed + tile_.table + e * tile_.table_stride);
  }
  // The distance to tables that are read soon: those of following tiles mostly follow, too.
  RF_INLINE Index tables_ahead() const {
    constexpr Index kAhead = 8192 / sizeof(T);
    return tile_.shared || group_.in_rows() ? 0 : std::max<Index>(kAhead, group_.table_size * tile_.table_stride);
  }
  RF_INLINE V<T> belief(const T* beliefs, int slot, int x) const {
    return load<T>(beliefs + shift_ + operands_[slot].node + Index(x) * operands_[slot].node_stride);
  }
  RF_INLINE V<T> message(const T* messages, int slot, int x) const {
    return load<T>(messages + shift_ + operands_[slot].message + Index(x) * operands_[slot].message_stride);
  }
  // `value` with the lanes beyond the last factor set to 0.
  RF_INLINE V<T> valid(V<T> value) const { return first_lanes<T>(value, V<T>{}, tile_.count); }
  RF_INLINE void set_message(T* messages, int slot, int x, V<T> value) const {
    store_some<T>(messages + shift_ + operands_[slot].message + Index(x) * operands_[slot].message_stride, value,
                  tile_.count);
  }

  // For gradients: those of messages and nodes, in rows, and what is added to a factor or a table entry. Only tiles
  // read and write gradients of messages, so these are stored tile by tile, where they are read in one go.
  template <class Algebra, int S>
  RF_INLINE TileRows<T> gradient_rows(T* gradients, int slot) const {
    const Index width = num_entries<Algebra, S>(group_, S ? 2 : group_.arity);
    T* first = gradients + group_.gradients + tile_.first * width;
    return {first + first_entry<Algebra, S>(group_, slot) * tile_.count, tile_.count, tile_.count};
  }
  RF_INLINE TileRows<T> node_rows(T* nodes, int slot) const {
    return {nodes + shift_ + operands_[slot].node, operands_[slot].node_stride, tile_.count};
  }
  // The same for what is added to the gradient of a variable's belief. If the tile stands between parts, it is not
  // added there, where other threads add, too, but to a parcel of each factor for each of its variables: see
  // BackwardSweeps::receive.
  template <class Algebra, int S>
  RF_INLINE TileRows<T> belief_rows(T* beliefs, T* parcels, int slot) const {
    return tile_.between ? parcel_rows<Algebra, S>(parcels, slot) : node_rows(beliefs, slot);
  }
  template <class Algebra, int S>
  RF_INLINE TileRows<T> parcel_rows(T* parcels, int slot) const {
    const Index width = num_entries<Algebra, S>(group_, S ? 2 : group_.arity);
    T* first = parcels + group_.parcels + group_.between[tile_.first] * width;
    return {first + num_entries<Algebra, S>(group_, slot) * tile_.count, tile_.count, tile_.count};
  }
  // One by one: numbers of factors have no room between those of different threads.
  RF_INLINE void add_factor(T* values, V<T> value) const {
    for (int l = 0; l < tile_.count; ++l) values[tile_.first + l] += value[l];
  }
  // Tables that several factors share are in `tied`, where they have the same addresses.
  RF_INLINE void add_table(T* tables, T* tied, Index entry, V<T> value) const {
    if (!tile_.shared) {
      T* at = (tile_.tied ? tied : tables) + tile_.table + entry * tile_.table_stride;
      store_some<T>(at, load<T>(at) + value, tile_.count);
      return;
    }
    T sum = 0;
    for (int l = 0; l < tile_.count; ++l) sum += T(value[l]);
    tied[tile_.table + entry] += sum;
  }
  // The same for those tables only.
  RF_INLINE void add_tied(T* tied, Index entry, V<T> value) const {
    if (tile_.shared || tile_.tied) add_table(tied, tied, entry, value);
  }

 private:
  const Group& group_;
  FactorTile tile_;
  const Operand* operands_;
  Index shift_ = 0;  // from the first tile of the run
};

template <class T>
class TileLanes<T, false> {
 public:
  TileLanes(const Plan& plan, const Group& group, const FactorTile& tile) : plan_(plan), group_(group), tile_(tile) {
    // Spare lanes repeat the last factor, so that they compute something finite.
    for (int l = 0; l < kLanes<T>; ++l) factor_[l] = group.lanes[tile.first + std::min<int>(l, tile.count - 1)];
  }

  Index factor(int lane) const { return factor_[lane]; }
  RF_NOINLINE V<T> per_factor(const std::vector<T>& values) const {
    return gather([&](Index f) { return values[f]; });
  }
  // That of a lone factor is not copied: spare lanes read what follows each entry.
  template <int S = 0>
  const T* tables(const T* packed, V<T>* scratch, Index& stride) const {
    const bool lone = S == 0 && tile_.count == 1;
    stride = lone ? group_.table_stride[factor_[0]] : kLanes<T>;
    return lone ? packed + group_.table[factor_[0]] : copied_tables(packed, scratch);
  }
  RF_NOINLINE V<T> table_entry(const T* packed, Index e) const {
    return gather([&](Index f) { return packed[group_.table[f] + e * group_.table_stride[f]]; });
  }
  Index tables_ahead() const { return 0; }
  RF_NOINLINE V<T> belief(const T* beliefs, int slot, int x) const {
    return gather([&](Index f) { return beliefs[node_at(f, slot, x)]; });
  }
  RF_NOINLINE V<T> message(const T* messages, int slot, int x) const {
    return gather([&](Index f) { return messages[message_at(f, slot, x)]; });
  }
  V<T> valid(V<T> value) const { return first_lanes<T>(value, V<T>{}, tile_.count); }
  RF_NOINLINE void set_message(T* messages, int slot, int x, V<T> value) const {
    for (int l = 0; l < tile_.count; ++l) messages[message_at(factor_[l], slot, x)] = value[l];
  }

  struct Rows {
    int count;
    T* first[kLanes<T>];
    Index stride[kLanes<T>];
    RF_NOINLINE V<T> get(int x) const {
      V<T> value{};
      for (int l = 0; l < kLanes<T>; ++l) set_lane<T>(value, l, first[l][x * stride[l]]);
      return value;
    }
    RF_NOINLINE void set(int x, V<T> value) const {
      for (int l = 0; l < count; ++l) first[l][x * stride[l]] = value[l];
    }
    // One by one: several factors may have the same variable.
    RF_NOINLINE void add(int x, V<T> value) const {
      for (int l = 0; l < count; ++l) first[l][x * stride[l]] += value[l];
    }
  };
  template <class Algebra, int S>
  Rows gradient_rows(T* gradients, int slot) const {
    const Index width = num_entries<Algebra, 0>(group_, group_.arity), start = first_entry<Algebra, 0>(group_, slot);
    Rows rows{tile_.count, {}, {}};
    for (int l = 0; l < kLanes<T>; ++l) {
      rows.first[l] = gradients + group_.gradients + factor_[l] * width + start;
      rows.stride[l] = 1;
    }
    return rows;
  }
  Rows node_rows(T* nodes, int slot) const {
    Rows rows{tile_.count, {}, {}};
    for (int l = 0; l < kLanes<T>; ++l) {
      rows.first[l] = nodes + node_at(factor_[l], slot, 0);
      rows.stride[l] = plan_.node_stride[group_.position[factor_[l] * group_.arity + slot]];
    }
    return rows;
  }
  template <class Algebra, int S>
  Rows belief_rows(T* beliefs, T* parcels, int slot) const {
    return tile_.between ? parcel_rows<Algebra, S>(parcels, slot) : node_rows(beliefs, slot);
  }
  template <class Algebra, int S>
  Rows parcel_rows(T* parcels, int slot) const {
    const Index width = num_entries<Algebra, 0>(group_, group_.arity), start = num_entries<Algebra, 0>(group_, slot);
    Rows rows{tile_.count, {}, {}};
    for (int l = 0; l < kLanes<T>; ++l) {
      rows.first[l] = parcels + group_.parcels + group_.between[factor_[l]] * width + start;
      rows.stride[l] = 1;
    }
    return rows;
  }
  RF_NOINLINE void add_factor(T* values, V<T> value) const {
    for (int l = 0; l < tile_.count; ++l) values[factor_[l]] += value[l];
  }
  RF_NOINLINE void add_table(T* tables, T* tied, Index entry, V<T> value) const {
    for (int l = 0; l < tile_.count; ++l) {
      const Index f = factor_[l];
      (group_.shared[f] < 0 ? tables : tied)[group_.table[f] + entry * group_.table_stride[f]] += value[l];
    }
  }
  RF_NOINLINE void add_tied(T* tied, Index entry, V<T> value) const {
    for (int l = 0; l < tile_.count; ++l) {
      const Index f = factor_[l];
      if (group_.shared[f] >= 0) tied[group_.table[f] + entry * group_.table_stride[f]] += value[l];
    }
  }

 private:
  Index message_at(Index f, int slot, int x) const {
    return group_.message[f * group_.arity + slot] + Index(x) * group_.message_stride[f];
  }
  Index node_at(Index f, int slot, int x) const {
    const Index p = group_.position[f * group_.arity + slot];
    return plan_.node_address[p] + Index(x) * plan_.node_stride[p];
  }
  RF_NOINLINE const T* copied_tables(const T* packed, V<T>* scratch) const {
    T* copy = reinterpret_cast<T*>(scratch);
    for (int l = 0; l < kLanes<T>; ++l) {
      const T* from = packed + group_.table[factor_[l]];
      const Index step = group_.table_stride[factor_[l]];
      for (Index e = 0; e < group_.table_size; ++e) copy[e * kLanes<T> + l] = from[e * step];
    }
    return copy;
  }
  template <class Read>
  V<T> gather(Read read) const {
    T lanes[kLanes<T>];
    for (int l = 0; l < kLanes<T>; ++l) lanes[l] = read(factor_[l]);
    return load<T>(lanes);
  }

  const Plan& plan_;
  const Group& group_;
  const FactorTile& tile_;
  Index factor_[kLanes<T>];
};

// Calls `body` with the lanes of a tile.
template <class T, class Body>
RF_INLINE void with_lanes(const Plan& plan, const Group& group, const FactorTile& tile, Body body) {
  if (tile.contiguous)
    body(TileLanes<T, true>(plan, group, tile));
  else
    body(TileLanes<T, false>(plan, group, tile));
}

}  // namespace riskfield::RISKFIELD_ISA
