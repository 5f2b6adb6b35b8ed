// cuDNN's pooling, on the machine of machine.h: from NVIDIA's documentation, in float.
#include <cmath>
#include <limits>
#include <vector>

#include "tests/emulator/cudnn_descriptors.h"
#include "tests/emulator/machine.h"

using namespace topknot::emulator;

struct cudnnPoolingStruct {
  cudnnPoolingMode_t mode{};
  int window[2]{}, padding[2]{}, stride[2]{};
};

namespace {

bool is_max(const cudnnPoolingStruct& p) {
  return p.mode != CUDNN_POOLING_AVERAGE_COUNT_EXCLUDE_PADDING;
}

bool fits(const cudnnPoolingStruct& p, const cudnnTensorStruct& x, const cudnnTensorStruct& y) {
  for (int i = 0; i < 2; ++i)
    if (y.dims[std::size_t(2 + i)] !=
        (x.dims[std::size_t(2 + i)] + 2 * p.padding[i] - p.window[i]) / p.stride[i] + 1)
      return false;
  return x.dims[0] == y.dims[0] && x.dims[1] == y.dims[1] && x.type == y.type;
}

// fn(offset in x) for the elements of a window that lie in the image, in row order; how many they are.
template <class Fn>
int each_of_window(const cudnnPoolingStruct& p, const cudnnTensorStruct& x, int n, int c, int row, int column,
                   const Fn& fn) {
  int count = 0;
  for (int i = 0; i < p.window[0]; ++i)
    for (int j = 0; j < p.window[1]; ++j) {
      const int h = row * p.stride[0] - p.padding[0] + i, w = column * p.stride[1] - p.padding[1] + j;
      if (h < 0 || w < 0 || h >= x.dims[2] || w >= x.dims[3]) continue;
      fn(offset(x, n, c, h, w));
      ++count;
    }
  return count;
}

template <class Fn>
void each_output(const cudnnTensorStruct& y, const Fn& fn) {
  for (int n = 0; n < y.dims[0]; ++n)
    for (int c = 0; c < y.dims[1]; ++c)
      for (int h = 0; h < y.dims[2]; ++h)
        for (int w = 0; w < y.dims[3]; ++w) fn(n, c, h, w, offset(y, n, c, h, w));
}

// The first maximum of a window; a NaN is one.
std::size_t maximum(const cudnnPoolingStruct& p, const cudnnTensorStruct& x, const void* data, int n, int c,
                    int h, int w) {
  std::size_t best = std::numeric_limits<std::size_t>::max();
  each_of_window(p, x, n, c, h, w, [&](std::size_t i) {
    if (best == std::numeric_limits<std::size_t>::max()) best = i;
    const float old = load(x.type, data, best), now = load(x.type, data, i);
    if (!std::isnan(old) && (now > old || std::isnan(now))) best = i;
  });
  return best;
}

}  // namespace

extern "C" {

cudnnStatus_t cudnnCreatePoolingDescriptor(cudnnPoolingDescriptor_t* descriptor) {
  *descriptor = new cudnnPoolingStruct;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroyPoolingDescriptor(cudnnPoolingDescriptor_t descriptor) {
  delete descriptor;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetPooling2dDescriptor(cudnnPoolingDescriptor_t d, cudnnPoolingMode_t mode,
                                          cudnnNanPropagation_t, int window_height, int window_width,
                                          int vertical_padding, int horizontal_padding, int vertical_stride,
                                          int horizontal_stride) {
  if (const int error = injected("cudnnSetPooling2dDescriptor")) return static_cast<cudnnStatus_t>(error);
  const char* const name = mode == CUDNN_POOLING_MAX                 ? "CUDNN_POOLING_MAX"
                           : mode == CUDNN_POOLING_MAX_DETERMINISTIC ? "CUDNN_POOLING_MAX_DETERMINISTIC"
                           : mode == CUDNN_POOLING_AVERAGE_COUNT_EXCLUDE_PADDING ? "an average"
                                                                                 : nullptr;
  if (!name) return CUDNN_STATUS_NOT_SUPPORTED;
  if (const int error = injected(name)) return static_cast<cudnnStatus_t>(error);
  *d = {mode,
        {window_height, window_width},
        {vertical_padding, horizontal_padding},
        {vertical_stride, horizontal_stride}};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnPoolingForward(cudnnHandle_t handle, const cudnnPoolingDescriptor_t pooling,
                                  const void* alpha, const cudnnTensorDescriptor_t x, const void* x_data,
                                  const void* beta, const cudnnTensorDescriptor_t y, void* y_data) {
  if (const int error = injected("cudnnPoolingForward")) return static_cast<cudnnStatus_t>(error);
  if (const int error = x->type == CUDNN_DATA_BFLOAT16 ? injected("cudnnPoolingForward of bfloat16") : 0)
    return static_cast<cudnnStatus_t>(error);
  if (!fits(*pooling, *x, *y) || *static_cast<const float*>(alpha) != 1 ||
      *static_cast<const float*>(beta) != 0)
    return CUDNN_STATUS_BAD_PARAM;
  enqueue(handle->stream, [=, p = *pooling, x = *x, y = *y] {
    each_output(y, [&](int n, int c, int h, int w, std::size_t at) {
      if (is_max(p))
        return store(y.type, y_data, at, load(x.type, x_data, maximum(p, x, x_data, n, c, h, w)));
      float sum = 0;
      const int count =
          each_of_window(p, x, n, c, h, w, [&](std::size_t i) { sum += load(x.type, x_data, i); });
      store(y.type, y_data, at, sum / float(count));
    });
  });
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnPoolingBackward(cudnnHandle_t handle, const cudnnPoolingDescriptor_t pooling,
                                   const void* alpha, const cudnnTensorDescriptor_t y, const void* y_data,
                                   const cudnnTensorDescriptor_t dy, const void* dy_data,
                                   const cudnnTensorDescriptor_t x, const void* x_data, const void* beta,
                                   const cudnnTensorDescriptor_t dx, void* dx_data) {
  if (const int error = injected("cudnnPoolingBackward")) return static_cast<cudnnStatus_t>(error);
  if (const int error = x->type == CUDNN_DATA_BFLOAT16 ? injected("cudnnPoolingBackward of bfloat16") : 0)
    return static_cast<cudnnStatus_t>(error);
  if (!fits(*pooling, *x, *y) || !fits(*pooling, *dx, *dy) || !y_data ||
      *static_cast<const float*>(alpha) != 1 || *static_cast<const float*>(beta) != 0)
    return CUDNN_STATUS_BAD_PARAM;
  enqueue(handle->stream, [=, p = *pooling, x = *x, dx = *dx, dy = *dy] {
    std::vector<float> sums(elements(dx));
    each_output(dy, [&](int n, int c, int h, int w, std::size_t at) {
      const float g = load(dy.type, dy_data, at);
      if (is_max(p)) {
        sums[maximum(p, x, x_data, n, c, h, w)] += g;
        return;
      }
      const int count = each_of_window(p, x, n, c, h, w, [](std::size_t) {});
      each_of_window(p, x, n, c, h, w, [&](std::size_t i) { sums[i] += g / float(count); });
    });
    for (std::size_t i = 0; i < sums.size(); ++i) store(dx.type, dx_data, i, sums[i]);
  });
  return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"
