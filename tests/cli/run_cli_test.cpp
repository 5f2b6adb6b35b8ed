// The programs as a user runs them.
#include <unistd.h>

#include "tests/cli/command.h"
#include "tests/support/free_port.h"

using namespace topknot;

namespace {

const std::string kEndless = "train.max_steps=1000000 train.epochs=1000000 optimizer.lr=1e-5 ";

}  // namespace

TEST_CASE("train without arguments, --help and --list print what there is") {
  check_outcome(train(""), 0, {"train configs/"});
  CHECK(train("--help").has("compress.density"));
  CHECK(train("--help lr").has("optimizer.lr=0.1"));  // of any section
  for (const auto& [list, name] :
       {std::pair("models", "resnet110"), std::pair("compressors", "gaussiank"),
        std::pair("datasets", "synthetic_images"), std::pair("optimizers", "sgd"),
        std::pair("schedules", "cosine"), std::pair("collectives", "all_gather "),
        std::pair("merges", "buckets "), std::pair("backends", "one GPU per rank")})
    CHECK(train(std::string("--list ") + list).has(name));
}

TEST_CASE("a verbose run says how threads wait, which the environment decides if it says something") {
  const TempFolder temp;
  for (const auto& [variable, said] : std::map<std::string, std::string>{
           {"", "waiting threads spin unless others want the cores\n"},
           {"OMP_WAIT_POLICY=passive", "waiting threads by OMP_WAIT_POLICY=passive\n"},
           {"GOMP_SPINCOUNT=7", "waiting threads by GOMP_SPINCOUNT=7\n"}}) {
    INFO(said);
    CHECK(train_in(temp.at("run"), "train.device=cpu output.overwrite=true --verbose",
                   "env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT " + variable)
              .has(said));
  }
}

TEST_CASE("Deep Gradient Compression's configurations send as little as table 3 of its paper has, or less") {
  const TempFolder words;  // as many as the Penn Treebank's vocabulary has
  std::string text;
  for (int i = 0; i < 10000; ++i) text += "word" + std::to_string(i) + (i % 20 == 19 ? "\n" : " ");
  for (const char* name : {"train.txt", "valid.txt", "test.txt"})
    words.write(name, {text.begin(), text.end()});
  const std::string images =
      "data.name=synthetic_images data.classes=1000 data.image_size=224 data.train_size=64 data.test_size=16 "
      "data.batch_size=1 dist.ranks=2 ";
  const std::string corpus = "data.root=" + words.str() + " data.batch_size=1 dist.ranks=2 ";
  const std::string small =
      "compress.codec=rice compress.values=fp16 compress.scope=model exchange.merge=all ";
  struct Case {
    std::string config, keys, ratio;
  };
  for (const Case& c :
       {Case{"dg_alexnet_imagenet", images, "597.6 times"},
        {"dg_resnet50_imagenet", images, "276.5 times"},
        {"dg_lstm_ptb", corpus, "461.8 times"},
        {"dg_resnet50_imagenet", images + small + "compress.dense_values=fp16", "521.5 times"},
        {"dg_resnet50_imagenet", images + small + "compress.dense_1d=false", "1162.1 times"}}) {
    const CommandOutcome dry =
        train("--dry-run " TOPKNOT_SOURCE_DIR "/lab/configs/papers/" + c.config + ".yaml " + c.keys);
    CHECK(says(dry.output, {" on at 0.001 ", c.ratio}));
  }
}

TEST_CASE("the start of a run names the density and its phases, and each change is logged") {
  const TempFolder temp;
  const auto run = [&](const std::string& keys) {
    return train_in(temp.at("run"), "train.epochs=3 train.max_steps=0 output.overwrite=true " + keys);
  };
  const CommandOutcome topk = run("compress.name=topk compress.warmup=0.5,0.25");
  CHECK(says(topk.output, {"topk at density 0.5, 0.25 from epoch 1, 0.05 from epoch 2; "}));
  CHECK(topk.count("from here on") == 2);
  CHECK(says(topk.output, {"epoch 1: density 0.25 from here on\n", "epoch 2: density 0.05 from here on\n"}));
  const CommandOutcome whole = run("compress.name=randk");
  CHECK(whole.has("randk at density 0.05; "));
  CHECK_FALSE(whole.has("from here on"));
  CHECK(run("").has("\ndense; "));
  const std::string many =
      "train.epochs=30 compress.name=dgc "
      "compress.warmup=[0.9,0.85,0.8,0.75,0.7,0.65,0.6,0.55,0.5,0.45,0.4,0.35,0.3,0.25,0.2]";
  CHECK(run(many + " train.max_steps=3").has("dgc at density 0.9; "));  // the others are not reached
  CHECK(run(many).has(", ..., 0.05 from epoch 15; "));
}

