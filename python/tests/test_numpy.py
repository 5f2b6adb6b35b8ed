"""The NumPy interface of libtopknot. Run as a program, with nothing but NumPy and the package:

python3 python/tests/test_numpy.py
"""

from __future__ import annotations

import gc
import os
import pathlib
import re
import subprocess
import sys
import threading
import unittest

try:
    import numpy as np
except ImportError:
    print("skipped: no numpy")
    sys.exit(0)

import topknot
from topknot import Compressor, Error, State, exchange

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SHAPES = {"conv": (8, 4, 3, 3), "bias": (8,), "linear": (40, 31), "scalar": (), "odd": (7, 13)}
METHODS = sorted(topknot.methods()["methods"])
NEEDS = {"threshold": {"threshold": 0.8}}  # keys without which a method refuses


def make(method, ranks, shapes=SHAPES, **keys):
    return [Compressor(method, shapes, rank=r, ranks=ranks, **{"density": 0.05, **NEEDS.get(method, {}), **keys})
            for r in range(ranks)]  # fmt: skip


def gradients(ranks, step, shapes=SHAPES):
    return [{name: np.random.default_rng([rank, step, i]).standard_normal(shape).astype(np.float32).reshape(shape)
             for i, (name, shape) in enumerate(shapes.items())} for rank in range(ranks)]  # fmt: skip


def bits(arrays):
    return {name: array.tobytes() for name, array in arrays.items()}


def states(ranks):
    return [c.save() for c in ranks]


