// The LSTM layer on a GPU: one product for the inputs of all steps, then per step a product with the recurrent weight and
// a kernel for the gates. Under bf16 the products take inputs and outputs of the layer in bfloat16; sums, gates and cells
// are fp32.
#include "nn/ops/lstm.h"

#include "nn/ops/cuda/activation_kernels.h"
#include "nn/ops/cuda/gemm.h"
#include "nn/ops/cuda/sequence_kernels.h"

namespace topknot::cuda {
namespace {

struct LstmKept {
  Tensor input, recurrent;  // the weights in the type of the products
  Tensor gates, cells,
      hidden;  // as on the CPU: the gates' values, c_{-1} and on, h_{-1} in the type of the products
};

// Of whole rows, from row `row` on.
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
  multiply(context, rows, 4 * width, call.x.dim(1), type, {call.x.data(), false}, {kept->input.data(), true},
           0.0f, kept->gates.data(), DType::f32);
  for (std::int64_t s = 0; s < call.steps; ++s) {
    const void* before = s == 0 ? kept->hidden.data() : from_row(y, (s - 1) * batch);
    const LstmStep step = step_of(call, *kept, s);
    multiply(context, batch, 4 * width, width, type, {before, false}, {kept->recurrent.data(), true}, 1.0f,
             step.gates, DType::f32);
    lstm_gates(stream, step, call.input_bias.data(), call.recurrent_bias.data(),
               static_cast<float*>(from_row(kept->cells, (s + 1) * batch)), from_row(y, s * batch), bf16);
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
      multiply(context, batch, width, 4 * width, type, {from_row(rounded, (s + 1) * batch), false},
               {kept.recurrent.data(), false}, 0.0f, later.data(), DType::f32);
    lstm_gates_gradient(context.stream(), step_of(call, kept, s),
                        static_cast<const float*>(from_row(kept.cells, (s + 1) * batch)),
                        from_row(dy, s * batch), bf16, last ? nullptr : later.data(),
                        last ? nullptr : dcell.data(), dcell.data(),
                        bf16 ? from_row(rounded, s * batch) : nullptr);
  }
  bias_gradient(sums, out.input_bias);
  bias_gradient(sums, out.recurrent_bias);
  if (out.input.data)
    multiply(context, 4 * width, in, rows, type, {rounded.data(), true}, {call.x.data(), false},
             out.input.accumulate ? 1.0f : 0.0f, out.input.data, DType::f32);
  if (out.recurrent.data) {
    multiply(context, 4 * width, width, batch, type, {rounded.data(), true}, {kept.hidden.data(), false},
             out.recurrent.accumulate ? 1.0f : 0.0f, out.recurrent.data, DType::f32);
    if (call.steps > 1)
      multiply(context, 4 * width, width, rows - batch, type, {from_row(rounded, batch), true},
               {y.data(), false}, 1.0f, out.recurrent.data, DType::f32);
  }
  if (out.x.tensor.defined())
    multiply(context, rows, in, 4 * width, type, {rounded.data(), false}, {kept.input.data(), false},
             out.x.accumulate ? 1.0f : 0.0f, out.x.tensor.data(), type);
}

const RegisterKernels<LstmKernels> lstm_registered(DeviceKind::cuda,
                                                   {.forward = lstm_forward, .backward = lstm_backward});

}  // namespace
}  // namespace topknot::cuda
