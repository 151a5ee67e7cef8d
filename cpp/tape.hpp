// What sweeps overwrite, written down on the way forward and put back on the way back.
#pragma once

#include "reverse.hpp"

namespace riskfield::RISKFIELD_ISA {

// Reads or writes one sweep's entries in order; the same calls in the opposite order read them back.
template <class T>
class Tape {
 public:
  Tape(const Context<T>& context, Item<T>& item) : context_(context), plan_(*context.plan), item_(item) {}

  void begin_sweep() {
    item_.tape.emplace_back();
    item_.tape.back().allocate(sweep_size());
    at_ = item_.tape.back().get();
  }
  void open_end(std::size_t sweep) { at_ = item_.tape[sweep].get() + item_.tape[sweep].size(); }

  void save_messages(const TileRange& range, const T* messages) {
    const Group& group = plan_.groups[range.group];
    for (Index t = range.begin; t < range.end; ++t)
      with_lanes<T>(plan_, group, plan_.factor_tiles[t], [&](const auto& lanes) {
        for (int x = first_state(range); x < group.dims[range.slot]; ++x, at_ += kLanes<T>)
          store<T>(at_, lanes.message(messages, range.slot, x));
      });
  }
  void restore_messages(const TileRange& range, T* messages) {
    const Group& group = plan_.groups[range.group];
    for (Index t = range.end - 1; t >= range.begin; --t)
      with_lanes<T>(plan_, group, plan_.factor_tiles[t], [&](const auto& lanes) {
        for (int x = group.dims[range.slot] - 1; x >= first_state(range); --x)
          lanes.set_message(messages, range.slot, x, load<T>(at_ -= kLanes<T>));
      });
  }
  void save_beliefs(Index begin, Index end) {
    for (Index t = begin; t < end; ++t) {
      const NodeTile& tile = plan_.node_tiles[t];
      for (int x = 0; x < tile.states; ++x, at_ += kLanes<T>)
        store<T>(at_, load<T>(item_.beliefs.get() + tile.address + Index(x) * tile.stride));
    }
  }
  void restore_beliefs(Index begin, Index end) {
    for (Index t = end - 1; t >= begin; --t) {
      const NodeTile& tile = plan_.node_tiles[t];
      for (int x = tile.states - 1; x >= 0; --x)
        store_some<T>(item_.beliefs.get() + tile.address + Index(x) * tile.stride, load<T>(at_ -= kLanes<T>), tile.count);
    }
  }

 private:
  // Probabilities keep nothing for state 0 of a binary variable.
  int first_state(const TileRange& range) const {
    const bool probabilities = context_.kind == Kind::kSumProduct && !item_.log_domain;
    return probabilities && plan_.groups[range.group].dims[range.slot] == 2 ? 1 : 0;
  }
  Index sweep_size() const {
    Index vectors = 0;
    if (context_.kind == Kind::kMeanField) {
      for (const NodeTile& tile : plan_.node_tiles) vectors += tile.states;
    } else {
      for (const TileRange& range : plan_.ranges)
        vectors += (range.end - range.begin) * (plan_.groups[range.group].dims[range.slot] - first_state(range));
    }
    return vectors * kLanes<T>;
  }

  const Context<T>& context_;
  const Plan& plan_;
  Item<T>& item_;
  T* at_ = nullptr;
};

// The gradient with respect to theta of grad_mu . mu, through all recorded sweeps. The item is left as it was found.
template <class T>
class Backward {
 public:
  Backward(const Context<T>& context, Item<T>& item, Scratch<T>& scratch)
      : context_(context), plan_(*context.plan), item_(item), scratch_(scratch) {}

  void run(const T* grad_mu, Gradients<T>& grad, T* grad_theta) {
    grad.clear();
    grad.current = 0;
    Buffer<T> final_state;
    save_state(final_state);
    from_marginals(grad_mu, grad);
    Tape<T> tape(context_, item_);
    for (std::size_t s = item_.tape.size(); s-- > 0;) {
      tape.open_end(s);
      reverse_sweep(tape, grad);
    }
    // The beliefs a run starts with are made of theta and the first messages; mean field's are given.
    if (context_.kind != Kind::kMeanField) reverse_nodes(0, static_cast<Index>(plan_.node_tiles.size()), grad);
    write(grad, grad_theta);
    restore_state(final_state);
  }

 private:
  bool mean_field() const { return context_.kind == Kind::kMeanField; }
  Buffer<T>& live() { return mean_field() ? item_.beliefs : item_.messages[item_.current]; }

  void save_state(Buffer<T>& copy) {
    copy.allocate(live().size());
    std::copy(live().get(), live().get() + live().size(), copy.get());
  }
  void restore_state(const Buffer<T>& copy) {
    std::copy(copy.get(), copy.get() + copy.size(), live().get());
    if (!mean_field())
      update_nodes(context_, item_, Index(0), static_cast<Index>(plan_.node_tiles.size()), live().get(), scratch_);
  }

