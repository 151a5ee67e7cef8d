// The table of what one instruction set offers.
#include "run.hpp"
#include "simd.hpp"

namespace riskfield::RISKFIELD_ISA {

// Instantiated in engine_double.cpp, engine_float.cpp and engine_dual.cpp.
template <class T>
std::unique_ptr<Run<T>> make_run(const RunInput<T>& input, int threads);

// Instantiated in engine_forest.cpp.
template <class T>
std::unique_ptr<ForestRun<T>> make_forest_run(const ForestInput<T>& input, int threads);

extern const Engine kEngine;
const Engine kEngine{RISKFIELD_ISA_NAME, kLanes<double>, kLanes<float>,           make_run<double>,
                     make_run<float>,    make_run<Dual>, make_forest_run<double>, make_forest_run<float>};

}  // namespace riskfield::RISKFIELD_ISA
