// Exact inference on forests for one instruction set: a batch of models as blocks of items, one vector each.
#include <atomic>
#include <cmath>
#include <limits>

#include "forest_block.hpp"
#include "run.hpp"
#include "threads.hpp"

namespace riskfield::RISKFIELD_ISA {
namespace {

// The smallest number that may occur besides 0: a product of one for every variable of a factor, one for its table and
// one more must not underflow.
double least_number(const ForestPlan& plan) { return std::pow(1e-300, 1.0 / (plan.most_arity + 1)); }

// What all blocks of a run have in common, whatever their numbers.
template <class T>
class AbstractBlock {
 public:
  virtual ~AbstractBlock() = default;
  virtual void up(const T* theta, void* scratch) = 0;
  virtual void statistics(T* out, void* scratch) = 0;
  virtual void marginals(T* out, bool nodes_only, void* scratch) = 0;
  virtual void messages(T* out, void* scratch) = 0;
  virtual void backward(const T* grad, bool nodes_only, T* grad_theta, void* scratch) = 0;
};

template <class T, class Numbers, class Entry>
class Block final : public AbstractBlock<T> {
 public:
  static constexpr int kWidth = Numbers::kWidth;
  using Scratch = ForestScratch<typename Numbers::Number>;
  using Passes = ForestBlock<Numbers, Entry>;

  Block(const ForestPlan& plan, std::vector<Index> items, double least, const Entry* tables, const double* shifts,
        void* memory, std::vector<double>& log_z, std::vector<char>& left_out)
      : plan_(plan),
        items_(std::move(items)),
        log_z_(log_z),
        left_out_(left_out),
        passes_(plan, least, tables, shifts, static_cast<typename Passes::Number*>(memory)) {}

  void up(const T* theta, void* scratch) override {
    passes_.up(rows_to_read(theta, plan_.theta_size), *static_cast<Scratch*>(scratch));
    for (std::size_t l = 0; l < items_.size(); ++l) {
      log_z_[items_[l]] = passes_.log_partition(static_cast<int>(l));
      left_out_[items_[l]] = passes_.saturated(static_cast<int>(l));
    }
  }
  void statistics(T* out, void* memory) override {
    Scratch& scratch = *static_cast<Scratch*>(memory);
    passes_.down(scratch);
    const auto rows = rows_to_write(out, plan_.theta_size);
    passes_.write_nodes(rows);
    passes_.write_tables(rows, scratch);
  }
  void marginals(T* out, bool nodes_only, void* memory) override {
    Scratch& scratch = *static_cast<Scratch*>(memory);
    passes_.down(scratch);
    const auto rows = rows_to_write(out, nodes_only ? plan_.node_size : plan_.mu_size);
    passes_.write_nodes(rows);
    if (!nodes_only) passes_.write_factors(rows, scratch);
  }
  void messages(T* out, void* memory) override {
    Scratch& scratch = *static_cast<Scratch*>(memory);
    passes_.down(scratch);
    passes_.write_messages(rows_to_write(out, plan_.user_message_size), scratch);
  }
  void backward(const T* grad, bool nodes_only, T* grad_theta, void* memory) override {
    Scratch& scratch = *static_cast<Scratch*>(memory);
    passes_.down(scratch);
    passes_.differentiate(rows_to_read(grad, nodes_only ? plan_.node_size : plan_.mu_size), nodes_only,
                          rows_to_write(grad_theta, plan_.theta_size), scratch);
  }

 private:
  // Spare lanes read the last item.
  LaneRows<const T, kWidth> rows_to_read(const T* matrix, Index size) const {
    LaneRows<const T, kWidth> rows;
    for (int l = 0; l < kWidth; ++l) rows.row[l] = matrix + items_[std::min<std::size_t>(l, items_.size() - 1)] * size;
    return rows;
  }
  // An item that this block cannot compute belongs to another one.
  LaneRows<T, kWidth> rows_to_write(T* matrix, Index size) const {
    LaneRows<T, kWidth> rows;
    for (int l = 0; l < kWidth; ++l) {
      const bool writes = l < static_cast<int>(items_.size()) && (!Numbers::kLimited || !left_out_[items_[l]]);
      rows.row[l] = writes ? matrix + items_[l] * size : nullptr;
    }
    return rows;
  }

  const ForestPlan& plan_;
  const std::vector<Index> items_;
  std::vector<double>& log_z_;
  std::vector<char>& left_out_;
  Passes passes_;
};

template <class T>
class EngineForestRun final : public ForestRun<T> {
 public:
  EngineForestRun(const ForestInput<T>& input, int threads)
      : plan_(input.plan), batch_(input.batch), log_z_(batch_), left_out_(batch_, input.wide) {
    const double least = least_number(*plan_);
    const bool shared = batch_ > 1 && share_tables(input.theta, least);
    if (!input.wide) {
      std::vector<std::vector<Index>> items(batch_ == 1 ? 1
                                                        : (batch_ + VectorNumbers::kWidth - 1) / VectorNumbers::kWidth);
      for (Index b = 0; b < batch_; ++b) items[b / VectorNumbers::kWidth].push_back(b);
      if (batch_ == 1)
        add<ScalarNumbers, double>(items, least, nullptr, nullptr, memory_);
      else if (shared)
        add<VectorNumbers, double>(items, least, tables_.data(), shifts_.data(), memory_);
      else
        add<VectorNumbers, V<double>>(items, least, nullptr, nullptr, memory_);
    }
    const std::size_t limited = blocks_.size();
    for_each_block(0, limited, threads, false,
                   [&](AbstractBlock<T>& block, void* scratch) { block.up(input.theta, scratch); });
    std::vector<std::vector<Index>> items;
    for (Index b = 0; b < batch_; ++b) {
      if (!left_out_[b]) continue;
      if (items.empty() || static_cast<int>(items.back().size()) == WideNumbers::kWidth) items.emplace_back();
      items.back().push_back(b);
    }
    add<WideNumbers, Wide>(items, least, nullptr, nullptr, wide_memory_);
    first_wide_ = limited;
    std::vector<char> left_out = left_out_;
    for_each_block(limited, blocks_.size(), threads, false,
                   [&](AbstractBlock<T>& block, void* scratch) { block.up(input.theta, scratch); });
    left_out_ = left_out;
  }

