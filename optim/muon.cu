// Muon's step of one matrix on a GPU: products by cuBLAS, in the precision that Context::options() states. X
// [n, m] is U or its transpose, by rows, so that its first side is the smaller one. A step that is bad
// computes with what the scratch holds and changes nothing.
#include <topknot_kernel.h>

#include "nn/core/cuda/context.h"
#include "nn/core/cuda/kernel_tools.h"
#include "nn/core/cuda/libraries.h"
#include "optim/clip.h"
#include "optim/muon.h"

namespace topknot::cuda {
namespace {

struct Sides {
  unsigned rows, cols;
  bool turned;  // X is the transpose
  std::size_t size() const { return std::size_t{rows} * cols; }
  std::size_t least() const { return turned ? cols : rows; }
};

Sides sides_of(std::size_t rows, std::size_t cols) {
  TOPKNOT_CHECK(rows < (1u << 31) && cols < (1u << 31), "a matrix with a side that is beyond cuBLAS");
  return {static_cast<unsigned>(rows), static_cast<unsigned>(cols), rows > cols};
}

// The place in X of what the matrix has at i.
__device__ std::size_t place(std::size_t i, Sides s) {
  if (!s.turned) return i;
  const std::size_t row = i / s.cols;
  return (i - row * s.cols) * s.rows + row;
}

__global__ void __launch_bounds__(kThreads)
    momentum_kernel(MuonMatrix m, MuonMix mix, Sides sides, float* x, const StepParameters* parameters,
                    const StepStatus* status) {
  await_previous();
  if (status && status->bad) return;
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= std::size_t{sides.rows} * sides.cols) return;
  x[place(i, sides)] =
      mix.input(m.momentum[i], m.gradient[i] * static_cast<float>(parameters->gradient_scale));
}

// The division as the CPU has it: by a product with the inverse in float.
__global__ void __launch_bounds__(kThreads)
    normalise_kernel(float* x, std::size_t n, const double* sum_of_squares, double epsilon) {
  const std::size_t i = awaited_index();
  if (i < n) x[i] *= static_cast<float>(1 / (sqrt(*sum_of_squares) + epsilon));
}

__global__ void __launch_bounds__(kThreads)
    step_kernel(MuonMatrix m, MuonRule rule, Sides sides, const float* x, const StepParameters* parameters,
                const StepStatus* status) {
  await_previous();
  if (status && status->bad) return;
  const MuonRates rates(rule, m.shape_factor, parameters->lr);
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < std::size_t{sides.rows} * sides.cols)
    m.weights[i] = rates.decay * m.weights[i] - rates.rate * x[place(i, sides)];
}

// c = alpha op(a) b + beta c by columns, all contiguous; c is [rows, columns], a sum has `depth` terms.
void multiply(int rows, int columns, int depth, float alpha, const float* a, bool a_transposed,
              const float* b, float beta, float* c) {
  TOPKNOT_CUBLAS(cublasGemmEx(Context::current().cublas(), a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                              CUBLAS_OP_N, rows, columns, depth, &alpha, a, CUDA_R_32F,
                              a_transposed ? depth : rows, b, CUDA_R_32F, depth, &beta, c, CUDA_R_32F, rows,
                              CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

// A step's scratch, aligned to 256 bytes: two of X, two squares, the sum of squares and what it is made of.
struct Scratch {
  Scratch(Sides sides, float* memory)
      : x(memory),
        next(x + aligned(sides.size())),
        a(next + aligned(sides.size())),
        b(a + aligned(sides.least() * sides.least())),
        sum(reinterpret_cast<double*>(b + aligned(sides.least() * sides.least()))) {}
  static std::size_t floats(Sides sides) {
    return 2 * (aligned(sides.size()) + aligned(sides.least() * sides.least())) +
           2 * clip_doubles(ceil_div(sides.size(), kClipBlock));
  }
  static std::size_t aligned(std::size_t floats) { return ceil_div(floats, 64) * 64; }
  float *x, *next, *a, *b;
  double* sum;
};

void muon_update(const MuonMatrix& matrix, const MuonRule& rule, float* memory, const StepState& state) {
  const Sides sides = sides_of(matrix.rows, matrix.cols);
  Scratch s(sides, memory);
  const int n = static_cast<int>(sides.least()), m = static_cast<int>(sides.size() / sides.least());
  const dim3 grid = grid_for(sides.size(), kThreads);
  const DeviceBackend& device = cuda_backend();
  launch(momentum_kernel, grid, kThreads, compute_stream(), matrix, MuonMix(rule), sides, s.x,
         state.parameters, state.status);
  const std::span<float> x(s.x, sides.size());
  find_kernels<ClipKernels>(DeviceKind::cuda)->sum_of_squares(ClipVectors({&x, 1}), s.sum, false);
  launch(normalise_kernel, grid, kThreads, compute_stream(), s.x, sides.size(), s.sum, rule.epsilon);
  // cuBLAS counts by columns, and so has X as [m, n]: A = X^T X, and the next X is a X + X B.
  for (const auto& [of_x, of_a, of_square] : rule.factors) {
    multiply(n, n, m, 1, s.x, true, s.x, 0, s.a);
    device.copy(s.a, s.b, sides.least() * sides.least());
    multiply(n, n, n, of_square, s.a, false, s.a, of_a, s.b);
    device.copy(s.x, s.next, sides.size());
    multiply(m, n, n, 1, s.x, false, s.b, of_x, s.next);
    std::swap(s.x, s.next);
  }
  launch(step_kernel, grid, kThreads, compute_stream(), matrix, rule, sides, s.x, state.parameters,
         state.status);
}

const bool muon_kernels = add_cuda_kernels<MuonKernels>(
    {[](std::size_t rows, std::size_t cols) {
       Context::current().cublas();  // an update may be captured, and no handle can be made in a capture
       return Scratch::floats(sides_of(rows, cols));
     },
     muon_update});

}  // namespace
}  // namespace topknot::cuda
