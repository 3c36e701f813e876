"""Datasets of every form into token rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import CHAT_TEMPLATE, write_tokenizer

from fp8calib.data import TokenData, _fingerprint, default_dataset, load_data
from fp8calib.data_sources import pydoc_conversations
from fp8calib.errors import DataError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
RENDERED = "<user>hi</s>\n<assistant>yo</s>\n"
BOS_TEMPLATE = "{{ bos_token }}" + CHAT_TEMPLATE
STRICT_TEMPLATE = "{{ raise_exception('roles must alternate') }}"


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets-cache"))


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        from transformers import AutoTokenizer

        folder = tmp_path / "tokenizer"
        folder.mkdir()
        write_tokenizer(folder, **options)
        return AutoTokenizer.from_pretrained(folder)

    return make


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer()


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(*records: Any, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        lines = (r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records)
        path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    return write


def decoded(tokenizer: Any, data: TokenData) -> list[str]:
    return [tokenizer.decode(row) for row in data.rows]


def refuse(tokenizer: Any, dataset: str, match: str, **options: Any) -> None:
    with pytest.raises(DataError, match=match) as caught:
        load_data(tokenizer, dataset, **options)
    assert "\n" not in str(caught.value)


# --- C16: which columns


@pytest.mark.parametrize(
    ("record", "text", "columns"),
    [
        ({"tags": ["a", 1], "ids": [[1], [2]], "messages": CHAT}, RENDERED, ("messages",)),
        ({"text": "other", "messages": CHAT}, RENDERED, ("messages",)),
        ({"messages": None, "text": "hello"}, "hello", ("text",)),
        ({"messages": json.dumps(CHAT)}, RENDERED, ("messages",)),
        ({"text": "hello", "score": [1.5]}, "hello", ("text",)),
        ({"prompt": "hi", "response": "yo"}, RENDERED, ("prompt", "response")),
        ({"prompt": "hi", "completion": "yo"}, RENDERED, ("prompt", "completion")),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, RENDERED, ("prompt", "completion")),
        ({"instruction": "hi", "output": "yo"}, RENDERED, ("instruction", "output")),
        (
            {"instruction": "hi", "input": "there", "output": "yo"},
            "<user>hi\n\nthere</s>\n<assistant>yo</s>\n",
            ("instruction", "output"),
        ),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
            RENDERED,
            ("conversations",),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
            "<user>hi</s>\n",
            ("messages",),
        ),
        ({"messages": CHAT[:1]}, "<user>hi</s>\n", ("messages",)),
        ({"messages": [*CHAT, {"role": "tool"}]}, RENDERED + "<tool></s>\n", ("messages",)),
        ({"input_ids": [5, 6, 7]}, None, ("input_ids",)),
    ],
    ids=[
        "unrelated-lists",
        "messages-before-text",
        "null-column",
        "messages-as-json",
        "text",
        "prompt-response",
        "prompt-completion",
        "prompt-completion-chat",
        "instruction-output",
        "alpaca",
        "sharegpt",
        "content-parts",
        "no-assistant-turn",
        "turn-without-content",
        "input-ids",
    ],
)
def test_c16_columns(
    record: dict, text: str | None, columns: tuple, tokenizer: Any, jsonl: Callable[..., str]
) -> None:
    data = load_data(tokenizer, jsonl(record))
    if text is None:
        assert data.rows == [record["input_ids"]]
    else:
        assert decoded(tokenizer, data) == [text]
    assert data.columns == columns


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"title": "a", "body": "b"}, r"data.jsonl:3 .*columns: title, body.*--text-column"),
        ({"messages": 5}, r"data.jsonl:3, column 'messages' does not hold a list of chat turns"),
        ({"messages": ["hi"]}, r"data.jsonl:3, column 'messages' does not hold a list"),
        ({"messages": [{"who": "me", "content": "x"}]}, r":3.*turn 0 has neither.*it has who, con"),
        ({"messages": [{"role": "user", "content": 5}]}, r":3.*content of turn 0 is a number"),
        ({"text": ["a", "b"]}, r":3, column 'text' holds a list, not text"),
        ({"input_ids": ["a"]}, r":3, column 'input_ids' does not hold a list of integers"),
        ({"input_ids": [1, 70_000]}, r":3, column 'input_ids' holds token id 70000.*259"),
        ({"input_ids": [-1]}, r":3, column 'input_ids' holds token id -1"),
        ("[1, 2]", r":3 is a list, not a record"),
        ("{}", r":3 has no column that is recognised; its columns: none"),
        ('{"text": "a"', r"data.jsonl:3 is not valid JSON"),
        ("[" * 100_000, r"data.jsonl:3 is not valid JSON"),
    ],
    ids=[
        "no-known-column",
        "messages-number",
        "messages-strings",
        "turn-without-role",
        "content-number",
        "text-list",
        "ids-strings",
        "ids-too-large",
        "ids-negative",
        "list",
        "empty-record",
        "malformed",
        "nested-too-deeply",
    ],
)
def test_c16_unusable_record_is_named(
    record: Any, match: str, tokenizer: Any, jsonl: Callable[..., str]
) -> None:
    refuse(tokenizer, jsonl({"text": "fine"}, "", record), match)


def test_c16_blank_lines_are_skipped(tokenizer: Any, jsonl: Callable[..., str]) -> None:
    data = load_data(tokenizer, jsonl({"text": "a"}, "", "  ", {"text": "b"}))
    assert sorted(decoded(tokenizer, data)) == ["a", "b"]


@pytest.mark.parametrize("name", ["e.jsonl", "e.json", "e.txt", "e.csv", "e.parquet"])
@pytest.mark.parametrize("content", ["", "\n \n"], ids=["empty", "blank"])
def test_c16_empty_file(name: str, content: str, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    refuse(tokenizer, str(tmp_path / name), f"{name} (is empty|cannot be read as Parquet)")


def test_c16_texts_that_are_empty_are_passed_over(
    tokenizer: Any, jsonl: Callable[..., str]
) -> None:
    empty = [{"text": ""}, {"messages": []}, {"prompt": "", "response": ""}, {"input_ids": []}]
    assert decoded(tokenizer, load_data(tokenizer, jsonl(*empty, {"text": "a"}), samples=1)) == [
        "a"
    ]
    refuse(tokenizer, jsonl(*empty, name="all.jsonl"), "all 4 texts are empty")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"text_column": "body"}, "plain"),
        ({"messages_column": "dialogue"}, RENDERED),
        ({"messages_column": "as_text"}, RENDERED),
    ],
    ids=["text", "messages", "json"],
)
def test_c16_options_name_the_column(
    options: dict, text: str, tokenizer: Any, jsonl: Callable[..., str]
) -> None:
    record = {"text": "no", "body": "plain", "dialogue": CHAT, "as_text": json.dumps(CHAT)}
    data = load_data(tokenizer, jsonl(record), **options)
    assert decoded(tokenizer, data) == [text]
    assert data.columns == tuple(options.values())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"text_column": "boddy"}, r":1 has no column 'boddy'; its columns: body, n"),
        ({"text_column": "n"}, r":1, column 'n' holds a number, not text"),
        ({"messages_column": "body"}, r":1, column 'body' does not hold a list of chat turns"),
        ({"text_column": "body", "messages_column": "n"}, "exclude each other"),
        ({"samples": 0}, "must be at least 1"),
        ({"max_seq_len": 0}, "must be at least 1"),
        ({"split": "train"}, "leave out --split train"),
    ],
)
def test_c16_wrong_options(
    options: dict, match: str, tokenizer: Any, jsonl: Callable[..., str]
) -> None:
    refuse(tokenizer, jsonl({"body": "plain", "n": 5}), match, **options)


# --- C17: chat templates and special tokens


def test_c17_no_chat_template(
    make_tokenizer: Callable[..., Any], jsonl: Callable[..., str]
) -> None:
    tokenizer = make_tokenizer(chat_template=None)
    refuse(tokenizer, jsonl({"messages": CHAT}), "no chat template.*--text-column")
    refuse(tokenizer, "builtin:pydoc", "builtin:pydoc, row .*no chat template.*--text-column")
    pair = load_data(tokenizer, jsonl({"prompt": "hi", "response": "yo"}, name="pair.jsonl"))
    assert decoded(tokenizer, pair) == ["hi\n\nyo"]


def test_c17_no_pad_token(make_tokenizer: Callable[..., Any], jsonl: Callable[..., str]) -> None:
    tokenizer = make_tokenizer(pad=False)
    assert tokenizer.pad_token is None
    data = load_data(tokenizer, jsonl({"messages": CHAT}, {"text": "a"}))
    assert sorted(decoded(tokenizer, data)) == [RENDERED, "a"]


@pytest.mark.parametrize("add_bos", [True, False], ids=["tokenizer-bos", "no-tokenizer-bos"])
@pytest.mark.parametrize("template_bos", [True, False], ids=["template-bos", "no-template-bos"])
def test_c17_chat_has_the_bos_of_its_template(
    add_bos: bool,
    template_bos: bool,
    make_tokenizer: Callable[..., Any],
    jsonl: Callable[..., str],
) -> None:
    template = BOS_TEMPLATE if template_bos else CHAT_TEMPLATE
    tokenizer = make_tokenizer(add_bos=add_bos, chat_template=template)
    assert (tokenizer("a").input_ids[0] == tokenizer.bos_token_id) is add_bos
    (row,) = load_data(tokenizer, jsonl({"messages": CHAT})).rows
    assert row.count(tokenizer.bos_token_id) == int(template_bos)
    assert row == tokenizer.apply_chat_template(CHAT, return_dict=False)


@pytest.mark.parametrize("text", ["a", "<s>a"], ids=["plain", "bos-in-text"])
def test_c17_text_has_one_bos(
    text: str, make_tokenizer: Callable[..., Any], jsonl: Callable[..., str]
) -> None:
    tokenizer = make_tokenizer(add_bos=True)
    (row,) = load_data(tokenizer, jsonl({"text": text})).rows
    assert tokenizer.convert_ids_to_tokens(row) == ["<s>", "a"]


def test_c17_a_template_that_refuses(
    make_tokenizer: Callable[..., Any], jsonl: Callable[..., str]
) -> None:
    tokenizer = make_tokenizer(chat_template=STRICT_TEMPLATE)
    refuse(tokenizer, jsonl({"messages": CHAT}), ":1.*chat template refuses it: roles must alt")


def test_c17_the_tokenizer_is_left_as_it_was(
    make_tokenizer: Callable[..., Any], jsonl: Callable[..., str], tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(add_bos=True)
    before = tokenizer.backend_tokenizer.to_str()
    load_data(tokenizer, jsonl({"text": "a" * 500}, {"messages": CHAT}), max_seq_len=4)
    assert tokenizer.backend_tokenizer.to_str() == before
    assert "truncation" not in tokenizer.init_kwargs


# --- the draw


def test_rows_are_cut_to_max_seq_len(tokenizer: Any, jsonl: Callable[..., str]) -> None:
    data = load_data(tokenizer, jsonl({"text": "a" * 50}, {"text": "b"}), max_seq_len=10)
    assert sorted(map(len, data.rows)) == [1, 10]
    assert data.num_tokens == 11


def test_the_draw_depends_on_the_seed_alone(tokenizer: Any, jsonl: Callable[..., str]) -> None:
    import random

    path = jsonl(*({"text": f"text {number}"} for number in range(50)))
    first = load_data(tokenizer, path, samples=10)
    random.seed(7)
    again = load_data(tokenizer, path, samples=10)
    other = load_data(tokenizer, path, samples=10, seed=1)
    assert first == again
    assert first.rows != other.rows and first.fingerprint != other.fingerprint
    assert decoded(tokenizer, first) != [f"text {number}" for number in range(10)]
    assert len(set(map(tuple, first.rows))) == 10


def test_the_fingerprint_tells_rows_apart() -> None:
    made = [_fingerprint(rows) for rows in ([[5, 6, 7]], [[5, 6], [7]], [[5, 6]], [[6, 5]])]
    assert len(set(made)) == 4


@pytest.mark.parametrize(("samples", "said"), [(2, False), (3, False), (4, True)])
def test_fewer_texts_than_asked_is_said(
    samples: int,
    said: bool,
    tokenizer: Any,
    jsonl: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = load_data(tokenizer, jsonl(*({"text": t} for t in "abc")), samples=samples)
    assert (len(data.rows), data.requested) == (min(samples, 3), samples)
    captured = capsys.readouterr()
    assert ("has 3 texts, fewer than the 4 asked for" in captured.err) is said
    assert captured.out == ""


# --- files and folders


RECORDS = [{"text": "one"}, {"text": "two, \u2028three"}]


def write(path: Path, form: str) -> str:
    import datasets

    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "parquet":
        datasets.Dataset.from_list(RECORDS).to_parquet(path)
    elif form == "csv":
        path.write_text('text\none\n"two, \u2028three"\n')
    elif form == "json":
        path.write_text(json.dumps(RECORDS, indent=2))
    elif form == "json-object":
        path.write_text(json.dumps({"version": 1, "data": RECORDS}))
    elif form == "jsonl":
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in RECORDS))
    elif form == "jsonl-bom-crlf":
        path.write_bytes(("\ufeff" + "\r\n".join(json.dumps(r) for r in RECORDS)).encode("utf-8"))
    return str(path)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.jsonl", "jsonl"),
        ("a.ndjson", "jsonl-bom-crlf"),
        ("a.json", "json"),
        ("a.json", "json-object"),
        ("a.json", "jsonl"),
        ("a.parquet", "parquet"),
        ("a.csv", "csv"),
        ("odd [1]* name.csv", "csv"),
        ("odd [1]* name.parquet", "parquet"),
    ],
)
def test_files(name: str, form: str, tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / name, form)
    data = load_data(tokenizer, path)
    assert sorted(decoded(tokenizer, data)) == ["one", "two, \u2028three"]
    assert (data.source, data.split) == (path, None)


def test_json_with_one_record(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"messages": CHAT}))
    assert decoded(tokenizer, load_data(tokenizer, str(tmp_path / "a.json"))) == [RENDERED]


def test_csv_keeps_words_that_look_missing(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nNA\nnull\n12\n")
    data = load_data(tokenizer, str(tmp_path / "a.csv"))
    assert sorted(decoded(tokenizer, data)) == ["12", "NA", "null"]


def test_parquet_messages_and_row_numbers(tokenizer: Any, tmp_path: Path) -> None:
    import datasets

    path = str(tmp_path / "a.parquet")
    datasets.Dataset.from_list([{"messages": CHAT}, {"messages": CHAT[:1]}]).to_parquet(path)
    assert RENDERED in decoded(tokenizer, load_data(tokenizer, path))
    path = str(tmp_path / "b.parquet")
    datasets.Dataset.from_list([{"text": "a", "x": 1}, {"text": None, "x": 2}]).to_parquet(path)
    refuse(tokenizer, path, r"b\.parquet, row 1 has no column.*columns: text, x")


def test_parquet_without_rows(tokenizer: Any, tmp_path: Path) -> None:
    import datasets

    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"text": []}).to_parquet(path)
    refuse(tokenizer, str(path), "holds no records")


def test_plain_text_is_cut_into_passages(tokenizer: Any, tmp_path: Path) -> None:
    text = "".join(f"line {number:02}\n" for number in range(20)) + "x" * 100
    (tmp_path / "a.txt").write_text(text)
    data = load_data(tokenizer, str(tmp_path / "a.txt"), max_seq_len=10)  # passages of 40
    assert len(data.rows) == 4 + 3  # four of five lines, then 40 + 40 + 20 characters
    assert sum(row.startswith("line ") for row in decoded(tokenizer, data)) == 4


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.json", '[\n{"text": "a"},\n{"text" "b"}]', r"a\.json:3 is not valid JSON"),
        ("a.json", '{"text": "a"}\n\n{"text": }', r"a\.json:3 is not valid JSON"),
        ("a.json", "5", "holds int, not a list of records"),
        ("a.txt", b"\xff\xfe\xff", "not UTF-8"),
        ("a.parquet", "no parquet", "a.parquet cannot be read as Parquet"),
        ("a.csv", 'text,n\n"a,1\n', r"a\.csv:2 is not valid CSV"),
        ("a.csv", "text\n", "holds no records"),
        ("a.bin", "x", "cannot be read; accepted are"),
    ],
)
def test_files_that_cannot_be_read(
    name: str, content: str | bytes, match: str, tokenizer: Any, tmp_path: Path
) -> None:
    data = content.encode() if isinstance(content, str) else content
    (tmp_path / name).write_bytes(data)
    refuse(tokenizer, str(tmp_path / name), match)


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/missing", "a/b/c"])
def test_missing_file(name: str, tokenizer: Any) -> None:
    refuse(tokenizer, name, "no such file or folder")


def test_folder_of_files_and_its_splits(tokenizer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write(folder / "data" / "train-00000.parquet", "parquet")
    write(folder / "data" / "test.jsonl", "jsonl")
    (folder / "training_notes.txt").write_text("note")
    (folder / "image.png").write_bytes(b"\x89")
    rows = decoded(tokenizer, load_data(tokenizer, str(folder)))
    assert sorted(rows) == ["note", "one", "one", "two, \u2028three", "two, \u2028three"]
    data = load_data(tokenizer, str(folder), split="train")
    assert (len(data.rows), data.split) == (2, "train")
    refuse(tokenizer, str(folder), "no file with the split's name, valid", split="valid")


def test_folder_without_files(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    refuse(tokenizer, str(tmp_path / "folder"), "holds no file that can be read")


def test_folder_of_save_to_disk(tokenizer: Any, tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(RECORDS)
    data.save_to_disk(tmp_path / "one")
    assert len(load_data(tokenizer, str(tmp_path / "one")).rows) == 2
    datasets.DatasetDict({"a": data, "b": data}).save_to_disk(tmp_path / "dict")
    assert len(load_data(tokenizer, str(tmp_path / "dict"), split="b").rows) == 2
    refuse(tokenizer, str(tmp_path / "dict"), "no split train; choose with --split from a, b")


# --- the Hub, and what is built in


def test_hub_offline(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    dataset, split = default_dataset("org/model")
    assert (dataset, split) == ("HuggingFaceH4/ultrachat_200k", "train_sft")
    refuse(tokenizer, dataset, "Hub cannot be reached; use --dataset builtin:pydoc", split=split)


def test_demo_models_default_to_what_is_here() -> None:
    assert default_dataset("demo:smollm2-135m-instruct") == ("builtin:pydoc", "calibration")


def test_pydoc_halves_share_no_paragraph() -> None:
    def paragraphs(split: str) -> set[str]:
        turns = [turn for c in pydoc_conversations(split) for turn in c["messages"]]
        answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        return {paragraph for answer in answers for paragraph in answer.split("\n\n")}

    calibration, heldout = paragraphs("calibration"), paragraphs("heldout")
    assert min(len(calibration), len(heldout)) > 200
    assert not calibration & heldout


def test_pydoc_uses_the_chat_template(smollm2_tokenizer: Any) -> None:
    data = load_data(smollm2_tokenizer, "builtin:pydoc")
    assert data.columns == ("messages",)
    assert len(data.rows) > 40 and data.num_tokens > 30_000
    for text in decoded(smollm2_tokenizer, data):
        assert text.startswith("<|im_start|>system\n") and "<|im_start|>assistant\n" in text
    heldout = load_data(smollm2_tokenizer, "builtin:pydoc", split="heldout")
    assert heldout.fingerprint != data.fingerprint
    assert data == load_data(smollm2_tokenizer, "builtin:pydoc", split=None)


def test_stdlib_code(smollm2_tokenizer: Any) -> None:
    data = load_data(smollm2_tokenizer, "builtin:stdlib-code", samples=16, max_seq_len=128)
    assert len(data.rows) == 16 and data.columns == ("text",)
    code = " ".join(decoded(smollm2_tokenizer, data))
    assert "self." in code and "return" in code


@pytest.mark.parametrize(
    ("dataset", "split", "match"),
    [
        ("builtin:other", None, "there are builtin:pydoc and builtin:stdlib-code"),
        ("builtin:pydoc", "train", "no split train; there are calibration and heldout"),
        ("builtin:stdlib-code", "train", "no splits"),
    ],
)
def test_builtin_refusals(dataset: str, split: str | None, match: str, tokenizer: Any) -> None:
    refuse(tokenizer, dataset, match, split=split)
