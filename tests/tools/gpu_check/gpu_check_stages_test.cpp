// The stages' judgement, over programs that behave as the real ones do, or not.
#include <algorithm>
#include <map>

#include "tests/support/catch.h"
#include "tests/tools/gpu_check/gpu_check_fakes.h"

using namespace topknot;
using namespace topknot::gpu_check;
using testing::Fakes;
using testing::gone;

namespace {

using Stage = void (*)(const Options&, Report&);

struct Findings {
  std::vector<Result> results;
  double seconds = 0;
  const Result& of(const std::string& part) const {
    for (const Result& result : results)
      if (result.name.find(part) != std::string::npos) return result;
    FAIL("no result named " << part);
    throw 0;
  }
  int count(Status status) const {
    return static_cast<int>(
        std::count_if(results.begin(), results.end(), [=](const Result& r) { return r.status == status; }));
  }
};

Findings findings_of(Stage stage, const Fakes& fakes, double seconds = 60) {
  Report report(fakes.path("out"));
  const StageClock clock(seconds);
  stage(fakes.options(seconds), report);
  return {report.results(), clock.spent()};
}

// A `train` that ends as the real one does: with metrics. `checksum` may use $backend and $method.
std::string training_script(const std::string& checksum, const std::string& before = "") {
  return R"(for a in "$@"; do case "$a" in
output.dir=*) dir=${a#output.dir=};; dist.backend=*) backend=${a#dist.backend=};;
compress.name=*) method=${a#compress.name=};; train.precision=*) precision=${a#train.precision=};;
--check-network) check=yes;; esac; done
)" + before +
         R"(
[ -n "$check" ] && { echo "every value arrived as it should"; exit 0; }
[ "${RANK:-0}" = 0 ] || exit 0
mkdir -p "$dir"
echo '{"event":"step","step":0}' >"$dir/metrics.jsonl"
echo '{"event":"end","parameter_checksum":")" +
         checksum + R"(","step_p50_s":0.001}' >>"$dir/metrics.jsonl"
)";
}

// As compute-sanitizer where nothing is wrong: runs the program behind its options.
std::string sanitizer(const std::string& help, const std::string& log) {
  return "[ $1 = --help ] && { echo '" + help + "'; exit; }\necho $* >>" + log +
         R"(
while [ "${1#--}" != "$1" ]; do shift 2; done
"$@" || exit 9
echo "========= ERROR SUMMARY: 0 errors")";
}
const char* const kTestsPass = "echo 'All tests passed (42 assertions in 3 test cases)'";

}  // namespace

TEST_CASE("gpu_tests that all pass, also under the sanitizer, are passed") {
  const Fakes fakes;
  fakes.program("gpu_tests", kTestsPass);
  for (const auto& [help, option] :
       std::map<std::string, std::string>{{"--kernel-name arg", "--kernel-name kernel_substring=topknot "},
                                          {"--kernel-regex arg", "--kernel-regex kns=topknot "},
                                          {"--tool arg", ""}}) {
    const std::string log = fakes.path("log");
    fakes.program("compute-sanitizer", sanitizer(help, log));
    const Findings found = findings_of(run_tests, fakes);
    CHECK(found.count(Status::passed) == 4);
    CHECK(found.results.size() == 4);
    // Libraries' kernels are left out where only ours can tell something.
    std::string expected, rest = "--error-exitcode 9 ", tests = fakes.path("gpu_tests") + " ~[slow]\n";
    for (const std::string tool : {"memcheck", "racecheck", "synccheck"})
      expected += "--tool " + tool + " " + rest + (tool == "memcheck" ? "" : option) + tests;
    CHECK(text_of(log) == expected);
    std::filesystem::remove(log);
  }
}

TEST_CASE("gpu_tests that fail are named, and so are those that run nothing, crash or hang") {
  const Fakes fakes;
  fakes.program("gpu_tests",
                "echo 'tests/cuda/relu_test.cpp:17: FAILED:'; echo 'test cases: 2 | 1 failed'; exit 1");
  Findings found = findings_of(run_tests, fakes);
  CHECK(found.of("against the CPU").status == Status::failed);
  CHECK(found.of("against the CPU").output.find("relu_test") != std::string::npos);
  CHECK(found.of("tests/cuda/relu_test.cpp:17").status == Status::failed);
  CHECK(found.of("memcheck").status == Status::skipped);  // no sanitizer here
  CHECK(found.count(Status::passed) == 0);

  fakes.program("gpu_tests", "echo 'No tests ran'");
  CHECK(findings_of(run_tests, fakes).of("against the CPU").status == Status::failed);
  fakes.program("gpu_tests", "kill -SEGV $$");
  CHECK(findings_of(run_tests, fakes).of("against the CPU").note == "ended by signal 11");

  fakes.program("gpu_tests", "echo $$ >" + fakes.path("pid") + "; sleep 60");
  found = findings_of(run_tests, fakes, 1);
  CHECK(found.of("against the CPU").status == Status::failed);
  CHECK(found.of("against the CPU").note.find("not done in its time") == 0);
  CHECK(found.seconds < 8);
  CHECK(gone(fakes.number_in("pid")));
}

