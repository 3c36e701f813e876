"""Any dataset -> rows of token ids.

What a record holds is recognised by its columns: chat turns go through the tokenizer's chat
template, text through the tokenizer, token ids are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8calib import console
from fp8calib.data_sources import DEFAULT_DATASET, DEFAULT_SPLIT, PYDOC, open_source
from fp8calib.errors import DataError
from fp8calib.models import DEMO_PREFIX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The first entry whose columns a record has decides.
_MESSAGE_COLUMNS = (("messages",), ("conversations",))
_PAIR_COLUMNS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"))
_KNOWN_COLUMNS = (*_MESSAGE_COLUMNS, ("text",), *_PAIR_COLUMNS, ("input_ids",))

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}


@dataclass(frozen=True)
class TokenData:
    """Token rows, and where they came from.

    `rows` holds one list of token ids a text, at most `max_seq_len` long, in the order drawn.
    `fingerprint` is the SHA-256 over the rows; `columns` are those used, in order of first use.
    """

    rows: list[list[int]]
    fingerprint: str
    source: str
    split: str | None
    requested: int
    columns: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.rows))


def default_dataset(model_name: str) -> tuple[str, str]:
    """The dataset and split to use when none is given: vLLM's guide, and for `demo:` what is here.

    `model_name` is what the user wrote, before it is resolved to a folder.
    """
    if model_name.startswith(DEMO_PREFIX):
        return PYDOC, "calibration"
    return DEFAULT_DATASET, DEFAULT_SPLIT


def load_data(
    tokenizer: PreTrainedTokenizerBase,
    dataset: str,
    *,
    split: str | None = None,
    samples: int = 512,
    max_seq_len: int = 2048,
    seed: int = 42,
    text_column: str | None = None,
    messages_column: str | None = None,
) -> TokenData:
    """Draw up to `samples` texts of `dataset` and tokenise them.

    `dataset` is `builtin:pydoc`, `builtin:stdlib-code`, a JSONL, JSON, Parquet, CSV or text file, a
    folder of these, or a Hub id (`owner/name`, `owner/name:config`). The draw depends on `seed` and
    the dataset alone. Texts that tokenise to nothing are passed over. Raises DataError for a
    dataset that cannot be found or parsed, and for the first record drawn that cannot be used.
    """
    if samples < 1 or max_seq_len < 1:
        raise DataError(f"samples ({samples}) and max_seq_len ({max_seq_len}) must be at least 1")
    if not dataset:  # an unset variable of a shell; a Path would make the working folder of it
        raise DataError("the name of a dataset is empty")
    if text_column is not None and messages_column is not None:
        raise DataError("--text-column and --messages-column exclude each other; give one of them")
    # four characters a token: passages of plain text then fill a row
    parts = open_source(dataset, split, passage_chars=4 * max_seq_len)
    order = [(part, index) for part in parts for index in range(len(part.records))]
    if not order:
        raise DataError(f"{dataset} holds no records")
    random.Random(seed).shuffle(order)

    encoder = _Encoder(tokenizer, text_column, messages_column)
    rows: list[list[int]] = []
    wanted = min(samples, len(order))
    with console.progress("tokenising (texts)", wanted) as bar:
        for part, index in order:
            ids = encoder.encode(part.records[index], part.where(index))[:max_seq_len]
            if ids:
                rows.append(ids)
                bar.advance()
            if len(rows) == samples:
                break
    if not rows:
        raise DataError(f"{dataset}: all {len(order)} texts are empty")
    if len(rows) < samples:
        console.info(
            f"{dataset} has {len(rows)} texts, fewer than the {samples} asked for; all are used"
        )
    return TokenData(rows, _fingerprint(rows), dataset, split, samples, tuple(encoder.columns))


def _fingerprint(rows: list[list[int]]) -> str:
    """SHA-256 over each row's length and ids as 64-bit integers."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(array("q", [len(row), *row]).tobytes())
    return digest.hexdigest()


