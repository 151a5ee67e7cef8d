// How sweeps ask early for what they will need.
#pragma once

#include <algorithm>

#include "lanes.hpp"

namespace riskfield::RISKFIELD_ISA {

// Goes ahead of a sweep and asks for the numbers that it will need. Hardware prefetching follows a stream of numbers
// to its end only, and the streams of a level are short. Gathered tiles and shared tables are left out.
template <class T>
class Lookahead {
 public:
  // For the parts [first, last) of every stage.
  Lookahead(const Plan& plan, const Item<T>& item, int first, int last)
      : plan_(plan), item_(item), first_(first), last_(last), on_(exceeds_cache(item)) {}

  // To be called before the update of each contiguous tile of factors, with the size of its tables, and of nodes.
  RF_INLINE void at_factors(Index numbers) {
    if (on_ && (tables_.lead -= numbers) < kLead - kStep) fetch_tables();
  }
  RF_INLINE void at_nodes() {
    if (on_ && (nodes_.lead -= rows_used_ * kLanes<T>) < kLead - kStep) fetch_nodes();
  }
  // The nodes of a tile are about to be updated, or those of a run that it begins.
  RF_INLINE void begin_nodes(const NodeTile& tile) { rows_used_ = on_ ? num_rows(tile) : 0; }

 private:
  static constexpr Index kLead = 16384 / sizeof(T), kStep = 1024 / sizeof(T);  // numbers
  static constexpr int kMostRows = 64;

  struct Position {
    Index stage = -1, tile = 0, end = 0;  // the next tile to look at, and where those of its range or stage end
    Index left = 0;                       // tiles of the present run
    Index lead = 0;                       // numbers asked for that the sweep has not come to yet
  };

  static int first_row(const NodeTile& tile) { return tile.states == Ratio<T>::kStates ? Ratio<T>::kFirstStored : 0; }
  // Of potentials, and of beliefs.
  int node_rows(const NodeTile& tile) const {
    return item_.state1_possible && tile.states == Ratio<T>::kStates ? 1 : tile.states;
  }
  int num_rows(const NodeTile& tile) const {
    return std::min(kMostRows, node_rows(tile) * 2 + tile.degree * (tile.states - first_row(tile)));
  }

  RF_NOINLINE void fetch_tables() {
    constexpr Index kLine = 64 / sizeof(T);
    while (tables_.lead < kLead && (tables_.left > 0 || next_run())) {
      for (Index row = 0; row < rows_of_table_; ++row)
        for (Index k = 0; k < row_size_; k += kLine) __builtin_prefetch(table_ + row * row_stride_ + k, 0, 2);
      table_ += row_size_;
      --tables_.left;
      tables_.lead += rows_of_table_ * row_size_;
    }
  }
  RF_NOINLINE void fetch_nodes() {
    while (nodes_.lead < kLead && (nodes_.left > 0 || next_nodes())) {
      for (int k = 0; k < rows_; ++k) __builtin_prefetch(row_[k] + shift_, 0, 2);
      shift_ += kLanes<T>;
      --nodes_.left;
      nodes_.lead += rows_ * kLanes<T>;
    }
  }

  // The next run of factors with tables of their own; false after the last.
  bool next_run() {
    Position& at = tables_;
    for (;; ++at.tile) {
      while (at.tile >= at.end)
        if (!next_range()) return false;
      const FactorTile& tile = plan_.factor_tiles[at.tile];
      if (!tile.contiguous || tile.shared) continue;
      const Group& group = plan_.groups[group_];
      row_size_ = group.table_step(kLanes<T>);
      rows_of_table_ = numbers_of_tables(item_, group) / row_size_;
      row_stride_ = tile.table_stride;
      at.left = std::min<Index>(tile.run, at.end - at.tile);
      at.tile += at.left;
      table_ = item_.tables.get() + tile.table;
      // The plan is not in the cache either: the operands of this run, and the tile that begins the next one.
      __builtin_prefetch(&plan_.groups[group_].operands[tile.operands], 0, 2);
      if (at.tile == at.end) next_range();
      if (at.tile < at.end) __builtin_prefetch(&plan_.factor_tiles[at.tile], 0, 2);
      return true;
    }
  }

  bool next_range() {
    Position& at = tables_;
    while (range_ == ranges_end_) {
      if (at.stage + 1 >= plan_.num_stages()) return false;
      const Part* parts = &plan_.stages[++at.stage * plan_.parts];
      range_ = parts[first_].ranges_begin;
      ranges_end_ = parts[last_ - 1].ranges_end;
    }
    const TileRange& range = plan_.ranges[range_++];
    at.tile = range.begin;
    at.end = range.end;
    group_ = range.group;
    return true;
  }

  bool next_stage() {
    Position& at = nodes_;
    if (at.stage + 1 >= plan_.num_stages()) return false;
    const Part* parts = &plan_.stages[++at.stage * plan_.parts];
    at.tile = parts[first_].nodes_begin;
    at.end = parts[last_ - 1].nodes_end;
    return true;
  }

  bool next_nodes() {
    Position& at = nodes_;
    for (;; ++at.tile) {
      while (at.tile >= at.end)
        if (!next_stage()) return false;
      const NodeTile& tile = plan_.node_tiles[at.tile];
      if (!tile.contiguous || tile.stride == 1) continue;  // the sweep does not call at_nodes() for these
      at.left = std::min<Index>(tile.run, at.end - at.tile);
      at.tile += at.left;
      shift_ = 0;
      rows_ = num_rows(tile);
      const T* messages = item_.messages[item_.current].get();
      int k = 0;
      for (int x = 0; x < node_rows(tile); ++x)
        for (const T* numbers : {item_.node_theta.get(), item_.beliefs.get()})
          if (k < rows_) row_[k++] = numbers + tile.address + Index(x) * tile.stride;
      for (int d = 0; d < tile.degree; ++d) {
        const Connection& connection = plan_.connections[tile.connections + d];
        for (int x = first_row(tile); x < tile.states && k < rows_; ++x)
          row_[k++] = messages + connection.message + Index(x) * connection.stride;
      }
      if (at.tile == at.end) next_stage();
      if (at.tile < at.end) {
        __builtin_prefetch(&plan_.node_tiles[at.tile], 0, 2);
        __builtin_prefetch(plan_.connections.data() + tile.connections + at.left * tile.degree, 0, 2);
      }
      return true;
    }
  }

  const Plan& plan_;
  const Item<T>& item_;
  const int first_, last_;
  const bool on_;
  Position tables_, nodes_;
  int range_ = 0, ranges_end_ = 0, group_ = 0;
  const T* table_ = nullptr;
  Index row_size_ = 0, rows_of_table_ = 0, row_stride_ = 0;  // of the tables of a tile
  Index shift_ = 0;                                          // from the first tile of a run of nodes
  int rows_ = 0, rows_used_ = 0;
  const T* row_[kMostRows];
};

}  // namespace riskfield::RISKFIELD_ISA
