"""The engine's speed: latency against context, steps, throughput, prefill, memory, host time.

    python benchmarks/engine.py [--parts latency step throughput prefill capacity host]
    python benchmarks/engine.py --device cpu [--model demo:smollm2-135m-instruct]

On a GPU the model has Llama-3.1-8B's shape and random bfloat16 weights. Long contexts are not
prefilled: their pages are filled with random values, and the requests placed behind them. Every
number of a part is taken in the same run, once with FP8 pages (at scale 1.0) and once with bfloat16
ones (host time with FP8 alone). Throughput has transformers' continuous batching beside it. On a
CPU the model is a real one, and beside it runs transformers' `generate` with sdpa on the same
prompts, padded on the left. Results are a table on stderr and JSON on stdout.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fp8calib.checkpoint import Checkpoint
from fp8calib.console import info, print_json, print_table
from fp8calib.runtime.compiled_layers import compile_layers
from fp8calib.runtime.config import EngineConfig
from fp8calib.runtime.engine import Engine
from fp8calib.runtime.loader import LoadedModel, load
from fp8calib.runtime.sampler import SampledTokens
from fp8calib.runtime.sampling_params import SamplingParams

PARTS = ("latency", "step", "throughput", "prefill", "capacity", "host")
FORMATS = {"fp8": "fp8", "bf16": "bfloat16"}
WARM_UP = 40  # tokens of each request: past the length up to which graphs are for short ones


def random_llama(layers: int) -> LoadedModel:
    from llama_shape import VOCAB_SIZE, make_model
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from fp8calib.attention import probe

    model = make_model(layers)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, "w0"))
    return LoadedModel(
        name="random Llama-3.1-8B shape",
        checkpoint=Checkpoint(Path(), model.config.to_dict(), False, (), (), {}, {}),
        model=model,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=words),
        layers=probe(model),
        eos_token_ids=frozenset(),
        max_model_len=131_072,
    )


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def fill_with_noise(engine: Engine) -> None:
    for cache in engine.store.layers.values():
        for pages in (cache.k_pages, cache.v_pages):
            if pages.dtype == torch.uint8:
                pages.random_(0, 0x60)  # codes of 0 to 32
            else:
                pages.normal_()


def place(engine: Engine, batch: int, context: int, max_tokens: int) -> None:
    """`batch` requests whose next step is their first decode step, at `context` tokens."""
    for _ in range(batch):
        prompt = [1] * (context + 1)
        request = engine.add_request(greedy(max_tokens), prompt_token_ids=prompt)
        assert engine.block_manager.grow(request.block_tables, 0, context)
        request.num_computed = context


def drop_all(engine: Engine) -> None:
    for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.abort(request)
    engine.step()


def decode_ms(engine: Engine, batch: int, context: int, steps: int = 40) -> float:
    """Milliseconds between tokens, the median of runs of steps."""
    place(engine, batch, context, 20 + 5 * steps)
    for _ in range(12):
        engine.step()
    runs = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps // 5):
            engine.step()
        torch.cuda.synchronize()
        runs.append((time.perf_counter() - start) / (steps // 5) * 1e3)
    assert len(engine.scheduler.running) == batch, "some requests have ended"
    drop_all(engine)
    return statistics.median(runs)


def make_engine(loaded: LoadedModel, word: str, tokens: int, **options: Any) -> Engine:
    """An engine whose pages hold `tokens` tokens."""
    size = sum(2 * layer.num_kv_heads * layer.head_dim for layer in loaded.layers)
    size *= 1 if word == "fp8" else 2
    settings: dict[str, Any] = {
        "kv_cache_dtype": FORMATS[word],
        "kv_cache_memory_bytes": (tokens + 128) * size,
        "enable_prefix_caching": False,
        "max_num_seqs": 64,
        "max_model_len": min(tokens, loaded.max_model_len),
    }
    engine = Engine(loaded, EngineConfig(**settings | options))
    fill_with_noise(engine)
    return engine


def slope(points: dict[int, float]) -> float:
    """Milliseconds for 1,000 tokens of context, by least squares."""
    return statistics.linear_regression(list(points), list(points.values())).slope * 1e3


def latency(loaded: LoadedModel, args: argparse.Namespace) -> dict[str, Any]:
    contexts = {1: (1024, 4096, 16_384, 65_536, 130_900), 8: (1024, 4096, 16_384, 65_400)}
    points: dict[str, dict[int, dict[int, float]]] = {}
    for word in FORMATS:
        engine = make_engine(loaded, word, 8 * 65_536, max_model_len=131_072)
        points[word] = {
            batch: {context: decode_ms(engine, batch, context) for context in lengths}
            for batch, lengths in contexts.items()
        }
        del engine
        torch.cuda.empty_cache()
    result: dict[str, Any] = {"milliseconds": points}
    for batch in contexts:
        fp8, bf16 = points["fp8"][batch], points["bf16"][batch]
        ours, theirs = slope(fp8), slope(bf16)
        ahead = statistics.mean(f - ours * c / 1e3 for c, f in fp8.items()) - statistics.mean(
            b - theirs * c / 1e3 for c, b in bf16.items()
        )
        result[f"batch {batch}"] = {
            "fp8 slope over bf16": ours / theirs,
            "fp8 ms per 1000 tokens": ours,
            "bf16 ms per 1000 tokens": theirs,
            "break-even context": max(0.0, ahead / (theirs - ours) * 1e3),
        }
    return result


def copy_rate() -> float:
    """Bytes a second of a large copy on the device, read and written."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / statistics.median(times)


