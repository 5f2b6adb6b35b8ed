#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>

#include "nn/base/check.h"
#include "nn/core/pass_cost.h"
#include "nn/core/simd.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/cpu/conv.h"
#include "nn/ops/cpu/onednn.h"
#include "nn/ops/kernels.h"

namespace topknot {

Shape ConvGeometry::output_shape(const Shape& x) const {
  TOPKNOT_CHECK(in > 0 && out > 0 && std::min(kernel.height, kernel.width) > 0 &&
                    std::min(stride.height, stride.width) > 0 && std::min(padding.height, padding.width) >= 0,
                "convolution: channels, kernel and stride must be positive");
  TOPKNOT_CHECK(
      groups > 0 && in % groups == 0 && out % groups == 0,
      fmt::format("convolution: {} groups do not divide {} input and {} output channels", groups, in, out));
  TOPKNOT_CHECK(x.rank() == 4 && x[1] == in,
                fmt::format("convolution: input {} for {} input channels", x.str(), in));
  const std::int64_t height = x[2] + 2 * padding.height - kernel.height,
                     width = x[3] + 2 * padding.width - kernel.width;
  TOPKNOT_CHECK(height >= 0 && width >= 0, "convolution: a kernel larger than the padded input " + x.str());
  return {x[0], out, height / stride.height + 1, width / stride.width + 1};
}

Variable conv2d(const Variable& x, const Variable& weight, const Variable& bias,
                const ConvGeometry& geometry) {
  const Shape shape = geometry.output_shape(x.shape());
  TOPKNOT_CHECK(weight.shape() == geometry.weight_shape(), "conv2d: weight " + weight.shape().str());
  TOPKNOT_CHECK(!bias.defined() || bias.shape() == Shape{geometry.out}, "conv2d: bias " + bias.shape().str());
  const auto& kernels = kernels_for<ConvKernels>(x);
  Tensor y = Tensor::empty(shape, kernels.output_layout(geometry), x.value().device(), x.value().dtype());
  PassCost::add_flops(geometry.flops(x.shape()));
  const OpState state =
      kernels.forward(geometry, x.value(), weight.value(), bias.defined() ? bias.value() : Tensor(), y);
  std::vector<Variable> inputs{x, weight};
  if (bias.defined()) inputs.push_back(bias);
  return {"conv2d", y, std::move(inputs), [=, &kernels](Tensor grad) {
            PassCost::add_flops(geometry.flops(x.shape()) * (weight.requires_grad() + x.requires_grad()));
            WeightedGradients out(x, weight, bias);
            kernels.backward(geometry, x.value(), weight.value(), grad, state, out);
            x.accumulate_grad(std::move(out.x.tensor));
          }};
}

namespace {

// On a CPU by oneDNN, in one of two ways:
//  - chunked: each thread works through its images a few at a time with single-threaded primitives. What one
//    step of a layer writes is still in that core's cache when the next step reads it.
//  - whole: one primitive for the batch, threaded by oneDNN. For layers with many channels, where a chunk
//    would repeat the transformation of large weights.
// oneDNN gets a PaddedConv in place of a layer: plain activations if it has only its reference implementation
// for blocked ones. Layers that another way of conv.h serves go there.

using dnnl::memory;

// Copies weights from one format or type to another.
class Repack {
 public:
  Repack(const memory::desc& from, const memory::desc& to) : bytes_(to.get_size()), same_(from == to) {
    if (same_) return;
    const dnnl::reorder::primitive_desc desc(dnnl_cpu_engine(), from, dnnl_cpu_engine(), to,
                                             user_scratchpad());
    kernel_ = std::make_unique<DnnlKernel>(dnnl::reorder(desc),
                                           DnnlKernel::Arguments{{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}},
                                           desc.scratchpad_desc(), 1);
  }
  bool same() const { return same_; }
  void run(const void* from, void* to) const { kernel_->run(0, {from, to}); }
  // `from` itself if nothing is to be done, else the copy, kept alive by `storage`.
  const void* run(const void* from, Tensor& storage) const {
    if (same_) return from;
    storage = Tensor::empty({static_cast<std::int64_t>(bytes_ / sizeof(float) + 1)});
    run(from, storage.data());
    return storage.data();
  }

