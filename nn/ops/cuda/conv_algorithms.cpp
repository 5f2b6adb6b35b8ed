#include "nn/ops/cuda/conv_algorithms.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <map>
#include <mutex>
#include <vector>

#include "nn/base/algorithm_cache.h"
#include "nn/base/log.h"
#include "nn/core/cuda/trial.h"

namespace topknot::cuda {
namespace {

constexpr int kMostResults = 32;  // more than cuDNN has algorithms times math types

// cuDNN's result for an algorithm; its three result types differ in the enumeration only.
struct Candidate {
  ConvAlgorithm algorithm;
  cudnnMathType_t reported;
  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
  float time = 0;
  bool deterministic = false;
};

template <class Result>
std::vector<Candidate> candidates(const std::array<Result, kMostResults>& results, int count) {
  std::vector<Candidate> list;
  for (int i = 0; i < count; ++i) {
    const Result& r = results[static_cast<std::size_t>(i)];
    list.push_back({{static_cast<int>(r.algo), r.mathType, r.memory},
                    r.mathType,
                    r.status,
                    r.time,
                    r.determinism == CUDNN_DETERMINISTIC});
  }
  return list;
}

// Parses "NUMBER ..."; nothing for any other text.
std::vector<std::int64_t> numbers(const std::string& text) {
  std::vector<std::int64_t> list;
  const char *at = text.data(), *const end = at + text.size();
  while (at != end) {
    const auto [next, failed] = std::from_chars(at, end, list.emplace_back());
    if (failed != std::errc()) return {};
    at = next != end && *next == ' ' ? next + 1 : next;
  }
  return list;
}

// Shape, geometry, type and product; precision, determinism and GPU.
using Key = std::array<std::int64_t, 18>;

// Best first; those before `first` did not fit into memory, or failed.
struct Choice {
  std::vector<ConvAlgorithm> algorithms;
  std::size_t first = 0;
};

struct Choices {
  std::mutex mutex;  // held while something is timed, so that ranks of a process do not time at once
  std::map<Key, Choice> by_key;
  std::map<Key, bool> supported;
};

Choices& choices() {
  static Choices instance;
  return instance;
}

// One per rank. Its plans live as long as the CUDA graphs that run them.
struct Graphs {
  std::map<Key, WeightGradientGraph> by_key;
};

bool unsupported(cudnnStatus_t status) {
  return CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_NOT_SUPPORTED;
}

// Whether the call has an answer. None if cuDNN does not do this convolution with this arithmetic; other
// failures throw.
bool answered(cudnnStatus_t status, const char* call) {
  if (unsupported(status)) return false;
  check_cudnn(status, call, __FILE__, __LINE__);
  return true;
}

// Allocates as much as cuDNN could use, less if memory is short.
DeviceArray<std::byte> workspace_up_to(std::size_t bytes) {
  constexpr std::size_t kLeast = std::size_t{1} << 20;
  for (;; bytes = bytes / 2 < kLeast ? 0 : bytes / 2) try {
      return DeviceArray<std::byte>(bytes);
    } catch (const OutOfMemory&) {
      if (bytes == 0) throw;
    }
}

}  // namespace

// One product's choice. All of it runs with the lock held.
class ConvChooser {
 public:
  ConvChooser(const Convolution& convolution, Context& context, ConvProduct product)
      : of_(convolution), context_(context), handle_(context.cudnn()), product_(product) {}

  Key key() const {
    const ConvGeometry& g = of_.geometry_;
    const ContextOptions& options = context_.options();
    return {of_.shape_[0],
            of_.shape_[1],
            of_.shape_[2],
            of_.shape_[3],
            g.out,
            g.kernel.height,
            g.kernel.width,
            g.stride.height,
            g.stride.width,
            g.padding.height,
            g.padding.width,
            g.groups,
            static_cast<std::int64_t>(of_.type_),
            static_cast<std::int64_t>(product_),
            static_cast<std::int64_t>(options.precision),
            options.deterministic,
            may_use_plans(),
            options.device};
  }

  std::string name() const {
    const char* what[] = {"the output", "the input's gradient", "the weight's gradient"};
    const ConvGeometry& g = of_.geometry_;
    return fmt::format("{} of a convolution of {} with {}, stride {}x{}, padding {}x{}, {} groups",
                       what[static_cast<int>(product_)], of_.shape_.str(), g.weight_shape().str(),
                       g.stride.height, g.stride.width, g.padding.height, g.padding.width, g.groups);
  }

