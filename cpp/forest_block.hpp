// The results of exact inference on a forest for one vector of items, and their derivatives.
//
// Derivatives along a direction g of all log-potentials, untied, are
//
//     d psi_i = psi_i g_i + sum of e_c dm_c over the factors c whose parent is i,    dm_c = sum_y T (dw_c + g_c w_c)
//     d a_c   = e_c (dq_p + q_p s_c),    d b_i = psi_i dq_i + q_i d psi_i,    d mu_c = T (da_c w_c + a_c (dw_c + g_c
//     w_c))
//
// where s_c is the derivative of log psi_p - log m_c: g_p if p is the parent of c only. In a factor of two variables
// dq_j = sum_x T (da_c + g_c a_c). A multiple of psi_i added to d psi_i cancels; it is chosen such that q_i is
// orthogonal to d psi_i.
#pragma once

#include "forest_passes.hpp"

namespace riskfield::RISKFIELD_ISA {

template <class Numbers, class Entry>
class ForestBlock : public ForestPasses<Numbers, Entry> {
  using Base = ForestPasses<Numbers, Entry>;

 public:
  using typename Base::Number;
  using typename Base::Reals;
  using typename Base::Scratch;
  template <class T>
  using Rows = LaneRows<T, Numbers::kWidth>;
  using Base::Base;

  template <class T>
  void write_nodes(const Rows<T>& out) const {
    write_rows<Numbers>(out, 0, plan_.node_size, [&](Index k) RF_LAMBDA { return Numbers::to_real(q_[k] * psi_[k]); });
  }

  template <class T>
  void write_factors(const Rows<T>& out, Scratch& scratch) const {
    for (const ForestPlan::Factor& factor : plan_.factors) write_product(factor, factor.mu, out, scratch);
  }

  // The expected statistics of all tables.
  template <class T>
  void write_tables(const Rows<T>& out, Scratch& scratch) const {
    for_each_table([&](const ForestPlan::Table& table, const Index* members) {
      if (table.factors == 1 && !table.adds) {
        write_product(plan_.factors[*members], table.theta, out, scratch);
        return;
      }
      Number* sum = clear(scratch.table.get(), table.size());
      add_pairs(table, members, sum, scratch, [&](const ForestPlan::Factor& factor, int slot, Pairs& pairs) {
        pairs.add(cavity(factor, scratch.rows.get() + slot * plan_.most_states),
                  weights(factor, scratch.columns.get() + slot * plan_.most_columns));
      });
      write_sum(table, sum, out);
    });
  }

  template <class T>
  void write_messages(const Rows<T>& out, Scratch& scratch) const {
    for (const ForestPlan::Factor& factor : plan_.factors) {
      const ForestPlan::Table& table = plan_.tables[factor.table];
      scratch.tick(table.size());
      const Index* starts = &plan_.message_starts[factor.messages];
      multiply_up(factor, weights(factor, scratch.columns.get()), scratch.rows.get());
      write_message(scratch.rows.get(), table.rows, starts[0], out);
      if (factor.arity == 1) continue;
      Number* q = scratch.joint.get();
      multiply_down(factor, cavity(factor, scratch.rows.get()), q);
      for (int k = 0; k < factor.arity - 1; ++k) {
        Number* weighted = q + plan_.most_columns;
        const Number* w = weights(factor, scratch.columns.get(), k);
        for (Index y = 0; y < table.columns; ++y)
          weighted[y] = factor.arity == 2 ? q[y] : Numbers::canonical(q[y] * w[y]);
        marginal_of_child(factor, k, weighted, scratch.rows.get());
        write_message(scratch.rows.get(), variable(factor, k).states, starts[k + 1], out);
      }
    }
  }

  // The derivative of the expected statistics along `g`, whose rows hold marginals of variables, or all marginals.
  template <class T>
  void differentiate(const Rows<const T>& g, bool nodes_only, const Rows<T>& out, Scratch& scratch) const {
    slopes_up(g, nodes_only, scratch);
    slopes_down(g, nodes_only, scratch);
    const Number *psi_slope = scratch.psi_slope, *q_slope = scratch.q_slope;
    write_rows<Numbers>(out, 0, plan_.node_size, [&](Index k) RF_LAMBDA {
      return Numbers::to_real(psi_[k] * q_slope[k] + q_[k] * psi_slope[k]);
    });
    for_each_table([&](const ForestPlan::Table& table, const Index* members) {
      Number* sum = clear(scratch.table.get(), table.size());
      add_pairs(table, members, sum, scratch, [&](const ForestPlan::Factor& factor, int slot, Pairs& pairs) {
        const Number* a = cavity(factor, scratch.rows.get() + slot * plan_.most_states);
        Number* w = scratch.columns.get() + 2 * slot * plan_.most_columns;
        const Number* plain = weights(factor, w);
        if (!nodes_only) add_direction(factor, g, a, plain, sum);
        pairs.add(a, weights_slope(factor, psi_slope, w + plan_.most_columns));
        pairs.add(scratch.cavity_slope + factor.place, plain);
      });
      write_sum(table, sum, out);
    });
  }