 private:
  std::size_t bytes_;  // of the destination
  bool same_;
  std::unique_ptr<DnnlKernel> kernel_;
};

// The weights of a convolution: as the arena holds them, in f32, or in the format of the primitive's choice.
memory::desc weight_desc(const ConvGeometry& g, bool plain, DType type = DType::f32) {
  using tag = memory::format_tag;
  memory::dims dims{g.out, g.in / g.groups, g.kernel.height, g.kernel.width};
  if (g.groups > 1) {
    dims.front() /= g.groups;
    dims.insert(dims.begin(), g.groups);
  }
  return {dims, onednn_type(type), !plain ? tag::any : g.groups > 1 ? tag::goihw : tag::oihw};
}

// oneDNN's own way of saying that it has no fast kernel.
bool is_reference(const dnnl::primitive_desc_base& desc) {
  return std::string(desc.impl_info_str()).starts_with("ref");
}

// The three primitives for one number of images of a size.
struct Plan {
  Plan(const PaddedConv& inside, std::int64_t images, std::int64_t height, std::int64_t width, DType type,
       int threads) {
    const ConvGeometry& g = inside.g;
    constexpr auto algorithm = dnnl::algorithm::convolution_direct;
    const Shape x{images, g.in, height, width};
    const memory::desc src = activation_desc(x, inside.in, type),
                       dst = activation_desc(g.output_shape(x), inside.out, type);
    const memory::desc any = weight_desc(g, false, type), any_f32 = weight_desc(g, false);
    const memory::dims strides{g.stride.height, g.stride.width}, padding{g.padding.height, g.padding.width};
    const dnnl::primitive_attr attributes = user_scratchpad();
    const auto& engine = dnnl_cpu_engine();

    const dnnl::convolution_forward::primitive_desc f(
        {dnnl::prop_kind::forward_training, algorithm, src, any, dst, strides, padding, padding}, attributes,
        engine);
    forward = std::make_unique<DnnlKernel>(
        dnnl::convolution_forward(f),
        DnnlKernel::Arguments{{DNNL_ARG_SRC, src}, {DNNL_ARG_WEIGHTS, f.weights_desc()}, {DNNL_ARG_DST, dst}},
        f.scratchpad_desc(), threads);
    const dnnl::convolution_backward_weights::primitive_desc w(
        {algorithm, src, any_f32, dst, strides, padding, padding}, attributes, engine, f);
    own_weight_gradient = type == DType::f32 && g.depthwise() && inside.blocked && is_reference(w);
    // In bf16 oneDNN 2.6 reads x from a copy in its scratchpad in which the columns lie by their remainder
    // modulo the stride, padding as zeros among them. Of a remainder that no column has, as in an image
    // narrower than the stride, it writes nothing, yet reads it; and it reads after x and dy.
    const bool unwritten = type == DType::bf16 && width < g.stride.width;
    backward_weights = std::make_unique<DnnlKernel>(
        dnnl::convolution_backward_weights(w),
        DnnlKernel::Arguments{
            {DNNL_ARG_SRC, src}, {DNNL_ARG_DIFF_DST, dst}, {DNNL_ARG_DIFF_WEIGHTS, w.diff_weights_desc()}},
        w.scratchpad_desc(), threads, unwritten);
    const dnnl::convolution_backward_data::primitive_desc d(
        {algorithm, src, any, dst, strides, padding, padding}, attributes, engine, f);
    backward_data = std::make_unique<DnnlKernel>(
        dnnl::convolution_backward_data(d),
        DnnlKernel::Arguments{
            {DNNL_ARG_DIFF_DST, dst}, {DNNL_ARG_WEIGHTS, d.weights_desc()}, {DNNL_ARG_DIFF_SRC, src}},
        d.scratchpad_desc(), threads);
    slow_forward = is_reference(f);
    slow_weight_gradient = is_reference(w) && !own_weight_gradient;
    slow_input_gradient = is_reference(d);

    const memory::desc oihw = weight_desc(g, true);
    pack_forward = std::make_unique<Repack>(oihw, f.weights_desc());
    pack_backward = std::make_unique<Repack>(oihw, d.weights_desc());
    weight_gradient_desc = own_weight_gradient ? oihw : w.diff_weights_desc();
    unpack_gradient = std::make_unique<Repack>(weight_gradient_desc, oihw);
    gradient_floats = weight_gradient_desc.get_size() / sizeof(float);
  }