TEST_CASE("a sanitizer that finds something is a failure; one that does not work here is a skip") {
  const Fakes fakes;
  fakes.program("gpu_tests", kTestsPass);
  const std::map<std::string, Status> sanitizers{
      {"echo '========= Invalid __global__ read of size 4'; echo '========= ERROR SUMMARY: 1 error'; exit 9",
       Status::failed},
      {"echo '========= Invalid __global__ read of size 4'; sleep 60", Status::failed},
      {"echo 'All tests passed'; echo '========= ERROR SUMMARY: 2 errors'; exit 9", Status::failed},
      {"echo '========= Error: no'; exit 0", Status::failed},
      {"echo 'Device not supported'; exit 1", Status::skipped},
      {"exit 0", Status::skipped},
      {"echo '========= ERROR SUMMARY: 0 errors'", Status::failed},  // without having run the tests
      {"sleep 60", Status::skipped}};
  for (const auto& [script, status] : sanitizers) {
    INFO(script);
    fakes.program("compute-sanitizer", script);
    const Findings found = findings_of(run_tests, fakes, script.find("sleep") == std::string::npos ? 20 : 1);
    CHECK(found.of("against the CPU").status == Status::passed);
    CHECK(found.of("memcheck").status == status);
    CHECK_FALSE(found.of("memcheck").note.empty());
  }
}

TEST_CASE("without its program each stage skips its checks by name") {
  const Fakes fakes;
  const std::map<Stage, std::string> programs{
      {run_tests, "gpu_tests"}, {run_nccl, "train"}, {run_kernels, "gpu-check"}, {run_train, "train"}};
  for (const auto& [stage, program] : programs) {
    const Findings found = findings_of(stage, fakes);
    CHECK(found.results.size() >= 2);
    CHECK(found.count(Status::skipped) == static_cast<int>(found.results.size()));
    for (const Result& result : found.results) CHECK(result.note == fakes.path(program) + " is not there");
  }
}

TEST_CASE("processes and threads that end with the same weights pass; others are told apart") {
  const Fakes fakes;
  fakes.program("train", training_script("$method"));
  Findings found = findings_of(run_nccl, fakes);
  CHECK(found.count(Status::passed) == 7);
  CHECK(found.results.size() == 7);

  fakes.program("train", training_script("'$([ $method = dgc ] && echo $backend || echo same)'"));
  found = findings_of(run_nccl, fakes);
  CHECK(found.of("dgc").status == Status::failed);
  CHECK(found.of("dgc").note == "weights nccl with processes, threads with threads");
  CHECK(found.of("regtopk").status == Status::passed);
  CHECK(found.count(Status::failed) == 1);
}

TEST_CASE("a run that wrote no end is not the equal of another, nor is one of an earlier check") {
  const Fakes fakes;
  fakes.program("train", training_script("$method"));
  CHECK(findings_of(run_nccl, fakes).count(Status::passed) == 7);
  fakes.program("train", "exit 0");
  const Findings found = findings_of(run_nccl, fakes);
  for (const char* method : {"topk", "gaussiank", "dgc", "regtopk"})
    CHECK(found.of(method).status == Status::failed);
}

TEST_CASE("after ranks that fail or hang nothing of the stage is called passed, and it ends in its time") {
  const Fakes fakes;
  fakes.program("train",
                training_script("$method", "[ \"$WORLD_SIZE\" = 2 ] && { echo NCCL: unhandled; exit 1; }"));
  Findings found = findings_of(run_nccl, fakes);
  CHECK(found.of("1 rank").status == Status::passed);
  CHECK(found.of("2 ranks").status == Status::failed);
  CHECK(found.of("2 ranks").note == "rank 0: NCCL: unhandled");
  CHECK(found.of("4 ranks").status == Status::skipped);
  CHECK(found.count(Status::skipped) == 5);

  // A rank that says why it ended says more than one that had to be killed.
  fakes.program("train", training_script("$method",
                                         "[ \"$RANK\" = 1 ] && { echo lost; exit 1; }; "
                                         "[ -n \"$RANK\" ] && [ $WORLD_SIZE != 1 ] && sleep 60"));
  found = findings_of(run_nccl, fakes, 3);
  CHECK(found.of("2 ranks").note == "rank 1: lost");
  CHECK(found.seconds < 8);
}

