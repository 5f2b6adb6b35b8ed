"""compare: what it reads, what it computes, and what it writes. Without matplotlib the tests of pictures are left out.

python3 python/tests/test_compare.py
"""

from __future__ import annotations

import contextlib
import csv
import html
import io
import json
import math
import os
import pathlib
import pty
import random
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from topknot.compare import cli, page, style, tables
from topknot.compare.comparison import Comparison, compare_runs, families_of, value_text
from topknot.compare.read import (
    ACCURACY,
    PERPLEXITY,
    SQUARED_ERROR,
    WORD_ERRORS,
    UserError,
    one_line,
    read_run,
    read_runs,
    stat_of,
)

if style.AVAILABLE:
    from topknot.compare import charts

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAN = math.nan
TASK = "synthetic_images, 10 classes, samples [3, 32, 32]"
TOPK = {"compress.name": "topk"}
DEFAULTS = dict(pair.split("=") for pair in (
    'seed=1 model.name=mlp data.name=synthetic_images data.classes=0 data.image_size=0 data.batch_size=32 optimizer.lr=0.1 compress.name=dense '
    'compress.density=0.001 compress.values="" exchange.merge=none dist.ranks=1 dist.master="" dist.token="" train.algorithm_cache="" '
    'train.check_every=50').split())  # fmt: skip
HEADER = "run,seed,commit,metric,value,held_out,checksum,steps,sent_per_step,received_per_step,dense_per_step,seconds,skipped_steps,config,keys\n"
needs_matplotlib = unittest.skipUnless(style.AVAILABLE, "matplotlib is not installed")


def row(name, seed, value, sent, keys):
    return f"{name},{seed},abc1234,accuracy,{value},,00000000deadbeef,10,{sent},{3 * sent},4000,12.5,0,configs/a.yaml,{keys}\n"


class Folder(unittest.TestCase):
    """Run directories with plain numbers, the dense "d" among them: every step takes `step_seconds`, the accuracy rises to `best`,
    then falls by 0.01."""

    def setUp(self):
        temp = tempfile.TemporaryDirectory()
        self.addCleanup(temp.cleanup)
        self.path = temp.name
        self.add("d")

    def at(self, name):
        return f"{self.path}/{name}"

    def write(self, name, text):
        os.makedirs(os.path.dirname(self.at(name)), exist_ok=True)
        with open(self.at(name), "w", newline="") as file:
            file.write(text)
        return self.at(name)

    def append(self, name, *records):
        with open(self.at(name) + "/metrics.jsonl", "a") as file:
            for record in records:
                file.write(json.dumps(record, separators=(",", ":")).replace("NaN", "null") + "\n")

    def add(self, name, keys=None, step_seconds=0.1, best=0.8, bytes=4000, complete=True, metric=ACCURACY, steps=20, every=1, network="threads",
            task=TASK, held_out_loss=0, second=0, diverges=False, slower=False, measured=1, **other):  # fmt: skip
        given = keys or {}
        lines, section = [], ""
        for key, value in {**DEFAULTS, **given, "output.dir": json.dumps(self.at(name))}.items():
            part, _, last = key.rpartition(".")
            lines += [f"{part}:"] if part and part != section else []
            section = part
            lines.append(("  " if part else "") + f"{last}: {value}" + ("  # command line" if key in given else ""))
        self.write(f"{name}/config.yaml", "\n".join(lines) + "\n")
        self.write(f"{name}/environment.json", json.dumps({"host": "node1", "cpu": "a cpu", "revision": "abc1234"}))
        self.write(f"{name}/metrics.jsonl", "")
        if metric:
            self.append(name, {"event": "start", "step": 0, "backend": network, "task": task, "metric": metric.name, "metric_unit": metric.unit,
                               "higher_is_better": metric.higher_is_better, "metric_set": metric.set, "revision": "abc1234"})  # fmt: skip
        accuracy = not metric or metric.name == "accuracy"
        for i in range(1, steps + 1):
            known = bool(measured) and i % measured == 0
            parts = {"forward_s": 0.001 * i if slower else 0.02, "backward_s": 0.03, "communicate_s": 0.015, "exposed_s": 0.01}
            parts.update(dict.fromkeys(("data_s", "encode_s", "decode_s", "update_s"), 0.0))
            step = {"event": "step", "rank": 0, "step": i, "epoch": 0.1 * i, "time_s": step_seconds * i, "loss": 2 / i, "bytes_sent": bytes,
                    "bytes_dense": 4000, "images_per_second": 10 / step_seconds, **{k: v if known else None for k, v in parts.items()}}  # fmt: skip
            if i % every == 0:
                self.append(name, step)
            if i % 5:
                continue
            figures = {"test_loss": None if diverges and i == steps else 1 / i}
            if accuracy:
                figures["test_accuracy"] = best - 0.01 if i == steps else best * min(i, 15) / 15
            which = "top5_accuracy" if accuracy else "bits_per_byte" if metric == PERPLEXITY else "character_error_rate"
            figures["test_" + which] = second - 0.02 * (i - 5) if second else 0
            self.append(name, {"event": "eval", "step": i, "epoch": 0.1 * i, "time_s": step_seconds * i, **figures})
        if complete:
            end = {"event": "end", "steps": steps, "wall_seconds": step_seconds * steps, "bytes_sent": bytes * steps, "bytes_dense": 4000 * steps,
                   "images_per_second": 10 / step_seconds, "held_out_loss": held_out_loss, "parameter_checksum": "00000000deadbeef",
                   "eval_seconds": 0, "startup_seconds": 0, "step_p50_s": 0, "step_p95_s": 0, **other}  # fmt: skip
            if accuracy:
                end.update(test_accuracy=best - 0.01, best_test_accuracy=best)
            self.append(name, end)
        return self.at(name)

    def compare(self, *names, target=None, baseline=None) -> Comparison:
        return compare_runs([read_run(self.at(name)) for name in names], target, baseline)

    def text(self, *names, **options):
        return tables.comparison_text(self.compare(*names, **options))

    def refused(self, call, *parts):
        with self.assertRaises(UserError) as caught:
            call()
        for part in parts:
            self.assertIn(part, str(caught.exception))

    def says(self, text, *parts):
        for part in parts:
            self.assertIn(part, text)

    def lacks(self, text, *parts):
        for part in parts:
            self.assertNotIn(part, text)


