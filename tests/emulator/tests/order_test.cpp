// What a GPU computes does not depend on the order in which blocks, threads and a graph's branches run. Tests that
// compare a GPU with the CPU bit for bit run in the orders that are added here; those of sums that round are here.
#include "tests/cuda/batch_norm_probe.h"
#include "tests/cuda/compressor_ranks.h"
#include "tests/cuda/selectors.h"
#include "tests/emulator/tests/machine_settings.h"

namespace topknot {
namespace {

using namespace testing;

// Descending, and blocks that take turns.
template <unsigned seed>
std::shared_ptr<void> reordered() {
  return std::make_shared<emulator::Reordered>(seed);
}
const bool orders_added = [] {
  orders().push_back(reordered<0>);
  orders().push_back(reordered<1>);
  return true;
}();

using Values = std::vector<std::vector<float>>;

// Value and gradients, with dy drawn at random.
Values of_op(const Op& op, const std::vector<Input>& inputs) {
  const auto outputs = [&] { return probe(op, inputs, {}, true).shape.numel(); }();
  Probe made = probe(op, inputs, random_values(outputs, 9), true);
  made.gradients.push_back(made.value);
  return made.gradients;
}
Input activation_of(const Shape& shape) {
  return {shape, random_values(shape.numel(), 1)};
}
Input parameter_of(const Shape& shape, std::uint32_t stream) {
  return {shape, random_values(shape.numel(), stream), Layout::plain, true};
}

Values convolution() {
  const ConvGeometry g{5, 40, 3, 2, 1};
  return of_op([&](auto x) { return conv2d(x[0], x[1], x[2], g); },
               {activation_of({2, 5, 31, 17}), parameter_of(g.weight_shape(), 2), parameter_of({40}, 3)});
}

template <std::int64_t width>
Values norm() {
  return of_op([](auto x) { return layer_norm(x[0], x[1], x[2]); },
               {activation_of({150, width}), parameter_of({width}, 2), parameter_of({width}, 3)});
}

template <bool causal>
Values attended() {  // 2 sequences of 41 tokens
  return of_op([](auto x) { return attention(x[0], 2, 1, 2, causal); }, {activation_of({2 * 41, 4 * 40})});
}

Values positions_and_head() {
  const DeviceVector<std::int32_t> labels(std::vector<std::int32_t>{3, 39, kNoLabel, 0, 299, 7});
  return of_op(
      [&](auto x) {
        return linear_cross_entropy(add_positions(x[0], 2, x[1]), x[2], {labels.data(), 6}, 0.1f, 4);
      },
      {activation_of({6, 40}), parameter_of({4, 40}, 2), parameter_of({300, 40}, 3)});
}

template <std::int64_t channels>
Values normed_batch() {
  const BatchNormResult r =
      by_op(BatchNormProbe({17, channels, 7, 5, true, true}, cuda::Context::current().activation_type()));
  return {r.y, r.dx, r.dgamma, r.dbeta, r.dresidual, r.mean, r.variance};
}

Values pooling_and_losses() {
  const DeviceVector<std::int32_t> labels(std::vector<std::int32_t>{3, 39});
  const DeviceVector<double> hits(std::vector<double>{0});
  const Tensor zeros = Tensor::zeros({2, 40}, Layout::plain, cuda::Context::current().device());
  Values all = of_op(
      [&](auto x) {
        const Variable pooled = global_average_pool(x[0]);
        count_correct(pooled.value(), {labels.data(), 2}, 5, hits.data());
        return add(softmax_cross_entropy(pooled, {labels.data(), 2}), mean_squared_error(pooled, zeros));
      },
      {activation_of({2, 40, 3, 3})});
  all.push_back({float(hits.host()[0])});
  return all;
}

TEST_CASE("ops whose sums round have the same bits in any order of blocks and threads") {
  const std::pair<const char*, Values (*)()> ops[] = {{"convolution", convolution},
                                                      {"layer norm", norm<70>},
                                                      {"layer norm, wide", norm<132>},
                                                      {"attention", attended<false>},
                                                      {"causal attention", attended<true>},
                                                      {"positions and the head's loss", positions_and_head},
                                                      {"batch norm", normed_batch<5>},
                                                      {"batch norm, vectors", normed_batch<24>},
                                                      {"pooling and losses", pooling_and_losses}};
  for (const auto precision : {cuda::Precision::fp32, cuda::Precision::bf16})
    for (const auto& [name, op] : ops) {
      INFO(name << (precision == cuda::Precision::bf16 ? ", bf16" : ", fp32"));
      std::vector<Values> results;
      for (const Order order : orders()) {
        const auto scope = order();
        const OnGpu gpu(precision);
        results.push_back(op());
        CHECK((results.back() == results[0]));
      }
    }
}

TEST_CASE("ranges that take less than their room keep to their places in the list, in any order") {
  const GroupSpec group{32001, {{0, 9001}, {9001, 9002}, {9002, 29000}, {29000, 32001}}, 2};
  const emulator::Reordered order(GENERATE(0u, 1u, 3u));
  const OnGpu gpu;
  for (const char* name : kMethods) {
    INFO(name);
    BothRanks both(options_of(name), group);
    both.set_density(0.25);
    both.lower_density(0.01);
    for (std::int64_t step = 0; step < 4; ++step) {
      load_gradients(both, step, group.numel);
      both.step(step);
    }
  }
}

}  // namespace
}  // namespace topknot
