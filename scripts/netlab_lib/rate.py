"""Link rates in the notation of tc, and the token bucket size for a rate."""

import re

from . import LabError

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LEAST, MOST = 1e6, 100e9
NONE = "none"


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
