#!/usr/bin/env python3
"""scripts/gpu-check: how it runs programs, judges what they say and writes its results, over programs that are shell scripts.

gpu_check.py ROOT"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
import unittest.mock

if len(sys.argv) != 2:
    sys.exit("usage: gpu_check.py ROOT")
SCRIPT = os.path.join(os.path.abspath(sys.argv[1]), "scripts", "gpu-check")
sys.path.insert(0, os.path.join(os.path.abspath(sys.argv[1]), "lab"))
sys.dont_write_bytecode = True
from gpu_check_lib import Interrupted, UserError  # noqa: E402
from gpu_check_lib.cli import BUDGETS, STAGES, check, parse  # noqa: E402
from gpu_check_lib.gpu_tests import SANITIZED, run_tests  # noqa: E402
from gpu_check_lib.machine import Clocks, describe_gpu  # noqa: E402
from gpu_check_lib.kernels import run_kernels, size_text  # noqa: E402
from gpu_check_lib.nccl import run_nccl  # noqa: E402
from gpu_check_lib.programs import is_program, last_line, on_stop_signal, run, run_all, stop  # noqa: E402
from gpu_check_lib.report import FAILED, PASSED, SKIPPED, Report, Result  # noqa: E402
from gpu_check_lib.smoke import SMOKE_TWINS, run_smoke  # noqa: E402
from gpu_check_lib.stage import StageClock, peer  # noqa: E402
from gpu_check_lib.train import run_train  # noqa: E402

# A `train` that ends as the real one does: with metrics. CHECKSUM may use $backend and $method.
TRAINING = """for a in "$@"; do case "$a" in
output.dir=*) dir=${a#output.dir=};; dist.backend=*) backend=${a#dist.backend=};;
compress.name=*) method=${a#compress.name=};; train.precision=*) precision=${a#train.precision=};;
--check-network) check=yes;; esac; done
BEFORE
[ -n "$check" ] && { echo "every value arrived as it should"; exit 0; }
[ "${RANK:-0}" = 0 ] || exit 0
mkdir -p "$dir"
echo '{"event":"step","step":0}' >"$dir/metrics.jsonl"
echo '{"event":"end","parameter_checksum":"'CHECKSUM'","step_p50_s":0.001}' >>"$dir/metrics.jsonl"
"""
# As compute-sanitizer if nothing is wrong: runs the program behind its options.
SANITIZER = """[ $1 = --help ] && { echo 'HELP'; exit; }
echo $* >>LOG
while [ "${1#--}" != "$1" ]; do shift 2; done
"$@" || exit 9
echo "========= ERROR SUMMARY: 0 errors"
"""
LIST = 'case "$*" in *--list-tags) printf "   3  [#relu_test]\\n   2  [#gaussiank_test]\\n"; exit;; esac; '
TESTS_PASS = LIST + "echo 'All tests passed (42 assertions in 3 test cases)'"
NVIDIA_SMI = """case "$*" in *clocks_event_reasons*) echo 'Field "clocks_event_reasons.active" is not valid'; exit 2;; esac
echo $* >>LOG
case "$*" in *driver_version*) echo "580.1, 700.00 W, Default, 345 MHz, 2619 MHz, 1980 MHz";;
*--loop-ms*) for row in "345, 2619, 0x0000000000000001" "1500, 2619, 0x04" "[N/A], 1, 0x0" "1600, 2619, 0x20"; do echo $row; done
: >LOG.shown; sleep 60;; *) echo 0x0;; esac
"""
METHODS = ("topk", "gaussiank", "dgc", "regtopk")


def shell(script, seconds=10):
    return run(["sh", "-c", script], seconds)


def gone(pid):
    """Whether there is no such process, soon; a zombie counts as gone."""
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                if file.read().split()[2] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


class Findings:
    def __init__(self, results, seconds):
        self.results, self.seconds = results, seconds

    def of(self, part):
        return next(result for result in self.results if part in result.name)

    def count(self, status):
        return sum(result.status == status for result in self.results)


class WithFakes(unittest.TestCase):
    """A folder of programs that behave as those that gpu-check starts."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def text(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return file.read()

    def write(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)

    def program(self, name, script, shebang="#!/bin/sh\n"):
        self.write(name, shebang + script)
        os.chmod(self.path(name), 0o700)

    def training(self, checksum, before=""):
        self.program("train", TRAINING.replace("BEFORE", before).replace("CHECKSUM", checksum))

    def report(self, folder="out"):
        return Report(self.path(folder))

    def options(self, seconds=60):
        return types.SimpleNamespace(
            bin=self.folder, out=self.path("out"), python=self.path("python"), sanitizer=self.path("compute-sanitizer"),
            seconds=seconds, smallest=16, largest=18, smi=self.path("nvidia-smi"), bus="", reasons="reasons",
        )  # fmt: skip

    def findings(self, stage, seconds=60):
        begin = time.monotonic()
        report = self.report()
        with contextlib.redirect_stdout(io.StringIO()):
            stage(self.options(seconds), report)
        return Findings(report.results, time.monotonic() - begin)


