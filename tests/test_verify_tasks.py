"""verify --tasks: lm-evaluation-harness on the paged cache, with tasks and data of our own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import write_texts

from fp8calib.cli import main
from fp8calib.errors import DataError, UserError
from fp8calib.evaluation import verify
from fp8calib.evaluation.tasks import TaskSet
from fp8calib.recipe import Gates

NO_GATES = Gates(**dict.fromkeys(Gates.model_fields))
TASKS = {
    "choose": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "read": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question * 20}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
    "write": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{written}}"
generation_kwargs: {until: ["~~"], max_gen_toks: 6, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    docs = [
        {
            "question": f"{n} and {n + 1} and {n + 2} make",
            "choices": [f" {3 * n + 3}", f" {n}", " nothing"],
            "answer": n % 3,
            "written": "no",
        }
        for n in range(12)
    ]
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, body in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ntest_split: train\n"
        head += f"dataset_kwargs: {{data_files: {data}}}\nnum_fewshot: 0\n"
        (folder / f"{name}.yaml").write_text(head + body.lstrip())
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        write_texts(tmp_path_factory.mktemp("data"), (f"{n} times {n * n}" for n in range(8)))
    )


def test_tasks_of_every_kind_native_and_fp8_in_one_go(
    tiny: Callable[..., Path], texts: str, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    model = str(tiny())
    names = list(TASKS)
    result = verify(
        model, dataset=texts, tasks=names, task_folder=str(tasks), variants="native,fp32,fp8",
        gates=Gates(max_kl=None, max_ppl_increase=None, min_top1=None, max_task_drop=1e-6),
    )  # fmt: skip
    found = {(task.task, task.metric): task for task in result.tasks}
    assert found.keys() == {
        ("choose", "acc"),
        ("choose", "acc_norm"),
        ("read", "word_perplexity"),
        ("read", "bits_per_byte"),
        ("write", "exact_match"),
    }
    for task in found.values():
        native, again, fp8 = task.variants
        assert task.samples == 12 and native.drop is None
        assert again.value == native.value and again.drop is not None
        assert (again.drop.value, again.drop_stderr) == (0, 0)
        assert fp8.drop is not None and fp8.drop.low is not None
    perplexity = found["read", "word_perplexity"]
    assert not perplexity.higher_is_better
    native, _, fp8 = perplexity.variants
    assert fp8.drop is not None and fp8.drop.value == pytest.approx(fp8.value - native.value)
    # what the two share cancels out of the difference
    assert 0 < fp8.drop_stderr < native.stderr  # type: ignore[operator]
    gates = [gate for gate in result.gates if gate.gate == "max_task_drop"]
    assert len(gates) == 5 and {g.task for g in gates} >= {"choose acc", "read bits_per_byte"}

    # the harness's own model of transformers, on the same tasks
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    theirs = simple_evaluate(
        "hf", {"pretrained": model, "device": "cpu", "dtype": "float32", "add_bos_token": False},
        tasks=names, task_manager=manager, bootstrap_iters=0,
    )  # fmt: skip
    for (task_name, metric), task in found.items():
        expected = theirs["results"][task_name][f"{metric},none"]
        assert task.variants[0].value == pytest.approx(expected, rel=1e-4)


def test_log_likelihoods_and_answers_are_those_of_the_harness_own_model(
    tiny: Callable[..., Path],
) -> None:
    """Contexts longer than the model, empty ones, and stops included."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from fp8calib.evaluation.lm_eval_model import Fp8CalibLM

    model = str(tiny())
    ours = Fp8CalibLM(model, max_length=48, dtype="float32", kv_cache_dtype="float32")
    theirs = HFLM(pretrained=model, device="cpu", dtype="float32", max_length=48, batch_size=1)

    def asked(kind: Any, *arguments: Any) -> list[Instance]:
        return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]

    pairs = [("one two", " three"), ("", "alone"), ("long " * 30, "tail"), ("a ", "b c d")]
    for mine, other in zip(
        ours.loglikelihood(asked("loglikelihood", *pairs)),
        theirs.loglikelihood(asked("loglikelihood", *pairs)),
        strict=True,
    ):
        assert mine[0] == pytest.approx(other[0], abs=1e-3) and mine[1] == other[1]
    texts = [("short",), ("much longer than the model is " * 6,)]
    assert ours.loglikelihood_rolling(asked("loglikelihood_rolling", *texts)) == pytest.approx(
        theirs.loglikelihood_rolling(asked("loglikelihood_rolling", *texts)), abs=1e-2
    )
    longer = ours.generate_until(asked("generate_until", ("abc", {"max_gen_toks": 12})))[0]
    stop = longer[len(longer) // 2]
    prompts = [
        ("abc", {"max_gen_toks": 12, "until": [stop]}),
        ("long " * 30, {"max_gen_toks": 5, "until": []}),
    ]
    generated = ours.generate_until(asked("generate_until", *prompts))
    assert generated[0] == longer[: longer.index(stop)]
    kwargs = [(p, {**k, "do_sample": False}) for p, k in prompts]
    assert generated == theirs.generate_until(asked("generate_until", *kwargs))


def test_mistakes_about_tasks(
    tiny: Callable[..., Path],
    texts: str,
    tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"dataset": texts, "gates": NO_GATES, "task_folder": str(tasks)}
    with pytest.raises(UserError, match="--task-folder /no/such: no such folder"):
        verify(str(tiny()), tasks=["choose"], dataset=texts, task_folder="/no/such")
    (tmp_path / "lost.yaml").write_text(
        (tasks / "choose.yaml").read_text().replace("docs.jsonl", "lost.jsonl")
        .replace("task: choose", "task: lost")
    )  # fmt: skip
    with pytest.raises(DataError, match="--tasks lost: "):
        verify(str(tiny()), tasks=["lost"], **{**options, "task_folder": str(tmp_path)})
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(tiny()), "--dataset", texts, "--tasks", "nothing_of_the_kind"])
    assert stop.value.code == 2
    assert "knows no such task" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"pip install 'fp8calib\[eval\]'"):
        TaskSet(("choose",)).check()
