// The backward pass: sweep by sweep from the marginals to theta.
#pragma once

#include <limits>

#include "deferred.hpp"
#include "tape_layout.hpp"

namespace riskfield::RISKFIELD_ISA {

// Relative to mu g, gradients of messages at a fixed point that need not be known to the tolerance: those a saturated
// model makes far smaller than the rounding of others.
constexpr double kNegligible = 1e-8;

// The gradient with respect to theta of grad_mu . mu: begin at the marginals, go back sweep by sweep, finish.
template <class T>
class Backward {
 public:
  Backward(const Context<T>& context, const Item<T>& item, Gradients<T>& grad, Scratch<T>& scratch)
      : context_(context), plan_(*context.plan), item_(item), grad_(grad), scratch_(scratch), layout_(context, item) {}

  void begin(const ConstRows<T>& grad_mu, bool counting) {
    grad_.clear();
    if (counting) grad_.begin_counting(plan_);
    for (Index p = 0; p < plan_.num_nodes; ++p) {
      scratch_.tick(plan_.states[p]);
      if (is_used(p)) from_node(p, grad_mu[plan_.copy_of(p)] + plan_.node_start[plan_.variable[p]]);
    }
    for (int g = 0; g < static_cast<int>(plan_.groups.size()); ++g)
      with_algebra(context_, item_, g, [&](auto algebra) {
        for (const FactorTile& tile : plan_.groups[g].all_tiles) {
          with_lanes<T>(plan_, plan_.groups[g], tile, [&](const auto& lanes) {
            reverse_marginals<decltype(algebra), T>(context_, item_, g, lanes, tile.count, grad_mu, grad_, scratch_);
          });
          scratch_.tick(plan_.groups[g].table_size * kLanes<T>);
        }
      });
  }

  // `at` is where the tape of the sweep ends.
  template <Pass P>
  void sweep(const T* at) {
    const bool at_once = plan_.sweep == Sweep::kAllAtOnce;
    for (Index s = plan_.num_stages() - 1; s >= 0; --s) {
      const Part* parts = &plan_.stages[s * plan_.parts];
      const int first = parts[0].ranges_begin, last = parts[plan_.parts - 1].ranges_end;
      const Index nodes_begin = parts[0].nodes_begin, nodes_end = parts[plan_.parts - 1].nodes_end;
      at -= layout_.nodes_size(nodes_begin, nodes_end);
      if constexpr (P != Pass::kTables) reverse_nodes(nodes_begin, nodes_end, at);
      T* from = P == Pass::kTables ? grad_.sum.get() : grad_.messages[grad_.current].get();
      T* to = grad_.messages[at_once ? 1 - grad_.current : grad_.current].get();
      for (int r = last - 1; r >= first; --r) {
        at -= layout_.range_size(plan_.ranges[r]);
        if constexpr (P == Pass::kDeferred) {
          if (is_deferred(context_, item_, plan_.groups[plan_.ranges[r].group]))
            reverse_range<P>(plan_.ranges[r], at, from, to);
          else
            reverse_range<Pass::kWhole>(plan_.ranges[r], at, from, to);
        } else {
          reverse_range<P>(plan_.ranges[r], at, from, to);
        }
      }
      if (at_once) grad_.current = 1 - grad_.current;
    }
  }

  // The same for a sweep that left the models in `stopped` as they were.
  template <Pass P>
  void sweep_some(const T* at, LaneSet stopped) {
    if (!stopped) return sweep<P>(at);
    std::vector<KeptLanes<T>> kept;
    auto buffers = [&] {
      std::vector<Buffer<T>*> found{&grad_.beliefs, &grad_.node_theta, &grad_.messages[grad_.current]};
      if (P == Pass::kCounting) found.insert(found.end(), {&grad_.seen, &grad_.of_belief});
      return found;
    };
    for (Buffer<T>* buffer : buffers()) {
      kept.emplace_back(stopped, buffer->get(), buffer->size());
      kept.back().clear(buffer->get());
    }
    sweep<P>(at);
    auto next = kept.begin();
    for (Buffer<T>* buffer : buffers()) (next++)->restore(buffer->get());
  }