class ComparisonTest(Folder):
    def test_seeds_of_one_configuration_are_one_method_and_dense_comes_first(self):
        self.add("t1", {**TOPK, "seed": "1"}, best=0.7)
        apart = {"train.algorithm_cache": "none", "dist.master": "127.0.0.1:29501", "dist.token": "second"}
        self.add("t2", {**TOPK, "seed": "2", **apart}, best=0.8)
        c = self.compare("t1", "t2", "d")
        self.assertEqual([m.name for m in c.methods], ["dense", "topk"])
        topk = c.methods[1]
        self.assertEqual(topk.runs, c.runs[:2])
        self.assertAlmostEqual(topk.best.mean, 0.75)
        self.assertAlmostEqual(topk.best.deviation, math.sqrt(0.005))
        self.assertAlmostEqual(topk.last.mean, 0.74)
        self.assertEqual(c.differing, ["compress.name"])
        self.assertEqual(value_text(c.metric, topk.best), "75.0 ± 7.1 %")

    def names(self, *runs):
        return [m.name for m in self.compare(*runs).methods]

    def test_methods_of_one_compressor_are_named_by_what_differs(self):
        self.add("a", {**TOPK, "compress.density": "0.01"})
        self.add("b", TOPK)
        self.add("int8", {**TOPK, "compress.values": "int8"})
        self.assertEqual(self.names("a", "b", "d"), ["dense", "topk density 0.01", "topk density 0.001"])
        self.assertEqual(self.names("d", "b", "int8"), ["dense", "topk", "topk int8 values"])
        self.add("brace", {**TOPK, "compress.{a": "{b}"})
        self.assertEqual(self.names("b", "brace"), ["topk", "topk {a {b}"])

    def add_long(self, name, method, density, seed=1):
        keys = {"compress.name": method, "compress.density": density, "optimizer.lr": density}
        self.add(name, {**keys, "exchange.merge": "size:" + density[2:], "seed": str(seed)})

    def test_where_many_keys_differ_few_of_them_or_the_folders_make_the_names(self):
        for seed in (1, 2):
            self.add_long(f"dgc_slow-s{seed}", "dgc", "0.01", seed)
        self.add_long("my_dgc", "dgc", "0.02")
        self.add_long("topk", "topk", "0.01")
        self.assertEqual(self.names("dgc_slow-s1", "dgc_slow-s2", "my_dgc", "topk"), ["dgc_slow", "my_dgc", "topk"])
        # Not where one says nothing of its compressor, two methods are called the same, or a method's runs are not.
        self.add_long("fast", "dgc", "0.03")
        self.add_long("dgc_slow-s3", "dgc", "0.04")
        self.add_long("other_dgc", "dgc", "0.01", 3)
        self.assertEqual(self.names("dgc_slow-s1", "fast"), ["dgc density 0.01", "dgc density 0.03"])
        self.assertEqual(self.names("dgc_slow-s1", "dgc_slow-s3"), ["dgc density 0.01", "dgc density 0.04"])
        self.assertEqual(self.names("dgc_slow-s1", "other_dgc", "my_dgc"), ["dgc density 0.01", "dgc density 0.02"])

    def test_local_steps_are_named_by_steps_k_of_a_chunk_and_bits(self):
        for name, every, density, values, chunk in [("a", 10, 1 / 64, "centroid1", 4096), ("b", 10, 1 / 32, "centroid1", 4096),
                                                    ("c", 10, 1 / 64, "centroid2", 4096), ("d", 5, 1 / 64, "centroid1", 4096),
                                                    ("e", 10, 1 / 64, "centroid1", 1024)]:  # fmt: skip
            keys = {
                "compress.density": str(density),
                "compress.values": values,
                "compress.chunk": str(chunk),
                "exchange.every": str(every),
            }
            self.add(name, {"compress.name": "sparseloco", **keys})
        self.add("dense", {"exchange.every": "0"})
        self.add("local", {"exchange.every": "10"})
        self.add("topk", {**TOPK, "exchange.every": "10"})
        names = self.names("dense", "local", "a", "b", "c", "d")
        self.assertEqual(names, ["dense", "dense every 10", *(f"sparseloco every {text}" for text in (
            "10, 64 of 4,096, 1 bit", "10, 128 of 4,096, 1 bit", "10, 64 of 4,096, 2 bits", "5, 64 of 4,096, 1 bit"))])  # fmt: skip
        self.assertEqual(self.names("a", "e", "topk"), ["sparseloco 64 of 4,096", "sparseloco 16 of 1,024", "topk"])
        families = {name: len(members) for name, members in families_of(self.compare("a", "b", "e")).items()}
        self.assertEqual(families, {"sparseloco chunks of 4096": 2, "sparseloco chunks of 1024": 1})

    def test_a_run_without_a_step_is_named_and_left_out(self):
        self.add("new", {"compress.name": "dgc", "dist.ranks": "8"}, metric=PERPLEXITY, steps=0, complete=False)
        self.add("t", TOPK)
        c = self.compare("new", "d", "t")
        self.assertEqual(([m.name for m in c.methods], c.metric), (["dense", "topk"], ACCURACY))
        self.says(tables.comparison_text(c), f"Note: {self.at('new')} has not finished a step yet and is left out.")
        self.lacks(tables.comparison_text(c), "dist.ranks")
        self.refused(lambda: self.compare("new"), "/new: the run has not finished a step yet; there is nothing to compare")

    def test_the_page_warns_before_it_shows_speed_ups(self):
        self.add("t", TOPK, step_seconds=0.05)
        environment = {"host": "node2", "cpu": "another cpu"}
        self.write("t/environment.json", json.dumps(environment))
        text = page.report_html(self.compare("d", "t"))
        warned = text.index("the runs come from different machines: times and speed-ups do not compare")
        self.assertLess(warned, text.index("2.00× dense"))

    def test_keys_that_mean_nothing_to_dense_neither_split_it_nor_count_as_its_own(self):
        self.add("d1", {"compress.density": "0.5", "seed": "1"})
        self.add("d2", {"seed": "2"})
        self.add("t", {**TOPK, "compress.density": "0.5"})
        c = self.compare("d1", "d2", "t")
        self.assertEqual([len(m.runs) for m in c.methods], [2, 1])
        self.assertEqual(c.differing, ["compress.name", "compress.density"])
        self.assertEqual([m.config["compress.density"] for m in c.methods], ["-", "0.5"])

    def test_a_key_that_a_file_lacks_has_its_default(self):
        self.add("t1", {**TOPK, "seed": "1"})
        config = self.add("t2", {**TOPK, "seed": "2"}) + "/config.yaml"
        text = pathlib.Path(config).read_text()
        self.assertIn("  check_every: 50\n", text)
        pathlib.Path(config).write_text(text.replace("  check_every: 50\n", ""))
        self.assertEqual(len(self.compare("t1", "t2").methods), 1)

    def test_the_default_target_is_95_percent_of_dense_and_times_to_it_are_of_training(self):
        self.add("d", step_seconds=0.2)
        self.add("t", TOPK, step_seconds=0.1, best=0.79, bytes=40)
        c = self.compare("d", "t")
        self.assertAlmostEqual(c.target, 0.76)
        self.assertAlmostEqual(c.methods[0].seconds_to_target.mean, 3.0)  # both meet it at step 15
        topk = c.methods[1]
        self.assertAlmostEqual(topk.seconds_to_target.mean, 1.5)
        self.assertEqual([m.steps_to_target.mean for m in c.methods], [15, 15])
        for got, wanted in ((topk.target_speed_up, 2), (topk.speed_up, 2), (topk.bytes_ratio, 100), (topk.bytes_sent.mean, 40)):
            self.assertAlmostEqual(got, wanted)

    def test_an_accuracy_that_is_the_target_reaches_it_and_the_time_has_a_spread(self):
        self.add("d2", {"seed": "2"}, step_seconds=0.3)
        c = self.compare("d", "d2", target=0.8)
        self.assertEqual(c.methods[0].seconds_to_target.count, 2)
        self.assertAlmostEqual(c.methods[0].seconds_to_target.mean, 3)
        self.says(tables.comparison_text(c), "3.00 ± 2.12 s")
        self.says(page.report_html(c), "80.0 % after 3.00 ± 2.12 s")

    def test_without_dense_the_target_is_the_lowest_best_accuracy_and_there_is_no_speed_up(self):
        self.add("a", TOPK, best=0.6)
        self.add("b", {"compress.name": "gaussiank"}, best=0.7)
        c = self.compare("a", "b")
        self.assertAlmostEqual(c.target, 0.6)
        self.assertTrue(math.isnan(c.methods[0].speed_up))
        self.says(tables.comparison_text(c), "no dense run")

    def test_the_baseline_differs_in_nothing_but_the_method_or_is_chosen(self):
        self.add("one", {"dist.ranks": "1"})
        self.add("four", {**TOPK, "dist.ranks": "4"}, best=0.7, step_seconds=0.05)
        self.add("lr", {**TOPK, "optimizer.lr": "0.2"}, best=0.7)
        self.add("dense2", {"optimizer.lr": "0.2"}, best=0.6)
        c = self.compare("one", "four")
        self.assertEqual([m.baseline for m in c.methods], [c.methods[0], None])
        self.assertTrue(math.isnan(c.methods[1].speed_up))
        self.says(tables.comparison_text(c), "topk: no dense run differs from it in nothing but the method", "--baseline NAME")
        chosen = self.compare("one", "four", baseline="topk")
        self.says(tables.comparison_text(chosen), "Speed-ups are over topk.")
        self.says(page.report_html(chosen), "Speed-ups are over topk.")
        chosen = self.compare("one", "four", baseline="dense")
        self.assertAlmostEqual(chosen.methods[1].speed_up, 2)
        self.refused(lambda: self.compare("one", "four", baseline="dense4"), "--baseline", "did you mean 'dense'")
        several = self.compare("one", "dense2", "lr")
        self.assertEqual([several.methods.index(m.baseline) for m in several.methods], [0, 1, 1])
        self.assertAlmostEqual(several.target, 0.76)  # of the best dense run

    def test_dense_sums_in_few_bits_are_a_method_compared_with_plain_ones(self):
        self.add("int8", {"compress.values": "int8"}, step_seconds=0.05)
        self.add("bf16", {"compress.values": "bf16"})
        c = self.compare("int8", "bf16", "d")
        self.assertEqual([m.name for m in c.methods], ["dense", "dense int8 values", "dense bf16 values"])
        self.assertEqual([m.baseline for m in c.methods], 3 * [c.methods[0]])

    def test_there_is_no_speed_up_to_a_target_that_not_every_run_reached(self):
        self.add("t1", {**TOPK, "seed": "1"})
        self.add("t2", {**TOPK, "seed": "2"}, best=0.5)
        c = self.compare("d", "t1", "t2", target=0.7)
        self.assertEqual(c.methods[1].seconds_to_target.count, 1)
        self.assertTrue(math.isnan(c.methods[1].target_speed_up))
        self.says(tables.comparison_text(c), "(1 of 2)")
        missed = self.compare("d", "t2", target=0.78)
        self.assertEqual(missed.methods[1].seconds_to_target.count, 0)
        self.assertTrue(math.isnan(missed.methods[1].target_speed_up))
        self.says(tables.comparison_text(missed), "not reached", "as asked for")

    def test_an_incomplete_run_is_named_and_left_out_of_the_means(self):
        self.add("t1", {**TOPK, "seed": "1"})
        self.add("t2", {**TOPK, "seed": "2"}, best=0.2, complete=False)
        c = self.compare("d", "t1", "t2")
        self.assertAlmostEqual(c.methods[1].best.mean, 0.8)
        self.says(tables.comparison_text(c), "2 (1 incomplete)", "t2 is incomplete")
        self.assertAlmostEqual(self.compare("t2").methods[0].best.mean, 0.2)
        self.says(self.text("t2"), "1 (1 incomplete)")
        if style.AVAILABLE:
            self.says(page.report_html(c), "ending in ×")
            self.lacks(page.report_html(self.compare("d", "t1")), "ending in ×")

    def test_bytes_of_an_incomplete_run_count_the_steps_between_those_in_its_file(self):
        self.add("t", TOPK, bytes=40, complete=False, every=2)
        self.assertAlmostEqual(self.compare("t").methods[0].bytes_sent.mean, 40)

    def test_the_parts_of_a_step_add_up_and_hidden_communication_stands_beside_them(self):
        t = self.compare("d").methods[0].times
        self.assertAlmostEqual(t["step"], 0.1)
        self.assertAlmostEqual(t["forward"] + t["backward"] + t["exposed"] + t["other"], t["step"])
        self.assertAlmostEqual(t["exposed"], 0.01)
        self.assertAlmostEqual(t["hidden"], 0.005)

    def test_the_first_steps_do_not_count_where_there_are_twice_as_many(self):
        self.add("ten", steps=10, slower=True)
        self.add("eleven", steps=11, slower=True)
        self.assertAlmostEqual(self.compare("ten").methods[0].times["forward"], 0.0055)
        self.assertAlmostEqual(self.compare("eleven").methods[0].times["forward"], 0.0085)

    def test_the_parts_of_a_step_are_those_of_measured_steps(self):
        self.add("some", TOPK, slower=True, measured=10)
        self.add("none", measured=0)
        some, none = self.compare("some").methods[0].times, self.compare("none")
        self.assertAlmostEqual(some["forward"], 0.015)
        self.assertAlmostEqual(some["step"], 0.1)
        times = none.methods[0].times
        self.assertTrue(math.isnan(times["forward"]))
        self.assertAlmostEqual(times["step"], 0.1)
        self.assertAlmostEqual(times["other"], 0.1)
        self.assertEqual(tables.time_table(none)[1][0][2], "-")

    def test_a_long_run_is_read_in_part_and_its_figures_stay(self):
        self.add("long", {**TOPK, "seed": "1"}, steps=5000, bytes=40, complete=False)
        self.add("seed2", {**TOPK, "seed": "2"}, steps=5000, bytes=40)
        c = self.compare("long", "seed2")
        run = c.runs[0]
        self.assertLess(len(run.steps), 1100)
        self.assertEqual(run.last_step, 5000)
        self.assertAlmostEqual(run.bytes_sent, 40)
        self.assertAlmostEqual(run.times["step"], 0.1)
        self.assertAlmostEqual(run.times["forward"], 0.02)
        self.assertEqual([s.step for s in run.steps], [s.step for s in c.runs[1].steps])  # seeds have a mean at every one

    def test_many_runs_are_read_by_all_cores_with_the_same_result(self):
        names = [self.add(f"many/s{seed}", {**TOPK, "seed": str(seed)}, complete=seed > 0) for seed in range(20)]
        together, alone = read_runs([self.at("many")]), [read_run(name) for name in sorted(names)]
        self.assertEqual([str(vars(run)) for run in together], [str(vars(run)) for run in alone])
        self.write("many/s7/metrics.jsonl", "{}\n{\n")
        self.refused(lambda: read_runs([self.at("many")]), "many/s7/metrics.jsonl:2: damaged line")

    def test_a_loss_is_compared_without_percent_and_reached_from_above(self):
        self.add("d", metric=SQUARED_ERROR, task="synthetic_regression, 1 target, samples [64, 1, 1]")
        c = self.compare("d")
        self.assertEqual(c.metric, SQUARED_ERROR)
        self.assertAlmostEqual(c.methods[0].best.mean, 0.05)
        self.assertTrue(math.isnan(c.target))
        self.says(tables.comparison_text(c), "best test loss")
        self.lacks(tables.comparison_text(c), "%")
        self.lacks(page.report_html(c), "Target", "points against")
        self.says(tables.comparison_csv(c), "best_loss")
        aimed = self.compare("d", target=0.1)
        self.assertAlmostEqual(aimed.methods[0].seconds_to_target.mean, 1.0)
        self.says(tables.comparison_text(aimed), "steps to 0.1", "time to 0.1")

    def test_a_lower_perplexity_is_better(self):
        lm = {"metric": PERPLEXITY, "task": "text, 10000 words", "held_out_loss": math.log(2)}
        self.add("d", **lm)
        self.add("t", TOPK, step_seconds=0.2, **lm)
        c = self.compare("d", "t")  # losses 1/5, 1/10, 1/15, 1/20
        self.assertAlmostEqual(c.methods[0].best.mean, math.exp(0.05))
        self.assertAlmostEqual(c.methods[0].held_out.mean, 2)
        self.assertAlmostEqual(c.target, 1.05 * math.exp(0.05))
        self.says(c.target_reason, "105 % of the best dense validation perplexity")
        self.assertAlmostEqual(c.methods[0].seconds_to_target.mean, 1.5)
        text = tables.comparison_text(c)
        self.says(text, "best validation perplexity", "test perplexity", "tokens/s")
        self.lacks(text, "images/s")
        self.says(page.report_html(c), ">Perplexity</label>")
        self.says(tables.comparison_csv(c), ",best_perplexity,", ",test_perplexity,")
        self.assertTrue(math.isnan(self.compare("t").methods[0].target_speed_up))
        self.says(self.compare("t").target_reason, "the greatest of")

    def test_an_accuracy_that_is_0_throughout_is_an_accuracy(self):
        self.add("d", best=0)
        self.add("old", best=0, metric=None)
        self.add("t", TOPK, best=0.5)
        for dense in ("d", "old"):
            c = self.compare(dense, "t")
            self.assertEqual((c.metric, c.methods[0].best.mean), (ACCURACY, 0))
            self.assertAlmostEqual(c.methods[0].last.mean, -0.01)
            self.says(tables.comparison_text(c), "0.0 %")

    def test_files_that_recorded_no_metric_have_that_of_their_data_set(self):
        self.add("images", {"data.classes": "3"}, metric=None)
        self.add("regression", {"data.name": "synthetic_regression"}, metric=None)
        images, regression = read_run(self.at("images")), read_run(self.at("regression"))
        for run, task, metric in ((images, "synthetic_images, 3 classes, samples [3, 32, 32]", ACCURACY),
                                  (regression, "synthetic_regression, 1 target, samples [64, 1, 1]", SQUARED_ERROR)):  # fmt: skip
            self.assertEqual((run.task, run.metric), (task, metric))

    def test_runs_of_different_tasks_or_metrics_are_refused_together(self):
        self.add("a")
        self.add("old", metric=None)
        self.add("classes", task="synthetic_images, 3 classes, samples [3, 32, 32]")
        self.add("regression", metric=SQUARED_ERROR, task="synthetic_regression, 1 target, samples [64, 1, 1]")
        self.add("old_mnist", {"data.name": "mnist"}, metric=None)
        self.compare("a", "old")
        for other in ("classes", "regression", "old_mnist"):
            parts = ("different tasks", "/a has synthetic_images, 10 classes", f"/{other} has ", "by themselves")
            self.refused(lambda: self.compare("a", other), *parts)
        self.add("later", metric=type(ACCURACY)("bleu", "", True))
        self.refused(lambda: read_run(self.at("later")), "/later", "its metric is 'bleu'")

    def test_a_run_that_records_no_task_or_no_epochs_is_compared(self):
        self.add("own", task="")
        self.add("a", TOPK)
        path = self.at("own/metrics.jsonl")
        self.write("own/metrics.jsonl", re.sub('"epoch":[0-9.]+', '"epoch":null', pathlib.Path(path).read_text()))
        c = self.compare("own", "a")
        self.assertEqual((c.task, [m.last.mean for m in c.methods]), (TASK, [0.79, 0.79]))
        self.says("".join(c.warnings), f"own: the task is not recorded; it is taken for that of the others, {TASK}")
        self.assertEqual(self.compare("own").warnings, [])
        if style.AVAILABLE:
            panels = charts._line_up(c, "quality", ["time", "epochs"], (7, 3))[1]
            lines = [[line[0] for line in panel["lines"]] for _, panel in panels]
            self.assertEqual(lines, [["dense", "topk"], ["topk"]])

    def test_an_emulated_link_stands_in_the_table_and_the_page(self):
        network = "threads, emulated link 100mbit, 50us"
        self.add("e", network=network)
        self.add("t", TOPK, network=network)
        self.add("other", {"compress.name": "dgc"})
        self.lacks(page.report_html(self.compare("d")), "emulat")
        c = self.compare("e", "t")
        self.says(tables.comparison_text(c), f"network: {network}\n")
        self.says(page.report_html(c), f"({network})", "an emulation: emulated link 100mbit, 50us.")
        self.assertEqual(tables.comparison_csv(c).count(f'"{network}"'), 2)
        mixed = self.compare("e", "other")
        self.assertEqual(tables.comparison_text(mixed).count(network + "\n"), 1)
        self.says(page.report_html(mixed), f"<td>{network}</td>", "partly emulated links")

    def test_a_busy_machine_and_another_network_are_pointed_out(self):
        self.add("busy", TOPK, steps=80, slower=True)
        self.add("moved", {**TOPK, "seed": "2"})
        self.lacks(self.text("d", "moved"), "not equally free", "another network")
        self.append("moved", {"event": "start", "backend": "gloo", "task": TASK, "metric": "accuracy", "metric_unit": "share"})
        self.says(self.text("d", "moved"), "another network (threads, then gloo)")
        self.says(self.text("d", "busy"), "not equally free")

    def test_a_mean_over_seeds_does_not_hide_the_one_that_diverged(self):
        for name, seed in (("a", "1"), ("b", "2"), ("c", "3")):
            self.add(name, {"seed": seed}, metric=PERPLEXITY, held_out_loss=1, diverges=name == "c")
        good, c = self.compare("a", "b").methods[0], self.compare("a", "b", "c").methods[0]
        self.assertEqual((good.last.count, good.held_out.count), (2, 2))
        self.assertEqual((c.last.count, c.held_out.count, c.best.count), (0, 0, 3))
        self.lacks(self.text("a", "b"), "not finite")
        self.says(self.text("a", "b", "c"), f"the last validation perplexity of {self.at('c')} is not finite")

    def test_failed_runs_other_commits_and_seeds_that_count_twice_are_pointed_out(self):
        self.add("a")
        self.add("b", {"seed": "2"}, failed=True, reason="the last step was not finite")
        self.add("again")
        self.says(self.text("a", "b"), "/b has failed: the last step was not finite")
        self.lacks(self.text("a", "b"), "different commits", "more than once")
        runs = json.loads(tables.comparison_json(self.compare("a", "b")))["runs"]
        self.assertEqual([run["failed"] for run in runs], [False, True])
        self.says(self.text("a", "b", "again"), "dense has seed 1 more than once (")
        start = {"event": "start", "backend": "threads", "metric": "accuracy", "metric_unit": "share", "task": TASK}
        self.append("b", {**start, "revision": "0000000"})
        self.says(self.text("a", "b"), "different commits (0000000, ")

    def test_keys_that_make_a_comparison_unfair_and_what_it_does_not_show_are_pointed_out(self):
        self.add("d", {"dist.ranks": "2"})
        self.add("t", TOPK)
        self.add("t2", {**TOPK, "seed": "2"})
        limits = ("What this does not show: ", "all methods have one seed", "threads of one machine")
        self.says(self.text("d", "t"), "dist.ranks differs", *limits)
        self.says(self.text("d", "t", "t2"), "dense has one seed")
        self.lacks(self.text("t", "t2"), "one seed")

    def test_second_figures_stand_beside_the_metric_where_runs_have_them(self):
        self.add("d", second=0.9)
        self.add("s", metric=WORD_ERRORS, task="speech", second=0.5)
        self.add("t", metric=PERPLEXITY, task="text", second=1.5)
        self.add("plain")
        titles = {"t": "final bits per byte", "d": "final top-5 accuracy", "s": "final character error rate"}
        for (name, title), mean in zip(titles.items(), (1.2, 0.6, 0.2)):
            c = self.compare(name)
            self.assertAlmostEqual(c.methods[0].second.mean, mean)
            self.says(tables.comparison_text(c), title)
            self.says(tables.comparison_csv(c), f",{title.replace(' ', '_')},")
        self.says(tables.comparison_csv(self.compare("s")), ",final_word_error_rate,")
        self.lacks(self.text("plain") + tables.comparison_csv(self.compare("plain")), "top-5")