TEST_CASE("sending more than dense is never shown as a gain; the run warns at its start and each density") {
  const TempFolder temp;
  const std::string keys =
      "compress.name=topk dist.ranks=2 compress.density=0.6 compress.warmup=[0.9] train.max_steps=20 ";
  const CommandOutcome dry = train("--dry-run " + kSmallRun + keys);
  CHECK(says(dry.output,
             {"1.8 times more than the 197 kB of dense", "1.2 times more than the 197 kB of dense"}));
  const std::string start = "warning: compress.density (0.9, 0.6 from epoch 1): a rank sends 355 kB";
  CHECK(dry.count(start) == 1);
  CHECK(dry.has("compress.codec=ans would send 181 kB"));
  CHECK(train("--dry-run " + kSmallRun + keys + "train.max_steps=3")
            .has("warning: compress.density (0.9): a rank"));
  const CommandOutcome run = train_in(temp.at("run"), keys + "-q");
  CHECK(run.ended(0));
  CHECK(run.count(start) == 1);
  CHECK(run.count("step 1: at density 0.9 a rank sends 355 kB, 1.8 times more than the 197 kB") == 1);
  CHECK(run.count("step 17: at density 0.6 a rank sends 237 kB, 1.2 times more than the 197 kB") == 1);
  CHECK_FALSE(train_in(temp.at("less"), "compress.name=topk compress.density=0.4 -q").has("warning"));
  CHECK(train("--dry-run compress.name=topk compress.density=1 compress.codec=auto")
            .has("as much as the 1.08 MB"));
}

TEST_CASE("clipping that cuts nearly every gradient is warned of, once") {
  const TempFolder temp;
  const auto warnings = [&](const std::string& clip, const std::string& steps) {
    return train_in(temp.at("run"),
                    "compress.name=dgc dist.ranks=2 train.epochs=0 -q output.overwrite=true compress.clip=" +
                        clip + " train.max_steps=" + steps)
        .count("gradients were longer and were cut");
  };
  CHECK(warnings("1e-4", "120") == 1);
  CHECK(warnings("1e-4", "99") == 0);
  CHECK(warnings("1e4", "120") == 0);
}

TEST_CASE("a batch larger than a rank's shard is warned of, once") {
  const TempFolder temp;
  const std::string warning =
      "warning: data.batch_size: 8 is more than the 5 samples of a rank's shard (16 samples over 3 ranks): "
      "samples repeat within a batch";
  const std::string keys = "data.train_size=16 dist.ranks=3 ";
  const CommandOutcome validated = train(kSmallRun + keys + "--validate");
  CHECK(validated.ended(0));
  CHECK(validated.count(warning) == 1);
  CHECK(train(kSmallRun + keys + "--dry-run").count(warning) == 1);
  for (const std::string backend : {"threads", "gloo"})
    CHECK(train_in(temp.at(backend), keys + "-q dist.backend=" + backend).count(warning) == 1);
  CHECK(train(kSmallRun + "--validate data.train_size=16 dist.ranks=2").count("shard") == 0);
  CHECK(train(kSmallRun + "--validate data.train_size=32 dist.ranks=2 data.shard=uneven:4")
            .count("more than the 6 samples") == 1);
}

