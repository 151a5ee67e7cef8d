// The Python face of the engine. Arrays come in as NumPy arrays without copies; the GIL is released while it works.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <complex>
#include <mutex>
#include <type_traits>

#include "interrupt.hpp"
#include "memory.hpp"
#include "polling_mutex.hpp"
#include "run.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using riskfield::Index;
using riskfield::Plan;

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

namespace {

// Signals are handled by Python's main thread alone. Others need not ask, which would mean to wait for the GIL.
bool handles_signals() {
#if defined(__linux__)
  return getpid() == gettid();
#else
  return true;
#endif
}

void check_signals() {
  const nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// While it exists, the GIL is released and Ctrl-C is noticed.
class EngineCall {
 public:
  EngineCall() : call_(handles_signals() ? check_signals : nullptr) {}

 private:
  nb::gil_scoped_release release_;
  riskfield::Call call_;
};

// Factors of one shape: (shape, variables, tables, shared numbers or None, theta, mu, message and factor starts).
using GroupTuple = std::tuple<std::vector<int>, Matrix<const Index>, Vector<const Index>,
                              std::optional<Vector<const Index>>, Index, Index, Index, Index>;

// The arrays stay the caller's.
std::vector<riskfield::GroupInput> group_inputs(const std::vector<GroupTuple>& groups) {
  std::vector<riskfield::GroupInput> input;
  for (const auto& [shape, variables, tables, shared, theta, mu, message, factor] : groups)
    input.push_back({{shape,
                      static_cast<Index>(variables.shape(0)),
                      {tables.data(), tables.data() + tables.shape(0)},
                      theta,
                      mu,
                      message,
                      factor},
                     variables.data(),
                     shared ? shared->data() : nullptr});
  return input;
}

std::shared_ptr<Plan> make_plan(const std::string& isa, bool single, bool batch_lanes, int parts, bool inside,
                                riskfield::Sweep sweep, Vector<const Index> num_states, Vector<const Index> node_start,
                                Vector<const Index> rank, Vector<const Index> level,
                                const std::vector<GroupTuple>& groups) {
  const auto& engine = riskfield::engine(isa);
  const int lanes = single ? engine.lanes_float : engine.lanes_double;
  const std::vector<riskfield::GroupInput> input = group_inputs(groups);
  const EngineCall call;
  return std::make_shared<Plan>(lanes, batch_lanes ? lanes : 1, parts, inside, sweep,
                                static_cast<Index>(num_states.shape(0)), num_states.data(), node_start.data(),
                                rank.data(), level.data(), input);
}

std::shared_ptr<riskfield::ForestPlan> make_forest_plan(Vector<const Index> num_states, Vector<const Index> node_start,
                                                        const std::vector<GroupTuple>& groups) {
  const std::vector<riskfield::GroupInput> input = group_inputs(groups);
  const EngineCall call;
  return std::make_shared<riskfield::ForestPlan>(static_cast<Index>(num_states.shape(0)), num_states.data(),
                                                 node_start.data(), input);
}

// Dual numbers come as complex ones: the slope is the imaginary part.
template <class T>
using Number = std::conditional_t<std::is_same_v<T, riskfield::Dual>, std::complex<double>, T>;

template <class T>
T* engine_numbers(Number<T>* numbers) {
  return reinterpret_cast<T*>(numbers);
}
template <class T>
const T* engine_numbers(const Number<T>* numbers) {
  return reinterpret_cast<const T*>(numbers);
}

template <class T>
class PythonRun {
 public:
  PythonRun(const std::string& isa, std::shared_ptr<Plan> plan, riskfield::Kind kind, double damping, Index record,
            Matrix<const Number<T>> theta, std::optional<Vector<const double>> factor_counting,
            std::optional<Vector<const double>> node_counting, std::optional<Matrix<const Number<T>>> state,
            std::optional<Matrix<const Number<T>>> direction, std::optional<Vector<const double>> steps,
            Index node_size, Index message_size, Index mu_size, int threads) {
    riskfield::RunInput<T> input;
    input.plan = std::move(plan);
    input.kind = kind;
    input.damping = damping;
    input.record = record;
    input.rows = static_cast<Index>(theta.shape(0));
    input.batch = steps ? static_cast<Index>(steps->shape(0)) : input.rows;
    input.direction = direction ? engine_numbers<T>(direction->data()) : nullptr;
    input.steps = steps ? steps->data() : nullptr;
    input.theta_size = static_cast<Index>(theta.shape(1));
    input.node_size = node_size;
    input.message_size = message_size;
    input.mu_size = mu_size;
    input.theta = engine_numbers<T>(theta.data());
    input.factor_counting = factor_counting ? factor_counting->data() : nullptr;
    input.node_counting = node_counting ? node_counting->data() : nullptr;
    input.state = state ? engine_numbers<T>(state->data()) : nullptr;
    const auto& engine = riskfield::engine(isa);
    const EngineCall call;
    if constexpr (std::is_same_v<T, double>)
      run_ = engine.run_double(input, threads);
    else if constexpr (std::is_same_v<T, float>)
      run_ = engine.run_float(input, threads);
    else
      run_ = engine.run_dual(input, threads);
  }

  void advance(Index sweeps, double tol, int threads, Vector<double> residual, Vector<Index> ran) {
    const EngineCall call;
    const std::lock_guard<riskfield::PollingMutex> lock(mutex_);
    run_->advance(sweeps, tol, threads, residual.data(), ran.data());
  }
  void marginals(std::optional<Vector<const double>> weights, Matrix<Number<T>> out, int threads) {
    const EngineCall call;
    const std::lock_guard<riskfield::PollingMutex> lock(mutex_);
    run_->marginals(weights ? weights->data() : nullptr, engine_numbers<T>(out.data()), threads);
  }
  void backward(Matrix<const Number<T>> grad_mu, Matrix<Number<T>> grad_theta, int threads) {
    const EngineCall call;
    const std::lock_guard<riskfield::PollingMutex> lock(mutex_);
    run_->backward(engine_numbers<T>(grad_mu.data()), engine_numbers<T>(grad_theta.data()), threads);
  }
  void backward_counting(Matrix<const Number<T>> grad_mu, Matrix<Number<T>> grad_theta, Vector<double> grad_counting,
                         int threads) {
    const EngineCall call;
    const std::lock_guard<riskfield::PollingMutex> lock(mutex_);
    run_->backward_counting(engine_numbers<T>(grad_mu.data()), engine_numbers<T>(grad_theta.data()),
                            grad_counting.data(), threads);
  }
  void backward_fixed_point(Matrix<const Number<T>> grad_mu, Matrix<Number<T>> grad_theta, Index steps, double tol,
                            int threads, Vector<double> residual, Vector<Index> ran) {
    const EngineCall call;
    const std::lock_guard<riskfield::PollingMutex> lock(mutex_);
    run_->backward_fixed_point(engine_numbers<T>(grad_mu.data()), engine_numbers<T>(grad_theta.data()), steps, tol,
                               threads, residual.data(), ran.data());
  }
  void state(Matrix<Number<T>> out, int threads) {
    const EngineCall call;
    const std::lock_guard<riskfield::PollingMutex> lock(mutex_);
    run_->state(engine_numbers<T>(out.data()), threads);
  }

 private:
  riskfield::PollingMutex mutex_;  // several Python threads may use one run
  std::unique_ptr<riskfield::Run<T>> run_;
};

template <class T>
void bind_run(nb::module_& module, const char* name) {
  using nb::arg;
  nb::class_<PythonRun<T>>(module, name)
      .def(nb::init<const std::string&, std::shared_ptr<Plan>, riskfield::Kind, double, Index, Matrix<const Number<T>>,
                    std::optional<Vector<const double>>, std::optional<Vector<const double>>,
                    std::optional<Matrix<const Number<T>>>, std::optional<Matrix<const Number<T>>>,
                    std::optional<Vector<const double>>, Index, Index, Index, int>(),
           arg("isa"), arg("plan"), arg("kind"), arg("damping"), arg("record"), arg("theta"),
           arg("factor_counting").none(), arg("node_counting").none(), arg("state").none(), arg("direction").none(),
           arg("steps").none(), arg("node_size"), arg("message_size"), arg("mu_size"), arg("threads"))
      .def("advance", &PythonRun<T>::advance)
      .def("marginals", &PythonRun<T>::marginals, arg("weights").none(), arg("out"), arg("threads"))
      .def("state", &PythonRun<T>::state)
      .def("backward", &PythonRun<T>::backward)
      .def("backward_counting", &PythonRun<T>::backward_counting)
      .def("backward_fixed_point", &PythonRun<T>::backward_fixed_point);
}

template <class T>
class PythonForestRun {
 public:
  PythonForestRun(const std::string& isa, std::shared_ptr<riskfield::ForestPlan> plan, Matrix<const T> theta, bool wide,
                  int threads) {
    const riskfield::ForestInput<T> input{std::move(plan), theta.data(), static_cast<Index>(theta.shape(0)), wide};
    const auto& engine = riskfield::engine(isa);
    const EngineCall call;
    if constexpr (std::is_same_v<T, double>)
      run_ = engine.forest_double(input, threads);
    else
      run_ = engine.forest_float(input, threads);
  }
  void log_partition(Vector<double> out) const { run_->log_partition(out.data()); }
  void statistics(Matrix<T> out, int threads) {
    const EngineCall call;
    const std::lock_guard<riskfield::PollingMutex> lock(mutex_);
    run_->statistics(out.data(), threads);
  }
  void marginals(Matrix<T> out, bool nodes_only, int threads) {
    const EngineCall call;
    const std::lock_guard<riskfield::PollingMutex> lock(mutex_);
    run_->marginals(out.data(), nodes_only, threads);
  }
  void messages(Matrix<T> out, int threads) {
    const EngineCall call;
    const std::lock_guard<riskfield::PollingMutex> lock(mutex_);
    run_->messages(out.data(), threads);
  }
  void backward(Matrix<const T> grad, bool nodes_only, Matrix<T> grad_theta, int threads) {
    const EngineCall call;
    const std::lock_guard<riskfield::PollingMutex> lock(mutex_);
    run_->backward(grad.data(), nodes_only, grad_theta.data(), threads);
  }

 private:
  riskfield::PollingMutex mutex_;
  std::unique_ptr<riskfield::ForestRun<T>> run_;
};

template <class T>
void bind_forest_run(nb::module_& module, const char* name) {
  nb::class_<PythonForestRun<T>>(module, name)
      .def(nb::init<const std::string&, std::shared_ptr<riskfield::ForestPlan>, Matrix<const T>, bool, int>())
      .def("log_partition", &PythonForestRun<T>::log_partition)
      .def("statistics", &PythonForestRun<T>::statistics)
      .def("marginals", &PythonForestRun<T>::marginals)
      .def("messages", &PythonForestRun<T>::messages)
      .def("backward", &PythonForestRun<T>::backward);
}

// An array to be filled, in memory that runs keep and use again. Users drop one gradient before they get the next.
nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>> empty_bytes(std::size_t size) {
  void* data = riskfield::take(size);
  const nb::capsule owner(data, [](void* block) noexcept { riskfield::give_back(block); });
  return {data, {size}, owner};
}

}  // namespace

NB_MODULE(_native, module) {
  // Runs that live until the interpreter ends, held by a tensor, are no leaks worth telling users about.
  nb::set_leak_warnings(false);
  nb::enum_<riskfield::Kind>(module, "Kind")
      .value("SUM_PRODUCT", riskfield::Kind::kSumProduct)
      .value("MAX_PRODUCT", riskfield::Kind::kMaxProduct)
      .value("MEAN_FIELD", riskfield::Kind::kMeanField);
  nb::enum_<riskfield::Sweep>(module, "Sweep")
      .value("FORWARD_BACKWARD", riskfield::Sweep::kForwardBackward)
      .value("ALL_AT_ONCE", riskfield::Sweep::kAllAtOnce)
      .value("LEVEL_BY_LEVEL", riskfield::Sweep::kLevelByLevel);
  nb::class_<Plan>(module, "Plan")
      .def_ro("lanes", &Plan::lanes)
      .def_ro("level_cost", &Plan::level_cost)
      .def_ro("batch_cost", &Plan::batch_cost);
  module.def("make_plan", &make_plan, nb::arg("isa"), nb::arg("single"), nb::arg("batch_lanes"), nb::arg("parts"),
             nb::arg("inside"), nb::arg("sweep"), nb::arg("num_states"), nb::arg("node_start"), nb::arg("rank"),
             nb::arg("level"), nb::arg("groups"));
  module.def(
      "lanes",
      [](const std::string& isa, bool single) {
        const auto& engine = riskfield::engine(isa);
        return single ? engine.lanes_float : engine.lanes_double;
      },
      nb::arg("isa"), nb::arg("single"));
  module.def(
      "engine_name", [](const std::string& isa) { return std::string(riskfield::engine(isa).name); },
      nb::arg("isa") = "");
  nb::class_<riskfield::ForestPlan>(module, "ForestPlan");
  module.def("make_forest_plan", &make_forest_plan);
  module.def("empty_bytes", &empty_bytes, nb::arg("size"));
  module.def("assume_crowded", &riskfield::assume_crowded, nb::arg("seconds"));
  bind_forest_run<double>(module, "ForestRunDouble");
  bind_forest_run<float>(module, "ForestRunFloat");
  bind_run<double>(module, "RunDouble");
  bind_run<float>(module, "RunFloat");
  bind_run<riskfield::Dual>(module, "RunDual");
}
