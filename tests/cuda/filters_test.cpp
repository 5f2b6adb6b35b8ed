// Weights in the order and type of a product, and a model's filters within a scope.
#include "nn/ops/cuda/filters.h"

#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"

namespace topknot {
namespace {

using namespace testing;
using cuda::Filters;
using cuda::FilterShape;

// KRSC of OIHW, with zeros beyond the weight.
std::vector<float> filter_from(const std::vector<float>& weight, const FilterShape& s) {
  std::vector<float> filter;
  for (std::int64_t o = 0; o < s.out; ++o)
    for (std::int64_t t = 0; t < s.taps; ++t)
      for (std::int64_t i = 0; i < s.in; ++i)
        filter.push_back(o < s.weight_out && i < s.weight_in
                             ? weight[std::size_t((o * s.weight_in + i) * s.taps + t)]
                             : 0.0f);
  return filter;
}

// Weights side by side, as a model's are, of these shapes.
class Weights {
 public:
  explicit Weights(const std::vector<FilterShape>& shapes) : shapes_(shapes), memory_(elements(shapes)) {
    draw(1);
  }
  void draw(std::uint32_t seed) {
    values_ = random_values(std::int64_t(memory_.size()), seed);
    memory_.set(values_);
  }
  std::span<const float> all() const { return {memory_.data(), memory_.size()}; }
  std::size_t count() const { return shapes_.size(); }
  Tensor filter(std::size_t i, DType type) const {
    return cuda::filter_of(Tensor::view(memory_.data() + begin(i), {size(i)}, device()), type, shapes_[i]);
  }
  std::vector<float> expected(std::size_t i, DType type) const {
    const auto from = values_.begin() + begin(i);
    return rounded_to(type, filter_from({from, from + size(i)}, shapes_[i]));
  }

 private:
  static Device device() { return cuda::Context::current().device(); }
  static std::size_t elements(const std::vector<FilterShape>& shapes) {
    std::int64_t sum = 0;
    for (const FilterShape& s : shapes) sum += s.weight_out * s.weight_in * s.taps;
    return std::size_t(sum);
  }
  std::int64_t size(std::size_t i) const {
    return shapes_[i].weight_out * shapes_[i].weight_in * shapes_[i].taps;
  }
  std::int64_t begin(std::size_t i) const {
    std::int64_t sum = 0;
    for (std::size_t j = 0; j < i; ++j) sum += size(j);
    return sum;
  }

