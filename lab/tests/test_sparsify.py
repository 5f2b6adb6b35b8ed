"""lab/sparsify: its lines against golden values and naive loops, and the program as a user runs it.

python3 lab/tests/test_sparsify.py
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import pathlib
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
import unittest

try:
    import numpy as np
except ImportError:
    print("skipped: no numpy")
    sys.exit(0)

LAB = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = str(LAB / "sparsify")
sys.path.insert(0, str(LAB))
_loader = importlib.machinery.SourceFileLoader("sparsify", PROGRAM)
_spec = importlib.util.spec_from_loader("sparsify", _loader)
sparsify = importlib.util.module_from_spec(_spec)
_loader.exec_module(sparsify)


def program(*arguments, **more):
    return subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=120, **more)


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.input, self.out = str(self.folder / "g.npy"), str(self.folder / "out.jsonl")

    def files(self):
        return len(list(self.folder.iterdir()))

    def lines(self, values, method, *settings, weights=""):
        """The lines, and the program's summary."""
        np.save(self.input, values)
        ranks, steps = sparsify.sparsify(self.input, method, self.out, list(settings), weights)
        self.assertEqual(self.files(), 2)  # nothing else is left
        with open(self.out, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        os.unlink(self.out)
        return lines, sparsify.summary(ranks, steps)


def random_values(*shape):
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def recording(steps, name="gradients", dtype="F32"):
    """The bytes of a run's gradients.safetensors."""
    tensor = {"dtype": dtype, "shape": steps.shape, "data_offsets": [0, steps.nbytes]}
    return (120).to_bytes(8, "little") + json.dumps({name: tensor}).ljust(120).encode() + steps.tobytes()


def largest(u, k):
    """Positions of the k largest magnitudes, ties to the lower index, ascending."""
    return np.sort(np.argsort(-np.abs(u), kind="stable")[:k])


def trace_gradients():
    """Two ranks, four elements, four steps: ten times (((3t + 5p + 7j) mod 11) - 5) / 10, which are integers."""
    t, p, j = np.ogrid[:4, :2, :4]
    return ((3 * t + 5 * p + 7 * j) % 11 - 5).astype(np.float64)


class Lines(Case):
    def check_trace(self, lines, expected):
        self.assertEqual(len(lines), 12)
        for i, (index, value) in enumerate(expected):
            line = lines[3 * (i // 2) + i % 2]
            self.assertEqual((line["step"], line["rank"], line["count"], line["indices"]), (i // 2, i % 2, 1, [index]))
            self.assertAlmostEqual(line["values"][0] / value, 1, delta=1e-6)

    def test_the_golden_trace_of_top_k_with_error_feedback_and_its_averages(self):
        # Golden values: ties by lower index.
        lines, _ = self.lines(trace_gradients(), "topk", "density=0.25")
        self.check_trace(lines, [(0, -5), (1, -4), (1, 7), (0, 3), (1, -3), (3, 6), (3, 5), (0, -7)])
        averages = [([0, 1], [-2.5, -2]), ([0, 1], [1.5, 3.5]), ([1, 3], [-1.5, 3]), ([0, 3], [-3.5, 2.5])]
        for line, (indices, values) in zip(lines[2::3], averages):
            self.assertIs(line["aggregate"], True)
            self.assertEqual((line["indices"], line["values"]), (indices, values))
            self.assertEqual((line["dense_bytes"], line["bytes_down"]), (16, [24, 24]))  # header 16, position 4, value 4
        self.assertEqual((lines[0]["bytes_up"], lines[0]["threshold"]), (24, 5))

    def test_the_golden_trace_of_dgc_carries_its_velocities_from_step_to_step(self):
        lines, _ = self.lines(trace_gradients(), "topk", "density=0.25", "memory=dgc", "momentum=0.9")
        self.check_trace(lines, [(0, -5), (1, -4), (1, 8.8), (0, 3), (3, 7.85), (3, 6.09), (1, -5.7), (0, -11.5)])
        lines, _ = self.lines(trace_gradients(), "topk", "density=0.25", "memory=dgc", "nesterov=true")
        self.check_trace(lines, [(0, -9.5), (1, -7.6), (1, 14.92), (0, 5.7), (3, 9.065), (3, 11.481), (1, -8.13), (0, -17.35)])

    def test_uneven_weights_equal_a_naive_loop_to_the_last_digit(self):
        steps, ranks, d, k = 5, 3, 1000, 10
        gradients = random_values(steps, ranks, d)
        lines, _ = self.lines(gradients, "topk", "density=0.01", weights="1,2,2")
        self.assertEqual(len(lines), steps * (ranks + 1))
        residual = np.zeros((ranks, d), np.float32)
        for t in range(steps):
            average, sent = np.zeros(d, np.float32), np.zeros(d, bool)
            for r in range(ranks):
                u = gradients[t, r] + residual[r]
                chosen = largest(u, k)
                average[chosen] += np.float32((1.0 if r == 0 else 2.0) * 3.0 / 5.0) * u[chosen]
                sent[chosen] = True
                line = lines[t * (ranks + 1) + r]
                self.assertEqual(line["indices"], chosen.tolist())
                self.assertEqual(line["values"], u[chosen].tolist())
                self.assertEqual(line["threshold"], np.abs(u[chosen]).min())
                u[chosen] = 0
                residual[r] = u
            line = lines[t * (ranks + 1) + ranks]
            self.assertEqual(line["indices"], np.flatnonzero(sent).tolist())
            self.assertEqual(line["values"], (average[sent] * (np.float32(1) / np.float32(3))).tolist())

    def test_float64_is_rounded_and_equals_a_naive_loop_in_float(self):
        steps, d, k = 3, 500, 5
        gradients = np.random.default_rng(5).standard_normal((steps, d))
        lines, _ = self.lines(gradients, "topk", "compress.density=0.01")
        residual = np.zeros(d, np.float32)
        for t in range(steps):
            residual += gradients[t].astype(np.float32)
            chosen = largest(residual, k)
            values = residual[chosen].tolist()
            residual[chosen] = 0
            self.assertEqual((lines[2 * t]["indices"], lines[2 * t]["values"]), (chosen.tolist(), values))
            self.assertEqual(lines[2 * t]["bytes_up"], 16 + 8 * k)
            self.assertEqual(lines[2 * t + 1]["values"], values)  # one rank: the average is what it sent
            self.assertEqual((lines[2 * t + 1]["bytes_down"], lines[2 * t + 1]["dense_bytes"]), ([0], 4 * d))

    def test_a_step_with_a_nan_is_skipped_on_all_ranks_and_changes_nothing(self):
        gradients = random_values(3, 2, 50)
        gradients[1, 0, 7] = np.nan
        keys = ["density=0.1", "memory=dgc"]
        lines, text = self.lines(gradients, "topk", *keys)
        shorter, _ = self.lines(gradients[[0, 2]], "topk", *keys)
        self.assertIn("skipped for a NaN or Inf: 1 step;", text)
        self.assertEqual(len(lines), 9)
        for line in lines[3:6]:
            self.assertEqual((line["skipped"], line["indices"], line["values"]), (True, [], []))
        self.assertEqual(lines[3]["count"], 0)
        for line, other in zip(lines[6:], shorter[3:]):
            self.assertNotIn("skipped", line)
            self.assertEqual((line["indices"], line["values"]), (other["indices"], other["values"]))

    def test_a_step_whose_average_overflows_is_skipped(self):
        huge = 3e38  # step 0 overflows in its second element, step 1 does not
        lines, text = self.lines(np.reshape([1, huge, 1, huge, 1, huge, 1, 2], (2, 2, 2)), "topk", "density=0.5")
        self.assertIn("Inf: 1 step;", text)
        self.assertEqual((len(lines), lines[2]["skipped"], lines[2]["values"]), (6, True, []))

    def test_dense_sums_its_messages_weighted_and_its_ranks_lines_are_their_gradients(self):
        lines, text = self.lines(np.reshape([1.0, 0, 2, 5, 0, -2], (1, 2, 3)), "dense", weights="1,3")
        self.assertEqual(len(lines), 3)
        self.assertEqual((lines[0]["indices"], lines[0]["values"], lines[1]["values"]), ([0, 2], [1, 2], [5, -2]))
        self.assertEqual((lines[0]["count"], lines[0]["bytes_up"]), (3, 12))
        self.assertEqual(lines[2]["indices"], [0, 2])
        self.assertEqual(lines[2]["values"], [(0.5 * 1 + 1.5 * 5) / 2, (0.5 * 2 - 1.5 * 2) / 2])
        self.assertEqual(lines[2]["bytes_down"], [12, 12])
        self.assertIn("mean count 3 = 1 k;", text)

    def test_dense_in_bf16_is_rounded_before_and_after_it_is_summed_in_half_the_bytes(self):
        # 1.00390625 lies half-way between 1 and the next bfloat16; 257 between 256 and 258. Both go to the even one.
        lines, _ = self.lines(np.reshape([1.00390625, 256, 3, 1.5, 257, -3], (1, 2, 3)), "dense", "values=bf16")
        self.assertEqual((lines[2]["indices"], lines[2]["values"]), ([0, 1], [1.25, 256]))
        self.assertEqual((lines[0]["bytes_up"], lines[2]["bytes_down"]), (6, [6, 6]))
        # Of three ranks the sum is rounded once: 256 + 1 + 1 is 258, and 256 + 1 rounded were 256.
        lines, _ = self.lines(np.reshape([256.0, 1, 1], (1, 3, 1)), "dense", "values=bf16")
        self.assertEqual(lines[3]["values"], [86])

    def test_a_quantisers_ranks_show_what_they_contributed_and_it_is_what_is_averaged(self):
        d = 40
        for method in ("signsgd", "qsgd", "terngrad"):
            lines, _ = self.lines(random_values(2, 2, d), method)
            for first in (0, 3):
                total, average = np.zeros(d, np.float32), np.zeros(d, np.float32)
                for line in lines[first : first + 2]:
                    total[line["indices"]] += np.array(line["values"], np.float32)
                average[lines[first + 2]["indices"]] = lines[first + 2]["values"]
                self.assertEqual(average.tolist(), (total * np.float32(0.5)).tolist())
                self.assertTrue(average.any())

    def test_what_a_low_rank_method_contributed_is_not_known(self):
        lines, text = self.lines(random_values(1, 2, 40), "powersgd", "tensors=4x5,5x4", "rank=1")
        self.assertEqual((lines[0]["indices"], lines[0]["values"], lines[0]["bytes_up"]), (None, None, 72))  # two factors
        self.assertIn("72 up, 72 down", text)

    def test_entries_that_cancel_stay_in_the_aggregates_list(self):
        lines, _ = self.lines(np.reshape([3.0, 1, -3, 1], (1, 2, 2)), "topk", "density=0.5")
        self.assertEqual((lines[2]["indices"], lines[2]["values"]), ([0], [0]))

    def test_scope_tensor_selects_in_each_of_the_tensors(self):
        values = np.array([9, 8, 7, 6, 1, 2, 0.5, 0.25, 0.125])
        lines, _ = self.lines(values, "topk", "density=0.01", "tensors=2x2,2,3x1x1", "scope=tensor")
        self.assertEqual((lines[0]["indices"], lines[0]["values"], lines[0]["threshold"]), ([0, 5, 6], [9, 2, 0.5], 0.5))
        self.assertEqual(lines[0]["bytes_up"], 3 * 24)  # each tensor's block has its header

    def test_capacity_keeps_entries_back_and_says_how_many(self):
        lines, _ = self.lines(random_values(1000), "threshold", "threshold=0.5", "density=0.01", "capacity=2")
        self.assertEqual(lines[0]["count"], 20)
        self.assertEqual(lines[0]["over_capacity"], int((np.abs(random_values(1000)) >= 0.5).sum()) - 20)

    def test_clip_and_lr_change_the_gradient_before_it_is_compressed(self):
        # Two ranks: the norm 5 is clipped to sqrt(2) * 2.
        lines, _ = self.lines(np.reshape([3.0, 4, 0, 0], (1, 2, 2)), "topk", "density=1", "clip=2")
        self.assertAlmostEqual(lines[0]["values"][1] / (4 * 2**0.5 * 2 / 5), 1, delta=1e-7)
        lines, _ = self.lines(np.array([3.0, 4]), "topk", "density=1", "lr_inside=true", "lr=0.5")
        self.assertEqual(lines[0]["values"], [1.5, 2])

    def test_a_recording_of_a_run_gives_the_lines_of_its_array(self):
        steps = random_values(3, 50)
        lines, _ = self.lines(steps, "topk", "density=0.1")
        os.unlink(self.input)
        self.input = str(self.folder / "gradients.safetensors")
        pathlib.Path(self.input).write_bytes(recording(steps))
        sparsify.sparsify(self.input, "topk", self.out, ["density=0.1"])
        self.assertEqual([json.loads(line) for line in pathlib.Path(self.out).read_text().splitlines()], lines)

    def test_an_array_of_no_steps_gives_no_lines(self):
        self.assertEqual(self.lines(np.zeros((0, 5)), "topk")[0], [])

    def test_numbers_read_back_to_the_same_double(self):
        lines, _ = self.lines(np.array([0.1, 1e-30, -3e38, 2]), "topk", "density=1")
        self.assertEqual(lines[0]["values"], np.array([0.1, 1e-30, -3e38, 2], np.float32).tolist())


class Refusals(Case):
    def refused(self, parts, *settings, weights="", method="topk"):
        with self.subTest(settings=settings, weights=weights, method=method):
            with self.assertRaises((sparsify.Refusal, sparsify.topknot.Error)) as caught:
                sparsify.sparsify(self.input, method, self.out, list(settings), weights)
            for part in parts:
                self.assertIn(part, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))
            self.assertEqual(self.files(), 1)

    def test_options_and_input_are_validated_and_no_output_is_left(self):
        np.save(self.input, np.ones((2, 3, 4)))
        self.refused(["top_k", "did you mean", "topk"], method="top_k")
        self.refused(["capcity", "did you mean", "capacity"], "capcity=2")
        self.refused(["compress.density"], "density=0")
        self.refused(["compress.density", "1.5"], "density=1.5")
        self.refused(["compress.mu", "x"], "density=0.1", "mu=x", method="regtopk")
        self.refused(["compress.clip", "x"], "clip=x")
        self.refused(["train.epochs", "training"], "train.epochs=3")
        self.refused(["compress.warmup", "epochs"], "compress.warmup=0.1")
        self.refused(["--compressor"], "name=topk")
        self.refused(["unknown key", "threads"], "threads=2")
        self.refused(["scope", "tensor"], method="lags")
        self.refused(["scope"], "scope=all")
        self.refused(["memory", "nothing"], "memory=nothing")
        self.refused(["capacity"], "capacity=0.5")
        self.refused(["key=value"], "g.npy")
        self.refused(["given twice"], "density=0.1", "compress.density=0.2")
        self.refused(["--weights", "2 weights", "3 ranks"], weights="1,2")
        for wrong in ("-2", "nan", ""):
            self.refused(["--weights", f"'{wrong}'"], weights=f"1,2,{wrong}")
        self.refused(["--tensors", "6 elements", "4"], "tensors=2x3")
        for wrong in ("2xx2", "2x2x", "0x4", "99999999x99999999"):
            self.refused(["--tensors", wrong], f"tensors={wrong}")
        for shape, parts in [((2, 1025, 1), ["[2, 1025, 1]", "1025 ranks", "1024"]), ((2, 0, 2), ["no ranks"]),
                             ((1, 1, 2, 2), ["[1, 1, 2, 2]", "[steps, ranks, d]"]), ((2, 1, 0), ["no elements"])]:  # fmt: skip
            np.save(self.input, np.ones(shape))
            self.refused(parts)

    def test_files_that_are_no_arrays_of_floats_are_refused(self):
        for values, part in [(np.ones(3, np.int64), "int64"), (np.ones(3, ">f4"), "little-endian"), (np.array({}), "numbers"),
                             (np.asfortranarray(np.ones((2, 3))), "Fortran")]:  # fmt: skip
            np.save(self.input, values)
            self.refused(["g.npy", part])
        np.save(self.input, np.ones(100))
        os.truncate(self.input, 300)
        self.refused(["g.npy"])
        pathlib.Path(self.input).write_text("no array")
        self.refused(["g.npy"])

    def test_files_that_are_no_recordings_are_refused(self):
        self.input = str(self.folder / "gradients.safetensors")
        self.assertRaises(sparsify.Refusal, sparsify.sparsify, self.input, "topk", self.out, [])
        whole = recording(random_values(2, 3))
        others = [recording(random_values(2, 3), **more) for more in ({"name": "weights"}, {"dtype": "BF16"})]
        long = (1 << 40).to_bytes(8, "little") + whole[8:128]
        for content in (b"", b"no recording", b"\xff" * 200, whole[:50], whole[:-1], whole[:-4], whole + b"more", long, *others):
            pathlib.Path(self.input).write_bytes(content)
            self.refused([self.input])


class Program(Case):
    def setUp(self):
        super().setUp()
        np.save(self.input, np.reshape(np.array([1, -4, 2, 0.5, 0, 8, 1, 1, 1, 2, 2, 2], np.float32), (2, 2, 3)))

    def refused(self, ended, *words):
        self.assertEqual(ended.returncode, 2, ended.stderr)
        self.assertTrue(ended.stderr.startswith("sparsify: ") and ended.stderr.count("\n") == 1, ended.stderr)
        for word in words:
            self.assertIn(word, ended.stderr)

    def test_it_writes_its_lines_and_sums_them_up(self):
        ended = program(self.input, "--compressor", "topk", "--density", "0.4", "--weights", "1,3", "--out", self.out)
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertIn("2 steps of 2 ranks, 3 elements; mean count 1 = 1 k", ended.stderr)
        self.assertIn("24 up, 24 down; dense over up: 0.5", ended.stderr)
        lines = pathlib.Path(self.out).read_text().splitlines()
        self.assertEqual(lines[0], '{"step":0,"rank":0,"count":1,"threshold":4,"indices":[1],"values":[-4],"bytes_up":24}')
        self.assertEqual(
            lines[2], '{"step":0,"aggregate":true,"indices":[1,2],"values":[-1,6],"bytes_down":[24,24],"dense_bytes":12}'
        )
        self.assertEqual(self.files(), 2)

    def test_standard_output_links_and_devices_are_written_and_not_replaced(self):
        command = [self.input, "--compressor", "topk", "memory=none", "--density", "1", "--out"]
        for out in ("-", "/dev/stdout"):
            self.assertEqual(program(*command, out).stdout.count('"aggregate":true'), 2)
        self.assertEqual(program(*command, "/dev/null").returncode, 0)
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/null").st_mode))
        (self.folder / "real.jsonl").touch()
        os.symlink("real.jsonl", self.folder / "link.jsonl")
        for _ in range(2):  # its own output is replaced
            self.assertEqual(program(*command, str(self.folder / "link.jsonl")).returncode, 0)
        self.assertTrue((self.folder / "link.jsonl").is_symlink())
        self.assertGreater((self.folder / "real.jsonl").stat().st_size, 0)

    def test_it_prints_its_help_and_the_compressors(self):
        for arguments in (["--help"], []):
            ended = program(*arguments)
            self.assertEqual(ended.returncode, 0)
            for word in ("--weights", "--tensors", "Examples:\n  ", "key=value"):
                self.assertIn(word, ended.stdout)
        listed = program("--list").stdout
        self.assertTrue("\ntopk  " in listed and "dense  " in listed)
        if os.path.exists("/dev/full"):
            with open("/dev/full", "w") as full:
                ended = subprocess.run([sys.executable, PROGRAM, "--list"], stdout=full, stderr=subprocess.PIPE, text=True)
            self.refused(ended, "standard output cannot be written: ")
            command = [sys.executable, PROGRAM, self.input, "--compressor", "topk", "--out", "-"]
            with open("/dev/full", "w") as full:
                ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
            self.refused(ended, "standard output: cannot be written: No space left")

    def test_it_validates_its_arguments(self):
        out = ["--out", self.out]
        self.refused(program("--compressor", "topk", *out), "no input")
        self.refused(program(self.input, *out), "--compressor", "--list")
        self.refused(program(self.input, "--compressor", "topk"), "--out")
        self.refused(program(self.input, "--compresor", "topk", *out), "--compresor", "--help")
        self.refused(program(self.input, "--compressor", "topk", "--density", "2", *out), "compress.density")
        self.refused(program(self.input, "--compressor", "topk", "--density", "0.1", "density=0.2", *out), "given twice")
        self.refused(program(str(self.folder / "absent.npy"), "--compressor", "topk", *out), "absent.npy")
        self.assertEqual(self.files(), 1)

    def test_outputs_that_cannot_be_written_are_refused_and_nothing_is_left(self):
        command = [self.input, "--compressor", "topk", "--out"]
        self.refused(program(*command, str(self.folder / "no" / "out.jsonl")), "no/out.jsonl", "No such file")
        self.refused(program(*command, str(self.folder)), "is a folder")
        self.refused(program(*command, self.input), "is the input")
        with tempfile.TemporaryDirectory() as other:
            (path := pathlib.Path(other, "config.yaml")).write_text("seed: 1\n")
            self.refused(program(*command, str(path)), "config.yaml: exists already")
            self.assertEqual(path.read_text(), "seed: 1\n")
        self.refused(program(*command, "/dev/full"), "/dev/full", "No space left")
        self.assertEqual(self.files(), 1)

    def test_an_earlier_output_stays_as_it_was_where_a_run_fails(self):
        earlier = '{"step":0,"rank":0,"count":0}\n'
        pathlib.Path(self.out).write_text(earlier)
        # A limit on the size of files stands in for a disk that fills up on the way.
        np.save(self.input, np.ones((400, 100), np.float32))
        command = f"ulimit -f 16; exec {sys.executable} {PROGRAM} {self.input} --compressor topk --density 1 --out {self.out}"
        ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
        self.refused(ended, "out.jsonl", "File too large")
        self.assertEqual((pathlib.Path(self.out).read_text(), self.files()), (earlier, 2))

    def test_a_run_that_is_interrupted_leaves_nothing_but_an_earlier_output(self):
        earlier = '{"step":0,"rank":0,"count":0}\n'
        for number in (signal.SIGINT, signal.SIGTERM):
            pathlib.Path(self.out).write_text(earlier)
            np.save(self.input, np.ones((2000, 20000), np.float32))
            with subprocess.Popen([sys.executable, PROGRAM, self.input, "--compressor", "topk", "--density", "0.5", "--out", self.out],
                                  stderr=subprocess.PIPE, text=True) as running:  # fmt: skip
                while running.poll() is None and not any("part" in path.name for path in self.folder.iterdir()):
                    time.sleep(0.01)  # the part appears when the run has begun
                running.send_signal(number)
                text = running.communicate(timeout=60)[1]
            self.assertEqual((running.returncode, text), (128 + number, "sparsify: interrupted; no output was written\n"))
            self.assertEqual((pathlib.Path(self.out).read_text(), self.files()), (earlier, 2))

    def test_keys_without_effect_are_reported(self):
        command = [self.input, "--out", self.out, "--compressor"]
        self.assertIn("note: compress.mu is for regtopk and changes nothing here", program(*command, "topk", "mu=3").stderr)
        self.assertIn("note: without --tensors the input is one vector", program(*command, "powersgd").stderr)
        self.assertNotIn("note: without", program(*command, "powersgd", "--tensors", "3").stderr)
        ended = program(*command, "topk", "momentum=0.5", "lr=2")
        self.assertTrue(
            re.search("note: momentum has no effect.*\n.*note: lr has no effect|note: lr", ended.stderr), ended.stderr
        )


if __name__ == "__main__":
    unittest.main(verbosity=2)
