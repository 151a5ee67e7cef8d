// Memory for the numbers of runs. Large blocks are kept for the next run: a fresh one costs the system more time, page
// by page, than a sweep takes to fill it.
#pragma once

#include <cstddef>

namespace riskfield {

// Aligned to a cache line; throws std::bad_alloc. Give it back with `give_back`, which accepts null.
void* take(std::size_t bytes);
void give_back(void* block);

}  // namespace riskfield
