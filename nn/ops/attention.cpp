#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "nn/core/pass_cost.h"
#include "nn/ops/cpu/attention.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/kernels.h"

namespace topknot {

Variable attention(const Variable& qkv, std::int64_t heads, std::int64_t kv_heads, std::int64_t batch,
                   bool causal) {
  const Shape& in = qkv.shape();
  TOPKNOT_CHECK(heads > 0 && kv_heads > 0 && heads % kv_heads == 0,
                fmt::format("attention: {} heads cannot share {} key-value heads evenly", heads, kv_heads));
  TOPKNOT_CHECK(in.rank() == 2 && batch > 0 && in[0] > 0 && in[0] % batch == 0,
                fmt::format("attention: input {} for a batch of {} sequences", in.str(), batch));
  TOPKNOT_CHECK(
      in[1] > 0 && in[1] % (heads + 2 * kv_heads) == 0,
      fmt::format("attention: rows of {} elements for {} heads of queries and {} each of keys and values",
                  in[1], heads, kv_heads));
  const AttentionShape shape{heads, kv_heads, batch, in[0] / batch, in[1] / (heads + 2 * kv_heads), causal};
  const auto& kernels = kernels_for<AttentionKernels>(qkv);
  Tensor y =
      Tensor::empty({in[0], heads * shape.width}, Layout::plain, qkv.value().device(), qkv.value().dtype());
  PassCost::add_flops(shape.flops());
  const OpState state = kernels.forward(shape, qkv.value(), y);
  return {"attention", y, {qkv}, [=, &kernels](const Tensor& dy) {
            PassCost::add_flops(2 * shape.flops());  // not counting what is computed again
            Tensor dqkv = Tensor::empty_like(qkv.value());
            kernels.backward(shape, qkv.value(), y, dy, state, dqkv);
            qkv.accumulate_grad(std::move(dqkv));
          }};
}

namespace attention_cpu {
namespace {

// One head's rows from a token on, of `heads` heads in a row; token t of sequence b is row t * batch + b.
template <class T>
HeadRows<T> head_rows(const AttentionShape& s, T* tensor, std::int64_t heads, std::int64_t b,
                      std::int64_t head, std::int64_t token) {
  const std::int64_t row = heads * s.width;
  return {tensor + (token * s.batch + b) * row + head * s.width, s.batch * row};
}

float log2_scale(const AttentionShape& s) {  // of scores, which are in units of log 2
  return static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(s.width)));
}

// Blocks of queries or keys of a sequence's heads.
std::int64_t block_count(const AttentionShape& s) {
  return (s.steps + kBlock - 1) / kBlock;
}

// Calls a worker of each thread with (head, first block, last block + 1) for the heads' blocks that it has,
// its range of the work. weight(block): the pairs of blocks that a block of a head stands for.
void share_blocks(std::int64_t heads, std::int64_t blocks, const auto& weight, const auto& make_worker) {
  std::int64_t each = 0;
  for (std::int64_t i = 0; i < blocks; ++i) each += weight(i);
  parallel_ranges(heads * each, [&](int, std::int64_t begin, std::int64_t end) {
    auto worker = make_worker();
    for (std::int64_t head = begin / each; head * each < end; ++head) {
      std::int64_t at = head * each, first = 0;
      while (at < begin) at += weight(first++);
      std::int64_t last = first;
      while (last < blocks && at < end) at += weight(last++);
      if (first < last) worker(head, first, last);
    }
  });
}

// The shared part of the passes: the call, and one head's keys and values, copied as far as needed.
template <class T>
class Pass {
 public:
  Pass(const AttentionShape& s, const Tensor& qkv)
      : s_(s),
        qkv_(qkv.as<T>()),
        padded_(round_up(s.width, kPanel)),
        blocks_(block_count(s)),
        keys_(Tensor::empty({s.steps, padded_})),
        values_(Tensor::empty({s.steps, padded_})),
        rows_(Tensor::empty({kBlock, padded_})),
        columns_(Tensor::empty({s.width, kBlock})),
        scores_(Tensor::empty({kBlock, kBlock})) {}

