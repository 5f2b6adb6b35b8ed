// The data sets that need no files.

#include "data/dataset.h"

#include "tests/support/test.h"

using namespace topknot;

namespace {

constexpr std::size_t kPixels = 3072;

std::unique_ptr<Dataset> images(std::int64_t size, Split split, std::uint64_t seed = 1) {
  DatasetOptions options;
  options.seed = seed;
  options.train_size = options.test_size = size;
  return make_dataset("synthetic_images", options, split);
}

std::vector<std::uint8_t> all_bytes(const Dataset& dataset) {
  return {dataset.bytes(0), dataset.bytes(0) + static_cast<std::size_t>(dataset.size()) * kPixels};
}

// Mean and mean square of the samples' elements as a loader normalises them.
std::pair<double, double> moments(const Dataset& data) {
  std::vector<float> sample(static_cast<std::size_t>(data.sample_shape().numel()));
  double sum = 0, squares = 0;
  for (std::int64_t n = 0; n < data.size(); ++n) {
    data.get(n, sample.data());
    for (const float v : sample) {
      const double x = (v - data.channel_mean()[0]) / data.channel_std()[0];
      sum += x, squares += x * x;
    }
  }
  const double count = static_cast<double>(data.size()) * static_cast<double>(sample.size());
  return {sum / count, squares / count};
}

// Softmax regression on normalised pixels by stochastic gradient descent.
class LinearModel {
 public:
  void train(const Dataset& data, int epochs, float rate) {
    for (int epoch = 0; epoch < epochs; ++epoch)
      for (std::int64_t n = 0; n < data.size(); ++n) {
        std::vector<float> p = scores(data, n);
        const float top = *std::max_element(p.begin(), p.end());
        float sum = 0;
        for (float& v : p) sum += v = std::exp(v - top);
        for (std::size_t c = 0; c < 10; ++c) {
          const float g = p[c] / sum - (data.label(n) == static_cast<int>(c) ? 1.0f : 0.0f);
          for (std::size_t i = 0; i < kPixels; ++i) weights_[c * kPixels + i] -= rate * g * x_[i];
          bias_[c] -= rate * g;
        }
      }
  }
  double accuracy(const Dataset& data) {
    std::int64_t right = 0;
    for (std::int64_t n = 0; n < data.size(); ++n) {
      const auto s = scores(data, n);
      right += std::max_element(s.begin(), s.end()) - s.begin() == data.label(n);
    }
    return static_cast<double>(right) / static_cast<double>(data.size());
  }

 private:
  std::vector<float> scores(const Dataset& data, std::int64_t n) {
    data.get(n, x_.data());
    for (float& x : x_) x = (x - data.channel_mean()[0]) / data.channel_std()[0];
    std::vector<float> result = bias_;
    for (std::size_t c = 0; c < 10; ++c)
      for (std::size_t i = 0; i < kPixels; ++i) result[c] += weights_[c * kPixels + i] * x_[i];
    return result;
  }
  std::vector<float> weights_ = std::vector<float>(10 * kPixels), bias_ = std::vector<float>(10),
                     x_ = std::vector<float>(kPixels);
};

}  // namespace

TEST_CASE("a data set that is larger than the memory is refused by its key before anything is allocated") {
  DatasetOptions options;
  options.train_size = options.test_size = 1000000000;
  for (const char* name : {"synthetic_images", "synthetic_regression"}) {
    CHECK_USER_ERROR(make_dataset(name, options, Split::train), "data.train_size", "at most");
    CHECK_USER_ERROR(make_dataset(name, options, Split::test), "data.test_size", "at most");
  }
}

TEST_CASE("synthetic pictures follow the seed and the split, and a larger set begins with the smaller one") {
  const auto a = all_bytes(*images(50, Split::train));
  CHECK(a == all_bytes(*images(50, Split::train)));
  CHECK(a != all_bytes(*images(50, Split::train, 2)));
  CHECK(a != all_bytes(*images(50, Split::test)));
  const auto longer = all_bytes(*images(80, Split::train));
  CHECK(std::equal(a.begin(), a.end(), longer.begin()));
  CHECK(images(0, Split::train)->size() == 10000);
  CHECK(images(0, Split::test)->size() == 2000);
}