TEST_CASE("bf16 is refused on a CPU without its products, auto's too; tf32 runs in fp32 and says so") {
  const TempFolder temp;
  for (const std::string how :
       {"train.device=cpu", "train.device=cpu --validate", "train.device=cpu --dry-run", "train.device=auto"})
    check_refused(train_in(temp.at("bf16"), how + " train.precision=bf16",
                           "CUDA_VISIBLE_DEVICES= ONEDNN_MAX_CPU_ISA=AVX512_CORE"),
                  {"train.precision: bf16", "AVX-512 BF16"});
  CHECK_FALSE(fs::exists(temp.at("bf16")));
  const CommandOutcome tf32 = train_in(temp.at("tf32"), "train.device=cpu train.precision=tf32 -q");
  CHECK(tf32.count("warning: train.precision tf32 is for GPUs; fp32 is used here") == 1);
  CHECK(contains(text_of(temp.at("tf32/config.yaml")), "precision: fp32"));
}

TEST_CASE("a run with keys that it does not use repeats and resumes without a warning") {
  const TempFolder temp;
  CHECK(train_in(temp.at("run"),
                 "compress.mu=3 schedule.gamma=0.5 train.device=cpu train.graphs=false "
                 "train.precision=tf32 train.stop_after=4")
            .count("warning: ") == 5);
  const CommandOutcome again =
      train(temp.at("run/config.yaml") + " train.stop_after=0 output.dir=" + temp.at("again"));
  const CommandOutcome resumed = train("--resume " + temp.at("run") + " train.stop_after=0");
  for (const CommandOutcome& later : {again, resumed}) {
    CHECK(later.ended(0));
    CHECK(later.count("warning") == 0);
  }
  CHECK(resumed.has("resumed after step 4 of "));
  CHECK(train("--resume " + temp.at("run")).has("steps have been made; a longer train.epochs"));
  CHECK(checksum_of(temp.at("run")) == checksum_of(temp.at("again")));
}

TEST_CASE("a key without effect is reported once, and that a run ends before its gradients are recorded") {
  const TempFolder temp;
  for (const std::string backend : {"threads", "gloo"}) {
    const CommandOutcome run =
        train_in(temp.at(backend), "compress.name=topk compress.mu=2 dist.ranks=2 dist.backend=" + backend);
    INFO(backend);
    CHECK(run.ended(0));
    CHECK(run.count("compress.mu is for regtopk") == 1);
  }
  check_outcome(train_in(temp.at("run"), "train.max_steps=2 train.record_gradients=[3,1]"), 0,
                {"recorded 1 of the 3 steps of train.record_gradients"});
}

TEST_CASE("a run directory has its metrics, and in config.yaml what auto has chosen") {
  const TempFolder temp;
  REQUIRE(train_in(temp.at("a"), "compress.name=topk dist.ranks=2").ended(0));
  CHECK(fs::exists(temp.at("a/metrics.csv")));
  const Metrics metrics = read_metrics(temp.at("a/metrics.jsonl"));
  REQUIRE(metrics.steps.size() == 12);
  CHECK(metrics.evals.size() >= 1);
  const EndRecord& end = metrics.end.value();
  CHECK(end.bytes_sent < end.bytes_dense);
  double sent = 0;
  for (const StepRecord& step : metrics.steps) sent += step.bytes_sent;
  CHECK(end.bytes_sent == Approx(sent));
  CHECK(contains(text_of(temp.at("a/config.yaml")), "merge: buckets  # auto"));
}

TEST_CASE("with local steps a step's and a sync's time are their own, and medians are of rounds") {
  const TempFolder temp;
  // A message over the link takes 40 ms; the steps take less.
  CHECK(train_in(temp.at("a"),
                 "train.max_steps=20 exchange.every=4 train.check_every=20 dist.ranks=2 "
                 "dist.link.rate=1gbit dist.link.latency=40ms")
            .ended(0));
  const Metrics metrics = read_metrics(temp.at("a/metrics.jsonl"));
  REQUIRE(metrics.steps.size() == 20);
  double before = 0;
  for (const StepRecord& step : metrics.steps) {
    INFO("step " << step.step);
    CHECK(step.time_s > before);
    if (step.step % 4 == 0) CHECK(step.time_s - before > 0.06);  // two messages; a report is one
    CHECK((step.exposed_s > 0.03) == (step.step % 4 == 0));
    before = step.time_s;
  }
  REQUIRE(metrics.end);
  CHECK(metrics.end->step_p50_s > 0.01);
  CHECK(metrics.end->communicate_p50_s > 0.01);
}

