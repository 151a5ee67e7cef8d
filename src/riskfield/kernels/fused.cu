// All sweeps of a pairwise model in one launch, and the way back through them: a block for each connected part of each
// batch item, which walks through the levels of the schedule with nothing but barriers between them.
//
// REAL, STATES and THREADS are defined before this text, which is compiled where it runs. Arrays are in the layouts of
// FactorGraph, one after the other for the items of a batch. Messages and beliefs are logarithms of arbitrary scale:
// each message is taken relative to the largest cavity it was made from, so none of them drifts.
//
// A link is what a variable hears from a factor; `links` has a row for each, ordered by the places of the variables. A
// graph and its schedule come as
//   parts      part -> its first level; one more for the end
//   levels     level -> its first place in `order`; one more for the end
//   order      variables, level by level
//   first      place in `order` -> its first link; one more for the end
//   renewed    links whose messages are renewed at a level on the way forwards, level by level; then those on the way
//              backwards, level by level
//   starts     level, forwards and then backwards -> its first place in `renewed`; one more for the end
//   counting   link -> c
//   node_rate  variable -> 1 / c^
//   sizes      of the node part of theta, of theta, of all messages

#ifndef NEG_INF
#define NEG_INF (-__int_as_float(0x7f800000))
#endif

// Columns of `links`: the other variable, where the messages to this one and to the other lie, where the table lies and
// how far apart the states of this variable and of the other are in it, whether it is renewed on the way forwards.
enum { kNeighbour, kHeard, kSaid, kTable, kOwnStride, kOtherStride, kForwards, kColumns };

__device__ inline REAL cavity_of(REAL belief, REAL message) {
  // A zero message means an impossible state, which stays impossible.
  return message == NEG_INF ? NEG_INF : belief - message;
}

__global__ void __launch_bounds__(THREADS, 2)
    sweeps_forward(const int* parts, const int* levels, const int* order, const int* first, const int* links,
                   const int* renewed, const int* starts, const REAL* counting, const REAL* node_rate,
                   const long long* sizes, int num_parts, int sweeps, const REAL* theta, REAL* messages, REAL* beliefs,
                   REAL* earlier, REAL* said, REAL* cavities) {
  const int part = blockIdx.x % num_parts, begin = parts[part], end = parts[part + 1], count = end - begin;
  const long long item = blockIdx.x / num_parts, batch = gridDim.x / num_parts;
  theta += item * sizes[1];
  messages += item * sizes[2];
  beliefs += item * sizes[0];
  // What the last sweep changes on its two ways: beliefs before it, then those half-way.
  REAL* const kept[2] = {earlier + item * sizes[0], earlier + (batch + item) * sizes[0]};
  for (int sweep = 0; sweep < sweeps; ++sweep) {
    const long long taped = (sweep * batch + item) * sizes[2];
    for (int turn = 0; turn < 2 * count; ++turn) {
      if (sweep == sweeps - 1 && turn % count == 0) {
        for (int k = threadIdx.x; k < (levels[end] - levels[begin]) * STATES; k += blockDim.x) {
          const int at = order[levels[begin] + k / STATES] * STATES + k % STATES;
          kept[turn / count][at] = beliefs[at];
        }
        __syncthreads();
      }
      const int level = turn < count ? begin + turn : end - 1 - (turn - count);
      const int* from = starts + (turn < count ? level : parts[num_parts] + level);
      for (int k = threadIdx.x; k < (from[1] - from[0]) * STATES; k += blockDim.x) {
        const int row = renewed[from[0] + k / STATES], x = k % STATES;
        const int* link = links + row * kColumns;
        const REAL* belief = beliefs + link[kNeighbour] * STATES;
        const REAL* answer = messages + link[kSaid];
        const REAL* table = theta + link[kTable] + x * link[kOwnStride];
        const REAL rate = 1 / counting[row];
        // What is read is asked for all at once: waiting for memory is what takes time here.
        REAL cavity[STATES], entry[STATES];
        for (int y = 0; y < STATES; ++y) entry[y] = table[y * link[kOtherStride]];
        for (int y = 0; y < STATES; ++y) cavity[y] = cavity_of(belief[y], answer[y]);
        // Relative to the largest cavity, which all states of the message share; then to the largest of this state.
        REAL top = cavity[0], own = cavity[0], largest = NEG_INF, sum = 0;
        for (int y = 1; y < STATES; ++y) {
          top = max(top, cavity[y]);
          if (y == x) own = cavity[y];
        }
        if (top == NEG_INF) top = 0;
        for (int y = 0; y < STATES; ++y) {
          entry[y] = entry[y] * rate + (cavity[y] - top);
          largest = max(largest, entry[y]);
        }
        for (int y = 0; y < STATES; ++y) sum += exp(entry[y] - (largest == NEG_INF ? REAL(0) : largest));
        const REAL message = largest == NEG_INF ? NEG_INF : log(sum) + largest;
        messages[link[kHeard] + x] = message;
        if (said) {
          said[taped + link[kHeard] + x] = message;
          cavities[taped + link[kSaid] + x] = own - top;
        }
      }
      __syncthreads();
      for (int k = threadIdx.x; k < (levels[level + 1] - levels[level]) * STATES; k += blockDim.x) {
        const int place = levels[level] + k / STATES, variable = order[place], x = k % STATES;
        REAL total = theta[variable * STATES + x];
        for (int row = first[place]; row < first[place + 1]; ++row)
          total += counting[row] * messages[links[row * kColumns + kHeard] + x];
        beliefs[variable * STATES + x] = total * node_rate[variable];
      }
      __syncthreads();
    }
  }
}

