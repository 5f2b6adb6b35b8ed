"""What each selector takes of recorded gradients, and its cost over sizes, with memory `residual` and one rank."""

import concurrent.futures
import os
import time

from .common import Refusal, Results, np, open_gradients, pyplot, shape_text, short, table, topknot

LEAST_LOG2, FULL_ROUNDS_LOG2 = 16, 22
TINY = float(np.finfo(np.float32).tiny)


def selectors():
    """(label, keys): topk first, threshold last, sidco once for each of its distributions. The fixed threshold is what the
    measurements make it: topk's median k-th magnitude."""
    names = sorted(topknot.methods()["pieces"]["select"], key=lambda name: ((name != "topk") + (name == "threshold"), name))
    found = []
    for name in names:
        if name == "sidco":
            found += [(f"{name} {kind}", {"select": name, "distribution": kind}) for kind in ("exponential", "pareto", "gamma")]
        else:
            found.append((name, {"select": name}))
    return found


def compressor_of(keys, numel, density, threads, threshold):
    keys = {"seed": 1, "dense_1d": False, "density": density, "threads": threads, **keys}
    if keys["select"] == "threshold":
        keys["threshold"] = max(threshold, TINY)
    return topknot.Compressor("topk", {"u": (numel,)}, keys=keys)


def energy(values):
    values = values.astype(np.float64)
    return float(values @ values)


def quality_of(label, keys, density, gradients, skip, threshold=0.0):
    """The row of one selector and density. The first `skip` gradients fill the residual and do not count."""
    steps, numel = gradients.shape
    compressor = compressor_of(keys, numel, density, 1, threshold)
    counts, thresholds, shares, of_topk = [], [], [], []
    for t in range(steps):
        gradient = gradients[t].astype(np.float32)
        u = gradient + compressor.residual("u") if t >= skip else None
        with compressor.encode({"u": gradient}, step=t) as round:
            if round.decode([round.message.block]) is topknot.State.NOT_FINITE:
                raise Refusal(f"the gradient of step {t} has a NaN or an infinity; record a run that stays finite")
            sent = round.sent("u")
            if t >= skip:
                counts.append(sent.entries / sent.target)
                thresholds.append(sent.threshold)
                if total := energy(u):
                    largest = np.sort(np.argpartition(np.abs(u), numel - sent.target)[numel - sent.target :])
                    shares.append(energy(sent.values) / total)
                    of_topk.append(energy(sent.values) / energy(u[largest]))
            k = sent.target
            round.commit({})
    counts = np.array(counts)
    return {"selector": label, "density": density, "k": k, "steps": steps - skip, "count_mean": float(counts.mean()),
            "count_least": float(counts.min()), "count_greatest": float(counts.max()),
            "within_10_percent": float(((counts >= 0.9) & (counts <= 1.1)).mean()),
            "energy": float(np.mean(shares)) if shares else float("nan"),
            "energy_to_topk": float(np.mean(of_topk)) if shares else float("nan"),
            "threshold_median": float(np.median(thresholds))}  # fmt: skip


