"""Images or tokens per second of whole runs against PyTorch at its best."""

import dataclasses
import os
import re
import struct

import runs

from .machine import Clocks
from .programs import USED_UP, run
from .report import PASSED, SKIPPED, Result
from .stage import end_of_run, fresh_run_directory, peer, stage, train_command

DEADLINE = 60  # seconds of a run
# Of the time by precision: the most wanted one comes first, with PyTorch, which takes most of it.
PRECISIONS = {"bf16": 4, "tf32": 1, "fp32": 1}
# What is off by default until a card has shown that it gains: in bf16 once more, with it as train.unproven.
UNPROVEN = {"early launches": ("early_launch", {"resnet20", "gpt"}), "plans": ("conv_plans", {"resnet20"})}


@dataclasses.dataclass
class Workload:
    model: str
    unit: str
    batch: int  # of images, or windows
    items: int  # of a step, in the unit
    steps: int
    share: float  # of the stage's time; the larger the network, the longer PyTorch compiles
    script: str  # PyTorch's
    peer: list  # its arguments
    train: list  # ours


def images(model, size, classes, steps, share):
    return Workload(
        model, "images/s", 128, 128, steps, share, "networks.py", [model],
        ["data.name=synthetic_images", f"data.image_size={size}", f"data.classes={classes}",
         "data.train_size=512", "data.test_size=128", "optimizer.lr=0.01"],
    )  # fmt: skip


def workloads(options):
    tokens = os.path.join(options.out, "runs", "tokens")
    return [
        images("resnet20", 32, 10, 400, 0.2), images("vgg16", 32, 10, 200, 0.2), images("resnet50", 224, 1000, 60, 0.35),
        Workload("gpt", "tokens/s", 16, 16 * 1024, 30, 0.25, "gpt.py",
                 ["--layers", "12", "--heads", "12", "--width", "768", "--window", "1024", "--tokens", "50257"],
                 ["model.layers=12", "model.heads=12", "model.width=768", "model.context=1024", "model.dropout=0",
                  "data.name=tokens", "data.vocabulary=50257", f"data.root={tokens}", "data.sequence_length=1024",
                  "optimizer.name=adamw", "optimizer.lr=1e-4", "train.clip_global=1"]),
    ]  # fmt: skip


def write_tokens(options):
    folder = os.path.join(options.out, "runs", "tokens")
    os.makedirs(folder, exist_ok=True)
    for name, count in (("train.bin", 600000), ("val.bin", 20000)):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(struct.pack(f"<{count}H", *(i * i * 7919 % 50257 for i in range(count))))


def peer_rates(options, work, seconds, report):
    """PyTorch's best in each precision, of what the script tries, as one result; by precision: the rate and the setting."""
    outcome = run([options.python, peer(work.script), "--device", "cuda", "--batch", str(work.batch), *work.peer, "--steps",
                   str(work.steps // 2), "--seconds", f"{0.8 * seconds:f}"], seconds)  # fmt: skip
    result = Result("train", f"PyTorch, {work.model}, batch {work.batch}", PASSED, outcome.seconds)
    best = {}
    for record in runs.json_lines(outcome.output):
        try:
            rate, setting, precision = float(record["per_second"]), record["setting"], record["precision"]
        except (KeyError, TypeError, ValueError):
            continue
        result.figures[f"{work.unit} {setting}"] = rate
        result.note = f"PyTorch {record.get('torch', '?')}"
        best[precision] = max(best.get(precision, (0, "")), (rate, setting), key=lambda known: known[0])
    if not best:
        result.status, result.note = SKIPPED, f"no PyTorch figure: {outcome.reason(options.python)}"
    elif outcome.timed_out:
        result.note += "; not all settings were tried in the time"
    report.add(result)
    return best


def graph_nodes(output):
    """Of a captured step, by what `train --verbose` says of the first one; 0 if it says nothing."""
    graphs = re.findall(r"step (\d+): a graph of (\d+) nodes", output)
    return sum(int(nodes) for step, nodes in graphs if step == graphs[0][0])


def measure(options, work, precision, name, clock, peers, unproven=None, without=None):
    """With `unproven`, its key is on, and `without` is the rate of the run without."""
    folder = fresh_run_directory(options, f"{work.model}-{precision}{'-' + unproven.replace(' ', '-') if unproven else ''}")
    value = UNPROVEN[unproven][0] if unproven else "none"
    with Clocks(options) as clocks:
        outcome = clock.run(train_command(
            options, folder, f"model.name={work.model}", *work.train, f"data.batch_size={work.batch}",
            f"train.precision={precision}", f"train.unproven={value}", "train.epochs=0", f"train.max_steps={work.steps}", "train.eval_every=0",
            "train.check_every=0", "train.step_times=false", "train.checkpoint_keep=0", "--verbose",
        ), DEADLINE)  # fmt: skip
    result = Result("train", name, PASSED, outcome.seconds)
    step = end_of_run(folder).get("step_p50_s")
    if not outcome.ok():
        return result.failure(outcome, outcome.reason("train"))
    if not isinstance(step, (int, float)) or not step > 0:
        return result.failure(outcome, "the run's metrics have no end")
    rate = work.items / step
    result.figures = {work.unit: rate}
    if unproven:
        result.figures |= {"times without": rate / without}
        if unproven == "plans" and not re.search(r": plan \d+ of cuDNN's graph API", outcome.output):
            result.note = "no plan was faster than cuDNN's algorithms, or none could be compiled"
        return clocks.add_to(result)
    known = peers.get("bf16" if precision == "bf16" else "tf32")  # PyTorch's fp32 is with TF32, its best without bf16
    if known:
        result.figures |= {f"{work.unit} of PyTorch": known[0], "times": rate / known[0]}
        result.note = f"PyTorch's best: {known[1]}"
    if nodes := graph_nodes(outcome.output):
        result.figures["nodes"] = nodes
    return clocks.add_to(result)


@stage("train", "train")
def run_train(options, report, clock, _program):
    write_tokens(options)
    # By precision, and then what is unproven, whose share is small: nothing of PyTorch's is measured.
    checks = [(work, precision, unproven, work.share * part * (0.1 if unproven else 1)) for precision, part in PRECISIONS.items()
              for unproven in (None, *UNPROVEN) for work in workloads(options)
              if not unproven or (precision == "bf16" and work.model in UNPROVEN[unproven][1])]  # fmt: skip
    peers, rates = {}, {}
    for at, (work, precision, unproven, share) in enumerate(checks):
        name = f"{work.model} {precision}, batch {work.batch}{', ' + unproven if unproven else ''}"
        without = rates.get((work.model, precision))
        if clock.used_up() or (unproven and not without):
            report.skip("train", name, USED_UP if clock.used_up() else f"there is no rate without {unproven}")
            continue
        own = clock.part(share / sum(share for _, _, _, share in checks[at:]))
        if work.model not in peers:
            peers[work.model] = peer_rates(options, work, 0.75 * own.left(), report)
        report.add(result := measure(options, work, precision, name, own, peers[work.model], unproven, without))
        if not unproven:
            rates[(work.model, precision)] = result.figures.get(work.unit)
