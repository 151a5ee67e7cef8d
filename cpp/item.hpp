// The numbers of one model of a batch, packed into the storage of a plan.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "convergence.hpp"
#include "run.hpp"
#include "tape.hpp"

namespace riskfield::RISKFIELD_ISA {

template <class T>
struct Item {
  Buffer<T> tables, beliefs, node_theta;
  Buffer<T> messages[2];  // as they are stored; behind them, where Algebra::kKeepsRoots, their roots in the same order
  bool log_domain = false;
  bool impossible = false;
  Convergence convergence;
  int current = 0;                     // which of the two message buffers holds the present messages
  Index sweeps = 0;                    // run so far
  Tape<T> tape;                        // of the sweeps recorded
  std::vector<Buffer<T>> checkpoints;  // messages, or beliefs of mean field, before sweeps 0, k, 2k, ...
};

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
