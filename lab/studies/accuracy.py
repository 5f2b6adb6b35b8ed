"""A summary.csv of lab/train-runs as a plot: rows METHOD-dDENSITY and the reference `dense`; others are left out."""

import csv

from .common import Refusal, Results, pyplot, table


def read(path):
    """{method: [(density, accuracy, ratio)]} and dense's accuracy, or None."""
    if not path:
        raise Refusal("in=FILE is missing; lab/train-runs writes summary.csv into its folder")
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"in={path}: cannot be read: {error}") from None
    if not lines or lines[0][:3] != ["run", "seeds", "accuracy"]:
        raise Refusal(f"in={path}: not a summary.csv of lab/train-runs, which begins with run,seeds,accuracy")
    methods, dense = {}, None
    for number, cells in enumerate(lines[1:], 2):
        method, dash, density = (cells or [""])[0].rpartition("-d")
        if not dash and cells[:1] != ["dense"]:
            continue
        try:
            row = (float(density) if dash else 1.0, float(cells[2]), float(cells[4]))
        except (ValueError, IndexError):
            raise Refusal(f"{path}:{number}: a cell holds no number; the file is not a summary.csv of lab/train-runs") from None
        if not row[0] > 0:
            raise Refusal(f"{path}:{number}: a density must be above 0")
        if dash:
            methods.setdefault(method, []).append(row)
        else:
            dense = row[1]
    if not methods:
        raise Refusal(f"in={path}: no row is named METHOD-dDENSITY")
    return {name: sorted(rows) for name, rows in sorted(methods.items())}, dense


def run(arguments):
    methods, dense = read(arguments["in"])
    results = Results(arguments.folder())
    rows = [
        [name, f"{d:g}", f"{accuracy:.2f}", f"{ratio:g}"] for name, points in methods.items() for d, accuracy, ratio in points
    ]
    print(table([["method", "density", "test accuracy, %", "times less sent"], *rows]))
    if plot := pyplot():
        figure, panels = plot.subplots(1, 2, figsize=(11, 4), sharey=True)
        for name, points in methods.items():
            for panel, x in zip(panels, (0, 2)):
                panel.semilogx([point[x] for point in points], [point[1] for point in points], "o-", label=name)
        for panel, label in zip(panels, ("density", "times less than dense that a rank sends")):
            panel.set_xlabel(label)
            if dense is not None:
                panel.axhline(dense, color="black", linestyle=":", label="dense")
        panels[0].set(ylabel="test accuracy, %", ylim=(0, None))
        panels[0].legend()
        results.write("accuracy.svg", figure)
    results.done()


EXPERIMENTS = {
    "accuracy": ("the summary of lab/train-runs as a plot: accuracy over density and bytes", [
        ("in", "", "summary.csv of lab/train-runs"),
        ("out", "studies/accuracy", "folder of accuracy.svg"),
    ], run),
}  # fmt: skip
