#pragma once
// What cuDNN's convolutions on the machine of machine.h offer and have done. Each product knows the same
// algorithms; their numbers are those of cuDNN's enumerations.

#include <cudnn.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/emulator/cudnn_descriptors.h"

namespace topknot::emulator {

struct ConvolutionAlgorithm {
  int number;
  float time;             // milliseconds that pass by the clock of events, beside the host's own
  std::size_t workspace;  // bytes that it insists on, and writes over
  bool deterministic;
  cudnnMathType_t math = CUDNN_DEFAULT_MATH;  // as reported; default: what the descriptor says
};

// An engine of the graph API for a weight gradient in fp32 from bfloat16 (cudnn_graph.cpp).
struct ConvolutionPlan {
  std::int64_t engine;
  float time;             // milliseconds that pass by the clock of events, beside the host's own
  std::size_t workspace;  // bytes, written over
  bool compiles = true;
  cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;  // that names it
};

struct ConvolutionMachine {
  // In the order in which the heuristics name them.
  std::vector<ConvolutionAlgorithm> algorithms{
      {0, 2e4f, 0, false}, {1, 1e4f, 4096, true}, {5, 3e4f, 64, true}};
  bool refuses_to_add = false;      // beta other than 0 is not supported
  bool refuses_tensor_ops = false;  // CUDNN_TENSOR_OP_MATH is not supported
  bool names_default = false;       // rows say CUDNN_DEFAULT_MATH, whatever the descriptor says
  int fails_to_run = -1;            // this algorithm, though it is foretold
  int channel_unit = 1;             // other numbers of channels are not supported, in fp32
  int bf16_channel_unit = 8;        // and in bfloat16
  bool bf16_groups = false;         // convolutions in groups are supported in bfloat16
  bool runs_nothing = false;        // what is foretold is not supported when it is used
  int foretold = 0;                 // calls
  std::vector<ConvolutionPlan> plans{{65, 1e6f, 64}};  // in the order in which the heuristics name them
  std::int64_t plan_fails_to_run = -1;                 // this engine
  int compiled = 0;                                    // plans
  std::vector<int> used;  // the algorithm of each convolution, in order of the calls; kPlan + a plan's engine
  std::vector<cudnnMathType_t> maths;  // beside them: the descriptor's math type
};
inline constexpr int kPlan = 1000;
// As it is for this thread's process; tests set it back to {}.
ConvolutionMachine& convolutions();

// The sums over terms, in the order of w; x and dy in the types of x and y.
std::vector<float> weight_gradient(const cudnnTensorStruct& x, const cudnnTensorStruct& y,
                                   const cudnnFilterStruct& w, const cudnnConvolutionStruct& conv,
                                   const void* x_data, const void* dy_data);
void note_convolution(int number, cudnnMathType_t math);  // in `used` and `maths`
void pass(float milliseconds);                            // by the clock of events, at a stream's turn

}  // namespace topknot::emulator