TEST_CASE("the kernels' figures come from the process that measures, and stand beside PyTorch's") {
  const Fakes fakes;
  const std::string results =
      json_line({"kernels", "device copy, 2^16", Status::passed, 0, {{"GB/s", 4000}}}) + "\n" +
      json_line({"kernels", "topk, 2^16", Status::passed, 0, {{"ms", 0.5}, {"GB/s", 100}}}) + "\n" +
      json_line({"kernels", "dgc, 2^18", Status::skipped, 0, {}, "too little memory"});
  fakes.program("gpu-check", "[ $1 = --measure-kernels ] || exit 1\necho a line for people\ncat <<'end'\n" +
                                 results + "\nend");
  fakes.program("python", "echo Warning; echo '{\"elements\": 65536, \"topk_ms\": 2.0, \"step_ms\": 4.0}'");
  Findings found = findings_of(run_kernels, fakes);
  CHECK(found.results.size() == 4);
  CHECK(found.of("torch.topk").status == Status::passed);
  CHECK(found.of("topk, 2^16").figures ==
        std::vector<std::pair<std::string, double>>{
            {"ms", 0.5}, {"GB/s", 100}, {"times torch.topk", 4}, {"times PyTorch's step", 8}});
  CHECK(found.of("dgc, 2^18").status == Status::skipped);

  // A GPU that is lost on the way takes the rest with it, not what came before.
  fakes.program("gpu-check", "cat <<'end'\n" + results + "\nend\necho an illegal memory access; exit 1");
  fakes.program("python", "echo PyTorch finds no GPU; exit 3");
  found = findings_of(run_kernels, fakes);
  CHECK(found.of("topk, 2^16").status == Status::passed);
  CHECK(found.of("topk, 2^16").figures.size() == 2);
  CHECK(found.of("torch.topk").status == Status::skipped);
  CHECK(found.of("torch.topk").note == "no PyTorch figure: PyTorch finds no GPU");
  CHECK(found.of("all sizes").status == Status::failed);
  CHECK(found.of("all sizes").note == "an illegal memory access");

  fakes.program("gpu-check", "exit 0");
  CHECK(findings_of(run_kernels, fakes).of("all sizes").status == Status::failed);
  fakes.program("gpu-check", "sleep 60");
  found = findings_of(run_kernels, fakes, 1);
  CHECK(found.count(Status::failed) == 1);
  CHECK(found.seconds < 8);
}

TEST_CASE(
    "images per second are the batch over the median step, beside PyTorch's best of the same precision") {
  const Fakes fakes;
  fakes.program("train", training_script("x"));
  fakes.program(
      "python",
      "echo '{\"setting\":\"a\",\"precision\":\"bf16\",\"images_per_second\":32000,\"torch\":\"2.9\"}'\n"
      "echo '{\"setting\":\"b\",\"precision\":\"bf16\",\"images_per_second\":64000,\"torch\":\"2.9\"}'\n"
      "echo '{\"setting\":\"c\",\"precision\":\"tf32\",\"images_per_second\":16000,\"torch\":\"2.9\"}'\n"
      "echo compile: left out");
  Findings found = findings_of(run_train, fakes);
  CHECK(found.results.size() == 12);
  CHECK(found.count(Status::passed) == 12);
  const auto expected = [](double peer) {
    return std::vector<std::pair<std::string, double>>{
        {"images/s", 128000}, {"images/s of PyTorch", peer}, {"times", 128000 / peer}};
  };
  CHECK(found.of("resnet50 bf16").figures == expected(64000));
  CHECK(found.of("resnet50 bf16").note == "PyTorch's best: b");
  CHECK(found.of("vgg16 tf32").figures == expected(16000));
  CHECK(found.of("resnet20 fp32").figures == expected(16000));
  CHECK(found.of("PyTorch, resnet20").figures.size() == 3);
  CHECK(found.of("PyTorch, resnet20").note == "PyTorch 2.9");
}

TEST_CASE("without PyTorch our figures stand alone, and a run that fails or ends too late has none") {
  const Fakes fakes;
  fakes.program("train", training_script("x", "[ $precision = bf16 ] && { echo out of memory; exit 1; }"));
  Findings found = findings_of(run_train, fakes);
  CHECK(found.of("PyTorch, vgg16").status == Status::skipped);
  CHECK(found.of("PyTorch, vgg16").note == "no PyTorch figure: " + fakes.path("python") + " is not there");
  CHECK(found.of("vgg16 tf32").figures.size() == 1);
  CHECK(found.of("vgg16 bf16").status == Status::failed);
  CHECK(found.of("vgg16 bf16").note == "out of memory");
  CHECK(found.of("vgg16 bf16").figures.empty());

  fakes.program("train", "sleep 60");
  fakes.program("python", "sleep 60");
  found = findings_of(run_train, fakes, 2);
  CHECK(found.count(Status::passed) == 0);
  CHECK(found.seconds < 10);
}