class Programs(WithFakes):
    def test_exit_status_and_both_streams_come_back(self):
        good = shell("echo one; echo two >&2")
        self.assertTrue(good.ok())
        self.assertEqual(good.output, "one\ntwo\n")
        bad = shell("echo why it failed; exit 7")
        self.assertFalse(bad.ok())
        self.assertEqual((bad.code, bad.reason("sh")), (7, "why it failed"))
        self.assertEqual(shell("exit 7").reason("sh"), "exit status 7")

    def test_a_signal_counts_as_128_more_than_it(self):
        outcome = shell("echo before; kill -SEGV $$")
        self.assertEqual((outcome.code, outcome.reason("sh")), (128 + signal.SIGSEGV, "ended by signal 11: before"))

    def test_what_is_not_there_or_is_no_program_is_not_called_passed(self):
        self.write("text", "echo no\n")
        for name in ("no-such-program-at-all", self.path("nothing"), self.folder, self.path("text")):
            outcome = run([name], 5)
            self.assertFalse(outcome.found or outcome.ok())
            self.assertEqual(outcome.reason(name), name + " is not there")
        self.assertTrue(is_program("sh") and is_program("/bin/sh"))

    def test_a_missing_interpreter_is_named(self):
        self.program("broken", "#!/no/such/interpreter\n", "")
        outcome = run([self.path("broken")], 5)
        self.assertTrue(outcome.found and not outcome.ok())
        self.assertEqual(outcome.reason("broken"), self.path("broken") + " cannot be started: No such file or directory")

    def test_what_runs_too_long_is_killed_with_its_children(self):
        outcome = shell(f"sleep 60 & echo $! >{self.path('child')}; echo waiting; sleep 60", 0.3)
        self.assertTrue(outcome.timed_out and not outcome.ok())
        self.assertTrue(0.3 <= outcome.seconds < 10)
        self.assertRegex(outcome.reason("sh"), r"^hangs, or is slow: not done in 0\.\d+ s; its last line: waiting$")
        self.assertTrue(gone(int(self.text("child"))))

    def test_a_child_that_is_left_behind_is_killed(self):
        outcome = shell(f"sleep 60 & echo $! >{self.path('child')}; echo done", 30)
        self.assertTrue(outcome.ok() and outcome.seconds < 20)
        self.assertTrue(gone(int(self.text("child"))))

    def test_a_child_in_a_session_of_its_own_that_holds_or_floods_the_pipe_holds_nobody_up(self):
        for work in ("sleep 4", "timeout 4 yes"):
            begin = time.monotonic()
            self.assertTrue(shell(f"setsid {work} & sleep 0.3; echo done", 30).ok())
            self.assertLess(time.monotonic() - begin, 3)

    def test_of_much_output_the_end_is_kept(self):
        outcome = shell("i=0; while [ $i -lt 12000 ]; do echo line number $i; i=$((i+1)); done")
        self.assertTrue(outcome.ok() and 60000 < len(outcome.output) <= 65536)
        self.assertEqual(last_line(outcome.output), "line number 11999")

    def test_the_last_line_leaves_out_rules_empty_lines_and_what_a_progress_bar_wrote_over(self):
        self.assertEqual(last_line("first\n10 %\r20 %\r30 % done\r\n=======\n  \n"), "30 % done")
        self.assertEqual(last_line(""), "")

    def test_programs_run_side_by_side_with_their_own_environment_and_without_a_launchers(self):
        launcher = {"OMPI_COMM_WORLD_RANK": "5", "RANK": "6"}
        os.environ.update(launcher)
        script = "echo $RANK-${WORLD_SIZE}-${OMPI_COMM_WORLD_RANK}; sleep 1"
        commands = [(["sh", "-c", script], {"RANK": rank, "WORLD_SIZE": "2"}) for rank in "01"]
        outcomes = run_all([*commands, (["sh", "-c", "echo ${RANK-none}"], {})], 20)
        for name in launcher:
            del os.environ[name]
        self.assertEqual([outcome.output for outcome in outcomes], ["0-2-\n", "1-2-\n", "none\n"])
        self.assertLess(outcomes[2].seconds, outcomes[0].seconds)
        self.assertLess(outcomes[1].seconds, 1.9)
        self.assertTrue(outcomes[0].ok())

    def test_a_program_that_asks_for_input_gets_its_end(self):
        self.assertTrue(run(["cat"], 10).ok())

    def test_a_signal_that_asks_for_an_end_kills_what_runs_with_its_children(self):
        before = signal.signal(signal.SIGINT, on_stop_signal)
        sender = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        sender.start()
        begin = time.monotonic()
        with self.assertRaises(Interrupted):
            shell(f"sleep 60 & echo $! >{self.path('child')}; sleep 60", 60)
        signal.signal(signal.SIGINT, before)
        stop["signal"] = 0
        self.assertLess(time.monotonic() - begin, 10)
        self.assertTrue(gone(int(self.text("child"))))


