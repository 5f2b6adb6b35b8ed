// The LSTM layer on a CPU: the inputs of all steps go through one matrix product, then each step is a product with the
// recurrent weight and one fused loop over the gates. The steps of a batch are small (20 rows): the weight is packed once
// for all of them, and each thread has some of the layer's units through all steps, so that a step costs one barrier.
//
// In bfloat16 the operands of all products are rounded: inputs, hidden states, weights, and the gradients of the gates' sums.
// Sums, gates and cells are fp32.
#include "nn/ops/lstm.h"

#include <array>
#include <atomic>
#include <map>
#include <thread>

#include "nn/core/simd_math.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/cpu/gemm.h"
#include "nn/ops/cpu/onednn.h"
#include "nn/ops/layout.h"

namespace topknot {
namespace {

constexpr std::int64_t kGates = 4;  // i, f, g, o

// A product c += a w of single threads, for one weight that many products share: `rows` x `depth` times `depth` x
// `columns`; a in `type`, the weight given in f32 and packed in `type`, c f32. Strides are in elements, `lda` and `ldc` of
// rows; the weight's element (k, n) lies at k * stride_k + n * stride_n.
class PackedProduct {
 public:
  PackedProduct(std::int64_t rows, std::int64_t columns, std::int64_t depth, std::int64_t stride_k,
                std::int64_t stride_n, std::int64_t lda, std::int64_t ldc, DType type) {
    using dnnl::memory;
    constexpr auto f32 = memory::data_type::f32;
    const memory::desc a({rows, depth}, onednn_type(type), memory::dims{lda, 1}),
        c({rows, columns}, f32, memory::dims{ldc, 1}),
        plain({depth, columns}, f32, memory::dims{stride_k, stride_n}),
        any({depth, columns}, onednn_type(type), memory::format_tag::any);
    dnnl::post_ops add;
    add.append_sum(1.0f);
    dnnl::primitive_attr attributes = user_scratchpad();
    attributes.set_post_ops(add);
    const dnnl::matmul::primitive_desc product({a, any, c}, attributes, dnnl_cpu_engine());
    const memory::desc packed = product.weights_desc();
    product_ = std::make_unique<DnnlKernel>(
        dnnl::matmul(product),
        DnnlKernel::Arguments{{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, packed}, {DNNL_ARG_DST, c}},
        product.scratchpad_desc(), 1);
    packed_floats_ = static_cast<std::int64_t>((packed.get_size() + 3) / 4);
    const dnnl::reorder::primitive_desc pack(dnnl_cpu_engine(), plain, dnnl_cpu_engine(), packed,
                                             user_scratchpad());
    pack_ = std::make_unique<DnnlKernel>(dnnl::reorder(pack),
                                         DnnlKernel::Arguments{{DNNL_ARG_FROM, plain}, {DNNL_ARG_TO, packed}},
                                         pack.scratchpad_desc(), 1);
  }
  Tensor pack(const float* weight) const {
    Tensor packed = Tensor::empty({packed_floats_});
    pack_->run(0, {weight, packed.data()});
    return packed;
  }
  void add(const void* a, const Tensor& packed, float* c) const { product_->run(0, {a, packed.data(), c}); }

 private:
  std::unique_ptr<DnnlKernel> product_, pack_;
  std::int64_t packed_floats_ = 0;
};

// One thread's units [begin, end) and the products of a step.
struct UnitRange {
  std::int64_t begin, end;
  // h_{t-1} W_hh^T, columns of these units: of all gates at once where the units are all, else gate by gate.
  std::vector<PackedProduct> forward;
  std::unique_ptr<PackedProduct> backward;  // da_t W_hh, columns of these units