// Gradients of beliefs are in two places: `grad_beliefs` of what they are used for after the sweeps, and `through`, by
// message, of the cavities they have entered since. Those of messages that are about to be renewed wait in `told`.
__global__ void __launch_bounds__(THREADS, 2)
    sweeps_backward(const int* parts, const int* levels, const int* order, const int* first, const int* links,
                    const int* renewed, const int* starts, const REAL* counting, const REAL* node_rate,
                    const long long* sizes, int num_parts, int sweeps, const REAL* theta, const REAL* said,
                    const REAL* cavities, REAL* grad_messages, REAL* grad_beliefs, REAL* told, REAL* through,
                    REAL* grad_theta) {
  const int part = blockIdx.x % num_parts, begin = parts[part], end = parts[part + 1], count = end - begin;
  const long long item = blockIdx.x / num_parts, batch = gridDim.x / num_parts;
  theta += item * sizes[1];
  grad_theta += item * sizes[1];
  grad_messages += item * sizes[2];
  told += item * sizes[2];
  through += item * sizes[2];
  grad_beliefs += item * sizes[0];
  for (int sweep = sweeps; sweep-- > 0;) {
    const REAL* made = said + (sweep * batch + item) * sizes[2];
    const REAL* cavity = cavities + (sweep * batch + item) * sizes[2];
    for (int turn = 2 * count; turn-- > 0;) {
      const int level = turn < count ? begin + turn : end - 1 - (turn - count);
      const int* from = starts + (turn < count ? level : parts[num_parts] + level);
      for (int k = threadIdx.x; k < (levels[level + 1] - levels[level]) * STATES; k += blockDim.x) {
        const int place = levels[level] + k / STATES, variable = order[place], x = k % STATES;
        REAL grad = grad_beliefs[variable * STATES + x];
        for (int row = first[place]; row < first[place + 1]; ++row) grad += through[links[row * kColumns + kHeard] + x];
        grad *= node_rate[variable];
        grad_beliefs[variable * STATES + x] = 0;
        grad_theta[variable * STATES + x] += grad;
        for (int row = first[place]; row < first[place + 1]; ++row) {
          const int* link = links + row * kColumns;
          const int heard = link[kHeard] + x;
          const REAL total = grad_messages[heard] + counting[row] * grad;
          const bool anew = (link[kForwards] != 0) == (turn < count);
          if (anew) told[heard] = total;
          grad_messages[heard] = anew ? REAL(0) : total;
          through[heard] = 0;
        }
      }
      __syncthreads();
      for (int k = threadIdx.x; k < (from[1] - from[0]) * STATES; k += blockDim.x) {
        const int row = renewed[from[0] + k / STATES], y = k % STATES;  // a state of the neighbour
        const int* link = links + row * kColumns;
        const REAL rate = 1 / counting[row], weight = cavity[link[kSaid] + y];
        const int at = link[kTable] + y * link[kOtherStride], stride = link[kOwnStride], heard = link[kHeard];
        REAL grad[STATES], message[STATES], entry[STATES], sofar[STATES];
        for (int x = 0; x < STATES; ++x) entry[x] = theta[at + x * stride];
        for (int x = 0; x < STATES; ++x) message[x] = made[heard + x];
        for (int x = 0; x < STATES; ++x) grad[x] = told[heard + x];
        for (int x = 0; x < STATES; ++x) sofar[x] = grad_theta[at + x * stride];
        const REAL of_message = grad_messages[link[kSaid] + y], of_belief = through[link[kSaid] + y];
        // The gradient of a message sums to zero, since its scale does not matter, but for rounding; that would grow
        // from sweep to sweep.
        REAL excess = 0, sum = 0;
        int possible = 0;
        for (int x = 0; x < STATES; ++x)
          if (message[x] != NEG_INF) {
            excess += grad[x];
            ++possible;
          }
        if (possible > 0) excess /= possible;
        for (int x = 0; x < STATES; ++x) {
          const REAL share =
              message[x] == NEG_INF ? REAL(0) : (grad[x] - excess) * exp(entry[x] * rate + weight - message[x]);
          sofar[x] += share * rate;
          sum += share;
        }
        for (int x = 0; x < STATES; ++x) grad_theta[at + x * stride] = sofar[x];
        grad_messages[link[kSaid] + y] = of_message - sum;
        through[link[kSaid] + y] = of_belief + sum;
      }
      __syncthreads();
    }
  }
  // What is left reaches the beliefs that the first sweep began from.
  for (int k = threadIdx.x; k < (levels[end] - levels[begin]) * STATES; k += blockDim.x) {
    const int place = levels[begin] + k / STATES, at = order[place] * STATES + k % STATES;
    for (int row = first[place]; row < first[place + 1]; ++row)
      grad_beliefs[at] += through[links[row * kColumns + kHeard] + k % STATES];
  }
}
