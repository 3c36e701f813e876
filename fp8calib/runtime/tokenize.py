"""From a text to its tokens."""

from __future__ import annotations

from typing import Any

from fp8calib.errors import UserError


def tokenize(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text as it is.

    Raises:
        UserError: it holds half of a surrogate pair, as Python makes of input that is no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("a text is not Unicode: it was no UTF-8 when it was read") from None
    return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
