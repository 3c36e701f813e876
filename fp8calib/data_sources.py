"""Where calibration text comes from: built in, local files, or a dataset of the Hugging Face Hub.

Records are looked up, not interpreted: which columns are used, and how, is `data.py`'s matter.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import json
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8calib.errors import DataError

DEFAULT_DATASET = "HuggingFaceH4/ultrachat_200k"
DEFAULT_SPLIT = "train_sft"
PYDOC = "builtin:pydoc"
STDLIB_CODE = "builtin:stdlib-code"

_TEXT_SUFFIXES = (".txt", ".text", ".md")
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", *_TEXT_SUFFIXES)
_ACCEPTED = "accepted are .jsonl, .json, .parquet, .csv and .txt"


@dataclass(frozen=True)
class Part:
    """The records of one file, of one Hub dataset or of one built-in source."""

    name: str
    records: Sequence[Any]
    lines: Sequence[int] | None = None  # counted from 1, for records that are lines of a file

    def where(self, index: int) -> str:
        """Name record `index` for a message, as `file:line` or with its row counted from 0."""
        if self.lines is not None:
            return f"{self.name}:{self.lines[index]}"
        return f"{self.name}, row {index}"


def open_source(dataset: str, split: str | None, passage_chars: int) -> list[Part]:
    """Find `dataset` and return its records, file by file.

    Plain text is cut, at line ends, into passages of at most `passage_chars` characters. Raises
    DataError when the dataset or its split does not exist, cannot be reached or cannot be parsed.
    """
    if dataset.startswith("builtin:"):
        return [_builtin(dataset, split, passage_chars)]
    path = Path(dataset).expanduser()
    if path.is_dir():
        return _folder(path, split, passage_chars)
    if path.exists():
        if split is not None:
            raise DataError(f"{path} is one file and has no splits; leave out --split {split}")
        return [_file(path, passage_chars)]
    if dataset.startswith((".", "/", "~")) or path.suffix in _SUFFIXES or dataset.count("/") > 1:
        raise DataError(f"{dataset}: no such file or folder")
    return [_from_hub(dataset, split)]


# --- built in


def _builtin(dataset: str, split: str | None, passage_chars: int) -> Part:
    if dataset == PYDOC:
        return Part(dataset, pydoc_conversations(split or "calibration"))
    if dataset != STDLIB_CODE:
        raise DataError(f"{dataset}: no such built-in dataset; there are {PYDOC} and {STDLIB_CODE}")
    if split is not None:
        raise DataError(f"{dataset} has no splits; leave out --split {split}")
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "pydoc_data", "site-packages", "dist-packages"}
    records = []
    for path in sorted(folder.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(folder).parts):
            records += _texts(path.read_text(encoding="utf-8", errors="replace"), passage_chars)
    return Part(dataset, records)


def pydoc_conversations(split: str) -> list[dict[str, Any]]:
    """The language reference that `help()` shows, as conversations of up to four exchanges.

    Topics fall into two halves, `calibration` and `heldout`, by a hash of their name. Topics repeat
    one another's paragraphs; only the first occurrence is kept, so the halves share no paragraph.
    """
    from pydoc_data.topics import topics

    if split not in ("calibration", "heldout"):
        raise DataError(f"{PYDOC} has no split {split}; there are calibration and heldout")
    seen: set[str] = set()
    conversations = []
    # long topics first: they are whole chapters, of which the short ones are sections
    for topic, text in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        paragraphs = [p for p in re.split(r"\n\s*\n", text.strip()) if p not in seen]
        seen.update(paragraphs)
        half = "heldout" if hashlib.sha256(topic.encode()).digest()[0] % 2 else "calibration"
        answers = list(_join(paragraphs, 1200)) if half == split else []
        for start in range(0, len(answers), 4):
            question = f"What does the Python language reference say about {topic!r}?"
            turns = []
            for answer in answers[start : start + 4]:
                turns.append({"role": "user", "content": question})
                turns.append({"role": "assistant", "content": answer})
                question = "Please go on."
            conversations.append({"messages": turns})
    return conversations


def _join(paragraphs: list[str], size: int) -> Iterator[str]:
    """Join neighbouring paragraphs while the result has at most `size` characters."""
    joined = ""
    for paragraph in paragraphs:
        if joined and len(joined) + len(paragraph) > size:
            yield joined
            joined = ""
        joined = f"{joined}\n\n{paragraph}" if joined else paragraph
    if joined:
        yield joined


# --- local files


def _folder(folder: Path, split: str | None, passage_chars: int) -> list[Part]:
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return [_pick_split(str(folder), _saved(folder), split)]
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in _SUFFIXES]
    if not files:
        raise DataError(f"{folder} holds no file that can be read; {_ACCEPTED}")
    if split is not None:
        # the Hub's convention: the split is a word of the file's or folder's name
        word = re.compile(rf"(?<![a-zA-Z0-9]){re.escape(split)}(?![a-zA-Z0-9])")
        files = [path for path in files if word.search(str(path.relative_to(folder)))]
        if not files:
            raise DataError(f"{folder} holds no file with the split's name, {split}, in its name")
    return [_file(path, passage_chars) for path in files]


def _saved(folder: Path) -> Any:
    """What `Dataset.save_to_disk` wrote."""
    from datasets import load_from_disk

    try:
        return load_from_disk(str(folder))
    except Exception as problem:  # it trusts its files, and fails wherever one is damaged
        raise DataError(
            f"{folder} cannot be read as a saved dataset: {type(problem).__name__}: "
            f"{_first_line(problem):.200}"
        ) from problem


def _file(path: Path, passage_chars: int) -> Part:
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix not in _SUFFIXES:
        raise DataError(f"{path}: files of this kind cannot be read; {_ACCEPTED}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path} is not UTF-8 text: {problem}") from None
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror}") from None
    if not text.strip():
        raise DataError(f"{path} is empty")
    if path.suffix == ".csv":
        return _csv(path, text)
    if path.suffix in _TEXT_SUFFIXES:
        return Part(str(path), _texts(text, passage_chars))
    if path.suffix == ".json":
        return _json(path, text)
    return _json_lines(path, text)


def _texts(text: str, size: int) -> list[dict[str, str]]:
    """Cut `text` into records of at most `size` characters, at line ends where there are any."""
    records, start = [], 0
    while start < len(text):
        end = start + size
        if end < len(text):
            line_end = text.rfind("\n", start, end)
            end = line_end + 1 if line_end > start else end
        records.append({"text": text[start:end]})
        start = end
    return records


def _json_lines(path: Path, text: str) -> Part:
    records, lines = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError) as problem:
                raise DataError(f"{path}:{number} is not valid JSON: {problem}") from None
            lines.append(number)
    return Part(str(path), records, lines)


def _json(path: Path, text: str) -> Part:
    """A list of records, or an object that holds one; a `.json` that is lines is read as such."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as problem:
        if problem.msg == "Extra data":
            return _json_lines(path, text)
        raise DataError(f"{path}:{problem.lineno} is not valid JSON: {problem.msg}") from None
    except RecursionError:
        raise DataError(f"{path} is nested too deeply") from None
    except ValueError as problem:  # a number of too many digits
        raise DataError(f"{path} is not valid JSON: {problem}") from None
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        tables = [value for value in lists if value and isinstance(value[0], dict)]
        content = tables[0] if len(tables) == 1 and not _is_chat(tables[0]) else [content]
    if not isinstance(content, list):
        raise DataError(f"{path} holds {type(content).__name__}, not a list of records")
    return Part(str(path), content)


