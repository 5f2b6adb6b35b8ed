// Ranks that go on without others, as threads: a rank that dies aborts its communicator at a given place of a step. Top-1
// with error feedback on four weights, SGD with rate 1/2, gradient w - a of each rank, all by hand and exact.
#include <condition_variable>

#include "nn/core/parameter.h"
#include "tests/train/resumed_run.h"
#include "train/elastic.h"

namespace topknot {
namespace {

using namespace testing;

using Four = std::array<float, 4>;
constexpr Four kTargets[] = {{96, 72, 48, 60}, {48, 24, 96, 48}, {12, 0, 36, 72}, {72, 48, 96, 60}};
constexpr int kSteps = 3;

// A step's collectives.
enum class Call { block, flags };

// When ranks of the first view die, and whose flags do not arrive though others' do.
struct Script {
  int ranks = 3;
  std::vector<int> dead = {};
  std::int64_t step = 2;
  Call before = Call::flags;           // they die before this one of the step
  std::vector<int> flags_arrive = {};  // only there; the dead send theirs. Empty: all or nothing
  int bad_loss = -1;                   // the rank whose loss is NaN in that step
  // After that step this rank leaves, or this one joins, and nothing fails.
  int leaves = -1, joins = -1;
};

struct Killed {};

// The meeting points of a test: groups of threads for each view, and who has received a step's flags.
class Stage {
 public:
  explicit Stage(const Script& script) : script_(script) {
    first_ = make_thread_group(script.ranks, 60);
    for (int r = 0; r < script.ranks; ++r)
      if (std::ranges::count(script.dead, r) == 0 && r != script.leaves) left_.push_back(r);
    if (script.joins >= 0) left_.push_back(script.joins);
    second_ = make_thread_group(static_cast<int>(left_.size()), 60);
  }
  Communicator& first(int rank) { return *first_[rank]; }
  Rejoin rejoin(int rank) {
    const auto join = [this, rank](View& view) -> std::unique_ptr<Communicator> {
      if (view.number > 1) return nullptr;
      view = {2, left_, 0};
      return std::move(second_[std::ranges::find(left_, rank) - left_.begin()]);
    };
    return {join};
  }
  void flags_have_arrived() { ++arrived_; }
  void await_flags() const {
    while (arrived_ != script_.flags_arrive.size()) std::this_thread::yield();
  }
  const Script& script() const { return script_; }

 private:
  const Script script_;
  std::vector<int> left_;
  std::vector<std::unique_ptr<Communicator>> first_, second_;
  std::atomic<std::size_t> arrived_ = 0;
};

// A rank's communicator in the first view, with the faults of the script in its gathers: two in a step.
class Faulty final : public Communicator {
 public:
  Faulty(Stage& stage, int rank)
      : Communicator({rank, stage.script().ranks, "threads"}), stage_(stage), base_(stage.first(rank)) {}

  void all_gather(std::span<const std::byte> mine, std::vector<std::vector<std::byte>>& all) override {
    const Script& script = stage_.script();
    const std::int64_t number = calls_++;
    const bool here = number / 2 + 1 == script.step;
    const Call call = number % 2 == 0 ? Call::block : Call::flags;
    const bool dies = std::ranges::count(script.dead, rank()) > 0;
    if (here && call == script.before && dies && script.flags_arrive.empty()) {
      base_.abort("killed");
      throw Killed();
    }
    base_.all_gather(mine, all);
    if (!here || call != Call::flags || script.flags_arrive.empty()) return;
    if (std::ranges::count(script.flags_arrive, rank()) > 0) {
      stage_.flags_have_arrived();
      if (!dies) return;
    } else {
      stage_.await_flags();
    }
    base_.abort(dies ? "killed" : "a connection has ended");
    if (dies) throw Killed();
    all.clear();
    throw CollectiveError("a connection has ended");
  }
  void abort(const std::string& reason) noexcept override { base_.abort(reason); }

