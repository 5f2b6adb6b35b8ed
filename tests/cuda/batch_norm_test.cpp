// Batch norm on a GPU against the formula in float64, and against the CPU.
#include "nn/ops/ops.h"

#include "tests/cuda/batch_norm_probe.h"

namespace topknot {
namespace {

using namespace testing;
using cuda::BatchNormKind;

void check_method(BatchNormKind kind, const BatchNormSetup& setup, DType type) {
  INFO(cuda::name_of(kind) << ", " << setup.str() << (type == DType::bf16 ? ", bf16" : ""));
  const BatchNormProbe probe(setup, type);
  try {
    check_formula(probe, by_method(kind, probe), kind == BatchNormKind::kernels ? 1 : 2);
  } catch (const cuda::BatchNormUnsupported& refused) {
    WARN("refused: " << refused.what());
  }
}

TEST_CASE("batch norm's kernels agree with the formula in every combination of its options") {
  const OnGpu gpu;
  for (const DType type : {DType::f32, DType::bf16})
    for (const bool residual : {false, true})
      for (const bool relu : {false, true})
        for (const bool training : {false, true})
          for (const std::int64_t channels : {5, 16})
            check_method(BatchNormKind::kernels, {3, channels, 4, 3, residual, relu, training}, type);
}

TEST_CASE("batch norm's kernels agree with the formula on odd shapes") {
  const OnGpu gpu;
  for (const DType type : {DType::f32, DType::bf16}) {
    const auto check = [&](const BatchNormSetup& s) { check_method(BatchNormKind::kernels, s, type); };
    check({1, 1, 1, 1, false, false, false});       // one number
    check({1, 8, 1, 1, true, true});                // one pixel: the variance is 0
    check({9, 1, 1, 1, false, true});               // one channel
    check({2, 1, 37, 29, true, true});              // of many rows
    check({7, 264, 3, 3, false, true});             // more channels than a block has columns
    check({2, 300, 2, 3, true, false});             // in more than one tile, the last one not full
    check({33, 4, 13, 11, true, true});             // several blocks of rows
    check({257, 128, 4, 8, true, true});            // more sums than one block adds up, as floats
    check({4, 8, 3, 3, false, true, true, 20.0f});  // far from 0
  }
  for (const float far : {-100.0f, 1000.0f, 10000.0f})  // and from the running mean
    for (const std::int64_t channels : {5, 16})
      check_method(BatchNormKind::kernels, {32, channels, 16, 16, false, false, true, far, 0.0f}, DType::f32);
}

TEST_CASE("batch norm by cuDNN agrees with the formula in each mode") {
  const OnGpu gpu;
  for (const DType type : {DType::f32, DType::bf16})
    for (const bool residual : {false, true})
      for (const bool relu : {false, true})
        for (const BatchNormKind kind :
             {BatchNormKind::spatial, BatchNormKind::persistent, BatchNormKind::fused})
          if (kind != BatchNormKind::fused || (type == DType::bf16 && relu)) {
            check_method(kind, {3, 8, 4, 3, residual, relu}, type);
            check_method(kind, {5, 12, 3, 5, residual, relu}, type);
          }
}

TEST_CASE("batch norm in evaluation has the CPU's bits") {
  const OnGpu gpu;
  for (const bool residual : {false, true}) {
    const BatchNormProbe p({3, 20, 5, 3, residual, true, false}, DType::f32);
    Buffer mean{"mean", p.mean}, variance{"variance", p.variance};
    Leaf x(p.s.shape(), p.x), gamma({20}, p.gamma), beta({20}, p.beta), other(p.s.shape(), p.x);
    const Variable y = batch_norm(x.variable(), gamma.variable(), beta.variable(),
                                  residual ? Variable(Tensor::from(p.residual, p.s.shape())) : Variable(),
                                  {&mean, &variance, p.momentum, p.epsilon}, {false, true});
    backward(weighted_sum(y, p.dy));
    const BatchNormResult r = by_op(p);
    CHECK(same_bits(r.y, y.value().to_vector()));
    CHECK(same_bits(r.dx, x.gradient()));
  }
}

TEST_CASE("running statistics follow several batches as on the CPU") {
  const OnGpu gpu;
  const BatchNormProbe p({4, 6, 5, 3, false, true}, DType::f32);
  RunningStatistics running(p);
  Buffer mean{"mean", p.mean}, variance{"variance", p.variance};
  const GpuLeaf gamma({6}, p.gamma), beta({6}, p.beta);
  Leaf cpu_gamma({6}, p.gamma), cpu_beta({6}, p.beta);
  for (std::uint32_t step = 0; step < 5; ++step) {
    const auto values = random_values(p.s.shape().numel(), 40 + step, 0.5f * float(step));
    batch_norm(Variable(p.activation(values)), gamma.variable(), beta.variable(), {}, running.state, {});
    batch_norm(Variable(Tensor::from(values, p.s.shape())), cpu_gamma.variable(), cpu_beta.variable(), {},
               {&mean, &variance, p.momentum, p.epsilon}, {});
  }
  const Array ones(6, 1.0);
  check_close("mean", running.mean.host(), as_double(mean.values), ones, 2e-6);
  check_close("variance", running.variance.host(), as_double(variance.values), ones, 2e-6);
}

TEST_CASE("a constant channel far from its running mean has no negative variance") {
  const OnGpu gpu;
  for (const float value : {100.1f, 1000.3f, 12345.6f}) {
    const BatchNormProbe p({4, 6, 5, 3, false, false}, DType::f32);
    RunningStatistics running(p);
    const GpuLeaf gamma({6}, p.gamma), beta({6}, p.beta);
    const std::vector<float> values(std::size_t(p.s.shape().numel()), value);
    for (int step = 0; step < 3; ++step) {
      const Variable y = batch_norm(Variable(p.activation(values)), gamma.variable(), beta.variable(), {},
                                    running.state, {});
      for (const float each : values_of(y.value())) CHECK(std::isfinite(each));
    }
  }
}

TEST_CASE("gradients add up: an input that is used twice, and parameters of two batches") {
  const OnGpu gpu;
  for (const bool residual : {false, true}) {
    const BatchNormProbe p({3, 8, 3, 3, residual, true}, DType::f32);
    const BatchNormResult once = by_op(p);
    RunningStatistics running(p);
    const CaughtInput x(p.activation(p.x));
    const GpuLeaf gamma({8}, p.gamma), beta({8}, p.beta);
    const Variable other = residual ? Variable(p.activation(p.residual)) : Variable();
    const auto norm = [&] {
      return batch_norm(x.variable(), gamma.variable(), beta.variable(), other, running.state, {true, true});
    };
    backward_from({{norm(), p.dy}, {norm(), p.dy}});
    const auto doubled = [](std::vector<float> v) {
      for (float& value : v) value *= 2;
      return v;
    };
    // The second batch's statistics are summed about another running mean: its last bits differ.
    const auto close = [&](const char* what, const std::vector<float>& actual,
                           const std::vector<float>& from) {
      const Array expected = as_double(doubled(from));
      check_close(what, actual, expected, Array(expected.size(), 10.0), 1e-6);
    };
    close("dx", x.gradient(), once.dx);
    close("dgamma", gamma.gradient(), once.dgamma);
    close("dbeta", beta.gradient(), once.dbeta);
    gamma.clear();
    beta.clear();
    backward_from({{norm(), p.dy}});
    close("dgamma, afresh", doubled(gamma.gradient()), once.dgamma);
  }
}

TEST_CASE("a residual that is the input itself gets both gradients") {
  const OnGpu gpu;
  BatchNormProbe p({3, 8, 3, 3, true, true}, DType::f32);
  p.residual = p.x;
  const auto f = p.formula(true);
  for (std::size_t i = 0; i < p.dy.size(); ++i)
    if (std::abs(f.y[i]) < 1e-3) p.dy[i] = 0;
  const auto r = p.formula(true);
  RunningStatistics running(p);
  const CaughtInput x(p.activation(p.x));
  const GpuLeaf gamma({8}, p.gamma), beta({8}, p.beta);
  backward_from({{batch_norm(x.variable(), gamma.variable(), beta.variable(), x.variable(), running.state,
                             {true, true}),
                  p.dy}});
  Array sum = r.dx, scale = r.dx_scale;
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += r.dresidual[i], scale[i] += std::abs(r.dresidual[i]);
  check_close("dx", x.gradient(), sum, scale, 2e-6);
}

TEST_CASE("a NaN spoils its own channel, and no relu hides it") {
  const OnGpu gpu;
  for (const bool residual : {false, true}) {
    BatchNormProbe p({2, 4, 3, 3, residual, true}, DType::f32);
    p.x[9] = std::numeric_limits<float>::quiet_NaN();  // image 0, channel 1
    const BatchNormResult r = by_op(p);
    for (std::size_t i = 0; i < r.y.size(); ++i) {
      INFO(i);
      CHECK(std::isnan(r.y[i]) == (i / 9 % 4 == 1));
      CHECK(std::isnan(r.dx[i]) == (i / 9 % 4 == 1));
    }
    CHECK(std::isnan(r.mean[1]));
    CHECK(std::isfinite(r.mean[0]));
  }
}

TEST_CASE("a timed choice agrees with the formula, on first and on later use") {
  for (const cuda::Precision precision : {cuda::Precision::fp32, cuda::Precision::bf16}) {
    OnGpu gpu(precision, false);
    for (const bool residual : {false, true})
      for (int use = 0; use < 2; ++use) {
        const BatchNormProbe p({3, 8, 4, 3, residual, true}, gpu.context().activation_type());
        INFO(p.s.str());
        check_formula(p, by_op(p), 2);
      }
  }
}

TEST_CASE("batch norm in a graph has the bits of the plain calls, each time it is started") {
  const OnGpu gpu;
  const BatchNormProbe p({4, 8, 4, 3, true, true}, DType::f32);
  const BatchNormResult first = by_op(p);  // takes the memory that a capture cannot
  RunningStatistics running(p);
  const CaughtInput x(p.activation(p.x)), residual(p.activation(p.residual));
  const GpuLeaf gamma({8}, p.gamma), beta({8}, p.beta);
  const Tensor dy = p.activation(p.dy), loss = Tensor::zeros({1}, Layout::plain, gpu.device());
  const Tensor y = Tensor::empty_like(dy);
  const auto step = [&] {
    const Variable out = batch_norm(x.variable(), gamma.variable(), beta.variable(), residual.variable(),
                                    running.state, {true, true});
    backend(gpu.device()).copy(out.value().data(), const_cast<float*>(y.data()), std::size_t(y.numel()));
    backward(Variable("loss", loss, {out}, [&](Tensor) { out.accumulate_grad(dy); }));
    gamma.clear();
    beta.clear();
  };
  for (int warm_up = 0; warm_up < 2; ++warm_up)
    step();  // the first one's gradients are still held by the second
  CapturedGraph graph(gpu.stream(), step);
  for (int run = 0; run < 2; ++run) {
    running.mean.set(p.mean);
    running.variance.set(p.variance);
    graph.launch(gpu.stream());
    CHECK(same_bits(values_of(y), first.y));
    CHECK(same_bits(x.gradient(), first.dx));
    CHECK(same_bits(residual.gradient(), first.dresidual));
    CHECK(same_bits(gamma.gradient(), first.dgamma));
    CHECK(same_bits(running.variance.host(), first.variance));
  }
}

TEST_CASE("batch norm's tiles cover every row and column once") {
  for (const bool bf16 : {false, true})
    for (const std::int64_t channels : {1, 3, 4, 8, 24, 64, 100, 2048, 100000})
      for (const std::int64_t rows : {1, 7, 256, 1000, 802816}) {
        INFO(rows << " x " << channels);
        const auto t = cuda::batch_norm_tiles(rows, channels, bf16);
        CHECK(t.column_tiles * t.lanes * t.vector >= channels);
        CHECK((t.column_tiles - 1) * t.lanes * t.vector < channels);
        CHECK(t.chunks * t.chunk_rows >= rows);
        CHECK((t.chunks - 1) * t.chunk_rows < rows);
        CHECK((t.lanes & (t.lanes - 1)) == 0);
        CHECK(channels % t.vector == 0);
        CHECK(t.chunks <= 1024);
      }
}

}  // namespace
}  // namespace topknot
