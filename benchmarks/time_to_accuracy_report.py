"""The fronts of `time_to_accuracy.py`: what each recipe reaches at each cost, and the distance to plain training."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

Entry = dict[str, Any]


def report(entries: list[Entry]) -> None:
    """Print a table for each task."""
    for task in dict.fromkeys(entry["task"] for entry in entries):
        points = best_points([entry for entry in entries if entry["task"] == task])
        print(f"\n## {task}\n")
        print("| recipe | budget | rate | epochs | cost | CPU s | seeds | validation | test | over plain |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for (recipe, budget), runs in sorted(points.items(), key=lambda point: (point[0][1], point[0][0] != "plain")):
            rival = points.get(("plain", budget), [])
            difference = "" if recipe == "plain" else _difference(runs, rival)
            first = runs[0]
            print(
                f"| {recipe} | {budget:g} | {first['rate']:g} | {first['epochs']:.3g} | {_mean(runs, 'cost'):.2f}"
                f" | {_mean(runs, 'cpu_seconds'):.1f} | {len(runs)} | {_spread(runs, 'validation')}"
                f" | {_spread(runs, 'test')} | {difference} |"
            )
        _print_times(points)


def best_points(entries: list[Entry]) -> dict[tuple[str, float], list[Entry]]:
    """For each recipe and budget the runs, by seed, at the rate that was best on the first seed's validation set."""
    found: dict[tuple[str, float], dict[float, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        found[entry["recipe"], entry["budget"]][entry["rate"]].append(entry)
    points = {}
    for point, by_rate in found.items():
        first = {
            rate: _accuracy(run, "validation") for rate, runs in by_rate.items() for run in runs if run["seed"] == 0
        }
        if first:
            points[point] = sorted(by_rate[max(first, key=lambda rate: first[rate])], key=lambda run: run["seed"])
    return points


def _print_times(points: dict[tuple[str, float], list[Entry]]) -> None:
    """Which cost each recipe needs for plain training's best validation accuracy minus 0.3 points."""
    plain = {budget: runs for (recipe, budget), runs in points.items() if recipe == "plain"}
    if not plain:
        return
    wanted = max(_mean_accuracy(runs, "validation") for runs in plain.values()) - 0.3
    costs = {}
    for (recipe, _), runs in points.items():
        if _mean_accuracy(runs, "validation") >= wanted:
            costs[recipe] = min(costs.get(recipe, math.inf), _mean(runs, "cost"))
    said = ", ".join(f"{recipe} {cost:.2f}" for recipe, cost in sorted(costs.items(), key=lambda item: item[1]))
    print(f"\nCost to reach {wanted:.1f}% (plain training's best minus 0.3) on the validation set: {said}")


def _difference(runs: list[Entry], rivals: list[Entry]) -> str:
    """Mean over the seeds that both have, in points, and its standard error; validation and test set together."""
    by_seed = {rival["seed"]: rival for rival in rivals}
    pairs = [(run, by_seed[run["seed"]]) for run in runs if run["seed"] in by_seed]
    if not pairs:
        return ""
    differences = []
    for run, rival in pairs:
        of_both = [(run[s], rival[s]) for s in ("validation", "test")]
        count = sum(len(mine) for mine, _ in of_both)
        differences.append(100 * sum(mine.count("1") - theirs.count("1") for mine, theirs in of_both) / count)
    return f"{sum(differences) / len(differences):+.1f}" + _error(differences)


def _error(values: list[float]) -> str:
    if len(values) < 2:
        return ""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return f" ± {math.sqrt(variance / len(values)):.1f}"


def _accuracy(run: Entry, split: str) -> float:
    return 100 * run[split].count("1") / len(run[split])


def _mean_accuracy(runs: list[Entry], split: str) -> float:
    return sum(_accuracy(run, split) for run in runs) / len(runs)


def _mean(runs: list[Entry], name: str) -> float:
    return sum(run[name] for run in runs) / len(runs)


def _spread(runs: list[Entry], split: str) -> str:
    return f"{_mean_accuracy(runs, split):.1f}" + _error([_accuracy(run, split) for run in runs])