 protected:
  std::int64_t in_heads() const { return s_.heads + 2 * s_.kv_heads; }
  std::int64_t size(std::int64_t block) const { return std::min(kBlock, s_.steps - block * kBlock); }
  // Blocks of keys that a block of queries meets.
  std::int64_t met(std::int64_t block) const { return s_.causal ? block + 1 : blocks_; }
  Block block(std::int64_t queries, std::int64_t keys) const {
    return {size(queries), size(keys), s_.causal ? std::max(-kBlock, (keys - queries) * kBlock) : -kBlock};
  }
  // The first `blocks` blocks of a key-value head of a sequence.
  void need_keys(std::int64_t b, std::int64_t head, std::int64_t blocks) {
    if (b * s_.kv_heads + head != head_) head_ = b * s_.kv_heads + head, ready_ = 0;
    const std::int64_t until = std::min(s_.steps, blocks * kBlock), n = until - ready_;
    if (n <= 0) return;
    copy_rows(head_rows(s_, qkv_, in_heads(), b, s_.heads + head, ready_), n, s_.width, keys(ready_));
    copy_rows(head_rows(s_, qkv_, in_heads(), b, s_.heads + s_.kv_heads + head, ready_), n, s_.width,
              values(ready_));
    ready_ = until;
  }
  float* keys(std::int64_t token) { return keys_.data() + token * padded_; }
  float* values(std::int64_t token) { return values_.data() + token * padded_; }
  // A block of queries: rows_ as they are, columns_ transposed and scaled.
  void load_queries(std::int64_t b, std::int64_t head, std::int64_t block) {
    const std::int64_t n = size(block);
    copy_rows(head_rows(s_, qkv_, in_heads(), b, head, block * kBlock), n, s_.width, rows_.data());
    transpose_rows(rows_.data(), n, s_.width, log2_scale(s_), columns_.data());
  }
  // to [keys][kBlock] = a b^T for a block of keys or values and columns that transpose_rows() made.
  void scores(const Block& block, const float* a, const Tensor& columns, Tensor& to) const {
    product({a, padded_, 1, columns.data(), kPanel, s_.width * kPanel, to.data(), kBlock},
            {block.keys, block.queries, s_.width}, Cut::columns, block.shift, false);
  }
  // to [queries] (+)= weights [keys][kBlock] ^T rows of keys
  void to_queries(const Block& block, const Tensor& weights, const float* rows, Tensor& to, bool add) const {
    product({weights.data(), 1, kBlock, rows, padded_, kPanel, to.data(), padded_},
            {block.queries, padded_, block.keys}, Cut::depth_end, block.shift, add);
  }
  // to [keys] += weights [keys][kBlock] rows of queries
  void to_keys(const Block& block, const Tensor& weights, const Tensor& rows, float* to) const {
    product({weights.data(), kBlock, 1, rows.data(), padded_, kPanel, to, padded_},
            {block.keys, padded_, block.queries}, Cut::depth_begin, block.shift, true);
  }

  const AttentionShape& s_;
  const T* qkv_;
  std::int64_t padded_, blocks_, head_ = -1, ready_ = 0;
  Tensor keys_, values_;  // [steps, padded]
  Tensor rows_, columns_, scores_;
};

template <class T>
class ForwardPass : Pass<T> {
  using Base = Pass<T>;
  using Base::s_;

 public:
  // log_sums: [batch * heads, steps], as the backward pass reads them.
  ForwardPass(const AttentionShape& s, const Tensor& qkv, Tensor& y, Tensor& log_sums)
      : Base(s, qkv), y_(y.as<T>()), log_sums_(log_sums.data()), out_(Tensor::empty_like(Base::rows_)) {}

  void operator()(std::int64_t head, std::int64_t first, std::int64_t last) {
    const std::int64_t b = head / s_.heads, h = head % s_.heads;
    for (std::int64_t i = first; i < last; ++i) {
      Base::need_keys(b, h / s_.share(), Base::met(i));
      Base::load_queries(b, h, i);
      std::fill_n(softmax_.top, kBlock, -std::numeric_limits<float>::infinity());
      std::fill_n(softmax_.sum, kBlock, 0.0f);
      for (std::int64_t j = 0; j < Base::met(i); ++j) {
        const Block block = Base::block(i, j);
        Base::scores(block, Base::keys(j * kBlock), Base::columns_, Base::scores_);
        softmax_block(block, Base::scores_.data(), softmax_);
        if (j > 0) scale_rows(out_.data(), block.queries, Base::padded_, softmax_.factor);
        Base::to_queries(block, Base::scores_, Base::values(j * kBlock), out_, j > 0);
      }
      const std::int64_t n = Base::size(i);
      float* log_sums = log_sums_ + head * s_.steps + i * kBlock;
      for (std::int64_t q = 0; q < n; ++q) {
        log_sums[q] = softmax_.top[q] + std::log2(softmax_.sum[q]);
        softmax_.factor[q] = 1 / softmax_.sum[q];
      }
      write_rows(out_.data(), n, s_.width, softmax_.factor, 1, head_rows(s_, y_, s_.heads, b, h, i * kBlock));
    }
  }

