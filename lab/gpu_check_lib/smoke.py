"""A few steps of every model in every precision, each in its own process, eager and captured, of some in bf16 with early
launches too: the same weights."""

import os
import re
import struct
import wave

from .programs import USED_UP, run
from .report import CHECKS, PASSED, Result
from .stage import end_of_run, fresh_run_directory, stage, train_command

SMOKE_STEPS = 8  # captured ones replay the last of them
DEADLINE = 60  # seconds of the processes that run at a time
SMOKE_TOGETHER = 2  # models at a time, two or three processes each: the driver starts one process after the other
SMOKE_TWINS = {"resnet32", "resnet44", "resnet56", "resnet110", "resnet34", "resnet152", "vgg16"}  # of others' layers
SMOKE_EAGER = {"deep_speech"}  # whose steps differ in length, and are never captured
SMOKE_EARLY = {"resnet20", "gpt"}  # in bf16 with train.unproven=early_launch too, which is off by default
SMOKE_IMAGES = {"alexnet": 64, "alexnet_grouped": 64, "inception_v4": 96}  # the smallest side that a model takes, if not 32
RECORDINGS = {"1": 16000, "2": 24000}  # samples, at 16,000 a second


def smoke_data(options):
    """A text and some recordings, for the models that take no pictures; returns their folders."""
    text, speech = (os.path.join(options.out, "runs", name) for name in ("text", "speech"))
    for folder in (text, speech):
        os.makedirs(folder, exist_ok=True)
    with open(os.path.join(text, "input.txt"), "w", encoding="utf-8") as file:
        file.writelines(f"line {i * i * 7919 % 10007} of a text\n" for i in range(2000))
    for name, samples in RECORDINGS.items():
        with wave.open(os.path.join(speech, name + ".wav"), "wb") as sound:
            sound.setnchannels(1), sound.setsampwidth(2), sound.setframerate(16000)
            sound.writeframes(b"".join(struct.pack("<h", i * i % 8191 - 4096) for i in range(samples)))
    for split in ("train", "test"):
        with open(os.path.join(speech, split + ".tsv"), "w", encoding="utf-8") as file:
            file.writelines(f"{name}.wav\tA TEXT\n" for name in RECORDINGS)
    return text, speech


def smoke_settings(model, text, speech):
    """Of one model: its data."""
    if model in ("gpt", "llama", "lstm_lm"):
        return ["data.name=text", "data.tokens=char", f"data.root={text}", "data.sequence_length=32",
                "data.batch_size=4"]  # fmt: skip
    if model == "deep_speech":
        return ["data.name=speech", f"data.root={speech}", "data.batch_size=2", "train.epochs=20"]
    return ["data.name=synthetic_images", "data.train_size=128", "data.test_size=16", "data.batch_size=8",
            f"data.image_size={SMOKE_IMAGES.get(model, 32)}"]  # fmt: skip


def smoke_kinds(model, precision):
    return ("eager", "captured", "early") if model in SMOKE_EARLY and precision == "bf16" else ("eager", "captured")


def smoke_result(name, kinds, outcomes, folders):
    result = Result("smoke", name, PASSED, sum(outcome.seconds for outcome in outcomes))
    for outcome in outcomes:
        if not outcome.ok():
            return result.failure(outcome, outcome.reason("train"))
    weights = [end_of_run(folder).get("parameter_checksum", "") for folder in folders]
    for kind, outcome, found in zip(kinds, outcomes, weights):
        if not found or found != weights[0]:
            return result.failure(outcome, f"weights {weights[0] or '?'} of eager steps, {found or '?'} of {kind} ones")
    return result


def smoke_command(options, model, precision, kind, data):
    folder = fresh_run_directory(options, f"smoke-{model}-{precision}-{kind}")
    return train_command(
        options, folder, f"model.name={model}", *smoke_settings(model, *data), f"train.precision={precision}",
        f"train.graphs={'false' if kind == 'eager' else 'true'}", f"train.unproven={'early_launch' if kind == 'early' else 'none'}",
        "train.deterministic=true", "train.step_times=false",
        f"train.max_steps={SMOKE_STEPS}", "optimizer.lr=0.001", "compress.name=topk", "compress.density=0.01",
        "train.checkpoint_keep=0", "--quiet",
    ), folder  # fmt: skip


@stage("smoke", "train")
def run_smoke(options, report, clock, train):
    listed = run([train, "--list", "models"], 20)
    models = [name for name in re.findall(r"^([a-z0-9_]+) +(?:\d+|-)\s", listed.output, re.MULTILINE)
              if name not in SMOKE_TWINS]  # fmt: skip
    if not models:
        report.add(Result("smoke", CHECKS["smoke"][0]).failure(listed, "train --list models names none"))
        return
    data = smoke_data(options)
    for precision in ("bf16", "tf32", "fp32"):
        for begin in range(0, len(models), SMOKE_TOGETHER):
            part = models[begin : begin + SMOKE_TOGETHER]
            kinds = {model: smoke_kinds(model, precision) for model in part}
            names = [f"{model} {precision}, {'two runs' if model in SMOKE_EAGER else ' = '.join(kinds[model])}"
                     for model in part]  # fmt: skip
            if clock.used_up():
                for name in names:
                    report.skip("smoke", name, USED_UP)
                continue
            commands = [smoke_command(options, model, precision, kind, data)
                        for model in part for kind in kinds[model]]  # fmt: skip
            outcomes, folders = clock.run_all([(argv, {}) for argv, _ in commands], DEADLINE), [c[1] for c in commands]
            for model, name in zip(part, names):
                n = len(kinds[model])
                report.add(smoke_result(name, kinds[model], outcomes[:n], folders[:n]))
                outcomes, folders = outcomes[n:], folders[n:]