class Reports(WithFakes):
    def add(self, report, *results):
        with contextlib.redirect_stdout(io.StringIO()):
            for result in results:
                report.add(result)

    def test_both_files_are_complete_from_the_start_and_after_each_result(self):
        report = self.report()
        self.assertEqual(json.loads(self.text("out/gpu-check.json"))["results"], [])
        report.about["card"] = "NVIDIA H200"
        self.add(report, Result("train", "resnet20", PASSED, 12.25, {"images/s": 51234.5, "times": 2.5}, "a note"))
        self.assertEqual(len(json.loads(self.text("out/gpu-check.json"))["results"]), 1)
        self.add(report, Result("nccl", "2 ranks", FAILED, 1, {}, "rank 1: lost"))
        self.assertEqual(json.loads(self.text("out/gpu-check.json")), {
            "about": {"card": "NVIDIA H200"},
            "results": [
                {"stage": "train", "name": "resnet20", "result": "passed", "seconds": 12.25,
                 "figures": {"images/s": 51234.5, "times": 2.5}, "note": "a note"},
                {"stage": "nccl", "name": "2 ranks", "result": "FAILED", "seconds": 1.0, "figures": {}, "note": "rank 1: lost"},
            ],
        })  # fmt: skip
        self.assertEqual(
            self.text("out/gpu-check.txt"),
            """card: NVIDIA H200

stage    result    seconds  check
train    passed       12.2  resnet20: 5.123e+04 images/s, 2.5 times (a note)
nccl     FAILED        1.0  2 ranks (rank 1: lost)
""",
        )
        self.assertEqual(len(os.listdir(self.path("out"))), 2)
        self.assertTrue(report.any(FAILED) and not report.any(SKIPPED))

    def test_what_a_program_wrote_leaves_the_table_a_table_and_the_json_readable(self):
        report = self.report()
        output = shell(r"printf 'line\033[31m and \377'").output
        self.add(report, Result("tests", "a", FAILED, note="two\n" + output, output=output))
        self.assertEqual(len(json.loads(self.text("out/gpu-check.json"))["results"]), 1)
        self.assertEqual(self.text("out/gpu-check.txt").splitlines()[1:], [
            "tests    FAILED        0.0  a (two line [31m and \ufffd)"])  # fmt: skip

    def test_a_folder_that_cannot_be_written_is_a_mistake_of_whoever_named_it(self):
        self.write("file", "")
        for folder in (self.path("file"), self.path("file/below"), ""):
            with self.assertRaisesRegex(UserError, f"--out.*{folder}" if folder else "--out"):
                Report(folder)