  // `out` is written over.
  std::vector<ConvAlgorithm> choose(const void* a, const void* b, void* out) const {
    const bool timing = !context_.options().deterministic;
    if (const auto known = timing ? recalled() : std::vector<ConvAlgorithm>(); !known.empty()) return known;
    for (const cudnnMathType_t math : maths()) {
      std::vector<Candidate> list = foreseen(math);
      bool timed_all = false;
      if (timing && !list.empty()) {
        std::size_t most = 0;
        for (const Candidate& c : list) most = std::max(most, c.algorithm.workspace);
        TOPKNOT_CUDNN(cudnnSetConvolutionMathType(of_.convolution_.get(), math));
        const DeviceArray<std::byte> workspace = workspace_up_to(most);
        std::vector<Candidate> measured = admissible(timed_well(a, b, out, workspace));
        // The time of a row with another arithmetic than it will run with, TF32 perhaps, says nothing.
        if (fma_only())
          std::erase_if(measured, [](const Candidate& c) { return c.reported != CUDNN_FMA_MATH; });
        std::stable_sort(measured.begin(), measured.end(),
                         [](const Candidate& p, const Candidate& q) { return p.time < q.time; });
        if (!measured.empty()) {
          timed_all = workspace.bytes() == most, list = std::move(measured);
          if (may_use_plans()) timed_all = try_plans(list, a, b) && timed_all;
        }
      }
      std::vector<ConvAlgorithm> best;
      for (const Candidate& c : list) best.push_back(c.algorithm);
      if (timed_all) keep(best);
      if (!best.empty()) {
        log_debug(fmt::format("{}: {}", name(), described(best.front())));
        return best;
      }
    }
    give_up();
  }

  static std::string described(const ConvAlgorithm& a) {
    return a.is_plan()
               ? fmt::format("plan {} of cuDNN's graph API, engine {}, in fp32", a.algorithm, a.engine)
               : fmt::format("cuDNN's algorithm {}", a.algorithm);
  }

  // Compiled at its first use by this rank. Null: cuDNN cannot make it, or it is another one now.
  const WeightGradientPlan* plan(const ConvAlgorithm& a) const try {
    WeightGradientGraph& all = graph();
    if (!all.compiled(a.algorithm)) check_not_capturing();
    const WeightGradientPlan* plan = all.plan(a.algorithm);
    return plan && plan->engine() == a.engine && plan->workspace() == a.workspace ? plan : nullptr;
  } catch (const CudaError&) {
    cudaGetLastError();
    return nullptr;
  }

  void check_not_capturing() const {
    TOPKNOT_CHECK(!capturing(context_.stream()), "the first use of " + name() +
                                                     " fell into the capture of a CUDA graph; run a step of "
                                                     "this shape before");
  }

  [[noreturn]] void give_up() const {
    choices().supported[key()] = false;
    throw ConvUnsupported(without());
  }
  std::string without() const {
    return fmt::format("cuDNN {} has no {}algorithm for {}", cudnnGetVersion(),
                       context_.options().deterministic ? "deterministic " : "", name());
  }

  // Whether cuDNN's heuristics name any algorithm.
  bool supported() const {
    const auto all = maths();
    return std::any_of(all.begin(), all.end(), [&](cudnnMathType_t math) { return !foreseen(math).empty(); });
  }

 private:
  // An earlier run's choice, if cuDNN still knows all of it: rows of (algorithm, math type, workspace), or, of
  // a plan, (-1 - its number, engine, workspace).
  std::vector<ConvAlgorithm> recalled() const {
    const auto kept = context_.algorithm_cache().find(cache_key());
    const std::vector<std::int64_t> all = numbers(kept.value_or(""));
    if (all.size() % 3 != 0) return {};
    std::vector<Candidate> rows;
    for (auto at = all.begin(); at != all.end(); at += 3) {
      if (at[0] < 0) {
        const ConvAlgorithm a{static_cast<int>(-1 - at[0]), CUDNN_DEFAULT_MATH,
                              static_cast<std::size_t>(at[2]), static_cast<int>(at[1])};
        if (!may_use_plans() || !a.is_plan() || !plan(a)) return {};
        rows.push_back({a, a.math});
        continue;
      }
      if (at[1] < CUDNN_DEFAULT_MATH || at[1] > CUDNN_FMA_MATH) return {};
      const auto math = static_cast<cudnnMathType_t>(at[1]);
      rows.push_back({{static_cast<int>(at[0]), math, static_cast<std::size_t>(at[2])}, math});
    }
    std::vector<ConvAlgorithm> algorithms;
    for (const Candidate& c : admissible(rows)) algorithms.push_back(c.algorithm);
    return algorithms.size() == rows.size() ? algorithms : std::vector<ConvAlgorithm>();
  }
  void keep(const std::vector<ConvAlgorithm>& choice) const {
    std::vector<std::int64_t> rows;
    for (const ConvAlgorithm& a : choice)
      rows.insert(rows.end(), {a.is_plan() ? -1 - a.algorithm : a.algorithm, a.is_plan() ? a.engine : a.math,
                               static_cast<std::int64_t>(a.workspace)});
    context_.algorithm_cache().keep(cache_key(), fmt::format("{}", fmt::join(rows, " ")));
  }
  std::string cache_key() const {
    return fmt::format("{}, {}, precision {}{}{}", name(), of_.type_ == DType::bf16 ? "bf16" : "fp32",
                       static_cast<int>(context_.options().precision),
                       context_.options().shared ? ", shared" : "", may_use_plans() ? ", plans" : "");
  }

