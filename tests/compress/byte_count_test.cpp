// Bytes: the published ratios from shapes alone, and ours, measured.
#include "compress/byte_count.h"

#include <cmath>
#include <numeric>

#include "compress/codec/codec.h"
#include "nn/core/base/check.h"
#include "tests/support/catch.h"
#include "tests/support/model_shapes.h"
#include "tests/support/positions.h"

using namespace topknot;
using namespace topknot::test;

namespace {

using OneDimensional = WirePlan::OneDimensional;

std::size_t total(const std::vector<TensorShape>& shapes, bool one_dimensional_only = false) {
  std::size_t sum = 0;
  for (const TensorShape& shape : shapes)
    if (shape.one_dimensional || !one_dimensional_only) sum += shape.numel;
  return sum;
}

// The bytes of blocks that were really written, positions drawn uniformly.
std::uint64_t measured_upload(const std::vector<TensorShape>& shapes, const WirePlan& plan) {
  std::uint64_t bytes = 0, seed = 5;
  for (const PlannedMessage& message : planned_messages(shapes, plan)) {
    Entries<float> entries;
    entries.indices = uniform_positions(message.numel, message.count, ++seed);
    REQUIRE(entries.indices.size() == message.count);
    for (std::size_t i = 0; i < message.count; ++i)
      entries.values.push_back(static_cast<float>(std::sin(static_cast<double>(i))));
    bytes += write_block(entries, message.numel, *index_codecs().find(message.codec)({}),
                         *value_codecs().find(message.values)({}))
                 .size();
  }
  return bytes;
}

double measured_ratio(const std::vector<TensorShape>& shapes, const WirePlan& plan) {
  const std::uint64_t upload = measured_upload(shapes, plan);
  const ByteCount planned = planned_bytes(shapes, plan, 4);
  CHECK(static_cast<double>(planned.upload) == Approx(static_cast<double>(upload)).epsilon(0.003));
  CHECK(planned.dense == 4 * total(shapes));
  CHECK(planned.download == 3 * planned.upload);
  return static_cast<double>(planned.dense) / static_cast<double>(upload);
}

}  // namespace

TEST_CASE("the published ratios of Deep Gradient Compression follow from the models' shapes") {
  struct Case {
    std::vector<TensorShape> shapes;
    std::size_t numel, one_dimensional;
    double ratio, mebibytes;
  };
  const Case cases[] = {{alexnet_shapes(), 60965224, 10568, 597.7, 0.3891},
                        {resnet50_shapes(), 25557032, 54120, 276.5, 0.3526},
                        {ptb_lstm_shapes(), 51034000, 34000, 461.8, 0.42}};
  for (const Case& model : cases) {
    CHECK(total(model.shapes) == model.numel);
    CHECK(total(model.shapes, true) == model.one_dimensional);
    const ByteCount bytes = dgc_paper_bytes(model.shapes, 0.001, 4);
    CHECK(std::abs(bytes.ratio() - model.ratio) < 0.05);
    CHECK(static_cast<double>(bytes.upload) / 0x1p20 == Approx(model.mebibytes).epsilon(0.005));
    CHECK(bytes.dense == 4 * model.numel);
    CHECK(bytes.download == 3 * bytes.upload);
  }
  CHECK(4.0 * 51034000 / 0x1p20 == Approx(194.68).epsilon(0.00005));
}

TEST_CASE("Rice and fp16 with 1-D tensors dense in fp16 exceed 500 on ResNet-50 and 1050 on AlexNet") {
  WirePlan plan;
  plan.one_dimensional = OneDimensional::dense_fp16;
  for (const bool merged : {true, false}) {
    plan.merged = merged;
    CHECK(measured_ratio(resnet50_shapes(), plan) > 500);
  }
  for (const bool merged : {true, false}) {
    plan.merged = merged;
    CHECK(measured_ratio(alexnet_shapes(), plan) > 1050);
  }
}

TEST_CASE("with 1-D tensors sparsified too the ratio exceeds 1100 on every one of the three models") {
  const WirePlan plan;
  CHECK(measured_ratio(resnet50_shapes(), plan) > 1100);
  CHECK(measured_ratio(alexnet_shapes(), plan) > 1100);
  CHECK(measured_ratio(ptb_lstm_shapes(), plan) > 1100);
}

TEST_CASE("the other codes take what their definition says") {
  const std::vector<TensorShape> shapes = {{1000000, false}, {1000, true}};
  WirePlan plan;
  plan.merged = false;
  plan.one_dimensional = OneDimensional::dense_fp32;
  const auto upload = [&](const std::string& code, const std::string& values) {
    plan.codec = code;
    plan.values = values;
    const std::uint64_t measured = measured_upload(shapes, plan);
    CHECK(static_cast<double>(planned_bytes(shapes, plan, 2).upload) ==
          Approx(static_cast<double>(measured)).epsilon(0.01));
    return measured - 16 - 16 - 4000;
  };
  CHECK(upload("raw", "fp32") == 8000);
  CHECK(upload("run16", "fp32") == 6000);
  CHECK(upload("run16", "bf16") == 4000);
  CHECK(upload("bitmap", "fp32") == 125000 + 4000);
  CHECK(upload("raw", "int8") == 4000 + 1000 + 4 * 4);
  CHECK(upload("auto", "fp16") == upload("rice", "fp16"));
}

TEST_CASE("upload, download and dense bytes add up over messages") {
  ByteCount bytes;
  CHECK(bytes.ratio() == 0);
  const std::vector<std::uint64_t> blocks = {10, 20, 30};
  bytes.add_gather(blocks, 1);
  bytes.add_sum(5);
  bytes.dense = 250;
  CHECK(bytes.upload == 25);
  CHECK(bytes.download == 45);
  CHECK(bytes.ratio() == 10);
  bytes += bytes;
  CHECK(bytes.upload == 50);
  CHECK(bytes.download == 90);
  CHECK(bytes.dense == 500);
  WirePlan plan;
  plan.density = 0;
  CHECK_THROWS_AS(planned_bytes({}, plan, 2), UserError);
  CHECK_THROWS_AS(dgc_paper_bytes({}, 2, 2), UserError);
}