class Methods(unittest.TestCase):
    def test_methods_lists_what_the_page_lists(self):
        page = ROOT / "docs" / "methods.md"
        if not page.exists():
            self.skipTest("the page is not here")
        tables = re.findall(
            r"^\| `compress\.name` \| (?!fills).*\n\|[-| ]*\n((?:\|.*\n)+)", page.read_text(encoding="utf-8"), re.M
        )
        listed = [row.split("`")[1] for table in tables for row in table.splitlines()]
        self.assertGreater(len(listed), 20)
        self.assertEqual(sorted(listed), METHODS)

    def test_the_commands_list_and_try_every_method(self):
        call = lambda *words: subprocess.run([sys.executable, "-m", "topknot", *words], text=True, capture_output=True)
        listed = call("methods")
        self.assertEqual(listed.returncode, 0, listed.stderr)
        rows = dict(re.findall(r"^(\w+) +((?:\S+ )*\S+)? +[\d.]+(?:  .*)?$", listed.stdout, re.M))
        self.assertEqual(sorted(rows), METHODS)
        self.assertEqual([name for name, paper in rows.items() if not paper], ["dense"])
        self.assertRegex(listed.stdout, r"(?m)^powersgd +Vogels et al. 2019 +1.00  rank=4, min_compression=2$")
        self.assertRegex(listed.stdout, r"(?m)^dense +32.00$")
        self.assertIn("recipe diloco", listed.stdout)
        one = call("methods", "powersgd")
        self.assertRegex(one.stdout, r"^powersgd \(Vogels et al. 2019\): ")
        self.assertRegex(one.stdout, r"(?m)^  rank=4 +[a-z]")
        self.assertEqual(call("methods", "tpok").returncode, 2)
        self.assertIn("did you mean 'topk'?", call("methods", "tpok").stderr)
        tried = call("doctor")
        self.assertEqual((tried.returncode, tried.stderr), (0, ""))
        self.assertIn(f"{len(METHODS)} of {len(METHODS)} methods average", tried.stdout)
        self.assertIn("libtopknot", tried.stdout)

    def test_methods_describes_keys_and_pieces(self):
        told = topknot.methods()
        density = next(key for key in told["keys"] if key["name"] == "density")
        self.assertEqual((density["default"], density["least"], density["greatest"]), (0.001, 0, 1))
        self.assertIn({"A", "B"}, [set(o.get("choices", ())) for o in told["methods"]["regtopk"]["options"]])
        self.assertIn("residual", told["pieces"]["memory"])
        for method in told["methods"].values():
            self.assertTrue(method["help"])

    def test_a_round_tells_what_its_rank_sends(self):
        ranks = make("topk", 2, {"a": (10, 10), "b": (4, 5)}, density=0.05)
        given = [{"a": np.arange(100, dtype=np.float32).reshape(10, 10), "b": np.ones((4, 5), np.float32)} for _ in ranks]
        rounds = [c.encode(g, step=0) for c, g in zip(ranks, given)]
        self.assertEqual(rounds[0].sent("a"), topknot.Sent(5, 5, 0, 95.0, None, None))
        self.assertIs(exchange(rounds), State.DONE)
        sent = rounds[1].sent("a")
        self.assertEqual((sent.indices.tolist(), sent.values.tolist()), ([95, 96, 97, 98, 99],) * 2)
        self.assertEqual(rounds[1].sent("b").entries, 1)
        self.assertRaises(Error, rounds[0].sent, "c")
        rounds[0].discard()
        self.assertRaises(Error, rounds[0].sent, "a")

    def test_a_nan_is_found_by_all_ranks_and_changes_nothing(self):
        ranks = make("topk", 2)
        topknot.average(ranks, gradients(2, 0), step=0)
        before, given = states(ranks), gradients(2, 1)
        given[1]["linear"][3, 5] = np.nan
        with self.assertRaises(topknot.NotFinite):
            topknot.average(ranks, given, step=1)
        self.assertEqual(states(ranks), before)

    def test_undo_takes_back_the_last_step(self):
        ranks = make("dgc", 2, undo=True)
        topknot.average(ranks, gradients(2, 0), step=0)
        before = states(ranks)
        average = topknot.average(ranks, gradients(2, 1), step=1)
        after = states(ranks)
        for step, expected in ((0, after), (1, before)):  # 0 is no longer the last
            for c in ranks:
                c.undo(step)
            self.assertEqual(states(ranks), expected)
        self.assertEqual(bits(topknot.average(ranks, gradients(2, 1), step=1)), bits(average))

    def test_weights_are_those_of_all_ranks(self):
        ranks = make("topk", 2, {"m": (2, 2)}, density=0.25)
        given = [{"m": np.array([[v, 0], [0, 1]], np.float32)} for v in (4, 8)]
        for weights, average in (([1, 3], 7), (None, 6)):
            for c in ranks:
                c.set_weights(weights)
            self.assertEqual(topknot.average(ranks, given, step=0)["m"][0, 0], average)
        self.assertRaises(Error, ranks[0].set_weights, [1])


