// The models of an item: one, or one in each lane (see Plan::copies).
#pragma once

#include "item.hpp"
#include "lanes.hpp"

namespace riskfield::RISKFIELD_ISA {

// Where the caller keeps the numbers of each model of an item: one row of a matrix.
template <class T, class Number = T>
class Rows {
 public:
  Rows() = default;
  // Model b has row b % rows.
  Rows(Number* matrix, Index width, const Item<T>& item, Index rows) {
    for (int c = 0; c < kLanes<T>; ++c) row_[c] = matrix + item.model_in(c).number % rows * width;
  }
  Number* operator[](int copy) const { return row_[copy]; }

 private:
  Number* row_[kLanes<T>] = {};
};
template <class T>
using ConstRows = Rows<T, const T>;

// The largest number in the lanes of one model.
template <class T>
double largest_of(const Plan& plan, const V<T>& values, int copy) {
  if (plan.copies > 1) return std::max(0.0, double(values[copy]));
  double found = 0;
  for (int l = 0; l < kLanes<T>; ++l) found = std::max(found, double(values[l]));
  return found;
}

// The sum of the lanes of one model.
template <class T>
double sum_of(const Plan& plan, const V<T>& values, int copy) {
  if (plan.copies > 1) return double(values[copy]);
  double sum = 0;
  for (int l = 0; l < kLanes<T>; ++l) sum += double(values[l]);
  return sum;
}

// The lanes of a set as a mask of vectors.
template <class T>
I<T> mask_of(LaneSet lanes) {
  I<T> mask{};
  for (int l = 0; l < kLanes<T>; ++l) mask[l] = lanes >> l & 1 ? -1 : 0;
  return mask;
}

// Keeps what some lanes of a buffer hold while all of it is updated. Then they may be put back into another buffer.
template <class T>
class KeptLanes {
 public:
  KeptLanes(LaneSet lanes, T* from, T* to, Index size) : mask_(mask_of<T>(lanes)), from_(from), to_(to) {
    kept_.allocate(size);
    std::copy(from, from + size, kept_.get());
  }
  // Sets these lanes to zero where they were.
  void clear() const {
    for (Index k = 0; k < kept_.size(); k += kLanes<T>)
      store<T>(from_ + k, select<T>(mask_, V<T>{}, load<T>(from_ + k)));
  }
  void restore() const {
    for (Index k = 0; k < kept_.size(); k += kLanes<T>)
      store<T>(to_ + k, select<T>(mask_, load<T>(kept_.get() + k), load<T>(to_ + k)));
  }

 private:
  const I<T> mask_;
  T *const from_, *const to_;
  Buffer<T> kept_;
};

}  // namespace riskfield::RISKFIELD_ISA