  void all_reduce(std::span<float>, SumOrder) override { throw Error("not called"); }
  void all_reduce(std::span<BFloat16>, SumOrder) override { throw Error("not called"); }
  void broadcast(std::span<std::byte>, int) override { throw Error("not called"); }
  void all_to_all(std::span<const std::vector<std::byte>>, std::vector<std::vector<std::byte>>&) override {
    throw Error("not called");
  }
  void send_receive(int, std::span<const std::byte>, int, std::vector<std::byte>&) override {
    throw Error("not called");
  }
  void barrier() override { base_.barrier(); }
  std::unique_ptr<Communicator> split(int) override { throw Error("not called"); }

 private:
  Stage& stage_;
  Communicator& base_;
  std::int64_t calls_ = 0;
};

struct Outcome {
  std::vector<Four> weights;  // after each step
  std::vector<bool> skipped;  // by step
  Four residual{};            // after the last one
  Four at_the_change{};       // as it was left, before it was scaled
  std::int64_t agreed = -1;   // the step that counts, of the change
};

// All that are in the second view get the first one's weights, if a rank joins.
void share_weights(Communicator& second, const Script& script, Four& w) {
  if (script.joins >= 0) second.broadcast(std::as_writable_bytes(std::span(w)), 0);
}

// What a rank does, over as many views as there are.
void train(int started, Stage& stage, Outcome& outcome) {
  const Script& script = stage.script();
  const bool joins = started == script.joins;
  View view;
  const std::unique_ptr<Communicator> first =
      joins ? stage.rejoin(started).join(view) : std::make_unique<Faulty>(stage, started);
  Views views(stage.rejoin(started), *first, view);
  Four w{}, e{};
  int ranks = script.ranks;
  std::int64_t made = 0;
  if (joins) {
    made = script.step, ranks = first->size();
    const std::int64_t none = -1;
    std::vector<std::vector<std::byte>> all;
    first->all_gather(std::as_bytes(std::span(&none, 1)), all);  // as Views::prepare()
    share_weights(*first, script, w);
    outcome.weights.assign(static_cast<std::size_t>(made), w);
  }
  const auto copy = [](std::span<const float> from, std::span<float> to) {
    std::copy(from.begin(), from.end(), to.begin());
  };
  while (made < kSteps) {
    Communicator& used = views.communicator();
    ParameterStore store;
    store.add("w", {4}, [](std::span<float> values, const CounterRng&) { std::ranges::fill(values, 0.0f); });
    ParameterArena& arena = store.build([](const Parameter&) { return true; }, 1);
    CollectiveQueue queue(used);
    ExchangeOptions options;
    options.compress.name = "topk";
    Exchange exchange(arena, queue, options);
    copy(w, arena.weights());
    copy(e, arena.residual(0, 4));
    exchange.scale_memory(static_cast<float>(used.size()) /
                          static_cast<float>(std::exchange(ranks, used.size())));
    exchange.when_agreement_fails(views.agreement_source(used, exchange.last_agreement()));
    const auto keep = [&] { copy(arena.weights(), w), copy(arena.residual(0, 4), e); };
    try {
      while (made < kSteps) {
        exchange.begin_step({.step = made, .density = 0.25});
        arena.mark_gradients_unwritten();
        Parameter& parameter = *arena.parameters().front();
        float* const gradient = parameter.variable().gradient_target().data;
        for (std::size_t i = 0; i < 4; ++i) gradient[i] = arena.weights()[i] - kTargets[started][i];
        exchange.ready(parameter);
        const bool bad = made + 1 == script.step && started == script.bad_loss;
        const bool committed = exchange.finish(!bad).committed();
        if (committed)
          for (std::size_t i = 0; i < 4; ++i)
            arena.weights()[i] -= 0.5f * exchange.averaged(exchange.groups()[0])[i];
        ++made;
        keep();
        outcome.weights.push_back(w), outcome.skipped.push_back(!committed);
        if (made != script.step || (script.leaves < 0 && script.joins < 0)) continue;
        RunState state;
        state.residual.assign(e.begin(), e.end());
        const bool leaves = started == script.leaves;
        std::vector<std::vector<std::byte>> all;
        stage.first(started).all_gather(leaves ? residual_block(state) : std::vector<std::byte>(), all);
        outcome.residual = e;
        if (leaves) return;
        take_residuals(all, started, {1, 1, 1}, state);
        copy(state.residual, arena.residual(0, 4));
        throw ViewEnds("a planned end");
      }
    } catch (const CollectiveError&) {
      exchange.abandon();
      keep();
      if (!views.join_next(used, exchange.last_agreement()) || views.agreed().step != made)
        throw Error("this rank is at another step than the others");
      outcome.agreed = views.agreed().step, outcome.at_the_change = e;
      share_weights(views.communicator(), script, w);
    }
  }
  outcome.residual = e;
}

// By started rank; the dead ones' end with their last step.
std::vector<Outcome> play(const Script& script) {
  Stage stage(script);
  const int ranks = std::max(script.ranks, script.joins + 1);
  std::vector<Outcome> outcomes(ranks);
  const auto errors = errors_of_threads(ranks, [&](int r) {
    try {
      train(r, stage, outcomes[r]);
    } catch (const Killed&) {
    } catch (const std::exception& error) {
      if (r < script.ranks) stage.first(r).abort(error.what());
      throw;
    }
  });
  for (int r = 0; r < script.ranks; ++r)
    if (std::ranges::count(script.dead, r) == 0) CHECK(errors[r] == "");
  return outcomes;
}

// The same by the rule, in doubles. `counts`: the step in which ranks die is made with them.
struct ByRule {
  std::vector<std::array<double, 4>> weights;
  std::array<std::array<double, 4>, 4> residuals{};
  ByRule(const Script& script, bool counts) {
    std::array<double, 4> w{};
    std::vector<int> ranks;
    for (int r = 0; r < script.ranks; ++r) ranks.push_back(r);
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      if (step == script.step + counts) {
        const double before = static_cast<double>(ranks.size());
        std::erase_if(ranks, [&](int r) { return std::ranges::count(script.dead, r) > 0; });
        for (const int r : ranks)
          for (double& e : residuals[r]) e *= static_cast<double>(ranks.size()) / before;
      }
      const auto theta = w;
      for (const int rank : ranks) {
        auto& e = residuals[rank];
        for (std::size_t i = 0; i < 4; ++i) e[i] += theta[i] - static_cast<double>(kTargets[rank][i]);
        const auto top = static_cast<std::size_t>(
            std::ranges::max_element(e, {}, [](double u) { return std::abs(u); }) - e.begin());
        w[top] -= 0.5 * e[top] / static_cast<double>(ranks.size());
        e[top] = 0;
      }
      weights.push_back(w);
    }
  }
};

template <class Numbers>
bool near(const Four& got, const Numbers& wanted, double relative) {
  for (std::size_t i = 0; i < 4; ++i) {
    INFO("element " << i << ": " << got[i] << ", not " << wanted[i]);
    if (std::abs(got[i] - wanted[i]) > relative * std::max(1.0, std::abs(static_cast<double>(wanted[i])))) {
      FAIL_CHECK();
      return false;
    }
  }
  return true;
}
bool near(const Four& got, const std::array<double, 4>& wanted) {
  return near(got, wanted, 1e-6);
}

Keys ranks_of(int ranks) {
  return {"data.train_size=256", "train.eval_every=1", "train.threads=1", "train.stop_after=0",
          "dist.ranks=" + std::to_string(ranks)};
}

std::vector<int> left(const Script& script) {
  std::vector<int> ranks;
  for (int r = 0; r < script.ranks; ++r)
    if (std::ranges::count(script.dead, r) == 0) ranks.push_back(r);
  return ranks;
}

}  // namespace

