"""1 rank, then 2 and 4 processes on the one GPU, each a host of its own by NCCL_HOSTID: every collective exact, and the same
training as with threads."""

import socket

from .programs import USED_UP
from .report import PASSED, Result
from .stage import end_of_run, fresh_run_directory, stage, train_command

DEADLINE = 60  # seconds of a check


def free_port():
    """A port for MASTER_PORT: the ranks meet one above it."""
    try:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            return one.getsockname()[1] - 1
    except OSError:
        return 29530


def rank_environment(rank, ranks, port):
    """One rank of a group on this machine, as torchrun would start it. A host of its own for NCCL, which refuses two ranks of
    one host on one GPU; so they talk through sockets, as between real hosts."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "NCCL_HOSTID": f"gpu-check-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0",
        "NCCL_CUMEM_ENABLE": "0", "NCCL_MAX_CTAS": "2", "NCCL_BUFFSIZE": "1048576", "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple", "NCCL_DEBUG": "WARN",
    }  # fmt: skip


def group_result(name, argv, ranks, clock):
    """Failed if any rank failed; the note is that of one that ended by itself rather than of one that was killed."""
    port = free_port()
    outcomes = clock.run_all([(argv, rank_environment(rank, ranks, port)) for rank in range(ranks)], DEADLINE)
    result = Result("nccl", name, PASSED, max(outcome.seconds for outcome in outcomes))
    failed = [rank for rank in range(ranks) if not outcomes[rank].ok()]
    if not failed:
        return result
    worst = min(failed, key=lambda rank: outcomes[rank].timed_out)
    return result.failure(outcomes[worst], f"rank {worst}: {outcomes[worst].reason('train')}")


def short_training(options, backend, method, folder):
    return train_command(
        options, folder, "model.name=resnet20", "data.name=synthetic_images", "data.train_size=512",
        "data.test_size=64", "data.batch_size=16", "train.deterministic=true", "train.step_times=false", "train.max_steps=6",
        f"compress.name={method}", "compress.density=0.01", "compress.capacity=2", f"dist.backend={backend}",
        "dist.ranks=2", "dist.timeout_s=30", "--quiet",
    )  # fmt: skip


def compare_training(options, method, name, clock):
    with_nccl = fresh_run_directory(options, "nccl-" + method)
    with_threads = fresh_run_directory(options, "threads-" + method)
    result = group_result(name, short_training(options, "nccl", method, with_nccl), 2, clock)
    if result.status != PASSED:
        return result
    threads = clock.run(short_training(options, "threads", method, with_threads), DEADLINE)
    result.seconds += threads.seconds
    if not threads.ok():
        return result.failure(threads, f"with threads: {threads.reason('train')}")
    a, b = (end_of_run(folder).get("parameter_checksum", "") for folder in (with_nccl, with_threads))
    if not a or a != b:
        return result.failure(threads, f"weights {a or '?'} with processes, {b or '?'} with threads")
    return result


@stage("nccl", "train")
def run_nccl(options, report, clock, train):
    def add(name, works, check):
        """Whether what follows can work, as far as this check tells."""
        if not works or clock.used_up():
            failed = "after a failure: ranks that hang would only use up the time"
            report.skip("nccl", name, USED_UP if clock.used_up() else failed)
            return works
        result = check()
        report.add(result)
        return result.status == PASSED

    works = True
    for ranks in (1, 2, 4):
        name = f"every collective exact, {ranks} rank{'s' if ranks > 1 else ''}"
        argv = [train, "train.device=cuda", "dist.backend=nccl", f"dist.ranks={ranks}", "dist.timeout_s=30", "--check-network"]
        works = add(name, works, lambda: group_result(name, argv, ranks, clock))
    for method in ("topk", "gaussiank", "dgc", "regtopk"):  # a method that differs does not keep the others from being tried
        name = f"{method} with 2 processes: the weights of 2 threads"
        add(name, works, lambda: compare_training(options, method, name, clock))