class FilesTest(Folder):
    def test_csv_has_a_row_a_method_and_nothing_where_nothing_is_known(self):
        self.add("t1", {**TOPK, "seed": "1"}, best=0.7, bytes=40)
        self.add("t2", {**TOPK, "seed": "2"}, bytes=40)
        text = tables.comparison_csv(self.compare("d", "t1", "t2", target=0.9))
        self.says(text, "method,runs,complete,best_accuracy,best_accuracy_deviation,", '\n"dense",1,1,0.8,,0.79,,2,,100,,,,,,4000,,',
                  '\n"topk",2,2,0.75,0.0707106781,', ",100,0.32,1,,0.1,", f',"{TASK}","compress.name=dense"\n')  # fmt: skip
        self.assertEqual(text.count("\n"), 3)

    def test_json_has_what_the_page_has_and_the_documentation_names_every_column(self):
        self.add("t", TOPK, best=0.7, bytes=40, complete=False)
        c = self.compare("d", "t")
        everything = json.loads(tables.comparison_json(c))
        self.assertEqual(everything["metric"], {"name": "accuracy", "unit": "share", "higher_is_better": True})
        self.assertAlmostEqual(everything["target"], 0.76)
        dense, topk = everything["methods"]
        self.assertEqual((topk["method"], topk["keys"]["compress.name"], topk["baseline"]), ("topk", "topk", "dense"))
        self.assertAlmostEqual(topk["bytes_ratio"], 100)
        self.assertIsNone(topk["seconds_to_target"])
        self.assertEqual(dense["steps_to_target"], 15)
        self.assertEqual([run["complete"] for run in everything["runs"]], [True, False])
        self.assertEqual(everything["warnings"], c.warnings)
        names = [*everything, *topk, *everything["runs"][0], *next(csv.reader([tables.comparison_csv(c).split("\n")[0]]))]
        documentation = (ROOT / "docs/compare.md").read_text()
        for name in names:
            name = "_deviation" if name.endswith("_deviation") else re.sub("_accuracy$", "_METRIC", name)
            self.assertIn(f"`{name}`", documentation)

    def test_latex_has_the_table_escaped(self):
        self.add("dgc_a", {"compress.name": "dgc", "compress.values": '"100%_&"'})
        self.add("b", {"compress.name": "dgc"})
        text = tables.comparison_tex(self.compare("d", "dgc_a", "b"))
        self.says(text, r"\toprule", r"80.0 \%", r"dgc 100\%\_\& values", r"$\times$", "What this does not show")
        self.assertEqual(text.count("\\\\\n"), 4)

    def test_what_is_no_run_is_refused_with_its_name_and_the_reason(self):
        self.refused(lambda: read_runs([self.at("none")]), "/none: no such run directory")
        os.makedirs(self.at("empty"))
        self.refused(lambda: read_runs([self.at("empty")]), "no metrics.jsonl")
        run = self.at("d")
        for arguments in ([self.path], [run + "/", run]):
            self.assertEqual([r.path for r in read_runs(arguments)], [run])
        good = pathlib.Path(run + "/metrics.jsonl").read_text()
        distribution = '{"event":"distribution","step":1,"size":0,"histogram":[1]}'
        for damage in ("{damaged\n{}", '{"event":"step","step":1.5}', '{"event":"step","step":1,"loss":"x"}', "[" * 100000,
                       '{"event":"end","steps":1e30}', distribution):  # fmt: skip
            self.write("d/metrics.jsonl", good + damage + "\n{}\n")
            self.refused(lambda: read_run(run), "damaged line")
        self.write("d/metrics.jsonl", "")
        self.refused(lambda: self.compare("d"), f"{run}: the run has not finished a step")
        os.unlink(run + "/config.yaml")
        self.refused(lambda: read_run(run), "config.yaml")

    def test_a_file_that_is_being_written_is_read_up_to_its_last_whole_line(self):
        run = self.add("d", complete=False)
        whole = len(read_run(run).steps)
        with open(run + "/metrics.jsonl", "ab") as file:
            file.write(b'{"event":"step","rank":0,"step":21,"lo\xc3')
        cut = read_run(run)
        self.assertEqual((len(cut.steps), cut.truncated), (whole, True))
        self.says(self.text("d"), "in the middle of a line")

    def test_numbers_that_no_run_has_make_no_nan_and_no_failure(self):
        fields = {
            "distribution": "mean deviation median laplace_scale contraction bound bell_bound",
            "step": "epoch time_s loss bytes_sent data_s forward_s communicate_s exposed_s images_per_second",
            "eval": "epoch time_s test_loss test_accuracy test_top5_accuracy eval_seconds",
            "end": "wall_seconds eval_seconds startup_seconds images_per_second bytes_sent bytes_dense step_p50_s step_p95_s",
        }
        for bad in (NAN, 0.0, -1.0, 1e16, 1e308, -1e308, 4e-324):
            run = os.path.basename(self.add(f"d{bad}"))
            figures = {event: {"event": event, **dict.fromkeys(names.split(), bad)} for event, names in fields.items()}
            for step in (5, 10, 20):
                self.append(run, {**figures["distribution"], "step": step, "size": 1000, "histogram": [0, 10, 500, 0]})
                self.append(run, {**figures["step"], "step": 20 + step}, {**figures["eval"], "step": 20 + step})
            self.append(run, {**figures["end"], "steps": 40})
            c = self.compare(run)
            everything = tables.comparison_text(c) + tables.comparison_csv(c) + tables.comparison_tex(c) + page.report_html(c)
            json.loads(tables.comparison_json(c))
            everything = re.sub("<script>.*</script>", "", everything.replace(f"d{bad}", ""), flags=re.S)
            self.assertLess(len(everything), 2000000)
            self.assertEqual(re.findall(r"(?<![a-z])(?:nan|inf)(?![a-z])", everything.lower()), [], bad)

    def test_damaged_files_are_read_or_refused(self):
        draw = random.Random(1)
        self.add("d", steps=10)
        self.write("table.csv", HEADER + row("dense", 1, "90.00", 4000, '"compress.name=dense compress.warmup=[0.5, 0.1]"'))
        names = ("d/metrics.jsonl", "d/config.yaml", "d/environment.json", "table.csv")
        files = {name: pathlib.Path(self.at(name)).read_bytes() for name in names}
        pieces = [b"", b"\xff", b'"', b"{", b"[", b"9" * 30, b"null", b"\n", b"e400", b"-", b","]
        for i in range(400):
            name = draw.choice(list(files))
            data = bytearray(files[name])
            for _ in range(draw.randrange(1, 5)):
                at = draw.randrange(len(data))
                data[at : at + draw.randrange(3)] = draw.choice(pieces)
            pathlib.Path(self.at(name)).write_bytes(data)
            with contextlib.suppress(UserError):
                c = compare_runs(read_runs([self.at("table.csv" if name == "table.csv" else "d")]))
                tables.comparison_text(c), tables.comparison_csv(c), tables.comparison_json(c), tables.comparison_tex(c)
            pathlib.Path(self.at(name)).write_bytes(files[name])

    def test_an_environment_is_read_as_far_as_it_makes_sense_and_a_pipe_is_refused(self):
        run = self.at("d")
        for text in (b"[" * 300000, b"[" * 300000 + b"]" * 300000, b'["\xff"]'):
            pathlib.Path(run + "/environment.json").write_bytes(b'{"host":"node1","deep":' + text + b"}")
            self.assertEqual(read_run(run).environment["host"], "node1")
        os.unlink(run + "/environment.json")
        os.mkfifo(run + "/environment.json")
        self.refused(lambda: read_run(run), "environment.json", "a named pipe")

    def test_words_of_files_move_no_cursor_and_begin_no_line(self):
        c = self.compare("d")
        c.task, c.warnings = "pictures\x1b[2J\nNote: all is well", ["first\nNote: second\x1b[2J"]
        c.methods[0].name = "dense\n\x1b[2J\udc80<b>"
        text = tables.comparison_text(c)
        notes = ("task: pictures\\x1b[2J\\nNote: all is well\n", "Note: first\\nNote: second\\x1b[2J.")
        self.says(text, *notes, "dense\\n\\x1b[2J\\x80")
        everything = text + page.report_html(c) + tables.comparison_tex(c)
        self.lacks(everything, "\x1b")
        self.lacks(page.report_html(c), "<b><")
        self.assertEqual(one_line("a\tb"), "a\\tb")