 private:
  T* y_;
  float* log_sums_;
  Softmax softmax_;
  Tensor out_;
};

// dV = P^T dO,  dS = P (dO V^T - D),  D = rowsum(dO O),  dQ = dS K,  dK = dS^T Q  (Dao, algorithm 2).
template <class T>
class BackwardPass : Pass<T> {
  using Base = Pass<T>;
  using Base::s_;

 public:
  BackwardPass(const AttentionShape& s, const Tensor& qkv, const Tensor& y, const Tensor& dy,
               const Tensor& log_sums, Tensor& dqkv)
      : Base(s, qkv),
        y_(y.as<T>()),
        dy_(dy.as<T>()),
        log_sums_(log_sums.data()),
        dqkv_(dqkv.as<T>()),
        dkeys_(Tensor::empty_like(Base::keys_)),
        dvalues_(Tensor::empty_like(Base::keys_)),
        dy_rows_(Tensor::empty_like(Base::rows_)),
        y_rows_(Tensor::empty_like(Base::rows_)),
        dqueries_(Tensor::empty_like(Base::rows_)),
        dy_columns_(Tensor::empty_like(Base::columns_)),
        grads_(Tensor::empty_like(Base::scores_)) {}

  // The gradients of blocks [first, last) of the keys and values of a key-value head, b * kv_heads + head; of
  // the queries that share it too, if these are all blocks.
  void keys(std::int64_t head, std::int64_t first, std::int64_t last, bool queries) {
    const std::int64_t b = head / s_.kv_heads, g = head % s_.kv_heads, begin = first * kBlock,
                       n = std::min(last * kBlock, s_.steps) - begin;
    Base::need_keys(b, g, last);
    for (Tensor* sums : {&dkeys_, &dvalues_}) std::fill_n(sums->data(), n * Base::padded_, 0.0f);
    for (std::int64_t h = g * s_.share(); h < (g + 1) * s_.share(); ++h)
      for (std::int64_t i = s_.causal ? first : 0; i < Base::blocks_; ++i) {
        load(b, h, i);
        for (std::int64_t j = first; j < std::min(last, Base::met(i)); ++j)
          add(i, j, queries, (j - first) * kBlock * Base::padded_);
        if (queries) write_queries(b, h, i);
      }
    write_rows(dkeys_.data(), n, s_.width, &scale_, 0,
               head_rows(s_, dqkv_, Base::in_heads(), b, s_.heads + g, begin));
    write_rows(dvalues_.data(), n, s_.width, &one_, 0,
               head_rows(s_, dqkv_, Base::in_heads(), b, s_.heads + s_.kv_heads + g, begin));
  }

  // The gradients of blocks [first, last) of the queries of a head, b * heads + head.
  void queries(std::int64_t head, std::int64_t first, std::int64_t last) {
    const std::int64_t b = head / s_.heads, h = head % s_.heads;
    for (std::int64_t i = first; i < last; ++i) {
      Base::need_keys(b, h / s_.share(), Base::met(i));
      load(b, h, i);
      for (std::int64_t j = 0; j < Base::met(i); ++j) add(i, j, true, -1);
      write_queries(b, h, i);
    }
  }