def quality(methods, densities, gradients, skip):
    """Rows by density and method. Each selector runs on one thread; topk's go first."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [(label, keys, density, gradients, skip) for density in densities for label, keys in methods]
        first = {job[2]: pool.submit(quality_of, *job) for job in jobs if job[1]["select"] == "topk"}
        limits = {density: row.result()["threshold_median"] for density, row in first.items()}
        rows = [first[job[2]] if job[1]["select"] == "topk" else pool.submit(quality_of, *job, limits.get(job[2], 0.0))
                for job in jobs]  # fmt: skip
        return [row.result() for row in rows]


class Laplace:
    """Synthetic gradients: Laplace noise of scale 1, new at each step, plus a drift of a twentieth of it that stays. Both
    are cut from one table of random numbers, so that making them is as cheap as a copy."""

    PIECE = 1 << 16

    def __init__(self):
        self.table = np.random.default_rng(1).laplace(size=(1 << 22) + self.PIECE).astype(np.float32)
        self.drift = 0.05 * self.table

    def fill(self, step, out):
        pieces = -(-out.size // self.PIECE)
        noise, drift = (np.random.default_rng([1, s]).integers(1 << 22, size=pieces) for s in (step + 2, 0))
        for i, (a, b) in enumerate(zip(noise, drift)):
            part = out[i * self.PIECE : (i + 1) * self.PIECE]
            np.add(self.table[a : a + part.size], self.drift[b : b + part.size], out=part)


def cost(methods, size, density, rounds, warmup, threads):
    """Rows by method. A step is encode and commit of the library: it reads the gradient, selects, writes the message, and
    leaves the residual; not decode, which makes the average. It alternates with a plain pass r += g of as many threads."""
    gradients, pool = Laplace(), concurrent.futures.ThreadPoolExecutor(threads)
    g, plain_r, plain_g = (np.zeros(size, np.float32) for _ in range(3))
    gradients.fill(-1, plain_g)
    parts = threads if size >= 1 << 20 else 1  # below that a thread takes longer to begin than the pass
    pieces = list(zip(np.array_split(plain_r, parts), np.array_split(plain_g, parts)))

    def plain_pass():
        begin = time.perf_counter()
        if parts == 1:
            np.add(plain_r, plain_g, out=plain_r)
        else:
            list(pool.map(lambda piece: np.add(piece[0], piece[1], out=piece[0]), pieces))
        return time.perf_counter() - begin

    rows, threshold = [], TINY
    for label, keys in methods:
        compressor = compressor_of(keys, size, density, threads, threshold)
        plain, step, counts, thresholds = [], [], [], []
        for t in range(warmup + rounds):
            gradients.fill(t, g)
            passed = plain_pass() if t % 2 else None
            begin = time.perf_counter()
            round = compressor.encode_pointers([0], [g.ctypes.data], topknot.Type.FLOAT32, step=t)
            taken = time.perf_counter() - begin
            passed = plain_pass() if passed is None else passed
            message = round.message_pointers()
            round.decode_pointers([message.block], [message.block_bytes])
            sent = round.sent("u")
            begin = time.perf_counter()
            round.commit_pointers([None], topknot.Type.FLOAT32)
            taken += time.perf_counter() - begin
            if t >= warmup:
                plain.append(1e3 * passed)
                step.append(1e3 * taken)
                counts.append(sent.entries / sent.target)
                thresholds.append(sent.threshold)
        if keys["select"] == "topk":
            threshold = float(np.median(thresholds))
        ratios = np.quantile(np.divide(step, plain), [0.25, 0.5, 0.75]).tolist()
        rows.append({"selector": label, "size": size, "k": sent.target, "threads": threads, "rounds": rounds, "warmup": warmup,
                     "plain_ms": float(np.median(plain)), "step_ms": float(np.median(step)), "ratio": ratios[1],
                     "ratio_quartile_1": ratios[0], "ratio_quartile_3": ratios[2], "lowest_ratio": min(step) / min(plain),
                     "count_per_k": float(np.median(counts))})  # fmt: skip
        compressor.close()
    pool.shutdown()
    return rows


def row_plot(plot, rows, label, middle, ends, **axis):
    """A panel for each density: a ring at each selector's middle, a line between its ends; at an edge: beyond it."""
    densities, names = list(dict.fromkeys(r["density"] for r in rows)), list(dict.fromkeys(r["selector"] for r in rows))
    figure, panels = plot.subplots(1, len(densities), figsize=(3.2 * len(densities) + 1, 4), sharey=True, squeeze=False)
    for panel, density in zip(panels[0], densities):
        panel.set(xlabel=f"{label}, density {density:g}", yticks=range(len(names)), yticklabels=names, **axis)
        panel.axvline(1, color="black", linestyle=":")
        for row in rows:
            if row["density"] == density and np.isfinite(row[middle]):
                y, clip = names.index(row["selector"]), lambda x: np.clip(x, *axis["xlim"])
                panel.plot(clip(ends(row)), [y, y], color=f"C{y % 10}")
                panel.plot(clip(row[middle]), y, "o", color=f"C{y % 10}", markerfacecolor="white")
    panels[0][0].invert_yaxis()
    return figure


def run_quality(arguments, results):
    path, densities, skip = arguments["in"], arguments.numbers("densities", 1e-9, 1), arguments.whole("skip", 0, 1000000000)
    gradients = open_gradients(path)
    if gradients.ndim != 2 or 0 in gradients.shape or gradients.shape[1] >= 1 << 31:
        raise Refusal(
            f"in: {path} has shape {shape_text(gradients.shape)}; needed is [steps, elements], as train.record_gradients "
            "writes it"
        )
    steps, numel = gradients.shape
    if skip >= steps:
        raise Refusal(f"skip is {skip} and {path} has {steps} steps: none would count; lower skip or record more")
    print(f"{steps} steps of {numel} elements; the first {skip} fill the residual and do not count", flush=True)
    rows = quality(selectors(), densities, gradients, skip)
    for density in densities:
        cells = [["selector", "selected / k", "least", "greatest", "within 10 %", "energy", "energy / topk's"]]
        cells += [[r["selector"], *(f"{r[key]:.3f}" for key in ("count_mean", "count_least", "count_greatest")),
                   f"{100 * r['within_10_percent']:.1f} %", f"{r['energy']:.5f}", f"{r['energy_to_topk']:.4f}"]
                  for r in rows if r["density"] == density]  # fmt: skip
        k = next(r["k"] for r in rows if r["density"] == density)
        print(f"\ndensity {density:g}, k = {k}\n{table(cells)}", flush=True)
    results.rows("selection_quality", rows)
    if plot := pyplot():
        ends = lambda r: [r["count_least"], r["count_greatest"]]
        results.write(
            "selection_count.svg", row_plot(plot, rows, "selected / k", "count_mean", ends, xscale="log", xlim=(0.05, 20))
        )
        ends = lambda r: [0, r["energy_to_topk"]]
        results.write("selection_energy.svg", row_plot(plot, rows, "energy / topk's", "energy_to_topk", ends, xlim=(-0.05, 2.05)))


