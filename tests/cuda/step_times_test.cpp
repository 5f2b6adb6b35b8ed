// The times of a step from its marks.
#include "train/cuda/step_times.h"

#include "tests/support/catch.h"

namespace topknot {
namespace {

using Kind = ExchangeSpan::Kind;

TEST_CASE("a step's marks give its record's columns: what is encoded or waited for is no backward pass") {
  const auto of = [](Kind kind, int group, int round = 0) {
    return cuda::DeviceTimes::Mark{nullptr, {kind, group, round, {}, {}}};
  };
  const std::vector<cuda::DeviceTimes::Mark> marks{{"data"},
                                                   {"forward"},
                                                   {"backward"},
                                                   {"forward"},
                                                   {"backward"},
                                                   of(Kind::encode, 0),
                                                   of(Kind::communicate, 0),
                                                   of(Kind::wait, 1, ExchangeSpan::kInsideHost),
                                                   of(Kind::wait, 0),
                                                   of(Kind::decode, 0),
                                                   of(Kind::commit, 0),
                                                   {"update"}};
  const std::vector<std::uint64_t> clock{0,  1,  1,  3,  3,  10, 10, 13,  // nanoseconds
                                         13, 40, 20, 26, 26, 60, 30, 33,  // in the second backward pass
                                         41, 60, 60, 65, 65, 67, 67, 75};
  const cuda::DeviceTimes times;
  const cuda::StepTimes step(times, marks, clock.data());
  CHECK(step.pieces.size() == 6);
  CHECK(step.spans.size() == 6);
  StepSeconds total;
  step.add_to(total);
  const auto nanoseconds = [](double seconds) { return Approx(1e9 * seconds).margin(1e-3); };
  CHECK(nanoseconds(total.data_s) == 1);
  CHECK(nanoseconds(total.forward_s) == 5);
  CHECK(nanoseconds(total.backward_s) == 7 + 27 - 6 - 3);
  CHECK(nanoseconds(total.encode_s) == 6);
  CHECK(nanoseconds(total.communicate_s) == 34);
  CHECK(nanoseconds(total.exposed_s) == 3 + 19);
  CHECK(nanoseconds(total.decode_s) == 7);
  CHECK(nanoseconds(total.update_s) == 8);
  CHECK(nanoseconds(total.makespan_s) == 47);  // from the begin of the second backward pass
}

TEST_CASE("a kernel that began before the one that it waits for had ended shows in the times") {
  using Times = std::vector<std::uint64_t>;
  CHECK(cuda::times_apart(Times{100, 120, 141, 161}, 20));
  for (const Times& times : {Times{100, 119, 141, 161}, {100, 120, 110, 161}, {100, 120, 141, 142}})
    CHECK_FALSE(cuda::times_apart(times, 20));
}

}  // namespace
}  // namespace topknot
