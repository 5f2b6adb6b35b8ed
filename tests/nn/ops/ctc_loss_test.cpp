#include "tests/support/ctc_reference.h"

using namespace topknot;
using namespace topknot::testing;

TEST_CASE("ctc_loss is the sum over all alignments, and its gradient that of the sum") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  for (const CtcCase& one : ctc_cases()) {
    INFO(one.name);
    const auto z = rounded_to(activation_type(), one.logits());
    const Leaf logits({one.frames * one.sequences(), one.classes}, z);
    const DeviceNumbers labels(one.labels), lengths(one.lengths), frames(one.frame_counts);
    const Variable loss = ctc_loss(activation(logits.variable()), {labels, lengths, frames}, one.blank);
    CHECK(loss.shape() == Shape({1}));
    CHECK(loss.value().to_vector()[0] == Approx(one.loss(as_double(z))).epsilon(1e-6).margin(1e-7));
    backward(loss, {}, 0.5f);
    Array expected = one.gradient(as_double(z));
    for (double& d : expected) d *= 0.5;
    check_close("dz", logits.gradient(), expected, Array(z.size(), 1.0), rounding(1e-6));
  }
}

TEST_CASE("ctc_loss: frames behind a sequence's own have no part, and large logits do not overflow") {
  CtcCase one = ctc_cases().back();
  auto z = one.logits();
  Leaf first({one.frames * one.sequences(), one.classes}, z);
  const float expected = ctc_loss(first.variable(), one.targets(), one.blank).value().data()[0];
  const auto row = std::size_t((one.frames * one.sequences() - 1) * one.classes);  // of the last
  REQUIRE(one.frame_counts.back() < one.frames);
  for (std::size_t c = 0; c < std::size_t(one.classes); ++c) z[row + c] = 1e30f;
  Leaf second({one.frames * one.sequences(), one.classes}, z);
  const Variable loss = ctc_loss(second.variable(), one.targets(), one.blank);
  CHECK(loss.value().data()[0] == expected);
  backward(loss);
  for (std::size_t c = 0; c < std::size_t(one.classes); ++c) CHECK(second.gradient()[row + c] == 0.0f);

  Leaf large({2, 2},
             {0, 5000, -5000, 0});  // one label on two frames: three alignments, the likeliest certain
  const std::vector<std::int32_t> label{1}, length{1}, frames{2};
  CHECK(ctc_loss(large.variable(), {label, length, frames}).value().data()[0] == Approx(0.0f).margin(1e-6));
  Leaf against({2, 2}, {5000, 0, 5000, 0});
  CHECK(ctc_loss(against.variable(), {label, length, frames}).value().data()[0] ==
        Approx(5000 - std::log(2.0)));
}

TEST_CASE("ctc_loss lets a NaN through, and says which targets cannot be aligned") {
  const std::vector<std::int32_t> labels{1, 1}, length{2}, frames{2};
  Leaf two({2, 3}, std::vector<float>(6));
  CHECK(ctc_frames_needed(labels) == 3);
  CHECK(error_text([&] {
          ctc_loss(two.variable(), {labels, length, frames});
        }).find("sequence 0 has 2 frames, and its 2 labels take 3") != std::string::npos);
  const std::vector<std::int32_t> beyond{3, 1}, blank{0, 1}, three{3};
  CHECK_THROWS_AS(ctc_loss(two.variable(), {beyond, length, frames}), Error);
  CHECK_THROWS_AS(ctc_loss(two.variable(), {blank, length, frames}), Error);
  CHECK_THROWS_AS(ctc_loss(two.variable(), {labels, length, three}), Error);
  const std::vector<std::int32_t> other{1, 2};
  Leaf bad({2, 3}, {0, std::numeric_limits<float>::quiet_NaN(), 0, 0, 0, 0});
  CHECK(std::isnan(ctc_loss(bad.variable(), {other, length, frames}).value().data()[0]));
}
