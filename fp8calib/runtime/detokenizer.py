"""Text from tokens as they come: no half characters, no text that a stop string takes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_CONTEXT = 8  # tokens of the prompt: what a tokenizer writes for a token can depend on those before
_INCOMPLETE = "\ufffd"  # what decoding gives for the bytes of an unfinished character
_MAX_INCOMPLETE = 3  # of a character's at most four bytes, three can be there without the last
_MAX_UNSETTLED = 64  # tokens without text, or bytes that make no characters, could go on forever


class TextDecoder:
    """The text of some tokens, without special ones. One for all sequences of a tokenizer: what a
    single token says is asked for again and again, and is kept."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._single: dict[int, str] = {}
        kind = type(tokenizer)
        self._backend = None
        if (
            getattr(kind, "decode", None) is PreTrainedTokenizerBase.decode
            and getattr(kind, "_decode", None) is PreTrainedTokenizerFast._decode
        ):
            # What these two do around this one takes longer than it does.
            self._backend = tokenizer.backend_tokenizer

    def decode(self, token_ids: list[int]) -> str:
        if len(token_ids) != 1:
            return self._decode(token_ids)
        text = self._single.get(token_ids[0])
        if text is None:
            text = self._single[token_ids[0]] = self._decode(token_ids)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        if self._backend is not None:
            return self._backend.decode(token_ids, skip_special_tokens=True)
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class Detokenizer:
    """Decodes one sequence token by token; special tokens are left out."""

    def __init__(self, decoder: TextDecoder, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decoder.decode
        self._window = list(prompt_token_ids[-_CONTEXT:])  # tokens that are still decoded again
        self._settled = len(self._window)  # of these, how many are done with
        self._given = self._decode(self._window)  # what of their text was given out

    def add(self, token_id: int) -> str:
        """The text that has become certain with one more token; often a word, maybe nothing."""
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = _certain(text)
        new = self._take(certain)
        if new and certain == text:
            # Start over behind what was settled before: the last piece remains as context.
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
            self._given = self._decode(self._window)
        elif len(self._window) > self._settled + _MAX_UNSETTLED:
            self._window = self._window[: self._settled] + self._window[-_CONTEXT:]
            self._given = _certain(self._decode(self._window))
        return new

    def finish(self) -> str:
        """What was held back, at the end of the sequence."""
        return self._take(self._decode(self._window))

    def _take(self, text: str) -> str:
        """What `text` has beyond that which was given out. The two part where a prompt ended in
        the middle of a character, which then is given out whole."""
        new = text[_shared(self._given, text) :]
        if new:
            self._given = text
        return new


def _certain(text: str) -> str:
    """`text` without the end that may be the beginning of a character."""
    if not text.endswith(_INCOMPLETE):
        return text
    tail = len(text) - len(text.rstrip(_INCOMPLETE))
    return text[: len(text) - min(tail, _MAX_INCOMPLETE)]


def _shared(one: str, other: str) -> int:
    """How many characters two texts have in common at their start."""
    if other.startswith(one):
        return len(one)
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(other))


class StopStrings:
    """Lets text through until one of `stop` appears, and holds back what may be its beginning."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.found: str | None = None

    def add(self, text: str, may_end: bool = True) -> str:
        """The part of `text`, and of what was held back, that is surely before any stop string.
        One that is complete before the text `may_end` is none."""
        if not self._stop:
            return text
        if self.found is not None:
            return ""
        text = self._held + text
        hits = [(text.find(stop), stop) for stop in self._stop if may_end and stop in text]
        if hits:
            where, self.found = min(hits)
            self._held = ""
            return text[:where]
        length = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - length :]
        return text[: len(text) - length]

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` are a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
