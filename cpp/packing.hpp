// Into the storage of a plan: theta, and messages to start from.
#pragma once

#include "copies.hpp"
#include "couplings.hpp"
#include "user_layout.hpp"

namespace riskfield::RISKFIELD_ISA {

// The theta of each model of an item: the caller's, or that and a step in some direction.
template <class T>
struct Theta {
  ConstRows<T> values, direction;
  bool moved = false;  // whether there is a direction
  T step[kLanes<T>] = {};

  Theta(const RunInput<T>& input, const Item<T>& item)
      : values(input.theta, input.theta_size, item, input.rows), moved(input.direction != nullptr) {
    if (!moved) return;
    direction = ConstRows<T>(input.direction, input.theta_size, item, input.rows);
    for (int c = 0; c < kLanes<T>; ++c) step[c] = static_cast<T>(input.steps[item.model_in(c).number]);
  }

  // `count` numbers of one model, where they lie or in a buffer that the next call of this thread overwrites.
  const T* at(int copy, Index start, Index count) const {
    if (!moved) return values[copy] + start;
    thread_local std::vector<T> buffer;
    if (static_cast<Index>(buffer.size()) < count) buffer.resize(count);
    for (Index k = 0; k < count; ++k) buffer[k] = values[copy][start + k] + step[copy] * direction[copy][start + k];
    return buffer.data();
  }
};

// The caller's numbers of neighbouring factors lie apart: ask early for those of the tile after this one.
template <class T, class Address>
RF_INLINE void prefetch_user(const Group& group, const FactorTile& tile, Address address) {
  constexpr Index kLine = 64 / sizeof(T);
  if (!tile.contiguous) return;
  const Index first = tile.first + tile.count, last = std::min<Index>(first + kLanes<T>, group.count);
  for (Index f = first; f < last; ++f)
    for (Index e = 0; e < group.table_size; e += kLine) __builtin_prefetch(address(f) + e, 0, 2);
}

// An item to pack, and what into it.
template <class T>
struct Packed {
  Item<T>* item;
  Theta<T> theta;
};

// The normalised log-messages (mean field: log-marginals) that the models of an item start from.
template <class T>
struct Start {
  ConstRows<T> rows;
  bool given = false;  // else they are uniform
};

// Packs items whose models stand for the same rows of theta. They share their domain and what they start from.
template <class T>
class Packer {
 public:
  Packer(const Context<T>& context, const Start<T>& start, const std::vector<Packed<T>>& items)
      : context_(context), plan_(*context.plan), start_(start), items_(items) {}

  // Packs the tables as logarithms. Returns the copies for which probabilities might underflow.
  LaneSet begin(int threads) {
    for (const auto& [item, theta] : items_) {
      item->tables.allocate(plan_.table_size);
      item->beliefs.allocate(plan_.node_size);
      item->node_theta.allocate(plan_.node_size);
      item->node_theta.fill(0);  // rows may be padded
    }
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      const auto& tiles = plan_.groups[g].all_tiles;
      widths_.emplace_back(plan_.groups[g].count);
      const Index work = plan_.groups[g].table_size * kLanes<T> * static_cast<Index>(items_.size());
      in_shares(threads, tiles.size(), work, [&](Index t) { pack_tables(g, tiles[t]); });
      if (start_.given && context_.kind == Kind::kSumProduct)
        in_shares(threads, tiles.size(), work, [&](Index t) { widen(g, tiles[t]); });
    }
    for (const auto& [item, theta] : items_)
      for (const SharedTable& shared : plan_.shared_tables)
        for (int c = 0; c < plan_.copies; ++c) pack_shared(shared, c, *item, theta);
    return context_.kind == Kind::kSumProduct ? unsafe_copies() : 0;
  }

  // Packs the rest, in a domain that suits all of the models.
  void finish(int threads, bool logarithms) {
    log_domain_ = logarithms || context_.kind == Kind::kMaxProduct;
    for (const auto& [item, theta] : items_) {
      item->log_domain = log_domain_;
      item->table_numbers = plan_.table_size;
      pack_nodes(*item, theta);
      if (probabilities()) finish_tables(threads, plan_, *item);
    }
    pack_messages(threads);
    for (const auto& [item, theta] : items_)
      if (probabilities() && !log_messages()) exponentiate<T>(threads, item->node_theta.get(), item->node_theta.size());
  }

 private:
  bool probabilities() const { return context_.kind == Kind::kSumProduct && !log_domain_; }
  bool log_messages() const { return probabilities() && context_.log_messages; }
  // By what natural logarithms of messages and beliefs are multiplied: where tables are probabilities, their base is 2.
  T unit() const { return log_messages() ? T(kLog2E<double>) : T(1); }

