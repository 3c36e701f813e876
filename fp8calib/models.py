"""From a model's name to a local folder: a folder, a Hugging Face Hub id, or the embedded model.

Nothing here imports torch; what a folder needs to hold is decided where it is opened.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from fp8calib.errors import ModelError

DEMO_PREFIX = "demo:"

# What transformers reads, plus the licence, which travels with the weights. Python files come
# along for `--trust-remote-code`; they run only with it.
_HUB_FILES = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
    "*.py",
    "LICENSE*",
    "NOTICE*",
]
# The same weights again, in forms that transformers does not need.
_HUB_IGNORED = [
    "*.bin",
    "*.pth",
    "*.pt",
    "*.gguf",
    "consolidated*.safetensors",
    "original/*",
    "onnx/*",
    "openvino/*",
    "metal/*",
]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def cache_dir() -> Path:
    """Where fp8calib keeps what it made itself: $FP8CALIB_CACHE, else the XDG cache directory."""
    if own := os.environ.get("FP8CALIB_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "fp8calib"


def resolve_model(name: str, allow_pickle: bool = False) -> Path:
    """Return the folder that holds the model `name`, fetching it first when needed.

    `name` is a local folder with a config.json, `demo:smollm2-135m-instruct`, or the id of a model
    on the Hugging Face Hub. With `allow_pickle` a model of the Hub may have pickled weights only;
    they are fetched, not opened. Raises ModelError when there is no such model or it cannot be
    fetched.
    """
    if name.startswith(DEMO_PREFIX):
        from fp8calib.demo_model import demo_model

        return demo_model(name)
    if not name:  # an unset variable of a shell; a Path would make the working folder of it
        raise ModelError("the name of a model is empty")
    try:
        path = Path(name).expanduser()
        there = path.exists()
    except (OSError, RuntimeError, ValueError) as problem:  # too long, or no such user
        why = getattr(problem, "strerror", None) or problem
        raise ModelError(f"{name:.80}: not the name of a model: {why}") from None
    if there:
        return _local_folder(path)
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise ModelError(
            f"{name}: no such folder. Give a folder with a config.json, a model id of the "
            "Hugging Face Hub (owner/name), or demo:smollm2-135m-instruct"
        )
    return _from_hub(name, allow_pickle)


def _local_folder(path: Path) -> Path:
    if not path.is_dir():
        raise ModelError(f"{path} is a file; give the folder that holds the model's config.json")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} holds no config.json, so it is not a Hugging Face model folder")
    return path


def _from_hub(name: str, allow_pickle: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(
            snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED)
        )
    except GatedRepoError:
        raise ModelError(
            f"{name}: this model is gated; accept its licence at https://huggingface.co/{name} "
            "and log in with `hf auth login`"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ModelError(
            f"{name}: neither a local folder nor a model on the Hugging Face Hub "
            "(a private model needs `hf auth login`)"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        from huggingface_hub.constants import is_offline_mode

        why = "is not asked (HF_HUB_OFFLINE is set)" if is_offline_mode() else "cannot be reached"
        raise ModelError(
            f"{name}: no such local folder, not in the Hub's cache, and the Hugging Face Hub "
            f"{why}; give a local folder or demo:smollm2-135m-instruct"
        ) from None
    except OSError as problem:  # a full disk, or an answer of the server that is none of the above
        raise ModelError(f"{name}: cannot be fetched: {str(problem).splitlines()[0]}") from problem
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name}: this Hub repository holds no config.json")
    if not any(folder.glob("*.safetensors")) and allow_pickle:
        return Path(snapshot_download(name, allow_patterns=[*_HUB_FILES, "pytorch_model*.bin"]))
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{name}: this Hub repository holds no safetensors weights; calibrate with "
            f"--allow-pickle, or convert them with python "
            f'-c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
            f"[c.from_pretrained('{name}').save_pretrained('DIR') for c in (M, T)]\" and give DIR"
        )
    return folder
