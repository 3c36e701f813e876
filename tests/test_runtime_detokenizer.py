"""Text as it grows: whole characters, nothing lost, nothing taken back, stop strings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8calib.runtime.detokenizer import Detokenizer, StopStrings, TextDecoder


def decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stream(tokenizer: Any, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(TextDecoder(tokenizer), prompt or [])
    pieces = [detokenizer.add(token) for token in ids]
    return [*pieces, detokenizer.finish()]


@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=30), prompt=st.text(max_size=12))
@example(text="naïve café 日本語 👩‍👩‍👧 ok", prompt="")
@example(text="\ufffdx\ufffd", prompt="a")
def test_pieces_add_up_to_the_text(smollm2_tokenizer: Any, text: str, prompt: str) -> None:
    ids = smollm2_tokenizer(text)["input_ids"]
    pieces = stream(smollm2_tokenizer, ids, smollm2_tokenizer(prompt)["input_ids"])
    assert "".join(pieces) == decode(smollm2_tokenizer, ids)


@settings(max_examples=80, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=40))
def test_bytes_that_are_no_characters_add_up_too(smollm2_tokenizer: Any, ids: list[int]) -> None:
    """The first ids are single bytes: most of their sequences are no UTF-8."""
    assert "".join(stream(smollm2_tokenizer, ids)) == decode(smollm2_tokenizer, ids)


def test_a_character_comes_whole(smollm2_tokenizer: Any) -> None:
    ids = smollm2_tokenizer("go 🦙!")["input_ids"]
    pieces = stream(smollm2_tokenizer, ids)
    assert [piece for piece in pieces if "🦙" in piece] and not any("\ufffd" in p for p in pieces)
    assert len([piece for piece in pieces if piece]) >= 3  # and is not held back to the end


def test_a_character_begun_by_the_prompt_comes_whole(smollm2_tokenizer: Any) -> None:
    ids = smollm2_tokenizer("🦙")["input_ids"]
    assert len(ids) > 1
    assert "".join(stream(smollm2_tokenizer, ids[1:], prompt=ids[:1])) == "🦙"


def test_special_tokens_are_left_out(smollm2_tokenizer: Any) -> None:
    hello = smollm2_tokenizer("hello")["input_ids"]
    assert "".join(stream(smollm2_tokenizer, [*hello, 2, 1, *hello])) == "hellohello"


@pytest.mark.parametrize("token", [1, 130])
def test_what_is_no_text_does_not_pile_up(smollm2_tokenizer: Any, token: int) -> None:
    """A special token, or half a character, again and again: each step decodes a few tokens."""
    hello = smollm2_tokenizer("hello")["input_ids"]
    ids = [*hello, *[token] * 300, *smollm2_tokenizer(" wörld")["input_ids"]]
    assert "\ufffd" in decode(smollm2_tokenizer, [130])
    assert "".join(stream(smollm2_tokenizer, ids)) == decode(smollm2_tokenizer, ids)
    detokenizer, longest = Detokenizer(TextDecoder(smollm2_tokenizer), hello), 0
    for one in ids:
        detokenizer.add(one)
        longest = max(longest, len(detokenizer._window))
    assert longest < 80


def test_leading_space_of_sentencepiece_is_kept_after_a_prompt() -> None:
    """Such tokenizers drop the space of a text's first word: the answer's first is not that."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "▁the": 1, "▁end": 2, "s": 3}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert decode(tokenizer, [2]) == "end"
    assert stream(tokenizer, [2, 3, 1], prompt=[1]) == [" end", "s", " the", ""]


def test_a_tokenizer_with_a_way_of_its_own_is_asked(smollm2_tokenizer: Any) -> None:
    """Others are decoded by their backend, without what transformers does around it."""

    class Shouting(type(smollm2_tokenizer)):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return super()._decode(*args, **kwargs).upper()

    ids = smollm2_tokenizer("hello world")["input_ids"]
    own = Shouting(tokenizer_object=smollm2_tokenizer.backend_tokenizer)
    assert "".join(stream(own, ids)) == "HELLO WORLD"
    assert TextDecoder(smollm2_tokenizer)._backend is not None


@pytest.mark.parametrize(
    ("stop", "pieces", "shown", "found"),
    [
        (["STOP"], ["one ST", "OP two"], ["one ", ""], "STOP"),
        (["STOP"], ["one ST", "ART"], ["one ", "START"], None),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "\n\n"),
        (["bc", "abcd"], ["xab", "c"], ["x", "a"], "bc"),
        (["aab"], ["aaa", "ab"], ["a", "a"], "aab"),
        ([], ["any", "thing"], ["any", "thing"], None),
    ],
)
def test_stop_strings(
    stop: list[str], pieces: list[str], shown: list[str], found: str | None
) -> None:
    stops = StopStrings(stop)
    assert [stops.add(piece) for piece in pieces] == shown
    assert stops.found == found
    assert stops.add("more") == "" if found else stops.finish() == ""


def test_a_stop_string_that_is_complete_too_early_is_none() -> None:
    stops = StopStrings(["ab", "ba"])
    shown = [stops.add(piece, may_end=False) for piece in ("xa", "b")]
    assert shown == ["x", "a"] and stops.found is None
    assert (stops.add("a"), stops.found) == ("", "ba"), "one may begin before it may end"


@given(
    text=st.text("ab\n", max_size=20),
    stop=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_lose_nothing(text: str, stop: list[str]) -> None:
    """Letter by letter: what is shown is the text up to the stop string that is complete first."""
    stops = StopStrings(stop)
    shown = "".join(stops.add(letter) for letter in text) + stops.finish()
    ends = [text.find(one) + len(one) for one in stop if one in text]
    if not ends:
        assert shown == text and stops.found is None
    else:
        end = min(ends)
        assert stops.found in stop and text[:end].endswith(stops.found)
        assert shown == text[: end - len(stops.found)]
        assert len(stops.found) == max(len(s) for s in stop if text[:end].endswith(s))