class Values(unittest.TestCase):
    def test_what_is_not_sent_stays_in_the_residual(self):
        ranks = make("topk", 1, dense_1d=False)
        given = gradients(1, 0)
        average = topknot.average(ranks, given, step=0)
        for name in SHAPES:
            np.testing.assert_array_equal(average[name] + ranks[0].residual(name), given[0][name])
        k = int(0.05 * average["linear"].size)
        self.assertEqual(np.count_nonzero(average["linear"]), k)
        self.assertEqual(np.count_nonzero(topknot.average(ranks, given, step=1, density=0.5)["linear"]), 620)

    def test_a_residual_decays_and_threads_change_no_bits(self):
        shapes, ended = {"big": (600, 500)}, []
        for threads in (1, 3):
            ranks, given = make("topk", 1, shapes, feedback_decay=0.5, threads=threads), gradients(1, 0, shapes)
            average = topknot.average(ranks, given, step=0)
            np.testing.assert_array_equal(ranks[0].residual("big"), 0.5 * (given[0]["big"] - average["big"]))
            ended.append((bits(average), states(ranks)))
        self.assertEqual(*ended)

    def test_a_residual_can_be_set(self):
        ranks = make("topk", 1, density=1)
        topknot.average(ranks, gradients(1, 0), step=0)
        owed = np.full(SHAPES["linear"], 0.5, np.float32)
        ranks[0].set_residual("linear", owed)
        np.testing.assert_array_equal(ranks[0].residual("linear"), owed)
        zeros = [{name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}]
        average = topknot.average(ranks, zeros, step=1)
        np.testing.assert_array_equal(average["linear"], owed)
        self.assertIsNone(make("dense", 1)[0].residual("linear"))
        with self.assertRaisesRegex(Error, r"the residual has shape \(2,\), not \(40, 31\)"):
            ranks[0].set_residual("linear", owed[0, :2])
        with self.assertRaisesRegex(Error, "not finite"):
            ranks[0].set_residual("linear", np.full_like(owed, np.nan))
        np.testing.assert_array_equal(ranks[0].residual("linear"), 0 * owed)
        with self.assertRaisesRegex(Error, "there is no tensor 'none'"):
            ranks[0].residual("none")

    def test_scales_multiply_before_and_after(self):
        given = gradients(1, 0)
        round_ = make("dense", 1)[0].encode(given[0], step=0, scale=0.25)
        self.assertIs(exchange([round_]), State.DONE)
        np.testing.assert_array_equal(round_.commit(scale=8)["linear"], given[0]["linear"] * 2)

    def test_bfloat16_comes_and_goes_as_uint16(self):
        floats = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
        wide = floats.view(np.uint32)
        narrow = ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)
        compressor = Compressor("dense", {"x": floats.shape})
        with self.assertRaisesRegex(Error, r"type uint16, not float32 \(bfloat16 comes as uint16, with type='bfloat16'\)"):
            compressor.encode({"x": narrow}, step=0)
        round_ = compressor.encode({"x": narrow}, step=0, type="bfloat16")
        self.assertIs(exchange([round_]), State.DONE)
        average = round_.commit()["x"]
        np.testing.assert_array_equal(average, narrow)
        for out, type_ in ((np.empty(1000, np.uint16), None), (np.empty(1000, np.float32), "float32")):
            round_ = compressor.encode({"x": floats}, step=0)
            self.assertIs(exchange([round_]), State.DONE)
            round_.commit({"x": out}, type=type_ or "bfloat16")
            np.testing.assert_array_equal(out, narrow if type_ is None else floats)

    def test_sums_may_be_of_bfloat16(self):
        ranks = make("dense", 3, values="bf16")
        given = gradients(3, 0)
        self.assertEqual(ranks[0].encode(given[0], step=0).message.sum_type, "bfloat16")
        gc.collect()
        average = topknot.average(ranks, given, step=0)
        mean = np.mean([g["linear"] for g in given], axis=0)
        np.testing.assert_allclose(average["linear"], mean, atol=0.03)

    def test_averages_may_be_written_over_the_gradients(self):
        given = gradients(1, 0)[0]
        expected = {name: g.copy() for name, g in given.items()}
        round_ = make("dense", 1)[0].encode(given, step=0)
        for g in given.values():
            g[...] = 0
        self.assertIs(exchange([round_]), State.DONE)
        got = round_.commit(given)
        for name in SHAPES:
            self.assertIs(got[name], given[name])
            np.testing.assert_array_equal(given[name], expected[name])


