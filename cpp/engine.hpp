// The engine for one instruction set and one type of number. CMakeLists.txt compiles engine_double.cpp,
// engine_float.cpp and engine_dual.cpp, which instantiate it, once for each instruction set.
#pragma once

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "backward.hpp"
#include "sweeps.hpp"

namespace riskfield::RISKFIELD_ISA {

template <class T>
class EngineRun final : public Run<T> {
 public:
  EngineRun(const RunInput<T>& input, int threads)
      : context_(input),
        plan_(*context_.plan),
        sizes_(input),
        record_(input.record),
        workers_(plan_),
        sweeps_(context_, input, workers_) {
    items_.resize(input.batch);
    workers_.reserve(threads);
    Workers<T>::for_each(input.rows, threads, [&](Index r, int thread, int team) {
      const T* state = input.state ? input.state + r * state_size() : nullptr;
      std::vector<Packed<T>> models;
      for (Index b = r; b < input.batch; b += input.rows) {
        const Index start = r * input.theta_size;
        const Theta<T> theta{input.theta + start, input.direction ? input.direction + start : nullptr,
                             input.direction ? static_cast<T>(input.steps[b]) : T(0)};
        models.push_back({&items_[b], theta});
      }
      Packer<T>(context_, state, models).pack(team);
      for (const auto& [item, theta] : models) sweeps_.start_beliefs(*item, theta, state, workers_.scratch(thread));
    });
  }

  void advance(Index sweeps, double tol, int threads, double* residual, Index* ran) override {
    check_whole();
    workers_.reserve(threads);
    whole_ = false;
    for_each_item(threads, [&](Index b, int thread, int team) {
      ran[b] = sweeps_.advance(items_[b], sweeps, tol, thread, team);
      residual[b] = items_[b].convergence.residual;
    });
    whole_ = true;
  }

  void marginals(const double* weights, T* mu, int threads) override {
    check_whole();
    workers_.reserve(threads);
    const Index rows = weights ? sizes_.rows : sizes_.batch;
    Workers<T>::for_each(rows, threads, [&](Index r, int thread, int team) {
      std::vector<Weighted<T>> items;
      for (Index b = r; b < sizes_.batch; b += rows)
        items.push_back({&items_[b], weights ? static_cast<T>(weights[b]) : T(1)});
      write_marginals(items, mu + r * sizes_.mu_size, thread, team);
    });
  }

  void state(T* out, int threads) override {
    check_whole();
    workers_.reserve(threads);
    for_each_item(threads, [&](Index b, int thread, int team) {
      if (context_.kind == Kind::kMeanField) {
        for_each_node(plan_, items_[b], [&](Index at, int n, const T* values, T) {
          using std::log;
          for (int x = 0; x < n; ++x) out[b * sizes_.node_size + at + x] = log(values[x]);
        });
        return;
      }
      workers_.for_each_tile(thread, team, [&](int g, int count, const auto& lanes, Scratch<T>& scratch) {
        unpack_messages<T>(context_, items_[b], g, lanes, count, scratch, out + b * sizes_.message_size);
      });
    });
  }

  void backward(const T* grad_mu, T* grad_theta, int threads) override {
    go_back(grad_mu, grad_theta, threads, [&](Index b, int thread, Backward<T>& back) {
      Item<T>& item = items_[b];
      if (record_ > 0)
        back_by_checkpoints(item, thread, back);
      else
        back.unroll(item.tape);
    });
  }

  void backward_counting(const T* grad_mu, T* grad_theta, double* grad_counting) override {
    if constexpr (std::is_same<T, double>::value) {
      constexpr bool kCounting = true;
      auto sweep_back = [&](Index b, int, Backward<T>& back) {
        const Tape<T>& tape = items_[b].tape;
        for (Index s = tape.size(); s-- > 0;) back.template sweep<Pass::kCounting>(tape.end(s));
        back.finish_counting(grad_counting);
      };
      go_back(grad_mu, grad_theta, 1, sweep_back, kCounting);
    } else {
      throw std::logic_error("gradients of counting numbers are computed in doubles");
    }
  }