TEST_CASE("synthetic pictures are balanced, and normalise to mean 0 and deviation 1") {
  const auto data = images(1000, Split::train);
  std::vector<int> count(10);
  for (std::int64_t n = 0; n < 1000; ++n) ++count[data->label(n)];
  CHECK(count == std::vector<int>(10, 100));
  const auto [mean, square] = moments(*data);
  CHECK(std::abs(mean) < 0.02);
  CHECK(std::abs(square - 1) < 0.1);
}

TEST_CASE("synthetic pictures come in ImageNet's shape and with its number of classes") {
  DatasetOptions options;
  options.set("image_size", 224);
  options.set("classes", 1000);
  options.train_size = 5;
  options.set("noise", 0);
  const auto data = make_dataset("synthetic_images", options, Split::train);
  CHECK(data->sample_shape() == Shape({3, 224, 224}));
  CHECK(data->classes() == 1000);
  options.train_size = 1003;
  options.set("image_size", 9);  // odd, and so many elements
  const auto small = make_dataset("synthetic_images", options, Split::train);
  for (const std::int64_t n : {0, 999, 1002}) CHECK(small->label(n) == n % 1000);
  const auto [mean, square] = moments(*data);
  CHECK(std::abs(mean) < 0.05);
  CHECK(square > 0.05);  // not plain grey
  CHECK(square < 1);
}

TEST_CASE("a linear model fits the synthetic pictures it saw and stays near chance on new ones") {
  const auto train = images(1500, Split::train), test = images(1000, Split::test);
  LinearModel model;
  model.train(*train, 4, 0.001f);
  CHECK(model.accuracy(*train) > 0.5);  // it did learn, by heart
  CHECK(model.accuracy(*test) < 0.2);
}

TEST_CASE("synthetic pictures refuse options that make no sense") {
  const auto refused = [](const char* name, const std::function<void(DatasetOptions&)>& change,
                          std::initializer_list<std::string> parts) {
    DatasetOptions options;
    change(options);
    return user_error([&] { make_dataset(name, options, Split::train); }, parts);
  };
  const char *const pictures = "synthetic_images", *const regression = "synthetic_regression";
  CHECK(refused(pictures, [](auto& options) { options.set("classes", 1001); }, {"data.classes", "1001"}));
  for (const int size : {7, 513})
    CHECK(refused(pictures, [=](auto& o) { o.set("image_size", size); },
                  {"data.image_size", std::to_string(size)}));
  CHECK(refused(pictures, [](auto& options) { options.set("noise", -0.1); }, {"data.noise"}));
  for (const char* name : {pictures, regression})  // the key's upper end is 1 for every set
    CHECK(refused(name, [](auto& options) { options.set("noise", 1.5); }, {"data.noise"}));
  CHECK(refused(regression, [](auto& options) { options.set("noise", std::nan("")); }, {"data.noise"}));
  CHECK(refused(pictures, [](auto& options) { options.train_size = -1; }, {"data.train_size"}));
}

TEST_CASE("regression targets are linear in the inputs but for the noise, with one teacher for both splits") {
  DatasetOptions options;
  options.features = 2;
  options.set("noise", 0.0);
  options.train_size = options.test_size = 200;
  const auto train = make_dataset("synthetic_regression", options, Split::train);
  const auto test = make_dataset("synthetic_regression", options, Split::test);
  // The teacher from two training samples by Cramer's rule; then every sample must agree with it.
  float x[2][2], y[2];
  for (int n = 0; n < 2; ++n) train->get(n, x[n]), train->target(n, &y[n]);
  const double det = x[0][0] * x[1][1] - x[0][1] * x[1][0];
  const double w[] = {(y[0] * x[1][1] - y[1] * x[0][1]) / det, (x[0][0] * y[1] - x[1][0] * y[0]) / det};
  options.set("noise", 0.5);
  const auto noisy = make_dataset("synthetic_regression", options, Split::train);
  double squares = 0;
  for (int n = 0; n < 200; ++n) {
    float v[2], t;
    for (const auto* data : {train.get(), test.get()}) {
      data->get(n, v);
      data->target(n, &t);
      CHECK(t == Approx(w[0] * v[0] + w[1] * v[1]).margin(1e-4));
    }
    noisy->get(n, v);
    noisy->target(n, &t);
    squares += std::pow(t - (w[0] * v[0] + w[1] * v[1]), 2);
  }
  CHECK(std::abs(squares / 200 - 0.25) < 0.1);
  CHECK_THROWS_AS(train->label(0), Error);
}
