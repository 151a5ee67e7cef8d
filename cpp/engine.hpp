// The engine for one instruction set and one type of number. CMakeLists.txt compiles engine_double.cpp,
// engine_float.cpp and engine_dual.cpp, which instantiate it, once for each instruction set.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
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
    workers_.reserve(threads);
    std::vector<Index> rows(input.rows);
    std::iota(rows.begin(), rows.end(), 0);
    const Apart apart = add_items(input, rows, threads);
    add_items(input, apart.probabilities, threads);
    add_items(input, apart.logarithms, threads);
  }

  void advance(Index sweeps, double tol, int threads, double* residual, Index* ran) override {
    check_whole();
    workers_.reserve(threads);
    whole_ = false;
    for_each_item(threads, [&](Item<T>& item, int thread, int team) {
      for (const Model& model : item.models) ran[model.number] = -model.sweeps;
      sweeps_.advance(item, sweeps, tol, thread, team);
      for (const Model& model : item.models) {
        ran[model.number] += model.sweeps;
        residual[model.number] = model.convergence.residual;
      }
    });
    whole_ = true;
  }

  void marginals(const double* weights, T* mu, int threads) override {
    check_whole();
    workers_.reserve(threads);
    // With weights, the items of the same rows make up one sum.
    const Index terms = weights ? sizes_.batch / sizes_.rows : 1;
    workers_.for_each(static_cast<Index>(items_.size()) / terms, threads, [&](Index k, int thread, int team) {
      std::vector<Weighted<T>> items;
      for (Index i = k * terms; i < (k + 1) * terms; ++i) items.emplace_back(items_[i], weights);
      const Index rows = weights ? sizes_.rows : sizes_.batch;
      write_marginals(items, Rows<T>(mu, sizes_.mu_size, items_[k * terms], rows), thread, team);
    });
  }

  void state(T* out, int threads) override {
    check_whole();
    workers_.reserve(threads);
    for_each_item(threads, [&](const Item<T>& item, int thread, int team) {
      const Rows<T> to(out, state_size(), item, sizes_.batch);
      if (context_.kind == Kind::kMeanField) {
        for_each_node(context_, item, [&](int copy, Index at, int n, const T* values, T) {
          using std::log;
          for (int x = 0; x < n; ++x) to[copy][at + x] = log(values[x]);
        });
        return;
      }
      workers_.for_each_tile(thread, team, [&](int g, int count, const auto& lanes, Scratch<T>& scratch) {
        unpack_messages<T>(context_, item, g, lanes, count, scratch, to);
      });
    });
  }

  void backward(const T* grad_mu, T* grad_theta, int threads) override {
    go_back(grad_mu, grad_theta, threads, [&](Item<T>& item, int thread, int team, Backward<T>& back) {
      if (record_ > 0)
        back_by_checkpoints(item, thread, team, back);
      else
        back.unroll(item.tape, 0);
    });
  }

  void backward_counting(const T* grad_mu, T* grad_theta, double* grad_counting, int threads) override {
    if constexpr (std::is_same<T, double>::value) {
      constexpr bool kCounting = true;
      Index num_factors = 0;
      for (const UserGroup& group : plan_.user_groups) num_factors += group.count;
      std::vector<std::vector<double>> counting(items_.size(), std::vector<double>(num_factors));
      auto of_item = [&](const Item<T>& item) { return counting[&item - items_.data()].data(); };
      auto sweep_back = [&](const Item<T>& item, int, int, Backward<T>& back) {
        for (Index s = item.tape.size(); s-- > 0;)
          back.template sweep<Pass::kCounting>(item.tape.end(s), item.stopped[s]);
        back.finish_counting(of_item(item));
      };
      go_back(grad_mu, grad_theta, threads, sweep_back, kCounting);
      // In the order of the items, so that the sum does not depend on the threads.
      for (const std::vector<double>& numbers : counting)
        for (std::size_t f = 0; f < numbers.size(); ++f) grad_counting[f] += numbers[f];
    } else {
      throw std::logic_error("gradients of counting numbers are computed in doubles");
    }
  }

  void backward_fixed_point(const T* grad_mu, T* grad_theta, Index steps, double tol, int threads, double* residual,
                            Index* ran) override {
    if constexpr (std::is_same<T, Dual>::value)
      throw std::logic_error("the gradient at a fixed point has no derivative");
    else
      go_back(grad_mu, grad_theta, threads, [&](const Item<T>& item, int, int, Backward<T>& back) {
        const Index recorded = item.tape.size();
        back.repeat(recorded > 0 ? item.tape.end(recorded - 1) : nullptr, steps, tol, residual, ran);
      });
  }

 private:
  void check_whole() const {
    if (!whole_) throw std::logic_error("this run was interrupted in the middle of a sweep");
  }
  Index state_size() const { return context_.kind == Kind::kMeanField ? sizes_.node_size : sizes_.message_size; }

  // Rows that could not share an item, because some of them need logarithms.
  struct Apart {
    std::vector<Index> probabilities, logarithms;
  };

  // Makes items for some rows of theta, one row in each copy of the plan, and starts them. An item has one domain: rows
  // that need different ones are not added, but returned.
  Apart add_items(const RunInput<T>& input, const std::vector<Index>& rows, int threads) {
    const auto copies = static_cast<std::size_t>(plan_.copies);
    const std::size_t blocks = (rows.size() + copies - 1) / copies, before = items_.size();
    const std::size_t steps = input.rows > 0 ? input.batch / input.rows : 0;  // items for the same rows
    items_.resize(before + blocks * steps);
    std::vector<LaneSet> mixed(blocks, 0);  // the rows that need logarithms, where others do not
    workers_.for_each(static_cast<Index>(blocks), threads, [&](Index k, int thread, int team) {
      std::vector<Packed<T>> packed;
      for (std::size_t s = 0; s < steps; ++s) {
        Item<T>& item = items_[before + k * steps + s];
        for (std::size_t r = k * copies; r < std::min((k + 1) * copies, rows.size()); ++r)
          item.models.emplace_back(static_cast<Index>(s) * input.rows + rows[r]);
        packed.push_back({&item, Theta<T>(input, item)});
      }
      Start<T> start;
      start.given = input.state != nullptr;
      if (start.given) start.rows = ConstRows<T>(input.state, state_size(), *packed[0].item, input.rows);
      Packer<T> packer(context_, start, packed);
      const LaneSet unsafe = packer.begin(team) & packed[0].item->all_models();
      if (unsafe != 0 && unsafe != packed[0].item->all_models()) {
        mixed[k] = unsafe;
        return;
      }
      packer.finish(team, unsafe != 0);
      for (const auto& [item, theta] : packed) sweeps_.start_beliefs(*item, theta, start, workers_.scratch(thread));
    });
    Apart apart;
    std::vector<Item<T>> kept;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      const LaneSet unsafe = i < before ? 0 : mixed[(i - before) / steps];
      if (unsafe == 0) {
        kept.push_back(std::move(items_[i]));
      } else if ((i - before) % steps == 0) {
        for (int c = 0; c < items_[i].num_models(); ++c)
          (unsafe >> c & 1 ? apart.logarithms : apart.probabilities).push_back(items_[i].models[c].number);
      }
    }
    items_ = std::move(kept);
    return apart;
  }

  // Calls body(item, thread, team, back) between the two ends of a backward pass.
  template <class Body>
  void go_back(const T* grad_mu, T* grad_theta, int threads, Body body, bool counting = false) {
    check_whole();
    workers_.reserve(threads);
    const auto items = static_cast<Index>(items_.size());
    const Index teams = plan_.parts > 1 && items < threads ? 1 : std::min<Index>(threads, items);  // at the same time
    while (static_cast<Index>(gradients_.size()) < teams)
      gradients_.push_back(std::make_unique<GradientBuffers<T>>(context_));
    for_each_item(threads, [&](Item<T>& item, int thread, int team) {
      Backward<T> back(context_, item, *gradients_[thread], workers_, thread, team, counting);
      back.begin(ConstRows<T>(grad_mu, sizes_.mu_size, item, sizes_.batch));
      body(item, thread, team, back);
      back.finish(Rows<T>(grad_theta, sizes_.theta_size, item, sizes_.batch), sizes_.theta_size);
    });
  }

  // Stretches between checkpoints are run again, with a tape, from the last to the first.
  void back_by_checkpoints(Item<T>& item, int thread, int team, Backward<T>& back) {
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
        sweeps_.run_again(item, k, thread, team);
        back.unroll(item.tape, k * record_);
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
    workers_.for_each(static_cast<Index>(items_.size()), threads,
                      [&](Index k, int thread, int team) { body(items_[k], thread, team); });
  }

  // Writes the weighted sum of the items' marginals.
  void write_marginals(const std::vector<Weighted<T>>& items, const Rows<T>& out, int thread, int team) {
    const int models = items[0].item->num_models();
    for (int c = 0; c < models; ++c) std::fill(out[c], out[c] + sizes_.node_size, T(0));
    for (const Weighted<T>& term : items)
      for_each_node(context_, *term.item, [&](int copy, Index at, int n, const T* values, T total) {
        for (int x = 0; x < n; ++x) out[copy][at + x] += T(term.weight[copy]) * (values[x] / total);
      });
    // Items of a row share their domain.
    workers_.for_each_tile(thread, team, [&](int g, int count, const auto& lanes, Scratch<T>& scratch) {
      with_algebra(context_, *items[0].item, g, [&](auto algebra) {
        unpack_factor<decltype(algebra), T>(context_, items, g, lanes, count, scratch, out);
      });
    });
    for (const Weighted<T>& term : items)
      for (int c = 0; c < models; ++c)
        if (term.item->models[c].impossible)
          std::fill(out[c], out[c] + sizes_.mu_size, std::numeric_limits<T>::quiet_NaN());
  }

  Context<T> context_;
  const Plan& plan_;
  const RunSizes sizes_;
  const Index record_;
  bool whole_ = true;  // whether the last `advance` came to its end
  std::vector<Item<T>> items_;
  Workers<T> workers_;
  Sweeps<T> sweeps_;
  std::vector<std::unique_ptr<GradientBuffers<T>>> gradients_;
};

template <class T>
std::unique_ptr<Run<T>> make_run(const RunInput<T>& input, int threads) {
  return std::make_unique<EngineRun<T>>(input, threads);
}

}  // namespace riskfield::RISKFIELD_ISA