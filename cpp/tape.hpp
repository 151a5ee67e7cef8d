// What the sweeps of a run keep for its backward pass.
#pragma once

#include <algorithm>
#include <vector>

#include "buffer.hpp"

namespace riskfield::RISKFIELD_ISA {

// For each of some sweeps what its updates were made from, in order.
template <class T>
class Tape {
 public:
  // Space for the tape of one more sweep; `most` says how many may follow. Few do if the run converges early, so each
  // slab doubles the space, up to a limit.
  T* add(Index size, Index most) {
    if (room_ == 0) {
      constexpr Index kFirst = 8, kSlab = Index(1) << 26;
      const Index fit = kSlab / std::max<Index>(1, size * sizeof(T));
      const Index room = std::max<Index>(1, std::min({most, fit, std::max(kFirst, this->size())}));
      slabs_.emplace_back();
      slabs_.back().allocate(room * size);
      next_ = slabs_.back().get();
      room_ = room;
    }
    --room_;
    T* begin = next_;
    next_ += size;
    ends_.push_back(next_);
    return begin;
  }
  Index size() const { return static_cast<Index>(ends_.size()); }
  const T* end(Index sweep) const { return ends_[sweep]; }
  // Where the tape of the last sweep begins.
  T* last(Index size) { return next_ - size; }
  // Forget the last sweep; the next one takes its space.
  void reuse(Index size) {
    if (ends_.empty()) return;
    next_ -= size;
    ends_.pop_back();
    ++room_;
  }
  void clear() {
    slabs_.clear();
    ends_.clear();
    room_ = 0;
  }

 private:
  std::vector<Buffer<T>> slabs_;
  std::vector<const T*> ends_;
  T* next_ = nullptr;
  Index room_ = 0;  // sweeps that still fit into the last slab
};

}  // namespace riskfield::RISKFIELD_ISA