TEST_CASE("ranks die: those that are left make the step again, or count it if one of them has its flags") {
  struct Row {
    const char* when;
    Script script;
    bool counts;
    double relative;  // 4 ranks: to the bit
  };
  for (const auto& [when, script, counts, relative] :
       {Row{"before any block", {.dead = {1}, .before = Call::block}, false, 1e-6},
        Row{"before any flags", {.dead = {1}}, false, 1e-6},
        Row{"one rank has the flags", {.dead = {1}, .flags_arrive = {0}}, true, 1e-6},
        Row{"the only one with the flags dies too", {.dead = {0, 1}, .flags_arrive = {0}}, false, 1e-6},
        Row{"two of four, before any flags", {.ranks = 4, .dead = {1, 3}}, false, 0},
        Row{"two of four, after", {.ranks = 4, .dead = {3, 1}, .flags_arrive = {0, 2}}, true, 0}}) {
    INFO(when);
    const auto outcomes = play(script);
    const ByRule rule(script, counts);
    for (const int r : left(script)) {
      const Outcome& rank = outcomes[r];
      CHECK(rank.agreed == (counts ? 2 : 1));
      REQUIRE(rank.weights.size() == 3);
      for (std::size_t step = 0; step < 3; ++step)
        CHECK(near(rank.weights[step], rule.weights[step], relative));
      CHECK(near(rank.residual, rule.residuals[r], relative));
      CHECK(rank.weights == outcomes[left(script).front()].weights);
    }
  }
  // By hand, and what the ranks had before it was scaled.
  const auto four = play({.ranks = 4, .dead = {1, 3}}), three = play({.dead = {1}});
  CHECK(four[0].weights == std::vector<Four>{{12, 0, 24, 9}, {12, 27, 24, 24.75f}, {54, 27, 24, 36.5625f}});
  CHECK(near(three[2].weights[2], {56, 30, 32, 27}));
  CHECK(near(three[0].at_the_change, {0, -72, -48, -60}));
}

