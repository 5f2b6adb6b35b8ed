// Which candidate a trial takes by the clock of events, what it keeps, and what it does where one fails.
#include "nn/core/cuda/trial.h"

#include "nn/base/log.h"
#include "tests/cuda/fixture.h"
#include "tests/emulator/cudnn_convolution.h"
#include "tests/emulator/tests/machine_settings.h"
#include "tests/support/standard_error.h"

namespace topknot {
namespace {

using namespace testing;
using cuda::CudaError;
using cuda::Trial;

const cuda::TrialSubject kWork("work"), kOther("other work");

// Candidates a, b, c ... that take so many milliseconds, beside which the host's own are few; a negative
// number is a candidate that does not do it.
struct Candidates {
  explicit Candidates(const std::vector<float>& ms) : runs(ms.size()) {
    for (std::size_t i = 0; i < ms.size(); ++i)
      all.push_back({std::string(1, char('a' + i)), [this, i, time = ms[i]] {
                       const int run = ++runs[i];
                       if (i == throws) throw CudaError("no luck");
                       if (i == lacks_memory) throw cuda::OutOfMemory("no room");
                       emulator::enqueue(cuda::Context::current().stream(),
                                         [=] { emulator::pass(run == 1 ? 9e6f : time); });
                       return time >= 0;
                     }});
  }
  std::size_t pick(OnGpu& gpu, const std::string& key = "work of [2, 3]") {
    const cuda::Context::Use use(gpu.context());
    return Trial::pick(key, all);
  }
  std::vector<cuda::TrialCandidate> all;
  std::vector<int> runs;
  std::size_t throws = 99, lacks_memory = 99;
};

struct Timing : OnGpu {
  explicit Timing(const std::string& cache = "") : OnGpu(cuda::Precision::fp32, false, false, cache) {}
};

constexpr float kLong = 1e6f;  // milliseconds

}  // namespace

TEST_CASE("a trial picks the shortest of four times, and candidate 0 where the gain is below 2 percent") {
  Timing gpu;
  const auto picked = [&](const std::vector<float>& ms) {
    Candidates candidates(ms);
    const std::size_t best = candidates.pick(gpu);
    for (std::size_t i = 0; i < ms.size(); ++i) CHECK(candidates.runs[i] == (ms[i] < 0 ? 1 : 4));
    return best;
  };
  CHECK(picked({3 * kLong, 2 * kLong, 1 * kLong}) == 2);
  CHECK(picked({kLong, 0.99f * kLong}) == 0);
  CHECK(picked({kLong, 0.97f * kLong}) == 1);
  CHECK(picked({kLong, 0.97f * kLong, 0.96f * kLong}) == 2);
  CHECK(picked({-1, kLong, -1}) == 1);
  CHECK(picked({-1, -1}) == 0);
}

TEST_CASE("a trial's choice is kept by name for later processes, as long as the candidate runs") {
  const TempFolder folder;
  const auto pick = [&](Candidates& candidates) {
    Timing gpu(folder.str());
    return candidates.pick(gpu);
  };
  Candidates first({2 * kLong, kLong});
  CHECK(pick(first) == 1);
  const std::string file = std::filesystem::directory_iterator(folder.str())->path();
  CHECK(text_of(file) == "trial of work of [2, 3] = b;\n");
  Candidates later({kLong, 2 * kLong});
  CHECK(pick(later) == 1);
  CHECK(later.runs == std::vector{0, 1});
  {
    Timing one(folder.str()), two(folder.str());  // ranks of one process
    one.context().algorithm_cache(), two.context().algorithm_cache();
    Candidates of_one({2 * kLong, kLong}), of_two({kLong, 2 * kLong});
    CHECK(of_one.pick(one, "other work") == 1);
    CHECK(of_two.pick(two, "other work") == 1);
    CHECK(of_two.runs == std::vector{0, 1});
  }
  std::swap(later.all[0], later.all[1]);  // the name counts
  CHECK(pick(later) == 0);
  Candidates cannot({kLong, -1});
  CHECK(pick(cannot) == 0);
  for (const char* other : {"1", "", "bb"}) {
    std::ofstream(file) << "trial of work of [2, 3] = " << other << ";\n";
    Candidates anew({kLong, 2 * kLong});
    CHECK(pick(anew) == 0);
    CHECK(anew.runs == std::vector{4, 4});
  }
}

TEST_CASE("a candidate that throws or lacks memory is left out, and nothing is kept then") {
  const TempFolder folder;
  for (const std::size_t bad : {0u, 1u, 2u})
    for (const bool memory : {false, true}) {
      const StandardError errors;
      Candidates candidates({3 * kLong, kLong, 2 * kLong});
      (memory ? candidates.lacks_memory : candidates.throws) = bad;
      Timing gpu(folder.str());
      CHECK(candidates.pick(gpu) == (bad == 1 ? 2 : 1));
      CHECK(std::filesystem::is_empty(folder.str()));
      CHECK(contains(errors.text(), "is left out: no luck") == !memory);
    }
}

TEST_CASE("a trial times nothing in deterministic runs, in a capture and where it is forced") {
  const TempFolder folder;
  Candidates candidates({3 * kLong, 2 * kLong, kLong});
  {
    OnGpu gpu(cuda::Precision::fp32, true);
    CHECK(candidates.pick(gpu) == 0);
    candidates.all[0].repeats = false;
    CHECK(candidates.pick(gpu) == 1);
    Trial::force("work=a");
    CHECK(says(error_text([&] { candidates.pick(gpu); }), {"'a'", "train.deterministic", "work of [2, 3]"}));
    Trial::force("work=c");
    CHECK(candidates.pick(gpu) == 2);
  }
  Timing gpu(folder.str());
  const auto captured = [&] {
    std::size_t picked = 99;
    CHECK(emulator::error_in_capture(gpu.stream(), [&] { picked = candidates.pick(gpu); }).empty());
    return picked;
  };
  CHECK(captured() == 0);
  CHECK(candidates.runs == std::vector{0, 0, 0});
  CHECK(candidates.pick(gpu) == 2);
  CHECK(captured() == 2);
  CHECK(candidates.runs == std::vector{4, 4, 4});
  Trial::force("other work=a;work of [2=b");
  CHECK(candidates.pick(gpu) == 1);
  CHECK(candidates.pick(gpu, "work of [3]") == 2);
  Trial::force("work=bb");
  CHECK(says(error_text([&] { candidates.pick(gpu); }), {"'bb'", "did you mean 'b'", "work of [2, 3]"}));
  CHECK(says(error_text([&] { Trial::force("work"); }), {"train.trial", "KEY=NAME", "'work'"}));
  CHECK(says(error_text([&] { Trial::force("werk=a"); }), {"train.trial", "'werk'", "did you mean 'work'"}));
}

TEST_CASE("one debug line of a trial has every time") {
  const StandardError errors;
  Timing gpu;
  set_log_level(LogLevel::debug);
  Candidates({2 * kLong, kLong, -1}).pick(gpu);
  set_log_level(LogLevel::warning);
  CHECK(says(errors.text(), {"trial of work of [2, 3]: b of a 2", "b 1", "c inf ms"}));
}

}  // namespace topknot