 private:
  using Base::cavity;
  using Base::clear;
  using Base::e_;
  using Base::entries;
  using Base::for_each_state;
  using Base::is_alone;
  using Base::marginal_of_child;
  using Base::multiply_down;
  using Base::multiply_up;
  using Base::plan_;
  using Base::psi_;
  using Base::q_;
  using Base::table;
  using Base::variable;
  using Base::weights;

  // Vectors whose outer products are to be added.
  struct Pairs {
    const Number *rows[2 * kPairs], *columns[2 * kPairs];
    int count = 0;
    void add(const Number* a, const Number* b) {
      rows[count] = a;
      columns[count++] = b;
    }
  };

  // Calls body(table, its factors).
  template <class Body>
  void for_each_table(Body body) const {
    const Index* members = plan_.by_table.data();
    for (const ForestPlan::Table& table : plan_.tables) {
      body(table, members);
      members += table.factors;
    }
  }

  // Adds up the outer products that `collect` names for every factor of a table.
  template <class Collect>
  void add_pairs(const ForestPlan::Table& table, const Index* members, Number* sum, Scratch& scratch,
                 Collect collect) const {
    for (Index first = 0; first < table.factors; first += kPairs) {
      Pairs pairs;
      const Index last = std::min<Index>(first + kPairs, table.factors);
      for (Index k = first; k < last; ++k) collect(plan_.factors[members[k]], static_cast<int>(k - first), pairs);
      scratch.tick(pairs.count * table.size());
      add_outer<Numbers>(sum, table.rows, table.columns, pairs.rows, pairs.columns, pairs.count);
    }
  }

  // T times a sum, into a table of the caller.
  template <class T>
  void write_sum(const ForestPlan::Table& table, const Number* sum, const Rows<T>& out) const {
    const Index* map = entries(table);
    const Entry* from = this->table(table);
    if (!table.adds && table.theta_order)
      write_rows<Numbers>(out, table.theta, table.size(),
                          [&](Index k) RF_LAMBDA { return Numbers::to_real(sum[k] * from[k]); });
    else
      for (Index k = 0; k < table.size(); ++k)
        scatter<Numbers>(out, table.theta + map[k], Numbers::to_real(sum[k] * from[k]), table.adds);
  }
  // The marginals of a factor.
  template <class T>
  void write_product(const ForestPlan::Factor& factor, Index start, const Rows<T>& out, Scratch& scratch) const {
    const ForestPlan::Table& table = plan_.tables[factor.table];
    const Index* map = entries(table);
    const Entry* from = this->table(factor);
    const Number* a = cavity(factor, scratch.rows.get());
    const Number* w = weights(factor, scratch.columns.get());
    scratch.tick(table.size());
    for (int x = 0; x < table.rows; ++x)
      for (Index y = 0; y < table.columns; ++y, ++map, ++from)
        scatter<Numbers>(out, start + *map, Numbers::to_real(a[x] * w[y] * *from));
  }

  template <class T>
  void write_message(const Number* message, int states, Index start, const Rows<T>& out) const {
    Number total = Numbers::zero();
    for (int x = 0; x < states; ++x) total += message[x];
    const Reals shift = Numbers::finite_or_zero(Numbers::log(Numbers::canonical(total)));
    for (int x = 0; x < states; ++x) scatter<Numbers>(out, start + x, Numbers::log(message[x]) - shift);
  }

  // dw_c: the product rule; in `out` unless it is at hand.
  const Number* weights_slope(const ForestPlan::Factor& factor, const Number* psi_slope, Number* out) const {
    if (factor.arity == 2) return psi_slope + variable(factor, 0).start;
    const Index columns = plan_.tables[factor.table].columns;
    Numbered<Number> others(columns);
    clear(out, columns);
    for (int k = 0; k < factor.arity - 1; ++k) {
      const Number* of_child = psi_slope + variable(factor, k).start;
      const Number* w = weights(factor, others.get(), k);
      for_each_state(factor, k, [&](Index y, int x) { out[y] += of_child[x] * w[y]; });
    }
    for (Index y = 0; y < columns; ++y) out[y] = Numbers::canonical(out[y]);
    return out;
  }

  // sum += g_c a w, without the table.
  template <class T>
  void add_direction(const ForestPlan::Factor& factor, const Rows<const T>& g, const Number* a, const Number* w,
                     Number* sum) const {
    const ForestPlan::Table& table = plan_.tables[factor.table];
    const Index* map = entries(table);
    for (int x = 0; x < table.rows; ++x)
      for (Index y = 0; y < table.columns; ++y, ++map, ++sum)
        *sum = Numbers::canonical(*sum + Numbers::from_real(gather<Numbers>(g, factor.mu + *map)) * a[x] * w[y]);
  }

  // T g_c.
  template <class T>
  const Number* table_times_direction(const ForestPlan::Factor& factor, const Rows<const T>& g, Number* out) const {
    const ForestPlan::Table& table = plan_.tables[factor.table];
    const Index* map = entries(table);
    const Entry* from = this->table(factor);
    for (Index e = 0; e < table.size(); ++e)
      out[e] = Numbers::canonical(Numbers::from_real(gather<Numbers>(g, factor.mu + map[e])) * from[e]);
    return out;
  }

