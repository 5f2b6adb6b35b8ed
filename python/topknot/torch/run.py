"""A run directory, as `train` writes it, from a PyTorch training."""

from __future__ import annotations

import atexit
import json
import math
import os
import pathlib
import platform
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Optional, Union

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import Error
from ..compare.read import METRICS, WARM_UP
from .fsdp import FsdpCompression
from .hook import CompressionHook
from .local_steps import LocalSteps
from .method import Own, attributes_of

_FIGURES = ("accuracy", "loss", "top5_accuracy", "bits_per_byte", "character_error_rate")
Number = Union[float, torch.Tensor]
Hook = Union[CompressionHook, LocalSteps, FsdpCompression]


class Run:
    """Writes config.yaml, environment.json and metrics.jsonl (docs/run.md), for `topknot compare`. Rank 0 writes; what the other
    ranks call does nothing.

    folder: the run directory, which is made.
    hook: a CompressionHook, LocalSteps or FsdpCompression, after its load_state_dict(). The phases of a step are timed by hooks of its model and
        of the optimizers, as the program sees them: work that a GPU has still to do counts where the program waits for it.
    metric: what evaluate() measures: "accuracy", "loss", "perplexity" (of evaluate's loss) or "word error rate" (1 - accuracy).
    task: names the data, such as "cifar10, 10 classes, samples [3, 32, 32]"; runs of different tasks are not compared. A run
        without a task is compared with any.
    steps_per_epoch: for figures over epochs.
    config: more facts for config.yaml, such as {"data.batch_size": 32, "optimizer.lr": 0.1}: train's keys, or names of your own.
        Numbers and texts among the attributes of a method in Python are there already, as compress.NAME.
    overwrite: replaces an earlier run in the folder, which is refused otherwise.
    tensorboard: writes train's scalars for TensorBoard too, but the density; needs the package tensorboard.

    A line is written by one call, so that a program that is stopped leaves whole lines. The last line is written by close(), or
    when the program ends, unless an exception ended it. Raises Error for other arguments and files that cannot be written.
    """

    def __init__(
        self,
        folder: Union[str, os.PathLike[str]],
        hook: Hook,
        *,
        metric: str = "accuracy",
        task: str = "",
        steps_per_epoch: int = 0,
        config: Optional[Mapping[str, Any]] = None,
        overwrite: bool = False,
        tensorboard: bool = False,
    ) -> None:
        if not isinstance(hook, (CompressionHook, LocalSteps, FsdpCompression)):
            raise Error(f"hook must be a CompressionHook, LocalSteps or FsdpCompression, not a {type(hook).__name__}")
        if isinstance(hook, LocalSteps) and hook.manager is not None:
            raise Error("a run directory is of as many ranks all the time, and a manager's replicas come and go")
        if not isinstance(task, str):
            raise Error(f"task must be a text, not {task!r}")
        if metric not in METRICS:
            raise Error(f"there is no metric '{metric}'; known: {', '.join(METRICS)}")
        self.folder, self._hook, self._metric, self._per_epoch = os.fspath(folder), hook, METRICS[metric], steps_per_epoch
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise Error(f"tensorboard=True needs the package tensorboard: {error}") from None
        self._closed = not hook._channel.leads
        if self._closed:
            return
        path = os.path.join(self.folder, "metrics.jsonl")
        try:
            os.makedirs(self.folder, exist_ok=True)
            made = pathlib.Path(self.folder)
            if os.path.exists(path):
                if not overwrite:
                    raise Error(f"{self.folder} holds a run; choose another folder, remove it, or give overwrite=True")
                for old in made.glob("events.out.tfevents.*"):
                    old.unlink()
            made.joinpath("config.yaml").write_text(_yaml({**_facts(hook), **(config or {})}), "utf-8")
            made.joinpath("environment.json").write_text(json.dumps(_environment(hook), indent=2) + "\n", "utf-8")
            self._file, self._end = open(path, "wb", buffering=0), 0
        except OSError as error:
            raise Error(f"{error.filename or self.folder} cannot be written: {error.strerror}") from None
        self._board: Any = SummaryWriter(self.folder) if tensorboard else None
        self._model = getattr(hook.module, "module", hook.module)  # without DistributedDataParallel
        own = getattr(hook, "_numel", None)  # local steps: the parameters whose changes this rank sends
        mine = (getattr(p, "to_local", lambda p=p: p)() for p in hook.module.parameters() if p.requires_grad)
        self._parameters = sum(p.numel() for p in mine) if own is None else own
        self._parts = dict.fromkeys(("data", "forward", "backward", "update", "evaluation", "other"), 0.0)
        self._step = self._samples = 0
        self._lr: Optional[float] = None
        self._time = self._startup = self._evaluation = 0.0
        self._seconds: list[float] = []  # of each step
        self._rates: list[float] = []
        self._figures: dict[str, float] = {}
        self._best = -math.inf
        self._last = time.perf_counter()
        self._first = self._before = self._counts()
        self._hooks: list[Any] = [
            hook.module.register_forward_pre_hook(torch.compiler.disable(self._begin_forward), with_kwargs=True),  # type: ignore[no-untyped-call]
            hook.module.register_forward_hook(torch.compiler.disable(self._end_forward)),  # type: ignore[no-untyped-call]
            register_optimizer_step_pre_hook(self._begin_update),
            register_optimizer_step_post_hook(lambda *_: self._lap("update")),
        ]
        about = self._metric
        self._line(
            "start", step=0, time=_now(), backend=_backend(hook), task=task, metric=about.name, metric_unit=about.unit,
            higher_is_better=about.higher_is_better, metric_set=about.set,
        )  # fmt: skip
        atexit.register(self._at_exit)

    def _line(self, event: str, **fields: Any) -> None:
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        text = json.dumps({"event": event, "rank": 0, **known}, separators=(",", ":"))
        data = text.encode() + b"\n"
        try:
            if (written := self._file.write(data)) < len(data):  # a disk that is almost full takes a part
                self._file.write(data[written:])
            self._end += len(data)
        except OSError as error:
            self._file.truncate(self._end)
            self._file.seek(self._end)
            raise Error(f"{self.folder}/metrics.jsonl cannot be written: {error.strerror}; what was written is kept") from None

    def _lap(self, part: str) -> None:
        now = time.perf_counter()
        self._parts[part] += now - self._last
        self._last = now

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and self._model.training

    def _begin_forward(self, _: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self._trains():
            return
        if not self._step and not self._samples:
            self._startup = _age_s() - self._evaluation
            self._last = time.perf_counter()
        self._lap("backward" if self._samples else "data")  # accumulation: the part before had a backward pass
        first = next((value for value in (*inputs, *named.values()) if isinstance(value, torch.Tensor) and value.dim()), None)
        if first is not None:
            self._samples += (first.numel() if self._metric.name == "perplexity" else first.shape[0]) * self._hook._channel.total

    def _end_forward(self, *_: Any) -> None:
        if self._trains():
            self._lap("forward")

    def _begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._lap("backward")
        self._lr = float(optimizer.param_groups[0]["lr"])

    def _counts(self) -> list[float]:
        channel = self._hook._channel
        return [channel.bytes_sent, channel.bytes_received, *channel.seconds, getattr(self._hook, "skipped_steps", 0)]

    def step(self, loss: Number) -> None:
        """Writes a step. Call it last in each step, after optimizer.step() and LocalSteps.step(), with this rank's loss."""
        if self._closed:
            return
        self._lap("other")
        counts, dense = self._counts(), 4 * self._parameters
        sent, received, encode, exchange, write, exposed, skips = (now - before for now, before in zip(counts, self._before))
        self._before, self._step = counts, self._step + 1
        parts, self._parts = self._parts, dict.fromkeys(self._parts, 0.0)
        taken = sum(parts.values())
        self._time += taken
        self._seconds.append(taken)
        self._rates.append(self._samples / taken)
        # The rest of these runs during the backward pass.
        busy = encode + exchange + write
        waited = min(1.0, exposed / busy) if busy > 0 else 0.0
        hidden = 0.0 if isinstance(self._hook, LocalSteps) else exposed  # in what was timed as the backward pass
        rate, loss = self._rates[-1], _float(loss)
        self._line(
            "step", step=self._step, epoch=self._epoch(), time_s=self._time, loss=loss, lr=self._lr, bytes_sent=sent,
            bytes_received=received, bytes_dense=dense, bytes_ratio=dense / sent if sent else 0, data_s=parts["data"],
            forward_s=parts["forward"], backward_s=parts["backward"] - hidden,
            encode_s=waited * encode, communicate_s=exchange, decode_s=waited * write, update_s=parts["update"],
            exposed_s=exposed - waited * (encode + write), skipped=skips > 0, images_per_second=rate,
        )  # fmt: skip
        self._show("train", loss=loss, learning_rate=self._lr, bytes_sent=sent, images_per_second=rate)
        self._samples = 0

    def _show(self, group: str, **scalars: Optional[float]) -> None:
        for name, value in scalars.items():
            if self._board is not None and value is not None:
                self._board.add_scalar(f"{group}/{name}", value, self._step)

    def _epoch(self) -> float:
        return self._step / self._per_epoch if self._per_epoch else math.nan

    def evaluate(self, *, accuracy: Optional[Number] = None, loss: Optional[Number] = None, **more: Number) -> None:
        """Writes an evaluation. Call it right after it; the time since step() counts as evaluation, not as training.

        accuracy: a share, 0 to 1. loss: a mean. more: top5_accuracy, bits_per_byte, character_error_rate.
        """
        figures = {"accuracy": accuracy, "loss": loss, **more}
        known = {name: _float(value) for name, value in figures.items() if value is not None}
        needed = "accuracy" if self._metric.unit == "share" else "loss"
        if unknown := [name for name in known if name not in _FIGURES]:
            raise Error(f"there is no figure '{unknown[0]}'; known: {', '.join(_FIGURES)}")
        if needed not in known:
            raise Error(f"the run's metric is {self._metric.name}: give evaluate() {needed}=, or Run() another metric=")
        if not (0 if self._metric.name == "accuracy" else -math.inf) <= known.get("accuracy", 0) <= 1:
            raise Error(f"accuracy is a share from 0 to 1, not {accuracy}")
        if self._closed:
            return
        self._lap("evaluation")
        taken, self._parts["evaluation"] = self._parts["evaluation"], 0.0
        self._figures = {"test_" + name: value for name, value in known.items()}
        self._best = max(self._best, known.get("accuracy", -math.inf))
        self._evaluation += taken
        self._line("eval", step=self._step, epoch=self._epoch(), time_s=self._time, **self._figures, eval_seconds=taken)
        about, second = self._metric, {self._metric.second or name: known[name] for name in _FIGURES[2:] if name in known}
        value = about.value(known.get("loss", math.nan), known.get("accuracy", math.nan))
        self._show(about.set, **{"loss": known.get("loss"), about.name: value, **second})

    def close(self) -> None:
        """Writes the last line: the run is complete."""
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        atexit.unregister(self._at_exit)
        steady = slice(WARM_UP if self._step > WARM_UP else 0, None)
        rates, seconds = np.array(self._rates[steady]), np.array(self._seconds[steady])
        p50, p95 = np.quantile(seconds, (0.5, 0.95)) if len(seconds) else (math.nan, math.nan)
        sent, received, *_, skipped = (now - before for now, before in zip(self._counts(), self._first))
        dense = 4 * self._parameters * self._step
        best = {"best_test_accuracy": self._best} if "test_accuracy" in self._figures else {}
        self._line(
            "end", **self._figures, **best, wall_seconds=self._time, eval_seconds=self._evaluation,
            startup_seconds=self._startup, images_per_second=float((rates * seconds).sum() / seconds.sum()) if len(seconds) else 0.0,
            bytes_sent=sent, bytes_received=received, bytes_dense=dense, bytes_ratio=dense / sent if sent else 0,
            bits_per_parameter_step=32 * sent / dense if dense else 0, parameter_checksum="", steps=self._step,
            skipped_steps=skipped, failed=False, reason="", step_p50_s=float(p50), step_p95_s=float(p95),
        )  # fmt: skip
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _at_exit(self) -> None:
        if getattr(sys, "last_value", None) is None:  # no exception has ended the program
            self.close()


def _float(value: Number) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _age_s() -> float:
    """Seconds since the process began."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        begin = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(uptime.read().split()[0]) - begin


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _backend(hook: Any) -> str:
    return str(dist.get_backend(hook._channel.group))


def _facts(hook: Hook) -> dict[str, Any]:
    given = {key: value for key, value in hook.keys.items() if key not in ("device", "threads", "undo")}
    if isinstance(made := getattr(hook, "_made", None), Own):
        if given["memory"] == "residual":
            del given["memory"]  # the library's methods name only another one
        own = attributes_of(made.method).items()
        given |= {key: value for key, value in own if isinstance(value, (bool, int, float, str)) and key[0] != "_"}
    settings: dict[str, Any] = {f"compress.{key}": value for key, value in given.items()}
    if isinstance(hook, LocalSteps):
        outer = {"name": hook.outer, "lr": hook.outer_lr, "momentum": hook.outer_momentum}
        settings |= {"exchange.every": hook.every, **{f"exchange.outer.{key}": value for key, value in outer.items()}}
        if hook.fragments > 1 or hook.overlap or hook.outer_alpha:
            settings |= {"exchange.fragments": hook.fragments, "exchange.overlap_steps": hook.overlap}
            settings["exchange.outer.alpha"] = hook.outer_alpha
        if (count := hook._islands.count) > 1:
            settings["dist.ranks_per_island"] = count
    elif isinstance(hook, CompressionHook) and hook.warmup:
        settings["compress.warmup"] = [*hook.warmup]
    model = getattr(hook.module, "module", hook.module)
    return {"seed": torch.initial_seed(), "model.name": type(model).__name__, "compress.name": hook.method, **settings,
            "dist.backend": _backend(hook), "dist.ranks": hook._channel.total}  # fmt: skip


def _yaml(config: Mapping[str, Any]) -> str:
    """config.yaml, a section for each first part of a key."""
    sections: dict[str, list[str]] = {"": []}
    for key, value in config.items():
        section, _, name = key.partition(".") if "." in key else ("", "", key)
        plain = isinstance(value, str) and re.fullmatch(r"[\w.+/-]+", value)
        text = value if plain else json.dumps(value, ensure_ascii=False, default=str)
        sections.setdefault(section, []).append(f"{'  ' if section else ''}{name}: {text}  # given\n")
    parts = ((f"\n{section}:\n" if section else "") + "".join(lines) for section, lines in sections.items())
    return "# A run of topknot.torch.\n" + "".join(parts)


def _environment(hook: Any) -> dict[str, Any]:
    from .. import __version__

    with open("/proc/cpuinfo") as file:
        cpu = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    return {
        "host": platform.node(), "cpu": cpu, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "topknot": __version__, "libraries": {"Python": platform.python_version(), "PyTorch": torch.__version__},
        "backend": _backend(hook), "ranks": hook._channel.total, "threads_per_rank": torch.get_num_threads(), "started": _now(),
        "command_line": sys.argv,
    }  # fmt: skip
