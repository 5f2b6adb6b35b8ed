"""The lab: one namespace per host, one for the switch (a bridge; the root namespace may be firewalled), a veth pair between
each host and the switch, and a token bucket on both ends of the pair, so a host's upload and download each have the rate."""

import os
import re
import shutil
import subprocess
import sys

import runs

from . import LabError, sweep

MOST_HOSTS = 128
INTERFACE = "eth0"
MASTER_PORT = 29500  # free, because the namespaces are new
QUEUE = "50ms"  # longest wait of a packet for tokens before it is dropped
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LEAST, MOST = 1e6, 100e9  # bits per second
NONE = "none"


# Link rates in the notation of tc, and the token bucket's size for a rate.


def parse_rate(text):
    """Bits per second, or None for "none" (unshaped links)."""
    if text.lower() == NONE:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    if not match:
        raise LabError(f"--rate: '{text}' is no rate; write 100mbit, 1gbit, 2.5gbit, ..., or none for unshaped links")
    bits = float(match[1]) * UNITS[match[2]]
    if not LEAST <= bits <= MOST:
        raise LabError(f"--rate: {text} is outside of 1mbit to 100gbit")
    return bits


def burst_bytes(bits):
    """The bucket's size. A full bucket passes unshaped after a pause, so it is the smallest size that sustains the rate.
    Measured: 64 KB at 1 Gbit/s gives 0.69 of the rate (one kernel segment fills the bucket, then a timer delays the next),
    128 KB gives 0.95; 10 Gbit/s improves up to 2 ms of data; 32 KB at 100 Mbit/s and 16 KB at 10 Mbit/s lose nothing."""
    if bits >= 2e9:
        return int(bits * 0.002 / 8)
    return max(16 * 1024, min(128 * 1024, int(bits * 0.0026 / 8)))


def show_bits(bits):
    """'0.958 Gbit/s'."""
    if bits is None:
        return "unshaped"
    return f"{bits / 1e9:.3f} Gbit/s" if bits >= 1e9 * 0.5 else f"{bits / 1e6:.1f} Mbit/s"


def check_system():
    missing = [name for name in ("ip", "tc") if not shutil.which(name)]
    if missing:
        raise LabError(f"needs {' and '.join(missing)}, not found on the PATH; Debian: apt-get install iproute2")
    if os.geteuid() != 0:
        raise LabError("needs root, for network namespaces and traffic control; start it with sudo")


def tool(*words):
    """Runs ip or tc."""
    try:
        done = runs.run(words, timeout=20)
    except subprocess.TimeoutExpired as problem:
        raise LabError(f"'{' '.join(words)}' did not end within 20 s") from problem
    if done.returncode == 0:
        return
    reason = (done.stderr or done.stdout).strip().splitlines()
    reason = reason[-1] if reason else f"exit code {done.returncode}"
    hint = ""
    if "not permitted" in reason or "denied" in reason.lower():
        hint = " (root alone is not enough here: a container needs the capabilities SYS_ADMIN and NET_ADMIN)"
    elif "qdisc kind is unknown" in reason:
        hint = " (the kernel has no token bucket filter: CONFIG_NET_SCH_TBF)"
    raise LabError(f"'{' '.join(words)}' failed: {reason}{hint}")


class Lab:
    """with Lab(hosts, bits) as lab: ... bits: rate in bits per second, or None. One lab per process at a time."""

    def __init__(self, hosts, bits):
        self.hosts, self.bits = hosts, bits
        self.prefix = sweep.own_prefix()
        self.switch = self.prefix + "switch"
        self.burst = burst_bytes(bits) if bits else None
        self.watcher = None

    def namespace(self, host):
        return f"{self.prefix}host{host}"

    @staticmethod
    def address(host):
        return f"10.77.0.{host + 1}"

    def inside(self, host, command):
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def __enter__(self):
        # The watcher starts first, so that it removes the namespaces after any later failure.
        self.watcher = subprocess.Popen(
            [sys.executable, "-S", os.path.abspath(sweep.__file__), self.prefix],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def _build(self):
        tool("ip", "netns", "add", self.switch)
        on_switch = ("ip", "-n", self.switch)
        tool(*on_switch, "link", "add", "switch", "type", "bridge")
        tool(*on_switch, "link", "set", "switch", "addrgenmode", "none", "up")
        for host in range(self.hosts):
            name, port = self.namespace(host), f"port{host}"
            on_host = ("ip", "-n", name)
            tool("ip", "netns", "add", name)
            tool(*on_switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            tool(*on_switch, "link", "set", port, "addrgenmode", "none", "master", "switch", "up")
            tool(*on_host, "link", "set", "lo", "up")
            tool(*on_host, "link", "set", INTERFACE, "addrgenmode", "none", "up")
            tool(*on_host, "address", "add", self.address(host) + "/24", "dev", INTERFACE)
            if self.bits:
                for place, device in ((name, INTERFACE), (self.switch, port)):
                    tool(
                        "tc",
                        "-n",
                        place,
                        "qdisc",
                        "add",
                        "dev",
                        device,
                        "root",
                        "tbf",
                        "rate",
                        f"{self.bits:.0f}bit",
                        "burst",
                        f"{self.burst}b",
                        "latency",
                        QUEUE,
                    )

    def cut(self, host):
        """Sets the switch's port of this host down; no process is notified."""
        tool("ip", "-n", self.switch, "link", "set", f"port{host}", "down")

    def close(self):
        """Ends the watcher's input; the watcher removes the lab, as after a kill of this process."""
        watcher, self.watcher = self.watcher, None
        if watcher is None:
            return
        watcher.stdin.close()
        try:
            failed = watcher.wait(timeout=30) != 0
        except subprocess.TimeoutExpired:
            failed = True
        if failed and not sweep.remove(self.prefix):
            left = " ".join(sweep.namespaces(self.prefix))
            print(f"netlab: could not remove the namespaces {left}; use 'ip netns delete NAME'", file=sys.stderr)
