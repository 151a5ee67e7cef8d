// Chooses among the engines compiled into this build the best one the processor can run.
#include <stdexcept>

#include "run.hpp"

namespace riskfield {

#define RISKFIELD_DECLARE(isa) \
  namespace isa {              \
  extern const Engine kEngine; \
  }
RISKFIELD_DECLARE(baseline)
#if defined(RISKFIELD_X86)
RISKFIELD_DECLARE(avx2)
RISKFIELD_DECLARE(avx512)
#endif

const Engine& engine(const std::string& name) {
#if defined(RISKFIELD_X86)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
  if (has_avx512 && (name.empty() || name == "avx512")) return avx512::kEngine;
  if (has_avx2 && (name.empty() || name == "avx2")) return avx2::kEngine;
#endif
  if (name.empty() || name == "baseline") return baseline::kEngine;
  throw std::invalid_argument("this processor or build has no engine named '" + name + "'");
}

}  // namespace riskfield
