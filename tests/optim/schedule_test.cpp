#include "optim/schedule.h"

#include "tests/support/error_text.h"

using namespace topknot;

namespace {

using Numbers = std::vector<double>;

ScheduleOptions options_of(const std::string& name,
                           std::initializer_list<std::pair<const char*, OptionValue>> set = {}) {
  ScheduleOptions options;
  options.name = name;
  for (const auto& [key, value] : set) options.set(key, value);
  return options;
}

}  // namespace

TEST_CASE("the constant schedule is constant") {
  const auto schedule = make_schedule({}, 0.3);
  for (int step : {0, 1, 999, 5000}) CHECK(schedule->lr(step, 10, 1000) == 0.3);
}

TEST_CASE("warm-up rises from base/W by equal steps and reaches base at step W") {
  for (const char* name : {"constant", "cosine"}) {
    ScheduleOptions options = options_of(name);
    options.warmup_epochs = 5;
    const auto schedule = make_schedule(options, 0.1);
    const double w = 5 * 20;
    CHECK(schedule->lr(0, 20, 2000) == Approx(0.1 / w));
    for (int step : {1, 37, 99})
      CHECK(schedule->lr(step, 20, 2000) == Approx(0.1 / w + (0.1 - 0.1 / w) / w * step));
    CHECK(schedule->lr(100, 20, 2000) == 0.1);
  }
}

TEST_CASE("warm-up may be a part of an epoch") {
  ScheduleOptions options;
  options.warmup_epochs = 0.5;
  const auto schedule = make_schedule(options, 1.0);
  CHECK(schedule->lr(4, 10, 100) < 1.0);
  CHECK(schedule->lr(5, 10, 100) == 1.0);
}

TEST_CASE("warm-up by steps: step i of W has (i + 1) / (W + 1) of the rate, then the schedule goes on") {
  ScheduleOptions options = options_of("cosine", {{"min_lr", 1e-4}});
  options.warmup_steps = 100;
  const auto schedule = make_schedule(options, 1e-3);
  for (const int steps_per_epoch : {1, 7, 100000}) {
    CHECK(schedule->lr(0, steps_per_epoch, 2000) == Approx(1e-3 / 101));
    CHECK(schedule->lr(99, steps_per_epoch, 2000) == Approx(1e-3 * 100 / 101));
    CHECK(schedule->lr(100, steps_per_epoch, 2000) == 1e-3);
    // nanoGPT's formula for its 1900 steps after the warm-up
    for (const int step : {101, 577, 1050, 1999}) {
      const double pi = std::acos(-1.0);
      CHECK(schedule->lr(step, steps_per_epoch, 2000) ==
            Approx(1e-4 + 0.5 * (1 + std::cos(pi * (step - 100) / 1900.0)) * (1e-3 - 1e-4)));
    }
    CHECK(schedule->lr(2000, steps_per_epoch, 2000) == Approx(1e-4));
  }
  CHECK(schedule->lr(50, 10, 60) == Approx(1e-3 * 51 / 101));  // a run that ends in its warm-up
  options.name = "constant";
  CHECK(make_schedule(options, 0.1)->lr(0, 1, 1000) == Approx(0.1 / 101));
  CHECK(make_schedule(options, 0.1)->lr(100, 1, 1000) == 0.1);
  options.warmup_epochs = 1;
  CHECK_THROWS_WITH(make_schedule(options, 0.1),
                    Catch::Contains("schedule.warmup_steps") && Catch::Contains("schedule.warmup_epochs"));
  options.warmup_epochs = 0, options.warmup_steps = -1;
  CHECK_THROWS_WITH(make_schedule(options, 0.1), Catch::Contains("schedule.warmup_steps"));
}