TEST_CASE("a run that gets fewer threads than it asks for warns once and ends as one that asks for these") {
  const TempFolder temp;
  const auto run = [&](const std::string& variables, const std::string& threads) {
    return train_in(temp.at(threads), "data.batch_size=64 train.device=cpu train.threads=" + threads,
                    "env " + variables);
  };
  REQUIRE(run("", "1").code == 0);
  for (const auto& [limit, threads] :
       std::map<std::string, std::string>{{"OMP_THREAD_LIMIT=1", "2"}, {"OMP_MAX_ACTIVE_LEVELS=0", "3"}}) {
    INFO(limit);
    const CommandOutcome limited = run(limit, threads);
    CHECK(limited.ended(0));
    CHECK(limited.count("warning: train.threads: 1 compute thread of " + threads + " on rank 0 (" + limit) ==
          1);
    CHECK(checksum_of(temp.at(threads)) == checksum_of(temp.at("1")));
  }
  const CommandOutcome dynamic = run("OMP_DYNAMIC=true", "4");
  CHECK(dynamic.ended(0));
  CHECK(dynamic.count("train.threads:") == 0);
}

TEST_CASE("a run without output.dir is named by the keys that were given, not by what auto chose") {
  const TempFolder temp;
  REQUIRE(
      run_command("cd " + temp.str() + " && " TOPKNOT_BIN "/train " + kSmallRun + "dist.ranks=2").ended(0));
  for (const auto& run : fs::directory_iterator(temp.at("runs")))
    CHECK_FALSE(contains(run.path().string(), "buckets"));
}

TEST_CASE("dist.backend auto is threads by itself and gloo under a launcher without GPUs, and says so") {
  const TempFolder temp;
  const std::string keys = "compress.name=topk train.device=cpu dist.timeout_s=60 ", rest = kSmallRun + keys;
  const CommandOutcome threads = train_in(temp.at("threads"), keys + "dist.ranks=2");
  REQUIRE(threads.ended(0));
  CHECK(threads.count("dist.backend: auto takes threads") == 1);
  for (const char* flag : {"--validate", ""}) {
    check_refused(train_in(temp.at("alone"), keys + flag + " dist.master=127.0.0.1:29500"),
                  {"ranks that are threads have no master"});
  }
  CHECK_FALSE(fs::exists(temp.at("alone")));
  CHECK(contains(text_of(temp.at("threads/config.yaml")), "backend: threads  # auto"));
  const auto rank = [&](int r) {
    return "RANK=" + std::to_string(r) + " " TOPKNOT_BIN "/train " + rest + "output.dir=" + temp.at("gloo");
  };
  const CommandOutcome gloo =
      run_command("export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(free_port() - 1) +
                  "; " + rank(1) + " & " + rank(0) + " && wait $!");
  REQUIRE(gloo.ended(0));
  CHECK(gloo.count(
            "dist.backend: auto takes gloo: torchrun started 2 processes; rank 0: train.device is cpu") == 1);
  CHECK(contains(text_of(temp.at("gloo/config.yaml")), "backend: gloo  # auto"));
  CHECK(checksum_of(temp.at("threads")) == checksum_of(temp.at("gloo")));
}

TEST_CASE("ranks find each other through the variables of mpirun and srun") {
  const TempFolder temp;
  const std::string rest = kSmallRun + "compress.name=topk dist.backend=gloo dist.timeout_s=60 ";
  REQUIRE(train(rest + "dist.ranks=2 output.dir=" + temp.at("spawn")).ended(0));
  const std::string wanted = checksum_of(temp.at("spawn"));
  // `variables`: those of a launcher, the rank's last.
  const auto check_both = [&](const std::string& variables, const std::string& name,
                              const std::string& keys) {
    const std::string program = " " TOPKNOT_BIN "/train " + rest + keys + " output.dir=" + temp.at(name);
    const CommandOutcome run = run_command(variables + "1" + program + " & " + variables + "0" + program +
                                           "; code=$?; wait $! && exit $code");
    CHECK(run.ended(0));
    CHECK(checksum_of(temp.at(name)) == wanted);
  };
  const std::string mpi = "env OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_RANK=";
  // mpirun and srun name no meeting point: without dist.master the message says what to give.
  check_outcome(run_command(mpi + "0 " TOPKNOT_BIN "/train " + rest + "output.dir=" + temp.at("lost")), 2,
                {"dist.master"});
  check_both(mpi, "mpirun", "dist.master=127.0.0.1:" + std::to_string(free_port()));
  check_both("env SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_PROCID=", "srun",
             "dist.master=127.0.0.1:" + std::to_string(free_port()));
}

