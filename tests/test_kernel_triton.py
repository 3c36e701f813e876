"""The Triton kernels against the float64 reference on the same pages: in the interpreter, and with
the same cases on a GPU where there is one."""

import fp8_paged_attention as fpa
import pytest
import torch
from kernel_cases import (
    DECODE_KERNELS,
    DEVICE,
    ERROR,
    Case,
    relative_error,
    select_decode_kernel,
)

pytest.importorskip("triton", reason="CPU builds of torch come without triton")

# Small heads keep the interpreter quick; a GPU's matrix instructions want larger ones.
SMALL, MEDIUM = (16, 32) if DEVICE == "cpu" else (64, 128)
RAGGED = {"seq_lens": [1, 15, 16, 17, 0, 33, 97], "new_tokens": [1] * 7}
SPECULATIVE = {"seq_lens": [40, 33, 3, 70, 2], "new_tokens": [3, 1, 3, 2, 4]}
MIXED = {"seq_lens": [40, 33, 12, 21, 1, 0], "new_tokens": [40, 10, 3, 1, 1, 1]}
SINKS = torch.linspace(-1, 3, 4).to(DEVICE)
ALL = {"sliding_window": 18, "softcap": 2.0, "sinks": SINKS, "scale": 0.1}


@pytest.fixture(autouse=True, params=DECODE_KERNELS)
def decode_kernel(request, monkeypatch):
    select_decode_kernel(request.param, monkeypatch)


def case_of(**options):
    return Case(**{"device": DEVICE, **options})


def attend(case, **options):
    query = options.get("query", case.tensors["query"])
    dtype = torch.float32 if query.dtype == fpa.E4M3.dtype else query.dtype
    head_dim = case.tensors["v_pages"].shape[3]
    poisoned = query.new_full((*query.shape[:2], head_dim), float("nan"), dtype=dtype)
    return case.attend(backend="triton", out=poisoned, **options)


# --- store -----------------------------------------------------------------------------------


def store_both(key, value, pages_dtype, slots, page_size, num_pages, scales, fp8_format="e4m3"):
    heads, dk, dv = key.shape[1], key.shape[2], value.shape[2]
    pages = []
    for backend in ("triton", "torch"):
        pair = fpa.allocate(num_pages, heads, page_size, dk, dv, pages_dtype, DEVICE)
        for x in pair:
            x.fill_(7)
        fpa.store(key, value, *pair, slots, *scales, fp8_format=fp8_format, backend=backend)
        pages.append(pair)
    return pages


def assert_same_bytes(ours, theirs, fp8_format):
    for x, y in zip(ours, theirs, strict=True):
        if x.dtype == torch.uint8:  # a NaN's sign may differ
            nan = fpa.FORMATS[fp8_format].dtype
            x, y = (z.masked_fill(z.view(nan).isnan(), 0x7F) for z in (x, y))
        else:
            x, y = (z.view(torch.int16) for z in (x, y))
        where = (x != y).nonzero()
        assert len(where) == 0, f"first difference at {where[0].tolist()} of {len(where)}"


@pytest.mark.parametrize("fp8_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["tensor", "head"])
@pytest.mark.parametrize("kernel", ["tokens", "groups"])
def test_store_is_bitwise_the_clamped_cast_of_every_bit_pattern(
    fp8_format, dtype, strategy, kernel, monkeypatch
):
    from fp8_paged_attention import store_pages

    monkeypatch.setattr(store_pages, "MAX_TOKENS_ONE_BY_ONE", 999 if kernel == "tokens" else 0)
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).to(DEVICE)
    scale = torch.tensor([0.37, 2.0] if strategy == "head" else [0.37], device=DEVICE)
    key = x.view(-1, 2, 4096 if kernel == "tokens" else 1024)  # few programs to interpret
    slots = torch.arange(len(key), device=DEVICE)
    ours, theirs = store_both(
        key, key.flip(1), torch.uint8, slots, 32, 1, [scale, scale], fp8_format
    )
    assert_same_bytes(ours, theirs, fp8_format)


