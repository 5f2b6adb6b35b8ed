#include <fmt/format.h>
#include <omp.h>

#include <array>
#include <atomic>
#include <map>
#include <thread>

#include "nn/core/pass_cost.h"
#include "nn/core/simd.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/cpu/gemm.h"
#include "nn/ops/cpu/onednn.h"
#include "nn/ops/kernels.h"

namespace topknot {

Variable lstm(const Variable& x, std::int64_t batch, const LstmWeights& weights, const LstmState& state) {
  const Shape &in = x.shape(), &w = weights.input.shape();
  const std::int64_t width = w[0] / 4;
  TOPKNOT_CHECK(
      in.rank() == 2 && batch > 0 && in[0] > 0 && in[0] % batch == 0 && w == Shape({4 * width, in[1]}),
      fmt::format("lstm: input {} for a batch of {}, weight {}", in.str(), batch, w.str()));
  TOPKNOT_CHECK(
      weights.recurrent.shape() == Shape({4 * width, width}) &&
          weights.input_bias.shape() == Shape({4 * width}) &&
          weights.recurrent_bias.shape() == Shape({4 * width}),
      fmt::format("lstm: recurrent weight {} for a width of {}", weights.recurrent.shape().str(), width));
  for (const Buffer* buffer : {state.hidden, state.cell})
    TOPKNOT_CHECK(state.carried()
                      ? buffer && static_cast<std::int64_t>(buffer->values.size()) >= batch * width
                      : !buffer,
                  fmt::format("lstm: the state has no room for a batch of {}", batch));
  const auto& kernels = kernels_for<LstmKernels>(x);
  const LstmCall call{x.value(),
                      weights.input.value(),
                      weights.recurrent.value(),
                      weights.input_bias.value(),
                      weights.recurrent_bias.value(),
                      state,
                      batch,
                      in[0] / batch,
                      width};
  const double of_input = 2.0 * static_cast<double>(in[0] * w.numel()),
               recurrent = 2.0 * static_cast<double>(in[0] * 4 * width * width);
  PassCost::add_flops(of_input + recurrent);
  OpState kept;
  const Tensor y = kernels.forward(call, kept);
  return {"lstm",
          y,
          {x, weights.input, weights.recurrent, weights.input_bias, weights.recurrent_bias},
          [=, &kernels](const Tensor& dy) {
            PassCost::add_flops(of_input * (weights.input.requires_grad() + x.requires_grad()) +
                                recurrent * (weights.recurrent.requires_grad() + 1));
            LstmGradients out{weights.input.gradient_target(), weights.recurrent.gradient_target(),
                              weights.input_bias.gradient_target(), weights.recurrent_bias.gradient_target(),
                              x.input_gradient()};
            kernels.backward(call, kept, y, dy, out);
            x.accumulate_grad(std::move(out.x.tensor));
          }};
}

namespace {

// On a CPU the inputs of all steps go through one matrix product, then each step is a product with the
// recurrent weight and one fused loop over the gates. The steps of a batch are small (20 rows): the weight is
// packed once for all of them, and a thread keeps its units through all steps: a step costs one barrier.
//
// In bfloat16 the operands of all products are rounded: inputs, hidden states, weights, and the gradients of
// the gates' sums. Sums, gates and cells are fp32.

constexpr std::int64_t kGates = 4;  // i, f, g, o

// One thread's units [begin, end) and its products of a step; contiguous results, as oneDNN is fast with.
struct UnitRange {
  std::int64_t begin, end;
  std::unique_ptr<Product> forward;   // h_{t-1} W_hh^T of one gate, columns of these units
  std::unique_ptr<Product> backward;  // da_t W_hh, columns of these units

  UnitRange(std::int64_t first, std::int64_t last, std::int64_t batch, std::int64_t width, DType type)
      : begin(first), end(last) {
    ProductForm form{
        .m = batch, .n = units(), .k = width, .type = type, .b_type = DType::f32, .b_transposed = true};
    form.b_stride = width;
    forward = std::make_unique<Product>(form, Product::Order::packed);
    form.k = kGates * width;
    form.b_transposed = false;
    backward = std::make_unique<Product>(form, Product::Order::packed);
  }
  std::int64_t units() const { return end - begin; }
};

const std::vector<UnitRange>& ranges_for(std::int64_t batch, std::int64_t width, DType type) {
  thread_local std::map<std::array<std::int64_t, 4>, std::vector<UnitRange>> kept;
  const std::int64_t threads = std::min<std::int64_t>(team_size(), width);
  std::vector<UnitRange>& ranges = kept[{batch, width, threads, type == DType::bf16}];
  if (!ranges.empty()) return ranges;
  const MadeForOneThread one;
  std::vector<UnitRange> made;
  for (std::int64_t t = 0; t < threads; ++t)
    made.emplace_back(width * t / threads, width * (t + 1) / threads, batch, width, type);
  return ranges = std::move(made);
}

// Lets a step's threads wait for each other; they spin, then yield. One that fails ends the wait of all.
class StepBarrier {
 public:
  // False if a thread has failed.
  bool wait(int threads) {
    constexpr int kSpins = 4000;
    const int round = round_.load();
    if (waiting_.fetch_add(1) + 1 == threads) {
      waiting_ = 0;
      round_ = round + 1;
    } else {
      for (int spins = 0; round_.load() == round && !failed_; ++spins)
        if (spins > kSpins) std::this_thread::yield();
    }
    return !failed_;
  }
  void fail() { failed_ = true; }

