"""Compiles the Triton kernels for GPUs that are not there.

As a script: compiles the variants named on the command line as JSON, prints one JSON line each.
Runs in a process of its own, because kernels of one process are either compiled or interpreted.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

POINTERS = {
    "entries_ptr": "*i32",
    "pairs_ptr": "*i32",
    "table_ptr": "*i32",
    "lens_ptr": "*i32",
    "starts_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "slot_ptr": "*i64",
    "k_scale_ptr": "*fp32",
    "v_scale_ptr": "*fp32",
    "q_scale_ptr": "*fp32",
    "sinks_ptr": "*bf16",
    "partial_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "key_ptr": "*bf16",
    "value_ptr": "*bf16",
    "out_ptr": "*bf16",
}
FLOATS = ("score_scale", "cap")
STRIDES = re.compile(r"(q|out|key|value)(_head)?_stride|table_stride")
LAYER = {
    "HEADS": 8,
    "GROUP": 4,
    "DK": 128,
    "DV": 128,
    "DK_PAD": 128,
    "DV_PAD": 128,
    "PAGE": 128,
    "FORMAT": 1,
    "Q_FP8": False,
    "K_SCALE": True,
    "V_SCALE": True,
    "Q_SCALE": False,
    "SOFTCAP": False,
    "SINKS": False,
    "WINDOW": False,
    "CAST": True,
}
DECODE = {
    **LAYER,
    "MAX_NEW": 1,
    "COLUMNS": 8,
    "TILE": 128,
    "STAGES": 3,
    "MODE": 0,
    "DOT": "fp16",
    "QUANTIZE": False,
    "PDL": True,
}
PREFILL_HOPPER = {
    "head_dim_k": 128,
    "head_dim_v": 128,
    "page_size": 128,
    "tile": 128,
    "box": 128,
    "stages": 2,
    "fp8_pages": True,
    "wide": True,
    "fp8_query": False,
    "k_scale": True,
    "v_scale": True,
    "q_scale": False,
    "softcap": False,
    "sinks": False,
    "window": False,
}
KERNELS = {
    "decode": ("decode", "_decode_kernel", DECODE),
    "decode_hopper": ("decode_hopper", "_decode_hopper_kernel", DECODE),
    "join": (
        "decode",
        "_join_kernel",
        {
            "GROUP": 4,
            "MAX_NEW": 1,
            "DV": 128,
            "DV_PAD": 128,
            "PIECES": 32,
            "SINKS": False,
            "PDL": True,
        },
    ),
    "prefill": (
        "prefill",
        "_prefill_kernel",
        {**LAYER, "TILE_Q": 64, "TILE": 64, "DOT": "fp16", "QUANTIZE": False},
    ),
    "prefill_hopper": ("prefill_hopper", "_prefill_hopper_kernel", PREFILL_HOPPER),
    "store_tokens": (
        "store_pages",
        "_store_tokens",
        {
            "HEADS": 8,
            "DK": 128,
            "DV": 128,
            "DK_PAD": 128,
            "DV_PAD": 128,
            "PAGE": 128,
            "K_SCALE": True,
            "V_SCALE": True,
            "FORMAT": 1,
            "CAST": True,
        },
    ),
    "store_groups": (
        "store_pages",
        "_store_groups",
        {
            "HEADS": 8,
            "DK": 128,
            "DV": 128,
            "DK_PAD": 128,
            "DV_PAD": 128,
            "PAGE": 128,
            "K_SCALE": True,
            "V_SCALE": True,
            "FORMAT": 1,
            "CAST": True,
            "ROWS": 32,
        },
    ),
    "plan": (
        "plan",
        "_plan_kernel",
        {"HEADS": 8, "TILE": 128, "WINDOW": True, "SEQS": 64, "BLOCK": 16, "MANY": False},
    ),
}
PAGES = {0: "*bf16", 1: "*fp8e4nv", 2: "*fp8e5"}
INSTRUCTIONS = (
    "QGMMA",
    "HGMMA",
    "HMMA",
    "UTMALDG",
    "LDGSTS",
    "LDSM",
    "PRMT",
    "SHFL",
    "F2FP",
    "BAR.SYNC",
)


def compile_kernel(kernel, arch, num_warps=4, **constants):
    """Compile one variant; returns triton's compiled kernel."""
    import importlib

    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name, defaults = KERNELS[kernel]
    fn = getattr(importlib.import_module(f"fp8_paged_attention.{module}"), name)
    assert set(constants) <= set(defaults), set(constants) - set(defaults)
    constants = {**defaults, **constants}
    page_format, cast = constants.get("FORMAT", 0), constants.get("CAST", True)
    pages = "*u8" if page_format and not (cast and arch >= 89) else PAGES[page_format]
    if kernel.startswith("store") and page_format:
        pages = "*u8"
    query = "*fp8e4nv" if constants.get("Q_FP8") or constants.get("fp8_query") else "*bf16"
    descriptors = {}
    if kernel == "prefill_hopper":
        constants, descriptors = prefill_hopper_arguments(constants)
    if "DOT" in constants:
        constants["DOT"] = {"fp16": tl.float16, "bf16": tl.bfloat16}[constants["DOT"]]
    signature, attributes = {}, {}
    for i, argument in enumerate(fn.arg_names):
        kind = {**POINTERS, "k_ptr": pages, "v_ptr": pages, "q_ptr": query}.get(argument)
        kind = kind or descriptors.get(argument, "fp32" if argument in FLOATS else "i32")
        signature[argument] = "constexpr" if argument in constants else kind
        if kind.startswith("*") or STRIDES.fullmatch(argument):
            attributes[(i,)] = [["tt.divisibility", 16]]
    indices = {(fn.arg_names.index(name),): value for name, value in constants.items()}
    source_type = ASTSource
    if kernel.endswith("_hopper"):
        from triton.experimental.gluon._runtime import GluonASTSource as source_type
    source = source_type(fn=fn, signature=signature, constexprs=indices, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": 2}
    if constants.get("PDL"):
        options["launch_pdl"] = True
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def prefill_hopper_arguments(constants):
    """The kernel's one constant, and the types of its tensor descriptors."""
    from fp8_paged_attention.prefill_hopper import PrefillConfig
    from triton.experimental.gluon import language as gl

    config = PrefillConfig(**constants)
    element, bits = ("fp8e4nv", 8) if config.fp8_pages else ("bf16", 16)
    row, v_row = config.head_dim_k * config.bytes, 128 // config.bytes
    layouts = [gl.NVMMASharedLayout(swizzle, bits, 2) for swizzle in (min(row, 128), 0)]
    blocks = (
        [config.box, config.head_dim_k],
        [config.box * config.head_dim_v // v_row, v_row],
    )
    k, v = (
        f"tensordesc<{element}{block},{layout!r}>"
        for block, layout in zip(blocks, layouts, strict=True)
    )
    return {"C": config}, {"k_desc": k, "v_desc": v}


def disassemble(cubin):
    """SASS and the registers, stack and spills of a cubin, by the cuobjdump that triton brings."""
    import triton

    tool = next(Path(triton.__file__).parent.rglob("cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    return sass, dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout + usage.stderr))


def report(kernel, arch, **options):
    """What one variant compiles to."""
    compiled = compile_kernel(kernel, arch, **options)
    sass, usage = disassemble(compiled.asm["cubin"])
    counts = {name: len(re.findall(rf"\b{name}", sass)) for name in INSTRUCTIONS}
    # ptxas 12.8 and 12.9 can make a conversion back from FP8 read the stack pointer, R1.
    faults = len(re.findall(r"UNPACK_B R\d+, R1(?:\.reuse)? ", sass))
    return {
        "kernel": kernel,
        "arch": arch,
        **options,
        "shared": compiled.metadata.shared,
        **{k.lower(): int(v) for k, v in usage.items()},
        "faults": faults,
        **{k: v for k, v in counts.items() if v},
    }


def compile_all(variants, python=sys.executable, timeout=600):
    """Reports of many variants, from a fresh process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [python, __file__, json.dumps(variants)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


if __name__ == "__main__":
    for variant in json.loads(sys.argv[1]):
        print(json.dumps(report(**variant)), flush=True)
