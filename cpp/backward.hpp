// The backward pass: sweep by sweep from the marginals to theta.
#pragma once

#include <limits>

#include "backward_sweeps.hpp"
#include "reverse_marginals.hpp"

namespace riskfield::RISKFIELD_ISA {

// Relative to mu g, gradients of messages at a fixed point that need not be known to the tolerance: those a saturated
// model makes far smaller than the rounding of others.
constexpr double kNegligible = 1e-8;

// The gradient with respect to theta of grad_mu . mu: begin at the marginals, go back sweep by sweep, finish. A team of
// threads shares the work if the plan has parts for it.
template <class T>
class Backward {
 public:
  // The threads of the team are `thread` and those that follow it.
  Backward(const Context<T>& context, const Item<T>& item, GradientBuffers<T>& buffers, const Workers<T>& workers,
           int thread, int team, bool counting)
      : context_(context),
        plan_(*context.plan),
        item_(item),
        buffers_(buffers),
        workers_(workers),
        thread_(thread),
        team_(team),
        sweeps_(context, item, prepared(buffers, plan_, counting)) {}

  void begin(const ConstRows<T>& grad_mu) {
    shared([&](const Member<T>& member) {
      for (int p = member.first; p < member.last; ++p) buffers_.clear(p, plan_.parts, member.scratch.tick);
      if (member.leads()) find_losses(grad_mu, member.scratch.tick);
      member.meet();
      for (int p = member.first; p < member.last; ++p) {
        const Share nodes = share(0, plan_.num_nodes, p, plan_.parts);
        for (Index n = nodes.begin; n < nodes.end; ++n) {
          member.scratch.tick(plan_.states[n]);
          if (is_used(n))
            from_node(n, grad_mu[plan_.copy_of(n)] + plan_.node_start[plan_.variable[n]], sweeps_.part(p));
        }
      }
      member.meet();
      for (int p = member.first; p < member.last; ++p) from_tiles(p, grad_mu, sweeps_.part(p), member);
    });
  }

  // Through one sweep, which left the models in `stopped` as they were. `tape` is where its tape ends.
  template <Pass P>
  void sweep(const T* tape, LaneSet stopped) {
    shared([&](const Member<T>& member) { sweep_some<P>(tape, stopped, member); });
  }

  // Through all sweeps of a tape; the first of them is number `first` of the run.
  void unroll(const Tape<T>& tape, Index first) {
    if (tape.size() == 1) {  // nothing to add up
      sweep<Pass::kWhole>(tape.end(0), item_.stopped[first]);
      return;
    }
    for (Index left = tape.size(); left > 0;) {
      const int count = static_cast<int>(std::min<Index>(left, kDeferredSweeps));
      const T* ends[kDeferredSweeps];
      for (int k = 0; k < count; ++k) ends[k] = tape.end(left - 1 - k);
      if (const Index size = count * sweeps_.rates_size(); rates_.size() < size) rates_.allocate(size);
      shared([&](const Member<T>& member) {
        for (int k = 0; k < count; ++k)
          sweep_some<Pass::kDeferred>(ends[k], item_.stopped[first + left - 1 - k], member,
                                      rates_.get() + k * sweeps_.rates_size());
        sweeps_.add_deferred_tables(count, ends, rates_.get(), member);
      });
      left -= count;
    }
  }

