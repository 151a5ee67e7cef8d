// Reverse-mode differentiation of sweeps (back TRW, back mean field: Domke 2013, algorithms 2 and 3, for factors of any
// arity).
//
// Gradients are kept with respect to logarithms: of beliefs, of stored (powered) messages, of packed tables. A message
// and its gradient follow from the cavities it was made from, so that these are all a sweep has to write down; a belief
// is a sum of messages, whose gradient needs no numbers at all. A belief does not change when its messages are scaled,
// nor a message when its cavities are, so gradients of message passing sum to zero over states. Of binary variables in
// probabilities there are ratios only (see ratio.hpp).
#pragma once

#include "gradients.hpp"
#include "unpacking.hpp"

namespace riskfield::RISKFIELD_ISA {

// Whether the gradients of a group's tables are kept as those of entry 00 and of the sums of the first row and the
// first column: the gradient of a binary table sums to zero, which gives the fourth number. Each sum, divided by c, is
// also what the gradient of the message to that variable has more than that of its belief (see GradientBuffers), so
// that only tied tables have to keep it. (Pass::kCounting does without.)
template <class T>
bool keeps_sums(const Context<T>& context, const Item<T>& item, const Group& group, bool counting) {
  return keeps_ratio(context, item, square_states(group)) && !counting;
}

// What the backward pass does at a message: everything; everything but tables, and it adds up the messages' gradients;
// only tables, from these sums (the last two serve sweeps that are repeated); everything and the gradients of counting
// numbers; or everything but tables, whose gradients deferred.hpp computes later for several sweeps at once.
enum class Pass { kWhole, kSum, kTables, kCounting, kDeferred };

// A further number of states for which the last of these is unrolled, where there are registers for that; else 0.
template <class T>
constexpr int kMostDeferred = kVectorBytes == 64 && !std::is_same<T, Dual>::value ? 8 : 0;

template <Pass P>
constexpr bool kAddsTables = P != Pass::kSum && P != Pass::kDeferred;

template <class Algebra, class T>
constexpr bool kIsExpectation = std::is_same<Algebra, Expectation<T>>::value;

// What the belief of a slot has gathered in `node_theta`, entry by entry.
template <class Algebra, class Rows>
RF_INLINE auto gathered_by(const Rows& rows, int states) {
  return [rows, states](int x) RF_LAMBDA { return Algebra::keeps_ratio(states) ? -rows.get(0) : rows.get(x); };
}

// Add the gradient of the logarithm of a slot's cavity b / m to those of its belief and message.
template <class Algebra, class T, int S, class Lanes>
RF_INLINE void add_cavity(const Lanes& lanes, int slot, int states, const V<T>* gradient, V<T> inverse,
                          const Gradients<T>& grad, T* messages) {
  const int n = S ? S : states, rows = Algebra::cavity_rows(n);
  const auto belief = lanes.template belief_rows<Algebra, S>(grad.beliefs, grad.parcels, slot);
  RF_FOR (x, 0, rows) belief.add(x, gradient[x]);
  if constexpr (!kIsExpectation<Algebra, T>) {
    const auto message = lanes.template gradient_rows<Algebra, S>(messages, slot);
    RF_FOR (x, Algebra::template first_state<S>(n), n) message.add(x, -gradient[x] * inverse);
  }
}

// The same from the gradient of all joint states.
template <class Algebra, class T, class Lanes>
RF_NOINLINE void spread_to_slot(const Group& group, int slot, const V<T>* joint, const Lanes& lanes, V<T> inverse,
                                const Gradients<T>& grad, T* messages, Scratch<T>& scratch) {
  const int n = group.dims[slot];
  Index inner = 1, outer = 1;
  for (int k = 0; k < slot; ++k) outer *= group.dims[k];
  for (int k = slot + 1; k < group.arity; ++k) inner *= group.dims[k];
  V<T>* sum = scratch.cavities;
  for (int x = 0; x < n; ++x) sum[x] = V<T>{};
  for (Index a = 0; a < outer; ++a)
    for (int x = 0; x < n; ++x)
      for (Index b = 0; b < inner; ++b) sum[x] += *joint++;
  add_cavity<Algebra, T, 0>(lanes, slot, n, sum, inverse, grad, messages);
}

// A counting number divides the log-potentials, log table = theta_c / c_c, ...
template <class Algebra, class T, class Lanes>
void add_counting_of_table(const Context<T>& context, const Item<T>& item, int g, const Lanes& lanes,
                           const V<T>* gradient, Gradients<T>& grad, Scratch<T>& scratch) {
  Index stride;
  const Group& group = context.plan->groups[g];
  const T* table = whole_tables<Algebra, T, 0>(item, group, lanes, scratch.table, stride);
  const bool coupling = keeps_coupling<Algebra>(group);
  V<T> sum{};
  for (Index e = 0; e < group.table_size; ++e) {
    V<T> potential = Algebra::logarithm(load<T>(table + e * stride));
    if (coupling && e / 2 == 0) potential += growth_of<Algebra, T>(item, group, lanes, 0);
    if (coupling && e % 2 == 0) potential += growth_of<Algebra, T>(item, group, lanes, 1);
    sum += select<T>(potential > kNegInf<T>, gradient[e] * potential, V<T>{});
  }
  lanes.add_factor((*grad.counting)[g].data(), -sum * lanes.per_factor(context.inverse[g]));
}

// ... and multiplies the log-messages that make up a belief: the gradient of the belief since a message was sent, times
// that message. `m` is the message before it was damped.
template <class Algebra, class T, class Lanes>
void add_counting_of_message(const Context<T>& context, const Item<T>& item, int g, int slot, const Lanes& lanes,
                             const V<T>* m, Gradients<T>& grad) {
  const Group& group = context.plan->groups[g];
  const int n = group.dims[slot], first = Algebra::template first_state<0>(n);
  const auto nodes = gathered_by<Algebra>(lanes.node_rows(grad.node_theta, slot), n);
  const auto seen = lanes.template gradient_rows<Algebra, 0>(grad.seen, slot),
             of_belief = lanes.template gradient_rows<Algebra, 0>(grad.of_belief, slot);
  V<T> sum{};
  for (int x = first; x < n; ++x) {
    const V<T> gathered = nodes(x), since = gathered - seen.get(x) + context.damping * of_belief.get(x);
    seen.set(x, gathered);
    of_belief.set(x, since);
    V<T> message = Algebra::logarithm(m[x]) - (first ? Algebra::logarithm(m[0]) : V<T>{});
    if (first) message -= growth_of<Algebra, T>(item, group, lanes, slot);
    sum += select<T>(message > kNegInf<T>, since * message, V<T>{});
  }
  lanes.add_factor((*grad.counting)[g].data(), (1 - context.damping) * sum);
}

// r[x] = the gradient of the updated message's unnormalised entry m[x], from that of the stored one.
template <class Algebra, class T, int S>
RF_INLINE void reverse_normalisation(const V<T>* m, int states, V<T>* r) {
  if constexpr (kIsExpectation<Algebra, T>) return;
  const int n = S ? S : states;
  if (Algebra::keeps_ratio(n)) return Ratio<T>::reverse_normalisation(m, r);
  // Gradients sum to zero but for rounding, which would grow from sweep to sweep if it were let through.
  V<T> sum{};
  RF_FOR (x, 0, n) sum += r[x];
  sum = total_of<Algebra::kInside, T>(sum);
  if constexpr (IsLogarithm<Algebra>::value) {
    const V<T> shift = Algebra::finite_or_zero(Algebra::log_total(m, n));
    for (int x = 0; x < n; ++x) r[x] -= vexp<T>(m[x] - shift) * sum;
  } else {
    V<T> total{};
    RF_FOR (x, 0, n) total += m[x];
    const V<T> excess = sum / total_of<Algebra::kInside, T>(total);
    RF_FOR (x, 0, n) r[x] = r[x] / m[x] - excess;
  }
}

// At a pair of binary variables in probabilities: from the gradient of the message's logarithm to that of entry 00 of
// the table, and of the logarithm of the cavity, that of the other slot.
template <class T>
struct BinaryGradient {
  V<T> corner, sum;