TEST_CASE("ranks of a launcher that disagree, or of which one refuses, leave the earlier run as it was") {
  const TempFolder temp;
  const std::string rest = kSmallRun + "dist.backend=gloo dist.timeout_s=60 output.dir=" + temp.at("run");
  REQUIRE(train(rest + " dist.ranks=2").ended(0));
  const std::string before = text_of(temp.at("run/metrics.jsonl")) + text_of(temp.at("run/config.yaml"));
  for (const char* folder : {"0", "1"}) fs::create_directory(temp.at(folder));
  const auto both = [&](const std::string& keys, const std::string& of_one) {
    const auto rank = [&](int r, const std::string& more) {
      return "cd " + temp.at(std::to_string(r)) +
             " && OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=" + std::to_string(r) +
             " " TOPKNOT_BIN "/train " + rest + more;
    };
    const std::string all =
        keys + " output.overwrite=true dist.master=127.0.0.1:" + std::to_string(free_port());
    const CommandOutcome run =
        run_command("(" + rank(1, all + of_one) + ") & " + rank(0, all) + "; code=$?; wait $!; exit $code");
    CHECK(run.code != 0);
    CHECK(text_of(temp.at("run/metrics.jsonl")) + text_of(temp.at("run/config.yaml")) == before);
    return run.output;
  };
  CHECK(says(both("", " seed=7"), {"seed is 1 on rank 0, 7 on rank 1"}));
  REQUIRE(train("export " + temp.at("run") + " --to " + temp.at("0/first.safetensors")).ended(0));
  CHECK(says(both(" model.init_from=first.safetensors", ""), {"first.safetensors", "rank 1"}));
}

// The limit does not bind root, so root's test runs as another user, who has no other processes.
TEST_CASE("a limit of threads and processes ends a run with one message that says what to raise") {
  const TempFolder temp;
  const bool root = geteuid() == 0;
  if (run_command("prlimit --version && setpriv --version").code != 0) {
    WARN("skipped: needs prlimit and setpriv of util-linux");
    return;
  }
  const std::string user = root ? "setpriv --reuid=65321 --clear-groups " : "";
  const std::string folder = temp.at("open");
  REQUIRE(
      run_command("mkdir " + folder + " && chmod 777 " + folder + " && chmod 755 " + temp.str()).ended(0));
  if (run_command(user + "test -x " TOPKNOT_BIN "/train").code != 0) {
    WARN("skipped: another user cannot run " TOPKNOT_BIN "/train");
    return;
  }
  for (const std::string backend : {"threads", "gloo"})
    for (const int limit : {1, 4, 6}) {
      const CommandOutcome outcome =
          run_command(user + "prlimit --nproc=" + std::to_string(limit) + " " TOPKNOT_BIN "/train " +
                      kSmallRun + "dist.ranks=4 dist.timeout_s=60 dist.backend=" + backend +
                      " output.dir=" + folder + "/" + backend + std::to_string(limit));
      INFO(backend << " with " << limit);
      CHECK((outcome.code == 1 || outcome.code == 2));
      CHECK(outcome.has("ulimit -u"));
      CHECK_FALSE(outcome.has("terminate called"));
    }
}

// Trains without end in the background, and runs `then` once five steps are done.
CommandOutcome train_in_background(const std::string& keys, const std::string& folder,
                                   const std::string& then) {
  return run_command(TOPKNOT_BIN "/train " + kSmallRun + kEndless + keys + " dist.timeout_s=20 output.dir=" +
                     folder + " & parent=$!; " + five_steps(folder) + then + "; wait $parent");
}