@pytest.mark.parametrize("kernel", ["tokens", "groups"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16], ids=str)
def test_store_writes_its_slots_and_nothing_else(dtype, kernel, monkeypatch):
    from fp8_paged_attention import store_pages

    monkeypatch.setattr(store_pages, "MAX_TOKENS_ONE_BY_ONE", 999 if kernel == "tokens" else 0)
    # Chunks that begin and end inside groups, whole groups at odd rows, padding, single tokens.
    runs = [
        range(5, 37),
        range(64, 112),
        [-1, -1, 200, 150, 144],
        range(160, 167),
        reversed(range(240, 256)),
        range(128, 144),
        [0],
    ]
    slots = torch.tensor([slot for run in runs for slot in run], dtype=torch.int32, device=DEVICE)
    key = torch.randn(len(slots), 2, 24, device=DEVICE)
    value = torch.randn(len(slots), 2, 3 * 16, device=DEVICE)[..., 5:25]  # strided
    scales = [torch.tensor([0.1, 1.0], device=DEVICE)] * 2 if dtype == torch.uint8 else []
    ours, theirs = store_both(key, value, dtype, slots, 32, 8, scales)
    assert_same_bytes(ours, theirs, "e4m3")


def test_store_of_nothing():
    pages = fpa.allocate(1, 2, 16, 8, 8, torch.uint8, DEVICE)
    empty = torch.zeros(0, 2, 8, device=DEVICE)
    fpa.store(
        empty, empty, *pages, torch.zeros(0, dtype=torch.int32, device=DEVICE), backend="triton"
    )
    assert not pages[0].any()


# --- decode and prefill ----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize(
    "lengths", [RAGGED, SPECULATIVE, MIXED], ids=["ragged", "speculative", "mixed"]
)
@pytest.mark.parametrize("pages", [torch.uint8, torch.float16], ids=["fp8", "native"])
def test_attend_equals_the_reference(lengths, pages, options):
    case = case_of(**lengths, pages_dtype=pages, dims=(MEDIUM, SMALL))
    assert relative_error(attend(case, **options), case.reference(**options)) < ERROR["accurate"]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_decodes_at_the_start_may_be_named(backend):
    case = case_of(seq_lens=[33, 1, 40, 30], new_tokens=[1, 1, 12, 10], dims=(SMALL, SMALL))
    out = case.attend(backend=backend, num_decodes=2)
    assert relative_error(out, case.reference()) < ERROR["accurate"]
    with pytest.raises(ValueError, match="num_decodes must be 0 to 4"):
        case.attend(backend=backend, num_decodes=5)


@pytest.mark.parametrize("lengths", [RAGGED, MIXED], ids=["decode", "prefill"])
def test_fp8_arithmetic(lengths):
    case = case_of(**lengths, dims=(MEDIUM, MEDIUM))
    q_scale = torch.tensor([1.0, 100.0], device=DEVICE) / 100
    grouped = case.tensors["query"].unflatten(1, (2, 2))
    codes = fpa.quantize(grouped, q_scale[:, None])
    values = fpa.dequantize(codes, q_scale[:, None]).flatten(1, 2)
    expected = case.reference(query=values)
    out = attend(case, arithmetic="fp8", q_scale=q_scale)
    assert 1e-4 < relative_error(out, expected) < ERROR["fp8"]
    given = codes.flatten(1, 2).view(fpa.E4M3.dtype)
    assert torch.equal(attend(case, query=given, arithmetic="fp8", q_scale=q_scale), out)
    accurate = attend(case, query=given, q_scale=q_scale)
    assert relative_error(accurate, expected) < ERROR["accurate"]