  // Through all sweeps of a tape; the first of them is number `first` of the run.
  void unroll(const Tape<T>& tape, Index first) {
    if (tape.size() == 1) {  // nothing to add up
      sweep_some<Pass::kWhole>(tape.end(0), item_.stopped[first]);
      return;
    }
    for (Index s = tape.size(); s-- > 0;) {
      if (deferred_.count == kDeferredSweeps) add_deferred_tables();
      Buffer<T>& rates = deferred_.rates[deferred_.count];
      if (!rates.get()) rates.allocate(rates_size());
      grad_.rates = rates.get();
      deferred_.tape[deferred_.count++] = tape.end(s);
      sweep_some<Pass::kDeferred>(tape.end(s), item_.stopped[first + s]);
    }
    add_deferred_tables();  // before the tape may go
  }

  // As if the sweep that `tape` ends had been repeated for ever: goes back through it up to `steps` times, or until one
  // more time adds at most the share `tol` to the gradients of its messages. Reports for each model the last share and
  // how often.
  void repeat(const T* tape, Index steps, double tol, double* residual, Index* ran) {
    if (!grad_.sum.get()) grad_.sum.allocate(plan_.message_size);
    grad_.sum.fill(0);
    for (const Model& model : item_.models) {
      residual[model.number] = std::numeric_limits<double>::infinity();
      ran[model.number] = 0;
    }
    if (!tape) return;  // no sweep has run
    for (Index step = 0; step < steps; ++step) {
      LaneSet stopped = 0;
      for (int c = 0; c < item_.num_models(); ++c)
        if (!(residual[item_.models[c].number] > tol)) stopped |= LaneSet(1) << c;
      if (stopped == item_.all_models()) break;
      grad_.square = V<T>{};
      sweep_some<Pass::kSum>(tape, stopped);
      double total[kLanes<T>] = {};
      for (Index k = 0; k < grad_.sum.size(); ++k)
        total[plan_.copy_of(k)] += double(grad_.sum.get()[k]) * grad_.sum.get()[k];
      for (int c = 0; c < item_.num_models(); ++c) {
        if (stopped >> c & 1) continue;
        const double square = sum_of<T>(plan_, grad_.square, c), scale = sum_of<T>(plan_, grad_.scale, c);
        const double size = std::sqrt(total[c]) + kNegligible * std::sqrt(scale);
        residual[item_.models[c].number] = square == 0 ? 0 : std::sqrt(square) / size;
        ++ran[item_.models[c].number];
      }
    }
    sweep<Pass::kTables>(tape);
  }

  // Gradients of counting numbers, in the caller's order of factors.
  void finish_counting(double* out) const {
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      const Group& group = plan_.groups[g];
      for (Index f = 0; f < group.count; ++f)
        out[plan_.user_groups[group.user_group[f]].factor_start + group.user_row[f]] += double(grad_.counting[g][f]);
    }
  }