TEST_CASE("a run directory is its run's alone until the run's processes have ended, however they did") {
  const TempFolder temp;
  for (const std::string backend : {"threads", "gloo"}) {
    const std::string run = temp.at(backend);
    const std::string again = TOPKNOT_BIN "/train " + kSmallRun + "output.overwrite=true output.dir=" + run;
    const CommandOutcome outcome =
        train_in_background("optimizer.lr=1e-6 dist.ranks=2 dist.backend=" + backend, run,
                            again + "; kill -9 $parent; " + again + " && echo replaced");
    INFO(backend);
    CHECK(outcome.count("in use by process ") == 1);
    CHECK(outcome.has("replaced"));
    CHECK(outcome.ended(128 + 9));
  }
}

TEST_CASE("of two runs that start at once in one directory one runs and the other is refused") {
  const TempFolder temp;
  const std::string start = TOPKNOT_BIN "/train " + kSmallRun + "output.dir=";
  for (int i = 0; i < 5; ++i) {
    const std::string run = temp.at(std::to_string(i));
    const CommandOutcome outcome = run_command(start + run + " & first=$!; " + start + run +
                                               "; second=$?; wait $first; echo codes $second $?");
    CHECK((outcome.has("codes 0 2") || outcome.has("codes 2 0")));
    CHECK(read_metrics(run + "/metrics.jsonl").steps.size() == 12);
  }
}

TEST_CASE("a run whose directory or lock is deleted ends soon, with one message, and leaves it to the next") {
  const TempFolder temp;
  for (const std::string backend : {"threads", "gloo"})
    for (const bool lock : {false, true}) {
      const std::string run = temp.at(backend + (lock ? "-lock" : "")),
                        second = TOPKNOT_BIN "/train " + kSmallRun +
                                 "output.overwrite=true output.dir=" + run + " && echo second done";
      const CommandOutcome outcome =
          train_in_background("optimizer.lr=1e-6 dist.ranks=2 dist.backend=" + backend, run,
                              lock ? "rm " + run + "/run.lock; " + second : "rm -r " + run);
      INFO(backend << (lock ? ", lock" : ", directory"));
      CHECK(outcome.code > 0);
      CHECK(outcome.code < 124);
      CHECK((outcome.has("metrics.jsonl: the file is gone") ||
             (lock && outcome.has("run.lock: the file is gone"))));
      if (!lock) continue;
      CHECK(outcome.has("second done"));
      const Metrics metrics = read_metrics(run + "/metrics.jsonl");  // of the second run alone
      CHECK(metrics.steps.size() == 12);
      CHECK_FALSE(metrics.stop);
    }
}

TEST_CASE("where rank 0 hangs, every other rank names it") {
  const TempFolder temp;
  // The first copy is rank 0.
  const std::string script = TOPKNOT_BIN "/train " + kSmallRun + kEndless +
                             "dist.backend=gloo dist.timeout_s=4 dist.ranks=4 output.dir=" + temp.at("run") +
                             " & parent=$!; " + five_steps(temp.at("run")) +
                             "kill -STOP $(ps -o pid= --ppid $parent | sort -n | head -n 1); wait $parent";
  const CommandOutcome outcome = run_command(script);
  CHECK(says(outcome.output,
             {"gave up after dist.timeout_s (4 s): rank 0 did not come", ", step ", "(silent for "}));
  for (const char* other : {"rank 1 did not come", "rank 2 did not come", "rank 3 did not come"})
    CHECK_FALSE(outcome.has(other));
}

TEST_CASE("a stop signal to one rank ends every rank after the same step, with the signal's exit code") {
  for (const std::string signal : {"INT", "USR1"}) {
    const TempFolder temp;
    const std::string rank =
        "env LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(free_port() - 1) +
        " RANK=";
    const std::string program = " " TOPKNOT_BIN "/train " + kSmallRun + kEndless +
                                "dist.backend=gloo dist.timeout_s=60 output.dir=" + temp.at("run") + " & ";
    const CommandOutcome outcome = run_command(rank + "0" + program + "p0=$!; " + rank + "1" + program +
                                               "p1=$!; " + five_steps(temp.at("run")) + "kill -" + signal +
                                               " $p1; wait $p0; echo code $?; wait $p1; echo code $?");
    CHECK(says(outcome.output, {"stopped by SIG" + signal + " after step"}));
    CHECK(outcome.count(signal == "INT" ? "code 130" : "code 138") == 2);
  }
}

