"""The results, written anew after each one: gpu-check.json for programs, gpu-check.txt for people."""

import dataclasses
import json
import os
import re

import runs

from . import UserError

PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"

# Each stage's checks, as a stage that is not run skips them.
CHECKS = {
    "smoke": ["every model in bf16, tf32 and fp32, eager and captured"],
    "tests": ["ops and compressors against the CPU", "some under memcheck", "some under racecheck", "some under synccheck"],
    "nccl": ["every collective exact, 1, 2 and 4 ranks", "2 processes: the weights of 2 threads"],
    "kernels": ["selections against a device copy", "selections against torch.topk"],
    "train": ["images or tokens per second of resnet20, vgg16, resnet50 and gpt", "the same against PyTorch"],
}


@dataclasses.dataclass
class Result:
    stage: str
    name: str
    status: str = PASSED
    seconds: float = 0.0
    figures: dict = dataclasses.field(default_factory=dict)  # "GB/s", "images/s", in this order
    note: str = ""  # why it was skipped or failed, in one line
    output: str = ""  # of a failed program, its end; in the JSON only

    def failure(self, outcome, note):
        """This as a failure, with the end of the program's output; as skipped where the stage's time ended first."""
        self.status = SKIPPED if outcome.cut_off else FAILED
        self.note, self.output = note, outcome.output[-4000:]
        return self

    def figures_text(self):
        return ", ".join(f"{value:.4g} {name}" for name, value in self.figures.items())

    def json(self):
        one = {
            "stage": self.stage,
            "name": self.name,
            "result": self.status,
            "seconds": float(self.seconds),
            "figures": {name: float(value) for name, value in self.figures.items()},
        }
        return one | {key: text for key, text in (("note", self.note), ("output", self.output)) if text}


def one_line(text):
    """A program's line may hold anything; a table's line may not."""
    return re.sub(r"[\x00-\x1f\x7f]", " ", text)


class Report:
    def __init__(self, folder):
        """`folder` is made if there is none. Throws UserError if it cannot be written."""
        self.folder, self.about, self.results = folder, {}, []
        if not folder:
            raise UserError("--out: the folder of the results has no name")
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out: {folder} cannot be made: {error.strerror}") from error
        self.write()

    def add(self, result):
        """Prints the line and writes the files."""
        result.note = one_line(result.note)
        words = "; ".join(filter(None, [result.figures_text(), result.note]))
        print(f"{result.stage:<8} {result.status:<8} {result.name:<46} {words}", flush=True)
        self.results.append(result)
        self.write()

    def skip(self, stage, name, reason):
        self.add(Result(stage, name, SKIPPED, note=reason))

    def skip_all(self, stage, reason):
        for check in CHECKS[stage]:
            self.skip(stage, check, reason)

    def any(self, status):
        return any(result.status == status for result in self.results)

    def write(self):
        """The two files, each complete or as it was before. Throws UserError if they cannot be written any more."""
        everything = {"about": self.about, "results": [result.json() for result in self.results]}
        for name, text in (("json", json.dumps(everything, indent=2, ensure_ascii=False) + "\n"), ("txt", self.table())):
            path = os.path.realpath(os.path.join(self.folder, "gpu-check." + name))
            try:
                runs.write_text(path, text)
            except OSError as error:
                raise UserError(
                    f"{path}: cannot be written: {error.strerror}; free space or choose another place with --out"
                ) from error

    def table(self):
        text = "".join(f"{what}: {one_line(value)}\n" for what, value in self.about.items())
        text += ("\n" if self.about else "") + f"{'stage':<8} {'result':<8} {'seconds':>8}  check\n"
        for result in self.results:
            text += f"{result.stage:<8} {result.status:<8} {result.seconds:>8.1f}  {result.name}"
            text += f": {result.figures_text()}" if result.figures else ""
            text += f" ({result.note})\n" if result.note else "\n"
        return text