  // As if the sweep that `tape` ends had been repeated for ever: goes back through it up to `steps` times, or until one
  // more time adds at most the share `tol` to the gradients of its messages. Reports for each model the last share and
  // how often.
  void repeat(const T* tape, Index steps, double tol, double* residual, Index* ran) {
    if (!buffers_.sum.get()) buffers_.sum.allocate(plan_.gradient_size);
    fill(buffers_.sum.get(), buffers_.sum.get() + buffers_.sum.size(), T(0), workers_.scratch(thread_).tick);
    for (int p = 0; p < plan_.parts; ++p) sweeps_.part(p).sum = buffers_.sum.get();
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
      std::vector<Squares> squares(plan_.parts);
      shared([&](const Member<T>& member) {
        for (int p = member.first; p < member.last; ++p) sweeps_.part(p).square = V<T>{};
        sweep_some<Pass::kSum>(tape, stopped, member);
        for (int p = member.first; p < member.last; ++p) squares[p] = squares_of_sum(p);
      });
      for (int c = 0; c < item_.num_models(); ++c) {
        if (stopped >> c & 1) continue;
        double total = 0, square = 0, scale = 0;
        for (int p = 0; p < plan_.parts; ++p) {
          total += squares[p].lanes[c];
          square += sum_of<T>(plan_, sweeps_.part(p).square, c);
          scale += sum_of<T>(plan_, sweeps_.part(p).scale, c);
        }
        const double size = std::sqrt(total) + kNegligible * std::sqrt(scale);
        residual[item_.models[c].number] = square == 0 ? 0 : std::sqrt(square) / size;
        ++ran[item_.models[c].number];
      }
    }
    sweep<Pass::kTables>(tape, 0);
  }

