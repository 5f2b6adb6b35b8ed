// The LSTM layer on a GPU: one product for the inputs of all steps, then per step a product with the
// recurrent weight and a kernel for the gates. Under bf16 the products take inputs and outputs of the layer
// in bfloat16; sums, gates and cells are fp32.
#include "nn/ops/cuda/layout.h"
#include "nn/ops/cuda/op_tools.h"
#include "nn/ops/cuda/products.h"

namespace topknot::cuda {
namespace {

// One step of the layer: rows are sequences. Sizes are positive.
struct LstmStep {
  std::uint32_t batch, width;
  float* gates;              // [batch, 4 width]: i, f, g, o
  const float* cell_before;  // [batch, width]
  std::uint32_t size() const { return batch * width; }
};

__device__ inline float logistic(float x) {
  return 1.0f / (1.0f + expf(-x));
}

// From the sums in s.gates and the biases: the gates' values, in their place, cells and outputs.
template <class T>
__global__ void __launch_bounds__(kThreads)
    gates_kernel(LstmStep s, const float* input_bias, const float* recurrent_bias, float* cell, T* y) {
  await_previous();
  const std::uint32_t at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= s.batch * s.width) return;
  const std::uint32_t row = at / s.width, j = at % s.width;
  float* gates = s.gates + std::size_t{row} * 4 * s.width;
  const auto sum = [&](std::uint32_t k) {
    return gates[k * s.width + j] + (input_bias[k * s.width + j] + recurrent_bias[k * s.width + j]);
  };
  const float i = logistic(sum(0)), f = logistic(sum(1)), g = tanhf(sum(2)), o = logistic(sum(3));
  const float c = f * s.cell_before[at] + i * g;
  gates[j] = i;
  gates[s.width + j] = f;
  gates[2 * s.width + j] = g;
  gates[3 * s.width + j] = o;
  cell[at] = c;
  y[at] = from_float<T>(o * tanhf(c));
}

// From the gates' values: the gradients of the sums, in their place and, under bf16, in `dsums` too. dh = dy
// + later. dcell: of this step's cell from later steps, becomes that of the one before. `later`, `dcell`:
// null is 0; then dcell_out alone is written.
template <class T>
__global__ void __launch_bounds__(kThreads)
    gates_gradient_kernel(LstmStep s, const float* cell, const T* dy, const float* later, const float* dcell,
                          float* dcell_out, T* dsums) {
  await_previous();
  const std::uint32_t at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= s.batch * s.width) return;
  const std::uint32_t j = at % s.width;
  const std::size_t row = std::size_t{at / s.width} * 4 * s.width;
  float* gates = s.gates + row;
  const float i = gates[j], f = gates[s.width + j], g = gates[2 * s.width + j], o = gates[3 * s.width + j];
  const float t = tanhf(cell[at]), dh = as_float(dy[at]) + (later ? later[at] : 0.0f);
  const float dc = (dcell ? dcell[at] : 0.0f) + dh * o * (1.0f - t * t);
  const float d[4] = {dc * g * i * (1.0f - i), dc * s.cell_before[at] * f * (1.0f - f),
                      dc * i * (1.0f - g * g), dh * t * o * (1.0f - o)};
  for (std::uint32_t k = 0; k < 4; ++k) {
    gates[k * s.width + j] = d[k];
    if (dsums) dsums[row + k * s.width + j] = from_float<T>(d[k]);
  }
  dcell_out[at] = dc * f;
}

struct LstmKept {
  Tensor input, recurrent;  // the weights in the type of the products
  Tensor gates, cells,
      hidden;  // as on the CPU: the gates' values, c_{-1} and on, h_{-1} in the type of the products
};

const void* from_row(const Tensor& t, std::int64_t row) {
  return reinterpret_cast<const std::byte*>(t.data()) +
         static_cast<std::size_t>(row * t.dim(1)) * size_of(t.dtype());
}
void* from_row(Tensor& t, std::int64_t row) {
  return const_cast<void*>(from_row(std::as_const(t), row));
}

LstmStep step_of(const LstmCall& call, const LstmKept& kept, std::int64_t s) {
  Tensor gates = kept.gates;
  return {static_cast<std::uint32_t>(call.batch), static_cast<std::uint32_t>(call.width),
          static_cast<float*>(from_row(gates, s * call.batch)),
          static_cast<const float*>(from_row(kept.cells, s * call.batch))};
}