  void log_partition(double* out) const override { std::copy(log_z_.begin(), log_z_.end(), out); }

  void statistics(T* out, int threads) override {
    for_all(threads, false, [&](AbstractBlock<T>& block, void* scratch) { block.statistics(out, scratch); });
  }
  void marginals(T* out, bool nodes_only, int threads) override {
    for_all(threads, false, [&](AbstractBlock<T>& block, void* scratch) { block.marginals(out, nodes_only, scratch); });
    const Index size = nodes_only ? plan_->node_size : plan_->mu_size;
    for (Index b = 0; b < batch_; ++b)
      if (log_z_[b] == kNegInf<double>)
        std::fill(out + b * size, out + (b + 1) * size, std::numeric_limits<T>::quiet_NaN());
  }
  void messages(T* out, int threads) override {
    for_all(threads, false, [&](AbstractBlock<T>& block, void* scratch) { block.messages(out, scratch); });
  }
  void backward(const T* grad, bool nodes_only, T* grad_theta, int threads) override {
    for_all(threads, true,
            [&](AbstractBlock<T>& block, void* scratch) { block.backward(grad, nodes_only, grad_theta, scratch); });
  }

 private:
  // Adds a block for each set of items. Their memory is taken at once, since `take` keeps large pieces for later runs.
  template <class Numbers, class Entry>
  void add(const std::vector<std::vector<Index>>& blocks, double least, const Entry* tables, const double* shifts,
           Numbered<char>& memory) {
    const Index bytes = ForestBlock<Numbers, Entry>::memory_size(*plan_) * sizeof(typename Numbers::Number);
    memory = Numbered<char>(bytes * static_cast<Index>(blocks.size()));
    for (const std::vector<Index>& items : blocks)
      blocks_.push_back(std::make_unique<Block<T, Numbers, Entry>>(
          *plan_, items, least, tables, shifts, memory.get() + bytes * (&items - blocks.data()), log_z_, left_out_));
  }

  // If all items have the same tables, none of them saturated, compute their exponentials once.
  bool share_tables(const T* theta, double least) {
    for (const ForestPlan::Table& table : plan_->tables)
      for (Index b = 1; b < batch_; ++b)
        if (!std::equal(theta + table.theta, theta + table.theta + table.size(),
                        theta + b * plan_->theta_size + table.theta))
          return false;
    tables_.resize(plan_->table_size + kLanes<double>);
    for (const ForestPlan::Table& table : plan_->tables) {
      const Index* map = plan_->entry_maps[table.entries].data();
      const T* from = theta + table.theta;
      double* to = tables_.data() + table.place;
      const double largest = *std::max_element(from, from + table.size());
      const double shift = largest == kNegInf<double> ? 0 : largest;
      for (Index e = 0; e < table.size(); ++e) {
        to[e] = from[map[e]] - shift;
        if (to[e] > kNegInf<double> && to[e] < std::log(least)) return false;
      }
      shifts_.push_back(shift);
    }
    for (Index e = 0; e < plan_->table_size; e += kLanes<double>)
      store<double>(tables_.data() + e, vexp<double>(load<double>(tables_.data() + e)));
    return true;
  }

  template <class Body>
  void for_all(int threads, bool gradients, Body body) {
    for_each_block(0, first_wide_, threads, gradients, body);
    for_each_block(first_wide_, blocks_.size(), threads, gradients, body);
  }

  // Blocks [first, last) must have the same kind of numbers.
  template <class Body>
  void for_each_block(std::size_t first, std::size_t last, int threads, bool gradients, Body body) {
    if (first == last) return;
    std::atomic<std::size_t> next{first};
    const int team = static_cast<int>(std::min<std::size_t>(std::max(threads, 1), last - first));
    auto work = [&](auto scratch) {
      for (std::size_t k = next++; k < last; k = next++) body(*blocks_[k], &scratch);
    };
    parallel(team, [&](int) {
      if (first >= first_wide_)
        work(ForestScratch<Wide>(*plan_, gradients));
      else if (batch_ == 1)
        work(ForestScratch<double>(*plan_, gradients));
      else
        work(ForestScratch<V<double>>(*plan_, gradients));
    });
  }

  const std::shared_ptr<const ForestPlan> plan_;
  const Index batch_;
  std::vector<double> log_z_;
  std::vector<char> left_out_;  // items too saturated for doubles, which have blocks of wide numbers
  std::vector<double> tables_, shifts_;
  Numbered<char> memory_{0}, wide_memory_{0};
  std::vector<std::unique_ptr<AbstractBlock<T>>> blocks_;
  std::size_t first_wide_ = std::numeric_limits<std::size_t>::max();
};

}  // namespace

template <class T>
std::unique_ptr<ForestRun<T>> make_forest_run(const ForestInput<T>& input, int threads) {
  return std::make_unique<EngineForestRun<T>>(input, threads);
}
template std::unique_ptr<ForestRun<double>> make_forest_run<double>(const ForestInput<double>&, int);
template std::unique_ptr<ForestRun<float>> make_forest_run<float>(const ForestInput<float>&, int);

}  // namespace riskfield::RISKFIELD_ISA
