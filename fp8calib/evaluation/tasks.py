"""Tasks of lm-evaluation-harness under each cache, and how much is lost on them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fp8calib import console
from fp8calib.errors import DataError, UserError
from fp8calib.evaluation.bootstrap import Estimate
from fp8calib.evaluation.variants import Run

_RESAMPLES = 1000
_Z = 1.959963984540054  # normal quantile of a 95 % interval

TaskOutputs = dict[str, dict[str, Any]]  # by variant, what lm-evaluation-harness returned


@dataclass(frozen=True)
class TaskScore:
    """One variant's `value` of a metric, with its standard error over the samples. drop: how much
    worse it is than native, from paired differences, with their standard error; None for native."""

    key: str
    value: float
    stderr: float | None
    drop: Estimate | None
    drop_stderr: float | None


@dataclass(frozen=True)
class TaskResult:
    task: str
    metric: str
    higher_is_better: bool
    samples: int
    variants: list[TaskScore]


@dataclass(frozen=True)
class TaskSet:
    """Tasks by `names`, as lm-evaluation-harness knows them or finds them in the YAML files of
    `folder`; of each task the first `limit` samples."""

    names: tuple[str, ...]
    folder: Path | None = None
    limit: int | None = None

    def check(self) -> None:
        """Raise UserError where lm-evaluation-harness or a task is missing; loads no data."""
        if find_spec("lm_eval") is None:
            raise UserError("--tasks needs lm-evaluation-harness: pip install 'fp8calib[eval]'")
        if self.folder is not None and not self.folder.is_dir():
            raise UserError(f"--task-folder {self.folder}: no such folder")
        manager = self.manager()
        for name in self.names:
            if not manager.match_tasks([name]):
                raise UserError(f"--tasks {name}: lm-evaluation-harness knows no such task")

    def manager(self) -> Any:
        """Of the folder alone where it has all the tasks: the harness's own are thousands."""
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        if self.folder is None:
            return TaskManager()
        own = TaskManager(include_path=str(self.folder), include_defaults=False)
        if all(own.match_tasks([name]) for name in self.names):
            return own
        return TaskManager(include_path=str(self.folder))


def run_tasks(runs: Sequence[Run], tasks: TaskSet, outputs: TaskOutputs) -> None:
    """Evaluate every variant; `outputs` receives one when it is done.

    Raises:
        DataError: a task's data cannot be loaded.
    """
    from lm_eval import simple_evaluate

    from fp8calib.evaluation.lm_eval_model import Fp8CalibLM

    manager = tasks.manager()
    with console.progress("tasks (variants)", len(runs)) as bar:
        for run in runs:
            try:
                outputs[run.variant.key] = simple_evaluate(
                    model=Fp8CalibLM(run=run),
                    tasks=list(tasks.names),
                    task_manager=manager,
                    limit=tasks.limit,
                    bootstrap_iters=0,
                    log_samples=True,
                )
            except (OSError, ValueError, LookupError, ImportError) as problem:
                reason = str(problem).strip().splitlines() or [type(problem).__name__]
                raise DataError(f"--tasks {','.join(tasks.names)}: {reason[0]}") from problem
            bar.advance()


def summarise_tasks(runs: Sequence[Run], tasks: TaskSet, outputs: TaskOutputs) -> list[TaskResult]:
    """Of the variants that are done, native among them: every task's every metric."""
    done = [run for run in runs if run.variant.key in outputs]
    if len(done) < 2 or done[0] is not runs[0]:
        return []
    loaded = tasks.manager().load(list(tasks.names))["tasks"]
    found = []
    for name, task in loaded.items():
        for label in outputs[done[0].variant.key]["results"][name]:
            metric, _, kind = label.partition(",")
            better = outputs[done[0].variant.key]["higher_is_better"].get(name, {}).get(metric)
            if kind and metric in task.aggregation():
                samples = {
                    run.variant.key: _samples(outputs[run.variant.key], name, metric, kind)
                    for run in done
                }
                found.append(
                    _result(
                        f"{metric},{kind}" if kind != "none" else metric,
                        name,
                        better is not False,
                        samples,
                        task.aggregation()[metric],
                    )
                )
    return found


def _samples(output: Mapping[str, Any], task: str, metric: str, kind: str) -> list[Any]:
    """A metric's value of each sample, in the order of the samples."""
    ours = [s for s in output["samples"][task] if s["filter"] == kind]
    return [s[metric] for s in sorted(ours, key=lambda s: s["doc_id"]) if metric in s]


def _result(
    metric: str,
    task: str,
    higher_is_better: bool,
    samples: Mapping[str, list[Any]],
    aggregate: Callable[[list[Any]], Any],
) -> TaskResult:
    first, *_ = samples
    count = len(samples[first])
    sign = 1 if higher_is_better else -1
    draws = np.random.default_rng(0).integers(count, size=(_RESAMPLES, count))
    values = {key: float(aggregate(list(items))) for key, items in samples.items()}
    drawn = {key: _drawn(items, values[key], aggregate, draws) for key, items in samples.items()}
    scores = []
    for key, value in values.items():
        stderr = float(drawn[key].std(ddof=1)) if count > 1 else None
        drop = drop_stderr = None
        if key != first:
            drop = Estimate(sign * (values[first] - value), None, None)
            if count > 1:
                drop_stderr = float((drawn[first] - drawn[key]).std(ddof=1))
                half = _Z * drop_stderr
                drop = Estimate(drop.value, drop.value - half, drop.value + half)
        scores.append(TaskScore(key, value, stderr, drop, drop_stderr))
    return TaskResult(task, metric, higher_is_better, count, scores)


def _drawn(
    items: Sequence[Any], value: float, aggregate: Callable[[list[Any]], Any], draws: np.ndarray
) -> np.ndarray:
    """The metric of every draw of samples; `draws` are their numbers [draw, sample]."""
    if all(isinstance(item, int | float | np.number) for item in items):
        numbers = np.array(items, dtype=float)
        if math.isclose(numbers.mean(), value, abs_tol=1e-12):
            return numbers[draws].mean(1)
    return np.array([float(aggregate([items[i] for i in draw])) for draw in draws])
