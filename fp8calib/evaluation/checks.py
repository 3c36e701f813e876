"""The checks that are asked for: generation, needles, tasks. What each has found so far stays when
it is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp8calib.errors import UserError
from fp8calib.evaluation import generation, needle, tasks
from fp8calib.evaluation.variants import Run

_PROMPTS = generation.PROMPTS


class Checks:
    """Prepared, and refused, before any of them runs.

    Args:
        runs: the variants, the reference first.
        rows: the text, token ids by document.
        more_text: gives at least so many tokens of it, as far as there are.
        num_generated: tokens to generate; 0 for no such check.
        lengths: of texts with needles, None for no such check.
        task_set: None for none.

    Raises:
        UserError: more tokens than the model can have.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        rows: Sequence[Sequence[int]],
        more_text: Callable[[int], list[int]],
        num_generated: int,
        lengths: Sequence[int] | None,
        trials: int,
        seed: int,
        task_set: tasks.TaskSet | None,
    ) -> None:
        self._runs, self._tasks, self._num_generated = runs, task_set, num_generated
        self._trials = trials
        self._prompts = [list(row[: generation.PROMPT_TOKENS]) for row in rows[:_PROMPTS]]
        most = min(run.loaded.max_model_len for run in runs)
        if num_generated and max(map(len, self._prompts)) + num_generated > most:
            raise UserError(
                f"--generation {num_generated}: with {generation.PROMPT_TOKENS} tokens of prompt "
                f"this model can do {most}"
            )
        self._questions = list[needle.Question]()
        self.warnings: list[str] = []
        if lengths is not None:
            tokenizer, haystack = runs[0].loaded.tokenizer, more_text(max(lengths))
            self._questions = needle.make_questions(
                lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
                haystack,
                lengths,
                trials,
                seed,
            )
            self.warnings = needle.repeated_text(self._questions, haystack)
        self._outputs: generation.Outputs = {}
        self._scores: needle.Scores = {}
        self._task_outputs: tasks.TaskOutputs = {}

    def run(self) -> None:
        if self._num_generated:
            generation.generate(self._runs, self._prompts, self._num_generated, self._outputs)
        if self._questions:
            needle.answer_questions(self._runs, self._questions, self._scores)
        if self._tasks is not None:
            tasks.run_tasks(self._runs, self._tasks, self._task_outputs)

    @property
    def generation(self) -> generation.GenerationCheck | None:
        if not self._num_generated:
            return None
        return generation.check_generation(
            self._runs, self._prompts, self._num_generated, self._outputs
        )

    @property
    def needle(self) -> needle.NeedleTest | None:
        return needle.summarise_needles(self._runs, self._questions, self._trials, self._scores)

    @property
    def tasks(self) -> list[tasks.TaskResult]:
        if self._tasks is None:
            return []
        return tasks.summarise_tasks(self._runs, self._tasks, self._task_outputs)
