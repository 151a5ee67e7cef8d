// Checkpoints: what a run keeps of some of its sweeps, to run those that follow again.
#pragma once

#include "inside.hpp"

namespace riskfield::RISKFIELD_ISA {

// Calls body(number) for every number that makes up the messages, in a fixed order.
template <class T, class Body>
void for_each_number(const Context<T>& context, Item<T>& item, Body body) {
  T* messages = item.messages[item.current].get();
  for (const Group& group : context.plan->groups)
    for (Index f = 0; f < group.count; ++f)
      for (int slot = 0; slot < group.arity; ++slot) {
        const int n = group.dims[slot];
        for (int x = keeps_ratio(context, item, n) ? Ratio<T>::kFirstStored : 0; x < n; ++x)
          body(messages[group.message[f * group.arity + slot] + Index(x) * group.message_stride[f]]);
      }
}

template <class T>
void keep_checkpoint(const Context<T>& context, Item<T>& item) {
  item.checkpoints.emplace_back();
  Buffer<T>& kept = item.checkpoints.back();
  if (context.kind == Kind::kMeanField) {
    kept.copy(item.beliefs);
    return;
  }
  Index size = 0;
  for_each_number(context, item, [&](T&) { ++size; });
  kept.allocate(size);
  T* to = kept.get();
  for_each_number(context, item, [&](T& number) { *to++ = number; });
}

// Puts back what a checkpoint holds, and the beliefs that follow from it.
template <class T>
void return_to(const Context<T>& context, Item<T>& item, const Buffer<T>& checkpoint, Scratch<T>& scratch) {
  if (context.kind == Kind::kMeanField) {
    item.beliefs.copy(checkpoint);
    return;
  }
  const T* from = checkpoint.get();
  for_each_number(context, item, [&](T& number) { number = *from++; });
  update_nodes(context, item, Index(0), static_cast<Index>(context.plan->node_tiles.size()),
               item.messages[item.current].get(), scratch);
}

}  // namespace riskfield::RISKFIELD_ISA
