"""The metrics of GLUE, computed here with NumPy alone, and through `evaluate` where it is reachable.

Both give the same numbers under the same names: runs with and without a network can be compared.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import numpy as np

logger = logging.getLogger(__name__)

MetricFn = Callable[[np.ndarray, np.ndarray], dict[str, float]]


def accuracy(predictions: np.ndarray, references: np.ndarray) -> float:
    """Share of predictions that equal their reference."""
    return float(np.mean(np.asarray(predictions) == np.asarray(references)))


def f1_binary(predictions: np.ndarray, references: np.ndarray) -> float:
    """Harmonic mean of precision and recall of class 1; 0 where class 1 is neither predicted nor present."""
    predicted, actual = np.asarray(predictions) == 1, np.asarray(references) == 1
    denominator = int(predicted.sum() + actual.sum())
    return 2.0 * int((predicted & actual).sum()) / denominator if denominator else 0.0


def matthews_correlation(predictions: np.ndarray, references: np.ndarray) -> float:
    """Correlation of predicted and true classes, for any number of classes; 0 where either is constant."""
    classes, indices = np.unique(np.concatenate([references, predictions]), return_inverse=True)
    actual, predicted = np.split(indices, 2)
    confusion = np.zeros((len(classes), len(classes)))
    np.add.at(confusion, (actual, predicted), 1)
    actual_counts, predicted_counts, total = confusion.sum(axis=1), confusion.sum(axis=0), confusion.sum()
    covariance = np.trace(confusion) * total - actual_counts @ predicted_counts
    spread = (total**2 - predicted_counts @ predicted_counts) * (total**2 - actual_counts @ actual_counts)
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


def pearson(predictions: np.ndarray, references: np.ndarray) -> float:
    """Linear correlation; NaN where either is constant."""
    x = np.asarray(predictions, dtype=np.float64)
    y = np.asarray(references, dtype=np.float64)
    x, y = x - x.mean(), y - y.mean()
    scale = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / scale) if scale > 0 else float("nan")


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1 on; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def spearman(predictions: np.ndarray, references: np.ndarray) -> float:
    """Correlation of the ranks; NaN where either is constant."""
    return pearson(ranks(np.asarray(predictions)), ranks(np.asarray(references)))


def accuracy_metrics(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """The metrics of a classification task."""
    return {"accuracy": accuracy(predictions, references)}


def paraphrase_metrics(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """What MRPC and QQP report."""
    return {"accuracy": accuracy(predictions, references), "f1": f1_binary(predictions, references)}


def matthews_metrics(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """What CoLA reports."""
    return {"matthews_correlation": matthews_correlation(predictions, references)}


def regression_metrics(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """What STS-B reports."""
    return {"pearson": pearson(predictions, references), "spearmanr": spearman(predictions, references)}


LOCAL_METRICS: dict[str, MetricFn] = {
    "cola": matthews_metrics,
    "mrpc": paraphrase_metrics,
    "qqp": paraphrase_metrics,
    "stsb": regression_metrics,
}


def load_metric(task_name: str | None, is_regression: bool) -> MetricFn:
    """Returns the function that turns (predictions, references) into the task's numbers.

    A GLUE task uses `evaluate.load("glue", task)`. Data without a task, `HF_HUB_OFFLINE=1` and a hub that does not
    answer use the functions above at once.

    Args:
        task_name: one of GLUE's tasks, or None for data of one's own.
        is_regression: whether data of one's own has numbers rather than classes for labels.
    """
    if task_name is None:
        return regression_metrics if is_regression else accuracy_metrics
    local = LOCAL_METRICS.get(task_name, accuracy_metrics)
    if is_offline():
        return local
    try:
        import evaluate

        metric = evaluate.load("glue", task_name)
    except Exception as error:  # each layer below raises its own kind: connection, hub, missing package
        logger.warning("evaluate.load('glue', %r) failed (%s); computing its metrics locally.", task_name, error)
        return local
    return lambda predictions, references: metric.compute(predictions=predictions, references=references)


def is_offline() -> bool:
    """Whether the user asked for no network, in the way the Hugging Face libraries understand."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