  std::unique_ptr<DnnlKernel> forward, backward_data, backward_weights;
  std::unique_ptr<Repack> pack_forward, pack_backward, unpack_gradient;
  bool own_weight_gradient;  // by depthwise_weight_gradient()
  bool slow_forward, slow_weight_gradient, slow_input_gradient;
  std::size_t gradient_floats;
  memory::desc weight_gradient_desc;
};

TOPKNOT_MULTIVERSION void add_into(float* sum, const float* term, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) sum[i] += term[i];
}
// The same of activations.
void add_images(DType type, void* sum, const void* term, std::size_t n) {
  if (type == DType::f32) return add_into(static_cast<float*>(sum), static_cast<const float*>(term), n);
  auto* narrow = static_cast<BFloat16*>(sum);
  add(narrow, static_cast<const BFloat16*>(term), n, narrow);
}

class DnnlConv final : public ChunkedConv {
 public:
  explicit DnnlConv(const ConvGeometry& geometry)
      : g_(geometry),
        inside_(geometry),
        plain_(PaddedConv::plain(geometry)),
        winograd_(inside_.g),
        pointwise_(geometry),
        product_(geometry) {
    output_layout_ = g_.out % channel_block() == 0 && inside_.blocked ? Layout::blocked : Layout::plain;
    // A chunk pays while the weights stay in the cache.
    chunked_ = g_.in / g_.groups * g_.out <= 64 * 128;
  }

  Layout output_layout() const override { return output_layout_; }

