#include "engine.hpp"

namespace riskfield::RISKFIELD_ISA {

template std::unique_ptr<Run<Dual>> make_run<Dual>(const RunInput<Dual>&, int threads);

}  // namespace riskfield::RISKFIELD_ISA