  template <class T>
  void slopes_up(const Rows<const T>& g, bool nodes_only, Scratch& scratch) const {
    Number *slopes = scratch.psi_slope, *directions = scratch.nodes;
    Number *m_slope = scratch.rows.get(), *other = m_slope + plan_.most_states;
    read_rows<Numbers>(g, 0, plan_.node_size,
                       [&](Index k, Reals value) RF_LAMBDA { directions[k] = Numbers::from_real(value); });
    for (Index i = static_cast<Index>(plan_.variables.size()) - 1; i >= 0; --i) {
      const ForestPlan::Variable& variable = plan_.variables[i];
      const Number *psi = psi_ + variable.start, *q = q_ + variable.start;
      Number *slope = slopes + variable.start, *direction = directions + variable.start;
      for (int x = 0; x < variable.states; ++x) slope[x] = Numbers::canonical(psi[x] * direction[x]);
      for (int f = variable.factors_begin; f < variable.factors_end; ++f) {
        const ForestPlan::Factor& factor = plan_.factors[f];
        const ForestPlan::Table& table = plan_.tables[factor.table];
        scratch.tick(table.size());
        multiply_up(factor, weights_slope(factor, slopes, scratch.columns.get()), m_slope);
        if (!nodes_only) {
          const Number* product = table_times_direction(factor, g, scratch.table.get());
          contract<Numbers>(product, table.columns, 1, weights(factor, scratch.columns.get()), table.columns, other,
                            table.rows);
          for (int x = 0; x < table.rows; ++x) m_slope[x] += other[x];
        }
        const Number* e = e_ + factor.place;
        Number* part = scratch.cavity_slope + factor.place;
        for (int x = 0; x < table.rows; ++x) {
          part[x] = Numbers::canonical(e[x] * m_slope[x]);
          slope[x] += part[x];
        }
      }
      const Number mean = dot<Numbers>(q, slope, variable.states);
      for (int x = 0; x < variable.states; ++x) slope[x] = Numbers::canonical(slope[x] - mean * psi[x]);
      for (int f = variable.factors_begin; f < variable.factors_end; ++f) {  // s_c
        Number* part = scratch.cavity_slope + plan_.factors[f].place;
        for (int x = 0; x < variable.states; ++x)
          part[x] = is_alone(variable) ? direction[x] - mean : Numbers::ratio(slope[x] - part[x], psi[x]);
      }
    }
  }

  template <class T>
  void slopes_down(const Rows<const T>& g, bool nodes_only, Scratch& scratch) const {
    const Number* psi_slope = scratch.psi_slope;
    Number *slopes = scratch.q_slope, *joint = scratch.joint.get(), *other = joint + plan_.most_columns;
    for (const ForestPlan::Variable& variable : plan_.variables)
      if (variable.root) clear(slopes + variable.start, variable.states);
    for (const ForestPlan::Factor& factor : plan_.factors) {
      const ForestPlan::Table& table = plan_.tables[factor.table];
      const ForestPlan::Variable& parent = plan_.variables[factor.parent];
      const Number *q = q_ + parent.start, *q_slope = slopes + parent.start, *e = e_ + factor.place;
      Number* slope = scratch.cavity_slope + factor.place;
      for (int x = 0; x < table.rows; ++x) slope[x] = Numbers::canonical(e[x] * (q_slope[x] + q[x] * slope[x]));
      if (factor.arity == 1) continue;
      scratch.tick(table.size());
      const Number* a = cavity(factor, scratch.rows.get());
      multiply_down(factor, slope, joint);
      if (!nodes_only) {
        const Number* product = table_times_direction(factor, g, scratch.table.get());
        contract<Numbers>(product, 1, table.columns, a, table.rows, other, table.columns);
        for (Index y = 0; y < table.columns; ++y) joint[y] = Numbers::canonical(joint[y] + other[y]);
      }
      if (factor.arity == 2) {
        std::copy(joint, joint + table.columns, slopes + variable(factor, 0).start);
        continue;
      }
      const Number* w = weights(factor, scratch.columns.get());
      const Number* w_slope = weights_slope(factor, psi_slope, scratch.columns.get() + plan_.most_columns);
      multiply_down(factor, a, other);
      for (Index y = 0; y < table.columns; ++y) joint[y] = Numbers::canonical(joint[y] * w[y] + other[y] * w_slope[y]);
      for (int k = 0; k < factor.arity - 1; ++k) {
        const ForestPlan::Variable& child = variable(factor, k);
        Number* out = slopes + child.start;
        marginal_of_child(factor, k, joint, out);  // db
        for (int x = 0; x < child.states; ++x)
          out[x] = Numbers::ratio(Numbers::canonical(out[x] - q_[child.start + x] * psi_slope[child.start + x]),
                                  psi_[child.start + x]);
      }
    }
  }
};

}  // namespace riskfield::RISKFIELD_ISA