TEST_CASE("a rank that leaves hands its residual to the one behind it: nothing is lost") {
  const auto outcomes = play({.leaves = 1});
  CHECK(near(outcomes[1].residual, {-80, -48, -80, 0}));
  CHECK(near(outcomes[0].at_the_change, {-80, 0, -80, -108}));
  CHECK(near(outcomes[2].at_the_change, {-88, -48, -136, 0}));
  for (const std::size_t r : {0, 2}) {
    CHECK(outcomes[r].agreed == 2);
    REQUIRE(outcomes[r].weights.size() == 3);
    CHECK(near(outcomes[r].weights[1], {16, 24, 16, 36}));
    CHECK(near(outcomes[r].weights[2], {148.0 / 3, 24, 131.0 / 3, 36}));
  }
}

TEST_CASE("the last rank's residual goes to the first, and two in a row to the one behind both") {
  const auto of = [](float value) {
    RunState state;
    state.residual = {value, 10 * value};
    return state;
  };
  const std::vector<std::byte> none;
  RunState first = of(1), third = of(4);
  const std::vector<std::vector<std::byte>> last = {none, none, residual_block(of(2))};
  take_residuals(last, 0, {1, 1, 1}, first);
  CHECK(first.residual == std::vector<float>{3, 30});
  const std::vector<std::vector<std::byte>> two = {residual_block(of(1)), residual_block(of(2)), none};
  take_residuals(two, 2, {1, 1, 1}, third);
  CHECK(third.residual == std::vector<float>{7, 70});
  take_residuals(last, 1, {1, 1, 1}, third);
  CHECK(third.residual == std::vector<float>{7, 70});
  CHECK_THROWS_AS(take_residuals({residual_block({}), none}, 1, {1, 1}, third), Error);
}

