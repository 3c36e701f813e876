"""Damaged checkpoints end in one line, exit code 1 or 2, in bounded time and memory, and nothing is
written but the output."""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from fake_checkpoints import HEADS, KV_HEADS, attention, declared, write_scaled, write_source
from mutations import Files, mutate, write

from fp8calib.checkpoint import inspect
from fp8calib.checkpoint.conversion import convert
from fp8calib.cli import main
from fp8calib.errors import CheckpointError, UserError

SECONDS = 5.0  # for one command; they take milliseconds


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A calibrated checkpoint's files, with everything that is read of one."""
    rng = np.random.default_rng(1)
    tensors = {
        f"{attention(layer)}.{kind}_scale": rng.uniform(0.01, 1, (heads, 1, 1)).astype("<f4")
        for layer in range(2)
        for kind, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    }
    place = tmp_path_factory.mktemp("sound") / "a"
    config = {"layer_types": ["full_attention"] * 2, "sliding_window": 8, "text_config": None}
    write_scaled(place, tensors, **declared("attn_head"), **config)
    amax = {kind: {"amax": [1.0, 2.0]} for kind in "qkv"}
    layers = {str(i): {"name": attention(i), **amax} for i in range(2)}
    record = {"schema_version": 1, "skip_layers": ["1"], "margin": 1.0, "layers": layers}
    (place / "fp8calib.json").write_text(json.dumps(record))
    files = {file.name: file.read_bytes() for file in place.iterdir()}
    assert inspect(place).ok
    return files