TEST_CASE("cosine may end before the run does, or after it") {
  const auto to_the_end = make_schedule(options_of("cosine", {{"min_lr", 0.01}}), 1.0),
             shorter = make_schedule(options_of("cosine", {{"min_lr", 0.01}, {"decay_steps", 50}}), 1.0);
  for (const int step : {0, 20, 49}) CHECK(shorter->lr(step, 10, 200) == to_the_end->lr(step, 10, 50));
  CHECK(shorter->lr(50, 10, 200) == 0.01);
  CHECK(shorter->lr(199, 10, 200) == 0.01);
  CHECK(shorter->lr(29, 10, 30) == to_the_end->lr(29, 10, 50));
  CHECK_THROWS_WITH(make_schedule(options_of("cosine", {{"decay_steps", -1}}), 1.0),
                    Catch::Contains("schedule.decay_steps"));
}

TEST_CASE("a milestone within a warm-up by steps is refused once the steps of an epoch are known") {
  ScheduleOptions options = options_of("multistep", {{"milestones", Numbers{0.5, 2}}});
  options.warmup_steps = 50;
  CHECK_NOTHROW(check_warmup_steps(options, 100));
  CHECK_THROWS_WITH(check_warmup_steps(options, 99),
                    Catch::Contains("schedule.milestones") && Catch::Contains("schedule.warmup_steps"));
  options.name = "constant";
  CHECK_NOTHROW(check_warmup_steps(options, 1));
}

TEST_CASE("multistep drops at the first step of each milestone's epoch") {
  ScheduleOptions options = options_of("multistep", {{"milestones", Numbers{81, 122}}});
  options.warmup_epochs = 5;
  const auto schedule = make_schedule(options, 0.1);
  const int per_epoch = 7, total = 141 * per_epoch;
  CHECK(schedule->lr(81 * per_epoch - 1, per_epoch, total) == 0.1);
  CHECK(schedule->lr(81 * per_epoch, per_epoch, total) == Approx(0.01));
  CHECK(schedule->lr(122 * per_epoch - 1, per_epoch, total) == Approx(0.01));
  CHECK(schedule->lr(122 * per_epoch, per_epoch, total) == Approx(0.001));
  CHECK(schedule->lr(total + 1, per_epoch, total) == Approx(0.001));
}

TEST_CASE("the cosine goes from base to min_lr by way of their mean") {
  ScheduleOptions options = options_of("cosine", {{"min_lr", 0.2}});
  SECTION("without warm-up") {
    const auto schedule = make_schedule(options, 1.0);
    CHECK(schedule->lr(0, 10, 100) == 1.0);
    CHECK(schedule->lr(50, 10, 100) == Approx(0.6));
    CHECK(schedule->lr(100, 10, 100) == Approx(0.2));
    CHECK(schedule->lr(130, 10, 100) == Approx(0.2));
  }
  SECTION("over the steps after the warm-up") {
    options.warmup_epochs = 2;
    const auto schedule = make_schedule(options, 1.0);
    CHECK(schedule->lr(60, 10, 100) == Approx(0.6));
    CHECK(schedule->lr(20, 10, 20) == 1.0);  // a run that ends with its warm-up
  }
}

TEST_CASE("multistep takes a factor of the base rate for each milestone") {
  const auto schedule = make_schedule(
      options_of("multistep", {{"milestones", Numbers{63, 80}}, {"factors", Numbers{0.01, 0.001}}}), 22);
  CHECK(schedule->lr(63 * 7 - 1, 7, 700) == 22);
  CHECK(schedule->lr(63 * 7, 7, 700) == Approx(0.22));
  CHECK(schedule->lr(80 * 7 - 1, 7, 700) == Approx(0.22));
  CHECK(schedule->lr(80 * 7, 7, 700) == Approx(0.022));
}

TEST_CASE("exponential multiplies in each epoch from decay_from on") {
  const auto each = make_schedule(options_of("exponential", {{"gamma", 1 / 1.01}}), 2e-4);
  CHECK(each->lr(9, 10, 1000) == 2e-4);
  CHECK(each->lr(10, 10, 1000) == Approx(2e-4 / 1.01));
  CHECK(each->lr(999, 10, 1000) == Approx(2e-4 / std::pow(1.01, 99)));
  const auto late =  // four epochs at the base rate
      make_schedule(options_of("exponential", {{"gamma", 0.5}, {"decay_from", 4}}), 1);
  CHECK(late->lr(39, 10, 1000) == 1);
  CHECK(late->lr(40, 10, 1000) == 0.5);
  CHECK(late->lr(59, 10, 1000) == 0.25);
}