class Stages(WithFakes):
    def test_every_model_and_precision_takes_steps_eager_and_captured_with_the_same_weights(self):
        listing = '[ "$1" = --list ] && { echo "Parameters of"; echo "gpt  968200  GPT-2"; echo "resnet44  1  again"; exit; }; '
        seen = 'echo "$*" >>' + self.path("seen")
        self.training("$precision", listing + seen)
        smoke = self.findings(run_smoke)
        self.assertEqual(
            [result.name for result in smoke.results],
            ["gpt bf16, eager = captured = early", "gpt tf32, eager = captured", "gpt fp32, eager = captured"],
        )
        self.assertEqual(smoke.count(PASSED), 3)
        self.assertIn("resnet44", SMOKE_TWINS)
        runs = self.text("seen").splitlines()
        self.assertEqual(len(runs), 7)
        for settings, count in (("train.graphs=true train.unproven=none", 3),
                                ("train.graphs=false train.unproven=none", 3),
                                ("train.graphs=true train.unproven=early_launch", 1)):  # fmt: skip
            self.assertEqual(sum(settings in line for line in runs), count)

        self.training(
            "$graphs",
            listing.replace(
                "exit; }; ", 'exit; }; for a in "$@"; do case "$a" in train.graphs=*) graphs=${a#train.graphs=};; esac; done; '
            ),
        )
        differs = self.findings(run_smoke)
        self.assertEqual(differs.count(FAILED), 3)
        self.assertEqual(differs.of("gpt bf16").note, "weights false of eager steps, true of captured ones")

        self.training(
            "$early",
            listing.replace(
                "exit; }; ",
                'exit; }; for a in "$@"; do case "$a" in train.unproven=*) early=${a#train.unproven=};; esac; done; ',
            ),
        )
        differs = self.findings(run_smoke)
        self.assertEqual(differs.count(FAILED), 1)
        self.assertEqual(differs.of("gpt bf16").note, "weights none of eager steps, early_launch of early ones")

        self.training("x", listing + "echo no algorithm; exit 1")
        self.assertEqual(self.findings(run_smoke).of("gpt fp32").note, "no algorithm")
        self.training("x", "exit 3")
        self.assertEqual(self.findings(run_smoke).count(FAILED), 1)
        self.training("x", listing + "sleep 60")
        hangs = self.findings(run_smoke, 1)
        self.assertEqual(hangs.count(SKIPPED), 3)
        self.assertLess(hangs.seconds, 20)

    def test_gpu_tests_run_file_by_file_and_some_files_under_the_sanitizer(self):
        self.program("gpu_tests", TESTS_PASS)
        for help_text, option in (("--kernel-name arg", "--kernel-name kernel_substring=topknot "),
                                  ("--kernel-regex arg", "--kernel-regex kns=topknot "), ("--tool arg", "")):  # fmt: skip
            self.program("compute-sanitizer", SANITIZER.replace("HELP", help_text).replace("LOG", self.path("log")))
            found = self.findings(run_tests)
            self.assertEqual(
                [result.name for result in found.results if result.status == PASSED],
                ["relu_test against the CPU", "gaussiank_test against the CPU"]
                + [f"{file} under {tool}" for tool, files in SANITIZED.items() for file in files],
            )
            # Libraries' kernels are left out where only ours can tell something.
            self.assertEqual(sorted(self.text("log").splitlines()), sorted(
                f"--tool {tool} --error-exitcode 9 {'' if tool == 'memcheck' else option}{self.path('gpu_tests')} -# [#{file}]"
                for tool, files in SANITIZED.items() for file in files))  # fmt: skip
            os.remove(self.path("log"))
        root = os.path.dirname(os.path.dirname(SCRIPT))
        for file in {file for files in SANITIZED.values() for file in files}:
            places = [os.path.join(root, "tests", place, file + ".cpp") for place in ("cuda", "nn/ops")]
            self.assertTrue(any(map(os.path.exists, places)), file)

    def test_gpu_tests_that_fail_run_nothing_crash_or_hang_are_named(self):
        fails = "echo 'tests/cuda/relu_test.cpp:17: FAILED:'; "
        self.program("gpu_tests", LIST + fails + "echo 'test cases: 2 | 1 failed'; exit 1")
        found = self.findings(run_tests)
        self.assertEqual((found.count(FAILED), found.count(PASSED)), (2, 0))
        self.assertEqual(found.of("relu_test against").note, "failed: tests/cuda/relu_test.cpp:17")
        self.assertIn("1 failed", found.of("relu_test against").output)
        self.assertEqual(found.of("memcheck").status, SKIPPED)  # no sanitizer here

        self.program("gpu_tests", "echo 'No tests ran'")
        self.assertEqual(self.findings(run_tests).of("against the CPU").note, "no files of tests: No tests ran")
        self.program("gpu_tests", LIST + "echo 'No tests ran'")
        self.assertEqual(self.findings(run_tests).of("relu_test").status, FAILED)
        self.program("gpu_tests", LIST + "kill -SEGV $$")
        self.assertEqual(self.findings(run_tests).of("relu_test").note, "ended by signal 11")

        # What the stage's end cuts off is no failure, unless it has failed before.
        for before, status in (("", SKIPPED), (fails, FAILED)):
            self.program("gpu_tests", LIST + f"echo $$ >{self.path('pid')}; {before}sleep 60")
            found = self.findings(run_tests, 2)
            self.assertEqual(found.of("relu_test").status, status)
            self.assertLess(found.seconds, 8)
            self.assertTrue(gone(int(self.text("pid"))))
        self.assertTrue(found.of("relu_test").note.startswith("failed: "))

    def test_a_sanitizer_that_finds_something_is_a_failure_and_one_that_does_not_work_here_a_skip(self):
        self.program("gpu_tests", TESTS_PASS)
        invalid = "echo '========= Invalid __global__ read of size 4'; "
        for script, status in (
            (invalid + "echo '========= ERROR SUMMARY: 1 error'; exit 9", FAILED),
            (invalid + "sleep 60", FAILED),
            ("echo 'All tests passed'; echo '========= ERROR SUMMARY: 2 errors'; exit 9", FAILED),
            ("echo '========= Error: no'; exit 0", FAILED),
            ("echo 'Device not supported'; exit 1", SKIPPED),
            ("exit 0", SKIPPED),
            ("echo '========= ERROR SUMMARY: 0 errors'", FAILED),  # without having run the tests
            ("sleep 60", SKIPPED),
        ):
            with self.subTest(script):
                self.program("compute-sanitizer", script)
                found = self.findings(run_tests, 4 if "sleep" in script else 20)
                self.assertEqual(found.of("against the CPU").status, PASSED)
                self.assertEqual(found.of("under memcheck").status, status)
                self.assertTrue(found.of("memcheck").note)

    def test_without_its_program_each_stage_skips_its_checks_by_name(self):
        for stage, program in ((run_tests, "gpu_tests"), (run_nccl, "train"), (run_kernels, "gpu_timings"),
                               (run_train, "train")):  # fmt: skip
            found = self.findings(stage)
            self.assertGreaterEqual(len(found.results), 2)
            for result in found.results:
                self.assertEqual((result.status, result.note), (SKIPPED, self.path(program) + " is not there"))

    def test_processes_and_threads_that_end_with_the_same_weights_pass_and_others_are_told_apart(self):
        self.training("$method")
        found = self.findings(run_nccl)
        self.assertEqual((found.count(PASSED), len(found.results)), (7, 7))

        self.training("$([ $method = dgc ] && echo $backend || echo same)")
        found = self.findings(run_nccl)
        self.assertEqual((found.of("dgc").status, found.of("dgc").note),
                         (FAILED, "weights nccl with processes, threads with threads"))  # fmt: skip
        self.assertEqual(found.of("regtopk").status, PASSED)
        self.assertEqual(found.count(FAILED), 1)

    def test_a_run_that_wrote_no_end_is_not_the_equal_of_another_nor_is_one_of_an_earlier_check(self):
        self.training("$method")
        self.assertEqual(self.findings(run_nccl).count(PASSED), 7)
        self.program("train", "exit 0")
        found = self.findings(run_nccl)
        for method in METHODS:
            self.assertEqual(found.of(method).status, FAILED)

    def test_after_ranks_that_fail_or_hang_nothing_of_the_stage_is_called_passed_and_it_ends_in_its_time(self):
        self.training("$method", '[ "$WORLD_SIZE" = 2 ] && { echo NCCL: unhandled; exit 1; }')
        found = self.findings(run_nccl)
        self.assertEqual(found.of("1 rank").status, PASSED)
        self.assertEqual((found.of("2 ranks").status, found.of("2 ranks").note), (FAILED, "rank 0: NCCL: unhandled"))
        self.assertEqual(found.of("4 ranks").status, SKIPPED)
        self.assertEqual(found.count(SKIPPED), 5)

        # A rank that says why it ended says more than one that had to be killed.
        self.training("$method", '[ "$RANK" = 1 ] && { echo lost; exit 1; }; [ -n "$RANK" ] && [ $WORLD_SIZE != 1 ] && sleep 60')
        found = self.findings(run_nccl, 3)
        self.assertEqual((found.of("2 ranks").status, found.of("2 ranks").note), (FAILED, "rank 1: lost"))
        self.assertLess(found.seconds, 8)

    def test_the_kernels_figures_come_from_the_process_that_measures_and_stand_beside_pytorchs(self):
        lines = [{"what": "device copy", "elements": 65536, "figures": {"GB/s": 4000}, "skipped": ""},
                 {"what": "topk", "elements": 65536, "figures": {"ms": 0.5, "GB/s": 100}, "skipped": ""},
                 {"what": "dgc", "elements": 262144, "figures": {}, "skipped": "too little memory"},
                 {"what": "topk"}]  # fmt: skip
        results = "cat <<'end'\n" + "\n".join(map(json.dumps, lines)) + "\nend\n"
        self.program("gpu_timings", "[ $1 = --seconds ] || exit 1\necho a line for people\n" + results)
        self.program("python", """echo Warning; echo '{"elements": 65536, "topk_ms": 2.0, "step_ms": 4.0}'""")
        found = self.findings(run_kernels)
        self.assertEqual([result.name for result in found.results],
                         ["torch.topk", "device copy, 2^16", "topk, 2^16", "dgc, 2^18", "all sizes measured"])  # fmt: skip
        self.assertEqual(found.of("torch.topk").status, PASSED)
        self.assertEqual(list(found.of("topk, 2^16").figures.items()),
                         [("ms", 0.5), ("GB/s", 100), ("times torch.topk", 4), ("times PyTorch's step", 8)])  # fmt: skip
        self.assertEqual((found.of("dgc, 2^18").status, found.of("dgc, 2^18").note), (SKIPPED, "too little memory"))

        # A GPU that is lost on the way takes the rest with it, not what came before.
        self.program("gpu_timings", results + "echo an illegal memory access; exit 1")
        self.program("python", "echo PyTorch finds no GPU; exit 3")
        found = self.findings(run_kernels)
        self.assertEqual((found.of("topk, 2^16").status, len(found.of("topk, 2^16").figures)), (PASSED, 2))
        torch, everything = found.of("torch.topk"), found.of("all sizes")
        self.assertEqual((torch.status, torch.note), (SKIPPED, "no PyTorch figure: PyTorch finds no GPU"))
        self.assertEqual((everything.status, everything.note), (FAILED, "an illegal memory access"))

        self.program("gpu_timings", "exit 0")
        self.assertEqual(self.findings(run_kernels).of("all sizes").status, FAILED)
        self.program("gpu_timings", "sleep 60")
        found = self.findings(run_kernels, 1)
        self.assertEqual(found.count(FAILED), 1)
        self.assertLess(found.seconds, 8)

    def test_sizes_are_named_as_powers_of_two_or_millions(self):
        self.assertEqual([size_text(n) for n in (1024, 1 << 24, 25600000)], ["2^10", "2^24", "25.6M"])

    def test_images_per_second_are_the_batch_over_the_median_step_beside_pytorchs_best_of_the_same_precision(self):
        self.training("x")
        self.program("python", "".join(
            f"""echo '{{"setting":"{name}","precision":"{precision}","per_second":{rate},"torch":"2.9"}}'\n"""
            for name, precision, rate in (("a", "bf16", 32000), ("b", "bf16", 64000), ("c", "tf32", 16000))
        ) + "echo compile: left out")  # fmt: skip
        found = self.findings(run_train)
        self.assertEqual((len(found.results), found.count(PASSED)), (19, 19))
        ours = [result.name.split()[1].rstrip(",") for result in found.results if not result.name.startswith("PyTorch")]
        self.assertEqual(ours, 7 * ["bf16"] + 4 * ["tf32"] + 4 * ["fp32"])  # a cut leaves the most wanted
        early = [result for result in found.results if result.name.endswith(", early launches")]
        self.assertEqual([result.name.split()[0] for result in early], ["resnet20", "gpt"])
        self.assertEqual(list(early[0].figures.items()), [("images/s", 128000), ("times without", 1)])
        plans = found.of("resnet20 bf16, batch 128, plans")
        self.assertEqual((plans.figures["times without"], plans.note[:19]), (1, "no plan was faster "))
        for name, best in (("resnet50 bf16", 64000), ("vgg16 tf32", 16000), ("resnet20 fp32", 16000)):
            self.assertEqual(list(found.of(name).figures.items()),
                             [("images/s", 128000), ("images/s of PyTorch", best), ("times", 128000 / best)])  # fmt: skip
        self.assertEqual(found.of("resnet50 bf16").note, "PyTorch's best: b")
        self.assertEqual(found.of("gpt bf16").figures["tokens/s"], 16 * 1024 * 1000)
        self.assertEqual(len(found.of("PyTorch, resnet20").figures), 3)
        self.assertEqual(found.of("PyTorch, resnet20").note, "PyTorch 2.9")

    def test_without_pytorch_our_figures_stand_alone_and_a_run_that_fails_or_ends_too_late_has_none(self):
        self.training("x", "[ $precision = bf16 ] && { echo out of memory; exit 1; }")
        found = self.findings(run_train)
        torch = found.of("PyTorch, vgg16")
        self.assertEqual((torch.status, torch.note), (SKIPPED, f"no PyTorch figure: {self.path('python')} is not there"))
        self.assertEqual(len(found.of("vgg16 tf32").figures), 1)
        failed = found.of("vgg16 bf16")
        self.assertEqual((failed.status, failed.note, failed.figures), (FAILED, "out of memory", {}))

        self.program("train", "sleep 60")
        self.program("python", "sleep 60")
        found = self.findings(run_train, 2)
        self.assertEqual(found.count(SKIPPED), 19)
        self.assertLess(found.seconds, 10)

    def test_timed_runs_are_small_unmarked_and_share_what_was_timed_and_their_figures_have_clocks_and_nodes(self):
        self.program("nvidia-smi", NVIDIA_SMI.replace("LOG", self.path("smi")))
        nodes = "".join(f"echo 'step {step}: a graph of {count} nodes'; " for step, count in ((2, 40), (2, 2), (3, 7)))
        wait = 'case "$*" in *train.epochs=0*) until [ -e SHOWN ]; do sleep 0.02; done; rm SHOWN;; esac; '.replace(
            "SHOWN", self.path("smi.shown")
        )
        self.training("x", f'echo "$*" >>{self.path("seen")}; {wait}{nodes}')
        result = self.findings(run_train).of("resnet50 bf16")
        self.assertEqual(list(result.figures.items()),
                         [("images/s", 128000), ("nodes", 42), ("MHz", 1550), ("MHz of memory", 2619)])  # fmt: skip
        self.assertEqual(result.note, "slowed down by power cap, heat")
        self.findings(run_nccl)
        for line in self.text("seen").splitlines():
            if "--check-network" not in line:
                self.assertIn(f"train.algorithm_cache={self.path('out/algorithms')} ", line + " ")
            if "train.epochs=0" in line:
                self.assertIn("train.step_times=false", line)
                self.assertTrue("data.train_size=512 " in line or "data.name=tokens" in line)

    def test_the_heading_has_card_clocks_limits_libraries_and_revision(self):
        self.program("gpu_timings", """echo '{"about": {"card": "NVIDIA H200", "NCCL": "22809", "PCI bus": "0000:3B:00.0"}}'""")
        self.program("nvidia-smi", NVIDIA_SMI.replace("LOG", self.path("smi")))
        self.program("train", "echo 'topknot 0.1.0 (0123abc)'")
        options, report = self.options(), self.report()
        self.assertEqual(describe_gpu(options, report), "")
        self.assertEqual(report.about, {
            "card": "NVIDIA H200", "NCCL": "22809", "PCI bus": "0000:3B:00.0", "driver": "580.1", "power limit": "700.00 W",
            "compute mode": "Default", "SM clock at the start": "345 MHz", "memory clock at the start": "2619 MHz",
            "greatest SM clock": "1980 MHz", "program": "topknot 0.1.0 (0123abc)"})  # fmt: skip
        with Clocks(options):  # by the name that this driver has
            while not os.path.exists(self.path("smi.shown")):
                time.sleep(0.02)
        self.assertIn("--id=0000:3B:00.0 --query-gpu=clocks.sm,clocks.mem,clocks_throttle_reasons.active", self.text("smi"))
        for name in ("nvidia-smi", "train"):
            os.remove(self.path(name))
        self.assertEqual(describe_gpu(options, report), "")
        self.assertEqual(report.about["nvidia-smi"], self.path("nvidia-smi") + " is not there")


