"""LLM: generate text from Python, with the names and shapes that vLLM's users know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from fp8calib.console import progress, warn
from fp8calib.errors import UserError
from fp8calib.runtime.chat_template import Message, render_chat
from fp8calib.runtime.config import EngineConfig
from fp8calib.runtime.engine import Engine
from fp8calib.runtime.loader import load
from fp8calib.runtime.outputs import RequestOutput
from fp8calib.runtime.request import RequestGroup
from fp8calib.runtime.sampling_params import SamplingParams
from fp8calib.scales import ScaleSet

Prompt = str | Mapping[str, Any]


class LLM:
    """A model on a paged KV cache.

    >>> llm = LLM("demo:smollm2-135m-instruct", kv_cache_dtype="fp8")
    >>> llm.generate("The capital of France is")[0].outputs[0].text

    Args:
        model: a folder, a Hugging Face Hub id, or the name of an embedded model.
        options: fields of EngineConfig.

    Raises:
        UserError: a model that cannot be loaded or run, or options that are refused. Warnings go
            to stderr.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = EngineConfig(**options)
        loaded = load(
            model,
            device=config.device,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
        )
        self.engine = Engine(loaded, config)
        for warning in self.engine.warnings:
            warn(warning)

    @property
    def tokenizer(self) -> Any:
        return self.engine.loaded.tokenizer

    @property
    def max_model_len(self) -> int:
        """The most tokens of a sequence, prompt and answer."""
        return self.engine.max_model_len

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def decode_token(self, token_id: int) -> str:
        """The text of one token by itself."""
        return str(self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False))

    def reload_scales(self, scales: ScaleSet) -> None:
        """Store and read the FP8 cache by other scales from now on. Cached prefixes are dropped,
        and running requests are computed again from their start.

        Raises:
            UserError: the cache has no scales to replace.
            ScaleError: scales that do not fit the model.
        """
        self.engine.reload_scales(scales)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; the results are in the order of the prompts.

        Args:
            prompts: text as it is (no chat template), ``{"prompt": text}`` or
                ``{"prompt_token_ids": ids}``; one or several.
            sampling_params: for all prompts, or one each.
            use_tqdm: show progress on stderr when there are several prompts.

        Raises:
            UserError: a prompt that cannot run, named by its number, or parameters that cannot be
                had.
            ModelError: the device's memory is not enough, or the model's logits are NaN.
        """
        return self._finish(self._add(prompts, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of ``{"role": ..., "content": ...}``), or several."""
        chats: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.render_chat(chat) for chat in chats]
        return self._finish(self._add(prompts, sampling_params), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Generate, and yield a request's output so far each time it gains a token; request ids
        count up in the order of `prompts`. Closing the iterator gives up what is unfinished."""
        groups = self._add(prompts, sampling_params)
        of = {request: group for group in groups for request in group.requests}
        untold = dict.fromkeys(groups)  # those whose end was not yielded yet
        try:
            while not all(group.finished for group in groups):
                grown = {of[r]: None for r in self.engine.step() if r in of}
                for group in grown:
                    if group.finished:
                        untold.pop(group)
                    yield self._output(group)
            for group in untold:  # it came in a step of another call
                yield self._output(group)
        finally:
            self._abort(groups)

    def render_chat(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The prompt that the tokenizer's chat template makes of a conversation.

        Raises:
            UserError: there is no template, or it refuses the conversation.
        """
        text, ids = render_chat(self.tokenizer, messages)
        return {"prompt": text, "prompt_token_ids": ids}

    def _add(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestGroup]:
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts, but {len(sampling_params)} sampling params; give one for "
                "all, or one for each"
            )
        groups: list[RequestGroup] = []
        try:
            for prompt, params in zip(prompts, sampling_params, strict=True):
                groups.append(self._add_one(prompt, params))
        except UserError as problem:
            self._abort(groups)
            if len(prompts) == 1:
                raise
            raise UserError(f"prompt {len(groups) + 1} of {len(prompts)}: {problem}") from None
        except BaseException:
            self._abort(groups)
            raise
        return groups

    def _add_one(self, prompt: Prompt, params: SamplingParams) -> RequestGroup:
        if isinstance(prompt, str):
            return self.engine.add_group(params, prompt)
        got = list(prompt) if isinstance(prompt, Mapping) else [f"a {type(prompt).__name__}"]
        if not got or not {"prompt", "prompt_token_ids"}.issuperset(got):
            raise UserError(
                "a prompt is a text, or has the key prompt or prompt_token_ids; got "
                f"{', '.join(map(str, got)) or 'nothing'}"
            )
        return self.engine.add_group(params, prompt.get("prompt"), prompt.get("prompt_token_ids"))

    def _finish(self, groups: list[RequestGroup], use_tqdm: bool) -> list[RequestOutput]:
        several = use_tqdm and len(groups) > 1
        total = sum(len(group.requests) for group in groups)
        with progress("generating", total) if several else nullcontext() as bar:
            try:
                while not all(group.finished for group in groups):
                    done = sum(request.finish_reason is not None for request in self.engine.step())
                    if bar is not None:
                        bar.advance(done, f"{self.engine.stats.tokens_per_second:.1f} tokens/s")
            finally:
                self._abort(groups)
        return [self._output(group) for group in groups]

    def _output(self, group: RequestGroup) -> RequestOutput:
        if group.error is not None:
            raise group.error
        return RequestOutput.of(group, self.decode_token)

    def _abort(self, groups: list[RequestGroup]) -> None:
        for group in groups:
            for request in group.requests:
                self.engine.abort(request)