def _is_chat(turns: list[dict[str, Any]]) -> bool:
    return any(key in turns[0] for key in ("role", "from"))


def _csv(path: Path, text: str) -> Part:
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.DictReader(io.StringIO(text), strict=True)
    records, lines = [], []
    try:
        for record in reader:
            records.append(record)
            lines.append(reader.line_num)
    except csv.Error as problem:
        raise DataError(f"{path}:{reader.line_num + 1} is not valid CSV: {problem}") from None
    return Part(str(path), records, lines)


def _parquet(path: Path) -> Part:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from pyarrow.parquet import read_metadata

    try:
        if read_metadata(path).num_rows == 0:  # `datasets` refuses such a file
            return Part(str(path), [])
        files = glob.escape(str(path.absolute()))  # `data_files` takes patterns
        return Part(str(path), load_dataset("parquet", data_files=files, split="train"))
    except (DatasetsError, OSError, ValueError, RuntimeError) as problem:
        raise DataError(f"{path} cannot be read as Parquet: {_first_line(problem)}") from problem


# --- the Hub


def _from_hub(dataset: str, split: str | None) -> Part:
    """`owner/name`, or `owner/name:config`. `datasets` >= 4 runs no code of a dataset."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    if dataset == DEFAULT_DATASET and split is None:
        split = DEFAULT_SPLIT
    name, _, config = dataset.partition(":")
    try:
        data = load_dataset(name, config or None, split=split)
    except DatasetNotFoundError:
        raise DataError(
            f"{dataset}: no such file or folder, and no such dataset on the Hugging Face Hub "
            "(a private or gated one needs `hf auth login`)"
        ) from None
    except ConnectionError:
        raise DataError(
            f"{dataset}: no such file or folder, not in the cache, and the Hugging Face Hub cannot "
            f"be reached; use --dataset {PYDOC} or a local file"
        ) from None
    except (DatasetsError, OSError, ValueError, RuntimeError) as problem:
        hint = " (a configuration is given as NAME:CONFIG)" if "onfig" in str(problem) else ""
        raise DataError(f"{dataset}: {_first_line(problem)}{hint}") from problem
    return _pick_split(dataset, data, split)


def _pick_split(name: str, data: Any, split: str | None) -> Part:
    """The split asked for, else `train`, else the only one."""
    from datasets import Dataset

    if isinstance(data, Dataset):
        return Part(name, data)
    wanted = split or ("train" if "train" in data or len(data) != 1 else next(iter(data)))
    if wanted not in data:
        raise DataError(f"{name} has no split {wanted}; choose with --split from {', '.join(data)}")
    return Part(name, data[wanted])


def _first_line(problem: BaseException) -> str:
    """Two lines at most of the reason; `datasets` wraps the parser's own error in a vague one."""
    reason = str(problem.__cause__ or problem).strip() or type(problem).__name__
    return " ".join(reason.splitlines()[:2])
