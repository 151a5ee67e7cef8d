#include "engine.hpp"

namespace riskfield::RISKFIELD_ISA {

template std::unique_ptr<Run<double>> make_run<double>(const RunInput<double>&, int threads);

}  // namespace riskfield::RISKFIELD_ISA
