"""`inspect --live`: vLLM itself loads the checkpoint, and must compute with the file's scales.

Two proofs. The scales that its attention layers hold are those of the file; and a copy whose only
difference is one layer's v_scale, times four in the file, holds the changed one and gives another
output. The copy is a folder of links in which one file is real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8calib import console
from fp8calib.checkpoint.config import text_config
from fp8calib.checkpoint.folder import copy_file
from fp8calib.checkpoint.paths import safe_file
from fp8calib.checkpoint.reader import Checkpoint, FoundScale, last_number, open_checkpoint
from fp8calib.checkpoint.scheme import needed_kv_cache_dtype
from fp8calib.checkpoint.structure import is_foreign
from fp8calib.errors import UserError
from fp8calib.layers import resolve_skip_layers
from fp8calib.scales import Kind, grouped_maximum, label

FACTOR = 4  # a power of two is exact in every floating dtype
_PROMPT_TOKENS = 48
_SECONDS = 3600
_WRITERS: dict[str, np.dtype] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}


@dataclass(frozen=True)
class LiveCheck:
    """What vLLM did. `change` is the largest difference that the altered scale made in the log
    probability of a token, `noise` that between two runs of the unaltered checkpoint."""

    version: str
    kv_cache_dtype: str
    compared: int
    altered: str
    change: float
    noise: float
    problems: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {"ok": not self.problems} | asdict(self)

    def lines(self) -> Iterator[str]:
        yield (
            f"vLLM {self.version}: cache {self.kv_cache_dtype}, {self.compared} scales held by its "
            f"layers compared with the file's"
        )
        yield (
            f"{self.altered} times {FACTOR} in a copy changes log-probabilities by up to "
            f"{self.change:.3g} (two runs without the change differ by {self.noise:.3g})"
        )


def live_check(
    checkpoint: str | Path, python: str | None = None, skip_layers: Sequence[str] = ()
) -> LiveCheck:
    """Load `checkpoint` in vLLM and compare; see the module's head.

    Args:
        checkpoint: a folder, or whatever `fp8calib.models.resolve_model` knows.
        python: an interpreter that has vLLM; this one where None.
        skip_layers: vLLM's list of layers that stay in 16 bit.
    Raises:
        UserError: there is no vLLM there, or no scale to change.
    """
    return live_checks([checkpoint], python, skip_layers)[0]


def live_checks(
    checkpoints: Sequence[str | Path], python: str | None = None, skip_layers: Sequence[str] = ()
) -> list[LiveCheck]:
    """As `live_check`, of several checkpoints in one process of vLLM."""
    from fp8calib.models import resolve_model

    interpreter = _interpreter(python)
    flags = {"kv_cache_dtype_skip_layers": list(skip_layers)} if skip_layers else {}
    jobs, cases = [], []
    with ExitStack() as copies:
        for checkpoint in checkpoints:
            folder = Path(checkpoint)
            opened = open_checkpoint(folder if folder.is_dir() else resolve_model(str(checkpoint)))
            layers = opened.layers
            skipped = resolve_skip_layers(skip_layers, layers)[1] if skip_layers else frozenset()
            index, scale = _one_to_change(opened, skipped)
            cases.append((opened, skipped, index, scale))
            vocabulary = text_config(opened.config).get("vocab_size")
            limit = vocabulary if isinstance(vocabulary, int) and vocabulary > 1 else 1000
            prompt = [1 + 7919 * i % (limit - 1) for i in range(_PROMPT_TOKENS)]
            options = flags | {"kv_cache_dtype": needed_kv_cache_dtype(opened.config)}
            for place in (opened.path, copies.enter_context(_altered(opened, scale))):
                jobs.append({"checkpoint": str(place), "prompt": prompt, "options": options})
        report = _run(interpreter, jobs)
    if isinstance(report, str):
        failed = f"vLLM does not run it: {report}"
        return [LiveCheck("?", "?", 0, case[3].tensor, 0.0, 0.0, [failed]) for case in cases]
    seen = report["seen"]
    return [
        _judge(report["version"], seen[2 * number], seen[2 * number + 1], *case)
        for number, case in enumerate(cases)
    ]


def _judge(
    version: str,
    first: dict[str, Any],
    second: dict[str, Any],
    checkpoint: Checkpoint,
    skipped: frozenset[int],
    index: int,
    scale: FoundScale,
) -> LiveCheck:
    """What vLLM made of a checkpoint (`first`) and of its altered copy."""
    noise = _difference(*first["logprobs"])
    change = _difference(first["logprobs"][0], second["logprobs"][0])
    problems = list(_not_held(checkpoint, first["layers"], skipped))
    compared = sum(len(kinds) for i, kinds in checkpoint.scales.items() if i not in skipped)
    if not _same(_layer(second["layers"], index).get("v"), scale.values * np.float32(FACTOR)):
        problems.append(f"layer {index}: vLLM does not hold the changed v_scale of the copy")
    if not change > 2 * noise:
        problems.append(
            f"layer {index}: v_scale times {FACTOR} changes nothing in vLLM's output "
            f"({change:.3g}, noise {noise:.3g}): the scale is not used"
        )
    return LiveCheck(
        version, first["kv_cache_dtype"], compared, scale.tensor, change, noise, problems
    )


def _one_to_change(checkpoint: Checkpoint, skipped: frozenset[int]) -> tuple[int, FoundScale]:
    """The middle one of the layers that have V of their own and a scale for it which loaders
    read."""
    sharing = {layer.index for layer in checkpoint.layers if layer.kv_source is not None}
    usable = [
        (index, kinds["v"])
        for index, kinds in checkpoint.scales.items()
        if "v" in kinds and kinds["v"].loaded and kinds["v"].dtype in _WRITERS
        if index not in skipped | sharing
    ]  # fmt: skip
    if not usable:
        raise UserError(f"{checkpoint.path} has no v_scale that could be changed: nothing to prove")
    return usable[len(usable) // 2]


def _interpreter(python: str | None) -> str:
    interpreter = os.path.expanduser(python) if python else sys.executable
    look = "import importlib.util as u; print('vllm', u.find_spec('vllm') is not None)"
    try:
        done = subprocess.run([interpreter, "-c", look], capture_output=True, timeout=120)
    except (OSError, ValueError, subprocess.TimeoutExpired) as problem:
        raise UserError(f"--python {interpreter}: {problem}") from None
    if b"vllm True" not in done.stdout:
        raise UserError(f"there is no vLLM in {interpreter}: name one that has it with --python")
    return interpreter


@contextmanager
def _altered(checkpoint: Checkpoint, scale: FoundScale) -> Iterator[Path]:
    """A folder of links to the checkpoint's files, but for one that holds `scale`, changed."""
    info = checkpoint.tensors[scale.tensor]
    with tempfile.TemporaryDirectory(prefix="fp8calib-live-") as place:
        folder = Path(place)
        for entry in checkpoint.path.iterdir():
            if entry.is_file() and safe_file(checkpoint.path, entry.name) != info.file:
                (folder / entry.name).symlink_to(entry.resolve())
        target = folder / _listed_name(checkpoint, info.file)
        copy_file(info.file, target)
        target.chmod(0o600)
        dtype = _WRITERS[info.dtype]
        with target.open("r+b") as file:
            file.seek(info.start)
            file.write(_encoded(scale.values * np.float32(FACTOR), info.dtype, dtype))
        yield folder


