// The numbers of one model of a batch, packed into the storage of a plan.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

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
  ~Buffer() { ::operator delete[](data_, std::align_val_t(64)); }
  void allocate(Index size) {
    const std::size_t padded = static_cast<std::size_t>(size) + kLanes<T>;
    data_ = static_cast<T*>(::operator new[](padded * sizeof(T), std::align_val_t(64)));
    std::fill(data_ + size, data_ + padded, T(0));
    size_ = size;
  }
  Index size() const { return size_; }
  void fill(T value) { std::fill(data_, data_ + size_, value); }
  T* get() { return data_; }
  const T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  Index size_ = 0;
};

template <class T>
struct Item {
  Buffer<T> tables, beliefs, node_theta, messages[2];
  bool log_domain = false;
  bool impossible = false;
  double residual = std::numeric_limits<double>::infinity();  // of the last sweep, NaN for an impossible model
  std::vector<Buffer<T>> tape;  // for each recorded sweep, what it overwrote, in order
  int current = 0;  // which of the two message buffers holds the present messages
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