class TableTest(Folder):
    def read(self, text):
        return read_runs([self.write("runs.csv", text)])

    def test_a_table_is_read_alike_as_a_spreadsheet_writes_it(self):
        plain = HEADER + row("dense", 1, "90.00", 4000, "compress.name=dense")
        for text in (plain, "\ufeff" + plain.replace("\n", "\r\n"), plain[:-1]):
            (run,) = self.read(text)
            self.assertEqual((run.last, run.text("compress.name")), (0.9, "dense"))

    def test_rows_are_compared_by_their_last_value_and_their_bytes(self):
        warmup = '"compress.codec=auto compress.name=topk compress.density=0.01 compress.warmup=[0.5,0.25,0.1]"'
        runs = self.read(
            HEADER
            + row("dense", 1, "90.00", 4000, "dist.ranks=4 compress.name=dense")
            + row("topk", 1, "88.00", 40, "compress.codec=auto compress.name=topk")
            + row("dense", 2, "92.00", 4000, "dist.ranks=4 compress.name=dense")
            + row("topk-d0.01", 1, "89.00", 400, warmup)
            + row("topk_int8", 1, "87.50", 10, "compress.codec=auto compress.name=topk compress.values=int8")
        )
        c = compare_runs(runs)
        self.assertEqual([m.name for m in c.methods], ["dense", "topk", "topk-d0.01", "topk_int8"])
        self.assertAlmostEqual(c.methods[0].last.mean, 0.91)
        self.assertEqual(c.methods[0].last.count, 2)
        self.assertAlmostEqual(c.methods[1].bytes_sent.mean, 40)
        self.assertAlmostEqual(c.methods[1].bytes_received.mean, 120)
        self.assertAlmostEqual(c.methods[3].bytes_ratio, 400)
        self.assertEqual(c.methods[2].config["compress.warmup"], "[0.5,0.25,0.1]")
        text = tables.comparison_text(c)
        self.says(text, "configs/a.yaml", "91.0 ± 1.4 %", "400×")
        self.lacks(text, "best accuracy", "images/s", "ms per step", "nan", "network")
        text = page.report_html(c)
        self.says(text, "configs/a.yaml · 4 methods, 5 runs<", "<strong>91.0 %</strong><small>final test accuracy")
        families = {
            name: [(round(m.bits_per_parameter_step, 3), m.last.mean) for m in members]
            for name, members in families_of(c).items()
        }
        self.assertEqual(families["topk"], [(0.32, 0.88), (3.2, 0.89)])
        self.assertEqual(sorted(families), ["dense", "topk", "topk int8 values"])
        self.refused(lambda: compare_runs(runs, 0.5), "--target", "no evaluations")

    def test_the_last_value_of_a_key_counts_and_a_list_may_have_spaces(self):
        runs = self.read(
            HEADER
            + row("a", 1, "90.00", 400, "compress.name=topk")
            + row("b", 1, "80.00", 400, '"compress.name=dense compress.warmup=[0.5, 0.1] compress.name=topk seed=7"')
            + row("1" * 60000, 1, "80.00", 4000, "compress.name=dense")
        )
        self.assertEqual([runs[1].text(key) for key in ("compress.name", "compress.warmup", "seed")], ["topk", "[0.5, 0.1]", "1"])
        self.assertEqual(len(compare_runs(runs).methods), 3)

    def test_a_table_stands_beside_no_run_and_a_folder_may_be_called_as_one(self):
        table = self.write("runs.csv", HEADER + row("a", 1, "90.00", 400, "compress.name=topk"))
        run = self.add("run.csv")
        self.assertEqual(len(read_runs([run])), 1)
        self.refused(lambda: read_runs([run, table]), run, "side by side")

    def test_a_row_that_diverged_leaves_its_method_without_a_value(self):
        rows = (row("dense", seed, value, 4000, "compress.name=dense") for seed, value in ((1, "90.00"), (2, "nan")))
        c = compare_runs(self.read(HEADER + "".join(rows)))
        self.assertEqual(c.methods[0].last.count, 0)
        self.says(tables.comparison_text(c), "/runs.csv/dense-s2 is not finite")

    def test_what_is_no_table_is_refused_with_its_line(self):
        good = row("dense", 1, "90.00", 4000, "compress.name=dense")
        self.refused(lambda: read_runs(["none.csv"]), "'none.csv'", "No such file")
        os.mkfifo(self.at("pipe.csv"))
        self.refused(lambda: read_runs([self.at("pipe.csv")]), "pipe.csv", "a named pipe")
        for text, part in (
            ("", "empty"),
            (HEADER, "no run in it"),
            (HEADER + good + "dense,2\n", "runs.csv:3: 2 cells, and the header has 15"),
            ("method,runs\ntopk,3\n", "no column"),
            (HEADER + row("dense", 1, "high", 4000, "compress.name=dense"), "value is 'high', no number"),
            (HEADER + row("dense", 1, "", 4000, "compress.name=dense"), "value is '', no number"),
            (HEADER + row("a", 1, "90.00", 4000, "seed=1"), "no compress.name"),
            *((HEADER + good.replace("90.00", value), "no number from 0 to 100") for value in ("-1", "100.1", "1e300")),
            (HEADER + row("dense", 1, "90.00", -1, "compress.name=dense"), "sent_per_step"),
            (HEADER + row("a", 1, "90.00", 4000, '"compress.name=topk compress.warmup=[0.5,'), "inside quotes"),
            (HEADER + row("a", 1, "90.00", 4000, "dense"), "expected KEY=VALUE, not 'dense'"),
            (HEADER + good.replace("accuracy", "speed"), "the metric 'speed' is not known"),
        ):
            self.refused(lambda: self.read(text), part)

    def test_every_published_table_can_be_compared(self):
        paths = sorted((ROOT / "lab/records").glob("*.csv"))
        self.assertGreater(len(paths), 5)
        for path in map(str, paths):
            with open(path) as file:
                names = {line["run"] for line in csv.DictReader(file)}
            c = compare_runs(read_runs([path, path]))
            self.assertEqual(len(c.methods), len(names), path)
            self.assertEqual(len({m.name for m in c.methods}), len(names), path)
            self.lacks(" ".join(c.warnings), "more than once")
            self.assertTrue(families_of(c))