  // Plain fp32 is for FMA units alone: the default would let cuDNN take TF32. Others: as cuDNN finds best.
  bool fma_only() const { return context_.options().precision == Precision::fp32 && of_.type_ == DType::f32; }
  std::vector<cudnnMathType_t> maths() const {
    return fma_only() ? std::vector{CUDNN_FMA_MATH} : std::vector{CUDNN_TENSOR_OP_MATH, CUDNN_DEFAULT_MATH};
  }

  std::vector<Candidate> foreseen(cudnnMathType_t math) const {
    TOPKNOT_CUDNN(cudnnSetConvolutionMathType(of_.convolution_.get(), math));
    return admissible(predicted());
  }

  std::vector<Candidate> admissible(const std::vector<Candidate>& from) const {
    std::vector<Candidate> list;
    for (Candidate c : from) {
      if (c.algorithm.is_plan()) {
        list.push_back(c);
        continue;
      }
      if (c.status != CUDNN_STATUS_SUCCESS || (context_.options().deterministic && !c.deterministic))
        continue;
      if (fma_only() && c.algorithm.math != CUDNN_FMA_MATH) {
        if (c.algorithm.math != CUDNN_DEFAULT_MATH) continue;
        c.algorithm.math = CUDNN_FMA_MATH;
      }
      std::size_t bytes = 0;  // what the call itself will insist on
      TOPKNOT_CUDNN(cudnnSetConvolutionMathType(of_.convolution_.get(), c.algorithm.math));
      if (workspace_size(c.algorithm.algorithm, bytes) != CUDNN_STATUS_SUCCESS) continue;
      c.algorithm.workspace = std::max(c.algorithm.workspace, bytes);
      if (c.algorithm.workspace <= kConvWorkspaceLimit) list.push_back(c);
    }
    return list;
  }

  // Without timing, as in deterministic runs, none is taken.
  bool may_use_plans() const {
    return context_.options().conv_plans && product_ == ConvProduct::weight_gradient &&
           of_.type_ == DType::bf16;
  }
  WeightGradientGraph& graph() const {
    auto& graphs = context_.keep<Graphs>().by_key;
    if (const auto known = graphs.find(key()); known != graphs.end()) return known->second;
    check_not_capturing();
    return graphs.try_emplace(key(), handle_, of_.geometry_, of_.shape_).first->second;
  }

  // Puts the fastest plan before the list of timed algorithms if it is faster than they are, with the way of the
  // gradient into the arena. False if memory was too short for one.
  bool try_plans(std::vector<Candidate>& list, const void* x, const void* dy) const try {
    WeightGradientGraph& all = graph();
    if (all.plans() == 0) return true;
    const DeviceArray<float> dw(of_.filter_shape().size());
    const DeviceArray<std::byte> filter = of_.scratch(product_);
    Candidate best = list.front();
    best.time += shortest_ms(context_.stream(), [&](cudaStream_t) {
      weight_from_filter(context_.stream(), filter.data(), true, dw.data(), false, of_.filter_shape());
      return true;
    });
    float fastest = std::numeric_limits<float>::infinity();
    for (int i = 0; i < all.plans(); ++i) {
      const WeightGradientPlan* plan = all.plan(i);
      if (!plan || plan->workspace() > kConvWorkspaceLimit) continue;
      const ConvAlgorithm a{i, CUDNN_DEFAULT_MATH, plan->workspace(), static_cast<int>(plan->engine())};
      const DeviceArray<std::byte> workspace(a.workspace);
      const float time = shortest_ms(context_.stream(), [&](cudaStream_t) {
        return of_.execute_weight_gradient(a, plan, workspace.data(), x, dy, {dw.data()}) ==
               CUDNN_STATUS_SUCCESS;
      });
      fastest = std::min(fastest, time);
      if (time < best.time) best = {a, a.math, CUDNN_STATUS_SUCCESS, time};
    }
    log_debug(fmt::format("{}: a plan takes {:f} ms, the best {:f}", name(), fastest, best.time));
    if (best.algorithm.is_plan()) list.insert(list.begin(), best);
    return true;
  } catch (const OutOfMemory&) {
    return false;
  } catch (const CudaError& error) {  // a GPU that is lost fails in the next call
    cudaGetLastError();
    log_warning(std::string(error.what()) + ": " + name() + " goes without cuDNN's graph API");
    return true;
  }

