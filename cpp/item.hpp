// The numbers of one model of a batch, or of one in each lane, packed into the storage of a plan.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "convergence.hpp"
#include "run.hpp"
#include "tape.hpp"

namespace riskfield::RISKFIELD_ISA {

// One of the models of a batch.
struct Model {
  explicit Model(Index number) : number(number) {}

  Index number;  // in the batch
  bool impossible = false;
  Convergence convergence;
  Index sweeps = 0;  // run so far
};

using LaneSet = std::uint32_t;  // bit l stands for lane l

template <class T>
struct Item {
  std::vector<Model> models;  // of the copies of the plan; further copies repeat the last one
  Buffer<T> tables, beliefs, node_theta;
  Buffer<T> messages[2];
  Index table_numbers = 0;  // how many numbers of the tables sweeps read
  bool log_domain = false;
  bool couplings = false;              // whether tables between binary variables are kept as one number
  bool state1_possible = false;        // whether entry 1 of all beliefs kept as ratios is 1 and need not be read
  int current = 0;                     // which of the two message buffers holds the present messages
  Index sweeps = 0;                    // run so far by any of the models
  std::vector<LaneSet> stopped;        // of each sweep: the models that it left as they were, if it may be recorded
  Tape<T> tape;                        // of the sweeps recorded
  std::vector<Buffer<T>> checkpoints;  // messages, or beliefs of mean field, before sweeps 0, k, 2k, ...

  int num_models() const { return static_cast<int>(models.size()); }
  LaneSet all_models() const { return (LaneSet(1) << num_models()) - 1; }
  const Model& model_in(int copy) const { return models[std::min(copy, num_models() - 1)]; }
};

// Whether what sweeps read does not stay in a core's share of the cache.
template <class T>
bool exceeds_cache(const Item<T>& item) {
  constexpr Index kBytes = Index(12) << 20;
  const Index numbers = item.table_numbers + item.messages[0].size() + item.beliefs.size() + item.node_theta.size();
  return numbers * static_cast<Index>(sizeof(T)) > kBytes;
}

// How many numbers of the tables of a vector of factors sweeps read.
template <class T>
RF_INLINE Index numbers_of_tables(const Item<T>& item, const Group& group) {
  return (item.couplings && group.in_rows() ? 1 : group.table_size) * kLanes<T>;
}

// Smallest and largest finite entry.
template <class T>
struct Range {
  T low = std::numeric_limits<T>::infinity(), high = kNegInf<T>;
  bool has_impossible = false;
  void add(T value) {
    if (value == kNegInf<T>) {
      has_impossible = true;
    } else {
      low = std::min(low, value);
      high = std::max(high, value);
    }
  }
  double width() const { return high > low ? double(high) - double(low) : 0.0; }
  T top() const { return high > kNegInf<T> ? high : T(0); }
};

template <class T>
Range<T> range_of(const T* values, Index count) {
  Range<T> range;
  for (Index k = 0; k < count; ++k) range.add(values[k]);
  return range;
}

}  // namespace riskfield::RISKFIELD_ISA