 private:
  std::atomic<int> waiting_{0}, round_{0};
  std::atomic<bool> failed_{false};
};

// Runs begin(range), then step(range, its result, s) for s = 0, 1, ..., a thread a range, all step by step.
template <class Begin, class Step>
void run_steps(const std::vector<UnitRange>& ranges, std::int64_t steps, const Begin& begin,
               const Step& step) {
  StepBarrier barrier;
  const auto work = [&](std::size_t thread,
                        std::size_t threads) {  // the system may give fewer threads than ranges
    std::vector<decltype(begin(ranges[0]))> mine;
    for (std::size_t r = thread; r < ranges.size(); r += threads) mine.push_back(begin(ranges[r]));
    for (std::int64_t s = 0; s < steps; ++s) {
      for (std::size_t k = 0; k < mine.size(); ++k) step(ranges[thread + k * threads], mine[k], s);
      if (threads > 1 && !barrier.wait(static_cast<int>(threads))) return;
    }
  };
  if (ranges.size() == 1) return work(0, 1);
  std::exception_ptr error;
#pragma omp parallel num_threads(static_cast <int>(ranges.size()))
  {
    try {
      work(static_cast<std::size_t>(omp_get_thread_num()), static_cast<std::size_t>(omp_get_num_threads()));
    } catch (...) {
      barrier.fail();
#pragma omp critical(topknot_lstm_steps)
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

// The rows of a step and the units [begin, end) of a thread; a row of gates has `width` each of i, f, g, o.
struct GateRows {
  std::int64_t batch, width, begin, end;
};

// Computes n units (1 to 16) of one row. gates: the inputs' part of the sums, which become the gates' values;
// recurrent: the hidden state's part, that of one gate `stride` elements after the last one's.
template <class T>
TOPKNOT_INLINE void units_forward(std::size_t n, std::int64_t width, std::int64_t stride,
                                  const float* recurrent, float* gates, const float* cell_before, float* cell,
                                  T* hidden) {
  const Lanes i = sigmoid_lanes(load_part(gates, n) + load_part(recurrent, n)),
              f = sigmoid_lanes(load_part(gates + width, n) + load_part(recurrent + stride, n)),
              g = tanh_lanes(load_part(gates + 2 * width, n) + load_part(recurrent + 2 * stride, n)),
              o = sigmoid_lanes(load_part(gates + 3 * width, n) + load_part(recurrent + 3 * stride, n));
  const Lanes c = f * load_part(cell_before, n) + i * g;
  store_part(gates, i, n);
  store_part(gates + width, f, n);
  store_part(gates + 2 * width, g, n);
  store_part(gates + 3 * width, o, n);
  store_part(cell, c, n);
  store_part(hidden, o * tanh_lanes(c), n);
}
template <class T>
TOPKNOT_INLINE void rows_forward(const GateRows& r, const float* recurrent, float* gates,
                                 const float* cell_before, float* cell, T* hidden) {
  const std::int64_t units = r.end - r.begin;
  for (std::int64_t b = 0; b < r.batch; ++b, recurrent += units, gates += 4 * r.width, cell_before += r.width,
                    cell += r.width, hidden += r.width)
    for (std::int64_t j = 0; j < units; j += kLanes) {
      const std::int64_t at = r.begin + j;
      units_forward(std::min<std::size_t>(kLanes, static_cast<std::size_t>(units - j)), r.width,
                    r.batch * units, recurrent + j, gates + at, cell_before + at, cell + at, hidden + at);
    }
}
TOPKNOT_MULTIVERSION void gates_forward(const GateRows& r, const float* recurrent, float* gates,
                                        const float* cell_before, float* cell, float* hidden) {
  rows_forward(r, recurrent, gates, cell_before, cell, hidden);
}
TOPKNOT_MULTIVERSION void gates_forward(const GateRows& r, const float* recurrent, float* gates,
                                        const float* cell_before, float* cell, BFloat16* hidden) {
  rows_forward(r, recurrent, gates, cell_before, cell, hidden);
}

// Computes the gradients of n units. dlater: the part of dh that the next step makes; sums: the gradients of
// the gates' sums; may be the gates. dcell: of c_t from later steps, becomes that of c_{t-1}.
template <class T>
TOPKNOT_INLINE void units_backward(std::size_t n, std::int64_t width, const float* gates,
                                   const float* cell_before, const float* cell, const T* dy,
                                   const float* dlater, float* dcell, T* sums) {
  const Lanes i = load_part(gates, n), f = load_part(gates + width, n), g = load_part(gates + 2 * width, n),
              o = load_part(gates + 3 * width, n);
  const Lanes t = tanh_lanes(load_part(cell, n)), dh = load_part(dy, n) + load_part(dlater, n);
  const Lanes dc = load_part(dcell, n) + dh * o * (1.0f - t * t);
  store_part(sums, dc * g * i * (1.0f - i), n);
  store_part(sums + width, dc * load_part(cell_before, n) * f * (1.0f - f), n);
  store_part(sums + 2 * width, dc * i * (1.0f - g * g), n);
  store_part(sums + 3 * width, dh * t * o * (1.0f - o), n);
  store_part(dcell, dc * f, n);
}
template <class T>
TOPKNOT_INLINE void rows_backward(const GateRows& r, const float* gates, const float* cell_before,
                                  const float* cell, const T* dy, const float* dlater, float* dcell,
                                  T* sums) {
  const std::int64_t units = r.end - r.begin;
  for (std::int64_t b = 0; b < r.batch; ++b, gates += 4 * r.width, sums += 4 * r.width,
                    cell_before += r.width, cell += r.width, dy += r.width, dlater += units, dcell += r.width)
    for (std::int64_t j = 0; j < units; j += kLanes) {
      const std::int64_t at = r.begin + j;
      units_backward(std::min<std::size_t>(kLanes, static_cast<std::size_t>(units - j)), r.width, gates + at,
                     cell_before + at, cell + at, dy + at, dlater + j, dcell + at, sums + at);
    }
}
TOPKNOT_MULTIVERSION void gates_backward(const GateRows& r, const float* gates, const float* cell_before,
                                         const float* cell, const float* dy, const float* dlater,
                                         float* dcell, float* sums) {
  rows_backward(r, gates, cell_before, cell, dy, dlater, dcell, sums);
}
TOPKNOT_MULTIVERSION void gates_backward(const GateRows& r, const float* gates, const float* cell_before,
                                         const float* cell, const BFloat16* dy, const float* dlater,
                                         float* dcell, BFloat16* sums) {
  rows_backward(r, gates, cell_before, cell, dy, dlater, dcell, sums);
}

struct LstmKept {
  Tensor gates;   // [steps * batch, 4 width]: values of i, f, g, o
  Tensor cells;   // [(steps + 1) * batch, width]: c_{-1}, c_0, ...
  Tensor hidden;  // [batch, width]: h_{-1}, in the activations' type T
};

template <class T>
Tensor forward_in(const LstmCall& call, OpState& state) {
  const DType type = call.x.dtype();
  const std::int64_t rows = call.x.dim(0), width = call.width, gates = kGates * width,
                     step_size = call.batch * width;
  const auto kept = std::make_shared<LstmKept>(
      LstmKept{Tensor::empty({rows, gates}), Tensor::empty({rows + call.batch, width}),
               Tensor::empty({call.batch, width}, Layout::plain, {}, type)});
  Tensor y = Tensor::empty({rows, width}, Layout::plain, {}, type), bias = Tensor::empty({gates});
  const bool carried = call.state.carried();
  for (std::int64_t i = 0; i < step_size; ++i) {
    const auto at = static_cast<std::size_t>(i);
    narrow(carried ? call.state.hidden->values[at] : 0.0f, kept->hidden.as<T>()[i]);
    kept->cells.data()[i] = carried ? call.state.cell->values[at] : 0.0f;
  }
  for (std::int64_t j = 0; j < gates; ++j)
    bias.data()[j] = call.input_bias.data()[j] + call.recurrent_bias.data()[j];
  matmul({.m = rows,
          .n = gates,
          .k = call.x.dim(1),
          .type = type,
          .b_type = DType::f32,
          .b_transposed = true,
          .bias = true},
         call.x.data(), call.input.data(), kept->gates.data(), bias.data());
  struct Thread {
    std::vector<Tensor> weights;  // of each gate
    Tensor sums;                  // the hidden state's part: [4, batch, units]
  };
  run_steps(
      ranges_for(call.batch, width, type), call.steps,
      [&](const UnitRange& range) {
        Thread mine{{}, Tensor::empty({kGates, call.batch, range.units()})};
        for (std::int64_t gate = 0; gate < kGates; ++gate)
          mine.weights.push_back(
              range.forward->pack(call.recurrent.data() + (gate * width + range.begin) * width));
        return mine;
      },
      [&](const UnitRange& range, Thread& mine, std::int64_t s) {
        const T* before = s == 0 ? kept->hidden.as<T>() : y.as<T>() + (s - 1) * step_size;
        float* sums = mine.sums.data();
        for (const Tensor& weight : mine.weights) {
          range.forward->run(before, weight.data(), sums);
          sums += call.batch * range.units();
        }
        float* cell = kept->cells.data() + s * step_size;
        gates_forward({call.batch, width, range.begin, range.end}, mine.sums.data(),
                      kept->gates.data() + s * kGates * step_size, cell, cell + step_size,
                      y.as<T>() + s * step_size);
      });
  state = kept;
  if (!carried) return y;
  const T* last = y.as<T>() + (call.steps - 1) * step_size;
  for (std::int64_t i = 0; i < step_size; ++i)
    call.state.hidden->values[static_cast<std::size_t>(i)] = widened(last[i]);
  std::copy_n(kept->cells.data() + call.steps * step_size, step_size, call.state.cell->values.data());
  return y;
}

template <class T>
void backward_in(const LstmCall& call, const OpState& state, const Tensor& y, const Tensor& dy,
                 LstmGradients& out) {
  const DType type = call.x.dtype();
  const auto& kept = state_as<LstmKept>(state);
  const std::int64_t rows = call.x.dim(0), width = call.width, gates = kGates * width, in = call.x.dim(1),
                     step_size = call.batch * width;
  // In f32 over the gates' values, which are not read again.
  Tensor dsums = type == DType::f32 ? kept.gates : Tensor::empty({rows, gates}, Layout::plain, {}, type);
  Tensor dcell = Tensor::zeros({call.batch, width});
  struct Thread {
    Tensor weight, dlater;  // dlater: [batch, units]
  };
  run_steps(
      ranges_for(call.batch, width, type), call.steps,
      [&](const UnitRange& range) {
        return Thread{range.backward->pack(call.recurrent.data() + range.begin),
                      Tensor::zeros({call.batch, range.units()})};
      },
      [&](const UnitRange& range, Thread& mine, std::int64_t back) {
        const std::int64_t s = call.steps - 1 - back;
        T* sums = dsums.as<T>() + s * kGates * step_size;
        const float* cell = kept.cells.data() + s * step_size;
        if (back > 0) range.backward->run(sums + kGates * step_size, mine.weight.data(), mine.dlater.data());
        gates_backward({call.batch, width, range.begin, range.end},
                       kept.gates.data() + s * kGates * step_size, cell, cell + step_size,
                       dy.as<T>() + s * step_size, mine.dlater.data(), dcell.data(), sums);
      });
  const Tensor dbias = sum_over_rows(dsums);
  for (const GradientTarget& target : {out.input_bias, out.recurrent_bias})
    if (target.data) write_gradient(target, dbias);
  if (out.input.data)
    matmul({.m = gates, .n = in, .k = rows, .type = type, .a_transposed = true, .add = out.input.accumulate},
           dsums.data(), call.x.data(), out.input.data);
  if (out.recurrent.data) {
    ProductForm form{.m = gates, .n = width, .k = call.batch, .type = type, .a_transposed = true};
    form.add = out.recurrent.accumulate;
    matmul(form, dsums.data(), kept.hidden.data(), out.recurrent.data);
    form.k = rows - call.batch;
    form.add = true;
    if (call.steps > 1) matmul(form, dsums.as<T>() + kGates * step_size, y.data(), out.recurrent.data);
  }
  if (out.x.tensor.defined())
    write_or_add(out.x, [&](Tensor& dx) {
      matmul({.m = rows, .n = in, .k = gates, .type = type, .b_type = DType::f32, .c_type = type},
             dsums.data(), call.input.data(), dx.data());
    });
}

Tensor lstm_forward(const LstmCall& call, OpState& state) {
  return by_type(call.x.dtype(), [&](auto type) { return forward_in<decltype(type)>(call, state); });
}

void lstm_backward(const LstmCall& call, const OpState& state, const Tensor& y, const Tensor& dy,
                   LstmGradients& out) {
  by_type(call.x.dtype(), [&](auto type) { backward_in<decltype(type)>(call, state, y, dy, out); });
}

const bool lstm_registered =
    add_cpu_kernels<LstmKernels>({.forward = lstm_forward, .backward = lstm_backward});

}  // namespace
}  // namespace topknot