  // The algorithms that cuDNN's heuristics propose, in their order.
  std::vector<Candidate> predicted() const {
    switch (product_) {
      case ConvProduct::output:
        return predicted_by<cudnnConvolutionFwdAlgoPerf_t>(cudnnGetConvolutionForwardAlgorithm_v7,
                                                           "cudnnGetConvolutionForwardAlgorithm_v7", x(), w(),
                                                           conv(), y());
      case ConvProduct::input_gradient:
        return predicted_by<cudnnConvolutionBwdDataAlgoPerf_t>(cudnnGetConvolutionBackwardDataAlgorithm_v7,
                                                               "cudnnGetConvolutionBackwardDataAlgorithm_v7",
                                                               w(), y(), conv(), x());
      default:
        return predicted_by<cudnnConvolutionBwdFilterAlgoPerf_t>(
            cudnnGetConvolutionBackwardFilterAlgorithm_v7, "cudnnGetConvolutionBackwardFilterAlgorithm_v7",
            x(), y(), conv(), w());
    }
  }
  template <class Result, class Call, class... Descriptors>
  std::vector<Candidate> predicted_by(Call call, const char* name, Descriptors... descriptors) const {
    std::array<Result, kMostResults> results{};
    int n = 0;
    if (!answered(call(handle_, descriptors..., kMostResults, &n, results.data()), name)) return {};
    return candidates(results, n);
  }

  // The shortest of kConvTimings times of each.
  std::vector<Candidate> timed_well(const void* a, const void* b, void* out,
                                    const DeviceArray<std::byte>& memory) const {
    std::vector<Candidate> best;
    for (int i = 0; i < kConvTimings; ++i) {
      const std::vector<Candidate> once = timed(a, b, out, memory);
      if (once.empty()) break;
      for (const Candidate& c : once) {
        const auto same = std::find_if(best.begin(), best.end(), [&](const Candidate& known) {
          return known.algorithm.algorithm == c.algorithm.algorithm && known.reported == c.reported;
        });
        if (same == best.end())
          best.push_back(c);
        else if (c.status == CUDNN_STATUS_SUCCESS &&
                 (same->status != CUDNN_STATUS_SUCCESS || c.time < same->time))
          *same = c;
      }
    }
    return best;
  }

  // Measured on this GPU.
  std::vector<Candidate> timed(const void* a, const void* b, void* out,
                               const DeviceArray<std::byte>& memory) const {
    switch (product_) {
      case ConvProduct::output:
        return timed_by<cudnnConvolutionFwdAlgoPerf_t>(cudnnFindConvolutionForwardAlgorithmEx, memory, x(), a,
                                                       w(), b, conv(), y(), out);
      case ConvProduct::input_gradient:
        return timed_by<cudnnConvolutionBwdDataAlgoPerf_t>(cudnnFindConvolutionBackwardDataAlgorithmEx,
                                                           memory, w(), a, y(), b, conv(), x(), out);
      default:
        return timed_by<cudnnConvolutionBwdFilterAlgoPerf_t>(cudnnFindConvolutionBackwardFilterAlgorithmEx,
                                                             memory, x(), a, y(), b, conv(), w(), out);
    }
  }
  // None if timing failed: the heuristics' order stands then. A GPU that is lost fails in the next call.
  template <class Result, class Call, class... Arguments>
  std::vector<Candidate> timed_by(Call call, const DeviceArray<std::byte>& memory,
                                  Arguments... arguments) const {
    std::array<Result, kMostResults> results{};
    int n = 0;
    const cudnnStatus_t status =
        call(handle_, arguments..., kMostResults, &n, results.data(), memory.data(), memory.bytes());
    if (status == CUDNN_STATUS_SUCCESS) return candidates(results, n);
    cudaGetLastError();
    log_warning(
        fmt::format("cuDNN cannot time {} ({}): its heuristics choose", name(), cudnnGetErrorString(status)));
    return {};
  }

