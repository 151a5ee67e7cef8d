// The results of exact inference on a forest for one vector of items, and their derivatives.
//
// Derivatives along a direction g of all log-potentials, untied, are passed as derivatives of logarithms:
//
//     u_i = d log psi_i = g_i + sum of r_c over the factors c whose parent is i,    r_c = d log m_c
//     v_i = d log b_i,    d mu_c = mu_c (g_c + v_p - r_c + sum of u_j over the children j)
//
// A constant added to u_i cancels; it is kept small by centring u_i on b_i.
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
    for (const ForestPlan::Variable& variable : plan_.variables)
      for (int x = 0; x < variable.states; ++x)
        scatter(out, variable.start + x, Numbers::to_real(belief_.get()[variable.place + x]));
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
      write_message(m_.get() + factor.place, table.rows, starts[0], out);
      if (factor.arity == 1) continue;
      Number* q = scratch.joint.get();
      contract<Numbers>(this->table(factor), 1, table.columns, cavity(factor, scratch.rows.get()), table.rows, q,
                        table.columns);
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
    tangents_up(g, nodes_only, scratch);
    tangents_down(g, nodes_only, scratch);
    for (const ForestPlan::Variable& variable : plan_.variables)
      for (int x = 0; x < variable.states; ++x)
        scatter(out, variable.start + x,
                Numbers::to_real(belief_.get()[variable.place + x] * scratch.v.get()[variable.place + x]));
    for_each_table([&](const ForestPlan::Table& table, const Index* members) {
      Number* sum = clear(scratch.table.get(), table.size());
      add_pairs(table, members, sum, scratch, [&](const ForestPlan::Factor& factor, int slot, Pairs& pairs) {
        const Number* a = scratch.cavities.get() + factor.place;
        Number* w = scratch.columns.get() + 2 * slot * plan_.most_columns;
        const Number* plain = weights(factor, w);
        if (!nodes_only) add_direction(factor, g, a, plain, sum);
        pairs.add(a, weights_times_tangent(factor, plain, scratch.u.get(), w + plan_.most_columns));
        pairs.add(scratch.tangents.get() + factor.place, plain);
      });
      write_sum(table, sum, out);
    });
  }

 private:
  using Base::belief_;
  using Base::cavity;
  using Base::clear;
  using Base::entries;
  using Base::for_each_state;
  using Base::gather;
  using Base::m_;
  using Base::marginal_of_child;
  using Base::plan_;
  using Base::scatter;
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
    for (Index e = 0; e < table.size(); ++e)
      scatter(out, table.theta + map[e], Numbers::to_real(sum[e] * from[e]), table.adds);
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
        scatter(out, start + *map, Numbers::to_real(a[x] * w[y] * *from));
  }

  template <class T>
  void write_message(const Number* message, int states, Index start, const Rows<T>& out) const {
    Number total = Numbers::zero();
    for (int x = 0; x < states; ++x) total += message[x];
    const Reals shift = Numbers::finite_or_zero(Numbers::log(Numbers::canonical(total)));
    for (int x = 0; x < states; ++x) scatter(out, start + x, Numbers::log(message[x]) - shift);
  }

  // w_c times the sum of the children's u.
  const Number* weights_times_tangent(const ForestPlan::Factor& factor, const Number* w, const Number* u,
                                      Number* out) const {
    const Index columns = plan_.tables[factor.table].columns;
    if (factor.arity == 2) {
      const Number* of_child = u + variable(factor, 0).place;
      for (Index y = 0; y < columns; ++y) out[y] = Numbers::canonical(of_child[y] * w[y]);
      return out;
    }
    for (Index y = 0; y < columns; ++y) out[y] = Numbers::zero();
    for (int k = 0; k < factor.arity - 1; ++k) {
      const Number* of_child = u + variable(factor, k).place;
      for_each_state(factor, k, [&](Index y, int x) { out[y] += of_child[x]; });
    }
    for (Index y = 0; y < columns; ++y) out[y] = Numbers::canonical(out[y] * w[y]);
    return out;
  }

  // a_c (v_p - r_c).
  void cavity_times_tangent(const ForestPlan::Factor& factor, const Number* a, const Scratch& scratch,
                            Number* out) const {
    const ForestPlan::Variable& parent = plan_.variables[factor.parent];
    const Number *v = scratch.v.get() + parent.place, *r = scratch.r.get() + factor.place;
    for (int x = 0; x < parent.states; ++x) out[x] = Numbers::canonical(a[x] * (v[x] - r[x]));
  }

  // sum += g_c a w, without the table.
  template <class T>
  void add_direction(const ForestPlan::Factor& factor, const Rows<const T>& g, const Number* a, const Number* w,
                     Number* sum) const {
    const ForestPlan::Table& table = plan_.tables[factor.table];
    const Index* map = entries(table);
    for (int x = 0; x < table.rows; ++x)
      for (Index y = 0; y < table.columns; ++y, ++map, ++sum)
        *sum = Numbers::canonical(*sum + Numbers::from_real(gather(g, factor.mu + *map)) * a[x] * w[y]);
  }

  // T g_c.
  template <class T>
  const Number* table_times_direction(const ForestPlan::Factor& factor, const Rows<const T>& g, Number* out) const {
    const ForestPlan::Table& table = plan_.tables[factor.table];
    const Index* map = entries(table);
    const Entry* from = this->table(factor);
    for (Index e = 0; e < table.size(); ++e)
      out[e] = Numbers::canonical(Numbers::from_real(gather(g, factor.mu + map[e])) * from[e]);
    return out;
  }

  template <class T>
  void tangents_up(const Rows<const T>& g, bool nodes_only, Scratch& scratch) const {
    Number *derivative = scratch.rows.get(), *other = derivative + plan_.most_states;
    for (Index i = static_cast<Index>(plan_.variables.size()) - 1; i >= 0; --i) {
      const ForestPlan::Variable& variable = plan_.variables[i];
      Number* u = scratch.u.get() + variable.place;
      for (int x = 0; x < variable.states; ++x) u[x] = Numbers::from_real(gather(g, variable.start + x));
      for (int f = variable.factors_begin; f < variable.factors_end; ++f) {
        const ForestPlan::Factor& factor = plan_.factors[f];
        const ForestPlan::Table& table = plan_.tables[factor.table];
        scratch.tick(table.size());
        const Number* w = weights(factor, scratch.columns.get());
        const Number* wu =
            weights_times_tangent(factor, w, scratch.u.get(), scratch.columns.get() + plan_.most_columns);
        contract<Numbers>(this->table(factor), table.columns, 1, wu, table.columns, derivative, table.rows);
        if (!nodes_only) {
          const Number* product = table_times_direction(factor, g, scratch.table.get());
          contract<Numbers>(product, table.columns, 1, w, table.columns, other, table.rows);
          for (int x = 0; x < table.rows; ++x) derivative[x] += other[x];
        }
        const Number* m = m_.get() + factor.place;
        Number* r = scratch.r.get() + factor.place;
        for (int x = 0; x < table.rows; ++x) {
          r[x] = Numbers::ratio(derivative[x], m[x]);
          u[x] += r[x];
        }
      }
      const Number* belief = belief_.get() + variable.place;
      Number mean = Numbers::zero();
      for (int x = 0; x < variable.states; ++x) mean += belief[x] * u[x];
      for (int x = 0; x < variable.states; ++x) u[x] = Numbers::canonical(u[x] - mean);
    }
  }

  template <class T>
  void tangents_down(const Rows<const T>& g, bool nodes_only, Scratch& scratch) const {
    for (const ForestPlan::Variable& variable : plan_.variables)
      if (variable.root)
        std::copy(scratch.u.get() + variable.place, scratch.u.get() + variable.place + variable.states,
                  scratch.v.get() + variable.place);
    Number *derivative = scratch.rows.get(), *q = scratch.joint.get(), *other = q + plan_.most_columns;
    for (const ForestPlan::Factor& factor : plan_.factors) {
      Number *a = scratch.cavities.get() + factor.place, *at = scratch.tangents.get() + factor.place;
      cavity(factor, a);
      cavity_times_tangent(factor, a, scratch, at);
      if (factor.arity == 1) continue;
      const ForestPlan::Table& table = plan_.tables[factor.table];
      scratch.tick(table.size());
      const Number* w = weights(factor, scratch.columns.get());
      contract<Numbers>(this->table(factor), 1, table.columns, at, table.rows, q, table.columns);
      if (!nodes_only) {
        const Number* product = table_times_direction(factor, g, scratch.table.get());
        contract<Numbers>(product, 1, table.columns, a, table.rows, other, table.columns);
        for (Index y = 0; y < table.columns; ++y) q[y] += other[y];
      }
      if (factor.arity == 2) {  // the sum over x of T a is b / psi
        const ForestPlan::Variable& child = variable(factor, 0);
        const Number *belief = belief_.get() + child.place, *u = scratch.u.get() + child.place;
        for (int x = 0; x < child.states; ++x)
          scratch.v.get()[child.place + x] =
              Numbers::canonical(u[x] + Numbers::ratio(Numbers::canonical(q[x] * w[x]), belief[x]));
        continue;
      }
      const Number* wu = weights_times_tangent(factor, w, scratch.u.get(), scratch.columns.get() + plan_.most_columns);
      contract<Numbers>(this->table(factor), 1, table.columns, a, table.rows, other, table.columns);
      for (Index y = 0; y < table.columns; ++y) q[y] = Numbers::canonical(q[y] * w[y] + other[y] * wu[y]);
      for (int k = 0; k < factor.arity - 1; ++k) {
        const ForestPlan::Variable& child = variable(factor, k);
        marginal_of_child(factor, k, q, derivative);
        for (int x = 0; x < child.states; ++x)
          scratch.v.get()[child.place + x] = Numbers::ratio(derivative[x], belief_.get()[child.place + x]);
      }
    }
  }
};

}  // namespace riskfield::RISKFIELD_ISA
