"""Measures the TCP rate of a lab's links with all hosts sending at once, host i to host i + 1, and the time of an 8-byte round
trip. As a program, in a host's namespace, it is the end of one host; measure() starts these programs."""

import json
import os
import select
import socket
import statistics
import subprocess
import sys
import threading
import time

PORT = 5201
SETTLE_S, WINDOW_S, TAIL_S = 0.4, 1.0, 0.1  # all hosts send in all three; bytes count in the window
ROUND_TRIPS = 200
LIMIT_S = 20


def connect(address):
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=LIMIT_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def exactly(connection, count):
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise OSError("the other host closed the connection")
        data += part
    return data


def receive(connection, begin, result):
    """Sets result["bits"]: the rate of the window's bytes, over the time between the last arrivals before its two ends."""
    room = memoryview(bytearray(1 << 20))
    opens, closes = begin + SETTLE_S, begin + SETTLE_S + WINDOW_S
    total, first, last = 0, None, None
    while True:
        count = connection.recv_into(room)
        now = time.monotonic()
        if count == 0:
            break
        total += count
        if now >= opens and first is None:
            first = (now, total)
        if now <= closes:
            last = (now, total)
    if first and last and last[0] > first[0]:
        result["bits"] = 8 * (last[1] - first[1]) / (last[0] - first[0])


def host(index, following, chunk):
    """The end of one host: prints the line "ready", reads "go TIME", prints its figures as JSON."""
    server = socket.create_server(("0.0.0.0", PORT))
    server.settimeout(LIMIT_S)
    out = connect(following)
    out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    coming, _ = server.accept()
    coming.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    coming.settimeout(LIMIT_S)
    figures = {}
    if index == 0:
        trips = []
        for _ in range(ROUND_TRIPS):
            begin = time.perf_counter()
            out.sendall(b"netlab 8")
            exactly(out, 8)
            trips.append(time.perf_counter() - begin)
        figures["round_trip_s"] = statistics.median(trips)
    elif index == 1:
        for _ in range(ROUND_TRIPS):
            coming.sendall(exactly(coming, 8))
    print("ready", flush=True)
    words = sys.stdin.readline().split()
    if words[:1] != ["go"]:
        return 1
    begin = float(words[1])
    receiver = threading.Thread(target=receive, args=(coming, begin, figures), daemon=True)
    receiver.start()
    data = memoryview(bytes(chunk))
    time.sleep(max(0.0, begin - time.monotonic()))
    end = begin + SETTLE_S + WINDOW_S + TAIL_S
    while time.monotonic() < end:
        out.sendall(data)
    out.shutdown(socket.SHUT_WR)
    receiver.join(LIMIT_S)
    print(json.dumps(figures), flush=True)
    return 0


def line_of(process, deadline):
    """A line, or '' where none arrives before the deadline. The pipes are unbuffered, so select sees all data."""
    text = b""
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(process.stdout.fileno(), 4096) if ready else b""
        if not part:
            return ""
        text += part
    return text.decode()


def measure(lab):
    """{"lowest_bits", "mean_bits", "host_bits": [..], "round_trip_s", "cpu_bound"}; an empty dictionary after a failure, or
    with one host. cpu_bound: a host had less than 80 % of the nominal rate."""
    if lab.hosts < 2:
        return {}
    chunk = 1 << 20 if lab.bits is None else max(4096, min(1 << 20, int(lab.bits * 0.01 / 8)))
    ends = []
    try:
        for index in range(lab.hosts):
            command = [
                sys.executable,
                "-S",
                "-E",
                os.path.abspath(__file__),
                str(index),
                lab.address((index + 1) % lab.hosts),
                str(chunk),
            ]
            ends.append(
                subprocess.Popen(
                    lab.inside(index, command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    bufsize=0,
                    start_new_session=True,
                )
            )
        deadline = time.monotonic() + LIMIT_S
        if any(line_of(end, deadline).strip() != "ready" for end in ends):
            return {}
        begin = time.monotonic() + 0.1
        for end in ends:
            end.stdin.write(f"go {begin}\n".encode())
        deadline = time.monotonic() + LIMIT_S
        figures = [json.loads(line_of(end, deadline) or "{}") for end in ends]
    except OSError:
        return {}
    finally:
        for end in ends:
            end.kill()
            end.wait()
            end.stdin.close()
            end.stdout.close()
    bits = [each.get("bits") for each in figures]
    if not all(bits):
        return {}
    return {
        "lowest_bits": min(bits),
        "mean_bits": statistics.mean(bits),
        "host_bits": bits,
        "round_trip_s": figures[0].get("round_trip_s"),
        "cpu_bound": lab.bits is not None and min(bits) < 0.8 * lab.bits,
    }


if __name__ == "__main__":
    sys.exit(host(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
