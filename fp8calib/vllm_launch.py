"""`--engine vllm`: start an installed vLLM on a checkpoint, with the flags that `inspect` prints.

vLLM wants its own versions of torch and more, so it mostly lives in another environment than
fp8calib: it is found by its executable, and only ever run as another process.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fp8calib.checkpoint import Inspection, inspect, open_checkpoint
from fp8calib.checkpoint.serving import serve_flags
from fp8calib.console import info
from fp8calib.errors import CheckpointError, UserError
from fp8calib.layers import resolve_skip_layers
from fp8calib.models import resolve_model

EXECUTABLE_VARIABLE = "FP8CALIB_VLLM"


@dataclass(frozen=True)
class VLLM:
    """A checkpoint as vLLM is to run it.

    executable: vLLM's command. model: a folder. flags: those that the cache needs, and what else
    was chosen.
    """

    executable: Path
    model: str
    flags: list[str]

    @property
    def python(self) -> Path:
        """The interpreter that vLLM is installed for: its command lies beside it.

        Raises:
            UserError: there is none.
        """
        folder = self.executable.resolve().parent
        for name in ("python", "python3"):
            if os.access(folder / name, os.X_OK):
                return folder / name
        raise UserError(
            f"{self.executable}: there is no Python beside it to run vLLM's own API with; name the "
            "vllm in the bin folder of its environment"
        )

    def serve(self, more: Sequence[str] = (), api_key: str | None = None) -> NoReturn:
        """Become `vllm serve`: this process is vLLM's from here on. The key goes by the
        environment, where other users do not see it."""
        command = [str(self.executable), "serve", self.model, *self.flags, *more]
        info(shlex.join(command))
        if api_key is not None:
            os.environ["VLLM_API_KEY"] = api_key
        os.execv(command[0], command)

    def generate(self, request: Mapping[str, Any], more: Sequence[str] = ()) -> dict[str, Any]:
        """Run vLLM's offline API; see vllm_offline.py for what goes in and out.

        Raises:
            UserError: vLLM failed; it has told why on stderr.
        """
        script = Path(__file__).with_name("vllm_offline.py")
        with tempfile.TemporaryDirectory(prefix="fp8calib-") as folder:
            asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
            asked.write_text(json.dumps(request))
            flags = ["--model", self.model, *self.flags, *more]
            command = [str(self.python), str(script), str(asked), str(answered), *flags]
            # Its log belongs to stderr: stdout is for answers.
            status = subprocess.run(command, stdout=sys.stderr.fileno(), check=False).returncode
            if status == -2 or status == 130:
                raise KeyboardInterrupt
            if status != 0 or not answered.exists():
                raise UserError(f"vLLM ended with status {status}; what it says is above")
            return json.loads(answered.read_text())


def find_vllm(named: str | None = None) -> Path:
    """vLLM's executable: the one that is named, by the caller or by $FP8CALIB_VLLM, else the one
    of this environment, else the first on PATH.

    Raises:
        UserError: there is none.
    """
    named = named or os.environ.get(EXECUTABLE_VARIABLE)
    if named:
        found = shutil.which(Path(named).expanduser())
        if found is None:
            raise UserError(f"{named}: no such executable; give the path of vLLM's command")
        return Path(found)
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("vllm")
    if found is None:
        raise UserError(
            "vLLM is not installed: `pip install vllm` in an environment of its own, then put its "
            f"`vllm` on PATH or name it with {EXECUTABLE_VARIABLE}, --vllm PATH or, for verify, "
            "--python PATH"
        )
    return Path(found)


def prepare(
    model: str,
    *,
    executable: str | None = None,
    kv_cache_dtype: str = "auto",
    skip_layers: Sequence[str] | None = None,
    missing_scales: str = "refuse",
    flags: Mapping[str, Any] | None = None,
) -> VLLM:
    """Look at a checkpoint and decide with which flags vLLM runs it.

    Args:
        skip_layers: None takes those that the checkpoint records.
        missing_scales: "one" runs a checkpoint whose scales are incomplete all the same.
        flags: further ones of vLLM, by name; None and False leave one out.

    Raises:
        UserError: vLLM is not installed, there is no such model, or a layer that the model lacks.
        CheckpointError: vLLM would silently run a calibrated checkpoint at scale 1.0.
    """
    vllm = find_vllm(executable)
    folder = str(resolve_model(model))
    found = inspect(folder)
    if found.strategy is not None and found.problems and missing_scales != "one":
        raise CheckpointError(
            f"{model}: {found.problems[0]}. Calibrate it again, or run it as it is with "
            "--missing-scales one"
        )
    cache = _cache_flags(found, kv_cache_dtype, skip_layers)
    return VLLM(vllm, folder, [*cache, *_words(flags or {})])


def _cache_flags(
    found: Inspection, kv_cache_dtype: str, skip_layers: Sequence[str] | None
) -> list[str]:
    printed = shlex.split(found.serve)[3:]  # behind `vllm serve CHECKPOINT`
    if kv_cache_dtype == "auto" and skip_layers is None:
        return printed
    if kv_cache_dtype == "auto" and "--kv-cache-dtype" in printed:
        kv_cache_dtype = "fp8"
    resolved = found.kv_cache_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    if not resolved.startswith("fp8"):
        return serve_flags((), kv_cache_dtype)
    skip = found.skip_layers
    if skip_layers is not None:
        skip, _ = resolve_skip_layers(skip_layers, open_checkpoint(Path(found.checkpoint)).layers)
    return serve_flags(skip, kv_cache_dtype)


def _words(flags: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += map(str, value) if isinstance(value, list) else [str(value)]
    return words