  UnitRange(std::int64_t first, std::int64_t last, std::int64_t batch, std::int64_t width, DType type)
      : begin(first), end(last) {
    const std::int64_t gates = kGates * width, columns = end - begin == width ? gates : end - begin;
    for (std::int64_t at = 0; at < gates; at += std::max(columns, width))
      forward.emplace_back(batch, columns, width, 1, width, width, gates, type);
    backward = std::make_unique<PackedProduct>(batch, end - begin, gates, width, 1, gates, width, type);
  }
};

const std::vector<UnitRange>& ranges_for(std::int64_t batch, std::int64_t width, DType type) {
  thread_local std::map<std::array<std::int64_t, 4>, std::vector<UnitRange>> kept;
  const int most = omp_get_max_threads();
  const std::int64_t threads = std::min<std::int64_t>(most, width);
  std::vector<UnitRange>& ranges = kept[{batch, width, threads, type == DType::bf16}];
  if (!ranges.empty()) return ranges;
  omp_set_num_threads(1);  // a primitive keeps the thread count it was made under
  try {
    for (std::int64_t t = 0; t < threads; ++t)
      ranges.emplace_back(width * t / threads, width * (t + 1) / threads, batch, width, type);
  } catch (...) {
    ranges.clear();
    omp_set_num_threads(most);
    throw;
  }
  omp_set_num_threads(most);
  return ranges;
}

// Lets the threads of a step wait for each other; they have a core each for most of the time, so they spin before they
// yield. One that fails ends the wait of all.
class StepBarrier {
 public:
  // False where a thread has failed.
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

// Runs begin(range) and then step(range, its result, s) for s = 0, 1, ..., the ranges on a thread each; all have made a
// step before one makes the next.
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

// Rows of one step; a row of gates has `width` each of i, f, g, o.
struct GateRows {
  std::int64_t batch, width, begin, end;  // units [begin, end)
};

// Of n units (1 to 16) of one row. gates: the sums without biases, which become the gates' values.
template <class T>
TOPKNOT_INLINE void units_forward(std::size_t n, std::int64_t width, const float* bias, float* gates,
                                  const float* cell_before, float* cell, T* hidden) {
  const Lanes i = sigmoid_lanes(load_part(gates, n) + load_part(bias, n)),
              f = sigmoid_lanes(load_part(gates + width, n) + load_part(bias + width, n)),
              g = tanh_lanes(load_part(gates + 2 * width, n) + load_part(bias + 2 * width, n)),
              o = sigmoid_lanes(load_part(gates + 3 * width, n) + load_part(bias + 3 * width, n));
  const Lanes c = f * load_part(cell_before, n) + i * g;
  store_part(gates, i, n);
  store_part(gates + width, f, n);
  store_part(gates + 2 * width, g, n);
  store_part(gates + 3 * width, o, n);
  store_part(cell, c, n);
  store_part(hidden, o * tanh_lanes(c), n);
}
template <class T>
TOPKNOT_INLINE void rows_forward(const GateRows& r, const float* bias, float* gates, const float* cell_before,
                                 float* cell, T* hidden) {
  for (std::int64_t b = 0; b < r.batch;
       ++b, gates += 4 * r.width, cell_before += r.width, cell += r.width, hidden += r.width)
    for (std::int64_t j = r.begin; j < r.end; j += kLanes)
      units_forward(std::min<std::size_t>(kLanes, static_cast<std::size_t>(r.end - j)), r.width, bias + j,
                    gates + j, cell_before + j, cell + j, hidden + j);
}
TOPKNOT_MULTIVERSION void gates_forward(const GateRows& r, const float* bias, float* gates,
                                        const float* cell_before, float* cell, float* hidden) {
  rows_forward(r, bias, gates, cell_before, cell, hidden);
}
TOPKNOT_MULTIVERSION void gates_forward(const GateRows& r, const float* bias, float* gates,
                                        const float* cell_before, float* cell, BFloat16* hidden) {
  rows_forward(r, bias, gates, cell_before, cell, hidden);
}

// Of n units. sums: the gradients of the gates' sums; may be the gates. dcell: of c_t from later steps, becomes that of
// c_{t-1}.
template <class T>
TOPKNOT_INLINE void units_backward(std::size_t n, std::int64_t width, const float* gates,
                                   const float* cell_before, const float* cell, const float* dhidden,
                                   float* dcell, T* sums) {
  const Lanes i = load_part(gates, n), f = load_part(gates + width, n), g = load_part(gates + 2 * width, n),
              o = load_part(gates + 3 * width, n);
  const Lanes t = tanh_lanes(load_part(cell, n)), dh = load_part(dhidden, n);
  const Lanes dc = load_part(dcell, n) + dh * o * (1.0f - t * t);
  store_part(sums, dc * g * i * (1.0f - i), n);
  store_part(sums + width, dc * load_part(cell_before, n) * f * (1.0f - f), n);
  store_part(sums + 2 * width, dc * i * (1.0f - g * g), n);
  store_part(sums + 3 * width, dh * t * o * (1.0f - o), n);
  store_part(dcell, dc * f, n);
}
template <class T>
TOPKNOT_INLINE void rows_backward(const GateRows& r, const float* gates, const float* cell_before,
                                  const float* cell, const float* dhidden, float* dcell, T* sums) {
  for (std::int64_t b = 0; b < r.batch; ++b, gates += 4 * r.width, sums += 4 * r.width,
                    cell_before += r.width, cell += r.width, dhidden += r.width, dcell += r.width)
    for (std::int64_t j = r.begin; j < r.end; j += kLanes)
      units_backward(std::min<std::size_t>(kLanes, static_cast<std::size_t>(r.end - j)), r.width, gates + j,
                     cell_before + j, cell + j, dhidden + j, dcell + j, sums + j);
}
TOPKNOT_MULTIVERSION void gates_backward(const GateRows& r, const float* gates, const float* cell_before,
                                         const float* cell, const float* dhidden, float* dcell, float* sums) {
  rows_backward(r, gates, cell_before, cell, dhidden, dcell, sums);
}
TOPKNOT_MULTIVERSION void gates_backward(const GateRows& r, const float* gates, const float* cell_before,
                                         const float* cell, const float* dhidden, float* dcell,
                                         BFloat16* sums) {
  rows_backward(r, gates, cell_before, cell, dhidden, dcell, sums);
}

struct LstmKept {
  Tensor gates;   // [steps * batch, 4 width]: values of i, f, g, o
  Tensor cells;   // [(steps + 1) * batch, width]: c_{-1}, c_0, ...
  Tensor hidden;  // [batch, width]: h_{-1}, in the activations' type T
  Tensor input;   // W_ih in T
};

template <class T>
Tensor forward_in(const LstmCall& call, OpState& state) {
  const DType type = call.x.dtype();
  const std::int64_t rows = call.x.dim(0), width = call.width, gates = kGates * width,
                     step_size = call.batch * width;
  const auto kept = std::make_shared<LstmKept>(LstmKept{
      Tensor::empty({rows, gates}), Tensor::empty({rows + call.batch, width}),
      Tensor::empty({call.batch, width}, Layout::plain, {}, type), in_form(call.input, Layout::plain, type)});
  Tensor y = Tensor::empty({rows, width}, Layout::plain, {}, type), bias = Tensor::empty({gates});
  const bool carried = call.state.carried();
  for (std::int64_t i = 0; i < step_size; ++i) {
    const auto at = static_cast<std::size_t>(i);
    narrow(carried ? call.state.hidden->values[at] : 0.0f, kept->hidden.as<T>()[i]);
    kept->cells.data()[i] = carried ? call.state.cell->values[at] : 0.0f;
  }
  for (std::int64_t j = 0; j < gates; ++j)
    bias.data()[j] = call.input_bias.data()[j] + call.recurrent_bias.data()[j];
  matmul(false, true, rows, gates, call.x.dim(1), type, call.x.data(), kept->input.data(), 0.0f,
         kept->gates.data());
  run_steps(
      ranges_for(call.batch, width, type), call.steps,
      [&](const UnitRange& range) {
        std::vector<Tensor> packed;
        for (std::size_t k = 0; k < range.forward.size(); ++k)
          packed.push_back(range.forward[k].pack(
              call.recurrent.data() + (static_cast<std::int64_t>(k) * width + range.begin) * width));
        return packed;
      },
      [&](const UnitRange& range, const std::vector<Tensor>& packed, std::int64_t s) {
        float* sums = kept->gates.data() + s * kGates * step_size;
        const T* before = s == 0 ? kept->hidden.as<T>() : y.as<T>() + (s - 1) * step_size;
        for (std::size_t k = 0; k < packed.size(); ++k)
          range.forward[k].add(before, packed[k], sums + static_cast<std::int64_t>(k) * width + range.begin);
        float* cell = kept->cells.data() + s * step_size;
        gates_forward({call.batch, width, range.begin, range.end}, bias.data(), sums, cell, cell + step_size,
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
void backward_in(const LstmCall& call, const OpState& state, const Tensor& y, Tensor dy, LstmGradients& out) {
  const DType type = call.x.dtype();
  const auto& kept = state_as<LstmKept>(state);
  const std::int64_t rows = call.x.dim(0), width = call.width, gates = kGates * width,
                     step_size = call.batch * width;
  // dh, to which later steps add.
  Tensor dh = in_form(dy, Layout::plain, DType::f32);
  if (type == DType::f32) {
    dy = Tensor();
    if (!dh.exclusive()) {
      Tensor copy = Tensor::empty_like(dh);
      std::copy_n(dh.data(), dh.numel(), copy.data());
      dh = copy;
    }
  }
  // In f32 over the gates' values, which are not read again.
  Tensor dsums = type == DType::f32 ? kept.gates : Tensor::empty({rows, gates}, Layout::plain, {}, type);
  Tensor dcell = Tensor::zeros({call.batch, width});
  run_steps(
      ranges_for(call.batch, width, type), call.steps,
      [&](const UnitRange& range) { return range.backward->pack(call.recurrent.data() + range.begin); },
      [&](const UnitRange& range, const Tensor& packed, std::int64_t back) {
        const std::int64_t s = call.steps - 1 - back;
        T* sums = dsums.as<T>() + s * kGates * step_size;
        const float* cell = kept.cells.data() + s * step_size;
        // Later steps' part of dh, which all units of theirs make.
        if (back > 0)
          range.backward->add(sums + kGates * step_size, packed, dh.data() + s * step_size + range.begin);
        gates_backward({call.batch, width, range.begin, range.end},
                       kept.gates.data() + s * kGates * step_size, cell, cell + step_size,
                       dh.data() + s * step_size, dcell.data(), sums);
      });
  bias_gradient(dsums, out.input_bias);
  bias_gradient(dsums, out.recurrent_bias);
  if (out.input.data)
    matmul(true, false, gates, call.x.dim(1), rows, type, dsums.data(), call.x.data(),
           out.input.accumulate ? 1.0f : 0.0f, out.input.data);
  if (out.recurrent.data) {
    matmul(true, false, gates, width, call.batch, type, dsums.data(), kept.hidden.data(),
           out.recurrent.accumulate ? 1.0f : 0.0f, out.recurrent.data);
    if (call.steps > 1)
      matmul(true, false, gates, width, rows - call.batch, type, dsums.as<T>() + kGates * step_size, y.data(),
             1.0f, out.recurrent.data);
  }
  if (out.x.tensor.defined())
    write_or_add(out.x, [&](Tensor& dx) {
      Tensor sums = type == DType::f32 ? dx : Tensor::empty({rows, call.x.dim(1)});
      matmul(false, false, rows, call.x.dim(1), gates, type, dsums.data(), kept.input.data(), 0.0f,
             sums.data());
      if (type != DType::f32) dx = in_form(sums, Layout::plain, type);
    });
}

Tensor lstm_forward(const LstmCall& call, OpState& state) {
  return by_type(call.x.dtype(), [&](auto type) { return forward_in<decltype(type)>(call, state); });
}

void lstm_backward(const LstmCall& call, const OpState& state, const Tensor& y, Tensor dy,
                   LstmGradients& out) {
  by_type(call.x.dtype(),
          [&](auto type) { backward_in<decltype(type)>(call, state, y, std::move(dy), out); });
}

const RegisterKernels<LstmKernels> lstm_registered(DeviceKind::cpu,
                                                   {.forward = lstm_forward, .backward = lstm_backward});

}  // namespace
}  // namespace topknot
