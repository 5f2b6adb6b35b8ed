"""PyTorch peer: DistributedDataParallel over Gloo, every rank a process with one thread on this host.

The process that is started is rank 0 and speaks the protocol; it starts the other ranks and passes each request on. The
seconds are rank 0's: the all-reduce keeps the ranks in step.
"""

import argparse
import os
import subprocess
import sys
import tempfile

from networks import NETWORKS, Training, torch
from peer import serve, timed


def training_of(options):
    torch.set_num_threads(options.threads)
    torch.distributed.init_process_group("gloo", init_method=f"file://{options.store}", rank=options.rank,
                                         world_size=options.ranks)
    return Training(options.network, options.batch, seed=options.rank,
                    wrap=torch.nn.parallel.DistributedDataParallel)


def follow(options):
    training = training_of(options)
    for line in sys.stdin:
        for _ in range(int(line)):
            training.step()


def lead(options):
    # The loopback interface, as every rank is on this host.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        options.rank, options.store = 0, os.path.join(folder, "store")
        followers = []
        try:
            for rank in range(1, options.ranks):
                command = [sys.executable, __file__, "--network", options.network, "--batch", str(options.batch),
                           "--threads", str(options.threads), "--ranks", str(options.ranks), "--rank", str(rank),
                           "--store", options.store]
                followers.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True))
            training = training_of(options)

            def run_steps(k):
                for follower in followers:
                    print(k, file=follower.stdin, flush=True)
                return [timed(training.step) for _ in range(k)]

            serve(options.batch * options.ranks, run_steps)
        finally:
            for follower in followers:
                follower.stdin.close()
            for follower in followers:
                try:
                    follower.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    follower.kill()


def main():
    parser = argparse.ArgumentParser(description="PyTorch DDP over Gloo on one host; see peer.py for the protocol")
    parser.add_argument("--network", choices=sorted(NETWORKS), default="resnet20")
    parser.add_argument("--batch", type=int, default=64, help="a rank")
    parser.add_argument("--threads", type=int, default=1, help="a rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.distributed.is_available():
        print("This PyTorch was built without distributed training.", file=sys.stderr)
        sys.exit(3)
    if options.rank is None:
        lead(options)
    else:
        follow(options)


if __name__ == "__main__":
    main()
