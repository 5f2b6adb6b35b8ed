#pragma once
// Kernels of embedding and of the LSTM layer. With `bf16` activations are bfloat16, else float; gates, cells and the
// state are float. Sizes are positive.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace topknot::cuda {

struct EmbeddingShape {
  std::uint32_t batch, steps, tokens, width;
  std::uint32_t rows() const { return batch * steps; }
};
// y[t batch + b] = weight[ids[b steps + t]]; NaN where the id is no token.
void embedding_rows(cudaStream_t stream, const float* ids, const float* weight, EmbeddingShape shape,
                    bool bf16, void* y);
// dw[id] += the sum of dy's rows with this id, in their order.
void embedding_gradient(cudaStream_t stream, const float* ids, const void* dy, bool bf16,
                        EmbeddingShape shape, float* dw);

// One step of the layer: rows are sequences.
struct LstmStep {
  std::uint32_t batch, width;
  float* gates;              // [batch, 4 width]: i, f, g, o
  const float* cell_before;  // [batch, width]
  std::uint32_t size() const { return batch * width; }
};
// From the sums in step.gates, to which the biases are added: the gates' values, in their place, cells and outputs.
void lstm_gates(cudaStream_t stream, const LstmStep& step, const float* input_bias,
                const float* recurrent_bias, float* cell, void* y, bool bf16);
// From the gates' values: the gradients of the sums, in their place and, under bf16, in `dsums` too. dh = dy + later.
// dcell: of this step's cell from later steps, becomes that of the one before. `later`, `dcell`: null is 0; then dcell_out
// alone is written.
void lstm_gates_gradient(cudaStream_t stream, const LstmStep& step, const float* cell, const void* dy,
                         bool bf16, const float* later, const float* dcell, float* dcell_out, void* dsums);

}  // namespace topknot::cuda