@contextmanager
def bounded_memory(more: int) -> Iterator[None]:
    """At most `more` bytes of address space beyond what there is."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def survive(sound: Files, seed: int, place: Path) -> str:
    """Damage, inspect and convert; returns what became of it."""
    rng = random.Random(seed)
    folder = place / "checkpoint"
    write(mutate(sound, rng), folder, rng)
    before = sorted(entry.name for entry in place.iterdir())
    start = time.monotonic()
    outcome = "ran"
    jobs = [
        lambda: inspect(folder, rng.choice(["vllm", "sglang", "trtllm", "fp8calib"])),
        lambda: convert(folder, "json", place / "out.json"),
    ]
    if seed % 10 == 0:
        jobs.append(lambda: convert(folder, "compressed-tensors", place / "out"))
    for job in jobs:
        try:
            job()
        except UserError:
            outcome = "refused"
    assert time.monotonic() - start < SECONDS * len(jobs)
    left = {entry.name for entry in place.iterdir()} - set(before)
    assert left <= {"out.json", "out"}, left
    (place / "out.json").unlink(missing_ok=True)
    for done in ("checkpoint", "out"):
        shutil.rmtree(place / done, ignore_errors=True)
    return outcome


def survive_all(sound: Files, seeds: range, place: Path) -> None:
    outcomes = {"ran": 0, "refused": 0}
    with bounded_memory(3 << 30):
        for seed in seeds:
            try:
                outcomes[survive(sound, seed, place)] += 1
            except BaseException as problem:
                problem.add_note(f"seed {seed}: see `survive` for what it does")
                raise
    assert min(outcomes.values()) > len(seeds) // 20, outcomes


def test_five_hundred_damaged_checkpoints(sound: Files, tmp_path: Path) -> None:
    survive_all(sound, range(500), tmp_path)


@pytest.mark.slow
def test_ten_thousand_damaged_checkpoints(sound: Files, tmp_path: Path) -> None:
    survive_all(sound, range(500, 10_500), tmp_path)


@pytest.mark.parametrize("seed", range(1000, 1024))
def test_the_commands_say_it_in_one_line(
    seed: int, sound: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    write(mutate(sound, rng), tmp_path / "checkpoint", rng)
    for command in (
        ["inspect", str(tmp_path / "checkpoint"), "--json"],
        ["convert", str(tmp_path / "checkpoint"), "--to", "json", "-o", str(tmp_path / "o.json")],
    ):
        with pytest.raises(SystemExit) as stop:
            main(command)
        err = capsys.readouterr().err
        assert stop.value.code in (0, 1, 2) and "Traceback" not in err
        if stop.value.code == 2:
            assert len(err.strip().splitlines()) == 1 and err.strip().isprintable(), err


# --- single attacks --------------------------------------------------------------------------


def raw(path: Path, header: bytes, data: int = 0) -> Path:
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + data)
    return path


def entries(count: int) -> bytes:
    item = '"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return ("{" + ",".join(item % n for n in range(count)) + "}").encode()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (lambda: entries(1_000_000), "holds more than 500,000 tensors"),
        (lambda: b'{"a":' + b"[" * 20_000_000, "too many to be true"),
        (lambda: b"[" * 60 + b"]" * 60, "holds no JSON object"),
        (lambda: b'{"__metadata__":' + b'{"a":' * 500 + b"1" + b"}" * 501, "nested too deeply"),
        (lambda: b'{"' + b"n" * 1000 + b'":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
         "makes no sense"),
        (lambda: b'{"a":{"dtype":"U8","shape":[' + b"1," * 20 + b'1],"data_offsets":[0,1]}}',
         "makes no sense"),
    ],
    ids=["tensors", "bomb", "list", "deep", "long-name", "dimensions"],
)  # fmt: skip
def test_hostile_headers(header: object, message: str, tmp_path: Path) -> None:
    folder = write_source(tmp_path / "a")
    raw(folder / "model.safetensors", header())  # type: ignore[operator]
    start = time.monotonic()
    with bounded_memory(1 << 30), pytest.raises(CheckpointError, match=message):
        inspect(folder)
    assert time.monotonic() - start < 10


def test_a_scale_of_ten_gigabytes_is_not_read(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "a", **declared("tensor"))
    size = 10 * 10**9
    name = f"{attention(0)}.k_scale"
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    raw(folder / "z.safetensors", json.dumps({name: entry}).encode(), size)
    with bounded_memory(1 << 29), pytest.raises(CheckpointError, match="no scale"):
        inspect(folder)


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/passwd", "a/../../b", "x\ny", "\0"])
def test_names_in_an_index_stay_inside(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_source(tmp_path / "a")
    shutil.copy(folder / "model.safetensors", tmp_path / "evil.safetensors")
    index = {"weight_map": {"model.layers.0.self_attn.q_proj.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SystemExit) as stop:
        main(["inspect", str(folder)])
    err = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and len(err.splitlines()) == 1
    assert "leads out of the checkpoint" in err or "is missing" in err


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": [1]},
        {"num_hidden_layers": 10**30},
        {"num_hidden_layers": -1},
        {"architectures": "Llama"},
        {"architectures": [7]},
        {"num_attention_heads": 10**12},
        {"text_config": {"num_hidden_layers": 10**30}},
        {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": 7}},
        {"quantization_config": {"quant_method": [1], "kv_cache_scheme": {"num_bits": 8}}},
    ],
    ids=json.dumps,
)
def test_configs_that_no_model_has(
    config: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_source(tmp_path / "a", **{"x": 1} | config)
    for command in (
        ["inspect", str(folder)],
        ["calibrate", str(folder), "--dry-run", "--dataset", "builtin:pydoc"],
    ):
        with pytest.raises(SystemExit) as stop:
            main(command)
        err = capsys.readouterr().err.strip()
        assert stop.value.code == 2 and len(err.splitlines()) == 1, err
        assert "config.json" in err


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", struct.pack("<Q", 8) + b"{}      "])
def test_files_of_scales_that_are_none(content: bytes, tmp_path: Path) -> None:
    for suffix in (".json", ".safetensors"):
        (tmp_path / f"x{suffix}").write_bytes(content)
        with pytest.raises(UserError):
            convert(tmp_path / f"x{suffix}", "json", tmp_path / "out.json")
