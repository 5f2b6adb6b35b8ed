#include "nn/ops/cuda/conv_algorithms.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <span>
#include <tuple>

#include "nn/base/log.h"
#include "nn/core/cuda/trial.h"

namespace topknot::cuda {
namespace {

constexpr int kMostResults = 32;  // more than cuDNN has algorithms times math types

const TrialSubject kOutput("output of a convolution"), kInputGradient("input's gradient of a convolution"),
    kWeightGradient("weight's gradient of a convolution");

// A context's convolutions, by geometry, shape and type of x.
struct Convolutions {
  std::map<std::tuple<ConvGeometry, std::array<std::int64_t, 4>, DType>, Convolution> all;
};

bool unsupported(cudnnStatus_t status) {
  return CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_NOT_SUPPORTED;
}

}  // namespace

Convolution& Convolution::of(const ConvGeometry& geometry, const Shape& x, DType type) {
  Context& context = Context::current();
  const cudnnHandle_t handle = context.cudnn();  // outlives the convolutions
  auto& all = context.keep<Convolutions>().all;
  const std::tuple key{geometry, std::array{x[0], x[1], x[2], x[3]}, type};
  return all.try_emplace(key, handle, geometry, x, type).first->second;
}

Convolution::Convolution(cudnnHandle_t handle, const ConvGeometry& geometry, const Shape& x, DType type)
    : handle_(handle),
      geometry_(geometry),
      shape_(x),
      type_(type),
      x_(cudnn_activation_tensor(x, type)),
      y_(cudnn_activation_tensor(geometry.output_shape(x), type)) {
  const Shape weight = geometry.weight_shape();
  const auto size = [](std::int64_t value) { return static_cast<int>(value); };
  TOPKNOT_CUDNN(cudnnSetFilter4dDescriptor(
      w_.get(), type == DType::bf16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_FLOAT, CUDNN_TENSOR_NHWC,
      size(weight[0]), size(weight[1]), size(weight[2]), size(weight[3])));
  TOPKNOT_CUDNN(cudnnSetConvolution2dDescriptor(convolution_.get(), size(geometry.padding.height),
                                                size(geometry.padding.width), size(geometry.stride.height),
                                                size(geometry.stride.width), 1, 1, CUDNN_CROSS_CORRELATION,
                                                CUDNN_DATA_FLOAT));
  TOPKNOT_CUDNN(cudnnSetConvolutionGroupCount(convolution_.get(), size(geometry.groups)));
}

void Convolution::run(ConvProduct product, const void* a, const void* b, bool accumulate, void* out) {
  Context& context = Context::current();
  auto& [left, asked, chosen] = algorithms(product);
  const auto workspace = [&](std::size_t bytes) { return context.workspace(bytes); };
  while (!left.empty()) {
    if (!chosen) choose(product, a, b, accumulate, out);
    try {
      if (compute(product, left.front(), workspace, a, b, accumulate, out)) return;
    } catch (const CudaError& error) {
      // A failure in a capture would leave half a graph.
      if (left.size() == 1 || capturing(context.stream())) throw;
      cudaGetLastError();
      log_warning(fmt::format("{}; another algorithm than {} is taken", error.what(), left.front().name));
    }
    left.erase(left.begin());
    chosen = false;
  }
  throw ConvUnsupported(fmt::format("cuDNN {} has no {}algorithm for the {}", cudnnGetVersion(),
                                    context.options().deterministic ? "deterministic " : "", name(product)));
}

Convolution::Algorithms& Convolution::algorithms(ConvProduct product) {
  const ContextOptions& options = Context::current().options();
  Algorithms& all = algorithms_[static_cast<std::size_t>(product)];
  if (all.asked) return all;
  const bool fp32 = options.precision == Precision::fp32 && type_ == DType::f32;
  for (const auto math :
       fp32 ? std::vector{CUDNN_FMA_MATH} : std::vector{CUDNN_TENSOR_OP_MATH, CUDNN_DEFAULT_MATH})
    if (all.left.empty()) all.left = named(product, math);
  if (all.left.empty()) log_debug("cuDNN names no algorithm for the " + name(product));
  if (options.conv_plans && !options.deterministic && product == ConvProduct::weight_gradient &&
      type_ == DType::bf16 && !all.left.empty())
    add_plans(all.left);
  all.asked = true;
  return all;
}

std::vector<ConvAlgorithm> Convolution::named(ConvProduct product, cudnnMathType_t math) const {
  switch (product) {
    case ConvProduct::output:
      return named_by<cudnnConvolutionFwdAlgoPerf_t>(
          math, "cudnnGetConvolutionForwardAlgorithm_v7", cudnnGetConvolutionForwardAlgorithm_v7,
          cudnnGetConvolutionForwardWorkspaceSize, x_.get(), w_.get(), convolution_.get(), y_.get());
    case ConvProduct::input_gradient:
      return named_by<cudnnConvolutionBwdDataAlgoPerf_t>(
          math, "cudnnGetConvolutionBackwardDataAlgorithm_v7", cudnnGetConvolutionBackwardDataAlgorithm_v7,
          cudnnGetConvolutionBackwardDataWorkspaceSize, w_.get(), y_.get(), convolution_.get(), x_.get());
    default:
      return named_by<cudnnConvolutionBwdFilterAlgoPerf_t>(
          math, "cudnnGetConvolutionBackwardFilterAlgorithm_v7",
          cudnnGetConvolutionBackwardFilterAlgorithm_v7, cudnnGetConvolutionBackwardFilterWorkspaceSize,
          x_.get(), y_.get(), convolution_.get(), w_.get());
  }
}

template <class Result, class Name, class Size, class... Descriptors>
std::vector<ConvAlgorithm> Convolution::named_by(cudnnMathType_t math, const char* call, Name name, Size size,
                                                 Descriptors... descriptors) const {
  const bool deterministic = Context::current().options().deterministic, fma_only = math == CUDNN_FMA_MATH;
  std::array<Result, kMostResults> results{};
  int count = 0;
  TOPKNOT_CUDNN(cudnnSetConvolutionMathType(convolution_.get(), math));
  const cudnnStatus_t status = name(handle_, descriptors..., kMostResults, &count, results.data());
  if (unsupported(status)) return {};
  check_cudnn(status, call, __FILE__, __LINE__);
  std::vector<ConvAlgorithm> list;
  for (const Result& r : std::span(results).first(static_cast<std::size_t>(count))) {
    if (r.status != CUDNN_STATUS_SUCCESS || (deterministic && r.determinism != CUDNN_DETERMINISTIC)) continue;
    // Plain fp32 is for FMA units alone: the default would let cuDNN take TF32.
    if (fma_only && r.mathType != CUDNN_FMA_MATH && r.mathType != CUDNN_DEFAULT_MATH) continue;
    const cudnnMathType_t own = fma_only ? CUDNN_FMA_MATH : r.mathType;
    std::size_t bytes = 0;  // what the call itself will insist on
    TOPKNOT_CUDNN(cudnnSetConvolutionMathType(convolution_.get(), own));
    if (size(handle_, descriptors..., r.algo, &bytes) != CUDNN_STATUS_SUCCESS) continue;
    bytes = std::max(bytes, r.memory);
    if (bytes > kConvWorkspaceLimit) continue;
    const int number = r.algo;
    list.push_back(
        {fmt::format("algorithm {}, math type {}", number, static_cast<int>(own)), number, own, bytes});
  }
  return list;
}

void Convolution::add_plans(std::vector<ConvAlgorithm>& to) try {
  plans_.emplace(handle_, geometry_, shape_);
  for (int i = 0; i < plans_->plans(); ++i)
    to.push_back(
        {.name = fmt::format("plan {}, engine {}", i, plans_->engine(i)), .number = i, .is_plan = true});
} catch (const CudaError& error) {  // a GPU that is lost fails in the next call
  cudaGetLastError();
  log_warning(fmt::format("{}: the {} goes without cuDNN's graph API", error.what(),
                          name(ConvProduct::weight_gradient)));
}

void Convolution::choose(ConvProduct product, const void* a, const void* b, bool accumulate, void* out) {
  Context& context = Context::current();
  TOPKNOT_CHECK(!capturing(context.stream()), "the first use of the " + name(product) +
                                                  " fell into the capture of a CUDA graph; run a step of "
                                                  "this shape before");
  Algorithms& all = algorithms(product);
  // A trial writes over the output, which is still wanted if the product adds to it.
  const DType written = product == ConvProduct::weight_gradient ? DType::f32 : type_;
  const DeviceArray<std::byte> other(accumulate ? output_elements(product) * size_of(written) : 0);
  void* const to = accumulate ? other.data() : out;
  std::vector<TrialCandidate> candidates;
  for (const ConvAlgorithm& by : all.left)
    candidates.push_back({by.name, [&] {
                            DeviceArray<std::byte> memory;
                            const auto workspace = [&](std::size_t bytes) {
                              memory = DeviceArray<std::byte>(bytes);
                              return memory.data();
                            };
                            return compute(product, by, workspace, a, b, false, to);
                          }});
  const ContextOptions& options = context.options();
  const std::string key =
      fmt::format("{}, {}, precision {}{}{}", name(product), type_ == DType::bf16 ? "bf16" : "fp32",
                  static_cast<int>(options.precision), options.shared ? ", shared" : "",
                  options.conv_plans ? ", plans" : "");
  const auto best = all.left.begin() + static_cast<std::ptrdiff_t>(Trial::pick(key, candidates));
  std::rotate(all.left.begin(), best, best + 1);
  all.chosen = true;
}

bool Convolution::compute(ConvProduct product, const ConvAlgorithm& by, const Workspace& workspace,
                          const void* a, const void* b, bool accumulate, void* out) {
  if (product == ConvProduct::weight_gradient)
    return weight_gradient(by, workspace, a, b, {static_cast<float*>(out), accumulate});
  void* const memory = workspace(by.workspace);
  if (execute(product, by, memory, a, b, accumulate, out)) return true;
  if (!accumulate) return false;
  // Not every algorithm can add to what is there.
  const std::size_t elements = output_elements(product);
  const DeviceArray<std::byte> sum(elements * size_of(type_));
  if (!execute(product, by, memory, a, b, false, sum.data())) return false;
  backend(Context::current().device()).add(type_, out, sum.data(), out, elements);
  return true;
}

bool Convolution::weight_gradient(const ConvAlgorithm& by, const Workspace& workspace, const void* x,
                                  const void* dy, const GradientTarget& dw) {
  constexpr auto product = ConvProduct::weight_gradient;
  const cudaStream_t stream = Context::current().stream();
  const FilterShape shape{geometry_.out, geometry_.in / geometry_.groups,
                          geometry_.kernel.height * geometry_.kernel.width};
  if (!by.is_plan) {
    const DeviceArray<std::byte> filter(shape.size() * size_of(type_));
    if (!execute(product, by, workspace(by.workspace), x, dy, false, filter.data())) return false;
    weight_from_filter(stream, filter.data(), type_ == DType::bf16, dw.data, dw.accumulate, shape);
    return true;
  }
  const WeightGradientPlan* plan = plans_->plan(by.number);
  if (!plan || plan->workspace() > kConvWorkspaceLimit) return false;
  const bool direct = (shape.in == 1 || shape.taps == 1) && !dw.accumulate &&  // KRSC is OIHW then
                      reinterpret_cast<std::uintptr_t>(dw.data) % kCudnnGraphAlignment == 0;
  const DeviceArray<float> filter(direct ? 0 : shape.size());
  if (!succeeded(plan->run(handle_, x, dy, workspace(plan->workspace()), direct ? dw.data : filter.data()),
                 "cudnnBackendExecute", product))
    return false;
  if (!direct) weight_from_filter(stream, filter.data(), false, dw.data, dw.accumulate, shape);
  return true;
}

bool Convolution::execute(ConvProduct product, const ConvAlgorithm& by, void* workspace, const void* a,
                          const void* b, bool accumulate, void* out) const {
  const float alpha = 1, beta = accumulate ? 1 : 0;
  TOPKNOT_CUDNN(cudnnSetConvolutionMathType(convolution_.get(), by.math));
  switch (product) {
    case ConvProduct::output:
      return succeeded(cudnnConvolutionForward(handle_, &alpha, x_.get(), a, w_.get(), b, convolution_.get(),
                                               static_cast<cudnnConvolutionFwdAlgo_t>(by.number), workspace,
                                               by.workspace, &beta, y_.get(), out),
                       "cudnnConvolutionForward", product);
    case ConvProduct::input_gradient:
      return succeeded(
          cudnnConvolutionBackwardData(handle_, &alpha, w_.get(), a, y_.get(), b, convolution_.get(),
                                       static_cast<cudnnConvolutionBwdDataAlgo_t>(by.number), workspace,
                                       by.workspace, &beta, x_.get(), out),
          "cudnnConvolutionBackwardData", product);
    default:
      return succeeded(
          cudnnConvolutionBackwardFilter(handle_, &alpha, x_.get(), a, y_.get(), b, convolution_.get(),
                                         static_cast<cudnnConvolutionBwdFilterAlgo_t>(by.number), workspace,
                                         by.workspace, &beta, w_.get(), out),
          "cudnnConvolutionBackwardFilter", product);
  }
}

bool Convolution::succeeded(cudnnStatus_t status, const char* call, ConvProduct product) const {
  if (status == CUDNN_STATUS_SUCCESS) return true;
  if (unsupported(status)) {
    cudaGetLastError();
    return false;
  }
  check_cudnn(status, (std::string(call) + " for the " + name(product)).c_str(), __FILE__, __LINE__);
  return false;
}

std::string Convolution::name(ConvProduct product) const {
  const TrialSubject& subject = product == ConvProduct::output           ? kOutput
                                : product == ConvProduct::input_gradient ? kInputGradient
                                                                         : kWeightGradient;
  const ConvGeometry& g = geometry_;
  return fmt::format("{} of {} with {}, stride {}x{}, padding {}x{}, {} groups", subject.name, shape_.str(),
                     g.weight_shape().str(), g.stride.height, g.stride.width, g.padding.height,
                     g.padding.width, g.groups);
}

std::size_t Convolution::output_elements(ConvProduct product) const {
  const Shape out = product == ConvProduct::output           ? geometry_.output_shape(shape_)
                    : product == ConvProduct::input_gradient ? shape_
                                                             : geometry_.weight_shape();
  return static_cast<std::size_t>(out.numel());
}

}  // namespace topknot::cuda