class Refusals(unittest.TestCase):
    def refuses(self, text, call, *args, **kwargs):
        with self.assertRaises(Error) as caught:
            call(*args, **kwargs)
        self.assertIn(text, str(caught.exception))
        self.assertIsInstance(caught.exception, ValueError)

    def test_methods_and_keys(self):
        self.refuses("'topkk'; did you mean 'topk'?", Compressor, "topkk", SHAPES)
        self.refuses("key 'dense_1d' must be true or false, not '3'", Compressor, "topk", SHAPES, dense_1d=3)
        self.refuses("key 'seed' must be a whole number", Compressor, "topk", SHAPES, seed=0.5)
        self.refuses("key 'seed' must be a number, a bool or a str, not a list", Compressor, "topk", SHAPES, seed=[1])
        self.refuses("zero byte", Compressor, "topk", SHAPES, codec="raw\0")
        self.refuses("zero byte", Compressor, "topk\0", SHAPES)
        self.refuses("key 'density' is given twice", Compressor, "topk", SHAPES, keys={"density": 0.1}, density=0.1)
        for value in (True, np.True_, np.float32(0.5), np.int64(1), "true"):
            Compressor("topk", SHAPES, **{"density" if isinstance(value, np.floating) else "dense_1d": value})
        Compressor("powersgd", SHAPES, rank=1, ranks=2, keys={"rank": 2})

    def test_ranks_and_shapes(self):
        self.refuses("rank 2 of 2 does not exist", Compressor, "topk", SHAPES, rank=2, ranks=2)
        self.refuses("rank -1 of 2 does not exist", Compressor, "topk", SHAPES, rank=-1, ranks=2)
        self.refuses("must fit 32 bits", Compressor, "topk", SHAPES, ranks=(1 << 32) + 1)
        self.refuses("there is no tensor", Compressor, "topk", {})
        for shape in ((0,), (-1, 3), (1 << 20, 1 << 20), (1 << 31, 1 << 31, 1 << 31), (1 << 62, 4)):
            self.refuses("elements", Compressor, "topk", {"x": shape})
        self.refuses("zero byte", Compressor, "topk", {"x\0": (1,)})
        with self.assertRaises(TypeError):
            Compressor("topk", {"x": (1.5,)})

    def test_gradients(self):
        c, g = make("topk", 1)[0], gradients(1, 0)[0]
        before = c.save()
        linear = g["linear"]
        self.refuses("gradient 'linear' has shape (31, 40), not (40, 31)", c.encode, {**g, "linear": linear.T}, step=0)
        self.refuses("not C-contiguous", c.encode, {"linear": np.asfortranarray(linear)}, step=0)
        unaligned = np.frombuffer(bytes(linear.nbytes + 1), np.uint8)[1:].view(np.float32).reshape(linear.shape)
        self.refuses("is not aligned", c.encode, {"linear": unaligned}, step=0)
        self.refuses("numbers of type float64, not float32", c.encode, {"linear": linear.astype(float)}, step=0)
        self.refuses("numbers of type >f4", c.encode, {"linear": linear.astype(">f4")}, step=0)
        self.refuses("gradient 'linear' is a list", c.encode, {"linear": linear.tolist()}, step=0)
        self.refuses("numbers of type float16, not float32", c.encode, {**g, "odd": g["odd"].astype(np.float16)}, step=0)
        self.refuses("there is no tensor 'other'", c.encode, {"other": linear}, step=0)
        self.refuses("there is no tensor to encode", c.encode, {}, step=0)
        self.refuses("there is no type 'int8'", c.encode, g, step=0, type="int8")
        self.refuses("order must have", c.encode, g, step=0, order=["linear"])
        self.refuses("order must have", c.encode, {"odd": g["odd"]}, step=0, order=["odd", "odd"])
        self.refuses("the step's density must be", c.encode, g, step=0, density=1.5)
        self.refuses("the step's density must be", c.encode, g, step=0, density=float("nan"))
        self.refuses("must fit 64 bits", c.encode, g, step=1 << 63)
        self.refuses("there is no tensor 9", c.encode_pointers, [9], [linear.ctypes.data], topknot.Type.FLOAT32, step=0)
        self.refuses("2 indices and 1 addresses", c.encode_pointers, [0, 1], [1], topknot.Type.FLOAT32, step=0)
        self.refuses("is null", c.encode_pointers, [0], [0], topknot.Type.FLOAT32, step=0)
        with self.assertRaisesRegex(ValueError, "7 is not a valid Type"):
            c.encode_pointers([2], [linear.ctypes.data], 7, step=0)
        whole = make("topk", 1, scope="model")[0]
        self.refuses("scope=model", whole.encode, {"linear": linear}, step=0)
        self.refuses("in order", whole.encode, g, step=0, order=list(SHAPES)[::-1])
        self.assertEqual(c.save(), before)
        with c.encode(g, step=0) as round_:
            self.assertIs(exchange([round_]), State.DONE)

    def test_a_tensor_is_in_one_round_at_a_time(self):
        c, g = make("topk", 1)[0], gradients(1, 0)[0]
        first = c.encode({"odd": g["odd"]}, step=0)
        self.refuses("tensor 'odd' is in a round that is not committed or discarded yet", c.encode, g, step=0)
        self.refuses("a round is under way", c.save)
        self.refuses("a round is under way", c.load, b"")
        self.refuses("a round is under way", c.residual, "odd")
        self.refuses("key undo=true", make("topk", 1)[0].undo, 0)
        self.refuses("no step -1", make("topk", 1, undo=True)[0].undo, -1)
        del first
        gc.collect()  # a round that nobody has is discarded
        c.encode(g, step=0).discard()
        c.save()

    def test_the_order_of_calls(self):
        c, g = make("topk", 2)[0], gradients(2, 0)[0]
        round_ = c.encode(g, step=0)
        self.refuses("every rank's is needed", round_.decode)
        self.refuses("there are 2 ranks, and 1 blocks", round_.decode, [b""])
        self.refuses("rank 1's block is not a contiguous buffer", round_.decode, [b"", 3])
        block = round_.message.block.tobytes()
        self.assertIs(round_.decode([block, bytearray(block)]), State.DONE)
        self.refuses("nothing more to send", lambda: round_.message)
        self.refuses("no message left to decode", round_.decode, [block, memoryview(block)])
        odd = np.zeros(SHAPES["odd"], np.float32)
        self.refuses("no tensor 'what' in the round", round_.commit, {"what": odd})
        self.refuses("out['odd'] has shape", round_.commit, {"odd": odd.T})
        odd.flags.writeable = False
        self.refuses("out['odd'] cannot be written to", round_.commit, {"odd": odd})
        self.refuses("5 tensors, and there are 1 addresses", round_.commit_pointers, [None], topknot.Type.FLOAT32)
        self.assertTrue(round_.open)
        round_.commit({})
        self.assertFalse(round_.open)
        self.refuses("the round has ended", round_.commit)
        self.refuses("the round has ended", lambda: round_.message)
        round_.discard()
        early = c.encode(g, step=1)
        self.refuses("not decoded", early.commit)
        self.assertFalse(early.open)  # the library has discarded it
        with c.encode(g, step=1) as late:
            c.close()
            c.close()
            self.refuses("the round has ended", lambda: late.message)
        for call in (c.save, lambda: c.encode(g, step=1), lambda: c.load(b""), lambda: c.undo(0), lambda: c.residual("odd")):
            self.refuses("the compressor is closed", call)
        self.refuses("a compressor and gradients for each of 2 ranks", topknot.average, make("topk", 2)[::-1], [g, g], step=0)

    def test_states_of_others(self):
        state = make("topk", 2)[0].save()
        self.refuses("ranks", make("topk", 3)[0].load, state)
        self.refuses("method 'topk', not 'randk'", make("randk", 2)[0].load, state)
        self.refuses("another number of tensors", make("topk", 2, {"odd": SHAPES["odd"]})[0].load, state)
        self.refuses("another shape", make("topk", 2, {**SHAPES, "odd": (13, 7)})[0].load, state)