  // Into the caller's layout, where several factors may add to one table.
  void finish(const Rows<T>& out) {
    // The beliefs a run starts with are made of theta and the first messages; mean field's are given.
    if (!mean_field()) reverse_nodes(0, static_cast<Index>(plan_.node_tiles.size()), nullptr);
    for (Index p = 0; p < plan_.num_nodes; ++p) {
      scratch_.tick(plan_.states[p]);
      if (!is_used(p)) continue;
      const T* from = grad_.node_theta.get() + plan_.node_address[p];
      T* to = out[plan_.copy_of(p)] + plan_.node_start[plan_.variable[p]];
      const bool ratio = one_row(plan_.states[p]);
      for (int x = 0; x < plan_.states[p]; ++x)
        to[x] += ratio && x == 0 ? -from[plan_.node_stride[p]] : from[Index(x) * plan_.node_stride[p]];
    }
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      const Group& group = plan_.groups[g];
      for (Index f = 0; f < group.count; ++f)
        if (group.shared[f] < 0 && is_used(f)) write_table(g, f, out);
    }
    for (const SharedTable& shared : plan_.shared_tables)
      for (int c = 0; c < item_.num_models(); ++c) write_table(shared.group, shared.factor + c, out);
  }

 private:
  bool mean_field() const { return context_.kind == Kind::kMeanField; }
  // Whether a packed node or a factor belongs to one of the models.
  bool is_used(Index node_or_factor) const { return plan_.copy_of(node_or_factor) < item_.num_models(); }
  bool one_row(int states) const { return keeps_ratio(context_, item_, states); }

  // From the gradient of a node marginal p to that of the log-belief: p(x) (g(x) - p . g); for mean field, whose log-
  // beliefs are of the normalised p, p(x) g(x).
  void from_node(Index p, const T* gradient) {
    const int n = plan_.states[p];
    const Index stride = plan_.node_stride[p];
    const T* belief = item_.beliefs.get() + plan_.node_address[p];
    T* to = grad_.beliefs.get() + plan_.node_address[p];
    auto weight = [&](int x) { return weight_of(context_, item_, n, x, belief[x * stride]); };
    T total = 0, mean = 0;
    for (int x = 0; x < n; ++x) total += weight(x);
    for (int x = 0; x < n; ++x) {
      const T share = weight(x) / total * gradient[x];
      mean += share;
      set_lane<T>(grad_.scale, plan_.copy_of(p), T(grad_.scale[plan_.copy_of(p)]) + share * share);
    }
    if (mean_field()) mean = 0;
    for (int x = 0; x < (one_row(n) ? 1 : n); ++x) to[x * stride] += weight(x) / total * (gradient[x] - mean);
  }

  // Calls body(range, rates) for the ranges of a sweep whose tables are deferred, in the order of the backward pass;
  // `rates` is how many numbers it writes down for each tile.
  template <class Body>
  void for_each_deferred(Body body) const {
    for (Index s = plan_.num_stages() - 1; s >= 0; --s) {
      const Part* parts = &plan_.stages[s * plan_.parts];
      for (int r = parts[plan_.parts - 1].ranges_end - 1; r >= parts[0].ranges_begin; --r) {
        const Group& group = plan_.groups[plan_.ranges[r].group];
        body(plan_.ranges[r], is_deferred(context_, item_, group) ? group.dims[plan_.ranges[r].slot] * kLanes<T> : 0);
      }
    }
  }

  Index rates_size() const {
    Index size = 0;
    for_each_deferred([&](const TileRange& range, Index rates) { size += (range.end - range.begin) * rates; });
    return size;
  }

  void add_deferred_tables() {
    const int count = deferred_.count;
    deferred_.count = 0;
    const T *tape[kDeferredSweeps], *rates[kDeferredSweeps];
    for (int k = 0; k < count; ++k) rates[k] = deferred_.rates[k].get();
    Index offset = 0;  // from the end of a sweep's tape
    for_each_deferred([&](const TileRange& range, Index rates_per_tile) {
      offset -= layout_.range_size(range);
      if (rates_per_tile == 0) return;
      const Group& group = plan_.groups[range.group];
      const Index cavity = group.dims[1 - range.slot] * kLanes<T>;
      for (int k = 0; k < count; ++k) tape[k] = deferred_.tape[k] + offset;
      with_states<LogMessages<T>>(square_states(group), [&](auto states) {
        constexpr int S = decltype(states)::value > 2 ? decltype(states)::value : 0;
        for (Index t = range.begin; t < range.end; ++t) {
          const FactorTile& tile = plan_.factor_tiles[t];
          scratch_.tick(group.table_size);
          with_lanes<T>(plan_, group, tile, [&](const auto& lanes) {
            add_deferred<T, S>(item_, group, range.slot, lanes, count, tape, rates, grad_.tables.get(), scratch_);
          });
          for (int k = 0; k < count; ++k) {
            tape[k] += cavity;
            rates[k] += rates_per_tile;
          }
        }
      });
    });
  }

  template <Pass P, class Body>
  void with_algebra_of(Body body) const {
    if constexpr (P == Pass::kDeferred)
      body(LogMessages<T>{});
    else
      with_gradient_algebra(context_, item_, body);
  }
  // Only what is done in every sweep is worth unrolling.
  template <class Algebra, Pass P, class Body>
  static void with_unrolled(int states, Body body) {
    if constexpr (IsLogarithm<Algebra>::value)
      body(std::integral_constant<int, 0>{});
    else if constexpr (P == Pass::kWhole || P == Pass::kSum || P == Pass::kDeferred)
      with_states<Algebra>(states, body);
    else if (P == Pass::kTables && states == 2)
      body(std::integral_constant<int, 2>{});
    else
      body(std::integral_constant<int, 0>{});
  }

  template <Pass P>
  void reverse_range(const TileRange& range, const T* tape, T* from, T* to) {
    const Group& group = plan_.groups[range.group];
    with_algebra_of<P>([&](auto algebra) {
      using Algebra = decltype(algebra);
      const Index ahead = tiles_ahead<T>(group);
      with_unrolled<Algebra, P>(square_states(group), [&](auto states) {
        for (Index t = range.begin; t < range.end; ++t) {
          const FactorTile& tile = plan_.factor_tiles[t];
          scratch_.tick(group.table_size);
          if (t + ahead < range.end) {
            prefetch_tables(group, plan_.factor_tiles[t + ahead], item_.tables.get());
            if (kAddsTables<P>) prefetch_tables(group, plan_.factor_tiles[t + ahead], grad_.tables.get());
          }
          if (tile.contiguous)
            reverse_message<Algebra, T, decltype(states)::value, P>(context_, item_, range.group, range.slot,
                                                                    TileLanes<T, true>(plan_, group, tile), tape, from,
                                                                    to, grad_, scratch_);
          else
            reverse_gathered<Algebra, P, decltype(states)::value == 2 && P != Pass::kDeferred ? 2 : 0>(range, tile,
                                                                                                       tape, from, to);
        }
      });
    });
  }
  template <class Algebra, Pass P, int S>
  __attribute__((noinline)) void reverse_gathered(const TileRange& range, const FactorTile& tile, const T*& tape,
                                                  T* from, T* to) {
    reverse_message<Algebra, T, S, P>(context_, item_, range.group, range.slot,
                                      TileLanes<T, false>(plan_, plan_.groups[range.group], tile), tape, from, to,
                                      grad_, scratch_);
  }

  void reverse_nodes(Index begin, Index end, const T* tape) {
    with_gradient_algebra(context_, item_, [&](auto algebra) {
      using Algebra = decltype(algebra);
      for (Index t = begin; t < end; ++t) {
        const NodeTile& tile = plan_.node_tiles[t];
        scratch_.tick(tile.states);
        with_states<Algebra>(tile.states, [&](auto states) {
          reverse_belief<Algebra, T, decltype(states)::value>(context_, tile, tape, grad_, scratch_);
        });
      }
    });
  }

  void write_table(std::size_t g, Index f, const Rows<T>& out) const {
    const Group& group = plan_.groups[g];
    scratch_.tick(group.table_size);
    T* to = out[plan_.copy_of(f)] + user_table(plan_, group, f);
    const Index stride = group.table_stride[f];
    const Index* map = group.entry_maps[group.permutation[f]].data();
    const T* from = grad_.tables.get() + group.table[f];
    const T inverse = context_.inverse[g][f];
    if (keeps_sums(context_, item_, group, grad_)) {
      const T corner = from[0], row = from[stride], column = from[2 * stride];
      to[map[0]] += corner * inverse;
      to[map[1]] += (row - corner) * inverse;
      to[map[2]] += (column - corner) * inverse;
      to[map[3]] += (corner - row - column) * inverse;
      return;
    }
    for (Index e = 0; e < group.table_size; ++e) to[map[e]] += from[e * stride] * inverse;
  }

  const Context<T>& context_;
  const Plan& plan_;
  const Item<T>& item_;
  Gradients<T>& grad_;
  Scratch<T>& scratch_;
  const TapeLayout<T> layout_;
  Deferred<T> deferred_;
};

}  // namespace riskfield::RISKFIELD_ISA
