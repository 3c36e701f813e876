"""Runs every kernel once on a small case, for compute-sanitizer on a CUDA device:

export PYTORCH_NO_CUDA_MEMORY_CACHING=1
compute-sanitizer --tool memcheck python tests/kernel_sanitize.py
compute-sanitizer --tool racecheck python tests/kernel_sanitize.py
"""

import torch
from fp8_paged_attention import plan, store, store_pages, triton_backend
from kernel_cases import ERROR, Case, relative_error


def main() -> None:
    lengths = {"seq_lens": [300, 17, 128, 0, 129], "new_tokens": [1] * 5}
    shape = {"heads": (8, 2), "dims": (128, 128), "query_dtype": torch.bfloat16, "device": "cuda"}
    for gluon in (True, False):
        triton_backend.USE_GLUON = gluon
        for page_size in (128, 16):
            for many in (160, 0):
                plan.MANY_PAIRS = many
                case = Case(**lengths, **shape, page_size=page_size)
                check(f"decode, gluon {gluon}, page {page_size}", case, sliding_window=100)
    triton_backend.USE_GLUON = True
    case = Case(**lengths, **shape, page_size=64, pages_dtype=torch.bfloat16)
    check("decode, native pages", case)
    chunks = Case(seq_lens=[190, 40], new_tokens=[140, 9], **shape, page_size=64)
    native = Case(
        seq_lens=[190, 40], new_tokens=[140, 9], **shape, page_size=64, pages_dtype=torch.bfloat16
    )
    for gluon in (True, False):
        triton_backend.USE_GLUON = gluon
        check(f"prefill, gluon {gluon}", chunks, sliding_window=100)
        check(f"prefill, native pages, gluon {gluon}", native)
        chunks.attend(arithmetic="fp8")
    for one_by_one in (1024, 0):
        store_pages.MAX_TOKENS_ONE_BY_ONE = one_by_one
        for filled in (case, chunks):
            keys, values, slots = (x.cuda() for x in (filled.keys, filled.values, filled.slots))
            pages = filled.tensors["k_pages"], filled.tensors["v_pages"]
            store(keys, values, *pages, slots, **filled.scale_args)
    torch.cuda.synchronize()
    print("done")


def check(name: str, case: Case, **options: int) -> None:
    error = relative_error(case.attend(**options), case.reference(**options))
    print(f"{name}: error {error:.1e}", flush=True)
    assert error < ERROR["accurate"]


if __name__ == "__main__":
    main()