  void forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) override {
    if (by_winograd(x)) return winograd_forward(x, weight, y, after);
    if (pointwise_.serves(x)) return pointwise_.forward(x, weight, y, after);
    if (by_product(x)) return product_.forward(x, weight, y, after);
    limit_plans();
    const std::int64_t images = x.dim(0), in = image_bytes(x), out = image_bytes(y);
    const bool plain = any_plan(x, [](const Plan& plan) { return plan.slow_forward; });
    const PaddedConv& inside = plain ? plain_ : inside_;
    const Packing pack_x = packing(x, g_.in, inside.g.in, x.layout(), inside.in),
                  pack_y = packing(y, g_.out, inside.g.out, y.layout(), inside.out);
    Tensor expanded;
    weight = inside.weights(weight, expanded);
    std::map<const Plan*, std::pair<const void*, Tensor>> packed;
    for (const Plan* plan : plans_for(x, plain))
      packed[plan].first = plan->pack_forward->run(weight, packed[plan].second);
    const auto work = [&](int thread, std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end;) {
        const std::int64_t count = std::min(chunk_of(x), end - n);
        const Plan& plan = plan_for(x, count, plain);
        Tensor packed_x, packed_y;
        std::byte* to = y.as<std::byte>() + n * out;
        plan.forward->run(thread,
                          {pack_x.in(count, x.as<std::byte>() + n * in, packed_x), packed.at(&plan).first,
                           pack_y.none() ? to : pack_y.room(count, packed_y)});
        if (packed_y.defined()) pack_y.out(count, packed_y.as<std::byte>(), to);
        if (after && chunked_) after(n, n + count);
        n += count;
      }
    };
    if (chunked_) return parallel_ranges(images, work);
    work(0, 0, images);
    if (after) parallel_ranges(images, [&](int, std::int64_t begin, std::int64_t end) { after(begin, end); });
  }

  void backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                GradientTarget weight_gradient, InputGradient& input_gradient) override {
    if (by_winograd(x)) return winograd_backward(x, weight, grad, fill, weight_gradient, input_gradient);
    if (pointwise_.serves(x))
      return pointwise_.backward(x, weight, grad, fill, weight_gradient, input_gradient);
    if (by_product(x)) return product_.backward(x, weight, grad, fill, weight_gradient, input_gradient);
    limit_plans();
    const std::int64_t images = x.dim(0), in = image_bytes(x), in_elements = x.numel() / images;
    const std::int64_t out_elements = g_.output_shape(x.shape()).numel() / images,
                       out = out_elements * static_cast<std::int64_t>(size_of(x.dtype()));
    // Each gradient chooses by itself, so its bits do not depend on whether the other one is asked for.
    const bool plain_weight = any_plan(x, [](const Plan& plan) { return plan.slow_weight_gradient; });
    const bool plain_input = any_plan(x, [](const Plan& plan) { return plan.slow_input_gradient; });
    const PaddedConv &weight_inside = plain_weight ? plain_ : inside_,
                     &input_inside = plain_input ? plain_ : inside_;
    const Layout dy_layout = grad.defined() ? grad.layout() : output_layout_;
    const auto packing_dy = [&](const PaddedConv& inside) {
      return Packing{dy_layout, inside.out, x.dtype(), g_.out, inside.g.out, out_elements / g_.out,
                     !chunked_};
    };
    const Packing pack_x = packing(x, g_.in, weight_inside.g.in, x.layout(), weight_inside.in),
                  pack_dx = packing(x, g_.in, input_inside.g.in, x.layout(), input_inside.in),
                  pack_dy_weight = packing_dy(weight_inside), pack_dy_input = packing_dy(input_inside);
    std::map<const Plan*, std::pair<const void*, Tensor>> packed;
    Tensor expanded;
    if (input_gradient.tensor.defined()) {
      weight = input_inside.weights(weight, expanded);
      for (const Plan* plan : plans_for(x, plain_input))
        packed[plan].first = plan->pack_backward->run(weight, packed[plan].second);
    }
    const std::vector<const Plan*> plans = plans_for(x, plain_weight);
    const Plan& first = *plans.front();
    const auto floats = static_cast<std::int64_t>(first.gradient_floats);
    const auto threads = static_cast<std::size_t>(team_size());
    std::vector<Tensor> sums(threads);  // of the weight's gradient, by thread

    const auto work = [&](int thread, std::int64_t begin, std::int64_t end) {
      if (begin == end) return;
      Tensor filled, term, added;  // a chunk's output gradient, weight gradient and input gradient
      Tensor& sum = sums[static_cast<std::size_t>(thread)];
      if (!grad.defined())
        filled =
            Tensor::empty({std::min(chunk_of(x), end - begin), out_elements}, Layout::plain, {}, x.dtype());
      for (std::int64_t n = begin; n < end;) {
        const std::int64_t count = std::min(chunk_of(x), end - n);
        const Plan& plan = plan_for(x, count, plain_weight);
        TOPKNOT_CHECK(plan.weight_gradient_desc == first.weight_gradient_desc,
                      "conv2d: one gradient format per layer");
        const void* dy = grad.defined() ? grad.as<std::byte>() + n * out : filled.as<std::byte>();
        if (filled.defined()) {
          if (chunked_)
            fill(n, n + count, filled.data());
          else
            parallel_ranges(count, [&](int, std::int64_t a, std::int64_t b) {
              fill(a, b, filled.as<std::byte>() + a * out);
            });
        }
        Tensor packed_x, packed_dy, packed_dy_input, packed_dx;
        const void* dy_inside = nullptr;
        if (weight_gradient.data) {
          dy_inside = pack_dy_weight.in(count, dy, packed_dy);
          Tensor& target = sum.defined() ? term : sum;
          if (!target.defined()) target = Tensor::empty({floats});
          const void* x_inside = pack_x.in(count, x.as<std::byte>() + n * in, packed_x);
          if (plan.own_weight_gradient)
            depthwise_weight_gradient(weight_inside.g, {count, weight_inside.g.in, x.dim(2), x.dim(3)},
                                      static_cast<const float*>(x_inside),
                                      static_cast<const float*>(dy_inside), target.data());
          else
            plan.backward_weights->run(thread, {x_inside, dy_inside, target.data()});
          if (&target == &term) add_into(sum.data(), term.data(), first.gradient_floats);
        }
        if (input_gradient.tensor.defined()) {
          std::byte* dx = input_gradient.tensor.as<std::byte>() + n * in;
          if (input_gradient.accumulate && !added.defined())
            added = Tensor::empty({std::min(chunk_of(x), end - begin), in_elements}, Layout::plain, {},
                                  x.dtype());
          std::byte* target = input_gradient.accumulate ? added.as<std::byte>() : dx;
          if (!dy_inside || plain_input != plain_weight)
            dy_inside = pack_dy_input.in(count, dy, packed_dy_input);
          const Plan& with = plan_for(x, count, plain_input);
          with.backward_data->run(thread, {dy_inside, packed.at(&with).first,
                                           pack_dx.none() ? target : pack_dx.room(count, packed_dx)});
          if (packed_dx.defined()) pack_dx.out(count, packed_dx.as<std::byte>(), target);
          if (input_gradient.accumulate) {
            const auto add = [&](int, std::int64_t a, std::int64_t b) {
              add_images(x.dtype(), dx + a * in, target + a * in,
                         static_cast<std::size_t>((b - a) * in_elements));
            };
            if (chunked_)
              add(0, 0, count);
            else
              parallel_ranges(count, add);
          }
        }
        n += count;
      }
    };
    if (chunked_)
      parallel_ranges(images, work);
    else
      work(0, 0, images);

    if (!weight_gradient.data) return;
    for (std::size_t t = 1; t < threads; ++t)
      if (sums[t].defined()) add_into(sums[0].data(), sums[t].data(), first.gradient_floats);
    store_weight_gradient(weight_inside, first, sums[0].data(), weight_gradient);
  }

 private:
  static std::int64_t image_bytes(const Tensor& t) {
    return t.numel() / t.dim(0) * static_cast<std::int64_t>(size_of(t.dtype()));
  }

  // Not a layer that is plain inside (wide padding without AVX-512): product_ makes blocked outputs.
  bool by_product(const Tensor& x) const { return output_layout_ == Layout::blocked && product_.serves(x); }
  // Not if most of its products would be with channels of zeros.
  bool by_winograd(const Tensor& x) const {
    return winograd_.serves(x) && 4 * g_.in * g_.out > inside_.g.in * inside_.g.out;
  }
  // winograd_ takes the inner layer and blocked activations; others are copied. Its outputs have x's size.
  void winograd_forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) const {
    Tensor expanded;
    weight = inside_.weights(weight, expanded);
    const Tensor x_inside = blocked(x, inside_.g.in);
    const Packing pack_y = image_packing(y, inside_.g.out);
    if (pack_y.none()) return winograd_.forward(x_inside, weight, y, after);
    Tensor y_inside = room_inside(y, inside_.g.out);
    winograd_.forward(x_inside, weight, y_inside, [&](std::int64_t begin, std::int64_t end) {
      pack_y.out(end - begin, image(y_inside, begin), image(y, begin));
      if (after) after(begin, end);
    });
  }
  void winograd_backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                         GradientTarget weight_gradient, InputGradient& input_gradient) const {
    Tensor expanded, expanded_gradient;
    const bool wants_dx = input_gradient.tensor.defined();
    if (wants_dx) weight = inside_.weights(weight, expanded);
    GradientTarget dw = weight_gradient;
    if (dw.data && !inside_.same()) {
      expanded_gradient = Tensor::empty(inside_.g.weight_shape());
      dw = {expanded_gradient.data(), false};
    }
    FillFn fill_inside = fill;
    if (!grad.defined() && output_layout_ != Layout::blocked)
      fill_inside = [&](std::int64_t begin, std::int64_t end, void* out) {
        Tensor filled =
            Tensor::empty({end - begin, g_.out, x.dim(2), x.dim(3)}, output_layout_, {}, x.dtype());
        fill(begin, end, filled.as<std::byte>());
        image_packing(filled, inside_.g.out).in(end - begin, filled.as<std::byte>(), out);
      };
    const Packing pack_x = image_packing(x, inside_.g.in);
    InputGradient dx = input_gradient;
    if (wants_dx && !pack_x.none()) dx = {room_inside(x, inside_.g.in), false};
    winograd_.backward(blocked(x, inside_.g.in), weight, grad.defined() ? blocked(grad, inside_.g.out) : grad,
                       fill_inside, dw, dx);

    if (expanded_gradient.defined()) inside_.gradient(expanded_gradient.data(), weight_gradient);
    if (!wants_dx || pack_x.none()) return;
    Tensor& sum = input_gradient.tensor;
    Tensor term = input_gradient.accumulate ? Tensor::empty_like(x) : sum;
    parallel_ranges(x.dim(0), [&](int, std::int64_t begin, std::int64_t end) {
      pack_x.out(end - begin, image(dx.tensor, begin), image(term, begin));
      if (input_gradient.accumulate)
        add_images(x.dtype(), image(sum, begin), image(term, begin),
                   static_cast<std::size_t>((end - begin) * (x.numel() / x.dim(0))));
    });
  }
  static std::byte* image(const Tensor& t, std::int64_t n) {
    return const_cast<std::byte*>(t.as<std::byte>()) + n * image_bytes(t);
  }
  // From a tensor of the layer to blocked activations of so many channels, by one thread.
  static Packing image_packing(const Tensor& t, std::int64_t channels) {
    return {t.layout(), Layout::blocked, t.dtype(), t.dim(1), channels, t.dim(2) * t.dim(3), false};
  }
  static Tensor room_inside(const Tensor& t, std::int64_t channels) {
    return Tensor::empty({t.dim(0), channels, t.dim(2), t.dim(3)}, Layout::blocked, {}, t.dtype());
  }
  static Tensor blocked(const Tensor& t, std::int64_t channels) {
    const Packing pack = image_packing(t, channels);
    if (pack.none()) return t;
    Tensor copy = room_inside(t, channels);
    parallel_ranges(t.dim(0), [&](int, std::int64_t begin, std::int64_t end) {
      pack.in(end - begin, image(t, begin), image(copy, begin));
    });
    return copy;
  }

  std::int64_t chunk_of(const Tensor& x) const { return chunked_ ? images_per_chunk(g_, x) : x.dim(0); }

  Packing packing(const Tensor& t, std::int64_t channels, std::int64_t padded, Layout outside,
                  Layout inside) const {
    return {outside, inside, t.dtype(), channels, padded, t.dim(2) * t.dim(3), !chunked_};
  }

  static void store_weight_gradient(const PaddedConv& inside, const Plan& plan, const float* from,
                                    GradientTarget target) {
    if (inside.same() && !target.accumulate && !plan.unpack_gradient->same())
      return plan.unpack_gradient->run(from, target.data);
    Tensor storage;
    inside.gradient(static_cast<const float*>(plan.unpack_gradient->run(from, storage)), target);
  }

  // Between two passes, which hold pointers to plans.
  void limit_plans() {
    constexpr std::size_t kMost = 256;  // where every batch has a length of its own, as in speech
    if (plans_.size() >= kMost) plans_.clear();
  }

  // Looks only at the plans with blocked activations.
  bool any_plan(const Tensor& x, const auto& fn) {
    const std::vector<const Plan*> plans = plans_for(x, false);
    return std::any_of(plans.begin(), plans.end(), [&](const Plan* plan) { return fn(*plan); });
  }

  // A plan for each chunk size of a batch of this size: made before the parallel region. `plain`: of plain_.
  std::vector<const Plan*> plans_for(const Tensor& x, bool plain) {
    std::vector<const Plan*> result;
    const std::int64_t images = x.dim(0),
                       threads = chunked_ ? std::min<std::int64_t>(team_size(), images) : 1;
    for (std::int64_t t = 0; t < threads; ++t) {
      const std::int64_t mine = images * (t + 1) / threads - images * t / threads, chunk = chunk_of(x);
      for (std::int64_t count : {std::min(chunk, mine), mine % chunk})
        if (count > 0)
          if (const Plan* plan = &make_plan(x, count, plain);
              std::find(result.begin(), result.end(), plan) == result.end())
            result.push_back(plan);
    }
    return result;
  }

  struct Key {
    std::int64_t images, height, width;
    int threads;
    DType type;
    bool plain;
    auto operator<=>(const Key&) const = default;
  };
  Key key(const Tensor& x, std::int64_t images, bool plain) const {
    return {images, x.dim(2), x.dim(3), max_threads_, x.dtype(), plain};
  }

  const Plan& make_plan(const Tensor& x, std::int64_t images, bool plain) {
    max_threads_ = team_size();
    auto& plan = plans_[key(x, images, plain)];
    if (plan) return *plan;
    std::optional<MadeForOneThread> one;
    if (chunked_) one.emplace();
    plan = std::make_unique<Plan>(plain ? plain_ : inside_, images, x.dim(2), x.dim(3), x.dtype(),
                                  chunked_ ? max_threads_ : 1);
    return *plan;
  }
  const Plan& plan_for(const Tensor& x, std::int64_t images, bool plain) const {
    return *plans_.at(key(x, images, plain));
  }

  ConvGeometry g_;
  PaddedConv inside_, plain_;
  WinogradConv winograd_;
  PointwiseConv pointwise_;
  ProductConv product_;
  Layout output_layout_;
  bool chunked_;
  int max_threads_ = 1;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

