// cuDNN's convolutions on the machine of machine.h, as loops over the definition. The check of arguments is
// as strict as cuDNN's for NHWC: packed tensors, NHWC filters, one type for all, enough workspace; in bfloat16
// whole eights of channels and no groups, which some versions and GPUs do not do.
#include "tests/emulator/cudnn_convolution.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "tests/emulator/cudnn_descriptors.h"
#include "tests/emulator/machine_state.h"

namespace topknot::emulator {

ConvolutionMachine& convolutions() {
  static ConvolutionMachine machine;
  return machine;
}

namespace {

std::mutex mutex;  // of convolutions(), where ranks are threads

enum class Product { output, input_gradient, weight_gradient };

struct Shapes {
  cudnnTensorStruct x, y;
  cudnnFilterStruct w;
  cudnnConvolutionStruct conv;

  cudnnStatus_t check() const {
    if (x.type != y.type || x.type != w.type) return CUDNN_STATUS_NOT_SUPPORTED;
    if (conv.math == CUDNN_TENSOR_OP_MATH && convolutions().refuses_tensor_ops)
      return CUDNN_STATUS_NOT_SUPPORTED;
    const bool bf16 = x.type == CUDNN_DATA_BFLOAT16;
    const int unit = bf16 ? convolutions().bf16_channel_unit : convolutions().channel_unit;
    if (x.dims[1] % unit != 0 || y.dims[1] % unit != 0) return CUDNN_STATUS_NOT_SUPPORTED;
    if (bf16 && conv.groups > 1 && !convolutions().bf16_groups) return CUDNN_STATUS_NOT_SUPPORTED;
    if (x.strides[1] != 1 || y.strides[1] != 1 || w.format != CUDNN_TENSOR_NHWC)
      return CUDNN_STATUS_NOT_SUPPORTED;
    const auto out = [&](std::size_t d) {
      return (x.dims[d] + 2 * conv.padding[d - 2] - w.dims[d]) / conv.stride[d - 2] + 1;
    };
    const std::array<int, 4> expected{x.dims[0], w.dims[0], out(2), out(3)};
    return y.dims == expected && x.dims[1] == w.dims[1] * conv.groups && w.dims[0] % conv.groups == 0
               ? CUDNN_STATUS_SUCCESS
               : CUDNN_STATUS_BAD_PARAM;
  }