Tensor lstm_forward(const LstmCall& call, OpState& state) {
  Context& context = Context::current();
  const cudaStream_t stream = context.stream();
  const std::int64_t rows = call.x.dim(0), batch = call.batch, width = call.width;
  const auto step_floats = static_cast<std::size_t>(batch * width);
  const DType type = call.x.dtype();
  const bool bf16 = type == DType::bf16;
  const auto empty = [&](const Shape& shape, DType of) {
    return Tensor::empty(shape, Layout::plain, context.device(), of);
  };
  const auto kept = std::make_shared<LstmKept>(LstmKept{
      weight_as(type, call.input), weight_as(type, call.recurrent), empty({rows, 4 * width}, DType::f32),
      empty({rows + batch, width}, DType::f32), empty({batch, width}, type)});
  const DeviceBackend& device = backend(context.device());
  Tensor y = empty({rows, width}, type);
  if (call.state.carried()) {
    convert(stream, call.state.hidden->device, false, kept->hidden.data(), bf16, step_floats);
    device.copy(call.state.cell->device, kept->cells.data(), step_floats);
  } else {
    TOPKNOT_CUDA(cudaMemsetAsync(kept->hidden.data(), 0, kept->hidden.bytes(), stream));
    device.fill_zero(kept->cells.data(), step_floats);
  }
  multiply(rows, 4 * width, call.x.dim(1), type, {call.x.data(), false}, {kept->input.data(), true}, false,
           kept->gates.data(), DType::f32);
  for (std::int64_t s = 0; s < call.steps; ++s) {
    const void* before = s == 0 ? kept->hidden.data() : from_row(y, (s - 1) * batch);
    const LstmStep step = step_of(call, *kept, s);
    multiply(batch, 4 * width, width, type, {before, false}, {kept->recurrent.data(), true}, true, step.gates,
             DType::f32);
    by_type(bf16, [&]<class T>(T) {
      launch(gates_kernel<T>, grid_for(step.size(), kThreads), kThreads, stream, step, call.input_bias.data(),
             call.recurrent_bias.data(), static_cast<float*>(from_row(kept->cells, (s + 1) * batch)),
             static_cast<T*>(from_row(y, s * batch)));
    });
  }
  state = kept;
  if (!call.state.carried()) return y;
  convert(stream, from_row(y, rows - batch), bf16, call.state.hidden->device, false, step_floats);
  device.copy(static_cast<const float*>(from_row(kept->cells, rows)), call.state.cell->device, step_floats);
  return y;
}

void lstm_backward(const LstmCall& call, const OpState& state, const Tensor& y, const Tensor& dy,
                   LstmGradients& out) {
  const auto& kept = state_as<LstmKept>(state);
  Context& context = Context::current();
  const std::int64_t rows = call.x.dim(0), batch = call.batch, width = call.width, in = call.x.dim(1);
  const DType type = call.x.dtype();
  const bool bf16 = type == DType::bf16;
  const Device device = context.device();
  Tensor later = Tensor::empty({batch, width}, Layout::plain, device),
         dcell = Tensor::empty({batch, width}, Layout::plain, device);
  Tensor sums = kept.gates;  // the values become gradients
  Tensor rounded = bf16 ? Tensor::empty(sums.shape(), Layout::plain, device, type) : sums;
  for (std::int64_t s = call.steps - 1; s >= 0; --s) {
    const bool last = s + 1 == call.steps;
    if (!last)
      multiply(batch, width, 4 * width, type, {from_row(rounded, (s + 1) * batch), false},
               {kept.recurrent.data(), false}, false, later.data(), DType::f32);
    const LstmStep step = step_of(call, kept, s);
    by_type(bf16, [&]<class T>(T) {
      launch(gates_gradient_kernel<T>, grid_for(step.size(), kThreads), kThreads, context.stream(), step,
             static_cast<const float*>(from_row(kept.cells, (s + 1) * batch)),
             static_cast<const T*>(from_row(dy, s * batch)), last ? nullptr : later.data(),
             last ? nullptr : dcell.data(), dcell.data(),
             bf16 ? static_cast<T*>(from_row(rounded, s * batch)) : nullptr);
    });
  }
  bias_gradient(sums, out.input_bias);
  bias_gradient(sums, out.recurrent_bias);
  if (out.input.data)
    multiply(4 * width, in, rows, type, {rounded.data(), true}, {call.x.data(), false}, out.input.accumulate,
             out.input.data, DType::f32);
  if (out.recurrent.data) {
    multiply(4 * width, width, batch, type, {rounded.data(), true}, {kept.hidden.data(), false},
             out.recurrent.accumulate, out.recurrent.data, DType::f32);
    if (call.steps > 1)
      multiply(4 * width, width, rows - batch, type, {from_row(rounded, batch), true}, {y.data(), false},
               true, out.recurrent.data, DType::f32);
  }
  if (out.x.tensor.defined())
    multiply(rows, in, 4 * width, type, {rounded.data(), false}, {kept.input.data(), false}, out.x.accumulate,
             out.x.tensor.data(), type);
}

const bool lstm_registered =
    add_cuda_kernels<LstmKernels>({.forward = lstm_forward, .backward = lstm_backward});

}  // namespace
}  // namespace topknot::cuda