def _encoded(values: np.ndarray, name: str, dtype: np.dtype) -> bytes:
    if name == "BF16":  # the upper half of a float32
        return (values.astype("<f4").view("<u4") >> 16).astype(dtype).tobytes()
    return values.astype(dtype).tobytes()


def _listed_name(checkpoint: Checkpoint, file: Path) -> str:
    return next(name for name in checkpoint.files if safe_file(checkpoint.path, name) == file)


def _run(interpreter: str, jobs: list[dict[str, Any]]) -> dict[str, Any] | str:
    """What the probe reports; its last complaint where it fails."""
    command = [interpreter, str(Path(__file__).with_name("live_probe.py")), json.dumps(jobs)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with console.progress("vLLM loads the checkpoint and its copy", None):
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_SECONDS, env=environment
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {_SECONDS} seconds"
    if done.returncode == 0 and done.stdout.strip():
        return json.loads(done.stdout.strip().splitlines()[-1])
    said = [
        line for line in done.stderr.splitlines() if "Error" in line and "Traceback" not in line
    ]
    return (said[-1] if said else f"it ends with exit code {done.returncode}").strip()[-300:]


def _not_held(
    checkpoint: Checkpoint, layers: dict[str, Any], skipped: frozenset[int]
) -> Iterator[str]:
    names = {layer.index: layer.name for layer in checkpoint.layers}
    for index, kinds in checkpoint.scales.items():
        have, where = _layer(layers, index), label(index, names.get(index, ""))
        if not have:
            yield f"{where}: vLLM has no such attention layer"
        elif index in skipped:
            continue
        elif "fp8" not in have["kv_cache_dtype"]:
            yield f"{where}: vLLM keeps its cache in {have['kv_cache_dtype']}: scales are not used"
        else:
            for kind, scale in kinds.items():
                meant = _as_vllm(kind, kinds)
                if not _same(have[kind], meant):
                    yield (
                        f"{where}: vLLM holds {kind}_scale {have[kind][0]:.6g}, {scale.file} has "
                        f"{meant[0]:.6g}"
                    )


def _as_vllm(kind: Kind, kinds: dict[Kind, FoundScale]) -> np.ndarray:
    """A scale of the file as vLLM holds it: q by KV head."""
    values, kv_heads = kinds[kind].values, kinds["k"].values.size if "k" in kinds else 1
    return (
        grouped_maximum(values, kv_heads) if kind == "q" and not values.size % kv_heads else values
    )


def _layer(layers: dict[str, Any], index: int) -> dict[str, Any]:
    for name, have in layers.items():
        if last_number(name) == index and not is_foreign(name):
            return have
    return {}


def _same(held: list[float] | None, meant: np.ndarray) -> bool:
    return held is not None and np.array_equal(np.asarray(held, dtype=np.float32), meant)


def _difference(one: list[float], other: list[float]) -> float:
    return float(np.abs(np.subtract(one, other)).max())