TEST_CASE("plateau drops behind patience + 1 losses in a row not below the best, also from its state") {
  ScheduleOptions options = options_of("plateau", {{"gamma", 0.25}, {"min_lr", 0.1}});
  const auto rate = [](const Schedule& schedule) { return schedule.lr(77, 10, 1000); };
  const auto at_once = make_schedule(options, 8);
  CHECK(rate(*at_once) == 8);
  for (const auto& [loss, expected] : std::vector<std::pair<double, double>>{
           {5, 8}, {4, 8}, {4, 2}, {3.9, 2}, {NAN, 0.5}, {3, 0.5}, {3.5, 0.125}, {3.5, 0.1}}) {
    at_once->evaluated(loss);
    CHECK(rate(*at_once) == expected);
  }
  options.set("patience", 2);
  const auto patient = make_schedule(options, 8);
  for (const double loss : {5, 6, 6}) patient->evaluated(loss);
  CHECK(rate(*patient) == 8);
  const auto resumed = make_schedule(options, 8);
  resumed->load_state(patient->state());
  for (const auto& schedule : {patient.get(), resumed.get()}) {
    schedule->evaluated(5);
    CHECK(rate(*schedule) == 2);
    for (int i = 0; i < 2; ++i) schedule->evaluated(5);
    CHECK(rate(*schedule) == 2);  // a drop starts the count anew
    schedule->evaluated(5);
    CHECK(rate(*schedule) == 0.5);
  }
}

TEST_CASE("schedule options that make no sense name their key") {
  const auto refused = [](const char* key, void (*set)(ScheduleOptions&), double base = 0.1) {
    ScheduleOptions options = options_of("multistep", {{"milestones", Numbers{3, 6}}});
    set(options);
    return user_error([&] { make_schedule(options, base); }, {key});
  };
  CHECK(refused("cosine", [](auto& o) { o.name = "cosin"; }));
  CHECK(refused(
      "optimizer.lr", [](auto&) {}, -1));
  CHECK(refused("schedule.milestones", [](auto& o) { o.set("milestones", Numbers()); }));
  CHECK(refused("schedule.milestones", [](auto& o) { o.set("milestones", Numbers{9, 6}); }));
  CHECK(refused("schedule.milestones", [](auto& o) { o.set("milestones", Numbers{3, 3}); }));
  CHECK(refused("schedule.milestones", [](auto& o) { o.set("milestones", Numbers{0, 6}); }));
  CHECK(refused("schedule.warmup_epochs", [](auto& o) { o.warmup_epochs = 4; }));  // a milestone within
  CHECK(refused("schedule.warmup_epochs", [](auto& o) { o.warmup_epochs = -1; }));
  CHECK(refused("schedule.gamma", [](auto& o) { o.set("gamma", 0); }));
  CHECK(refused("schedule.factors", [](auto& o) { o.set("factors", Numbers{0.1}); }));  // for two milestones
  CHECK(refused("schedule.factors", [](auto& o) { o.set("factors", Numbers{2, 2}); }));
  CHECK(refused("schedule.decay_from", [](auto& o) { o.name = "exponential", o.set("decay_from", -1); }));
  CHECK(refused("schedule.patience", [](auto& o) { o.name = "plateau", o.set("patience", -1); }));
  CHECK(refused("schedule.min_lr", [](auto& o) { o.set("min_lr", 0.2); }));
}

TEST_CASE("a milestone within an epoch counts from the nearest step") {
  const auto schedule = make_schedule(options_of("multistep", {{"milestones", Numbers{0.29}}}), 1.0);
  // 0.29 times 100 is a little less than 29.
  CHECK(schedule->lr(28, 100, 1000) == 1.0);
  CHECK(schedule->lr(29, 100, 1000) == Approx(0.1));
}
