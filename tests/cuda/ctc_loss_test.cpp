// ctc_loss on a GPU against the sum over all alignments.
#include "nn/ops/ops.h"

#include <cmath>

#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/ctc_reference.h"

namespace topknot {
namespace {

using namespace testing;
using testing::CaughtInput;
using testing::DeviceVector;
using testing::gpu_tensor;
using testing::rounded_to;

struct OnDevice {
  explicit OnDevice(const CtcCase& one)
      : labels(one.labels), lengths(one.lengths), frames(one.frame_counts) {}
  CtcTargets targets() const {
    return {{labels.data(), labels.size()}, {lengths.data(), lengths.size()}, {frames.data(), frames.size()}};
  }
  DeviceVector<std::int32_t> labels, lengths, frames;
};

TEST_CASE("ctc_loss on a GPU is the sum over all alignments, and its gradient that of the sum") {
  const OnGpu gpu;
  for (const DType type : {DType::f32, DType::bf16})
    for (const CtcCase& one : ctc_cases()) {
      INFO(one.name << (type == DType::bf16 ? ", bf16" : ""));
      const OnDevice device(one);
      const auto z = rounded_to(type, one.logits());
      const CaughtInput logits(
          gpu_tensor(z, {one.frames * one.sequences(), one.classes}, Layout::plain, type));
      const Variable loss = ctc_loss(logits.variable(), device.targets(), one.blank);
      CHECK(loss.value().to_vector()[0] == Approx(one.loss(as_double(z))).epsilon(1e-6).margin(1e-7));
      backward(loss, {}, 0.5f);
      Array expected = one.gradient(as_double(z));
      for (double& d : expected) d *= 0.5;
      check_close("dz", logits.gradient(), expected, Array(z.size(), 1.0), type == DType::bf16 ? 4e-3 : 1e-6);
    }
}

TEST_CASE(
    "ctc_loss on a GPU: many labels take several rounds of a block's threads; a NaN stands for bad targets") {
  const OnGpu gpu;
  CtcCase one{"long", 301, 5, 150, 0, std::vector<std::int32_t>(300), {150, 3}, {301, 300}};
  for (std::size_t i = 0; i < one.labels.size(); ++i) one.labels[i] = 1 + static_cast<std::int32_t>(i % 4);
  const Tensor z = gpu_tensor(one.logits(), {602, 5}, Layout::plain, DType::f32);
  const CaughtInput logits(z);
  const OnDevice device(one);
  const Variable loss = ctc_loss(logits.variable(), device.targets());
  backward(loss);
  Leaf on_cpu({602, 5}, one.logits());
  const Variable expected = ctc_loss(on_cpu.variable(), one.targets());
  backward(expected);
  CHECK(loss.value().to_vector()[0] == Approx(expected.value().data()[0]).epsilon(1e-6));
  check_close("dz", logits.gradient(), as_double(on_cpu.gradient()), Array(602 * 5, 1.0), 1e-6);

  one.frame_counts[1] = 2;  // for three labels
  const CaughtInput again(z);
  const OnDevice bad(one);
  const Variable broken = ctc_loss(again.variable(), bad.targets());
  backward(broken);
  CHECK(std::isnan(broken.value().to_vector()[0]));
  CHECK(std::isnan(again.gradient()[5]));        // row 1: frame 0 of the second
  CHECK_FALSE(std::isnan(again.gradient()[0]));  // of the first
}

}  // namespace
}  // namespace topknot
