"""Memory of calibration on a CPU: resident beside a bare forward pass, and streamed.

    python benchmarks/memory.py [--layers 24] [--hidden 2048] [--batch-size 4] [--max-seq-len 512]

Makes a random bfloat16 model of the Llama shape (2.2 GB by default) in a temporary folder. Each
measurement runs in a process of its own; what counts is the peak of its anonymous memory above what
it has after its imports. The streamed limit is (largest layer + embeddings + two hidden-state
batches) + 20 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell RssAnon")


class Peak:
    """The largest anonymous memory while the block runs, looked at every two milliseconds."""

    def __enter__(self) -> Peak:
        self.bytes, self._running = anonymous_bytes(), True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while self._running:
            self.bytes = max(self.bytes, anonymous_bytes())
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self._running = False
        self._thread.join()


def make_model(folder: Path, args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=max(args.hidden // 512, 1),
        max_position_embeddings=4096,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="500MB")


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from fp8calib.attention import decoder_of
    from fp8calib.calibration.core import Collector, calibration_pass, make_batch, plan_batches
    from fp8calib.model_loading import load_model

    count = args.batch_size * args.batches
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 32_000, (count, args.max_seq_len), generator=generator).tolist()
    batches = [make_batch(rows, texts) for texts in plan_batches(rows, args.batch_size)]
    baseline, start = anonymous_bytes(), time.perf_counter()
    with Peak() as peak, torch.no_grad():
        stream = "stream" if args.mode == "streamed" else None
        model = load_model(folder, "cpu", device_map=stream)
        if args.mode == "bare":
            for batch in batches:
                decoder_of(model)(input_ids=batch.input_ids, use_cache=False)
        else:
            calibration_pass(model, batches, Collector(query=True))
    layer, embeddings = model.model.layers[0], model.get_input_embeddings()
    hidden = args.batch_size * args.max_seq_len * args.hidden * 2
    sizes = [sum(p.numel() * 2 for p in part.parameters()) for part in (layer, embeddings)]
    return {
        "peak_mb": (peak.bytes - baseline) / 1e6,
        "limit_mb": 1.2 * (sum(sizes) + 2 * hidden) / 1e6,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--mode", choices=["bare", "resident", "streamed"], help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help="Keep the model here, and use it again.")
    args = parser.parse_args()
    if args.mode:
        print(json.dumps(measure(args.model, args)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch)
        if not (folder / "config.json").exists():
            make_model(folder, args)
        options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in (
            "layers", "hidden", "batch_size", "batches", "max_seq_len"
        )]  # fmt: skip
        found = {}
        for mode in ("bare", "resident", "streamed"):
            command = [sys.executable, __file__, *options, "--model", str(folder), "--mode", mode]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[mode] = json.loads(done.stdout.splitlines()[-1])
            print(f"{mode:9}{found[mode]['peak_mb']:8.0f} MB {found[mode]['seconds']:7.1f} s")
        ratio = found["resident"]["peak_mb"] / found["bare"]["peak_mb"]
        print(f"resident is {ratio:.2f} of the bare forward pass")
        print(f"streamed may take {found['streamed']['limit_mb']:.0f} MB")


if __name__ == "__main__":
    main()
