"""The model that a server offers, and what it takes as a prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from fp8calib.runtime.async_llm import AsyncLLM
from fp8calib.runtime.default_sampling import default_sampling
from fp8calib.serve.errors import APIError
from fp8calib.serve.protocol import ModelCard
from fp8calib.serve.settings import ServerSettings


class ServedModel:
    """An AsyncLLM under the names that requests may use.

    default_sampling: what the model itself says of sampling. max_model_len: tokens of a sequence.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.limits = settings.limits
        self.name = settings.model_names[0]
        self.default_sampling = default_sampling(llm.llm.engine.loaded.model)
        self.tokenizer: Any = llm.llm.tokenizer
        self.max_model_len = llm.llm.max_model_len
        self._created = int(time.time())

    def check_name(self, name: str | None) -> None:
        """Raise APIError for another model's name; a request without one means this model."""
        if name:
            self.card(name)

    def check_running(self) -> None:
        """Raise APIError when the engine takes no requests: it has failed, or shuts down."""
        if not self.llm.is_running:
            raise APIError("the engine has stopped", status=503)

    def card(self, name: str) -> ModelCard:
        """The model under one of its names; APIError for another's."""
        for card in self.cards():
            if card.id == name:
                return card
        raise APIError(
            f"the model {name!r} does not exist; this server has {self.name!r}",
            status=404,
            param="model",
            code="model_not_found",
        )

    def cards(self) -> list[ModelCard]:
        return [
            ModelCard(
                id=name,
                created=self._created,
                root=self.llm.llm.engine.loaded.name,
                max_model_len=self.max_model_len,
            )
            for name in self.settings.model_names
        ]

    async def tokenize(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text; in a thread, since long ones take their time."""

        def run() -> list[list[int]]:
            encoded = self.tokenizer(
                list(texts), add_special_tokens=add_special_tokens, verbose=False
            )
            return encoded["input_ids"]

        return await asyncio.to_thread(run)

    def check_length(
        self,
        prompt: Sequence[int],
        max_tokens: int | None,
        field: str = "prompt",
        length_field: str = "max_tokens",
    ) -> None:
        """Raise APIError where a prompt, with the tokens asked for, does not fit. The fields are
        where the request has the two."""
        most = self.limits.prompt_tokens
        if most is not None and len(prompt) > most:
            raise APIError(
                f"a prompt has {len(prompt)} tokens, more than this server's limit of {most}",
                param=field,
                code="context_length_exceeded",
            )
        if len(prompt) + (max_tokens or 1) > self.max_model_len:
            asked = f" and {max_tokens} were asked for" if max_tokens else ""
            raise APIError(
                f"a prompt has {len(prompt)} tokens{asked}; together at most "
                f"{self.max_model_len} fit",
                param=field if len(prompt) >= self.max_model_len else length_field,
                code="context_length_exceeded",
            )