class Damage(unittest.TestCase):
    def test_blocks_that_were_mixed_up_are_refused(self):
        ranks = make("topk", 2)
        given = gradients(2, 0)
        some = {name: given[1][name] for name in ("conv", "bias")}
        with ranks[0].encode(given[0], step=0) as one, ranks[1].encode(some, step=0) as two:
            with self.assertRaisesRegex(Error, "rank 1's message is cut off; did all ranks encode the same tensors"):
                one.decode([one.message.block, two.message.block])


class Life(unittest.TestCase):
    def test_a_compressor_may_be_closed_beside_calls(self):
        for _ in range(20):
            c, g = make("topk", 1)[0], gradients(1, 0)[0]
            failures = []

            def work(c=c, g=g, failures=failures):
                try:
                    while True:
                        with c.encode({"linear": g["linear"]}, step=0) as round_:
                            exchange([round_])
                except Error as error:
                    failures.append(str(error))

            thread = threading.Thread(target=work)
            thread.start()
            c.close()
            thread.join()
            self.assertIn(failures, (["the compressor is closed"], ["the round has ended"]))

    def test_cycles_and_views_are_collected(self):
        for _ in range(50):
            c = make("topk", 1)[0]
            round_ = c.encode(gradients(1, 0)[0], step=0)
            c.mine, round_.mine = round_, c
            block = round_.message.block
            with self.assertRaises(ValueError):
                block[:] = 0
            copy = block.tobytes()
            del c, round_
            gc.collect()
            self.assertEqual(block.tobytes(), copy)  # the view keeps its round
            del block
            gc.collect()

    def program(self, text, **environment):
        path = os.pathsep.join(filter(None, sys.path))
        return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False,
                              env={**os.environ, "PYTHONPATH": path, **environment})  # fmt: skip

    def test_the_interpreter_ends_in_peace(self):
        done = self.program(
            "import sys, numpy, topknot\n"
            "c = topknot.Compressor('topk', {'x': (10, 10)})\n"
            "r = c.encode({'x': numpy.ones((10, 10), numpy.float32)}, step=0)\n"
            "b = r.message.block\n"
            "c.self = c\n"
            "sys.keep = [topknot.Compressor('topk', {'x': (10, 10)}), r]\n"
        )
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))

    def test_a_library_that_is_missing_or_another_is_named(self):
        done = self.program("import topknot; topknot.methods", TOPKNOT_LIBRARY="/nowhere/libtopknot.so")
        self.assertEqual(done.returncode, 1)
        self.assertIn("ImportError: topknot: /nowhere/libtopknot.so cannot be loaded", done.stderr)
        done = self.program("import topknot; topknot.methods", TOPKNOT_LIBRARY="libm.so.6")
        self.assertIn("ImportError: topknot: libm.so.6 cannot be loaded", done.stderr)

    def test_the_header_has_the_functions_that_are_declared_here(self):
        header = ROOT / "include" / "topknot.h"
        if not header.exists():
            self.skipTest("the header is not here")
        text = header.read_text(encoding="utf-8")
        declared = re.findall(r"^(?:const char\*|int|void|topknot_result) topknot_(\w+)\(([^)]*)\)", text, re.M)
        counts = {name: 0 if arguments == "void" else arguments.count(",") + 1 for name, arguments in declared}
        from topknot import _library

        self.assertEqual(counts, {name: len(arguments) for name, (_, arguments) in _library._FUNCTIONS.items()})
        self.assertIn(f"#define TOPKNOT_INTERFACE {_library.INTERFACE}\n", text)

    def test_a_gpu_that_is_not_there_is_refused(self):
        with self.assertRaisesRegex(Error, "has no CUDA|GPU"):
            make("topk", 1, device="cuda:99")

    def test_what_is_said_of_a_compressor(self):
        c = make("topk", 2)[1]
        self.assertEqual(repr(c), "<topknot.Compressor topk, rank 1 of 2, 5 tensors of 1628 elements>")
        self.assertEqual((c.names, c.shapes, c.index("odd")), (tuple(SHAPES), SHAPES, 4))
        self.assertRegex(topknot.__version__, r"^\d+\.\d+\.\d+$")


if __name__ == "__main__":
    unittest.main()
