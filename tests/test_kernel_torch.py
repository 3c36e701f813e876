"""The torch backend against the float64 reference on the same pages, and the reference itself
against torch's attention where that can say the same."""

import fp8_paged_attention as fpa
import pytest
import torch
import torch.nn.functional as F
from fp8_paged_attention import reference, torch_plan
from kernel_cases import ERROR, Case, relative_error

# Lengths around pages and 16-token groups, an empty sequence, decode, chunks and whole prompts.
RAGGED = {"seq_lens": [1, 15, 16, 17, 0, 50], "new_tokens": [1, 1, 1, 1, 1, 1]}
MIXED = {"seq_lens": [40, 33, 12, 21, 1], "new_tokens": [40, 10, 3, 1, 1]}
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window": {"sliding_window": 7},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 3, 4)},
    "all": {"sliding_window": 18, "softcap": 2.0, "sinks": torch.linspace(-1, 3, 4)},
}
STEP = ("block_table", "cu_seqlens_q", "seq_lens")


def step_plan(case, window=None):
    pages = case.tensors["k_pages"], case.tensors["v_pages"]
    plan = fpa.StepPlan(*pages, sliding_window=window)
    return plan.update(*(case.tensors[name] for name in STEP))


# --- the oracle ------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
def test_reference_equals_torch_attention(window):
    case = Case(**MIXED, heads=(4, 2), pages_dtype=torch.float32)
    out = case.reference(sliding_window=window)
    starts = case.tensors["cu_seqlens_q"].tolist()
    first_key = 0
    for b, (n, new) in enumerate(zip(case.seq_lens, case.new_tokens, strict=True)):
        rows = slice(first_key, first_key + n)
        k, v = (x[rows].double().transpose(0, 1) for x in (case.keys, case.values))
        q = case.tensors["query"][starts[b] : starts[b + 1]].double().transpose(0, 1)
        distance = torch.arange(n - new, n)[:, None] - torch.arange(n)
        mask = (distance >= 0) & (distance < (window or n))
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(out[starts[b] : starts[b + 1]], expected.transpose(0, 1))
        first_key += n


def test_reference_sink_takes_its_share_of_the_softmax():
    case = Case([1], [1], heads=(1, 1), pages_dtype=torch.float32)
    q = case.tensors["query"] * 0  # score 0 beside a sink of 0: half of the weight is the sink's
    out = case.reference(query=q, sinks=torch.zeros(1))
    torch.testing.assert_close(out[0], case.values[0].double() / 2)


