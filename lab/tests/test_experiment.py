"""lab/experiment and its studies. Golden values: computed in float64, ties by lower index.

python3 lab/tests/test_experiment.py
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import numpy as np
except ImportError:
    print("skipped: no numpy")
    sys.exit(0)

LAB = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = str(LAB / "experiment")
sys.path.insert(0, str(LAB))
from studies import accuracy, common, regtopk, selection  # noqa: E402

PLOTS = common.pyplot() is not None
STEPS, NUMEL = 12, 3000


def program(*arguments, **more):
    return subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=120, **more)


def normal_gradients():
    return np.random.default_rng(5).standard_normal((STEPS, NUMEL)).astype(np.float32)


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def at(self, name):
        return str(self.folder / name)

    def rows(self, name):
        return [json.loads(line) for line in (self.folder / "out" / name).read_text().splitlines()]

    def refused(self, parts, *arguments):
        with self.subTest(arguments=arguments):
            ended = program(*arguments, "out=" + self.at("out"))
            self.assertEqual((ended.returncode, ended.stderr.count("\n")), (2, 1), ended.stderr)
            self.assertTrue(ended.stderr.startswith("experiment: "), ended.stderr)
            for part in parts:
                self.assertIn(part, ended.stderr)


class Toy(Folder):
    def test_top_k_stands_still_for_99_steps_and_regtopk_follows_dense(self):
        near = lambda found, golden, rel: self.assertTrue(math.isclose(found, golden, rel_tol=rel), (found, golden))
        loss, weights, _ = regtopk.toy_trace("dense", {}, 150)
        near(loss[0], 0.313261688, 3e-9)
        near(loss[150], 0.00735508407946996, 1e-7)
        self.assertEqual(weights[150][0], 0)
        near(weights[150][1], 4.908683697, 1e-7)

        loss, weights, sent = regtopk.toy_trace("topk", {}, 150)
        # Step 99 is a tie in exact arithmetic: the residual's sum of 100 equal parts, rounded, against the whole.
        for value in loss[:100]:
            near(value, 0.313261687518, 1e-11)
        near(loss[101], 1e-11, 0.3)
        self.assertEqual(weights[101][0], 0)
        near(weights[101][1], 25.2, 0.02)
        self.assertEqual(sent[:100], [[0, 0]] * 99 + [[1, 1]])

        for mu in (1.0, 2.0, 4.0):
            loss, weights, sent = regtopk.toy_trace("regtopk", {"mu": mu}, 150)
            for t, golden in [(1, 0.313261688), (2, 0.204333766), (4, 0.150618317), (10, 0.0836587674), (50, 0.0209239622),
                              (150, 0.00726312926)]:  # fmt: skip
                near(loss[t], golden, 1e-7)
            self.assertEqual(weights[150][0], 0)
            near(weights[150][1], 4.921310752529, 1e-7)
            self.assertEqual(sent, [[t % 2, t % 2] for t in range(150)])

    def test_the_program_writes_its_table_and_files(self):
        ended = program("toy", "iterations=3", "mu=4", "out=" + self.at("out"))
        self.assertEqual(ended.returncode, 0, ended.stderr)
        lines = ended.stdout.splitlines()
        self.assertEqual(lines[:2], ["Loss after so many steps", "step        dense         topk  regtopk A, mu 4"])
        self.assertEqual(lines[5], "2     0.211919378  0.313261688      0.204333762")
        self.assertEqual("Plots need matplotlib" in ended.stdout, not PLOTS)
        self.assertEqual((self.folder / "out" / "toy.svg").exists(), PLOTS)
        rows = self.rows("toy.jsonl")
        self.assertEqual(len(rows), 4 * 3)
        self.assertEqual(rows[1], {"step": 0, "method": "topk", "loss": rows[0]["loss"], "weights": [0.0, 1.0], "sends": [0, 0]})
        self.assertEqual((rows[2]["mu"], rows[5]["sends"]), (4.0, [1, 1]))
        csv = (self.folder / "out" / "toy.csv").read_text().splitlines()
        self.assertEqual(csv[0], 'step,"dense","topk","regtopk A, mu 4"')
        self.assertEqual(float(csv[3].split(",")[1]), rows[6]["loss"])

    def test_without_matplotlib_everything_but_the_plot_is_written(self):
        (self.folder / "matplotlib.py").write_text("raise ImportError")
        paths = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        ended = program("toy", "iterations=3", "out=" + self.at("out"), env={**os.environ, "PYTHONPATH": paths})
        self.assertEqual((ended.returncode, ended.stdout.count("Plots need matplotlib")), (0, 1))
        self.assertEqual(sorted(os.listdir(self.at("out"))), ["toy.csv", "toy.jsonl"])


class Regression(Folder):
    def test_with_s_0_6_regtopk_a_converges_where_top_k_stands_still(self):
        problems = [regtopk.regression_problem(seed) for seed in (1, 2, 3, 4, 5)]
        median = lambda method, keys: np.median([regtopk.regression_distance(p, method, keys, 0.6, 1000) for p in problems])
        self.assertGreater(median("topk", {}), -3.5)
        self.assertLess(median("regtopk", {"mu": 4.0, "variant": "A"}), -7)

    def test_the_optimum_is_where_the_ranks_gradients_cancel(self):
        problem = regtopk.regression_problem(11)
        gradients = problem.matrix @ problem.optimum - problem.rhs
        self.assertEqual(gradients.shape, (20, 100))
        self.assertGreater(np.abs(gradients).max(), 1)  # the workers disagree
        self.assertLess(np.abs(gradients.sum(0)).max(), 1e-10)

    def test_random_numbers_are_those_of_the_c_program(self):
        # Philox4x32-10 of the counter 0 and key 0, by the authors' known answers; and the first rows of seed 1.
        self.assertEqual(
            regtopk.words(0, 0, 1, 0, 0)[0].astype(np.uint32).tolist(), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
        )
        self.assertAlmostEqual(regtopk.regression_distance(regtopk.regression_problem(1), "dense", {}, 1, 300), -3.8438133909, 4)

    def test_the_program_writes_its_table_and_files(self):
        ended = program("regression", "iterations=20", "s=0.6,1", "seeds=1,2", "mu=4", "out=" + self.at("out"))
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertIn("14 runs of 20 steps, 20 workers, J = 100", ended.stdout)
        self.assertIn("regtopk B, mu 4", ended.stdout)
        rows = self.rows("regression.jsonl")
        self.assertEqual(len(rows), 14)
        self.assertEqual(list(rows[0]), ["method", "seed", "iterations", "log10_squared_distance"])
        self.assertEqual(list(rows[-1]), ["method", "variant", "mu", "S", "seed", "iterations", "log10_squared_distance"])
        csv = (self.folder / "out" / "regression.csv").read_text().splitlines()
        self.assertEqual(csv[0], "method,S,median,least,greatest,seed 1,seed 2")
        self.assertEqual(len(csv), 1 + 4 * 2)
        last = [float(cell) for cell in csv[-1].split(",")[3:]]
        self.assertEqual((last[1], last[2]), (min(last[3:]), max(last[3:])))


class Accuracy(Folder):
    HEADER = "run,seeds,accuracy,spread,ratio_up,sent_per_step,received_per_step,seconds,skipped_steps\n"

    def summary(self, text):
        (self.folder / "summary.csv").write_text(text)
        return "in=" + self.at("summary.csv")

    def test_a_line_a_method_and_dense_as_the_reference(self):
        given = self.summary(self.HEADER + "dense,3,66.71,0.60,1.00,1,1,1,0\ntopk-d0.01,1,62.49,,79,1,1,1,0\n"
                             "topk-d0.001,1,42.65,,724,1,1,1,0\nrandk-d0.01,1,10.08,,80,1,1,1,0\ndgc_full,1,60,,100,1,1,1,0\n")  # fmt: skip
        methods, dense = accuracy.read(given[3:])
        self.assertEqual(dense, 66.71)
        self.assertEqual(methods, {"randk": [(0.01, 10.08, 80)], "topk": [(0.001, 42.65, 724), (0.01, 62.49, 79)]})
        ended = program("accuracy", given, "out=" + self.at("out"))
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertIn("topk      0.001             42.65              724", ended.stdout)
        if PLOTS:
            svg = (self.folder / "out" / "accuracy.svg").read_text()
            for text in ("topk", "randk", "dense", "test accuracy, %"):
                self.assertIn(text, svg)
            self.assertNotIn("dgc_full", svg)

    def test_what_is_no_summary_is_refused(self):
        self.refused(["in=FILE is missing"], "accuracy")
        for text, part in [("a,b\n", "not a summary.csv"), (self.HEADER, "no row is named"),
                           (self.HEADER + "topk-d0.1,1,x,,1,1,1,1,0\n", "holds no number"),
                           (self.HEADER + "topk-dx,1,3,,1,1,1,1,0\n", "holds no number"),
                           (self.HEADER + "topk-d0,1,3,,1,1,1,1,0\n", "above 0")]:  # fmt: skip
            self.refused([part], "accuracy", self.summary(text))


class Keys(unittest.TestCase):
    KEYS = [("iterations", "2500", ""), ("s", "0.1,0.6", ""), ("out", "x", "")]

    def made(self, *given):
        return common.Arguments("regression", self.KEYS, given)

    def refused(self, part, call):
        with self.assertRaises(common.Refusal) as caught:
            call()
        self.assertIn(part, str(caught.exception))

    def test_defaults_lists_and_clear_refusals(self):
        arguments = self.made("iterations=10")
        self.assertEqual(arguments.whole("iterations", 1, 100), 10)
        self.assertEqual(arguments.numbers("s", 0, 1), [0.1, 0.6])
        self.refused("did you mean 'iterations'", lambda: self.made("iteration=1"))
        self.refused("not key=value", lambda: self.made("iterations"))
        self.refused("twice", lambda: self.made("s=1", "s=2"))
        self.refused("iterations of experiment regression needs a whole number from 1 to 10000, not '1e3'",
                     lambda: self.made("iterations=1e3").whole("iterations", 1, 10000))  # fmt: skip
        for bad in ("s=", "s=0.1,,0.2", "s=2", "s=nan", "s=0.5x", "s=0.1, 0.2"):
            self.refused("numbers from 0 to 1", lambda: self.made(bad).numbers("s", 0, 1))

    def test_the_program_knows_its_experiments(self):
        for arguments in ([], ["--help"]):
            self.assertIn("Examples:\n  experiment toy", program(*arguments).stdout)
        self.assertIn("(default: 2500)", program("regression", "--help").stdout)
        for arguments, part in [(["regresion"], "did you mean 'regression'"), (["--wrong"], "unknown flag")]:
            ended = program(*arguments)
            self.assertEqual(ended.returncode, 2)
            self.assertIn(part, ended.stderr)


class Selection(Folder):
    def test_every_selector_is_measured_topk_first_and_threshold_last(self):
        names = list(dict.fromkeys(keys["select"] for _, keys in selection.selectors()))
        self.assertEqual((names[0], names[-1]), ("topk", "threshold"))
        self.assertEqual(sorted(names), sorted(common.topknot.methods()["pieces"]["select"]))

    def naive_energy(self, gradients, density, skip):
        """Topk and residual by the definition."""
        residual, shares = np.zeros(NUMEL, np.float32), []
        for t, gradient in enumerate(gradients):
            residual += gradient
            chosen = np.argsort(-np.abs(residual), kind="stable")[: int(density * NUMEL)]
            squares = residual.astype(np.float64) ** 2
            if t >= skip:
                shares.append(squares[chosen].sum() / squares.sum())
            residual[chosen] = 0
        return np.mean(shares)

    def test_topk_has_exactly_k_and_its_own_energy_and_others_are_held_against_it(self):
        gradients, methods, densities = normal_gradients(), selection.selectors(), [0.1, 0.01]
        rows = selection.quality(methods, densities, gradients, 4)
        self.assertEqual([(r["density"], r["selector"]) for r in rows], [(d, label) for d in densities for label, _ in methods])
        for row in rows:
            with self.subTest(**row):
                self.assertEqual(row["steps"], STEPS - 4)
                if row["selector"] != "chunk_topk":  # k of each chunk
                    self.assertEqual(row["k"], 300 if row["density"] == 0.1 else 30)
                self.assertTrue(row["count_least"] <= row["count_mean"] <= row["count_greatest"])
                if row["selector"] == "topk":
                    exact = {row[key] for key in ("count_least", "count_mean", "count_greatest", "within_10_percent")}
                    self.assertEqual((exact, row["energy_to_topk"]), ({1.0}, 1.0))
                    naive = self.naive_energy(gradients, row["density"], 4)
                    self.assertTrue(math.isclose(row["energy"], naive, rel_tol=1e-12), (row["energy"], naive))
                if row["selector"] == "randk":
                    self.assertEqual(row["count_mean"], 1)
                    self.assertLess(row["energy_to_topk"], 0.6)  # the k largest of a normal vector hold far more than any k
                    self.assertTrue(math.isclose(row["energy"], row["density"], rel_tol=0.6))
                if row["selector"] == "threshold":  # topk's median k-th magnitude: too many in some steps, too few in others
                    self.assertTrue(row["count_least"] < 1 < row["count_greatest"])
                if row["count_greatest"] <= 1:  # no k entries hold more than the k largest
                    self.assertLessEqual(row["energy_to_topk"], 1)

    def test_a_vector_of_zeros_has_nothing_to_capture(self):
        row = selection.quality_of("topk", {"select": "topk"}, 0.01, np.zeros((3, 500), np.float32), 0)
        self.assertEqual(row["count_mean"], 1)
        self.assertTrue(math.isnan(row["energy"]))

    def test_cost_is_measured_for_every_selector_with_topks_k(self):
        methods = selection.selectors()
        for threads in (1, 2):
            rows = selection.cost(methods, 5000, 0.01, 3, 2, threads)
            self.assertEqual([r["selector"] for r in rows], [label for label, _ in methods])
            for row in rows:
                self.assertEqual((row["size"], row["rounds"], row["threads"]), (5000, 3, threads))
                self.assertTrue(row["step_ms"] > 0 and row["ratio_quartile_1"] <= row["ratio"] <= row["ratio_quartile_3"], row)
            self.assertEqual((rows[0]["k"], rows[0]["count_per_k"]), (50, 1))

    def test_tables_and_plots_of_both_parts_are_written(self):
        np.save(self.at("g.npy"), normal_gradients())
        ended = program(
            "selection",
            "in=" + self.at("g.npy"),
            "densities=0.1",
            "skip=2",
            "max_log2=16",
            "rounds=1",
            "out=" + self.at("out"),
        )
        self.assertEqual(ended.returncode, 0, ended.stderr)
        labels = [label for label, _ in selection.selectors()]
        quality, cost = self.rows("selection_quality.jsonl"), self.rows("selection_cost.jsonl")
        self.assertEqual(([r["selector"] for r in quality], [r["selector"] for r in cost]), (labels, labels))
        self.assertEqual(({r["size"] for r in cost}, quality[0]["energy_to_topk"]), ({65536}, 1.0))
        plots = ["selection_count.svg", "selection_energy.svg", "selection_cost.svg"] if PLOTS else []
        for name in ["selection_quality.csv", "selection_cost.csv", *plots]:
            text = (self.folder / "out" / name).read_text()
            for label in labels:
                self.assertIn(label, text)

    def test_wrong_input_gets_one_clear_message(self):
        def array(name, values):
            np.save(self.at(name), values)
            return "in=" + self.at(name)

        ones = np.ones(24, np.float32)
        self.refused(["none.npy"], "selection", "in=" + self.at("none.npy"))
        self.refused(["has shape [24]", "[steps, elements]"], "selection", array("flat.npy", ones))
        self.refused(["[2, 3, 4]"], "selection", array("ranks.npy", ones.reshape(2, 3, 4)))
        short = array("short.npy", ones.reshape(4, 6))
        self.refused(["skip is 4", "has 4 steps"], "selection", short, "skip=4")
        ones[13] = np.nan
        self.refused(["step 2 has a NaN"], "selection", array("nan.npy", ones.reshape(4, 6)), "skip=0")
        self.refused(["did you mean 'max_log2'"], "selection", "max_log=16")
        self.refused(["needs 0, or 16 to 30"], "selection", "max_log2=12")
        self.refused(["nothing to do"], "selection", "max_log2=0")
        self.refused(["densities of experiment selection"], "selection", short, "densities=2")
        self.refused(["density of experiment selection"], "selection", "max_log2=16", "density=0")
        # Of the part that does not run too.
        for key in ("densities", "skip"):
            self.refused([key + " of experiment selection"], "selection", "max_log2=16", "rounds=1", key + "=abc")
        for key in ("density", "rounds", "threads"):
            self.refused([key + " of experiment selection"], "selection", short, "skip=0", "max_log2=0", key + "=abc")


if __name__ == "__main__":
    unittest.main(verbosity=2)