 private:
  void load(std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::int64_t n = Base::size(i), first = i * kBlock;
    Base::load_queries(b, h, i);
    copy_rows(head_rows(s_, dy_, s_.heads, b, h, first), n, s_.width, dy_rows_.data());
    copy_rows(head_rows(s_, y_, s_.heads, b, h, first), n, s_.width, y_rows_.data());
    transpose_rows(dy_rows_.data(), n, s_.width, 1.0f, dy_columns_.data());
    std::fill_n(log_sum_, kBlock, 0.0f);
    std::fill_n(d_, kBlock, 0.0f);
    std::copy_n(log_sums_ + (b * s_.heads + h) * s_.steps + first, n, log_sum_);
    row_products(dy_rows_.data(), y_rows_.data(), n, Base::padded_, d_);
  }
  // Adds what queries' block i and keys' block j give. to_keys: place in dkeys_ and dvalues_, or negative.
  void add(std::int64_t i, std::int64_t j, bool to_queries, std::int64_t to_keys) {
    const Block block = Base::block(i, j);
    Base::scores(block, Base::keys(j * kBlock), Base::columns_, Base::scores_);
    Base::scores(block, Base::values(j * kBlock), dy_columns_, grads_);
    score_gradients(block, log_sum_, d_, Base::scores_.data(), grads_.data());
    if (to_keys >= 0) {
      Base::to_keys(block, Base::scores_, dy_rows_, dvalues_.data() + to_keys);
      Base::to_keys(block, grads_, Base::rows_, dkeys_.data() + to_keys);
    }
    if (to_queries) Base::to_queries(block, grads_, Base::keys(j * kBlock), dqueries_, j > 0);
  }
  void write_queries(std::int64_t b, std::int64_t h, std::int64_t i) {
    write_rows(dqueries_.data(), Base::size(i), s_.width, &scale_, 0,
               head_rows(s_, dqkv_, Base::in_heads(), b, h, i * kBlock));
  }

  const T *y_, *dy_;
  const float* log_sums_;
  T* dqkv_;
  const float scale_ = static_cast<float>(1 / std::sqrt(static_cast<double>(s_.width))), one_ = 1;
  Tensor dkeys_, dvalues_;                                   // [steps, padded]
  Tensor dy_rows_, y_rows_, dqueries_, dy_columns_, grads_;  // of a block
  float log_sum_[kBlock], d_[kBlock];
};

OpState attention_forward(const AttentionShape& s, const Tensor& qkv, Tensor& y) {
  const auto log_sums = std::make_shared<Tensor>(Tensor::empty({s.batch * s.heads, s.steps}));
  by_type(qkv.dtype(), [&](auto type) {
    share_blocks(
        s.batch * s.heads, block_count(s), [&](std::int64_t i) { return s.causal ? i + 1 : 1; },
        [&] { return ForwardPass<decltype(type)>(s, qkv, y, *log_sums); });
  });
  return log_sums;
}

void attention_backward(const AttentionShape& s, const Tensor& qkv, const Tensor& y, const Tensor& dy,
                        const OpState& state, Tensor& dqkv) {
  const auto& log_sums = state_as<Tensor>(state);
  const std::int64_t blocks = block_count(s), groups = s.batch * s.kv_heads, threads = team_size();
  by_type(qkv.dtype(), [&](auto type) {
    using Backward = BackwardPass<decltype(type)>;
    const auto make = [&] { return Backward(s, qkv, y, dy, log_sums, dqkv); };
    // A thread for each head of keys computes all; if that leaves too many threads idle, one for some of its
    // blocks, and then one for some blocks of queries: 14 products for 10. The sums are the same.
    if (10 * ((groups + threads - 1) / threads) * threads <= 14 * groups)
      return parallel_ranges(groups, [&](int, std::int64_t begin, std::int64_t end) {
        Backward pass = make();
        for (std::int64_t head = begin; head < end; ++head) pass.keys(head, 0, blocks, true);
      });
    share_blocks(
        groups, blocks, [&](std::int64_t j) { return s.causal ? blocks - j : 1; },
        [&] {
          return [pass = make()](std::int64_t head, std::int64_t first, std::int64_t last) mutable {
            pass.keys(head, first, last, false);
          };
        });
    share_blocks(
        s.batch * s.heads, blocks, [&](std::int64_t i) { return s.causal ? i + 1 : 1; },
        [&] {
          return [pass = make()](std::int64_t head, std::int64_t first, std::int64_t last) mutable {
            pass.queries(head, first, last);
          };
        });
  });
}

const bool attention_registered =
    add_cpu_kernels<AttentionKernels>({.forward = attention_forward, .backward = attention_backward});

}  // namespace
}  // namespace attention_cpu
}  // namespace topknot