def available_bytes():
    """That can be had without swapping; more than any need where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 1 << 62


def run_cost(arguments, results, most):
    density, rounds = arguments.numbers("density", 1e-9, 1)[0], arguments.whole("rounds", 1, 1000000)
    threads = arguments.whole("threads", 0, 1024)
    threads = threads or int(os.environ.get("OMP_NUM_THREADS", "0").split(",")[0]) or len(os.sched_getaffinity(0))
    rows = []
    for log2 in range(LEAST_LOG2, most + 1, 2):
        needed, available = (22 << log2) + (64 << 20), available_bytes()  # five vectors, half of one for entries, the table
        if needed > available:
            gib = f"{needed / 2**30:.1f} GiB of memory and {available / 2**30:.1f} are available"
            print(f"\n2^{log2} elements: skipped, they need {gib}")
            continue
        measured = max(rounds >> max(log2 - FULL_ROUNDS_LOG2, 0), min(rounds, 7))
        found = cost(selectors(), 1 << log2, density, measured, 2 * measured, threads)
        rows += found
        cells = [["selector", "r += g, ms", "step, ms", "ratio", "quartiles", "lowest", "selected / k"]]
        cells += [[r["selector"], f"{r['plain_ms']:.3f}", f"{r['step_ms']:.3f}", f"{r['ratio']:.2f}",
                   f"{r['ratio_quartile_1']:.2f} to {r['ratio_quartile_3']:.2f}", f"{r['lowest_ratio']:.2f}",
                   f"{r['count_per_k']:.3f}"] for r in found]  # fmt: skip
        where = f"density {short(density)}, k = {found[0]['k']}, threads {threads}"
        print(f"\n2^{log2} elements, {where}, medians of {measured} steps after {2 * measured}\n{table(cells)}", flush=True)
        results.rows("selection_cost", rows)  # after every size: the large ones take minutes
    if not rows:
        raise Refusal("no size fits into memory; nothing was measured")
    if plot := pyplot():
        figure, panel = plot.subplots(figsize=(11, 5))
        names = list(dict.fromkeys(r["selector"] for r in rows))
        for i, name in enumerate(names):
            own = [r for r in rows if r["selector"] == name]
            panel.loglog([r["size"] for r in own], [r["ratio"] for r in own], ["o-", "s--"][i // 10 % 2], label=name, base=2)
        panel.set_yscale("log")
        panel.axhline(1, color="black", linestyle=":")
        panel.set(xlabel="elements", ylabel="time of a step / r += g")
        panel.legend(loc="upper left", bbox_to_anchor=(1, 1))
        results.write("selection_cost.svg", figure)


def run(arguments):
    # All keys, whether or not they are used: a wrong one is an error in any case.
    arguments.numbers("densities", 1e-9, 1), arguments.numbers("density", 1e-9, 1)
    for key, least, greatest in [("skip", 0, 1000000000), ("rounds", 1, 1000000), ("threads", 0, 1024)]:
        arguments.whole(key, least, greatest)
    most = arguments.whole("max_log2", 0, 30)
    if 0 < most < LEAST_LOG2:
        raise Refusal(f"max_log2 of experiment selection needs 0, or 16 to 30, not '{most}'")
    if most == 0 and not arguments["in"]:
        raise Refusal("experiment selection has nothing to do: give in=gradients.safetensors, or max_log2 of at least 16")
    results = Results(arguments.folder())
    if arguments["in"]:
        run_quality(arguments, results)
    if most:
        run_cost(arguments, results, most)
    results.done()


EXPERIMENTS = {
    "selection": ("each selector: selected count and captured energy on recorded gradients; cost over sizes", [
        ("in", "", "gradients.safetensors of a run, or .npy of [steps, elements], for count and energy; none: cost alone"),
        ("densities", "0.1,0.01,0.001,0.0001", "of the recorded gradients"),
        ("skip", "20", "recorded steps that fill the residual before steps count"),
        ("density", "0.001", "for the cost"),
        ("max_log2", "28", "cost at 2^16, 2^18, ... up to this many elements; 0: no cost"),
        ("rounds", "41", "measured steps up to 2^22 elements; fewer beyond, at least 7"),
        ("threads", "0", "of the cost; 0: as many as OpenMP takes"),
        ("out", "studies/selection", "folder of the .csv, .jsonl and .svg files"),
    ], run),
}  # fmt: skip