  // Probabilities are safe if nothing can underflow. A message m_c varies by at most exp(range(theta_c) / c_c), hence a
  // belief by at most exp((range(theta_i) + sum_c range(theta_c)) / c^_i); a message given to start from may vary more.
  // Impossible joint states (an infinite width) void the bound on messages, so they need logarithms; impossible states
  // of a node do not.
  LaneSet unsafe_copies() const {
    std::vector<double> spread(plan_.num_nodes);
    Ticker tick;
    for (const auto& [item, theta] : items_)
      for (Index p = 0; p < plan_.num_nodes; ++p) {
        tick(plan_.states[p]);
        const T* values = theta.at(plan_.copy_of(p), plan_.node_start[plan_.variable[p]], plan_.states[p]);
        spread[p] = std::max(spread[p], range_of(values, plan_.states[p]).width());
      }
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      const Group& group = plan_.groups[g];
      for (Index f = 0; f < group.count; ++f) {
        tick(group.arity);
        for (int slot = 0; slot < group.arity; ++slot) spread[group.position[f * group.arity + slot]] += widths_[g][f];
      }
    }
    // Gradients multiply two messages (see BinaryGradient); floats have no room for that. Messages that are given
    // to binary variables grow (see ratio.hpp), so that they and their products may vary twice as much.
    constexpr double kLimit = std::is_same<T, float>::value ? 80 : 345;
    const double grown = std::is_same<T, float>::value && start_.given ? 2 : 1;
    double worst[kLanes<T>] = {};
    auto meet = [&](Index node_or_factor, double total) {
      double& so_far = worst[plan_.copy_of(node_or_factor)];
      so_far = std::max(so_far, total);
    };
    for (Index p = 0; p < plan_.num_nodes; ++p) meet(p, plan_.states[p] == 2 ? grown * spread[p] : spread[p]);
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      const Group& group = plan_.groups[g];
      const double states = std::log(double(group.table_size));
      for (Index f = 0; f < group.count; ++f) {
        tick(group.arity);
        double total = states + (1 + 2 * group.arity) * widths_[g][f] * double(context_.inverse[g][f]);
        for (int slot = 0; slot < group.arity; ++slot) {
          const Index p = group.position[f * group.arity + slot];
          total += spread[p] * double(context_.node_inverse[p]);
        }
        meet(f, total);
      }
    }
    LaneSet unsafe = 0;
    for (int c = 0; c < plan_.copies; ++c)
      if (!(worst[c] <= kLimit)) unsafe |= LaneSet(1) << c;
    return unsafe;
  }

  // Potentials of binary variables whose beliefs are ratios are relative to state 1, too, unless that is impossible.
  void pack_nodes(Item<T>& item, const Theta<T>& theta) const {
    Ticker tick;
    item.state1_possible = probabilities();
    for (Index p = 0; p < plan_.num_nodes; ++p) {
      const int n = plan_.states[p];
      tick(n);
      const T* from = theta.at(plan_.copy_of(p), plan_.node_start[plan_.variable[p]], n);
      const bool relative = probabilities() && n == Ratio<T>::kStates && from[1] > kNegInf<T>;
      if (n == Ratio<T>::kStates) item.state1_possible &= relative;
      const T top = relative ? from[1] : range_of(from, n).top();
      T* to = item.node_theta.get() + plan_.node_address[p];
      for (int x = 0; x < n; ++x) to[Index(x) * plan_.node_stride[p]] = (from[x] - top) * unit();
    }
  }

  // What is packed: theta_c for mean field, else theta_c / c_c up to a constant (and later its exponential).
  T packed_entry(T value, T top, T inverse) const {
    return context_.kind == Kind::kMeanField ? value : (value - top) * inverse;
  }

  void pack_tables(std::size_t g, const FactorTile& tile) {
    const Group& group = plan_.groups[g];
    auto of = [&](const ConstRows<T>& rows) {
      return [&](Index f) { return rows[plan_.copy_of(f)] + user_table(plan_, group, f); };
    };
    const Theta<T>& first = items_[0].theta;
    prefetch_user<T>(group, tile, of(first.values));
    if (first.moved) prefetch_user<T>(group, tile, of(first.direction));
    if (tile.contiguous && group.shared[tile.first] < 0 && tile.count == kLanes<T> && one_permutation(group, tile)) {
      pack_side_by_side(g, tile);
      return;
    }
    for (const auto& [item, theta] : items_)
      for (int l = 0; l < tile.count; ++l) {
        const Index f = tile.contiguous ? tile.first + l : group.lanes[tile.first + l];
        const T* from = theta.at(plan_.copy_of(f), user_table(plan_, group, f), group.table_size);
        const Range<T> range = range_of(from, group.table_size);
        const double width = range.has_impossible ? std::numeric_limits<double>::infinity() : range.width();
        widths_[g][f] = std::max(widths_[g][f], width);
        if (group.shared[f] >= 0) continue;
        const Index* map = group.entry_maps[group.permutation[f]].data();
        T* to = item->tables.get() + group.table[f];
        const Index stride = group.table_stride[f];
        for (Index e = 0; e < group.table_size; ++e)
          to[e * stride] = packed_entry(from[map[e]], range.top(), context_.inverse[g][f]);
      }
  }

  static bool one_permutation(const Group& group, const FactorTile& tile) {
    for (int l = 1; l < tile.count; ++l)
      if (group.permutation[tile.first + l] != group.permutation[tile.first]) return false;
    return true;
  }

  template <class Read>
  RF_INLINE static V<T> gather(Read read) {
    V<T> lanes{};
    for (int l = 0; l < kLanes<T>; ++l) set_lane<T>(lanes, l, read(l));
    return lanes;
  }

  // The same for a full tile of tables that lie side by side, of all items at once: fetching theta is what costs.
  void pack_side_by_side(std::size_t g, const FactorTile& tile) {
    const Group& group = plan_.groups[g];
    const Index* map = group.entry_maps[group.permutation[tile.first]].data();
    const Theta<T>& first = items_[0].theta;
    const T *from[kLanes<T>], *slopes[kLanes<T>];
    int copy[kLanes<T>];
    for (int l = 0; l < kLanes<T>; ++l) {
      copy[l] = plan_.copy_of(tile.first + l);
      const Index start = user_table(plan_, group, tile.first + l);
      from[l] = first.values[copy[l]] + start;
      if (first.moved) slopes[l] = first.direction[copy[l]] + start;
    }
    V<T> high = splat<T>(kNegInf<T>), low = -high;
    for (Index e = 0; e < group.table_size; ++e) {
      const V<T> base = gather([&](int l) { return from[l][map[e]]; });
      const V<T> slope = first.moved ? gather([&](int l) { return slopes[l][map[e]]; }) : V<T>{};
      for (const auto& packed : items_) {
        V<T> value = base;
        if (first.moved) value += gather([&](int l) { return packed.theta.step[copy[l]]; }) * slope;
        high = vmax<T>(high, value);
        low = -vmax<T>(-low, -value);
        store<T>(packed.item->tables.get() + tile.table + e * tile.table_stride, value);
      }
    }
    for (int l = 0; l < kLanes<T>; ++l)
      widths_[g][tile.first + l] =
          low[l] == kNegInf<T> ? std::numeric_limits<double>::infinity() : double(high[l]) - double(low[l]);
    if (context_.kind == Kind::kMeanField) return;
    const V<T> top = select<T>(high == kNegInf<T>, V<T>{}, high), inverse = load<T>(&context_.inverse[g][tile.first]);
    for (const auto& [item, theta] : items_)
      for (Index e = 0; e < group.table_size; ++e) {
        T* at = item->tables.get() + tile.table + e * tile.table_stride;
        store<T>(at, (load<T>(at) - top) * inverse);
      }
  }

  // All factors that share a packed table have one counting number.
  void pack_shared(const SharedTable& shared, int copy, Item<T>& item, const Theta<T>& theta) const {
    const Group& group = plan_.groups[shared.group];
    const T* from = theta.at(copy, user_table(plan_, group, shared.factor), group.table_size);
    const Index* map = group.entry_maps[shared.permutation].data();
    const T top = range_of(from, group.table_size).top();
    for (Index e = 0; e < group.table_size; ++e)
      item.tables.get()[shared.address + e * plan_.copies + copy] =
          packed_entry(from[map[e]], top, context_.inverse[shared.group][shared.factor]);
  }

  void pack_messages(int threads) {
    const bool given = start_.given && context_.kind != Kind::kMeanField;
    const int buffers = plan_.sweep == Sweep::kAllAtOnce ? 2 : 1;
    const bool as_logarithms = !probabilities() || log_messages();
    for (const auto& [item, theta] : items_) {
      const bool made = given || item->couplings;
      for (int buffer = 0; buffer < buffers; ++buffer) {
        item->messages[buffer].allocate(plan_.message_size);
        item->messages[buffer].fill(as_logarithms || (made && buffer == 0) ? T(0) : T(1));
      }
      if (item->couplings) grow(threads, context_, unit(), *item);
    }
    for (std::size_t g = 0; g < plan_.groups.size() && given; ++g) {
      const auto& tiles = plan_.groups[g].all_tiles;
      in_shares(threads, tiles.size(), plan_.groups[g].table_size, [&](Index t) { add_given(g, tiles[t]); });
    }
    for (const auto& [item, theta] : items_)
      if ((given || item->couplings) && !as_logarithms)
        exponentiate<T>(threads, item->messages[0].get(), item->messages[0].size());
  }

  // Calls body(lanes, slot, given, high, low) for the messages of a tile to each slot: given(x) is the logarithm of
  // those to start from, `high` and `low` the largest and smallest over x.
  template <class Body>
  void for_given(std::size_t g, const FactorTile& tile, Body body) const {
    const Group& group = plan_.groups[g];
    with_lanes<T>(plan_, group, tile, [&](const auto& lanes) {
      for (int slot = 0; slot < group.arity; ++slot) {
        const T* from[kLanes<T>];
        for (int l = 0; l < kLanes<T>; ++l) {
          const Index f = lanes.factor(std::min<int>(l, tile.count - 1));
          from[l] = start_.rows[plan_.copy_of(f)] + user_message(plan_, group, f, slot);
        }
        auto given = [&](int x) { return gather([&](int l) { return from[l][x]; }); };
        V<T> high = splat<T>(kNegInf<T>), low = -high;
        for (int x = 0; x < group.dims[slot]; ++x) {
          const V<T> value = given(x);
          high = vmax<T>(high, value);
          low = -vmax<T>(-low, -value);
        }
        body(lanes, slot, given, high, low);
      }
    });
  }

  // A message given may vary more than its table lets it.
  void widen(std::size_t g, const FactorTile& tile) {
    for_given(g, tile, [&](const auto& lanes, int, const auto&, const V<T>& high, const V<T>& low) {
      for (int l = 0; l < tile.count; ++l) {
        const Index f = lanes.factor(l);
        if (!(low[l] == kNegInf<T>))
          widths_[g][f] = std::max(widths_[g][f], double(context_.counting[g][f]) * (double(high[l]) - double(low[l])));
      }
    });
  }

  // Adds the logarithms of the messages given, scaled as updates scale them. Messages with zeros are forgotten: what
  // was impossible in an earlier run may have become possible, and a zero would never recover; the first sweeps derive
  // it afresh.
  void add_given(std::size_t g, const FactorTile& tile) {
    const Group& group = plan_.groups[g];
    for_given(g, tile, [&](const auto& lanes, int slot, const auto& given, const V<T>& high, const V<T>& low) {
      const int n = group.dims[slot];
      V<T> scale = probabilities() && n == Ratio<T>::kStates ? given(0) : high;
      if (!probabilities()) {
        V<T> total{};
        for (int x = 0; x < n; ++x) total += vexp<T>(given(x) - high);
        scale += vlog<T>(total);
      }
      const V<T> c = lanes.per_factor(context_.counting[g]);
      for (int x = 0; x < n; ++x) {
        const V<T> message = select<T>(low == kNegInf<T>, V<T>{}, given(x) - scale);
        for (const auto& [item, theta] : items_) {
          T* to = item->messages[0].get();
          lanes.set_message(to, slot, x, lanes.message(to, slot, x) + c * message * unit());
        }
      }
    });
  }

  const Context<T>& context_;
  const Plan& plan_;
  const Start<T>& start_;
  const std::vector<Packed<T>>& items_;
  bool log_domain_ = false;
  std::vector<std::vector<double>> widths_;  // group -> factor: range of its log-potentials and c log m
};

// The beliefs mean field starts from: uniform over the possible states, or the marginals given.
template <class T>
void start_mean_field(const Plan& plan, Item<T>& item, const Theta<T>& theta, const Start<T>& start) {
  using std::exp;
  Ticker tick;
  for (Index p = 0; p < plan.num_nodes; ++p) {
    tick(plan.states[p]);
    const Index from = plan.node_start[plan.variable[p]];
    const int n = plan.states[p], copy = plan.copy_of(p);
    const T* given = theta.at(copy, from, n);
    T* b = item.beliefs.get() + plan.node_address[p];
    T total = 0;
    for (int x = 0; x < n; ++x) {
      const T weight = given[x] == kNegInf<T> ? T(0) : start.given ? exp(start.rows[copy][from + x]) : T(1);
      total += b[Index(x) * plan.node_stride[p]] = weight;
    }
    for (int x = 0; x < n; ++x) b[Index(x) * plan.node_stride[p]] /= total;
    if (copy < item.num_models()) item.models[copy].impossible |= !(total > 0);
  }
}

}  // namespace riskfield::RISKFIELD_ISA
