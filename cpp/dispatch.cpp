// Chooses among the engines compiled into this build the best one the processor can run.
#include <stdexcept>

#include "run.hpp"

namespace riskfield {

#define RISKFIELD_DECLARE(isa) \
  namespace isa {              \
  extern const Engine kEngine; \
  }
#if defined(RISKFIELD_HAS_BASELINE)
RISKFIELD_DECLARE(baseline)
#endif
#if defined(RISKFIELD_HAS_AVX2)
RISKFIELD_DECLARE(avx2)
#endif
#if defined(RISKFIELD_HAS_AVX512)
RISKFIELD_DECLARE(avx512)
#endif

const Engine& engine(const std::string& name) {
  [[maybe_unused]] auto wanted = [&](const char* isa) { return name.empty() || name == isa; };
#if defined(RISKFIELD_HAS_AVX512)
  __builtin_cpu_init();
  if (wanted("avx512") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw"))
    return avx512::kEngine;
#endif
#if defined(RISKFIELD_HAS_AVX2)
  __builtin_cpu_init();
  if (wanted("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::kEngine;
#endif
#if defined(RISKFIELD_HAS_BASELINE)
  if (wanted("baseline")) return baseline::kEngine;
#endif
  throw std::invalid_argument("this processor or build has no engine named '" + name + "'");
}

}  // namespace riskfield