Layout output_layout(const ConvGeometry& geometry) {
  return chunked_conv(geometry).output_layout();
}

OpState forward(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight, const Tensor& bias,
                Tensor& y) {
  ChunkedConv::ChunkFn add_bias;
  if (bias.defined())
    add_bias = [&](std::int64_t begin, std::int64_t end) { add_channel_bias(y, bias.data(), begin, end); };
  chunked_conv(geometry).forward(x, weight.data(), y, add_bias);
  return nullptr;
}

void backward(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight, const Tensor& dy,
              const OpState&, WeightedGradients& out) {
  if (out.bias.data) write_gradient(out.bias, sum_over_channels(dy));
  chunked_conv(geometry).backward(x, weight.data(), dy, {}, out.weight, out.x);
}

const bool conv2d_registered =
    add_cpu_kernels<ConvKernels>({.output_layout = output_layout, .forward = forward, .backward = backward});

}  // namespace

std::int64_t images_per_chunk(const ConvGeometry& geometry, const Tensor& x) {
  const std::int64_t elements = (x.numel() + geometry.output_shape(x.shape()).numel()) / x.dim(0);
  return std::max<std::int64_t>(
      1, (std::int64_t{1} << 20) / (elements * static_cast<std::int64_t>(size_of(x.dtype()))));
}

ChunkedConv& chunked_conv(const ConvGeometry& geometry) {
  thread_local std::map<ConvGeometry, DnnlConv> convolutions;
  return convolutions.try_emplace(geometry, geometry).first->second;
}

}  // namespace topknot