  // Gradients of counting numbers, in the caller's order of factors.
  void finish_counting(double* out) const {
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      const Group& group = plan_.groups[g];
      for (Index f = 0; f < group.count; ++f)
        out[plan_.user_groups[group.user_group[f]].factor_start + group.user_row[f]] += double(buffers_.counting[g][f]);
    }
  }

  // Into the caller's layout, where several factors may add to one tied table.
  void finish(const Rows<T>& out, Index theta_size) {
    // The beliefs a run starts with are made of theta and the first messages; mean field's are given.
    if (!mean_field()) reverse_first_beliefs();
    for (int p = 1; p < plan_.parts; ++p)
      for (Index k = 0; k < plan_.tied_size; ++k) buffers_.tables.get()[k] += sweeps_.part(p).tied[k];
    shared([&](const Member<T>& member) {
      for (int p = member.first; p < member.last; ++p) {
        const Share part = share(0, theta_size, p, plan_.parts);
        for (int c = 0; c < item_.num_models() && plan_.tied_size > 0; ++c)  // else each number is written once
          fill(out[c] + part.begin, out[c] + part.end, T(0), member.scratch.tick);
      }
      member.meet();
      for (int p = member.first; p < member.last; ++p) write(p, out, member.scratch);
      if (!member.leads()) return;
      for (const SharedTable& table : plan_.shared_tables)
        for (int c = 0; c < item_.num_models(); ++c) write_table(table.group, table.factor + c, out, member.scratch);
    });
  }

 private:
  struct Squares {
    double lanes[kLanes<T>] = {};
  };

  static GradientBuffers<T>& prepared(GradientBuffers<T>& buffers, const Plan& plan, bool counting) {
    buffers.counting.clear();
    if (counting) buffers.begin_counting(plan);
    return buffers;
  }

  // Calls body(member) for the threads of the team.
  template <class Body>
  void shared(Body body) const {
    workers_.for_each_part(thread_, team_, body);
  }

  template <Pass P>
  void sweep_some(const T* tape, LaneSet stopped, const Member<T>& member, T* rates = nullptr) {
    if (!stopped) return sweeps_.template sweep<P>(tape, member, rates);
    std::vector<KeptLanes<T>> kept;
    auto keep = [&](Buffer<T>& from, Buffer<T>& to) {
      const Share own = member.share_of_vectors(plan_, from.size());
      kept.emplace_back(stopped, from.get() + own.begin, to.get() + own.begin, own.end - own.begin);
    };
    const int now = sweeps_.part(member.first).current, next = plan_.sweep == Sweep::kAllAtOnce ? 1 - now : now;
    keep(buffers_.messages[now], buffers_.messages[next]);
    for (Buffer<T>* buffer : {&buffers_.beliefs, &buffers_.node_theta, &buffers_.parcels}) keep(*buffer, *buffer);
    if (P == Pass::kCounting)
      for (Buffer<T>* buffer : {&buffers_.seen, &buffers_.of_belief}) keep(*buffer, *buffer);
    for (const KeptLanes<T>& lanes : kept) lanes.clear();
    member.meet();
    sweeps_.template sweep<P>(tape, member, rates);
    for (const KeptLanes<T>& lanes : kept) lanes.restore();
    member.meet();
  }

  // The squares of one share of the sums, added up for each copy.
  Squares squares_of_sum(int part) const {
    Squares found;
    const Share own = share(0, buffers_.sum.size(), part, plan_.parts);
    const T* sum = buffers_.sum.get();
    for (Index k = own.begin; k < own.end; ++k) found.lanes[plan_.copy_of(k)] += double(sum[k]) * sum[k];
    return found;
  }

  bool mean_field() const { return context_.kind == Kind::kMeanField; }
  // Whether a packed node or a factor belongs to one of the models.
  bool is_used(Index node_or_factor) const { return plan_.copy_of(node_or_factor) < item_.num_models(); }
  bool one_row(int states) const { return keeps_ratio(context_, item_, states); }

  // From the gradient of a node marginal p to that of the log-belief: p(x) (g(x) - p . g); for mean field, whose log-
  // beliefs are of the normalised p, p(x) g(x).
  void from_node(Index p, const T* gradient, Gradients<T>& grad) const {
    const int n = plan_.states[p];
    const Index stride = plan_.node_stride[p];
    const T* belief = item_.beliefs.get() + plan_.node_address[p];
    T* to = grad.beliefs + plan_.node_address[p];
    auto weight = [&](int x) { return weight_of(context_, item_, n, x, belief[x * stride]); };
    T total = 0, mean = 0;
    for (int x = 0; x < n; ++x) total += weight(x);
    for (int x = 0; x < n; ++x) {
      const T share = weight(x) / total * gradient[x];
      mean += share;
      set_lane<T>(grad.scale, plan_.copy_of(p), T(grad.scale[plan_.copy_of(p)]) + share * share);
    }
    if (mean_field()) mean = 0;
    for (int x = 0; x < (one_row(n) ? 1 : n); ++x) to[x * stride] += weight(x) / total * (gradient[x] - mean);
  }

  // Losses of node marginals alone are common: whole groups of factors need not be looked at one by one then.
  void find_losses(const ConstRows<T>& grad_mu, Ticker& tick) {
    has_loss_.assign(plan_.groups.size(), false);
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      std::vector<bool> seen(plan_.user_groups.size(), false);
      for (const std::int32_t u : plan_.groups[g].user_group) {
        if (seen[u] || has_loss_[g]) continue;
        seen[u] = true;
        const Index size = plan_.user_groups[u].count * plan_.groups[g].table_size;
        for (int c = 0; c < item_.num_models(); ++c)
          in_chunks(0, size, 1, tick, [&](Index a, Index b) {
            const T* from = grad_mu[c] + plan_.user_groups[u].mu_start;
            has_loss_[g] = has_loss_[g] || !all_zero(from + a, b - a);
          });
      }
    }
  }

  // From the gradients of the factor marginals that belong to a part, and its share of those between parts.
  void from_tiles(int part, const ConstRows<T>& grad_mu, Gradients<T>& grad, const Member<T>& member) const {
    for (int g = 0; g < static_cast<int>(plan_.groups.size()); ++g) {
      const std::vector<Index>& first = plan_.groups[g].part_tiles;
      const Share between = share(first[plan_.parts], first[plan_.parts + 1], part, plan_.parts);
      with_algebra(context_, item_, g, [&](auto algebra) {
        if (!has_loss_[g]) return;
        from_tiles<decltype(algebra)>(g, first[part], first[part + 1], grad_mu, grad, member);
        from_tiles<decltype(algebra)>(g, between.begin, between.end, grad_mu, grad, member);
      });
    }
  }
  template <class Algebra>
  void from_tiles(int g, Index begin, Index end, const ConstRows<T>& grad_mu, Gradients<T>& grad,
                  const Member<T>& member) const {
    const Group& group = plan_.groups[g];
    const Index ahead = tiles_ahead<T>(group);
    for (Index t = begin; t < end; ++t) {
      if (t + ahead < end) {
        const FactorTile& later = group.all_tiles[t + ahead];
        fetch_marginals(group, later, grad_mu);
        prefetch_tables(group, later, item_.tables.get());
        prefetch_tables(group, later, grad.tables);
      }
      auto reverse = [&](auto states, const auto& lanes) {
        constexpr int S = decltype(states)::value;
        const int count = group.all_tiles[t].count;
        if constexpr (S > 0)
          reverse_pair_marginals<Algebra, T, S>(context_, item_, g, lanes, count, grad_mu, grad, member.scratch);
        else
          reverse_marginals<Algebra, T>(context_, item_, g, lanes, count, grad_mu, grad, member.scratch);
      };
      with_lanes<T>(plan_, group, group.all_tiles[t], [&](const auto& lanes) {
        if constexpr (IsLogarithm<Algebra>::value || kIsExpectation<Algebra, T>)
          reverse(std::integral_constant<int, 0>{}, lanes);
        else
          with_states<Algebra>(square_states(group), [&](auto states) { reverse(states, lanes); });
      });
      member.scratch.tick(group.table_size * kLanes<T>);
    }
  }

  // The beliefs before the first sweep. One thread alone takes their gradients out: vectors may reach over tiles of
  // others.
  void reverse_first_beliefs() {
    shared([&](const Member<T>& member) {
      for (int p = member.first; p < member.last; ++p) sweeps_.receive_all(p);
      member.meet();
      if (member.leads() && !gathers_at_once(context_))
        sweeps_.reverse_nodes(0, 0, static_cast<Index>(plan_.node_tiles.size()), nullptr, member);
    });
  }

  // Neighbours in the storage of a plan are far apart in the caller's layout, where the processor foresees nothing.
  template <int Write>
  static void prefetch_some(const T* from, Index count) {
    constexpr Index kLine = 64 / sizeof(T), kMost = 4096 / sizeof(T);
    const Index size = std::min(count, kMost);
    for (Index k = 0; k < size; k += kLine) __builtin_prefetch(from + k, Write, 2);
    __builtin_prefetch(from + size - 1, Write, 2);
  }
  void fetch_marginals(const Group& group, const FactorTile& tile, const ConstRows<T>& grad_mu) const {
    for (Index f = tile.first; f < tile.first + tile.count && tile.contiguous; ++f)
      prefetch_some<0>(grad_mu[plan_.copy_of(f)] + user_marginals(plan_, group, f), group.table_size);
  }

  // One share of the nodes and of the tables that belong to one factor each.
  void write(int part, const Rows<T>& out, Scratch<T>& scratch) const {
    const Share nodes = share(0, plan_.num_nodes, part, plan_.parts);
    for (Index p = nodes.begin; p < nodes.end; ++p) {
      scratch.tick(plan_.states[p]);
      if (!is_used(p)) continue;
      const T* from = buffers_.node_theta.get() + plan_.node_address[p];
      T* to = out[plan_.copy_of(p)] + plan_.node_start[plan_.variable[p]];
      const bool ratio = one_row(plan_.states[p]);  // then both entries sum to zero
      for (int x = 0; x < plan_.states[p]; ++x)
        to[x] = ratio && x == 1 ? -from[0] : from[Index(x) * plan_.node_stride[p]];
    }
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      const Group& group = plan_.groups[g];
      const bool sums = keeps_sums(context_, item_, group, !buffers_.counting.empty());
      const Share tiles = share(0, static_cast<Index>(group.all_tiles.size()), part, plan_.parts);
      for (Index t = tiles.begin; t < tiles.end; ++t) {
        if (t + kAhead < tiles.end)
          for_each_factor(group, group.all_tiles[t + kAhead],
                          [&](Index f, int) { fetch_gradient(group, f, sums ? 1 : group.table_size, out); });
        V<T> first[2];
        if (sums) sums_of(g, group.all_tiles[t], first);
        for_each_factor(group, group.all_tiles[t], [&](Index f, int l) {
          if (group.shared[f] >= 0) return;
          if (!sums) return write_table(g, f, out, scratch);
          write_binary(g, f, buffers_.tables.get()[group.table[f]] * context_.inverse[g][f], first[0][l], first[1][l],
                       out, scratch);
        });
      }
    }
  }

  // Calls body(factor, lane) for the factors of a tile that belong to a model.
  template <class Body>
  void for_each_factor(const Group& group, const FactorTile& tile, Body body) const {
    for (int l = 0; l < tile.count; ++l) {
      const Index f = tile.contiguous ? tile.first + l : group.lanes[tile.first + l];
      if (is_used(f)) body(f, l);
    }
  }

  // The gradients of the first rows and the first columns of theta, summed (see keeps_sums).
  void sums_of(std::size_t g, const FactorTile& tile, V<T>* first) const {
    T* messages = sweeps_.messages();
    with_gradient_algebra(context_, item_, [&](auto algebra) {
      with_lanes<T>(plan_, plan_.groups[g], tile, [&](const auto& lanes) {
        for (int slot = 0; slot < 2; ++slot)
          first[slot] = lanes.template gradient_rows<decltype(algebra), 0>(messages, slot).get(1);
      });
    });
  }

  // The gradient of a binary table, from that of entry 00 and of the sums of the first row and the first column.
  void write_binary(std::size_t g, Index f, T corner, T row, T column, const Rows<T>& out, Scratch<T>& scratch) const {
    const Group& group = plan_.groups[g];
    scratch.tick(group.table_size);
    T* to = out[plan_.copy_of(f)] + user_table(plan_, group, f);
    const Index* map = group.entry_maps[group.permutation[f]].data();
    const T entries[] = {corner, row - corner, column - corner, corner - row - column};
    for (int e = 0; e < 4; ++e) to[map[e]] = (group.shared[f] < 0 ? T(0) : to[map[e]]) + entries[e];
  }

  // A line has one entry of the tables of several neighbours: each of them asks for some of the lines.
  void fetch_gradient(const Group& group, Index f, Index entries, const Rows<T>& out) const {
    prefetch_some<1>(out[plan_.copy_of(f)] + user_table(plan_, group, f), group.table_size);
    const Index stride = group.table_stride[f];
    const T* from = buffers_.tables.get() + group.table[f];
    for (Index e = stride == 1 ? 0 : f % kLanes<T>; e < entries; e += kLanes<T>)
      __builtin_prefetch(from + e * stride, 0, 2);
  }

  void write_table(std::size_t g, Index f, const Rows<T>& out, Scratch<T>& scratch) const {
    const Group& group = plan_.groups[g];
    scratch.tick(group.table_size);
    T* to = out[plan_.copy_of(f)] + user_table(plan_, group, f);
    const Index stride = group.table_stride[f];
    const Index* map = group.entry_maps[group.permutation[f]].data();
    const T* from = buffers_.tables.get() + group.table[f];
    const T inverse = context_.inverse[g][f];
    if (keeps_sums(context_, item_, group, !buffers_.counting.empty()))  // tied
      return write_binary(g, f, from[0] * inverse, from[stride] * inverse, from[2 * stride] * inverse, out, scratch);
    if (group.shared[f] >= 0)
      for (Index e = 0; e < group.table_size; ++e) to[map[e]] += from[e * stride] * inverse;
    else
      for (Index e = 0; e < group.table_size; ++e) to[map[e]] = from[e * stride] * inverse;
  }

  static constexpr Index kAhead = 2;  // tiles

  const Context<T>& context_;
  const Plan& plan_;
  const Item<T>& item_;
  GradientBuffers<T>& buffers_;
  const Workers<T>& workers_;
  const int thread_, team_;
  BackwardSweeps<T> sweeps_;
  std::vector<bool> has_loss_;  // group: whether any of its marginals has a gradient
  Buffer<T> rates_;             // of the sweeps whose gradients of tables are outstanding
};

}  // namespace riskfield::RISKFIELD_ISA