TEST_CASE("a rank that joins begins with the others' weights, and owes nothing") {
  const auto outcomes = play({.joins = 3});
  for (const Outcome& rank : outcomes) {
    REQUIRE(rank.weights.size() == 3);
    CHECK(near(rank.weights[1], {16, 24, 16, 36}));
    CHECK(near(rank.weights[2], {118.0 / 3, 24, 367.0 / 6, 36}));
    CHECK(rank.weights[2] == outcomes[0].weights[2]);
  }
}

TEST_CASE("a step that is bad by flags which one rank has is skipped by all, once") {
  const auto outcomes = play({.dead = {1}, .flags_arrive = {0}, .bad_loss = 1});
  for (const std::size_t r : {0, 2}) {
    const Outcome& rank = outcomes[r];
    CHECK(rank.agreed == 2);
    CHECK(rank.skipped == std::vector<bool>{false, true, false});
    REQUIRE(rank.weights.size() == 3);
    CHECK(rank.weights[1] == rank.weights[0]);
    CHECK(near(rank.weights[2], {16, 30, 16, 27}));
  }
}

TEST_CASE("records are kept up to the step that is reported again, and to the last whole line") {
  const TempFolder temp;
  const std::string one = "{\"event\":\"step\",\"step\":1}\n{\"event\":\"eval\",\"step\":1}\n";
  const std::string two = "{\"event\":\"step\",\"step\":2}\n{\"event\":\"epoch\",\"step\":2}\n";
  std::ofstream(temp.at("metrics.jsonl")) << one + two + "{\"event\":\"st";
  CHECK(metrics_bytes_before(temp.at("metrics.jsonl"), 2) == one.size());
  CHECK(metrics_bytes_before(temp.at("metrics.jsonl"), 3) == (one + two).size());
  CHECK(metrics_bytes_before(temp.at("none"), 3) == 0);
}

TEST_CASE("of an epoch that other ranks have begun as many steps may be left as a whole one has") {
  const Keys keys{"train.max_steps=0", "train.epochs=3", "compress.name=topk", "resume.residuals=sum"};
  const StoppedRun temp(with(ranks_of(1), keys), 65);
  start(temp, with(ranks_of(3), keys), true);
  const Metrics metrics = metrics_of(temp);
  // One rank has made 1 of 64 steps of the second epoch; 252 samples are left for 3: 21 steps of 12.
  REQUIRE(metrics.epochs.size() == 3);
  REQUIRE(metrics.evals.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(metrics.epochs[i].step == std::array<std::int64_t, 3>{64, 86, 107}[i]);
    CHECK(metrics.evals[i].step == metrics.epochs[i].step);
  }
}

TEST_CASE("ranks that made no step of an epoch leave what others took of it as it was") {
  const Keys keys{"train.max_steps=0", "train.epochs=2", "compress.name=topk", "resume.residuals=sum"};
  const StoppedRun temp(with(ranks_of(1), keys), 65);
  CheckpointStore store(temp.at("run/checkpoints"));
  const auto resumed = [&](const Manifest& manifest, int ranks) {
    const LoadedConfig loaded = small_run(temp, with(ranks_of(ranks), keys));
    const RunData data = load_data(loaded.config);
    const RunInputs inputs{loaded.config, data, {temp.at("run")}, true, {}};
    TrainingPosition position;
    run_thread_ranks(ranks, 60, [&](Communicator& communicator) {
      Step step(inputs, communicator);
      TrainingPosition mine;
      resume_plan(manifest, loaded.config, *data.train, ranks, step, mine);
      if (communicator.rank() == 0) position = mine;
    });
    return position;
  };
  Manifest manifest = store.manifest(65);
  manifest.position = resumed(manifest, 3), manifest.ranks = 3;
  REQUIRE(manifest.position.dealt.size() == 1);
  const TrainingPosition last = resumed(manifest, 2);
  REQUIRE(last.dealt.size() == 1);
  CHECK(last.dealt[0].ranks == 1);
  CHECK(last.dealt[0].batches == 1);
}

}  // namespace topknot
