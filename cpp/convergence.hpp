// When an item of a run with a tolerance has converged. `kernels/convergence.py` explains the rule, which is the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace riskfield {

constexpr double kSettled = 0.1;     // the largest step of a log-message in a run that has converged
constexpr double kRounding = 4;      // steps below this many units in the last place are rounding
constexpr double kUnknownRate = 10;  // the ratio of the distance to gap and change before there are two gaps to compare
constexpr double kSlowest = 1000;    // the largest such ratio
constexpr std::int64_t kLongestWait = 16;  // sweeps

class Convergence {
 public:
  double residual = std::numeric_limits<double>::infinity();  // of the last sweep, NaN for an impossible model

  bool done(double tol) const { return residual <= tol || std::isnan(residual); }

  // After a sweep whose largest undamped change of a node marginal is `change`. Returns whether to measure the gap.
  bool swept(double change, double tol) {
    change_ = change;
    if (!(change <= tol)) {
      residual = change;
      last_ = std::numeric_limits<double>::quiet_NaN();
      wait_ = 0;
      return false;
    }
    ++since_;
    return --wait_ <= 0;
  }

  // With the gap: the largest inconsistency of marginals and the largest step of a log-message.
  void estimate(double marginals, double messages, double tol, double damping) {
    const double unsettled = tol * (messages / kSettled), gap = std::max(marginals, unsettled);
    const double rate = last_ > 0 ? std::pow(gap / last_, 1.0 / since_) : last_;  // 0 after a gap of 0; NaN is unknown
    double of_gap = kUnknownRate, of_change = kUnknownRate;
    if (!std::isnan(rate)) {
      of_gap = std::clamp((1 - damping) / std::max(1 - rate, 1e-9), 1.0, kSlowest);
      of_change = std::max(std::min(rate, 1.0) * of_gap, 1.0);
    }
    residual = gap > 0 ? std::max({change_ * of_change, marginals * of_gap, unsettled}) : change_;
    last_ = gap;
    since_ = 0;
    wait_ = 1;
    if (0 < tol && tol < residual && 0 < rate && rate < 1) {
      const double half_way = 0.5 * std::log(tol / residual) / std::log(rate);
      wait_ = static_cast<std::int64_t>(std::clamp(half_way, 1.0, double(kLongestWait)));
    }
  }

 private:
  double change_ = 0;
  double last_ = std::numeric_limits<double>::quiet_NaN();  // the gap measured last; NaN if there is none
  std::int64_t since_ = 0, wait_ = 0;                       // sweeps since then, and until the next measurement
};

}  // namespace riskfield
