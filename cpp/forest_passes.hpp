// The passes of exact inference on a forest for one vector of items. The formulas are in forest.hpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "buffer.hpp"
#include "forest.hpp"
#include "forest_kernels.hpp"
#include "interrupt.hpp"

namespace riskfield::RISKFIELD_ISA {

// Storage for `size` numbers. One vector past its end may be read.
template <class Number>
class Numbered {
 public:
  explicit Numbered(Index size)
      : data_(static_cast<Number*>(take(static_cast<std::size_t>(size) * sizeof(Number) + kVectorBytes))) {}
  Numbered(const Numbered&) = delete;
  Numbered& operator=(const Numbered&) = delete;
  Numbered(Numbered&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
  Numbered& operator=(Numbered&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~Numbered() { give_back(data_); }
  Number* get() const { return data_; }

 private:
  Number* data_;
};

constexpr int kPairs = 8;  // vectors whose outer products are added up at once

// What one thread needs for any block.
template <class Number>
struct ForestScratch {
  explicit ForestScratch(const ForestPlan& plan, bool gradients = false)
      : rows(2 * kPairs * plan.most_states),
        columns(2 * kPairs * plan.most_columns),
        joint(2 * plan.most_columns),
        table(2 * plan.largest_table),
        memory(gradients ? 3 * plan.node_size + plan.message_size : plan.node_size),
        nodes(memory.get()),
        psi_slope(nodes + plan.node_size),
        q_slope(psi_slope + plan.node_size),
        cavity_slope(q_slope + plan.node_size) {}
  Numbered<Number> rows, columns, joint, table;
  Numbered<Number> memory;  // taken at once, since `take` keeps large pieces
  Number* const nodes;
  Number *const psi_slope, *const q_slope, *const cavity_slope;  // for derivatives
  Ticker tick;
};

template <class Numbers, class Entry>
class ForestPasses {
 public:
  using Number = typename Numbers::Number;
  using Reals = typename Numbers::Reals;
  static constexpr int kWidth = Numbers::kWidth;
  static constexpr bool kShared = !std::is_same<Entry, Number>::value;  // whether all items have the same tables
  using Scratch = ForestScratch<Number>;
  template <class T>
  using Rows = LaneRows<T, kWidth>;

  // How many numbers a block keeps. A single item has no lanes to fill, so its products run along rows, for which it
  // keeps every table a second time, transposed.
  static Index memory_size(const ForestPlan& plan) {
    return 2 * plan.node_size + plan.message_size + (kShared ? 0 : kWidth == 1 ? 2 : 1) * plan.table_size;
  }

  // `least` is the smallest number that may occur besides 0. The memory and shared tables stay the caller's.
  ForestPasses(const ForestPlan& plan, double least, const Entry* tables, const double* shifts, Number* memory)
      : plan_(plan),
        least_(least),
        lowest_(std::log(least)),
        shared_(tables),
        shared_shifts_(shifts),
        psi_(memory),
        q_(psi_ + plan.node_size),
        e_(q_ + plan.node_size),
        tables_(e_ + plan.message_size) {}

  double log_partition(int lane) const { return Numbers::lane(log_z_, lane); }
  // Whether an item has numbers too small to compute with.
  bool saturated(int lane) const { return Numbers::lane(tiny_, lane) > 0; }

  template <class T>
  void up(const Rows<const T>& theta, Scratch& scratch) {
    log_z_ = Reals{};
    tiny_ = Reals{};
    Reals tiny{};  // in a register
    Numbered<Reals> shifts(kShared ? 0 : static_cast<Index>(plan_.tables.size()));
    if constexpr (!kShared) exponentials_of_tables(theta, shifts.get(), scratch);
    exponentials_of_nodes(theta, scratch);
    Number* m = scratch.rows.get();
    const double least = least_;
    for (Index i = static_cast<Index>(plan_.variables.size()) - 1; i >= 0; --i) {
      const ForestPlan::Variable& variable = plan_.variables[i];
      const bool alone = is_alone(variable);
      Number* psi = psi_ + variable.start;
      for (int f = variable.factors_begin; f < variable.factors_end; ++f) {
        const ForestPlan::Factor& factor = plan_.factors[f];
        scratch.tick(plan_.tables[factor.table].size());
        multiply_up(factor, weights(factor, scratch.columns.get()), m);
        Number* e = e_ + factor.place;
        Number scale = Numbers::zero();
        for (int x = 0; x < variable.states; ++x) {
          e[x] = alone ? Numbers::unless_zero(m[x], psi[x]) : m[x];
          psi[x] = Numbers::canonical(psi[x] * m[x]);
          scale = Numbers::larger(scale, psi[x]);
        }
        const Number inverse = Numbers::ratio(Numbers::one(), scale);
        for (int x = 0; x < variable.states; ++x) {
          psi[x] = Numbers::canonical(psi[x] * inverse);
          tiny = Numbers::tiny(psi[x], least, tiny);
          if (alone) e[x] = Numbers::canonical(e[x] * inverse);
        }
        log_z_ += Numbers::log(scale);
        if constexpr (kShared)
          log_z_ += shared_shifts_[factor.table];
        else
          log_z_ += shifts.get()[factor.table];
      }
      if (!alone)
        for (int f = variable.factors_begin; f < variable.factors_end; ++f) {
          Number* e = e_ + plan_.factors[f].place;
          for (int x = 0; x < variable.states; ++x) e[x] = Numbers::ratio(psi[x], e[x]);
        }
      if (variable.root) {
        Number total = Numbers::zero();
        for (int x = 0; x < variable.states; ++x) total += psi[x];
        total = Numbers::canonical(total);
        log_z_ += Numbers::log(total);
        std::fill(q_ + variable.start, q_ + variable.start + variable.states, Numbers::ratio(Numbers::one(), total));
      }
    }
    tiny_ += tiny;
  }

  void down(Scratch& scratch) {
    if (went_down_) return;
    for (const ForestPlan::Factor& factor : plan_.factors) {
      const ForestPlan::Table& table = plan_.tables[factor.table];
      scratch.tick(table.size());
      if (factor.arity == 1) continue;
      Number* joint = scratch.joint.get();
      multiply_down(factor, cavity(factor, scratch.rows.get()), joint);
      const Number* w = weights(factor, scratch.columns.get());
      if (factor.arity == 2) {
        Number* q = q_ + variable(factor, 0).start;
        normalise(joint, w, table.columns, q);
        continue;
      }
      for (Index y = 0; y < table.columns; ++y) joint[y] = Numbers::canonical(joint[y] * w[y]);
      for (int k = 0; k < factor.arity - 1; ++k) {
        const ForestPlan::Variable& child = variable(factor, k);
        Number *q = q_ + child.start, *psi = psi_ + child.start;
        marginal_of_child(factor, k, joint, q);
        for (int x = 0; x < child.states; ++x) q[x] = Numbers::ratio(q[x], psi[x]);
        normalise(q, psi, child.states, q);
      }
    }
    went_down_ = true;
  }

 protected:
  const Entry* table(const ForestPlan::Table& table) const {
    if constexpr (kShared)
      return shared_ + table.place;
    else
      return tables_ + table.place;
  }
  const Entry* table(const ForestPlan::Factor& factor) const { return table(plan_.tables[factor.table]); }
  const Index* entries(const ForestPlan::Table& table) const { return plan_.entry_maps[table.entries].data(); }
  const ForestPlan::Variable& variable(const ForestPlan::Factor& factor, int child) const {
    return plan_.variables[plan_.children[factor.children + child]];
  }
  // Whether it is the parent of one factor only.
  static bool is_alone(const ForestPlan::Variable& variable) {
    return variable.factors_end - variable.factors_begin == 1;
  }
  static Number* clear(Number* sum, Index size) {
    std::fill(sum, sum + size, Numbers::zero());
    return sum;
  }

  // out(x) = sum_y T(x, y) in(y).
  void multiply_up(const ForestPlan::Factor& factor, const Number* in, Number* out) const {
    const ForestPlan::Table& table = plan_.tables[factor.table];
    if (kWidth == 1 && table.factors > 1)
      contract<Numbers>(tables_ + plan_.table_size + table.place, 1, table.rows, in, table.columns, out, table.rows);
    else
      contract<Numbers>(this->table(table), table.columns, 1, in, table.columns, out, table.rows);
  }
  // out(y) = sum_x T(x, y) in(x).
  void multiply_down(const ForestPlan::Factor& factor, const Number* in, Number* out) const {
    const ForestPlan::Table& table = plan_.tables[factor.table];
    contract<Numbers>(this->table(table), 1, table.columns, in, table.rows, out, table.columns);
  }

  // out = in / sum of in w. The sum is 1 but for rounding, which must not add up along a path.
  static void normalise(const Number* in, const Number* w, Index size, Number* out) {
    const Number inverse = Numbers::ratio(Numbers::one(), dot<Numbers>(in, w, size));
    for (Index x = 0; x < size; ++x) out[x] = Numbers::canonical(in[x] * inverse);
  }

  // values -= their maximum, which is returned.
  Reals shift(Reals* values, Index count) {
    Reals top = values[0];
    for (Index k = 1; k < count; ++k) top = Numbers::larger_real(top, values[k]);
    top = Numbers::finite_or_zero(top);
    Reals tiny{};
    const double lowest = lowest_;
    for (Index k = 0; k < count; ++k) {
      values[k] -= top;
      if constexpr (Numbers::kLimited) tiny = Numbers::below(values[k], lowest, tiny);
    }
    tiny_ += tiny;
    return top;
  }
  template <class T>
  void exponentials_of_nodes(const Rows<const T>& theta, Scratch& scratch) {
    Reals* values = reinterpret_cast<Reals*>(scratch.nodes);
    read_rows<Numbers>(theta, 0, plan_.node_size, [&](Index k, Reals value) RF_LAMBDA { values[k] = value; });
    for (const ForestPlan::Variable& variable : plan_.variables)
      log_z_ += shift(values + variable.start, variable.states);
    Numbers::exp(values, plan_.node_size, psi_);
  }
  template <class T>
  void exponentials_of_tables(const Rows<const T>& theta, Reals* shifts, Scratch& scratch) {
    Reals* values = reinterpret_cast<Reals*>(scratch.table.get());
    for (std::size_t t = 0; t < plan_.tables.size(); ++t) {
      const ForestPlan::Table& table = plan_.tables[t];
      scratch.tick(table.size());
      const Index* map = entries(table);
      for (Index k = 0; k < table.size(); ++k) values[k] = gather<Numbers>(theta, table.theta + map[k]);
      shifts[t] = shift(values, table.size());
      Number* out = tables_ + table.place;
      Numbers::exp(values, table.size(), out);
      if (kWidth == 1 && table.factors > 1)
        for (int x = 0; x < table.rows; ++x)
          for (Index y = 0; y < table.columns; ++y)
            out[plan_.table_size + y * table.rows + x] = out[x * table.columns + y];
    }
  }

  // a_c = q_p e_c.
  Number* cavity(const ForestPlan::Factor& factor, Number* out) const {
    const ForestPlan::Variable& parent = plan_.variables[factor.parent];
    const Number *q = q_ + parent.start, *e = e_ + factor.place;
    for (int x = 0; x < parent.states; ++x) out[x] = Numbers::canonical(q[x] * e[x]);
    return out;
  }

  // w_c, or the same without one of the children; in `out` unless it is at hand.
  const Number* weights(const ForestPlan::Factor& factor, Number* out, int without = -1) const {
    if (factor.arity == 2 && without < 0) return psi_ + variable(factor, 0).start;
    out[0] = Numbers::one();
    Index size = 1;
    for (int k = 0; k < factor.arity - 1; ++k) {
      const ForestPlan::Variable& child = variable(factor, k);
      const Number* psi = psi_ + child.start;
      for (Index a = size - 1; a >= 0; --a) {
        const Number before = out[a];
        for (int y = child.states - 1; y >= 0; --y)
          out[a * child.states + y] = k == without ? before : Numbers::canonical(before * psi[y]);
      }
      size *= child.states;
    }
    return out;
  }

  // Calls body(y, child's state) for all joint states of the children.
  template <class Body>
  RF_INLINE void for_each_state(const ForestPlan::Factor& factor, int child, Body body) const {
    const int n = variable(factor, child).states;
    Index after = 1;
    for (int k = child + 1; k < factor.arity - 1; ++k) after *= variable(factor, k).states;
    const Index columns = plan_.tables[factor.table].columns;
    for (Index first = 0; first < columns; first += n * after)
      for (int x = 0; x < n; ++x)
        for (Index b = 0; b < after; ++b) body(first + x * after + b, x);
  }

  void marginal_of_child(const ForestPlan::Factor& factor, int child, const Number* joint, Number* out) const {
    const int n = variable(factor, child).states;
    if (factor.arity == 2) {
      std::copy(joint, joint + n, out);
      return;
    }
    for (int x = 0; x < n; ++x) out[x] = Numbers::zero();
    for_each_state(factor, child, [&](Index y, int x) { out[x] += joint[y]; });
    for (int x = 0; x < n; ++x) out[x] = Numbers::canonical(out[x]);
  }

  const ForestPlan& plan_;
  const double least_, lowest_;  // the latter is its logarithm
  const Entry* const shared_;
  const double* const shared_shifts_;
  Number *const psi_, *const q_, *const e_, *const tables_;
  Reals log_z_, tiny_;
  bool went_down_ = false;
};

}  // namespace riskfield::RISKFIELD_ISA
