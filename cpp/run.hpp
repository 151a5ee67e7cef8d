// A run: the numbers of a batch of models on one plan, swept until told to stop.
#pragma once

#include <memory>
#include <string>

#include "dual.hpp"
#include "forest.hpp"
#include "plan.hpp"

namespace riskfield {

enum class Kind { kSumProduct, kMaxProduct, kMeanField };

constexpr Index kEverySweep = -1, kLastSweep = -2;

struct RunSizes {
  Index rows;   // of theta
  Index batch;  // items; one per row, unless each row stands for several perturbed models (see RunInput::direction)
  Index theta_size, node_size, message_size, mu_size;  // of the caller's vectors
};

// The pointers are used while a run is made, and not kept.
template <class T>
struct RunInput : RunSizes {
  std::shared_ptr<const Plan> plan;
  Kind kind;
  double damping;
  Index record;    // for `backward`: 0 keeps nothing, kEverySweep a tape, k > 0 a checkpoint every k sweeps; kLastSweep
                   // the tape of the last sweep, for `backward_fixed_point`
  const T* theta;  // (rows, theta_size)
  const T* direction;             // (rows, theta_size) or null; item k rows + r has theta_r + step direction_r
  const double* steps;            // (batch)
  const double* factor_counting;  // per factor, in the order of the caller's groups; null for mean field
  const double* node_counting;    // c^ per variable; null for mean field
  const T* state;  // normalised log-messages (rows, message_size), log-marginals (mean field), or null for uniform
};

template <class T>
class Run {
 public:
  virtual ~Run() = default;
  // Sweep every item up to `sweeps` times or until its residual is at most `tol`.
  virtual void advance(Index sweeps, double tol, int threads, double* residual, Index* ran) = 0;
  // Marginals in the caller's layout; NaN for an impossible model. With `weights`, one for each item, the weighted sum
  // over the models that a row of theta stands for.
  virtual void marginals(const double* weights, T* mu, int threads) = 0;
  // Normalised log-messages, or log-marginals for mean field, in the caller's layout.
  virtual void state(T* out, int threads) = 0;
  // d(grad_mu . mu) / dtheta through the recorded sweeps, both in the caller's layouts.
  virtual void backward(const T* grad_mu, T* grad_theta, int threads) = 0;
  // The same and, added to `grad_counting`, d(grad_mu . mu) / dc of every factor, summed over the batch.
  virtual void backward_counting(const T* grad_mu, T* grad_theta, double* grad_counting, int threads) = 0;
  // The same as `backward` if the one recorded sweep had run for ever: back through it up to `steps` times or until the
  // gradients of its messages are less than the share `tol` of their sum (or of what is negligible). Says how far each
  // item came.
  virtual void backward_fixed_point(const T* grad_mu, T* grad_theta, Index steps, double tol, int threads,
                                    double* residual, Index* ran) = 0;
};

// The engine compiled for one instruction set.
struct Engine {
  const char* name;
  int lanes_double, lanes_float;
  std::unique_ptr<Run<double>> (*run_double)(const RunInput<double>&, int threads);
  std::unique_ptr<Run<float>> (*run_float)(const RunInput<float>&, int threads);
  std::unique_ptr<Run<Dual>> (*run_dual)(const RunInput<Dual>&, int threads);  // on plans for doubles
  std::unique_ptr<ForestRun<double>> (*forest_double)(const ForestInput<double>&, int threads);
  std::unique_ptr<ForestRun<float>> (*forest_float)(const ForestInput<float>&, int threads);
};

// The fastest engine this processor can run, or the one named; throws std::invalid_argument if it cannot.
const Engine& engine(const std::string& name = "");

}  // namespace riskfield