  std::vector<FilterShape> shapes_;
  DeviceVector<float> memory_;
  std::vector<float> values_;
};

TEST_CASE("filters go to cuDNN's order and type, and their gradients come back") {
  const OnGpu gpu;
  for (const FilterShape& shape : {FilterShape{1, 1, 1}, {3, 5, 9}, {16, 3, 49}, {70, 16, 9}, {40, 33, 1}}) {
    const auto n = shape.size();
    const auto weight = random_values(std::int64_t(n), 1), start = random_values(std::int64_t(n), 2);
    const auto rounded = rounded_to(DType::bf16, weight);
    const DeviceVector<float> w(weight), filter(n);
    const DeviceVector<BFloat16> half(n);
    cuda::filter_from_weight(gpu.stream(), w.data(), filter.data(), false, shape);
    cuda::filter_from_weight(gpu.stream(), w.data(), half.data(), true, shape);
    CHECK(filter.host() == filter_from(weight, shape));
    std::vector<float> floats(n);
    to_float(half.host().data(), n, floats.data());
    CHECK(floats == filter_from(rounded, shape));
    for (const bool bf16 : {false, true})
      for (const bool accumulate : {false, true}) {
        const DeviceVector<float> back(start);
        cuda::weight_from_filter(gpu.stream(), bf16 ? static_cast<void*>(half.data()) : filter.data(), bf16,
                                 back.data(), accumulate, shape);
        std::vector<float> expected = bf16 ? rounded : weight;
        for (std::size_t i = 0; accumulate && i < n; ++i) expected[i] = start[i] + expected[i];
        CHECK(back.host() == expected);
      }
  }
}

TEST_CASE("a filter has zeros beyond its weight's channels") {
  const OnGpu gpu;
  const Weights weights({{16, 4, 9, 16, 3},
                         {8, 8, 9, 5, 3},
                         {16, 7, 1, 10, 7},
                         {1, 300, 1},
                         {4, 4, 1, 4, 3},
                         {1, 5000, 1},
                         {70, 64, 1, 65, 64}});
  for (std::size_t i = 0; i < weights.count(); ++i)
    for (const DType type : {DType::f32, DType::bf16})
      CHECK(weights.filter(i, type).to_vector() == weights.expected(i, type));
}

TEST_CASE("a scope begins with the filters of all weights that earlier scopes have met, as they are then") {
  const OnGpu gpu;
  std::vector<FilterShape> shapes;
  for (std::int64_t i = 1; i <= 80; ++i) shapes.push_back({i, 1 + i % 5, i % 3 == 0 ? 9 : 1});
  Weights weights(shapes);
  Filters filters(weights.all());
  const auto type_of = [](std::size_t i) { return i % 2 == 0 ? DType::bf16 : DType::f32; };
  std::vector<Tensor> met;
  for (std::uint32_t scope = 0; scope < 3; ++scope) {
    weights.draw(scope);
    const Filters::Scope fixed(filters);
    for (std::size_t i = 0; i < weights.count(); ++i) {
      if (scope == 0) met.push_back(weights.filter(i, type_of(i)));
      REQUIRE(met[i].to_vector() == weights.expected(i, type_of(i)));
      REQUIRE(weights.filter(i, type_of(i)).data() == met[i].data());
    }
  }
  weights.draw(7);
  CHECK(weights.filter(5, DType::f32).to_vector() == weights.expected(5, DType::f32));  // outside
  CHECK(met[5].to_vector() != weights.expected(5, DType::f32));
}

TEST_CASE("a weight in two forms has a filter of each") {
  const OnGpu gpu;
  const Weights weights({{6, 4, 9}});
  Filters filters(weights.all());
  for (int scope = 0; scope < 2; ++scope) {
    const Filters::Scope fixed(filters);
    for (const DType type : {DType::f32, DType::bf16})
      CHECK(weights.filter(0, type).to_vector() == weights.expected(0, type));
    const Tensor weight = Tensor::view(const_cast<float*>(weights.all().data()), {6 * 4 * 9}, gpu.device());
    CHECK(cuda::weight_as(DType::bf16, weight).to_vector() == rounded_to(DType::bf16, weight.to_vector()));
  }
}

TEST_CASE("no filter is kept of a weight that is no parameter") {
  const OnGpu gpu;
  Weights computed({{6, 4, 9}}), parameters({{6, 4, 9}});
  Filters filters(parameters.all());
  for (std::uint32_t scope = 0; scope < 2; ++scope) {
    const Filters::Scope fixed(filters);
    for (std::uint32_t seed = 1; seed < 3; ++seed) {
      computed.draw(10 * scope + seed);
      CHECK(computed.filter(0, DType::f32).to_vector() == computed.expected(0, DType::f32));
    }
  }
}

TEST_CASE("a graph makes the filters anew at each launch, those too that only its capture has met") {
  const OnGpu gpu;
  Weights weights({{6, 4, 9}, {5, 3, 9}});
  Filters filters(weights.all());
  {
    const Filters::Scope fixed(filters);
    weights.filter(0, DType::f32);
  }
  std::vector<Tensor> captured;
  CapturedGraph graph(gpu.stream(), [&] {
    const Filters::Scope fixed(filters);
    for (std::size_t i = 0; i < 2; ++i) captured.push_back(weights.filter(i, DType::f32));
  });
  for (std::uint32_t step = 0; step < 2; ++step) {
    weights.draw(step);
    graph.launch(gpu.stream());
    for (std::size_t i = 0; i < 2; ++i) CHECK(captured[i].to_vector() == weights.expected(i, DType::f32));
    weights.draw(10 + step);
    const Filters::Scope fixed(filters);  // an evaluation
    for (std::size_t i = 0; i < 2; ++i)
      CHECK(weights.filter(i, DType::f32).to_vector() == weights.expected(i, DType::f32));
  }
}

TEST_CASE("a convolution in a scope is what it is without one, with few and with many channels") {
  for (const auto precision : {cuda::Precision::fp32, cuda::Precision::bf16}) {
    OnGpu gpu(precision);
    for (const ConvGeometry& g :
         {ConvGeometry{3, 16, 3, 1, 1}, {16, 8, 3, 2, 1}, {5, 7, 3, 1, 1}, {8, 16, 1, 1, 0}}) {
      const GpuLeaf w(g.weight_shape(), random_values(g.weight_shape().numel(), 1));
      const auto result = [&] {
        const CaughtInput x(gpu_tensor(random_values(2 * g.in * 30, 2), {2, g.in, 6, 5}, Layout::nhwc,
                                       gpu.context().activation_type()));
        const Variable y = conv2d(x.variable(), w.variable(), {}, g);
        backward_from({{y, random_values(y.shape().numel(), 3)}});
        return std::pair(values_of(y.value()), x.gradient());
      };
      const auto expected = result();
      Filters filters({w.variable().value().data(), std::size_t(g.weight_shape().numel())});
      for (int scope = 0; scope < 2; ++scope) {
        const Filters::Scope fixed(filters);
        CHECK(result() == expected);
      }
    }
  }
}

}  // namespace
}  // namespace topknot
