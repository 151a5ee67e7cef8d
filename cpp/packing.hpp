// Into the storage of a plan and out of it again: theta, messages, marginals.
#pragma once

#include "tiles.hpp"

namespace riskfield::RISKFIELD_ISA {

// Where the caller keeps the table and the messages of a factor.
template <class T>
const T* user_table(const Plan& plan, const Group& group, Index f, const T* theta) {
  const Index u = group.user_group[f];
  return theta + plan.user_groups[u].theta_start + plan.user_tables[u][group.user_row[f]] * group.table_size;
}

inline Index user_message(const Plan& plan, const Group& group, Index f, int slot) {
  const UserGroup& from = plan.user_groups[group.user_group[f]];
  const int axis = group.permutations[group.permutation[f]][slot];
  Index start = from.message_start;
  for (int k = 0; k < axis; ++k) start += from.count * from.shape[k];
  return start + group.user_row[f] * from.shape[axis];
}

template <class T>
class Packer {
 public:
  Packer(const Context<T>& context, Item<T>& item, const T* theta, const T* state)
      : context_(context), plan_(*context.plan), item_(item), theta_(theta), state_(state) {}

  void pack() {
    if (context_.kind != Kind::kMeanField) choose_domain();
    item_.tables.allocate(plan_.table_size);
    item_.beliefs.allocate(plan_.node_size);
    item_.node_theta.allocate(plan_.node_size);
    pack_nodes();
    for (std::size_t g = 0; g < plan_.groups.size(); ++g)
      for (const FactorTile& tile : plan_.groups[g].all_tiles) pack_tables(g, tile);
    for (const SharedTable& shared : plan_.shared_tables) pack_shared(shared);
    pack_messages();
  }

 private:
  bool probabilities() const { return context_.kind == Kind::kSumProduct && !item_.log_domain; }

  // Probabilities are safe if nothing can underflow. A message m_c varies by at most exp(range(theta_c) / c_c), hence a
  // belief by at most exp((range(theta_i) + sum_c range(theta_c)) / c^_i); a message given to start from may vary more.
  // Impossible joint states void the bound on messages, so they need logarithms; impossible node states do not.
  void choose_domain() {
    item_.log_domain = context_.kind == Kind::kMaxProduct;
    if (item_.log_domain) return;
    std::vector<double> spread(plan_.num_variables);
    for (Index p = 0; p < plan_.num_variables; ++p)
      spread[p] = range_of(theta_ + plan_.node_start[plan_.variable[p]], plan_.states[p]).width();
    std::vector<std::vector<double>> widths(plan_.groups.size());
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      const Group& group = plan_.groups[g];
      widths[g].resize(group.count);
      for (Index f = 0; f < group.count; ++f) {
        const Range<T> range = range_of(user_table(plan_, group, f, theta_), group.table_size);
        if (range.has_impossible) {
          item_.log_domain = true;
          return;
        }
        double width = range.width();
        for (int slot = 0; slot < group.arity && state_; ++slot)
          width = std::max(width, context_.counting[g][f] *
                                      range_of(state_ + user_message(plan_, group, f, slot), group.dims[slot]).width());
        widths[g][f] = width;
        for (int slot = 0; slot < group.arity; ++slot) spread[group.position[f * group.arity + slot]] += width;
      }
    }
    constexpr double kLimit = sizeof(T) == 8 ? 690 : 80;
    double worst = 0;
    for (Index p = 0; p < plan_.num_variables; ++p) worst = std::max(worst, spread[p]);
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      const Group& group = plan_.groups[g];
      for (Index f = 0; f < group.count; ++f) {
        const double scaled = widths[g][f] / context_.counting[g][f];
        double total = scaled;
        for (int slot = 0; slot < group.arity; ++slot) {
          const Index p = group.position[f * group.arity + slot];
          total += spread[p] * context_.node_inverse[p] + 2 * scaled + std::log(double(group.dims[slot]));
        }
        worst = std::max(worst, total);
      }
    }
    item_.log_domain = !(worst <= kLimit);
  }

  void pack_nodes() {
    for (Index p = 0; p < plan_.num_variables; ++p) {
      const T* from = theta_ + plan_.node_start[plan_.variable[p]];
      const int n = plan_.states[p];
      const T top = range_of(from, n).top();
      T* to = item_.node_theta.get() + plan_.node_address[p];
      for (int x = 0; x < n; ++x)
        to[Index(x) * plan_.node_stride[p]] = probabilities() ? std::exp(from[x] - top) : from[x] - top;
    }
  }

  // theta_c (mean field), theta_c / c_c (logarithms) or its exponential; up to a constant where that does not matter.
  V<T> packed_entry(V<T> value, V<T> top, V<T> inverse) const {
    if (context_.kind == Kind::kMeanField) return value;
    const V<T> scaled = (value - top) * inverse;
    return item_.log_domain ? scaled : vexp<T>(scaled);
  }

  void pack_tables(std::size_t g, const FactorTile& tile) {
    if (tile.shared) return;
    const Group& group = plan_.groups[g];
    const TileLanes<T> lanes(plan_, group, tile);
    const T* from[kLanes<T>];
    const Index* map[kLanes<T>];
    V<T> top{};
    for (int l = 0; l < tile.count; ++l) {
      const Index f = lanes.factor(l);
      from[l] = user_table(plan_, group, f, theta_);
      map[l] = group.entry_maps[group.permutation[f]].data();
      top[l] = range_of(from[l], group.table_size).top();
    }
    const V<T> inverse = lanes.per_factor(context_.inverse[g]);
    for (Index e = 0; e < group.table_size; ++e) {
      V<T> value{};
      for (int l = 0; l < tile.count; ++l) value[l] = from[l][map[l][e]];
      value = packed_entry(value, top, inverse);
      for (int l = 0; l < tile.count; ++l) {
        const Index f = lanes.factor(l);
        if (group.shared[f] < 0) item_.tables.get()[group.table[f] + e * group.table_stride[f]] = value[l];
      }
    }
  }

  void pack_shared(const SharedTable& shared) {
    const Group& group = plan_.groups[shared.group];
    const Index u = shared.user_group;
    const UserGroup& user = plan_.user_groups[u];
    const T* from = theta_ + user.theta_start + plan_.user_tables[u][shared.user_row] * group.table_size;
    const Index* map = group.entry_maps[shared.permutation].data();
    const V<T> top = splat<T>(range_of(from, group.table_size).top());
    const V<T> inverse = splat<T>(shared_inverse(shared));
    for (Index e = 0; e < group.table_size; ++e)
      item_.tables.get()[shared.address + e] = packed_entry(splat<T>(from[map[e]]), top, inverse)[0];
  }

  // All factors that share a packed table have one counting number.
  T shared_inverse(const SharedTable& shared) const { return context_.inverse[shared.group][shared.factor]; }

  void pack_messages() {
    const bool twice = plan_.sweep == Sweep::kAllAtOnce;
    const bool mean_field = context_.kind == Kind::kMeanField;
    for (int buffer = 0; buffer < (twice ? 2 : 1); ++buffer) {
      item_.messages[buffer].allocate(plan_.message_size);
      T* neutral = item_.messages[buffer].get() + Plan::kNeutral;
      std::fill(neutral, neutral + plan_.max_states + plan_.lanes, probabilities() ? T(1) : T(0));
    }
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      const Group& group = plan_.groups[g];
      for (Index f = 0; f < group.count; ++f)
        for (int slot = 0; slot < group.arity; ++slot) {
          const int n = group.dims[slot];
          const T c = context_.counting[g][f];
          const T* given = state_ && !mean_field ? state_ + user_message(plan_, group, f, slot) : nullptr;
          const T scale = n == 2 && given ? given[0] : T(0);
          const Index at = group.message[f * group.arity + slot];
          for (int x = 0; x < n; ++x) {
            const T log_stored = given ? c * (given[x] - scale) : T(0);
            const T stored = probabilities() ? std::exp(log_stored) : log_stored;
            for (int buffer = 0; buffer < (twice ? 2 : 1); ++buffer)
              item_.messages[buffer].get()[at + Index(x) * group.message_stride[f]] = stored;
          }
        }
    }
  }

  const Context<T>& context_;
  const Plan& plan_;
  Item<T>& item_;
  const T* theta_;
  const T* state_;
};

