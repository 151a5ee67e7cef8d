#include "engine.hpp"

namespace riskfield::RISKFIELD_ISA {

template std::unique_ptr<Run<float>> make_run<float>(const RunInput<float>&, int threads);

}  // namespace riskfield::RISKFIELD_ISA
