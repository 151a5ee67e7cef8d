// The numbers of one model of a batch, packed into the storage of a plan.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "convergence.hpp"
#include "memory.hpp"
#include "run.hpp"
#include "simd.hpp"

namespace riskfield::RISKFIELD_ISA {

// Storage that starts on a cache line and ends with room for a vector read past the last entry.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr; }
  ~Buffer() { give_back(data_); }
  void allocate(Index size) {
    const std::size_t padded = static_cast<std::size_t>(size) + kLanes<T>;
    give_back(data_);
    data_ = nullptr;
    data_ = static_cast<T*>(take(padded * sizeof(T)));
    std::fill(data_ + size, data_ + padded, T(0));
    size_ = size;
  }
  void copy(const Buffer& from) {
    if (size_ != from.size_ || !data_) allocate(from.size_);
    std::copy(from.data_, from.data_ + size_, data_);
  }
  Index size() const { return size_; }
  void fill(T value) { std::fill(data_, data_ + size_, value); }
  T* get() { return data_; }
  const T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  Index size_ = 0;
};

// For each of some sweeps what its updates were made from, in order.
template <class T>
class Tape {
 public:
  // Space for the tape of one more sweep; `expected` says how many may follow.
  T* add(Index size, Index expected) {
    if (room_ == 0) {
      constexpr Index kSlab = Index(1) << 26;
      const Index room = std::max<Index>(1, std::min(expected, kSlab / std::max<Index>(1, size * sizeof(T))));
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

template <class T>
struct Item {
  Buffer<T> tables, beliefs, node_theta, messages[2];
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