class Budgets(WithFakes):
    def test_what_is_killed_before_its_own_deadline_is_cut_off_and_skipped(self):
        for left, deadline, status in ((0.2, 60, SKIPPED), (60, 0.2, FAILED)):
            outcome = StageClock(left).run(["sleep", "60"], deadline)
            self.assertEqual(Result("nccl", "a").failure(outcome, outcome.reason("sleep")).status, status)
            self.assertEqual(outcome.reason("sleep").startswith("the stage's time is used up"), status == SKIPPED)

    def test_the_stages_share_the_minutes_and_get_what_earlier_ones_left(self):
        self.program("gpu_timings", """echo '{"about": {}}'""")
        given = {}
        for minutes, stages in ((25, list(STAGES)), (10, list(STAGES)), (10, ["nccl", "train"])):
            given.clear()
            arguments = [word for stage in stages for word in ("--stage", stage)]
            options = parse([*arguments, "--minutes", str(minutes), "--bin", self.folder, "--out", self.path("out")], "")
            fakes = {name: lambda options, _, name=name: given.update({name: options.seconds}) for name in STAGES}
            with unittest.mock.patch.dict(STAGES, fakes), contextlib.redirect_stdout(io.StringIO()):
                check(options)
            self.assertEqual(list(given), stages)
            self.assertTrue(0.95 * 60 * minutes < given["train"] <= 60 * minutes)  # the others took no time
            rest = sum(BUDGETS[stage] for stage in stages)
            self.assertAlmostEqual(given[stages[0]] / (60 * minutes), BUDGETS[stages[0]] / rest, delta=0.02)
        self.assertEqual(parse([], "").minutes, 25)
        self.assertLessEqual(BUDGETS["smoke"] / sum(BUDGETS.values()) * 15 * 60, 65)