  void backward_fixed_point(const T* grad_mu, T* grad_theta, Index steps, double tol, int threads, double* residual,
                            Index* ran) override {
    if constexpr (std::is_same<T, Dual>::value)
      throw std::logic_error("the gradient at a fixed point has no derivative");
    else
      go_back(grad_mu, grad_theta, threads, [&](Index b, int, Backward<T>& back) {
        if (items_[b].tape.size() == 0) {
          residual[b] = std::numeric_limits<double>::infinity();
          ran[b] = 0;
          return;
        }
        const T* tape = items_[b].tape.end(items_[b].tape.size() - 1);
        ran[b] = back.repeat(tape, steps, tol, residual[b]);
      });
  }

 private:
  void check_whole() const {
    if (!whole_) throw std::logic_error("this run was interrupted in the middle of a sweep");
  }
  Index state_size() const { return context_.kind == Kind::kMeanField ? sizes_.node_size : sizes_.message_size; }

  // Calls body(item, thread, back) between the two ends of a backward pass.
  template <class Body>
  void go_back(const T* grad_mu, T* grad_theta, int threads, Body body, bool counting = false) {
    check_whole();
    // One thread for each item.
    threads = std::max<int>(1, static_cast<int>(std::min<Index>(threads, static_cast<Index>(items_.size()))));
    workers_.reserve(threads);
    while (static_cast<int>(gradients_.size()) < threads) gradients_.push_back(std::make_unique<Gradients<T>>(plan_));
    for_each_item(threads, [&](Index b, int thread, int) {
      T* out = grad_theta + b * sizes_.theta_size;
      std::fill(out, out + sizes_.theta_size, T(0));
      Backward<T> back(context_, items_[b], *gradients_[thread], workers_.scratch(thread));
      back.begin(grad_mu + b * sizes_.mu_size, counting);
      body(b, thread, back);
      back.finish(out);
    });
  }

  // Stretches between checkpoints are run again, with a tape, from the last to the first.
  void back_by_checkpoints(Item<T>& item, int thread, Backward<T>& back) {
    Buffer<T> messages, beliefs;
    if (!mean_field()) messages.copy(item.messages[item.current]);
    beliefs.copy(item.beliefs);
    auto restore = [&] {
      item.tape.clear();
      if (!mean_field()) item.messages[item.current].copy(messages);
      item.beliefs.copy(beliefs);
    };
    try {
      for (Index k = static_cast<Index>(item.checkpoints.size()); k-- > 0;) {
        sweeps_.run_again(item, k, workers_.scratch(thread));
        back.unroll(item.tape);
      }
    } catch (...) {  // out of memory, or interrupted
      restore();
      throw;
    }
    restore();
  }

  bool mean_field() const { return context_.kind == Kind::kMeanField; }

  template <class Body>
  void for_each_item(int threads, Body body) {
    Workers<T>::for_each(static_cast<Index>(items_.size()), threads, body);
  }

  // Writes the weighted sum of the items' marginals.
  void write_marginals(const std::vector<Weighted<T>>& items, T* out, int thread, int team) {
    for (const auto& [item, weight] : items)
      if (item->impossible) {
        std::fill(out, out + sizes_.mu_size, std::numeric_limits<T>::quiet_NaN());
        return;
      }
    std::fill(out, out + sizes_.node_size, T(0));
    for (const auto& [item, w] : items)
      for_each_node(plan_, *item, [&, weight = w](Index at, int n, const T* values, T total) {
        for (int x = 0; x < n; ++x) out[at + x] += weight * (values[x] / total);
      });
    // Items of a row share their domain.
    workers_.for_each_tile(thread, team, [&](int g, int count, const auto& lanes, Scratch<T>& scratch) {
      with_algebra(context_, *items[0].item, g, [&](auto algebra) {
        unpack_factor<decltype(algebra), T>(context_, items, g, lanes, count, scratch, out);
      });
    });
  }

  Context<T> context_;
  const Plan& plan_;
  const RunSizes sizes_;
  const Index record_;
  bool whole_ = true;  // whether the last `advance` came to its end
  std::vector<Item<T>> items_;
  Workers<T> workers_;
  Sweeps<T> sweeps_;
  std::vector<std::unique_ptr<Gradients<T>>> gradients_;
};

template <class T>
std::unique_ptr<Run<T>> make_run(const RunInput<T>& input, int threads) {
  return std::make_unique<EngineRun<T>>(input, threads);
}

}  // namespace riskfield::RISKFIELD_ISA