@needs_matplotlib
class PictureTest(Folder):
    def test_the_page_is_one_file_without_network(self):
        self.add("t<b>", TOPK, bytes=40)
        text = page.report_html(self.compare("d", "t<b>"))
        titles = ("Bytes sent", "Where the time of a step goes", "What differs")
        self.says(text, "76.0 % after 1.50 s", "t&lt;b&gt;", "00000000deadbeef", *titles)
        self.lacks(text, "http:", "https:", "src=", "@import", "t<b>", 'url("')
        self.says(text, *(f">{name}</label>" for name in ("Accuracy", "Time", "Bits", "Phases")))
        self.assertEqual(text.count("<svg"), 9)
        self.assertEqual(text.count("</svg>"), 9)
        for axis in ("step", "epoch", "training time (s)"):
            self.says(text, f">{axis}</text>")

    def values(self, svg):
        return {line[0]: list(zip(line[2], line[3])) for line in self.panel(svg)["lines"]}

    def panel(self, svg):
        return json.loads(html.unescape(re.search("data-plot='([^']*)'", svg)[1]))[0]

    def test_pointing_at_a_picture_shows_each_methods_value(self):
        self.add("t", TOPK, step_seconds=0.2, best=0.6, bytes=40)
        c = self.compare("d", "t")
        steps = self.values(charts.page_svg(c, "quality", "steps"))
        self.assertEqual((steps["dense"][2], steps["topk"][2]), ((15, 0.8), (15, 0.6)))
        self.assertEqual(self.values(charts.page_svg(c, "quality", "time"))["topk"][1], (2, 0.4))
        self.assertEqual(self.values(charts.page_svg(c, "bytes", "steps"))["topk"][-1], (20, 800))

    def test_pictures_for_papers_name_methods_and_have_the_size_asked_for(self):
        self.add("own", TOPK, bytes=40)
        self.add("int8", {**TOPK, "compress.values": "int8"}, bytes=20)
        c = self.compare("d", "own", "int8", target=0.5)
        svg = charts.picture(c, "", "svg", (7, None)).decode()
        for part in ("dense", "topk", "topk int8 values", "test accuracy", "training time (s)", "epoch", "step", "target 50.0 %"):
            self.says(svg, f">{part}</text>")
        epochs = charts.picture(c, "epochs", "svg", (3.3, 2)).decode()
        self.says(epochs, 'width="237.6pt"', 'height="144pt"', ">epoch<")
        self.lacks(epochs, "training time", ">step<")
        for what in ("", *style.PICTURES):
            self.assertTrue(charts.picture(c, what, "pdf", (3.3, None)).startswith(b"%PDF"))
            self.assertTrue(charts.picture(c, what, "png", (3.3, None)).startswith(b"\x89PNG"))
        grey = [
            sum(w * int(s.colour[i : i + 2], 16) for w, i in ((0.3, 1), (0.59, 3), (0.11, 5))) for s in style.styles(c).values()
        ]
        self.assertGreater(min(abs(a - b) for i, a in enumerate(grey) for b in grey[:i]), 25)
        self.assertEqual(len({s.marker for s in style.styles(c).values()}), 3)

    def test_a_long_legend_leaves_room_for_the_curves(self):
        for i in range(12):
            self.add(f"t{i}", {**TOPK, "compress.density": f"0.0{i}", "optimizer.lr": f"0.{i}", "exchange.every": "8"})
        c = self.compare(*(f"t{i}" for i in range(12)))
        box = self.panel(charts.page_svg(c, "quality", "steps"))["box"]
        self.assertGreater(box[3] - box[1], 72)  # points
        self.says(charts.picture(c, "steps", "svg", (3.3, 2)).decode(), 'height="144pt"')

    def test_bits_join_methods_that_differ_in_how_much_they_send(self):
        self.add("d2", {"seed": "2"}, best=0.9)
        for name, keys, best, size in (("a", {"compress.density": "0.01"}, 0.7, 40), ("b", {"compress.density": "0.1"}, 0.75, 400),
                                       ("c", {"compress.values": "int8"}, 0.6, 20)):  # fmt: skip
            self.add(name, {**TOPK, **keys}, best=best, bytes=size)
        self.add("none", {"compress.name": "randk"}, bytes=0)
        self.add("half", {"compress.name": "dgc"}, bytes=40, complete=False)
        lines = self.values(charts.page_svg(self.compare("d", "d2", "a", "b", "c", "none", "half"), "bits"))
        self.assertEqual(lines, {"dense": [(32, 0.84)], "topk": [(0.32, 0.69), (3.2, 0.74)], "topk int8 values": [(0.16, 0.59)]})
        self.refused(lambda: charts.picture(self.compare("none"), "bits", "svg", (7, None)), "--out", "nothing to draw")

    def test_a_tables_curves_are_refused_and_its_bits_drawn(self):
        c = compare_runs(read_runs([self.write("runs.csv", HEADER + row("a", 1, "90.00", 400, "compress.name=topk"))]))
        self.refused(lambda: charts.picture(c, "", "svg", (7, None)), "--out", ".bits.svg")
        self.says(charts.picture(c, "bits", "svg", (7, None)).decode(), ">topk</text>")

    def test_recorded_distributions_are_drawn(self):
        self.add("t", TOPK)
        self.lacks(page.report_html(self.compare("d", "t")), "accumulated gradient")
        for step in (5, 10, 15, 20):
            self.append("t", {"event": "distribution", "step": step, "size": 1000, "histogram": [0, 10, 900, 80, 10, 0], "mean": 0.1, "deviation": 0.5,
                              "median": 0.1, "laplace_scale": 0.4, "contraction": 0.5, "bound": 0.99, "bell_bound": 0.98})  # fmt: skip
        text = page.report_html(self.compare("d", "t"))
        self.says(text, "The accumulated gradient", "Contraction of top-k", ">step 5: ", ">step 15: ", ">step 20: ")
        self.lacks(text, ">step 10: ")
        self.assertEqual(text.count("<svg"), 11)

    def test_smoothing_passes_over_gaps_and_keeps_the_mean(self):
        values = charts.smooth([1, 2, 3, NAN, 5, 6], 3)
        self.assertEqual((values[1], values[3]), (2, 4))
        self.assertEqual(charts.smooth([1, 2], 1), [1, 2])
        self.assertEqual(stat_of([1, 3, NAN]).mean, 2)


