"""The two small problems of RegTop-k's authors (arXiv 2409.14893, 2501.05633): all workers are ranks in this process."""

import concurrent.futures
import math
import multiprocessing
import types

from .common import Results, json_line, np, pyplot, short, table, topknot

# Linear regression, as in the authors' LinearRegression.py and SynthDataSet.py: workers whose data have different optima,
# full-batch SGD on the mean squared error, and how far the shared weights end from the shared optimum. Worker n has rows
# A_n ~ N(0, 1), its own solution t_n = m_n + N(0, 1) with m_n ~ N(0, 5), and observations A_n t_n + N(0, 0.5) (variances).
# The weights start at U(-1, 1) / sqrt(J). Their guard that rejects long steps is left out: it is no part of the method.
WORKERS, J, ROWS = 20, 100, 500
LEARNING_RATE = np.float32(0.01)

# The toy problem, as in Toy_Example.py of github.com/AlBerey/RegTopK: logistic regression of two workers with one point
# each, both labelled 1, one of two entries sent a step. Step 99 of Top-k is a tie in exact arithmetic: rounding decides it.
POINTS = np.array([[100.0, 1], [-100, 1]])


def words(seed, use, blocks, a, b):
    """Four words a block of Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011), as nn/core/rng.h numbers its streams."""
    c = [np.arange(blocks, dtype=np.uint64), *(np.full(blocks, x, np.uint64) for x in (0, a, b))]
    low, k0, k1 = 0xFFFFFFFF, seed & 0xFFFFFFFF, seed >> 32 ^ use << 24
    for _ in range(10):
        p, q = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            q >> np.uint64(32) ^ c[1] ^ np.uint64(k0),
            q & np.uint64(low),
            p >> np.uint64(32) ^ c[3] ^ np.uint64(k1),
            p & np.uint64(low),
        ]
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return np.stack(c, 1).astype(np.float64)


def normal(seed, count, a, b):
    """By Box and Muller, two of each block."""
    block = words(seed, 5, (count + 1) // 2, a, b)
    radius, angle = np.sqrt(-2 * np.log((block[:, 0] + 1) * 2.0**-32)), 6.283185307179586 * block[:, 1] * 2.0**-32
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).ravel()[:count].astype(np.float32).astype(np.float64)