  void from_marginals(const T* grad_mu, Gradients<T>& grad) {
    for (Index p = 0; p < plan_.num_variables; ++p) {
      const T* from = grad_mu + plan_.node_start[plan_.variable[p]];
      for (int x = 0; x < plan_.states[p]; ++x) {
        const Index at = plan_.node_address[p] + Index(x) * plan_.node_stride[p];
        const T b = item_.beliefs.get()[at];
        grad.beliefs.get()[at] += from[x] * (item_.log_domain ? std::exp(b) : b);
      }
    }
    for (int g = 0; g < static_cast<int>(plan_.groups.size()); ++g)
      with_algebra(context_, item_, g, [&](auto algebra) {
        for (const FactorTile& tile : plan_.groups[g].all_tiles)
          with_lanes<T>(plan_, plan_.groups[g], tile, [&](const auto& lanes) {
            reverse_marginals<decltype(algebra), T>(context_, item_, g, lanes, tile.count, grad_mu, grad, scratch_);
          });
      });
  }

  void reverse_sweep(Tape<T>& tape, Gradients<T>& grad) {
    const bool at_once = plan_.sweep == Sweep::kAllAtOnce;
    for (Index s = plan_.num_stages() - 1; s >= 0; --s) {
      const Part* parts = &plan_.stages[s * plan_.parts];
      const int first = parts[0].ranges_begin, last = parts[plan_.parts - 1].ranges_end;
      const Index nodes_begin = parts[0].nodes_begin, nodes_end = parts[plan_.parts - 1].nodes_end;
      reverse_nodes(nodes_begin, nodes_end, grad);
      if (mean_field()) {
        tape.restore_beliefs(nodes_begin, nodes_end);
      } else {
        for (int r = last - 1; r >= first; --r) tape.restore_messages(plan_.ranges[r], live().get());
        update_nodes(context_, item_, nodes_begin, nodes_end, live().get(), scratch_);
      }
      T* from = grad.messages[grad.current].get();
      T* to = grad.messages[at_once ? 1 - grad.current : grad.current].get();
      for (int r = last - 1; r >= first; --r) reverse_range(plan_.ranges[r], from, to, grad);
      if (at_once) grad.current = 1 - grad.current;
    }
  }

  void reverse_range(const TileRange& range, T* from, T* to, Gradients<T>& grad) {
    const Group& group = plan_.groups[range.group];
    with_algebra(context_, item_, range.group, [&](auto algebra) {
      using Algebra = decltype(algebra);
      with_states<!IsLogarithm<Algebra>::value>(square_states(group), [&](auto states) {
        for (Index t = range.begin; t < range.end; ++t)
          with_lanes<T>(plan_, group, plan_.factor_tiles[t], [&](const auto& lanes) {
            reverse_message<Algebra, T, decltype(states)::value>(context_, item_, range.group, range.slot, lanes, from,
                                                                 to, grad, scratch_);
          });
      });
    });
  }

  void reverse_nodes(Index begin, Index end, Gradients<T>& grad) {
    with_node_algebra(context_, item_, [&](auto algebra) {
      for (Index t = begin; t < end; ++t)
        reverse_belief<decltype(algebra), T>(context_, item_, plan_.node_tiles[t], grad,
                                             grad.messages[grad.current].get(), scratch_);
    });
  }

  // Into the caller's layout, where several factors may add to one table.
  void write(const Gradients<T>& grad, T* out) const {
    for (Index p = 0; p < plan_.num_variables; ++p)
      for (int x = 0; x < plan_.states[p]; ++x)
        out[plan_.node_start[plan_.variable[p]] + x] +=
            grad.node_theta.get()[plan_.node_address[p] + Index(x) * plan_.node_stride[p]];
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      const Group& group = plan_.groups[g];
      for (Index f = 0; f < group.count; ++f)
        if (group.shared[f] < 0) write_table(grad, g, f, group.table_stride[f], out);
    }
    for (const SharedTable& shared : plan_.shared_tables) write_table(grad, shared.group, shared.factor, 1, out);
  }
  void write_table(const Gradients<T>& grad, std::size_t g, Index f, Index stride, T* out) const {
    const Group& group = plan_.groups[g];
    T* to = out + (user_table(plan_, group, f, static_cast<const T*>(out)) - out);
    const Index* map = group.entry_maps[group.permutation[f]].data();
    for (Index e = 0; e < group.table_size; ++e)
      to[map[e]] += grad.tables.get()[group.table[f] + e * stride] * context_.inverse[g][f];
  }

  const Context<T>& context_;
  const Plan& plan_;
  Item<T>& item_;
  Scratch<T>& scratch_;
};

}  // namespace riskfield::RISKFIELD_ISA
