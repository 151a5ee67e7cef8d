// From log-potentials, in the storage of a plan, to what sweeps on probabilities read: probabilities and, between
// binary variables, one number for each table (see ratio.hpp).
#pragma once

#include "threads.hpp"
#include "updates.hpp"

namespace riskfield::RISKFIELD_ISA {

// Calls body(0) ... body(count - 1); `work` is how much each of them does (see Ticker).
template <class Body>
void in_shares(int threads, Index count, Index work, Body body) {
  parallel(threads, [&](int thread) {
    const Share part = share(0, count, thread, threads);
    Ticker tick;
    for (Index k = part.begin; k < part.end; ++k) {
      body(k);
      tick(work);
    }
  });
}

// Calls body(first, count) for each vector of [0, size); the last one may have fewer than kLanes numbers.
template <class T, class Body>
void in_vectors(int threads, Index size, Body body) {
  constexpr Index kBlock = 4096;
  in_shares(threads, (size + kBlock - 1) / kBlock, kBlock, [&](Index block) {
    const Index end = std::min(size, (block + 1) * kBlock);
    for (Index k = block * kBlock; k < end; k += kLanes<T>)
      body(k, static_cast<int>(std::min<Index>(kLanes<T>, end - k)));
  });
}

template <class T>
void exponentiate(int threads, T* values, Index size) {
  in_vectors<T>(threads, size,
                [&](Index k, int count) { store_some<T>(values + k, vexp<T>(load<T>(values + k)), count); });
}

// From logarithms of `size` tables, whose entries are rows `stride` apart, to w and d of both variables.
template <class T>
void couple(int threads, T* tables, Index stride, Index size) {
  in_vectors<T>(threads, size, [&](Index k, int count) {
    T* at = tables + k;
    const V<T> a = load_some<T>(at, count), b = load_some<T>(at + stride, count),
               c = load_some<T>(at + 2 * stride, count), d = load_some<T>(at + 3 * stride, count);
    const T half = T(0.5);
    store_some<T>(at, vexp<T>(half * ((a - b) - (c - d))), count);
    store_some<T>(at + stride, half * ((a + b) - (c + d)), count);
    store_some<T>(at + 2 * stride, half * ((a + c) - (b + d)), count);
  });
}

// All tables of an item that computes with probabilities.
template <class T>
void finish_tables(int threads, const Plan& plan, Item<T>& item) {
  T* tables = item.tables.get();
  for (const SharedTable& shared : plan.shared_tables) {
    const Group& group = plan.groups[shared.group];
    if (group.in_rows())
      couple(1, tables + shared.address, plan.copies, plan.copies);
    else
      exponentiate(1, tables + shared.address, group.table_size * plan.copies);
  }
  for (const Group& group : plan.groups) {
    item.couplings |= group.in_rows();
    if (group.in_rows()) {
      const Index row = group.tables_size / group.table_size;
      couple(threads, tables + group.tables, row, row);
      item.table_numbers -= group.tables_size - row;
    } else {
      exponentiate(threads, tables + group.tables, group.tables_size);
    }
  }
}

// Potentials and first messages, as logarithms times `unit`, get the functions of one variable that were taken out of
// the tables. Those of a variable are added up as its belief is, in an order that does not depend on the threads. The
// messages are 0 before.
template <class T>
void grow(int threads, const Context<T>& context, T unit, Item<T>& item) {
  const Plan& plan = *context.plan;
  T* messages = item.messages[0].get();
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    const Group& group = plan.groups[g];
    if (!group.in_rows()) continue;
    in_shares(threads, group.all_tiles.size(), 2 * kLanes<T>, [&](Index t) {
      with_lanes<T>(plan, group, group.all_tiles[t], [&](const auto& lanes) {
        const V<T> c = lanes.per_factor(context.counting[g]) * unit;
        for (int slot = 0; slot < 2; ++slot)
          lanes.set_message(messages, slot, 1, c * lanes.table_entry(item.tables.get(), 1 + slot));
      });
    });
  }
  in_shares(threads, plan.node_tiles.size(), 4 * kLanes<T>, [&](Index t) {
    const NodeTile& tile = plan.node_tiles[t];
    for (int l = 0; l < tile.count && tile.states == Ratio<T>::kStates; ++l) {
      T& potential = item.node_theta.get()[tile.address + l];
      for (Index d = tile.connections; d < tile.connections + tile.degree; ++d) {
        const Connection& one = plan.connections[d];
        potential +=
            messages[one.contiguous ? one.message + l + one.stride
                                    : plan.lane_messages[one.message + l] + plan.lane_strides[one.message + l]];
      }
    }
  });
}

}  // namespace riskfield::RISKFIELD_ISA