TEST_CASE("a dry run shows parameters, groups and bytes, and writes nothing") {
  const TempFolder temp;
  check_outcome(train("--dry-run compress.name=topk dist.ranks=4 output.dir=" + temp.at("run")), 0,
                {"269722", "stage3.block1.1.conv.weight", "bytes that a rank sends"});
  CHECK_FALSE(std::filesystem::exists(temp.at("run")));
}

TEST_CASE("a dry run with auto says what the model would choose over the given links") {
  const std::string small =
      "--dry-run compress.name=auto train.device=cpu model.name=mlp model.hidden=[16] data.train_size=64 "
      "data.test_size=8 dist.ranks=4 ";
  const CommandOutcome one = train(small + "dist.link.rate=10kbit,20gbit@5");
  check_outcome(one, 0, {"auto with 4 ranks, 50us a message", "10kbit: takes topk", "20gbit: takes"});
  CHECK(one.count(": takes ") == 2);
  CHECK(train(small).count(": takes ") == 4);
  CHECK(train(small + "dist.ranks=1").count(": takes ") == 0);
  CHECK(train("--dry-run model.name=mlp compress.name=topk").count(": takes ") == 0);
}

TEST_CASE("a dry run shows how much of the data an epoch uses, and a last step that is shorter") {
  const std::string keys = "--dry-run model.name=mlp dist.ranks=2 data.batch_size=4 data.train_size=509 ";
  CHECK(train(keys + "train.accumulate=50")
            .has("an epoch uses 504 of 509 samples; its last step has 13 of 50 batches"));
  CHECK(train(keys + "train.accumulate=9").has("an epoch uses 504 of 509 samples\n"));
}

TEST_CASE("a dry run shows the density warm-up it will have, and what does not go by density") {
  const CommandOutcome falling =
      train("--dry-run compress.name=topk compress.density=0.001 compress.warmup=[0.1,0.01]");
  CHECK(says(falling.output, {"epoch 0 at 0.1 ", "epoch 1 at 0.01 ", "epoch 2 on at 0.001 "}));
  const CommandOutcome quantised = train("--dry-run compress.name=terngrad compress.density=0.01");
  CHECK_FALSE(quantised.has("epoch 0"));
  CHECK(quantised.has("warning: compress.density is for methods that select entries"));
  CHECK(train("--dry-run compress.name=topk compress.scope=tensor compress.layer_density=auto")
            .has("measured when the run starts"));
}

TEST_CASE("a dry run shows what the method's name has filled in, and what a given key has in place of it") {
  const CommandOutcome dry =
      train("--dry-run model.name=mlp compress.name=sparseloco exchange.every=30 exchange.outer.lr=0.5");
  CHECK(says(dry.output,
             {"compress.name=sparseloco says:\n", "  compress.density         0.015625 (sparseloco)\n",
              "  exchange.outer.name      sgd (sparseloco)\n",
              "  exchange.outer.lr        0.5 (command line; sparseloco has 1)\n"}));
}

TEST_CASE("a dry run shows memory and operations per rank") {
  const CommandOutcome dry =
      train("--dry-run model.name=mlp model.hidden=[24] data.batch_size=16 compress.name=dgc dist.ranks=4");
  CHECK(dry.ended(0));
  for (const char* line : {"weights                      0.30 MB", "gradients                    0.30 MB",
                           "residuals                    0.30 MB", "optimizer state", "method state",
                           "activations", "of 16 samples", "batches"})
    CHECK(dry.has(line));
  // 16 x 2 x (3072 x 24 + 24 x 10), and back without the gradient of the pictures
  CHECK(dry.has("compute per rank: 0.004742 GFLOP per step, of them forward 0.002367 and backward 0.002375"));
}
