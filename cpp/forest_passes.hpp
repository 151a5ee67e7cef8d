// The passes of exact inference on a forest for one vector of items. The formulas are in forest.hpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "buffer.hpp"
#include "forest.hpp"
#include "forest_kernels.hpp"
#include "interrupt.hpp"

namespace riskfield::RISKFIELD_ISA {

// Storage for `size` numbers.
template <class Number>
class Numbered {
 public:
  explicit Numbered(Index size)
      : data_(static_cast<Number*>(take(static_cast<std::size_t>(size + 1) * sizeof(Number)))) {}
  Numbered(const Numbered&) = delete;
  Numbered& operator=(const Numbered&) = delete;
  Numbered(Numbered&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
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
        u(gradients ? plan.node_size : 0),
        v(gradients ? plan.node_size : 0),
        r(gradients ? plan.message_size : 0),
        cavities(gradients ? plan.message_size : 0),
        tangents(gradients ? plan.message_size : 0) {}
  Numbered<Number> rows, columns, joint, table;
  Numbered<Number> u, v, r, cavities, tangents;  // for derivatives; `tangents` are those of cavities
  Ticker tick;
};

// The rows of a matrix that belong to the lanes of a block; null for lanes without an item.
template <class T, int Width>
struct LaneRows {
  T* row[Width];
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

  // `least` is the smallest number that may occur besides 0. Shared tables stay the caller's.
  ForestPasses(const ForestPlan& plan, double least, const Entry* tables, const double* shifts)
      : plan_(plan),
        least_(least),
        shared_(tables),
        shared_shifts_(shifts),
        psi_(plan.node_size),
        belief_(plan.node_size),
        m_(plan.message_size),
        tables_(kShared ? 0 : plan.table_size) {}

  double log_partition(int lane) const { return Numbers::lane(log_z_, lane); }
  // Whether an item has numbers too small to compute with.
  bool saturated(int lane) const { return Numbers::lane(tiny_, lane) > 0; }

  template <class T>
  void up(const Rows<const T>& theta, Scratch& scratch) {
    log_z_ = Reals{};
    tiny_ = Reals{};
    Reals* values = reinterpret_cast<Reals*>(scratch.rows.get());
    Numbered<Reals> shifts(kShared ? 0 : static_cast<Index>(plan_.tables.size()));
    if constexpr (!kShared)
      for (std::size_t t = 0; t < plan_.tables.size(); ++t) {
        const ForestPlan::Table& table = plan_.tables[t];
        scratch.tick(table.size());
        shifts.get()[t] = exponentials(theta, table.theta, entries(table), table.size(),
                                       reinterpret_cast<Reals*>(scratch.table.get()), tables_.get() + table.place);
      }
    for (Index i = static_cast<Index>(plan_.variables.size()) - 1; i >= 0; --i) {
      const ForestPlan::Variable& variable = plan_.variables[i];
      Number* psi = psi_.get() + variable.place;
      log_z_ += exponentials(theta, variable.start, nullptr, variable.states, values, psi);
      for (int f = variable.factors_begin; f < variable.factors_end; ++f) {
        const ForestPlan::Factor& factor = plan_.factors[f];
        const ForestPlan::Table& table = plan_.tables[factor.table];
        scratch.tick(table.size());
        Number* m = m_.get() + factor.place;
        contract<Numbers>(this->table(factor), table.columns, 1, weights(factor, scratch.columns.get()), table.columns,
                          m, table.rows);
        Number scale = Numbers::zero();
        for (int x = 0; x < variable.states; ++x) {
          psi[x] = Numbers::canonical(psi[x] * m[x]);
          scale = Numbers::larger(scale, psi[x]);
        }
        const Number inverse = Numbers::ratio(Numbers::one(), scale);
        for (int x = 0; x < variable.states; ++x) {
          psi[x] = Numbers::canonical(psi[x] * inverse);
          tiny_ = Numbers::tiny(psi[x], least_, tiny_);
        }
        log_z_ += Numbers::log(scale);
        if constexpr (kShared)
          log_z_ += shared_shifts_[factor.table];
        else
          log_z_ += shifts.get()[factor.table];
      }
      if (variable.root) {
        Number total = Numbers::zero();
        for (int x = 0; x < variable.states; ++x) total += psi[x];
        total = Numbers::canonical(total);
        log_z_ += Numbers::log(total);
        const Number inverse = Numbers::ratio(Numbers::one(), total);
        for (int x = 0; x < variable.states; ++x)
          belief_.get()[variable.place + x] = Numbers::canonical(psi[x] * inverse);
      }
    }
  }

