"""The kv_cache_scheme of config.json: what is accepted, and the one place that writes it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from fp8calib import __version__
from fp8calib.checkpoint.config import text_config
from fp8calib.errors import CheckpointError
from fp8calib.scales import STRATEGIES, Strategy

METHOD = "compressed-tensors"
MODELOPT_METHOD = "modelopt"
_PER_TENSOR_METHODS = ("fp8", MODELOPT_METHOD)
# The name is how TensorRT-LLM knows the file's form; the version says who wrote it.
_PRODUCER = {"name": "modelopt", "version": f"fp8calib {__version__}"}


def quantization_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantization section of a config.json, wherever its writer put it (vLLM looks in the
    same places); None for a model that is not quantized."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(holder.get(key), dict):
                return holder[key]
    return None


def check_scheme(config: dict[str, Any]) -> Strategy | None:
    """The strategy that config.json declares for the KV cache, None when it declares no scheme.

    Raises:
        CheckpointError: a scheme that vLLM refuses, or takes for something that it is not.
    """
    section = quantization_config(config) or {}
    scheme = section.get("kv_cache_scheme")
    if scheme is None:
        return None
    if not isinstance(scheme, dict):
        raise CheckpointError(f"config.json: kv_cache_scheme is {scheme!r:.60}, expected an object")
    strategy = scheme.get("strategy")
    symmetric = scheme.get("symmetric")
    if section.get("quant_method", METHOD) != METHOD:  # modelopt leaves both out and means these
        strategy = strategy or "tensor"
        symmetric = True if symmetric is None else symmetric
    number = scheme.get("num_bits")
    if number != 8 or scheme.get("type") != "float":
        got = f"num_bits {number!s:.40} and type {scheme.get('type')!s:.40}"
        raise _refused(got, "vLLM's FP8 cache is num_bits 8 and type float")
    if strategy not in STRATEGIES:
        raise _refused(
            f"strategy {strategy!s:.40}", f"vLLM's FP8 cache knows {' and '.join(STRATEGIES)}"
        )
    if symmetric is not True:
        raise _refused(
            f"symmetric {str(symmetric).lower():.40}", "vLLM's FP8 cache has no zero points"
        )
    if scheme.get("dynamic", False) is not False:
        raise _refused(
            f"dynamic {str(scheme['dynamic']).lower():.40}",
            "vLLM would silently use the scales as static ones",
        )
    return strategy


def check_modelopt(content: dict[str, Any] | None) -> Strategy | None:
    """The strategy that modelopt's hf_quant_config.json (`content`) declares for the KV cache.

    Raises:
        CheckpointError: a cache of another format than FP8.
    """
    section = (content or {}).get("quantization")
    algorithm = section.get("kv_cache_quant_algo") if isinstance(section, dict) else None
    if algorithm is None:
        return None
    if algorithm != "FP8":
        raise CheckpointError(
            f"hf_quant_config.json: kv_cache_quant_algo {algorithm!r:.40} is not FP8"
        )
    return "tensor"


def _refused(got: str, why: str) -> CheckpointError:
    return CheckpointError(f"config.json: kv_cache_scheme with {got} is not supported: {why}")


def with_scheme(config: dict[str, Any], strategy: Strategy) -> dict[str, Any]:
    """A copy of config.json that declares an FP8 KV cache of `strategy`.

    A model that is not quantized gets compressed-tensors' section with no weight groups (the key
    must be there: vLLM passes head counts on only then). A compressed-tensors or modelopt model
    keeps its section and gains the scheme; ``fp8`` has none: vLLM reads its scales when it is told
    ``--kv-cache-dtype fp8``. No attention group is ever written: the presence of q_scale is the
    declaration.

    Raises:
        CheckpointError: the weights are quantized by a method whose KV scales vLLM does not read.
    """
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig

    scheme = QuantizationArgs(
        num_bits=8, type="float", strategy=strategy, symmetric=True, dynamic=False
    )
    result = deepcopy(config)
    section = quantization_config(result)
    if section is None or _kv_only(section):
        _drop_section(result)
        declared = QuantizationConfig(
            config_groups={},
            ignore=[],
            format="dense",
            quantization_status="compressed",
            kv_cache_scheme=scheme,
        )
        result["quantization_config"] = declared.model_dump(mode="json", exclude_none=True)
        return result
    check_method(config, strategy)
    if section["quant_method"] == METHOD:
        section["kv_cache_scheme"] = scheme.model_dump(mode="json", exclude_none=True)
        section.setdefault("config_groups", {})
    elif section["quant_method"] == MODELOPT_METHOD:
        section["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return result


def with_modelopt(config: dict[str, Any], strategy: Strategy) -> dict[str, Any]:
    """A copy of config.json that declares an FP8 KV cache as ModelOpt 0.47 does
    (export/convert_hf_config.py).

    Raises:
        CheckpointError: per-head scales, or weights that are quantized by another method.
    """
    section = quantization_config(config)
    if strategy != "tensor":
        raise CheckpointError("ModelOpt's form holds per-tensor scales only")
    if section is not None and section.get("quant_algo"):
        return with_scheme(config, strategy)
    if section is not None and not _kv_only(section):
        raise CheckpointError(
            f"config.json: the weights are quantized with {section.get('quant_method')!s:.40}; "
            "ModelOpt's form is for unquantized weights or its own"
        )
    result = deepcopy(config)
    _drop_section(result)
    result["quantization_config"] = {
        "ignore": [],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": _PRODUCER,
        "quant_method": MODELOPT_METHOD,
    }
    return result


def _kv_only(section: dict[str, Any]) -> bool:
    """Whether a section quantizes the KV cache and nothing else."""
    groups, algorithm = section.get("config_groups"), section.get("quant_algo")
    known = section.get("quant_method") in (METHOD, MODELOPT_METHOD)
    return known and not groups and not algorithm


def _drop_section(config: dict[str, Any]) -> None:
    for holder in (config, text_config(config)):
        holder.pop("quantization_config", None)
        holder.pop("compression_config", None)


def modelopt_file(config: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """The content of hf_quant_config.json beside a config.json that `with_modelopt` made;
    `earlier` is what it was in the source."""
    section = quantization_config(config) or {}
    made = {
        "quant_algo": section.get("quant_algo"),
        "exclude_modules": section.get("ignore") or [],
    }
    own = (earlier or {}).get("quantization")
    own = (own if isinstance(own, dict) else made) | {"kv_cache_quant_algo": "FP8"}
    return (
        {"producer": section.get("producer") or _PRODUCER} | (earlier or {}) | {"quantization": own}
    )


def check_method(config: dict[str, Any], strategy: Strategy) -> None:
    """Refuse to add KV scales to weights quantized by a method for which vLLM would not read them.

    vLLM 0.32 and 0.33 give attention layers scales to load for compressed-tensors, fp8 and
    modelopt, the last two per tensor only; for gptq, awq and others it drops them with a warning.
    """
    section = quantization_config(config)
    if section is None or (method := section.get("quant_method")) == METHOD or _kv_only(section):
        return
    if method not in _PER_TENSOR_METHODS:
        raise CheckpointError(
            f"config.json: the weights are quantized with {method!s:.40}, for which vLLM reads no "
            f"KV-cache scales; it does for unquantized, {METHOD}, "
            f"{' and '.join(_PER_TENSOR_METHODS)} weights"
        )
    if strategy != "tensor":
        raise CheckpointError(
            f"config.json: the weights are quantized with {method}, for which vLLM reads "
            "per-tensor KV-cache scales only: use --strategy tensor"
        )


def needed_kv_cache_dtype(config: dict[str, Any]) -> str:
    """What vLLM's --kv-cache-dtype must be for the scales to be used: auto, or fp8 where there is
    no place in config.json to declare them."""
    method = (quantization_config(config) or {}).get("quant_method")
    return "fp8" if method == "fp8" else "auto"