// mu_c propto table_c prod_i b_i / m_c, scattered into the caller's layout.
template <class Algebra, class T>
void unpack_factor(const Context<T>& context, const Item<T>& item, int g, const FactorTile& tile, Scratch<T>& scratch,
                   T* mu) {
  const Plan& plan = *context.plan;
  const Group& group = plan.groups[g];
  const TileLanes<T> lanes(plan, group, tile);
  const V<T> inverse = lanes.per_factor(context.inverse[g]);
  Index stride;
  const T* table = lanes.tables(item.tables.get(), scratch.table, stride);
  joint_cavity<Algebra, T>(lanes, group, 0, group.arity, item.beliefs.get(), item.messages[item.current].get(), inverse,
                           scratch, scratch.before);
  V<T>* joint = scratch.before;
  constexpr bool kExpectation = std::is_same<Algebra, Expectation<T>>::value;
  if constexpr (!kExpectation) {
    for (Index e = 0; e < group.table_size; ++e) joint[e] = Algebra::combine(joint[e], load<T>(table + e * stride));
    if constexpr (IsLogarithm<Algebra>::value) {
      V<T> top = joint[0];
      for (Index e = 1; e < group.table_size; ++e) top = vmax<T>(top, joint[e]);
      for (Index e = 0; e < group.table_size; ++e) joint[e] = vexp<T>(joint[e] - top);
    }
    V<T> total{};
    for (Index e = 0; e < group.table_size; ++e) total += joint[e];
    const V<T> scale = T(1) / total;
    for (Index e = 0; e < group.table_size; ++e) joint[e] *= scale;
  }
  for (int l = 0; l < tile.count; ++l) {
    const Index f = lanes.factor(l);
    T* to = mu + plan.user_groups[group.user_group[f]].mu_start + group.user_row[f] * group.table_size;
    const Index* map = group.entry_maps[group.permutation[f]].data();
    for (Index e = 0; e < group.table_size; ++e) to[map[e]] = joint[e][l];
  }
}

}  // namespace riskfield::RISKFIELD_ISA
