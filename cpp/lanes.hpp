// Where the operands of a factor tile lie.
#pragma once

#include <algorithm>
#include <vector>

#include "plan.hpp"
#include "simd_dual.hpp"

namespace riskfield::RISKFIELD_ISA {

// The lanes of a factor tile: how to read and write each operand, contiguous or gathered one by one.
template <class T, bool Contiguous>
class TileLanes;

template <class T>
class TileLanes<T, true> {
 public:
  RF_INLINE TileLanes(const Plan&, const Group& group, const FactorTile& tile)
      : group_(group), tile_(tile), operands_(&group.operands[tile.operands]) {}

  RF_INLINE Index factor(int lane) const { return tile_.first + lane; }
  RF_INLINE V<T> per_factor(const std::vector<T>& values) const { return load<T>(values.data() + tile_.first); }

  // The tables of all lanes: where entry 0 lies and the distance between entries; copied to `scratch` if need be.
  RF_INLINE const T* tables(const T* packed, V<T>* scratch, Index& stride) const {
    stride = tile_.shared ? kLanes<T> : tile_.table_stride;
    if (!tile_.shared) return packed + tile_.table;
    T* copy = reinterpret_cast<T*>(scratch);
    for (Index e = 0; e < group_.table_size; ++e) store<T>(copy + e * kLanes<T>, splat<T>(packed[tile_.table + e]));
    return copy;
  }
  RF_INLINE V<T> belief(const T* beliefs, int slot, int x) const {
    return load<T>(beliefs + operands_[slot].node + Index(x) * operands_[slot].node_stride);
  }
  RF_INLINE V<T> message(const T* messages, int slot, int x) const {
    return load<T>(messages + operands_[slot].message + Index(x) * operands_[slot].message_stride);
  }
  // `value` with the lanes beyond the last factor set to 0.
  RF_INLINE V<T> valid(V<T> value) const { return first_lanes<T>(value, V<T>{}, tile_.count); }
  RF_INLINE void set_message(T* messages, int slot, int x, V<T> value) const {
    store_some<T>(messages + operands_[slot].message + Index(x) * operands_[slot].message_stride, value, tile_.count);
  }

  // For gradients: add to what belongs to a message, a node or a table entry.
  RF_INLINE void add_message(T* messages, int slot, int x, V<T> value) const {
    set_message(messages, slot, x, message(messages, slot, x) + value);
  }
  RF_INLINE void add_node(T* nodes, int slot, int x, V<T> value) const {
    T* at = nodes + operands_[slot].node + Index(x) * operands_[slot].node_stride;
    store_some<T>(at, load<T>(at) + value, tile_.count);
  }
  // One by one: numbers of factors have no room between those of different threads.
  RF_INLINE void add_factor(T* values, V<T> value) const {
    for (int l = 0; l < tile_.count; ++l) values[tile_.first + l] += value[l];
  }
  // Tables that several factors share are in `tied`, where they have the same addresses.
  RF_INLINE void add_table(T* tables, T* tied, Index entry, V<T> value) const {
    if (!tile_.shared) {
      T* at = tables + tile_.table + entry * tile_.table_stride;
      store_some<T>(at, load<T>(at) + value, tile_.count);
      return;
    }
    T sum = 0;
    for (int l = 0; l < tile_.count; ++l) sum += T(value[l]);
    tied[tile_.table + entry] += sum;
  }

 private:
  const Group& group_;
  const FactorTile& tile_;
  const Operand* operands_;
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
  RF_NOINLINE const T* tables(const T* packed, V<T>* scratch, Index& stride) const {
    stride = kLanes<T>;
    T* copy = reinterpret_cast<T*>(scratch);
    for (int l = 0; l < kLanes<T>; ++l) {
      const T* from = packed + group_.table[factor_[l]];
      const Index step = group_.table_stride[factor_[l]];
      for (Index e = 0; e < group_.table_size; ++e) copy[e * kLanes<T> + l] = from[e * step];
    }
    return copy;
  }
  RF_NOINLINE V<T> belief(const T* beliefs, int slot, int x) const {
    return gather([&](Index f) {
      const Index p = group_.position[f * group_.arity + slot];
      return beliefs[plan_.node_address[p] + Index(x) * plan_.node_stride[p]];
    });
  }
  RF_NOINLINE V<T> message(const T* messages, int slot, int x) const {
    return gather([&](Index f) { return messages[address(f, slot, x)]; });
  }
  V<T> valid(V<T> value) const { return first_lanes<T>(value, V<T>{}, tile_.count); }
  RF_NOINLINE void set_message(T* messages, int slot, int x, V<T> value) const {
    for (int l = 0; l < tile_.count; ++l) messages[address(factor_[l], slot, x)] = value[l];
  }
  RF_NOINLINE void add_message(T* messages, int slot, int x, V<T> value) const {
    for (int l = 0; l < tile_.count; ++l) messages[address(factor_[l], slot, x)] += value[l];
  }
  RF_NOINLINE void add_node(T* nodes, int slot, int x, V<T> value) const {
    for (int l = 0; l < tile_.count; ++l) {
      const Index p = group_.position[factor_[l] * group_.arity + slot];
      nodes[plan_.node_address[p] + Index(x) * plan_.node_stride[p]] += value[l];
    }
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

 private:
  Index address(Index f, int slot, int x) const {
    return group_.message[f * group_.arity + slot] + Index(x) * group_.message_stride[f];
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