class Script(WithFakes):
    """The script as a user calls it, and what it makes of gpu_timings' word about the GPU."""

    def check(self, *arguments, before=""):
        command = f"cd {self.folder}; {before} exec {SCRIPT} --bin {self.folder} " + " ".join(arguments)
        return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)

    def test_the_peers_are_where_it_looks_for_them(self):
        for name in ("topk_ef.py", "networks.py", "gpt.py"):
            self.assertTrue(os.path.isfile(peer(name)))

    def test_a_gpu_is_described_and_one_that_cannot_be_used_is_said_to_be_so(self):
        self.program("gpu_timings", """echo '{"about": {"card": "NVIDIA H200"}}'""")
        self.program("gpu_tests", TESTS_PASS)
        done = self.check("--stage tests --out out")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(self.text("out/gpu-check.txt").startswith("card: NVIDIA H200\n"))
        self.program("gpu_tests", "exit 1")
        self.assertEqual(self.check("--stage tests --out out").returncode, 1)

        self.program("gpu_timings", """echo '{"problem": "no GPU was found"}'""")
        done = self.check("--stage tests --out out")
        self.assertEqual(done.returncode, 3)
        self.assertTrue(done.stdout.startswith("gpu-check: no GPU was found\ntests    skipped  ops "), done.stdout)
        os.remove(self.path("gpu_timings"))
        done = self.check()
        self.assertEqual((done.returncode, done.stdout.count(" is not there\n")), (3, 12), done.stdout)
        done = self.check("--minutes 0")
        self.assertEqual((done.returncode, done.stderr.count("not in range 1 to 600")), (2, 1), done.stderr)
        self.program("gpu_timings", "echo the driver is gone; exit 1")
        done = self.check()
        self.assertEqual((done.returncode, done.stderr),
                         (1, f"error: {self.path('gpu_timings')}: the driver is gone\n"))  # fmt: skip

    def test_a_signal_ends_it_with_what_it_has(self):
        self.program("gpu_timings", """echo '{"about": {}}'""")
        self.program("gpu_tests", "sleep 60")
        done = self.check("--out out", before="(sleep 1; kill $$) &")
        self.assertEqual(done.returncode, 128 + signal.SIGTERM, done.stderr)
        self.assertIn("tests    skipped       0.0  the rest of the stage (stopped by a signal)", self.text("out/gpu-check.txt"))
        self.assertIn("train    skipped", done.stdout)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
