// Memory for the numbers of a run.
#pragma once

#include <algorithm>

#include "interrupt.hpp"
#include "memory.hpp"
#include "plan.hpp"
#include "simd_dual.hpp"

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

// Sets [begin, end) to `value`, so that Ctrl-C need not wait for it: fresh memory takes a second per few gigabytes.
template <class T>
void fill(T* begin, T* end, T value, Ticker& tick) {
  in_chunks(0, end - begin, 1, tick, [&](Index a, Index b) { std::fill(begin + a, begin + b, value); });
}

}  // namespace riskfield::RISKFIELD_ISA