class _Encoder:
    """Turns records into token ids, remembering which columns were used."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        text_column: str | None,
        messages_column: str | None,
    ) -> None:
        self.columns: dict[str, None] = {}  # an ordered set
        self._tokenizer = tokenizer
        self._vocab_size = len(tokenizer)
        self._choices: tuple[tuple[str, ...], ...] = _KNOWN_COLUMNS
        self._as_messages = set(_MESSAGE_COLUMNS)
        if text_column is not None:
            self._choices, self._as_messages = ((text_column,),), set()
        elif messages_column is not None:
            self._choices = ((messages_column,),)
            self._as_messages = {(messages_column,)}
        self._chosen = text_column or messages_column

    def encode(self, record: Any, where: str) -> list[int]:
        if not isinstance(record, Mapping):
            raise DataError(f"{where} is a {_kind(record)}, not a record with named columns")
        columns = self._find_columns(record, where)
        values = [record[column] for column in columns]
        where = f"{where}, column {columns[0]!r}"
        if columns in self._as_messages:
            ids = self._encode_chat(_turns(values[0], where), where)
        elif columns in _PAIR_COLUMNS:
            ids = self._encode_pair(record, columns, where)
        elif columns == ("input_ids",) and self._chosen is None:
            ids = self._check_ids(values[0], where)
        else:
            ids = self._encode_text(values[0], where)
        self.columns.update(dict.fromkeys(columns))
        return ids

    def _find_columns(self, record: Mapping[str, Any], where: str) -> tuple[str, ...]:
        for columns in self._choices:
            if all(record.get(column) is not None for column in columns):
                return columns
        found = ", ".join(map(str, record)) or "none"
        if self._chosen is not None:
            raise DataError(f"{where} has no column {self._chosen!r}; its columns: {found}")
        raise DataError(
            f"{where} has no column that is recognised; its columns: {found}. Name the one to use "
            "with --text-column or --messages-column"
        )

    def _encode_text(self, text: Any, where: str) -> list[int]:
        if not isinstance(text, str):
            raise DataError(
                f"{where} holds a {_kind(text)}, not text; name another column with --text-column "
                "or --messages-column"
            )
        _check_unicode(text, where)
        return self._one_bos(self._tokenizer(text, verbose=False)["input_ids"]) if text else []

    def _encode_chat(self, turns: list[dict[str, Any]], where: str) -> list[int]:
        from jinja2 import TemplateError

        if not turns:
            return []
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{where} holds chat turns, but the tokenizer has no chat template; name a column "
                "of plain text with --text-column, or use the model's chat version"
            )
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False)
        except (TemplateError, TypeError, ValueError, LookupError) as problem:
            raise DataError(f"{where}: the chat template refuses it: {problem}") from problem
        # the template writes every special token there is to be, as it does when serving
        return self._one_bos(
            self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        )

    def _encode_pair(
        self, record: Mapping[str, Any], columns: tuple[str, ...], where: str
    ) -> list[int]:
        """A prompt and its answer: a chat of two turns where the tokenizer has a template."""
        prompt, answer = record[columns[0]], record[columns[1]]
        if columns[0] == "instruction" and record.get("input"):  # Alpaca's form
            prompt = f"{prompt}\n\n{record['input']}"
        if (
            isinstance(prompt, str)
            and isinstance(answer, str)
            and not self._tokenizer.chat_template
        ):
            return self._encode_text(f"{prompt}\n\n{answer}".strip(), where)
        if prompt == answer == "":
            return []
        turns = []
        for role, value in (("user", prompt), ("assistant", answer)):
            text = isinstance(value, str)
            turns += [{"role": role, "content": value}] if text else _turns(value, where)
        return self._encode_chat(turns, where)

    def _check_ids(self, ids: Any, where: str) -> list[int]:
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise DataError(f"{where} does not hold a list of integers")
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise DataError(
                    f"{where} holds token id {token}, outside this tokenizer's vocabulary of "
                    f"{self._vocab_size}; it was made with another tokenizer"
                )
        return ids

    def _one_bos(self, ids: list[int]) -> list[int]:
        """Drop repeated BOS tokens: text may bring one that the tokenizer adds once more."""
        bos = self._tokenizer.bos_token_id
        start = 0
        while bos is not None and ids[start : start + 2] == [bos, bos]:
            start += 1
        return ids[start:]


def _turns(value: Any, where: str) -> list[dict[str, Any]]:
    """Chat turns with `role` and `content`, from these or from ShareGPT's `from` and `value`.

    Takes JSON text as well, and contents given as a list of text parts.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) for turn in value):
        raise DataError(
            f"{where} does not hold a list of chat turns; name another column with "
            "--messages-column or --text-column"
        )
    turns = []
    for number, turn in enumerate(value):
        role = turn.get("role") or turn.get("from")
        content = turn.get("content") if "content" in turn else turn.get("value")
        if not isinstance(role, str):
            raise DataError(
                f"{where}: turn {number} has neither `role` nor `from`; it has {', '.join(turn)}"
            )
        if isinstance(content, list):
            parts = [part.get("text") or "" for part in content if isinstance(part, dict)]
            content = "".join(part for part in parts if isinstance(part, str))
        if content is not None and not isinstance(content, str):
            raise DataError(
                f"{where}: the content of turn {number} is a {_kind(content)}, not text"
            )
        _check_unicode(content or "", f"{where}: turn {number}")
        rest = {k: v for k, v in turn.items() if k not in ("from", "value") and v is not None}
        turns.append({**rest, "role": _ROLES.get(role, role), "content": content or ""})
    return turns


def _kind(value: Any) -> str:
    names = {"str": "string", "dict": "record", "int": "number", "float": "number"}
    return names.get(type(value).__name__, type(value).__name__)


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise DataError(
            f"{where} is not valid Unicode: {problem.reason} at character {problem.start}"
        ) from None
