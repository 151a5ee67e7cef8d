// Exact inference on a graph without cycles: one pass from the leaves to the roots and one back, many models at once.
//
// Write p for the variable of a factor c that is nearest to the root, y for the joint state of its other variables (its
// children), and T for exp of its table. Upwards, from the leaves,
//
//     w_c(y)   = prod of psi_j(y_j) over the children j
//     m_c(x)   = sum_y T(x, y) w_c(y)
//     psi_i(x) ~ exp(theta_i(x)) prod of m_c(x) over the factors c whose parent is i        (scaled to a maximum of 1)
//
// and log Z is the sum of the logarithms of all scales. Downwards, from b_i = psi_i / sum psi_i at a root i,
//
//     a_c(x) = b_p(x) / m_c(x),   mu_c(x, y) = T(x, y) a_c(x) w_c(y),   b_j = the marginal of mu_c.
//
// What is kept are psi_i, q_i = b_i / psi_i and e_c = psi_p / m_c, so that a_c = q_p e_c. Where i is the parent of one
// factor only, as in a chain, e_c is exp(theta_i) but for the scale: nothing is divided, and q_j = sum_x T(x, y)
// a_c(x). States with m_c(x) = 0 have e_c(x) = 0.
//
// All numbers are positive, so there is no cancellation. The derivative of the marginals along a direction, which by
// symmetry is also the gradient of a function of the marginals, takes two more passes (see forest_block.hpp).
#pragma once

#include <memory>
#include <vector>

#include "plan.hpp"

namespace riskfield {

// The order of both passes and where everything lies. Variables are numbered root first ("positions"), factors by their
// parents. It holds no numbers and serves every run on the graph.
struct ForestPlan {
  // Throws std::invalid_argument if the graph has a cycle.
  ForestPlan(Index num_variables, const Index* num_states, const Index* node_start,
             const std::vector<GroupInput>& groups);

  struct Variable {
    Index start;  // in the caller's theta and mu, and in vectors of all states
    int states;
    int factors_begin, factors_end;  // the factors whose parent it is
    bool root;
  };
  struct Factor {
    int parent, arity;
    int children;    // in `children`: arity - 1 positions
    int table;       // in `tables`
    Index place;     // of e_c, among those of all factors
    Index mu;        // its marginals in the caller's layout
    Index messages;  // in `message_starts`: the parent's, then the children's, in the caller's layout
  };
  // A table seen from one of its variables: rows are the states of the parent, columns joint states of the children.
  struct Table {
    Index theta;  // in the caller's layout
    Index place;  // among all tables
    int rows;
    Index columns;
    int entries;       // in `entry_maps`
    int factors;       // how many use it
    bool adds;         // whether an earlier table of this list is the same one of the caller
    bool theta_order;  // whether its entries are in the caller's order
    Index size() const { return rows * columns; }
  };

  std::vector<Variable> variables;  // by position
  std::vector<Factor> factors;      // sorted by parent
  std::vector<std::int32_t> children;
  std::vector<Index> message_starts;
  std::vector<Table> tables;
  std::vector<std::vector<Index>> entry_maps;  // row-major entry of a Table -> entry of the caller's table
  std::vector<Index> by_table;                 // factors, table by table
  Index node_size = 0, message_size = 0, table_size = 0;
  Index theta_size = 0, mu_size = 0, user_message_size = 0;
  int most_states = 1, most_arity = 1;
  Index most_columns = 1, largest_table = 1;
};

// A batch of models on one plan. T is float or double: the type of the caller's numbers. Computes in doubles.
template <class T>
class ForestRun {
 public:
  virtual ~ForestRun() = default;
  // log Z of every item; -inf if it has no possible state.
  virtual void log_partition(double* out) const = 0;
  // The expectation of the statistics of theta, d log Z / dtheta, of shape (batch, theta_size).
  virtual void statistics(T* out, int threads) = 0;
  // Marginals of variables alone, of shape (batch, node_size), or with those of factors, of shape (batch, mu_size).
  virtual void marginals(T* out, bool nodes_only, int threads) = 0;
  // Normalised log-messages.
  virtual void messages(T* out, int threads) = 0;
  // d(grad . mu) / dtheta, where `grad` is laid out as the marginals.
  virtual void backward(const T* grad, bool nodes_only, T* grad_theta, int threads) = 0;
};

template <class T>
struct ForestInput {
  std::shared_ptr<const ForestPlan> plan;
  const T* theta;  // (batch, theta_size)
  Index batch;
  bool wide;  // compute with unlimited range from the start, for tests
};

}  // namespace riskfield
