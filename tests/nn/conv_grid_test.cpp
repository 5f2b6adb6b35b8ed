// Convolutions of every small geometry, forward and backward, against plain loops. Inputs are small whole
// numbers, whose sums are exact in any order. A build with TOPKNOT_POISON shows what reads memory that
// nothing wrote.
#include "tests/support/bfloat16.h"
#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;
using reference::Conv;

namespace {

// -2 to 2, which bfloat16 has.
std::vector<float> whole_numbers(std::int64_t n, std::uint32_t stream) {
  const CounterRng rng(2024, RngUse::test, stream);
  std::vector<float> values(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = float(rng.below(i, 5)) - 2.0f;
  return values;
}

// From [outer][inner] to [inner][outer], so that the loops below run over neighbours.
std::vector<float> turned(const std::vector<float>& values, std::int64_t outer, std::int64_t inner) {
  std::vector<float> result(values.size());
  for (std::int64_t o = 0; o < outer; ++o)
    for (std::int64_t i = 0; i < inner; ++i)
      result[std::size_t(i * outer + o)] = values[std::size_t(o * inner + i)];
  return result;
}

struct Results {
  std::vector<float> y, dx, dw, db;
};

// One group.
Results by_loops(const Conv& g, const std::vector<float>& x, const std::vector<float>& weight,
                 const std::vector<float>& gradient) {
  const std::int64_t high = g.out_height(), wide = g.out_width(), pixels = high * wide,
                     depth = g.in * g.kernel.height * g.kernel.width, out = g.out;
  const std::vector<float> w = turned(weight, out, depth);  // [depth][out]
  std::vector<float> y(std::size_t(g.y_size())), dy(y.size()), dw(w.size());
  Results r{{}, std::vector<float>(x.size()), {}, std::vector<float>(std::size_t(out))};
  for (std::int64_t n = 0; n < g.n; ++n)
    for (std::int64_t o = 0; o < out; ++o)
      for (std::int64_t p = 0; p < pixels; ++p) {
        const float d = gradient[std::size_t((n * out + o) * pixels + p)];
        dy[std::size_t((n * pixels + p) * out + o)] = d;
        r.db[std::size_t(o)] += d;
      }
  for (std::int64_t n = 0; n < g.n; ++n)
    for (std::int64_t i = 0; i < high; ++i)
      for (std::int64_t j = 0; j < wide; ++j)
        for (std::int64_t tap = 0; tap < depth; ++tap) {
          const std::int64_t c = tap / (g.kernel.height * g.kernel.width),
                             row = i * g.stride.height + tap / g.kernel.width % g.kernel.height -
                                   g.padding.height,
                             column = j * g.stride.width + tap % g.kernel.width - g.padding.width;
          if (row < 0 || row >= g.height || column < 0 || column >= g.width) continue;
          const auto at_x = std::size_t(((n * g.in + c) * g.height + row) * g.width + column);
          const auto at_y = std::size_t(((n * high + i) * wide + j) * out);
          const float* from = w.data() + tap * out;
          float sum = 0;
          for (std::int64_t o = 0; o < out; ++o) {
            y[at_y + std::size_t(o)] += x[at_x] * from[o];
            dw[std::size_t(tap * out + o)] += x[at_x] * dy[at_y + std::size_t(o)];
            sum += dy[at_y + std::size_t(o)] * from[o];
          }
          r.dx[at_x] += sum;
        }
  for (std::int64_t n = 0; n < g.n; ++n) {
    const auto first = y.begin() + n * pixels * out;
    const std::vector<float> image = turned({first, first + pixels * out}, pixels, out);
    r.y.insert(r.y.end(), image.begin(), image.end());
  }
  r.dw = turned(dw, depth, out);
  return r;
}

// What differs, "" where nothing does. `rounding`: in parts of the value.
std::string difference(const char* what, const std::vector<float>& actual, const std::vector<float>& expected,
                       float rounding) {
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (!(std::abs(actual.at(i) - expected[i]) <= rounding * std::abs(expected[i])))
      return std::string(what) + "[" + std::to_string(i) + "] is " + std::to_string(actual[i]) + ", not " +
             std::to_string(expected[i]) + "; ";
  return "";
}

std::string difference(const Conv& g, DType type) {
  const auto x = whole_numbers(g.x_size(), 1), w = whole_numbers(g.w_size(), 2),
             dy = whole_numbers(g.y_size(), 3);
  Leaf x_leaf({g.n, g.in, g.height, g.width}, x), w_leaf(g.geometry().weight_shape(), w),
      b_leaf({g.out}, std::vector<float>(std::size_t(g.out), 0.0f));
  const Layout layout = g.in % channel_block() == 0 ? Layout::blocked : Layout::plain;
  const Variable y = cast(conv2d(cast(in_layout(x_leaf.variable(), layout), type), w_leaf.variable(),
                                 b_leaf.variable(), g.geometry()),
                          DType::f32);
  backward(weighted_sum(y, dy));
  const Results expected = by_loops(g, x, w, dy);
  const float rounding = type == DType::bf16 ? 1.0f / 256 : 0.0f;
  return difference("y", values_of(y), expected.y, rounding) +
         difference("dx", x_leaf.gradient(), expected.dx, rounding) +
         difference("dw", w_leaf.gradient(), expected.dw, 0) +
         difference("db", b_leaf.gradient(), expected.db, 0);
}

void check_grid(std::int64_t in, std::int64_t out, DType type, std::int64_t most_kernel = 11) {
  const Threads scope(1);
  int checked = 0, wrong = 0;
  std::string first;
  for (std::int64_t kernel = 1; kernel <= most_kernel; ++kernel)
    for (std::int64_t stride = 1; stride <= 4; ++stride)
      for (std::int64_t size = 1; size <= 12; ++size) {
        const Conv g{2, in, size, size, out, kernel, stride, kernel / 2};
        const std::string found = difference(g, type);
        ++checked;
        if (!found.empty() && ++wrong <= 5) first += g.str() + ": " + found + "\n";
      }
  INFO((type == DType::bf16 ? "bfloat16: " : "fp32: ")
       << wrong << " of " << checked << " geometries are wrong, the first:\n"
       << first);
  CHECK(wrong == 0);
}

void check_wide_padding(DType type) {
  for (const std::int64_t channels : {3, 10, 16})
    for (const Extent kernel : {Extent(1), Extent(3), Extent(4, 2)})
      for (const std::int64_t stride : {1, 2, 4})
        for (const std::int64_t more : {-1, 0, 1, 7})
          for (const Extent size : {Extent(1), Extent(2, 3), Extent(9, 6)}) {
            const Conv g{3,        channels, size.height, size.width,
                         channels, kernel,   stride,      Extent(kernel.height + more, kernel.width + more)};
            INFO(g.str() << (type == DType::bf16 ? ", bfloat16" : ""));
            CHECK(difference(g, type) == "");
          }
}

std::vector<DType> types() {
  return multiplies_bfloat16() ? std::vector{DType::f32, DType::bf16} : std::vector{DType::f32};
}

}  // namespace

TEST_CASE("conv2d of every small geometry: 3 and 10 channels") {
  for (const DType type : types()) check_grid(3, 16, type), check_grid(10, 10, type);
}
TEST_CASE("conv2d of every small geometry: 16 channels") {
  for (const DType type : types()) check_grid(16, 16, type);
}
TEST_CASE("conv2d of every small geometry: 48 channels") {
  for (const DType type : types()) check_grid(48, 48, type);
}

TEST_CASE("conv2d with padding as wide as the kernel and wider, and kernels wider than the image") {
  for (const DType type : types()) check_wide_padding(type);
}
