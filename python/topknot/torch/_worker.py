"""A thread that exchanges while the training goes on, and its process group."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist

from ._channel import Channel


def _timeout_of(group: dist.ProcessGroup) -> Optional[timedelta]:
    """The group's timeout, which PyTorch's public interface does not give; None for PyTorch's default."""
    for device in ("cpu", "cuda"):
        try:
            found = group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
        if isinstance(found, timedelta):
            return found
    return None


def twin_of(group: dist.ProcessGroup) -> Any:
    """A group of the same ranks for a thread of its own, since other threads use `group` at the same time. Collective."""
    ranks, backend, fill = dist.get_process_group_ranks(group), dist.get_backend(group), []
    if part := len(ranks) < dist.get_world_size():
        # PyTorch names it by the number of a rank's groups, which has to be the same on all; what is missing is filled up.
        count = len(dist.distributed_c10d._world.pg_names)
        most = max(int(each) for each in Channel(group).all_gather(torch.tensor([count])))
        for _ in range(count, most):
            fill.append(dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True))
    made: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=_timeout_of(group), use_local_synchronization=part)
    for each in fill:
        dist.destroy_process_group(each)
    return made


_Tasks = queue.SimpleQueue[Optional[Callable[[], Any]]]


class Worker:
    """A thread that runs tasks in the order in which they are added."""

    threads: weakref.WeakKeyDictionary[threading.Thread, _Tasks] = weakref.WeakKeyDictionary()

    def __init__(self, device: torch.device) -> None:
        # The garbage collector may call put() during another put() in the same thread; SimpleQueue allows that.
        self.tasks: _Tasks = queue.SimpleQueue()
        self._last = threading.Event()  # set after the task that was added last
        self._last.set()
        thread = threading.Thread(target=self._run, args=(self.tasks, device), name="topknot", daemon=True)
        self.threads[thread] = self.tasks
        thread.start()

    def add(self, task: Callable[[], None]) -> None:
        done = self._last = threading.Event()

        def run() -> None:
            try:
                task()
            finally:
                done.set()

        self.tasks.put(run)

    def wait(self) -> None:
        self._last.wait()

    @staticmethod
    def _run(tasks: _Tasks, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while (task := tasks.get()) is not None:
            task()
            del task


@atexit.register
def _join_workers() -> None:
    """Waits for the threads, which hooks' finalizers have told to end: stopped inside PyTorch, they would abort the process."""
    threads = list(Worker.threads.items())
    for _, tasks in threads:
        tasks.put(None)
    for thread, _ in threads:
        thread.join(10)