# --- store -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("strategy", [1, 4], ids=["tensor", "head"])
def test_store_is_bitwise_the_clamped_cast_of_every_bit_pattern(fp8_format, dtype, strategy):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).view(256, 4, 64)
    scale = torch.tensor([0.37, 2.0, 0.01, 1.0])[:strategy]
    pages = fpa.allocate(16, 4, 16, 64, 64, torch.uint8)
    fpa.store(x, x, *pages, torch.arange(256), scale, scale, fp8_format=fp8_format)
    fmt = fpa.FORMATS[fp8_format]
    expected = (x.float() / scale[:, None]).clamp(-fmt.max, fmt.max).to(fmt.dtype)
    for nhd in fpa.to_nhd(*pages):
        assert torch.equal(nhd.flatten(0, 1), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
def test_store_writes_its_slots_and_nothing_else(dtype):
    key, value = torch.randn(6, 3, 10), torch.randn(6, 3, 12)
    slots = torch.tensor([5, -1, 63, 16, -1, 40], dtype=torch.int32)
    scales = [torch.tensor([0.1, 1.0, 10.0])] * 2 if dtype == torch.uint8 else []
    ours, theirs = (fpa.allocate(4, 3, 16, 10, 12, dtype) for _ in range(2))
    for x in (*ours, *theirs):
        x.fill_(7)
    fpa.store(key, value, *ours, slots, *scales)
    reference.store(key, value, *theirs, slots, *scales)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert (fpa.to_nhd(*ours)[0] == 7).all(-1).all(-1).sum() == 60


def test_store_takes_slices_of_a_fused_projection():
    fused = torch.randn(5, 3, 3 * 16)
    key, value = fused[..., 16:32], fused[..., 32:]
    a, b = (fpa.allocate(1, 3, 16, 16, 16, torch.uint8) for _ in range(2))
    fpa.store(key, value, *a, torch.arange(5))
    fpa.store(key.contiguous(), value.contiguous(), *b, torch.arange(5))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


# --- attend ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("lengths", [RAGGED, MIXED], ids=["ragged", "mixed"])
@pytest.mark.parametrize("pages", [torch.uint8, torch.float32], ids=["fp8", "native"])
def test_attend_equals_the_reference(pages, lengths, options):
    case = Case(**lengths, pages_dtype=pages)
    assert relative_error(case.attend(**options), case.reference(**options)) < ERROR["float32"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("fp8_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("strategy", ["tensor", "head"])
def test_accurate_arithmetic_with_16_bit_queries(dtype, fp8_format, strategy):
    case = Case(**MIXED, query_dtype=dtype, fp8_format=fp8_format, scales=(strategy, 0.02, 0.5))
    out = case.attend()
    assert out.dtype == dtype
    assert relative_error(out, case.reference()) < ERROR["accurate"]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_fp8_arithmetic_is_near_the_reference_on_quantised_queries(options):
    case = Case([300, 200], [4, 20], heads=(4, 2))
    q_scale = torch.tensor([1.0, 100.0]) / 100
    codes = fpa.quantize(case.tensors["query"].unflatten(1, (2, 2)), q_scale[:, None])
    values = fpa.dequantize(codes, q_scale[:, None]).flatten(1, 2)
    expected = case.reference(query=values, **options)
    out = case.attend(arithmetic="fp8", q_scale=q_scale, **options)
    assert 1e-4 < relative_error(out, expected) < ERROR["fp8"]
    given = codes.flatten(1, 2).view(fpa.E4M3.dtype)
    again = case.attend(
        query=given, arithmetic="fp8", q_scale=q_scale, out=torch.empty_like(out), **options
    )
    assert torch.equal(again, out)
    accurate = case.attend(query=given, q_scale=q_scale, out=torch.empty_like(out), **options)
    assert relative_error(accurate, expected) < ERROR["float32"]


@pytest.mark.parametrize(
    "dims", [(64, 64), (80, 80), (96, 96), (112, 112), (256, 256), (192, 128)], ids=str
)
@pytest.mark.parametrize("heads", [(8, 1), (4, 4), (9, 3)], ids=str)
def test_c19_head_sizes(dims, heads):
    case = Case([33, 20], [1, 20], heads=heads, dims=dims, page_size=32)
    assert relative_error(case.attend(), case.reference()) < ERROR["float32"]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1025])
def test_c14_error_does_not_jump_at_a_boundary(length):
    case = Case([length, 70], [1, 1], heads=(2, 1), page_size=32)
    assert relative_error(case.attend(), case.reference()) < ERROR["float32"]


def test_c10_moving_a_power_of_two_between_values_and_scales_changes_nothing():
    case = Case(**MIXED)
    out = case.attend()
    pages = [torch.zeros_like(case.tensors[name]) for name in ("k_pages", "v_pages")]
    scales = {name: scale * 4 for name, scale in case.scale_args.items()}
    fpa.store(case.keys * 4, case.values * 4, *pages, case.slots, **scales)
    moved = case.attend(
        query=case.tensors["query"] / 4, k_pages=pages[0], v_pages=pages[1], **scales
    )
    assert torch.equal(moved, out * 4)
    ignored = case.attend(v_scale=case.scale_args["v_scale"] * 4)
    assert relative_error(ignored, out * 4) < 1e-6


def test_c11_k_and_v_and_heads_keep_their_own_scales():
    case = Case([60], [1], heads=(4, 4), scales=("head", 0.5, 2.0))
    scales = case.scale_args
    assert relative_error(case.attend(), case.reference()) < ERROR["float32"]
    swapped = case.attend(k_scale=scales["v_scale"], v_scale=scales["k_scale"])
    assert relative_error(swapped, case.reference()) > 0.5
    for head in range(4):  # one head's scale moves that head only
        v_scale = scales["v_scale"].clone()
        v_scale[head] *= 2
        changed = (case.attend(v_scale=v_scale) != case.attend()).any(-1)[0]
        assert changed.tolist() == [i == head for i in range(4)]


def test_moving_pages_changes_nothing():
    case = Case(**MIXED)
    order = torch.randperm(len(case.tensors["k_pages"]))
    moved = case.attend(
        k_pages=case.tensors["k_pages"][order.argsort()],
        v_pages=case.tensors["v_pages"][order.argsort()],
        block_table=order[case.tensors["block_table"].long()].int(),
    )
    assert torch.equal(case.attend(), moved)


def test_tokens_before_the_window_may_be_gone():
    case = Case([100, 60], [1, 3])
    expected = case.attend(sliding_window=10)
    table = case.tensors["block_table"].clone()
    table[0, :5] = -1  # 90..99 are seen: page 5 and later
    table[1, :3] = -1  # 48..59
    k_pages = case.tensors["k_pages"].clone()
    k_pages[table[0, 5], :, :10] = 0x7F  # and in the first page seen, tokens 80..89
    assert torch.equal(case.attend(sliding_window=10, block_table=table, k_pages=k_pages), expected)


def test_prefill_in_chunks_equals_prefill_at_once():
    whole = Case([50], [50])
    at_once = whole.attend()
    for start, end in ((0, 20), (20, 21), (21, 50)):
        chunk = whole.attend(
            query=whole.tensors["query"][start:end],
            cu_seqlens_q=torch.tensor([0, end - start]).int(),
            seq_lens=torch.tensor([end]).int(),
        )
        assert relative_error(chunk, at_once[start:end]) < ERROR["float32"]


@pytest.mark.parametrize("window", [None, 7])
def test_decodes_in_parts_equal_the_reference(window, monkeypatch):
    """When what a step sees is more than is gathered at a time; one that has no tokens is last."""
    monkeypatch.setattr(torch_plan, "MAX_GATHERED", 4 * 16 * 2 * 64 * 2)  # two groups of two heads
    case = Case([70, 33, 100, 0], [1, 1, 1, 1], page_size=32)
    plan = step_plan(case, window)
    assert len(plan.decodes.parts) == (3 if window else 8)
    out = case.attend(sliding_window=window, plan=plan)
    assert relative_error(out, case.reference(sliding_window=window)) < ERROR["float32"]


def test_a_plan_serves_steps_and_layers():
    """One after the other, of other lengths; and the slots of both."""
    case, longer = Case(**MIXED), Case([90, 5, 60, 21, 33], [1, 5, 1, 1, 33])
    plan = fpa.StepPlan(case.tensors["k_pages"], case.tensors["v_pages"])
    for step in (case, longer, case):
        tensors = step.tensors
        plan.update(*(tensors[name] for name in STEP), step.slots)
        assert torch.equal(step.attend(plan=plan), step.attend())
        pages = [torch.zeros_like(tensors[name]) for name in ("k_pages", "v_pages")]
        again = [torch.zeros_like(x) for x in pages]
        scales = step.scale_args
        fpa.store(step.keys, step.values, *pages, step.slots, **scales)
        fpa.store(step.keys, step.values, *again, step.slots, **scales, plan=plan)
        assert all(torch.equal(a, b) for a, b in zip(pages, again, strict=True))


def test_rows_that_see_nothing_are_zero():
    case = Case([0, 2, 5], [1, 4, 1])  # an empty sequence, and more queries than tokens
    out = case.attend(out=torch.full_like(case.tensors["query"], torch.nan))
    assert (out[:3] == 0).all() and (out[3:] != 0).all()


def test_an_empty_batch():
    case = Case([4], [1])
    out = case.attend(
        query=case.tensors["query"][:0],
        block_table=torch.zeros(0, 1).int(),
        cu_seqlens_q=torch.zeros(1).int(),
        seq_lens=torch.zeros(0).int(),
    )
    assert out.shape == (0, 4, 64)


# --- refusals --------------------------------------------------------------------------------


def test_a_plan_for_something_else_is_refused():
    case = Case([5, 6], [1, 1])
    plan = step_plan(case)
    with pytest.raises(ValueError, match="for sliding_window None, got 5"):
        case.attend(plan=plan, sliding_window=5)
    with pytest.raises(ValueError, match="not updated with this block_table"):
        case.attend(plan=plan, seq_lens=case.tensors["seq_lens"].clone())
    with pytest.raises(ValueError, match="not updated with this slot_mapping"):
        pages = case.tensors["k_pages"], case.tensors["v_pages"]
        fpa.store(case.keys, case.values, *pages, case.slots, plan=plan)
    with pytest.raises(ValueError, match=r"for pages of \[2, 16, 64\] and .* got \[4, 16, 64\]"):
        Case([5, 6], [1, 1], heads=(4, 4)).attend(plan=plan)
    with pytest.raises(ValueError, match="must be a StepPlan, got 'plan'"):
        case.attend(plan="plan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 3, 64)}, r"multiple of the 2 KV heads, got \[2, 3, 64\]"),
        ({"query": torch.zeros(2, 4, 32)}, r"query must have shape \[2, 4, 64\], got \[2, 4, 32\]"),
        ({"query": torch.zeros(2, 4, 64).double()}, r"query must be .* got torch\.float64"),
        ({"query": torch.zeros(2, 64, 4).transpose(1, 2)}, "contiguous in its last axis"),
        ({"block_table": torch.zeros(1, 4).int()}, r"block_table must have shape \[2, 4\]"),
        ({"block_table": torch.zeros(2, 4).long()}, r"block_table must be torch\.int32, got"),
        ({"cu_seqlens_q": torch.zeros(2).int()}, r"cu_seqlens_q must have shape \[3\], got \[2\]"),
        ({"k_scale": torch.ones(3)}, r"k_scale must have shape \[2\], got \[3\]"),
        ({"v_scale": torch.ones(2).half()}, r"v_scale must be torch\.float32"),
        ({"sinks": torch.zeros(2)}, r"sinks must have shape \[4\]"),
        ({"arithmetic": "exact"}, r"\('accurate', 'fp8'\), got 'exact'"),
        ({"fp8_format": "fp8"}, "fp8_format must be one of"),
        ({"q_scale": torch.ones(1)}, "q_scale is for float8 queries or arithmetic 'fp8'"),
        ({"sliding_window": 0}, "sliding_window must be positive, got 0"),
        ({"softcap": -1.0}, r"softcap must be positive, got -1\.0"),
        ({"backend": "triton", "k_scale": None}, "needs CUDA tensors, got pages on cpu"),
        ({"backend": "cuda"}, r"backend must be one of .* got 'cuda'"),
        ({"seq_lens": torch.zeros(2).int().to("meta")}, "seq_lens must be on cpu"),
    ],
)
def test_attend_refuses(change, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = Case([5, 6], [1, 1])
    with pytest.raises(ValueError, match=message):
        case.attend(**change)


def test_native_pages_take_no_scales_and_no_fp8_arithmetic():
    case = Case([5], [1], pages_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"k_scale is for FP8 \(uint8\) pages, got pages of"):
        case.attend(k_scale=torch.ones(1))
    with pytest.raises(ValueError, match=r"arithmetic 'fp8' needs FP8 \(uint8\) pages"):
        case.attend(arithmetic="fp8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(3, 2, 8)}, r"key must have shape \[3, 2, 16\], got \[3, 2, 8\]"),
        ({"value": torch.zeros(2, 2, 16)}, r"value must have shape \[3, 2, 16\]"),
        ({"slot_mapping": torch.zeros(3)}, "slot_mapping must be"),
        ({"slot_mapping": torch.zeros(2).int()}, r"slot_mapping must have shape \[3\], got \[2\]"),
        (
            {"k_pages": torch.zeros(4, 16, 2, 16).byte()},
            "page_size must be a multiple of 16, got 2",
        ),
        (
            {"k_pages": torch.zeros(4, 2, 32, 16).byte()},
            r"v_pages must have shape \[4, 2, 2, 16, 16\]",
        ),
        ({"k_pages": torch.zeros(4, 2, 16, 32).byte()[..., ::2]}, "contiguous"),
        ({"v_pages": torch.zeros(4, 2, 16, 16).byte()}, "v_pages"),
        ({"fp8_format": "nvfp4"}, "got 'nvfp4'"),
    ],
)
def test_store_refuses(change, message):
    k_pages, v_pages = fpa.allocate(4, 2, 16, 16, 16, torch.uint8)
    args = {
        "key": torch.zeros(3, 2, 16),
        "value": torch.zeros(3, 2, 16),
        "k_pages": k_pages,
        "v_pages": v_pages,
        "slot_mapping": torch.zeros(3).int(),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        fpa.store(**args)
