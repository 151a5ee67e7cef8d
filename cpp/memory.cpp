#include "memory.hpp"

#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace riskfield {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kLarge = std::size_t(1) << 21;  // a huge page
constexpr std::size_t kMostKept = std::size_t(1) << 28;

// The size of a block stands in the line before it.
struct Header {
  std::size_t bytes;
};

std::mutex mutex;
std::multimap<std::size_t, void*>* kept =
    new std::multimap<std::size_t, void*>;  // never destroyed: runs may outlive it
std::size_t total_kept = 0;

// A kept block that is not much larger than asked for.
void* take_kept(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = kept->lower_bound(bytes);
  if (found == kept->end() || found->first > bytes + bytes / 2) return nullptr;
  void* block = found->second;
  total_kept -= found->first;
  kept->erase(found);
  return block;
}

}  // namespace

void* take(std::size_t bytes) {
  bytes += kLine;
  const std::size_t align = bytes >= kLarge ? kLarge : kLine;
  bytes = (bytes + align - 1) / align * align;
  void* block = bytes >= kLarge ? take_kept(bytes) : nullptr;
  if (!block) {
    block = std::aligned_alloc(align, bytes);
    if (!block) throw std::bad_alloc();
#if defined(__linux__)
    if (bytes >= kLarge) madvise(block, bytes, MADV_HUGEPAGE);
#endif
    static_cast<Header*>(block)->bytes = bytes;
  }
  return static_cast<char*>(block) + kLine;
}

void give_back(void* data) {
  if (!data) return;
  void* block = static_cast<char*>(data) - kLine;
  const std::size_t bytes = static_cast<Header*>(block)->bytes;
  if (bytes >= kLarge) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (total_kept + bytes <= kMostKept) {
      kept->emplace(bytes, block);
      total_kept += bytes;
      return;
    }
  }
  std::free(block);
}

}  // namespace riskfield