  cudnnStatus_t workspace_size(int algorithm, std::size_t& bytes) const {
    switch (product_) {
      case ConvProduct::output:
        return cudnnGetConvolutionForwardWorkspaceSize(
            handle_, x(), w(), conv(), y(), static_cast<cudnnConvolutionFwdAlgo_t>(algorithm), &bytes);
      case ConvProduct::input_gradient:
        return cudnnGetConvolutionBackwardDataWorkspaceSize(
            handle_, w(), y(), conv(), x(), static_cast<cudnnConvolutionBwdDataAlgo_t>(algorithm), &bytes);
      default:
        return cudnnGetConvolutionBackwardFilterWorkspaceSize(
            handle_, x(), y(), conv(), w(), static_cast<cudnnConvolutionBwdFilterAlgo_t>(algorithm), &bytes);
    }
  }

  cudnnTensorDescriptor_t x() const { return of_.x_.get(); }
  cudnnTensorDescriptor_t y() const { return of_.y_.get(); }
  cudnnFilterDescriptor_t w() const { return of_.w_.get(); }
  cudnnConvolutionDescriptor_t conv() const { return of_.convolution_.get(); }

  const Convolution& of_;
  Context& context_;
  cudnnHandle_t handle_;
  ConvProduct product_;
};

Convolution::Convolution(const ConvGeometry& geometry, const Shape& x, DType type)
    : geometry_(geometry),
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

std::size_t Convolution::elements_of_output(ConvProduct product) const {
  const Shape out = product == ConvProduct::output           ? geometry_.output_shape(shape_)
                    : product == ConvProduct::input_gradient ? shape_
                                                             : geometry_.weight_shape();
  return static_cast<std::size_t>(out.numel());
}

DeviceArray<std::byte> Convolution::scratch(ConvProduct product) const {
  return DeviceArray<std::byte>(elements_of_output(product) * size_of(type_));
}

FilterShape Convolution::filter_shape() const {
  return {geometry_.out, geometry_.in / geometry_.groups, geometry_.kernel.height * geometry_.kernel.width};
}

cudnnStatus_t Convolution::execute(ConvProduct product, const ConvAlgorithm& with, void* workspace,
                                   const void* a, const void* b, float beta, void* out) const {
  const cudnnHandle_t handle = Context::current().cudnn();
  const float alpha = 1.0f;
  TOPKNOT_CUDNN(cudnnSetConvolutionMathType(convolution_.get(), with.math));
  switch (product) {
    case ConvProduct::output:
      return cudnnConvolutionForward(handle, &alpha, x_.get(), a, w_.get(), b, convolution_.get(),
                                     static_cast<cudnnConvolutionFwdAlgo_t>(with.algorithm), workspace,
                                     with.workspace, &beta, y_.get(), out);
    case ConvProduct::input_gradient:
      return cudnnConvolutionBackwardData(handle, &alpha, w_.get(), a, y_.get(), b, convolution_.get(),
                                          static_cast<cudnnConvolutionBwdDataAlgo_t>(with.algorithm),
                                          workspace, with.workspace, &beta, x_.get(), out);
    default:
      return cudnnConvolutionBackwardFilter(handle, &alpha, x_.get(), a, y_.get(), b, convolution_.get(),
                                            static_cast<cudnnConvolutionBwdFilterAlgo_t>(with.algorithm),
                                            workspace, with.workspace, &beta, w_.get(), out);
  }
}

cudnnStatus_t Convolution::execute_weight_gradient(const ConvAlgorithm& with, const WeightGradientPlan* plan,
                                                   void* workspace, const void* x, const void* dy,
                                                   const GradientTarget& dw) const {
  Context& context = Context::current();
  const FilterShape shape = filter_shape();
  const bool krsc = shape.in == 1 || shape.taps == 1;  // as well as OIHW
  if (plan && krsc && !dw.accumulate && reinterpret_cast<std::uintptr_t>(dw.data) % kCudnnGraphAlignment == 0)
    return plan->run(context.cudnn(), x, dy, workspace, dw.data);
  const DeviceArray<std::byte> filter(shape.size() * (plan ? sizeof(float) : size_of(type_)));
  const cudnnStatus_t status =
      plan ? plan->run(context.cudnn(), x, dy, workspace, filter.data())
           : execute(ConvProduct::weight_gradient, with, workspace, x, dy, 0.0f, filter.data());
  if (status == CUDNN_STATUS_SUCCESS)
    weight_from_filter(context.stream(), filter.data(), !plan && type_ == DType::bf16, dw.data, dw.accumulate,
                       shape);
  return status;
}

void Convolution::run(ConvProduct product, const void* a, const void* b, float beta, void* out) const {
  // Timing writes over the output, which is still wanted if the product adds to it.
  run_best(product, a, b, beta == 0 ? out : nullptr, [&](const ConvAlgorithm& with, void* workspace) {
    cudnnStatus_t status = execute(product, with, workspace, a, b, beta, out);
    if (beta != 0 && unsupported(status)) {  // not every algorithm can add to what is there
      const DeviceArray<std::byte> sum = scratch(product);
      status = execute(product, with, workspace, a, b, 0.0f, sum.data());
      if (status == CUDNN_STATUS_SUCCESS)
        backend(Context::current().device()).add(type_, out, sum.data(), out, elements_of_output(product));
    }
    return status;
  });
}

void Convolution::weight_gradient(const void* x, const void* dy, const GradientTarget& dw) const {
  constexpr auto product = ConvProduct::weight_gradient;
  run_best(product, x, dy, nullptr, [&](const ConvAlgorithm& with, void* workspace) {
    const WeightGradientPlan* plan = nullptr;
    if (with.is_plan() && !(plan = ConvChooser(*this, Context::current(), product).plan(with)))
      return CUDNN_STATUS_NOT_SUPPORTED;
    return execute_weight_gradient(with, plan, workspace, x, dy, dw);
  });
}

template <class Execute>
void Convolution::run_best(ConvProduct product, const void* a, const void* b, void* out,
                           const Execute& execute) const {
  Context& context = Context::current();
  const ConvChooser chooser(*this, context, product);
  const Key key = chooser.key();
  const auto choice = [&]() -> Choice& {
    const auto found = choices().by_key.find(key);
    if (found != choices().by_key.end()) return found->second;
    chooser.check_not_capturing();
    const DeviceArray<std::byte> other = out ? DeviceArray<std::byte>() : scratch(product);
    return choices().by_key[key] = Choice{chooser.choose(a, b, out ? out : other.data())};
  };

  // Memory may have run short since the choice, or for this rank only; and what cuDNN named and timed may fail.
  for (bool last = false;;) {
    std::size_t number = 0;
    ConvAlgorithm algorithm;
    {
      const std::lock_guard lock(choices().mutex);
      number = choice().first;
      algorithm = choice().algorithms[number];
      last = number + 1 == choice().algorithms.size();
    }
    try {
      const cudnnStatus_t status = execute(algorithm, context.workspace(algorithm.workspace));
      if (status == CUDNN_STATUS_SUCCESS) return;
      const char* calls[] = {"cudnnConvolutionForward", "cudnnConvolutionBackwardData",
                             "cudnnConvolutionBackwardFilter"};
      const std::string call = std::string(calls[static_cast<int>(product)]) + " for " + chooser.name();
      if (last && unsupported(status) && !capturing(context.stream())) {
        cudaGetLastError();
        const std::lock_guard lock(choices().mutex);
        chooser.give_up();
      }
      // A failure in a capture would leave half a graph.
      if (last || capturing(context.stream())) check_cudnn(status, call.c_str(), __FILE__, __LINE__);
      cudaGetLastError();
      log_warning(fmt::format("{} failed by {} ({}); another one is taken", call,
                              chooser.described(algorithm), cudnnGetErrorString(status)));
    } catch (const OutOfMemory&) {
      if (last) throw;
    }
    const std::lock_guard lock(choices().mutex);
    if (choice().first == number) ++choice().first;
  }
}

bool Convolution::supported(ConvProduct product) const {
  const ConvChooser chooser(*this, Context::current(), product);
  const Key key = chooser.key();
  const std::lock_guard lock(choices().mutex);
  if (const auto known = choices().supported.find(key); known != choices().supported.end())
    return known->second;
  const bool answer = chooser.supported();
  if (!answer) log_debug(chooser.without());
  return choices().supported[key] = answer;
}

void forget_conv_algorithms() {
  const std::lock_guard lock(choices().mutex);
  choices().by_key.clear();
  choices().supported.clear();
}

}  // namespace topknot::cuda
