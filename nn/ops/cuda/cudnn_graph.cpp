#include "nn/ops/cuda/cudnn_graph.h"

#include <array>
#include <type_traits>

namespace topknot::cuda {
namespace {

using Descriptor = CudnnGraphDescriptor;

// Names of the graph's tensors, for the pointers of a run.
enum Id : std::int64_t { kX = 1, kDy, kInner, kDw };

// cuDNN's name for an attribute of type T; descriptors, which are void* too, are below.
template <class T>
constexpr cudnnBackendAttributeType_t kTypeOf =
    std::is_same_v<T, std::int64_t>             ? CUDNN_TYPE_INT64
    : std::is_same_v<T, float>                  ? CUDNN_TYPE_FLOAT
    : std::is_same_v<T, bool>                   ? CUDNN_TYPE_BOOLEAN
    : std::is_same_v<T, cudnnDataType_t>        ? CUDNN_TYPE_DATA_TYPE
    : std::is_same_v<T, cudnnConvolutionMode_t> ? CUDNN_TYPE_CONVOLUTION_MODE
    : std::is_same_v<T, cudnnPointwiseMode_t>   ? CUDNN_TYPE_POINTWISE_MODE
    : std::is_same_v<T, cudnnBackendHeurMode_t> ? CUDNN_TYPE_HEUR_MODE
    : std::is_same_v<T, cudnnHandle_t>          ? CUDNN_TYPE_HANDLE
                                                : CUDNN_TYPE_VOID_PTR;

template <class T, std::size_t n>
void set(const Descriptor& to, cudnnBackendAttributeName_t name, const std::array<T, n>& values) {
  TOPKNOT_CUDNN(
      cudnnBackendSetAttribute(to.get(), name, kTypeOf<T>, static_cast<std::int64_t>(n), values.data()));
}
template <class T>
void set(const Descriptor& to, cudnnBackendAttributeName_t name, T value) {
  set(to, name, std::array<T, 1>{value});
}
template <std::size_t n>
void set_descriptors(const Descriptor& to, cudnnBackendAttributeName_t name,
                     const std::array<cudnnBackendDescriptor_t, n>& values) {
  TOPKNOT_CUDNN(cudnnBackendSetAttribute(to.get(), name, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                         static_cast<std::int64_t>(n), values.data()));
}
void set(const Descriptor& to, cudnnBackendAttributeName_t name, const Descriptor& value) {
  set_descriptors(to, name, std::array{value.get()});
}

std::int64_t integer(const Descriptor& of, cudnnBackendAttributeName_t name) {
  std::int64_t value = 0, count = 0;
  TOPKNOT_CUDNN(cudnnBackendGetAttribute(of.get(), name, CUDNN_TYPE_INT64, 1, &count, &value));
  return value;
}

void finalize(const Descriptor& descriptor) {
  TOPKNOT_CUDNN(cudnnBackendFinalize(descriptor.get()));
}

// NHWC, or KRSC of a filter.
Descriptor tensor(Id id, cudnnDataType_t type, const Shape& shape) {
  Descriptor tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  const std::int64_t c = shape[1], h = shape[2], w = shape[3];
  set(tensor, CUDNN_ATTR_TENSOR_UNIQUE_ID, static_cast<std::int64_t>(id));
  set(tensor, CUDNN_ATTR_TENSOR_DATA_TYPE, type);
  set(tensor, CUDNN_ATTR_TENSOR_DIMENSIONS, std::array{shape[0], c, h, w});
  set(tensor, CUDNN_ATTR_TENSOR_STRIDES, std::array{h * w * c, std::int64_t{1}, w * c, c});
  set(tensor, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, kCudnnGraphAlignment);
  set(tensor, CUDNN_ATTR_TENSOR_IS_VIRTUAL, id == kInner);
  finalize(tensor);
  return tensor;
}

Descriptor convolution(const ConvGeometry& geometry) {
  Descriptor convolution(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  const std::array padding{geometry.padding.height, geometry.padding.width};
  set(convolution, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_DATA_FLOAT);
  set(convolution, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_CROSS_CORRELATION);
  set(convolution, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, std::int64_t{2});
  set(convolution, CUDNN_ATTR_CONVOLUTION_DILATIONS, std::array<std::int64_t, 2>{1, 1});
  set(convolution, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES,
      std::array{geometry.stride.height, geometry.stride.width});
  set(convolution, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, padding);
  set(convolution, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, padding);
  finalize(convolution);
  return convolution;
}

Descriptor identity() {
  Descriptor pointwise(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  set(pointwise, CUDNN_ATTR_POINTWISE_MODE, CUDNN_POINTWISE_IDENTITY);
  set(pointwise, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_DATA_FLOAT);
  finalize(pointwise);
  return pointwise;
}

}  // namespace

WeightGradientGraph::WeightGradientGraph(cudnnHandle_t handle, const ConvGeometry& geometry, const Shape& x)
    : handle_(handle) {
  const Shape weight = geometry.weight_shape();
  const Descriptor tensor_x = tensor(kX, CUDNN_DATA_BFLOAT16, x),
                   tensor_dy = tensor(kDy, CUDNN_DATA_BFLOAT16, geometry.output_shape(x)),
                   tensor_inner = tensor(kInner, CUDNN_DATA_FLOAT, weight),
                   tensor_dw = tensor(kDw, CUDNN_DATA_FLOAT, weight), described = convolution(geometry),
                   same = identity();

  const Descriptor product(CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR);
  set(product, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA, 1.0f);
  set(product, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA, 0.0f);
  set(product, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, described);
  set(product, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, tensor_x);
  set(product, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY, tensor_dy);
  set(product, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, tensor_inner);
  finalize(product);

  const Descriptor conversion(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  set(conversion, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, same);
  set(conversion, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, tensor_inner);
  set(conversion, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, tensor_dw);
  finalize(conversion);

  const Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  set(graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, handle);
  set_descriptors(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, std::array{product.get(), conversion.get()});
  finalize(graph);

  for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    const Descriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    set(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    set(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, mode);
    if (cudnnBackendFinalize(heuristics.get()) != CUDNN_STATUS_SUCCESS) continue;
    std::array<cudnnBackendDescriptor_t, kMostWeightGradientPlans> raw{};
    for (cudnnBackendDescriptor_t& configuration : raw) {
      configurations_.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
      configuration = configurations_.back().get();
    }
    std::int64_t named = 0;
    TOPKNOT_CUDNN(cudnnBackendGetAttribute(heuristics.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                           CUDNN_TYPE_BACKEND_DESCRIPTOR, kMostWeightGradientPlans, &named,
                                           raw.data()));
    while (plans() > named) configurations_.pop_back();
    if (plans() > 0) return;
  }
}

const WeightGradientPlan* WeightGradientGraph::plan(int number) {
  if (number < 0 || number >= plans()) return nullptr;
  if (!plans_.contains(number)) plans_[number] = compile(number);
  return plans_[number].get();
}

std::int64_t WeightGradientGraph::engine(int number) const {
  const Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t raw = engine.get();
  std::int64_t count = 0;
  TOPKNOT_CUDNN(cudnnBackendGetAttribute(configurations_[static_cast<std::size_t>(number)].get(),
                                         CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                         &count, &raw));
  return integer(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX);
}

std::unique_ptr<const WeightGradientPlan> WeightGradientGraph::compile(int number) const {
  const Descriptor& configuration = configurations_[static_cast<std::size_t>(number)];
  auto made = std::make_unique<WeightGradientPlan>();
  set(made->plan_, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, handle_);
  set(made->plan_, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration);
  if (cudnnBackendFinalize(made->plan_.get()) != CUDNN_STATUS_SUCCESS) return nullptr;
  made->workspace_ = static_cast<std::size_t>(integer(made->plan_, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE));
  return made;
}

cudnnStatus_t WeightGradientPlan::run(cudnnHandle_t handle, const void* x, const void* dy, void* workspace,
                                      void* dw) const {
  const Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, std::array<std::int64_t, 3>{kX, kDy, kDw});
  set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, std::array<const void*, 3>{x, dy, dw});
  set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, static_cast<const void*>(workspace));
  finalize(pack);
  return cudnnBackendExecute(handle, plan_.get(), pack.get());
}

}  // namespace topknot::cuda