@pytest.mark.parametrize("new", [1, 20], ids=["decode", "prefill"])
@pytest.mark.parametrize("fp8_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("query", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_query_dtypes_and_formats(query, fp8_format, new):
    case = case_of(
        seq_lens=[45, 20],
        new_tokens=[new, new],
        dims=(MEDIUM, MEDIUM),
        query_dtype=query,
        fp8_format=fp8_format,
        scales=("tensor", 0.02, 0.5),
    )
    error = relative_error(attend(case), case.reference())
    # The interpreter truncates where a GPU rounds to bfloat16.
    assert error < ERROR["accurate"] + (2**-8 if DEVICE == "cpu" else 0)


@pytest.mark.parametrize(
    "dims", [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (256, 256), (192, 128)], ids=str
)
@pytest.mark.parametrize("new", [1, 9], ids=["decode", "prefill"])
def test_c19_head_sizes(dims, new):
    case = case_of(seq_lens=[50], new_tokens=[new], heads=(2, 1), dims=dims)
    assert relative_error(attend(case), case.reference()) < ERROR["accurate"]


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (16, 1), (40, 1)], ids=str)
@pytest.mark.parametrize("new", [1, 9], ids=["decode", "prefill"])
def test_head_groups(heads, new):
    case = case_of(seq_lens=[40], new_tokens=[new], heads=heads, dims=(SMALL, SMALL))
    assert relative_error(attend(case), case.reference()) < ERROR["accurate"]


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_page_sizes(page_size):
    case = case_of(seq_lens=[150, 31], new_tokens=[1, 1], page_size=page_size, dims=(SMALL, MEDIUM))
    assert relative_error(attend(case), case.reference()) < ERROR["accurate"]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 127, 128, 129, 4097])
def test_c14_error_does_not_jump_at_a_boundary(length):
    case = case_of(
        seq_lens=[length], new_tokens=[1], heads=(2, 1), dims=(SMALL, SMALL), page_size=32
    )
    assert relative_error(attend(case), case.reference()) < ERROR["accurate"]


def test_many_sequences_are_planned_longest_first(monkeypatch):
    from fp8_paged_attention import plan

    monkeypatch.setattr(plan, "MANY_PAIRS", 8)
    lengths = [33, 0, 1, 700, 64, 5]
    case = case_of(seq_lens=lengths, new_tokens=[1] * 6, dims=(SMALL, SMALL))
    table = fpa.DecodePlan(
        case.tensors["k_pages"], case.tensors["v_pages"], num_q_heads=4, max_num_seqs=6
    )
    table.update(case.tensors["seq_lens"])
    assert table.many
    entries = table.entries[table.entries[:, 0] >= 0]
    assert entries[:, 0].unique().tolist() == list(range(6))
    assert entries[0, 0] == 3  # the longest first
    assert relative_error(attend(case, plan=table), case.reference()) < ERROR["accurate"]
    assert relative_error(attend(case), case.reference()) < ERROR["accurate"]


def test_a_bound_on_lengths_that_is_wrong_changes_no_result(monkeypatch):
    from fp8_paged_attention import plan
    from fp8_paged_attention.device import Hardware

    monkeypatch.setattr(plan, "MANY_PAIRS", 4)
    monkeypatch.setattr(plan, "hardware", lambda device: Hardware(0, 1))
    lengths = [33, 0, 1, 700, 64, 5]
    case = case_of(seq_lens=lengths, new_tokens=[1] * 6, dims=(SMALL, SMALL))
    table = fpa.DecodePlan(
        case.tensors["k_pages"], case.tensors["v_pages"], num_q_heads=4, max_num_seqs=6
    )
    assert table.update(case.tensors["seq_lens"], 40).kind == "short"
    assert relative_error(attend(case, plan=table), case.reference()) < ERROR["accurate"]


def test_one_plan_follows_changing_lengths():
    case = case_of(seq_lens=[97, 64, 31], new_tokens=[1] * 3, dims=(SMALL, SMALL))
    plan = fpa.DecodePlan(
        case.tensors["k_pages"], case.tensors["v_pages"], num_q_heads=4, max_num_seqs=4
    )
    for lengths in ([97, 64, 31], [1, 0, 17], [96, 33, 2], [97, 1, 1]):
        lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        plan.update(lens)
        out = attend(case, seq_lens=lens, plan=plan)
        assert relative_error(out, case.reference(seq_lens=lens)) < ERROR["accurate"]


# --- metamorphic -----------------------------------------------------------------------------


