// The inner loop of the backward pass over pairs of binary variables in probabilities: along one run of contiguous
// tiles whose factors have tables of their own and belong to one part. It does what reverse_message does, with all that
// tiles have in common looked up before the loop.
#pragma once

#include "reverse.hpp"

namespace riskfield::RISKFIELD_ISA {

template <class T>
class ReversePairs {
 public:
  // Whether a run that begins with this tile can be gone through here.
  static bool suits(const Group& group, const FactorTile& tile) {
    return group.in_rows() && !tile.shared && !tile.tied && !tile.between;
  }

  // `messages` has the gradients of messages.
  ReversePairs(const Context<T>& context, const Item<T>& item, const TileRange& range, const FactorTile& tile,
               T* messages, Gradients<T>& grad)
      : context_(context),
        factors_(context.counting[range.group].data() + tile.first),
        inverses_(context.inverse[range.group].data() + tile.first),
        tables_(item.tables.get() + tile.table),
        table_gradients_(grad.tables + tile.table) {
    const Group& group = context.plan->groups[range.group];
    const Operand &own = group.operands[tile.operands + range.slot],
                  &other = group.operands[tile.operands + 1 - range.slot];
    slot_ = range.slot;
    messages_ = messages + group.gradients + 2 * tile.first;
    gathered_ = grad.node_theta + own.node;
    beliefs_ = grad.beliefs + other.node;
    state1_ = item.state1_possible ? nullptr : item.beliefs.get() + other.node + other.node_stride;
    uniform_ = context.uniform[range.group];
    rate_ = splat<T>(uniform_ * (T(1) - context.damping));
    inverse_ = splat<T>(T(1) / uniform_);
  }

  // Goes back through the tiles, the last of which has `last` factors; calls next(tape) before each.
  template <class Next>
  RF_INLINE void run(Index tiles, int last, const T*& tape, Next next) {
    for (; tiles > 1; --tiles) {
      next(tape);
      one<true>(kLanes<T>, tape);
    }
    next(tape);
    last == kLanes<T> ? one<true>(last, tape) : one<false>(last, tape);
  }

 private:
  template <bool Whole>
  RF_INLINE void one(int count, const T*& tape) {
    auto get = [count](const T* from) RF_LAMBDA { return Whole ? load<T>(from) : load_some<T>(from, count); };
    auto put = [count](T* to, V<T> v) RF_LAMBDA { Whole ? store<T>(to, v) : store_some<T>(to, v, count); };
    T *own = messages_ + slot_ * count, *other = messages_ + (1 - slot_) * count;
    V<T> scale = rate_, inverse = inverse_;
    if (!(uniform_ > T(0))) {
      scale = load<T>(factors_ + shift_) * (T(1) - context_.damping);
      inverse = load<T>(inverses_ + shift_);
    }
    const V<T> w = load<T>(tables_ + shift_), first = load<T>(tape),
               second = state1_ ? load<T>(state1_ + shift_) : splat<T>(1);
    const V<T> gathered = -get(gathered_ + shift_), found = get(own) + gathered;
    put(own, context_.damping * found - gathered);
    const BinaryGradient<T> made(w, first, second, found * scale);
    put(table_gradients_ + shift_, get(table_gradients_ + shift_) + made.corner);
    put(beliefs_ + shift_, get(beliefs_ + shift_) + made.sum);
    put(other, get(other) + made.sum * inverse);
    tape += kLanes<T>;
    messages_ += 2 * count;
    shift_ += kLanes<T>;
  }

  const Context<T>& context_;
  const T *const factors_, *const inverses_, *const tables_;
  T* const table_gradients_;
  int slot_;
  const T *gathered_, *state1_;
  T *messages_, *beliefs_;
  T uniform_;
  V<T> rate_, inverse_;
  Index shift_ = 0;
};

}  // namespace riskfield::RISKFIELD_ISA
