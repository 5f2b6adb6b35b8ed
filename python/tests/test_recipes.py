"""The programs of docs/examples/pytorch, each with as many processes as its first line says.

python3 python/tests/test_recipes.py
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from topknot.compare.read import read_run

FOLDER = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "examples" / "pytorch"
NEEDS = {"replicas": "torchft", "use_accelerate": "accelerate", "use_lightning": "lightning", "use_transformers": "transformers"}

if importlib.util.find_spec("torch") is None:
    print("skipped: PyTorch is not installed")
    sys.exit(0)


class RecipesTest(unittest.TestCase):
    def test_every_program_trains_and_says_what_it_sent(self):
        programs = sorted(FOLDER.glob("*.py"))
        self.assertGreaterEqual(len(programs), 5)
        left_out, temporary = [], tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        folder, environment = temporary.name, {**os.environ, "OMP_NUM_THREADS": "1"}
        if library := os.environ.get("TOPKNOT_LIBRARY"):
            environment["TOPKNOT_LIBRARY"] = os.path.abspath(library)  # the programs run in another folder
        for program in programs:
            if (needed := NEEDS.get(program.stem)) and importlib.util.find_spec(needed) is None:
                left_out.append(needed)
                continue
            with self.subTest(program.name):
                # Without the interpreter's own end: after collectives over gloo, PyTorch 2.9 and 2.10 sometimes abort there.
                run = "import os, runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); sys.stdout.flush(); os._exit(0)"
                (ranks,) = re.findall(r"^\"\"\".*--nproc-per-node (\d)", program.read_text())
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
                command += ["--no-python", sys.executable, "-c", run, str(program)]
                if needed == "transformers" and importlib.util.find_spec("accelerate") is None:
                    left_out.append("accelerate, for transformers")
                    continue
                ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=folder)
                self.assertEqual(ended.returncode, 0, ended.stdout + ended.stderr)
                self.assertRegex(ended.stdout, r"sent \d+ bytes|bits per parameter and step")
        own = (FOLDER / "own_method.py").read_text()
        method = own[own.index("class TopK") : own.index("dist.init")].strip()
        self.assertIn(method, (FOLDER.parent.parent / "pytorch.md").read_text(), "the page shows another method than the program")
        run = read_run(folder + "/runs/own_method")
        self.assertTrue(run.end and run.end.steps == 20 and run.last == run.last, "the run's record")
        if left_out:
            print(f"left out, not installed: {', '.join(left_out)}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