@pytest.mark.parametrize("new", [1, 9], ids=["decode", "prefill"])
def test_c10_moving_a_power_of_two_between_values_and_scales_changes_nothing(new):
    case = case_of(seq_lens=[50, 40], new_tokens=[new, 1], dims=(SMALL, SMALL))
    out = attend(case)
    pages = [torch.zeros_like(case.tensors[name]) for name in ("k_pages", "v_pages")]
    scales = {name: scale * 4 for name, scale in case.scale_args.items()}
    keys, values, slots = (x.to(DEVICE) for x in (case.keys, case.values, case.slots))
    fpa.store(keys * 4, values * 4, *pages, slots, **scales, backend="triton")
    moved = attend(
        case, query=case.tensors["query"] / 4, k_pages=pages[0], v_pages=pages[1], **scales
    )
    assert torch.equal(moved, out * 4)
    ignored = attend(case, v_scale=case.scale_args["v_scale"] * 4)
    assert torch.equal(ignored, out * 4)


@pytest.mark.parametrize("new", [1, 9], ids=["decode", "prefill"])
def test_c11_k_and_v_and_heads_keep_their_own_scales(new):
    case = case_of(
        seq_lens=[60],
        new_tokens=[new],
        heads=(4, 4),
        scales=("head", 0.5, 2.0),
        dims=(SMALL, SMALL),
    )
    out = attend(case)
    assert relative_error(out, case.reference()) < ERROR["accurate"]
    scales = case.scale_args
    swapped = attend(case, k_scale=scales["v_scale"], v_scale=scales["k_scale"])
    assert relative_error(swapped, case.reference()) > 0.5
    v_scale = scales["v_scale"].clone()
    v_scale[2] *= 2
    changed = (attend(case, v_scale=v_scale) != out).any(-1).any(0)
    assert changed.tolist() == [False, False, True, False]


@pytest.mark.parametrize("lengths", [RAGGED, MIXED], ids=["decode", "prefill"])
def test_moving_pages_and_running_twice_change_nothing(lengths):
    case = case_of(**lengths, dims=(SMALL, SMALL))
    out = attend(case)
    assert torch.equal(attend(case), out)
    order = torch.randperm(len(case.tensors["k_pages"]), device=DEVICE)
    moved = attend(
        case,
        k_pages=case.tensors["k_pages"][order.argsort()],
        v_pages=case.tensors["v_pages"][order.argsort()],
        block_table=order[case.tensors["block_table"].long()].int(),
    )
    assert torch.equal(moved, out)


@pytest.mark.parametrize("new", [2, 9], ids=["decode", "prefill"])
def test_tokens_before_the_window_may_be_gone(new):
    case = case_of(seq_lens=[100], new_tokens=[new], dims=(SMALL, SMALL))
    expected = attend(case, sliding_window=10)
    table = case.tensors["block_table"].clone()
    table[0, : (100 - new - 10 + 1) // 16] = -1
    assert torch.equal(attend(case, sliding_window=10, block_table=table), expected)


# --- refusals --------------------------------------------------------------------------------


def test_triton_refuses_pages_it_has_no_kernel_for():
    case = case_of(seq_lens=[5], new_tokens=[1], pages_dtype=torch.float32)
    with pytest.raises(ValueError, match="float32 pages are for the torch backend"):
        case.attend(backend="triton")
    case = case_of(seq_lens=[5], new_tokens=[1], page_size=48)
    with pytest.raises(ValueError, match="power of two, got 48"):
        case.attend(backend="triton")


def test_a_plan_for_another_layer_is_refused():
    case = case_of(seq_lens=[5, 6], new_tokens=[1, 1])
    pages = case.tensors["k_pages"], case.tensors["v_pages"]
    plan = fpa.DecodePlan(*pages, num_q_heads=4, max_num_seqs=2)
    with pytest.raises(ValueError, match="the plan is for sequences 0, got 2"):
        attend(case, plan=plan)
    plan.update(case.tensors["seq_lens"])
    with pytest.raises(ValueError, match="the plan is for sliding_window None, got 5"):
        attend(case, plan=plan, sliding_window=5)
    with pytest.raises(ValueError, match="at most 2 sequences, got 3"):
        plan.update(torch.zeros(3, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="must be int32"):
        plan.update(case.tensors["seq_lens"].long())