def step(loaded: LoadedModel, args: argparse.Namespace) -> dict[str, Any]:
    """Whole decode steps at short contexts, against reading the weights (all but the embedding
    table, of which a step reads a row a sequence) and the cache."""
    rate = copy_rate()
    torch.cuda.empty_cache()
    parameters = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    embedding = loaded.model.get_input_embeddings().weight
    weights = parameters - embedding.numel() * embedding.element_size()
    result: dict[str, Any] = {"copy GB/s": rate / 1e9, "weights ms": weights / rate * 1e3}
    for word in FORMATS:
        engine = make_engine(loaded, word, 64 * 2048, max_model_len=2048)
        token = sum(engine.store.block_bytes()) / engine.store.block_size
        for context, batch in itertools.product((256, 1024), (1, 8, 64)):
            ms = decode_ms(engine, batch, context)
            floor = (weights + batch * context * token) / rate * 1e3
            result[f"{word}, context {context}, batch {batch}"] = {
                "ms": ms,
                "floor ms": floor,
                "ratio": ms / floor,
            }
        del engine
        torch.cuda.empty_cache()
    return result


def host(loaded: LoadedModel, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a step in which the host does not wait for the device: the median step."""
    waited = 0.0
    wait = SampledTokens.wait

    def timed(self: SampledTokens) -> Any:
        nonlocal waited
        start = time.perf_counter()
        result = wait(self)
        waited += time.perf_counter() - start
        return result

    engine = make_engine(loaded, "fp8", 64 * 2048, max_model_len=2048)
    result = {}
    SampledTokens.wait = timed  # type: ignore[method-assign]
    try:
        for batch in (1, 64):
            place(engine, batch, 256, 400)
            times = []
            for _ in range(250):
                waited, start = 0.0, time.perf_counter()
                engine.step()
                times.append((time.perf_counter() - start - waited) * 1e3)
            result[f"batch {batch} ms"] = statistics.median(times[50:])
            drop_all(engine)
    finally:
        SampledTokens.wait = wait  # type: ignore[method-assign]
    return result


def prompts_of(count: int, length: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(1)
    return torch.randint(10, 100_000, (count, length), generator=rng).tolist()


def run_all(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
    """Seconds until all prompts have their answers."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for prompt in prompts:
        engine.add_request(greedy(max_tokens), prompt_token_ids=prompt)
    while engine.has_unfinished_requests:
        engine.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def prefill(loaded: LoadedModel, args: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of prompts alone."""
    result = {}
    for word in FORMATS:
        engine = make_engine(loaded, word, 66_000, max_num_batched_tokens=8192)
        for count, length in ((8, 4096), (1, 32_768)):
            prompts = prompts_of(count, length)
            run_all(engine, prompts, 1)
            result[f"{word} {count} x {length}"] = count * length / run_all(engine, prompts, 1)
        del engine
        torch.cuda.empty_cache()
    for case in ("8 x 4096", "1 x 32768"):
        result[f"fp8 over bf16, {case}"] = result[f"fp8 {case}"] / result[f"bf16 {case}"]
    return result


def throughput(loaded: LoadedModel, args: argparse.Namespace) -> dict[str, float]:
    """Generated tokens a second, whole runs with their prefill."""
    prompts = prompts_of(128, 1000)
    result = {}
    for word in FORMATS:
        engine = make_engine(
            loaded, word, 128 * 1536, max_num_seqs=128, max_num_batched_tokens=8192
        )
        # Until all have begun and some have ended: kernels and graphs of every batch size.
        run_all(engine, prompts, WARM_UP)
        result[f"{word} tokens/s"] = rate = 128 * 500 / run_all(engine, prompts, 500)
        info(f"throughput, {word}: {rate:,.0f} tokens/s")
        del engine
        torch.cuda.empty_cache()
    for attention in args.transformers_attention:
        with torch.inference_mode(False):
            theirs = transformers_throughput(args.layers, prompts, attention)
        result[f"transformers, {attention}, tokens/s"] = theirs
        info(f"throughput, transformers, {attention}: {theirs:,.0f} tokens/s")
        for word in FORMATS:
            result[f"{word} over transformers, {attention}"] = result[f"{word} tokens/s"] / theirs
    return result


def transformers_throughput(layers: int, prompts: list[list[int]], attention: str) -> float:
    """Continuous batching of transformers' own, with a model like ours as it comes. What it sets up
    (cache, CUDA graphs) is kept from the warm-up on; prompts are not cached, nor are they by us."""
    from llama_shape import make_model
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = make_model(layers)
    model.set_attn_implementation(f"paged|{attention}")
    settings = GenerationConfig(do_sample=False, eos_token_id=-1)
    batching = ContinuousBatchingConfig(allow_block_sharing=False)

    def generate(tokens: int) -> int:
        outputs = model.generate_batch(
            prompts,
            generation_config=settings,
            continuous_batching_config=batching,
            max_new_tokens=tokens,
            persistent_manager=True,
        )
        return sum(len(output.generated_tokens) for output in outputs.values())

    start = time.perf_counter()
    generate(WARM_UP)
    info(f"transformers' warm-up took {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    count = generate(500)
    seconds = time.perf_counter() - start
    model.destroy_cached_continuous_batching_manager()
    assert count == 500 * len(prompts), f"transformers generated {count} tokens"
    return count / seconds


def capacity(loaded: LoadedModel, args: argparse.Namespace) -> dict[str, float]:
    """Tokens that fit into what the engine takes of the GPU by default."""
    result: dict[str, float] = {}
    for word in FORMATS:
        engine = Engine(loaded, EngineConfig(kv_cache_dtype=FORMATS[word], max_num_seqs=256))
        result[f"{word} tokens"] = engine.store.num_blocks[0] * engine.store.block_size
        info(engine.describe_cache())
        del engine
        torch.cuda.empty_cache()
    result["fp8 over bf16"] = result["fp8 tokens"] / result["bf16 tokens"]
    return result


def on_gpu(args: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    loaded = random_llama(args.layers)
    parts: dict[str, Callable[..., Any]] = {
        "latency": latency,
        "step": step,
        "throughput": throughput,
        "prefill": prefill,
        "capacity": capacity,
        "host": host,
    }
    if args.compile_layers:
        compile_layers(loaded.model, loaded.layers)
    results: dict[str, Any] = {}
    for name in args.parts:
        begun = time.perf_counter()
        with torch.inference_mode():
            results[name] = parts[name](loaded, args)
        results[name]["seconds of this part"] = time.perf_counter() - begun
        show(name, results[name])
    results["seconds"] = time.perf_counter() - started
    results["device"] = torch.cuda.get_device_name()
    return results


def on_cpu(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of the engine and of `generate`, in turns; the best of the repeats."""
    loaded, plain = (load(args.model, device="cpu", dtype=args.dtype) for _ in range(2))
    text = "The history of the town begins with a small market at the river. " * 40
    ids = loaded.tokenizer(text)["input_ids"]
    ragged = [ids[:length] for length in (16, 300, 40, 120, 200, 64, 24, 90)]
    results: dict[str, Any] = {}
    for name, prompts, tokens in (("batch 1", [ids[:64]], 64), ("batch 8, ragged", ragged, 48)):
        runs: dict[str, list[float]] = {"native": [], "fp8": [], "generate": []}
        for _ in range(args.repeats):
            for word in ("native", "fp8"):
                dtype = "auto" if word == "native" else "fp8"
                engine = Engine(loaded, EngineConfig(kv_cache_dtype=dtype))
                runs[word].append(len(prompts) * tokens / run_on_cpu(engine, prompts, tokens))
            runs["generate"].append(generate_rate(plain, prompts, tokens))
        best = {word: max(rates) for word, rates in runs.items()}
        results[name] = {f"{word} tokens/s": rate for word, rate in best.items()} | {
            f"{word} over generate": best[word] / best["generate"] for word in ("native", "fp8")
        }
        show(name, results[name])
    return results | {"threads": torch.get_num_threads(), "dtype": str(loaded.model.dtype)}


def run_on_cpu(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    start = time.perf_counter()
    for prompt in prompts:
        engine.add_request(greedy(tokens), prompt_token_ids=prompt)
    while engine.has_unfinished_requests:
        engine.step()
    return time.perf_counter() - start


def generate_rate(loaded: LoadedModel, prompts: list[list[int]], tokens: int) -> float:
    from fp8calib.attention import use_attention

    longest = max(map(len, prompts))
    pad = loaded.tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with use_attention(loaded.model, "sdpa"), torch.inference_mode():
        start = time.perf_counter()
        loaded.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=pad,
        )
        return len(prompts) * tokens / (time.perf_counter() - start)


def show(name: str, result: dict[str, Any]) -> None:
    print_table(name, ["what", "value"], [[key, value] for key, value in flat(result)])


def flat(result: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    """Nested results as lines."""
    for key, value in result.items():
        if isinstance(value, dict):
            yield from ((f"{key}, {inner}", text) for inner, text in flat(value))
        else:
            yield str(key), f"{value:,.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--compile-layers", action="store_true")
    parser.add_argument(
        "--transformers-attention",
        nargs="*",
        default=["sdpa"],
        help="what generate_batch attends with, one run each: flash_attention_3 if installed",
    )
    parser.add_argument("--model", default="demo:smollm2-135m-instruct", help="on a CPU")
    parser.add_argument("--dtype", default="auto", help="on a CPU")
    parser.add_argument("--repeats", type=int, default=3, help="on a CPU")
    args = parser.parse_args()
    results = on_gpu(args) if args.device == "cuda" else on_cpu(args)
    versions = {name: version(name) for name in ("torch", "transformers")}
    results |= {**versions, "arguments": " ".join(sys.argv[1:])}
    print_json(results)


if __name__ == "__main__":
    main()