def regression_problem(seed):
    """matrix, rhs: by worker, such that its gradient is matrix w - rhs. start, optimum: of the weights."""
    matrix, rhs = np.empty((WORKERS, J, J)), np.empty((WORKERS, J))
    for n in range(WORKERS):
        rows, solution, noise = (
            normal(seed, ROWS * J, n, 0).reshape(ROWS, J),
            normal(seed, J + 1, n, 1),
            normal(seed, ROWS, n, 2),
        )
        observed = rows @ (math.sqrt(5) * solution[J] + solution[:J]) + math.sqrt(0.5) * noise
        matrix[n], rhs[n] = 2 / ROWS * rows.T @ rows, 2 / ROWS * rows.T @ observed
    uniform = np.floor(words(seed, 1, J // 4, 0, 0).ravel() / 256) * 2.0**-24
    return types.SimpleNamespace(matrix=matrix, rhs=rhs, start=(2 * uniform - 1) / math.sqrt(J),
                                 optimum=np.linalg.solve(matrix.sum(0), rhs.sum(0)))  # fmt: skip


def ranks_of(count, numel, method, keys):
    keys = {"dense_1d": False, "threads": 1, **keys}
    return [topknot.Compressor(method, {"w": (numel,)}, rank=r, ranks=count, keys=keys) for r in range(count)]


def regression_distance(problem, method, keys, density, iterations):
    """log10 |w - optimum|^2 after so many steps; infinite where the weights are not finite."""
    matrix, rhs, w = (x.astype(np.float32) for x in (problem.matrix, problem.rhs, problem.start))
    ranks = ranks_of(WORKERS, J, method, keys)
    for step in range(iterations):
        try:
            average = topknot.average(ranks, [{"w": g} for g in matrix @ w - rhs], step=step, density=density)
        except topknot.NotFinite:
            return math.inf
        w -= LEARNING_RATE * average["w"]
    return math.log10(np.square(w - problem.optimum).sum())


def methods_of(mus):
    """(label, method, keys)"""
    methods = [("dense", "dense", {}), ("topk", "topk", {})]
    methods += [(f"regtopk A, mu {short(mu)}", "regtopk", {"variant": "A", "mu": mu}) for mu in mus]
    return methods + [
        (f"regtopk B, mu {short(mu)}", "regtopk", {"variant": "B", "mu": mu}) for mu in mus if mu == 4 or len(mus) == 1
    ]  # it fails at every mu


def _regression(seed, method, keys, density, iterations):
    return regression_distance(regression_problem(seed), method, keys, density, iterations)


def run_regression(arguments):
    iterations, shares = arguments.whole("iterations", 1, 1000000), arguments.numbers("s", 0.01, 1)
    methods, seeds = methods_of(arguments.numbers("mu", 1e-6, 1e9)), arguments.numbers("seeds", 0, 1000000000, int)
    results = Results(arguments.folder())
    runs = [(label, method, keys, share, seed) for label, method, keys in methods
            for share in (shares if method != "dense" else shares[:1]) for seed in seeds]  # fmt: skip
    print(f"{len(runs)} runs of {iterations} steps, {WORKERS} workers, J = {J}", flush=True)
    # New processes: OpenMP does not work in a fork of one that used it.
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        columns = zip(*((seed, method, keys, share, iterations) for _, method, keys, share, seed in runs))
        distances = list(pool.map(_regression, *columns))
    found, lines = {}, ""
    for (label, method, keys, share, seed), distance in zip(runs, distances):
        found.setdefault((label, share), []).append(distance)
        where = {} if method == "dense" else {"S": share}
        lines += json_line({"method": method, **keys, **where, "seed": seed, "iterations": iterations,
                            "log10_squared_distance": distance}) + "\n"  # fmt: skip
    csv = ",".join(["method,S,median,least,greatest", *(f"seed {seed}" for seed in seeds)]) + "\n"
    rows = [["S", *(label for label, _, _ in methods)], *([f"{share:.2f}"] for share in shares)]
    curves = {}
    for label, method, _ in methods:
        for row, share in zip(rows[1:], shares):
            values = found[label, shares[0] if method == "dense" else share]
            middle, least, greatest = float(np.median(values)), min(values), max(values)
            row.append(f"{middle:.2f} [{least:.2f}, {greatest:.2f}]")
            csv += ",".join([f'"{label}",{share:g}', *(f"{v:.4f}" for v in (middle, least, greatest, *values))]) + "\n"
            curves.setdefault(label, []).append((share, middle, least, greatest))
    print(f"\nlog10 |w - w*|^2 after {iterations} steps: median [least, greatest] of {len(seeds)} seeds\n{table(rows)}")
    results.write("regression.csv", csv)
    results.write("regression.jsonl", lines)
    if plot := pyplot():
        figure, panel = plot.subplots(figsize=(11, 4))
        for label, curve in curves.items():
            share, middle, least, greatest = np.array(sorted(curve)).T
            line = panel.plot(share, middle, "--" if label == "dense" else "o-", label=label)[0]
            panel.fill_between(share, least, greatest, color=line.get_color(), alpha=0.18, linewidth=0)
        panel.set(xlabel="S, the share of entries that is sent", ylabel="log10 |w - w*|²")
        panel.legend(ncols=3)
        results.write("regression.svg", figure)
    results.done()


def toy_trace(method, keys, iterations):
    """After each number of steps from 0: loss and weights. By step: which entry each worker sent."""
    ranks, w = ranks_of(2, 2, method, {"density": 0.5, **keys}), np.array([0.0, 1])
    loss, weights, sent = [], [], []
    for step in range(iterations + 1):
        loss.append(float(np.log1p(np.exp(-(POINTS @ w))).mean()))
        weights.append(w.tolist())
        if step < iterations:
            gradients = (-1 / (1 + np.exp(POINTS @ w)))[:, None] * POINTS
            average = topknot.average(ranks, [{"w": g} for g in gradients.astype(np.float32)], step=step)["w"]
            w = w - 0.9 * average.astype(np.float64)
            if method != "dense":
                sent.append([int(np.argmin(np.abs(rank.residual("w")))) for rank in ranks])  # nothing of it is left
    return loss, weights, sent


def run_toy(arguments):
    iterations, mus = arguments.whole("iterations", 1, 1000000), arguments.numbers("mu", 1e-6, 1e9)
    methods = [
        (label, method, {"mu": keys["mu"]} if keys else {}) for label, method, keys in methods_of(mus) if " B," not in label
    ]
    results = Results(arguments.folder())
    traces = [toy_trace(method, keys, iterations) for _, method, keys in methods]
    labels = [label for label, _, _ in methods]
    csv, lines, rows = ",".join(["step", *(f'"{label}"' for label in labels)]) + "\n", "", [["step", *labels]]
    for t in range(iterations + 1):
        csv += ",".join([str(t), *(f"{loss[t]:.17g}" for loss, _, _ in traces)]) + "\n"
        if t in (0, 1, 2, 4, 10, 50, 100, 101, iterations):
            rows.append([str(t), *(f"{loss[t]:.9g}" for loss, _, _ in traces)])
        for (_, method, keys), (loss, weights, sent) in zip(methods, traces):
            sends = {"sends": sent[t]} if t < len(sent) else {}
            lines += json_line({"step": t, "method": method, **keys, "loss": loss[t], "weights": weights[t], **sends}) + "\n"
    print(f"Loss after so many steps\n{table(rows)}")
    results.write("toy.csv", csv)
    results.write("toy.jsonl", lines)
    if plot := pyplot():
        figure, panel = plot.subplots(figsize=(11, 4))
        for label, (loss, _, _) in reversed(list(zip(labels, traces))):  # dense lies on topk
            panel.semilogy(loss, "--" if label == "dense" else "-", label=label)
        panel.set(xlabel="steps", ylabel="loss")
        panel.legend()
        results.write("toy.svg", figure)
    results.done()


EXPERIMENTS = {
    "regression": ("RegTop-k's linear regression: distance to the optimum over the sparsity", [
        ("iterations", "2500", "steps"),
        ("s", "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.0", "shares of entries that are sent"),
        ("mu", "1,4,10", "RegTop-k's mu; variant B runs at 4 alone where several are given"),
        ("seeds", "1,2,3,4,5", "one problem each"),
        ("out", "studies/regression", "folder of regression.csv, .jsonl and .svg"),
    ], run_regression),
    "toy": ("RegTop-k's toy problem: two workers whose large entries cancel, step by step", [
        ("iterations", "150", "steps"),
        ("mu", "1,2,4", "RegTop-k's mu"),
        ("out", "studies/toy", "folder of toy.csv, .jsonl and .svg"),
    ], run_toy),
}  # fmt: skip
