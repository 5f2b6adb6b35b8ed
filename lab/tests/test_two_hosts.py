"""The recipe of docs/two_hosts.md on two emulated hosts: the page's script, the page's lines, the page's torchrun.

python3 lab/tests/test_two_hosts.py
"""

import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lab" / "bench"))
import two_hosts

probe = subprocess.run(
    [ROOT / "lab" / "netlab", "--hosts", "2", "--rate", "none", "--no-measure", "--", "true"], capture_output=True, text=True
)
if probe.returncode == 2:
    print(f"skipped: no hosts in namespaces here: {probe.stderr.strip()}")
    sys.exit(0)

OPTIONS = "--steps 40 --evaluate-every 20 --width 64 --layers 2 --heads 2 --context 16 --batch 4 --rate 0.003".split()


class TwoHostsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def trained(self, name, script):
        """The losses, and the bytes that host 0 sent; both hosts have the same weights."""
        text, log = self.folder / "text", self.folder / name
        text.write_text(" ".join(random.Random(1).choices("an old man went out to sea".split(), k=4000)))
        end = "dist.destroy_process_group()\n"
        self.assertEqual(script.count(end), 1)
        script = script.replace(end, f"torch.save([*model.parameters()], f'{log}/{{rank}}')\n{end}")
        curve, sent = two_hosts.train(script, text, "100mbit", OPTIONS, log)
        self.assertEqual([step for step, _, _ in curve], [20, 40], name)
        weights = [torch.load(log / str(rank), weights_only=False) for rank in range(2)]
        for a, b in zip(*weights, strict=True):
            self.assertTrue(torch.equal(a, b), f"{name}: other weights on the other host")
        return [loss for _, _, loss in curve], sent

    def test_two_lines_of_the_page_train_and_send_less(self):
        script, diffs = two_hosts.SCRIPT.read_text(), two_hosts.diffs()
        self.assertNotIn("topknot", script.split('"""')[2])
        self.assertEqual([*diffs], ["LocalSteps", "CompressionHook"])
        dense, bytes_of_dense = self.trained("DDP", script)
        self.assertLess(dense[-1], dense[0] - 0.3, dense)
        for name, most in [("LocalSteps", 0.15), ("CompressionHook", 0.4)]:
            self.assertEqual(sum(line[0] == "+" for line in diffs[name].splitlines()), 2)
            losses, sent = self.trained(name, two_hosts.patched(script, diffs[name]))
            self.assertLess(losses[-1], losses[0] - 0.3, f"{name}: {losses}")
            self.assertLess(losses[-1], dense[-1] + 0.5, f"{name}: {losses}, DDP {dense}")
            self.assertLess(sent, most * bytes_of_dense, f"{name}, DDP: {bytes_of_dense}")

    def test_lines_that_the_script_does_not_have_are_refused(self):
        for script in ("", "model = 1\nmodel = 1\n"):
            with self.assertRaisesRegex(ValueError, "has these lines [02] times"):
                two_hosts.patched(script, " model = 1\n+model = 2\n")


if __name__ == "__main__":
    unittest.main(verbosity=2)