class CommandTest(Folder):
    def run_compare(self, *arguments, prefix=(), **options):
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TOPKNOT_LIBRARY", "COLUMNS")}
        return subprocess.run([*prefix, sys.executable, str(ROOT / "scripts/compare"), *arguments], text=True, capture_output=True, cwd=self.path,
                              env=environment, **options)  # fmt: skip

    def misused(self, *arguments, said):
        outcome = self.run_compare(*arguments)
        self.assertEqual((outcome.returncode, outcome.stdout), (2, ""), outcome.stderr)
        self.assertTrue(outcome.stderr.startswith("compare: "), outcome.stderr)
        self.says(outcome.stderr, said)

    def test_it_prints_a_table_and_writes_the_files_that_out_names(self):
        runs = [self.add("dense"), self.add("töpk\n;'", TOPK)]
        outcome = self.run_compare(*runs, "--out", "report.html", "--out=x.csv", "--out", "x.json", "--out", "x.tex")
        self.assertEqual(outcome.returncode, 0, outcome.stderr)
        self.says(outcome.stdout, "topk", "Report: x.json")
        self.assertEqual(
            sorted(os.listdir(self.path)), sorted(["d", "dense", "töpk\n;'", "report.html", "x.csv", "x.json", "x.tex"])
        )
        self.assertTrue(pathlib.Path(self.at("x.csv")).read_text().startswith("method,"))
        self.assertTrue(pathlib.Path(self.at("report.html")).read_text().startswith("<!DOCTYPE html>"))

    def test_without_matplotlib_tables_are_made_and_pictures_say_what_is_missing(self):
        self.add("dense")
        out = io.StringIO()
        code = f"import sys; sys.modules['matplotlib'] = None; sys.path.insert(0, {str(ROOT / 'python')!r}); from topknot.compare.cli import main; "
        for words, code_wanted in ((["dense", "--out", "a.html", "--out", "a.csv"], 0), (["dense", "--out", "a.pdf"], 2)):
            program = [sys.executable, "-B", "-c", code + f"sys.exit(main({words!r}))"]
            outcome = subprocess.run(program, cwd=self.path, text=True, capture_output=True)
            self.assertEqual(outcome.returncode, code_wanted, outcome.stderr)
            self.assertEqual(outcome.stderr.count("python3-matplotlib"), 1, out)
            self.assertEqual(outcome.stderr.count("\n"), 1)
        self.says(pathlib.Path(self.at("a.html")).read_text(), "python3-matplotlib", "ms per step")

    def module(self, **environment):
        command, options = [sys.executable, "-B", "-m", "topknot"], {"cwd": self.path, "text": True, "capture_output": True}
        return lambda *words: subprocess.run([*command, *words], env={**os.environ, **environment}, **options)

    def test_python_m_topknot_needs_no_library(self):
        self.add("dense")
        call = self.module(PYTHONPATH=str(ROOT / "python"), TOPKNOT_LIBRARY="/none")
        self.assertEqual(call("compare", "dense", "--out", "x.csv").returncode, 0)
        self.says(call("--help").stdout, "compare")
        for words, code, said in [
            (["compear"], 2, "there is no command 'compear'; did you mean 'compare'?"),
            (["x"], 2, "'topknot --help' shows what there is"),
            (["doctor", "now"], 2, "topknot doctor: takes no arguments, and there is 'now'"),
            (["doctor"], 1, "libtopknot: topknot: /none cannot be loaded"),
        ]:
            outcome = call(*words)
            self.assertEqual(outcome.returncode, code, outcome.stderr)
            self.says(outcome.stderr, said)

    def test_train_and_demo_start_the_trainer_or_say_how_to_get_it(self):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / "python" / "topknot", self.at("alone/topknot"), ignore=ignored)
        call = self.module(PYTHONPATH=self.at("alone"))
        for command in ("train", "demo"):
            outcome = call(command, "--help")
            self.assertEqual(outcome.returncode, 1)
            self.says(outcome.stderr, f"topknot {command}: there is no trainer here; install the package topknot-trainer, or run")
            self.write("alone/topknot_trainer/__init__.py", "")
            program = self.write(f"alone/topknot_trainer/bin/{command}", '#!/bin/sh\necho "$0 runs $*"; exit 7\n')
            os.chmod(program, 0o755)
            outcome = call(command, "a.yaml", "x=1")
            self.assertEqual((outcome.returncode, outcome.stdout), (7, f"{program} runs a.yaml x=1\n"))

    def test_misuse_is_refused_before_any_work(self):
        run = self.add("dense")
        before = self.write("dense/metrics.csv", "kept")
        for arguments, said in (
            ([], "no run given; 'compare --help'"),
            (["dense", "--ouT", "x"], "did you mean '--out'?"),
            (["dense", "--target"], "--target requires argument"),
            (["dense", "--out", "x.doc"], "x.doc' says what to write; there are .html, .csv, .json"),
            (["dense", "--out", before], "metrics.csv: is a configuration or a file of a run"),
            (["dense", "--size", "3"], "--size"),
            *((["dense", "--target", target, "--out", "x.csv"], "write 0.7 or 70%") for target in ("x", "0", "170", "nan")),
        ):
            self.misused(*arguments, said=said)
        self.assertEqual(pathlib.Path(before).read_text(), "kept")
        table = self.write("t.csv", HEADER + row("a", 1, "90.00", 400, "compress.name=topk"))
        os.symlink(table, self.at("link.csv"))
        self.misused("t.csv", "--out", "link.csv", said="is an input")
        self.write("model.npy", "kept")
        os.symlink("model.npy", self.at("page.html"))
        self.misused("dense", "--out", "page.html", said="exists already")
        os.makedirs(run + "/checkpoints")
        self.misused("dense", "--out", "dense/checkpoints/x.csv", said="lies in the checkpoints of a run")
        self.misused("none", said="no such run directory")
        self.write("r.json", "{}")
        self.misused("r.json", "--out", "p.html", said="r.json: not a results.json")
        self.misused("r.json", "--out", "p.csv", said="stands alone")
        self.assertFalse(os.path.exists(self.at("x.csv")) or os.path.exists(self.at("p.html")))

    def test_a_file_that_cannot_be_written_leaves_nothing(self):
        self.add("dense")
        os.makedirs(self.at("closed"))
        self.misused("dense", "--out", "none/x.csv", said="none/x.csv: cannot be written")
        limit = ["bash", "-c", 'ulimit -f 1; trap "" XFSZ; exec "$@"', "-"]
        outcome = self.run_compare("dense", "--out", "closed/x.html", prefix=limit)
        self.assertEqual(outcome.returncode, 2)
        self.assertEqual(os.listdir(self.at("closed")), [])

    def test_a_full_standard_output_is_an_error(self):
        command = f"{sys.executable} {ROOT}/scripts/compare --help >/dev/full"
        outcome = subprocess.run(command, shell=True, text=True, stderr=subprocess.PIPE)
        self.assertEqual(outcome.returncode, 2)
        self.says(outcome.stderr, "standard output cannot be written: ")

    def test_help_fits_the_terminal_and_errors_have_a_colour_there(self):
        for columns in (60, 80, 120):
            text = cli.help_text(columns)
            for line in text.splitlines():
                if not line.startswith("  ") or "  " in line[2:]:  # no command, which stays whole
                    self.assertLessEqual(len(line), columns)
            self.says(text, "Examples:\n  ", "--baseline NAME")
        for plain in (False, True):
            main, other = pty.openpty()
            environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | (
                {"NO_COLOR": "1"} if plain else {}
            )
            command = [sys.executable, str(ROOT / "scripts/compare"), self.at("none")]
            subprocess.run(command, stderr=other, env=environment, check=False)
            os.close(other)
            said = os.read(main, 10000).decode()
            os.close(main)
            self.assertTrue(said.startswith("compare: " if plain else "\033[1;31mcompare:\033[0m "), said)


if __name__ == "__main__":
    unittest.main()