  // fn(place in y, place in x, place in w) for each term of the convolution's sum.
  template <class Fn>
  void for_each_term(Fn&& fn) const {
    for (int n = 0; n < y.dims[0]; ++n)
      for (int i = 0; i < y.dims[2]; ++i)
        for (int j = 0; j < y.dims[3]; ++j)
          for (int k = 0; k < w.dims[0]; ++k)
            for (int r = 0; r < w.dims[2]; ++r)
              for (int s = 0; s < w.dims[3]; ++s) {
                const int row = i * conv.stride[0] + r - conv.padding[0],
                          column = j * conv.stride[1] + s - conv.padding[1];
                if (row < 0 || row >= x.dims[2] || column < 0 || column >= x.dims[3]) continue;
                const int first = k / (w.dims[0] / conv.groups) * w.dims[1];  // input channel of k's group
                for (int c = 0; c < w.dims[1]; ++c)
                  fn(offset(y, n, k, i, j), offset(x, n, first + c, row, column), offset(w, k, c, r, s));
              }
  }
};

std::vector<float> floats(cudnnDataType_t type, const void* data, std::size_t n) {
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = load(type, data, i);
  return values;
}

const ConvolutionAlgorithm* find(int number) {
  for (const auto& algorithm : convolutions().algorithms)
    if (algorithm.number == number) return &algorithm;
  return nullptr;
}

cudnnStatus_t workspace_size(const char* call, const Shapes& shapes, int number, std::size_t* bytes) {
  if (const int error = injected(call)) return static_cast<cudnnStatus_t>(error);
  const auto* algorithm = find(number);
  if (!algorithm) return CUDNN_STATUS_NOT_SUPPORTED;
  *bytes = algorithm->workspace;
  return shapes.check();
}

// Puts the product on the stream: out = alpha * product(a, b) + beta * out.
cudnnStatus_t run(const char* call, cudnnHandle_t handle, Product product, const Shapes& shapes,
                  const void* alpha, const void* a, const void* b, int number, void* workspace,
                  std::size_t bytes, const void* beta, void* out) {
  if (const int error = injected(call)) return static_cast<cudnnStatus_t>(error);
  if (const cudnnStatus_t status = shapes.check(); status != CUDNN_STATUS_SUCCESS) return status;
  const auto* algorithm = find(number);
  if (!algorithm) return CUDNN_STATUS_NOT_SUPPORTED;
  if (!a || !b || !out || bytes < algorithm->workspace || (bytes > 0 && !workspace))
    return CUDNN_STATUS_BAD_PARAM;
  if (number == convolutions().fails_to_run) return CUDNN_STATUS_EXECUTION_FAILED;
  if (convolutions().runs_nothing) return CUDNN_STATUS_NOT_SUPPORTED;
  const float by = *static_cast<const float*>(alpha), old = *static_cast<const float*>(beta);
  if (old != 0 && convolutions().refuses_to_add) return CUDNN_STATUS_NOT_SUPPORTED;
  note_convolution(number, shapes.conv.math);
  const std::size_t scratch = algorithm->workspace;
  enqueue(handle->stream, [=, time = algorithm->time] {
    pass(time);
    if (scratch > 0) std::memset(workspace, 0xff, scratch);  // NaNs
    const cudnnDataType_t type = shapes.x.type;
    std::vector<float> sums(product == Product::output           ? elements(shapes.y)
                            : product == Product::input_gradient ? elements(shapes.x)
                                                                 : elements(shapes.w));
    const auto in = [type](const void* data, std::size_t n) { return floats(type, data, n); };
    if (product == Product::output) {
      const auto x = in(a, elements(shapes.x)), w = in(b, elements(shapes.w));
      shapes.for_each_term([&](auto at_y, auto at_x, auto at_w) { sums[at_y] += x[at_x] * w[at_w]; });
    } else if (product == Product::input_gradient) {
      const auto w = in(a, elements(shapes.w)), dy = in(b, elements(shapes.y));
      shapes.for_each_term([&](auto at_y, auto at_x, auto at_w) { sums[at_x] += dy[at_y] * w[at_w]; });
    } else {
      sums = weight_gradient(shapes.x, shapes.y, shapes.w, shapes.conv, a, b);
    }
    for (std::size_t i = 0; i < sums.size(); ++i)
      store(type, out, i, by * sums[i] + (old == 0 ? 0 : old * load(type, out, i)));
  });
  return CUDNN_STATUS_SUCCESS;
}

template <class Result>
cudnnStatus_t foretell(const char* call, const Shapes& shapes, int most, int* found, Result* results) {
  if (const int error = injected(call)) return static_cast<cudnnStatus_t>(error);
  if (const cudnnStatus_t status = shapes.check(); status != CUDNN_STATUS_SUCCESS) return status;
  const std::lock_guard lock(mutex);
  ++convolutions().foretold;
  *found = 0;
  for (const auto& algorithm : convolutions().algorithms) {
    if (*found == most) break;
    Result& result = results[(*found)++] = {};
    result.algo = static_cast<decltype(result.algo)>(algorithm.number);
    result.memory = algorithm.workspace;
    result.determinism = algorithm.deterministic ? CUDNN_DETERMINISTIC : CUDNN_NON_DETERMINISTIC;
    result.mathType = convolutions().names_default           ? CUDNN_DEFAULT_MATH
                      : algorithm.math == CUDNN_DEFAULT_MATH ? shapes.conv.math
                                                             : algorithm.math;
  }
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace

void note_convolution(int number, cudnnMathType_t math) {
  const std::lock_guard lock(mutex);
  convolutions().used.push_back(number);
  convolutions().maths.push_back(math);
}

void pass(float milliseconds) {
  state().passed +=
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<float, std::milli>(milliseconds));
}

std::vector<float> weight_gradient(const cudnnTensorStruct& x, const cudnnTensorStruct& y,
                                   const cudnnFilterStruct& w, const cudnnConvolutionStruct& conv,
                                   const void* x_data, const void* dy_data) {
  std::vector<float> sums(elements(w));
  const auto xs = floats(x.type, x_data, elements(x)), dy = floats(y.type, dy_data, elements(y));
  Shapes{x, y, w, conv}.for_each_term(
      [&](auto at_y, auto at_x, auto at_w) { sums[at_w] += dy[at_y] * xs[at_x]; });
  return sums;
}

}  // namespace topknot::emulator

using namespace topknot::emulator;
using Tensor = const cudnnTensorDescriptor_t;
using Filter = const cudnnFilterDescriptor_t;
using Conv = const cudnnConvolutionDescriptor_t;

extern "C" {

cudnnStatus_t cudnnGetConvolutionForwardAlgorithm_v7(cudnnHandle_t, Tensor x, Filter w, Conv conv, Tensor y,
                                                     const int most, int* count,
                                                     cudnnConvolutionFwdAlgoPerf_t* results) {
  return foretell("cudnnGetConvolutionForwardAlgorithm_v7", {*x, *y, *w, *conv}, most, count, results);
}
cudnnStatus_t cudnnGetConvolutionBackwardDataAlgorithm_v7(cudnnHandle_t, Filter w, Tensor y, Conv conv,
                                                          Tensor x, const int most, int* count,
                                                          cudnnConvolutionBwdDataAlgoPerf_t* results) {
  return foretell("cudnnGetConvolutionBackwardDataAlgorithm_v7", {*x, *y, *w, *conv}, most, count, results);
}
cudnnStatus_t cudnnGetConvolutionBackwardFilterAlgorithm_v7(cudnnHandle_t, Tensor x, Tensor y, Conv conv,
                                                            Filter w, const int most, int* count,
                                                            cudnnConvolutionBwdFilterAlgoPerf_t* results) {
  return foretell("cudnnGetConvolutionBackwardFilterAlgorithm_v7", {*x, *y, *w, *conv}, most, count, results);
}

cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(cudnnHandle_t, Tensor x, Filter w, Conv conv, Tensor y,
                                                      cudnnConvolutionFwdAlgo_t algorithm,
                                                      std::size_t* bytes) {
  return workspace_size("cudnnGetConvolutionForwardWorkspaceSize", {*x, *y, *w, *conv}, algorithm, bytes);
}
cudnnStatus_t cudnnGetConvolutionBackwardDataWorkspaceSize(cudnnHandle_t, Filter w, Tensor y, Conv conv,
                                                           Tensor x, cudnnConvolutionBwdDataAlgo_t algorithm,
                                                           std::size_t* bytes) {
  return workspace_size("cudnnGetConvolutionBackwardDataWorkspaceSize", {*x, *y, *w, *conv}, algorithm,
                        bytes);
}
cudnnStatus_t cudnnGetConvolutionBackwardFilterWorkspaceSize(cudnnHandle_t, Tensor x, Tensor y, Conv conv,
                                                             Filter w,
                                                             cudnnConvolutionBwdFilterAlgo_t algorithm,
                                                             std::size_t* bytes) {
  return workspace_size("cudnnGetConvolutionBackwardFilterWorkspaceSize", {*x, *y, *w, *conv}, algorithm,
                        bytes);
}

cudnnStatus_t cudnnConvolutionForward(cudnnHandle_t handle, const void* alpha, Tensor x, const void* a,
                                      Filter w, const void* b, Conv conv, cudnnConvolutionFwdAlgo_t algorithm,
                                      void* workspace, std::size_t bytes, const void* beta, Tensor y,
                                      void* out) {
  return run("cudnnConvolutionForward", handle, Product::output, {*x, *y, *w, *conv}, alpha, a, b, algorithm,
             workspace, bytes, beta, out);
}
cudnnStatus_t cudnnConvolutionBackwardData(cudnnHandle_t handle, const void* alpha, Filter w, const void* a,
                                           Tensor y, const void* b, Conv conv,
                                           cudnnConvolutionBwdDataAlgo_t algorithm, void* workspace,
                                           std::size_t bytes, const void* beta, Tensor x, void* out) {
  return run("cudnnConvolutionBackwardData", handle, Product::input_gradient, {*x, *y, *w, *conv}, alpha, a,
             b, algorithm, workspace, bytes, beta, out);
}
cudnnStatus_t cudnnConvolutionBackwardFilter(cudnnHandle_t handle, const void* alpha, Tensor x, const void* a,
                                             Tensor y, const void* b, Conv conv,
                                             cudnnConvolutionBwdFilterAlgo_t algorithm, void* workspace,
                                             std::size_t bytes, const void* beta, Filter w, void* out) {
  return run("cudnnConvolutionBackwardFilter", handle, Product::weight_gradient, {*x, *y, *w, *conv}, alpha,
             a, b, algorithm, workspace, bytes, beta, out);
}

}  // extern "C"
