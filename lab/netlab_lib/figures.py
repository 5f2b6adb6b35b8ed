"""Step figures from the log of a run (train/metrics/metrics.h), and their summary over rounds."""

import os
import statistics

import runs

WARM_UP_STEPS = 5  # as in train/metrics/metrics.h: the first steps fill caches and allocate memory
MEDIANS = ("encode_s", "decode_s", "communicate_s", "exposed_s", "bytes_sent", "bytes_received", "images_per_second")


def number(value):
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def median(values):
    values = [value for value in values if number(value) is not None]
    return statistics.median(values) if values else None


def exchange_keys(folder):
    """Whole numbers of the section `exchange` of the run's configuration; {} without it."""
    found = runs.settings(runs.content(os.path.join(folder, "config.yaml")).decode())
    return {
        name.removeprefix("exchange."): int(value)
        for name, (value, _) in found.items()
        if name.startswith("exchange.") and value.isdigit()
    }


def mean_of_round(name, records):
    values = [number(record.get(name)) for record in records]
    if None in values:
        return None
    if name == "images_per_second":  # of steps of different lengths: items over seconds
        return statistics.harmonic_mean(values)
    return statistics.fmean(values)


def local_figures(path, steps, keys):
    """With local steps, of which only every H-th is followed by a sync, a median step has none: medians over the rounds from a
    sync to the next, of the mean within the round."""
    every, fragmented = keys["every"], keys.get("fragments", 1) > 1 or keys.get("overlap_steps", 0) > 0
    at = {record["step"]: record for record in steps}
    first = -(-WARM_UP_STEPS // every) * every
    last = max(at, default=0) - fragmented  # behind a run's last step all fragments are sent
    rounds = [range(begin, begin + every + 1) for begin in range(first, last - every + 1, every)]
    if len(rounds) < 2:
        raise ValueError(
            f"{path} has {len(steps)} steps; {first + 2 * every + fragmented} are needed for two rounds of "
            f"exchange.every={every} after the first {first}, which do not count"
        )
    rounds = [each for each in rounds if all(step in at for step in each)]
    if any(at[step].get("skipped") for each in rounds for step in each[1:]):
        raise ValueError(f"{path} has steps that were left out, since some value was not finite: they are no training steps")
    timed = [each for each in rounds if None not in (number(at[each[0]].get("time_s")), number(at[each[-1]].get("time_s")))]
    if not timed:
        raise ValueError(f"{path}: its steps have no time_s")
    result = {
        "steps": every * len(timed),
        "step_s": statistics.median((at[each[-1]]["time_s"] - at[each[0]]["time_s"]) / every for each in timed),
    }
    result.update({name: median(mean_of_round(name, [at[step] for step in each[1:]]) for each in timed) for name in MEDIANS})
    return result


def figures(folder):
    """Of a run: medians over the steps after the first five; None for what is not recorded. step_s is the time between a step's
    record and the one before."""
    path, keys = runs.log_of(folder), exchange_keys(folder)
    steps = [record for record in runs.records(folder, "step") if number(record.get("step")) is not None]
    if keys.get("every"):
        return local_figures(path, steps, keys)
    last_cold = max((i for i, record in enumerate(steps) if record["step"] <= WARM_UP_STEPS), default=None)
    warm = steps if last_cold is None else steps[last_cold + 1 :]
    if len(warm) < 2:
        raise ValueError(
            f"{path} has {len(steps)} steps; {WARM_UP_STEPS + 2} are needed, of which the first {WARM_UP_STEPS} do not count"
        )
    if any(record.get("skipped") for record in warm):
        raise ValueError(f"{path} has steps that were skipped, since some value was not finite: they are no training steps")
    chain = warm if last_cold is None else [steps[last_cold]] + warm
    gaps = []
    for before, after in zip(chain, chain[1:]):
        times = number(before.get("time_s")), number(after.get("time_s"))
        if None not in times and after["step"] > before["step"]:
            gaps.append((times[1] - times[0]) / (after["step"] - before["step"]))
    if not gaps:
        raise ValueError(f"{path}: its steps have no time_s")
    result = {"steps": len(warm), "step_s": statistics.median(gaps)}
    result.update({name: median(record.get(name) for record in warm) for name in MEDIANS})
    return result


def parts(row):
    """The parts of a step as (name, seconds), summing to step_s; compute is the remainder. None without step_s or exposed_s."""
    if any(row.get(name) is None for name in ("step_s", "exposed_s")):
        return None
    coding = (row.get("encode_s") or 0) + (row.get("decode_s") or 0)
    return [
        ("compute", max(0.0, row["step_s"] - coding - row["exposed_s"])),
        ("encode and decode", coding),
        ("exposed communication", row["exposed_s"]),
    ]


def training_s(steps, own_s, baseline_s):
    """Seconds of steps[0] steps, of which steps[1] take the baseline's time; None where a time is missing."""
    every, as_baseline = steps
    if own_s is None or (as_baseline and baseline_s is None):
        return None
    return (every - as_baseline) * own_s + as_baseline * (baseline_s or 0)


def summarise(cells, spec):
    """One row per hosts x rate x method, from the cells of all rounds (compare.py)."""
    rows, methods, baseline = [], spec["methods"], spec["baseline"]
    for count in spec["hosts"]:
        for rate in spec["rates"]:
            here = [cell for cell in cells if cell["hosts"] == count and cell["rate"] == rate]
            base = {
                cell["round"]: cell["figures"]["step_s"] for cell in here if cell["method"] == baseline and cell.get("figures")
            }
            for method in methods:
                mine = [cell for cell in here if cell["method"] == method]
                good = [cell for cell in mine if cell.get("figures")]
                row = {
                    "hosts": count,
                    "rate": rate,
                    "method": method,
                    "rounds": len(good),
                    "failed": [cell["problem"] for cell in mine if cell.get("problem")],
                }
                for name in ("step_s", *MEDIANS):
                    row[name] = median(cell["figures"].get(name) for cell in good)
                times = [cell["figures"]["step_s"] for cell in good]
                row["step_lowest_s"], row["step_highest_s"] = min(times, default=None), max(times, default=None)
                steps = spec.get("steps", {}).get(method)
                row["training_s"] = steps and training_s(steps, row["step_s"], median(base.values()))
                row["speedup"] = median(base[cell["round"]] / cell["figures"]["step_s"] for cell in good if cell["round"] in base)
                links = [cell["lab"]["measured"] for cell in mine if cell.get("lab") and cell["lab"]["measured"]]
                row["measured_bits"] = min((link["lowest_bits"] for link in links), default=None)
                nominal = next((cell["lab"]["nominal_bits"] for cell in mine if cell.get("lab")), None)
                row["nominal_bits"] = nominal
                row["cpu_bound"] = bool(nominal and row["measured_bits"] and row["measured_bits"] < 0.8 * nominal)
                rows.append(row)
    return rows