  RF_INLINE BinaryGradient(V<T> w, V<T> cavity0, V<T> cavity1, V<T> gradient) {
    const V<T> a0 = w * cavity0, a1 = cavity0, b0 = cavity1, b1 = w * cavity1;
    const V<T> m0 = a0 + b0, m1 = a1 + b1;
    if constexpr (std::is_same<T, float>::value) {  // where the product below might overflow
      corner = -gradient / m0 * a0;
      sum = corner + gradient / m1 * a1;
    } else {
      const V<T> rate = gradient / (m0 * m1);
      corner = -rate * m1 * a0;
      sum = rate * (a1 * b0 - a0 * b1);
    }
  }
};

template <class Algebra, class T, Pass P, class Lanes>
RF_INLINE void reverse_binary(V<T> w, int slot, const Lanes& lanes, const V<T>* cavity, V<T> gradient, V<T> inverse,
                              T* to, Gradients<T>& grad) {
  const BinaryGradient<T> made(w, cavity[0], cavity[1], gradient);
  if constexpr (kAddsTables<P>) {
    lanes.add_table(grad.tables, grad.tied, 0, made.corner);
    lanes.add_tied(grad.tied, 1, slot == 0 ? -gradient : made.sum);
    lanes.add_tied(grad.tied, 2, slot == 0 ? made.sum : -gradient);
  }
  if constexpr (P != Pass::kTables) {
    lanes.template belief_rows<Algebra, 2>(grad.beliefs, grad.parcels, 1 - slot).add(0, made.sum);
    lanes.template gradient_rows<Algebra, 2>(to, 1 - slot).add(1, made.sum * inverse);
  }
}

// A pairwise factor between variables of S states each: from r to the table and the other slot.
template <class Algebra, class T, int S, Pass P, class Lanes>
RF_INLINE void reverse_contraction(const Incident<T>& made, int slot, const Lanes& lanes, const V<T>* cavity,
                                   const V<T>* r, V<T> inverse, T* to, Gradients<T>& grad) {
  V<T> sum[S];
  RF_FOR (y, 0, S) {
    sum[y] = V<T>{};
    RF_FOR (x, 0, S) {
      const Index e = slot == 0 ? x * S + y : y * S + x;
      const V<T> entry = load<T>(made.table + e * made.stride);
      if constexpr (kIsExpectation<Algebra, T>) {
        const V<T> weight = cavity[y] * r[x];
        if constexpr (kAddsTables<P>) lanes.add_table(grad.tables, grad.tied, e, weight);
        sum[y] += Algebra::expected(entry, weight);
      } else {
        const V<T> rate = entry * r[x];
        if constexpr (kAddsTables<P>) lanes.add_table(grad.tables, grad.tied, e, rate * cavity[y]);
        sum[y] += rate;
      }
    }
    if constexpr (!kIsExpectation<Algebra, T>) sum[y] *= cavity[y];
  }
  if constexpr (P != Pass::kTables) add_cavity<Algebra, T, S>(lanes, 1 - slot, S, sum, inverse, grad, to);
}

// A pairwise factor without its table: a contraction with r in place of a cavity. `cavity` is that of the other slot.
template <class Algebra, class T, int S, class Lanes>
RF_INLINE void reverse_pair(const Incident<T>& made, const Group& group, int slot, const Lanes& lanes,
                            const V<T>* cavity, const V<T>* r, V<T> inverse, const Gradients<T>& grad, T* to,
                            Scratch<T>& scratch) {
  const int n = S ? S : group.dims[slot], others = S ? S : group.dims[1 - slot];
  V<T> fixed[S ? S : 1];
  V<T>* sum = S ? fixed : scratch.cavities;
  contract_pair<Algebra, T, S>(made.table, made.stride, 1 - slot, r, n, others, sum);
  RF_FOR (y, 0, others) sum[y] *= cavity[y];
  add_cavity<Algebra, T, S>(lanes, 1 - slot, others, sum, inverse, grad, to);
}

// The same for any factor.
template <class Algebra, class T, Pass P, class Lanes>
RF_INLINE void reverse_contraction(const Incident<T>& made, const Group& group, int slot, const Lanes& lanes,
                                   const V<T>* m, const V<T>* r, V<T> inverse, T* to, Gradients<T>& grad,
                                   Scratch<T>& scratch) {
  constexpr bool kExpectation = kIsExpectation<Algebra, T>;
  V<T>* weight = scratch.weights;
  Index e = 0;
  for (Index a = 0; a < made.num_before; ++a)
    for (int x = 0; x < group.dims[slot]; ++x)
      for (Index b = 0; b < made.num_after; ++b, ++e) {
        const V<T> entry = load<T>(made.table + e * made.stride);
        V<T> share;
        if constexpr (IsLogarithm<Algebra>::value) {
          share = weight[e] = vexp<T>(entry + made.before[a] + made.after[b] - Algebra::finite_or_zero(m[x])) * r[x];
        } else if constexpr (kExpectation) {
          share = made.before[a] * made.after[b] * r[x];
          weight[e] = Algebra::expected(entry, share);
        } else {
          share = weight[e] = entry * made.before[a] * made.after[b] * r[x];
        }
        if constexpr (kAddsTables<P>) lanes.add_table(grad.tables, grad.tied, e, share);
      }
  if constexpr (P != Pass::kTables)
    for (int other = 0; other < group.arity; ++other)
      if (other != slot) spread_to_slot<Algebra, T>(group, other, weight, lanes, inverse, grad, to, scratch);
}

// The gradient of stored messages, which is taken out: what belongs to them alone and what their beliefs have gathered.
template <class Algebra, class T, int S, Pass P, class Lanes>
RF_INLINE void take_gradient(const Lanes& lanes, int slot, int states, T damping, T* from, T* to, Gradients<T>& grad,
                             V<T>* out) {
  const int n = S ? S : states, first = Algebra::template first_state<S>(n);
  if constexpr (P == Pass::kTables) {
    const auto sums = lanes.template gradient_rows<Algebra, S>(grad.sum, slot);
    RF_FOR (x, first, n) {
      out[x] = sums.get(x);
      sums.set(x, V<T>{});  // some messages are sent twice in a sweep
    }
    return;
  }
  const auto gathered = gathered_by<Algebra>(lanes.node_rows(grad.node_theta, slot), n);
  const auto own = lanes.template gradient_rows<Algebra, S>(from, slot),
             left = lanes.template gradient_rows<Algebra, S>(to, slot);
  const T kept = Algebra::kNeedsCounting ? damping : T(0);
  RF_FOR (x, first, n) {
    out[x] = own.get(x) + gathered(x);
    const V<T> rest = kept * out[x] - gathered(x);
    own.set(x, from == to ? rest : V<T>{});
    if (from != to) left.add(x, rest);
  }
  if constexpr (P == Pass::kSum) {
    const auto sums = lanes.template gradient_rows<Algebra, S>(grad.sum, slot);
    RF_FOR (x, first, n) {
      sums.add(x, out[x]);
      const V<T> valid = lanes.valid(out[x]);
      grad.square += valid * valid;
    }
  }
}

// From the gradient of a tile's messages to one slot, which is taken out of `from`; gradients of messages go to `to`.
template <class Algebra, class T, int S, Pass P, class Lanes>
RF_INLINE void reverse_message(const Context<T>& context, const Item<T>& item, int g, int slot, const Lanes& lanes,
                               const T*& tape, T* from, T* to, Gradients<T>& grad, Scratch<T>& scratch) {
  const Group& group = context.plan->groups[g];
  const MessageSettings<T> settings = settings_of<Algebra, T>(context, g, lanes);
  const int states = S ? S : group.dims[slot];
  V<T> fixed[S ? S : 1], update[S ? S : 1], ratio[S ? S : 1];
  auto cavity = [&](int k, V<T>* out)
                    RF_LAMBDA { read_cavity<Algebra, T, S>(lanes, item.beliefs.get(), k, group.dims[k], tape, out); };
  if constexpr (S > 0 && Algebra::keeps_ratio(S)) {
    cavity(1 - slot, fixed);
    take_gradient<Algebra, T, S, P>(lanes, slot, states, settings.damping, from, to, grad, ratio);
    const V<T> w = lanes.table_entry(item.tables.get(), 0),
               gradient = ratio[1] * (settings.counting * (1 - settings.damping));
    return reverse_binary<Algebra, T, P>(w, slot, lanes, fixed, gradient, settings.inverse, to, grad);
  }
  Incident<T> made = incident<Algebra, T, S>(item, group, slot, lanes, cavity, fixed, scratch);
  if (P == Pass::kDeferred && (S == 0 || S == kMostDeferred<T>))
    made.ahead = grad.next_table && lanes.tables_ahead() != 0 ? grad.next_table - made.table : 0;
  V<T>* m = S ? update : scratch.out;
  V<T>* r = S ? ratio : scratch.rates;
  const V<T> scale = kIsExpectation<Algebra, T> ? splat<T>(1) : settings.counting * (1 - settings.damping);
  take_gradient<Algebra, T, S, P>(lanes, slot, states, settings.damping, from, to, grad, r);
  RF_FOR (x, Algebra::template first_state<S>(states), states) r[x] *= scale;
  if constexpr (S > 0 && !kIsExpectation<Algebra, T>)
    contract_pair<Algebra, T, S>(made.table, made.stride, slot, fixed, S, S, m, made.ahead);
  else if constexpr (!kIsExpectation<Algebra, T>)
    contract<Algebra, T, S>(made, states, m);
  if constexpr (P == Pass::kCounting) add_counting_of_message<Algebra, T>(context, item, g, slot, lanes, m, grad);
  reverse_normalisation<Algebra, T, S>(m, states, r);
  if constexpr (P == Pass::kDeferred) {
    write_rows<T>(r, states, grad.streams, grad.rates);
  }
  if constexpr (P == Pass::kDeferred)
    reverse_pair<Algebra, T, S>(made, group, slot, lanes, slot == 0 ? made.after : made.before, r, settings.inverse,
                                grad, to, scratch);
  else if constexpr (S > 0)
    reverse_contraction<Algebra, T, S, P>(made, slot, lanes, fixed, r, settings.inverse, to, grad);
  else
    reverse_contraction<Algebra, T, P>(made, group, slot, lanes, m, r, settings.inverse, to, grad, scratch);
  if constexpr (P == Pass::kCounting)
    add_counting_of_table<Algebra, T>(context, item, g, lanes, scratch.weights, grad, scratch);
}

// From the gradient of a tile's beliefs, which is taken out, to theta, where the messages will find it. Only mean field
// reads the beliefs, from `tape`.
template <class Algebra, class T, int S>
RF_INLINE void reverse_belief(const Context<T>& context, const NodeTile& tile, const T*& tape, Gradients<T>& grad,
                              Scratch<T>& scratch) {
  const int states = S ? S : tile.states, rows = Algebra::cavity_rows(states);
  V<T> fixed[S ? S : 1];
  V<T>* u = S ? fixed : scratch.out;
  T* beliefs = grad.beliefs + tile.address;
  RF_FOR (x, 0, rows) {
    u[x] = load<T>(beliefs + Index(x) * tile.stride);
    store_some<T>(beliefs + Index(x) * tile.stride, V<T>{}, tile.count);
  }
  if constexpr (kIsExpectation<Algebra, T>) {
    V<T> total{};
    RF_FOR (x, 0, states) total += u[x];
    RF_FOR (x, 0, states) u[x] -= load<T>(tape + x * kLanes<T>) * total;
    tape += states * kLanes<T>;
  } else if (context.node_power) {
    const V<T> inverse = load<T>(context.node_inverse.data() + tile.first);
    RF_FOR (x, 0, rows) u[x] *= inverse;
  }
  T* theta = grad.node_theta + tile.address;
  RF_FOR (x, 0, rows) {
    T* at = theta + Index(x) * tile.stride;
    store_some<T>(at, load<T>(at) + u[x], tile.count);
  }
}

}  // namespace riskfield::RISKFIELD_ISA