  void down(Scratch& scratch) {
    if (went_down_) return;
    for (const ForestPlan::Factor& factor : plan_.factors) {
      const ForestPlan::Table& table = plan_.tables[factor.table];
      scratch.tick(table.size());
      if (factor.arity == 1) continue;
      const Number* a = cavity(factor, scratch.rows.get());
      Number* q = scratch.joint.get();
      contract<Numbers>(this->table(factor), 1, table.columns, a, table.rows, q, table.columns);
      const Number* w = weights(factor, scratch.columns.get());
      for (Index y = 0; y < table.columns; ++y) q[y] = Numbers::canonical(q[y] * w[y]);
      for (int k = 0; k < factor.arity - 1; ++k) {
        const ForestPlan::Variable& child = variable(factor, k);
        Number* belief = belief_.get() + child.place;
        marginal_of_child(factor, k, q, belief);
        // They sum to 1 but for rounding, which must not add up along a path.
        Number total = Numbers::zero();
        for (int x = 0; x < child.states; ++x) total += belief[x];
        const Number inverse = Numbers::ratio(Numbers::one(), Numbers::canonical(total));
        for (int x = 0; x < child.states; ++x) belief[x] = Numbers::canonical(belief[x] * inverse);
      }
    }
    went_down_ = true;
  }

 protected:
  const Entry* table(const ForestPlan::Table& table) const {
    if constexpr (kShared)
      return shared_ + table.place;
    else
      return tables_.get() + table.place;
  }
  const Entry* table(const ForestPlan::Factor& factor) const { return table(plan_.tables[factor.table]); }
  const Index* entries(const ForestPlan::Table& table) const { return plan_.entry_maps[table.entries].data(); }
  const ForestPlan::Variable& variable(const ForestPlan::Factor& factor, int child) const {
    return plan_.variables[plan_.children[factor.children + child]];
  }
  static Number* clear(Number* sum, Index size) {
    std::fill(sum, sum + size, Numbers::zero());
    return sum;
  }

  template <class T>
  static RF_INLINE Reals gather(const Rows<const T>& rows, Index at) {
    double lanes[kWidth];
    for (int l = 0; l < kWidth; ++l) lanes[l] = rows.row[l][at];
    return Numbers::load(lanes);
  }
  template <class T>
  static RF_INLINE void scatter(const Rows<T>& rows, Index at, Reals values, bool add = false) {
    double lanes[kWidth];
    Numbers::store(lanes, values);
    for (int l = 0; l < kWidth; ++l)
      if (rows.row[l]) rows.row[l][at] = static_cast<T>(add ? rows.row[l][at] + lanes[l] : lanes[l]);
  }

  // out = exp(theta - shift) for `count` entries from `start`, in the order of `map`; returns the shift, their maximum.
  template <class T>
  Reals exponentials(const Rows<const T>& theta, Index start, const Index* map, Index count, Reals* values,
                     Number* out) {
    Reals top = gather(theta, start + (map ? map[0] : 0));
    values[0] = top;
    for (Index e = 1; e < count; ++e) {
      values[e] = gather(theta, start + (map ? map[e] : e));
      top = Numbers::larger_real(top, values[e]);
    }
    top = Numbers::finite_or_zero(top);
    const double lowest = std::log(least_);
    for (Index e = 0; e < count; ++e) {
      const Reals d = values[e] - top;
      if constexpr (Numbers::kLimited) tiny_ = Numbers::below(d, lowest, tiny_);
      out[e] = Numbers::exp(d);
    }
    return top;
  }

  // b_p / m_c.
  Number* cavity(const ForestPlan::Factor& factor, Number* out) const {
    const ForestPlan::Variable& parent = plan_.variables[factor.parent];
    const Number *belief = belief_.get() + parent.place, *m = m_.get() + factor.place;
    for (int x = 0; x < parent.states; ++x) out[x] = Numbers::ratio(belief[x], m[x]);
    return out;
  }

  // w_c, or the same without one of the children; in `out` unless it is at hand.
  const Number* weights(const ForestPlan::Factor& factor, Number* out, int without = -1) const {
    if (factor.arity == 2 && without < 0) return psi_.get() + variable(factor, 0).place;
    out[0] = Numbers::one();
    Index size = 1;
    for (int k = 0; k < factor.arity - 1; ++k) {
      const ForestPlan::Variable& child = variable(factor, k);
      const Number* psi = psi_.get() + child.place;
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
  const double least_;
  const Entry* const shared_;
  const double* const shared_shifts_;
  const Numbered<Number> psi_, belief_, m_;
  const Numbered<Entry> tables_;
  Reals log_z_, tiny_;
  bool went_down_ = false;
};

}  // namespace riskfield::RISKFIELD_ISA
