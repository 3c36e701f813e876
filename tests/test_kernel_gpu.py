"""What only a GPU can show: real sizes, CUDA graphs, large pools, long sums, repeatability."""

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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True, params=DECODE_KERNELS)
def decode_kernel(request, monkeypatch):
    select_decode_kernel(request.param, monkeypatch)
    return request.param


def random_layer(
    seq_lens,
    heads=(32, 8),
    dims=(128, 128),
    page_size=128,
    dtype=torch.uint8,
    num_new=1,
    query_dtype=torch.bfloat16,
    seed=0,
):
    """A batch with random pages made on the device."""
    generator = torch.Generator("cuda").manual_seed(seed)
    (num_q_heads, num_kv_heads), (dk, dv) = heads, dims
    batch, table = len(seq_lens), max(1, -(-max(seq_lens) // page_size))
    pages = fpa.allocate(batch * table, num_kv_heads, page_size, dk, dv, dtype, "cuda")
    scales = {}
    for x, std in zip(pages, (80.0, 59.0), strict=True):
        for part in x.split(max(1, len(x) // 64)):
            values = torch.randn(part.shape, device="cuda", generator=generator)
            if dtype == torch.uint8:
                part.copy_(fpa.quantize((values * std).unflatten(-1, (1, -1)), None).flatten(-2))
            else:
                part.copy_(values)
    if dtype == torch.uint8:
        spread = torch.linspace(1, 2, num_kv_heads, device="cuda")
        scales = {"k_scale": 0.0125 * spread, "v_scale": 0.017 * spread.flip(0)}
    order = torch.randperm(batch * table, device="cuda", generator=generator)
    query = 2 * torch.randn(batch * num_new, num_q_heads, dk, device="cuda", generator=generator)
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * num_new
    return {
        "query": query.to(query_dtype),
        "k_pages": pages[0],
        "v_pages": pages[1],
        "block_table": order.int().view(batch, table),
        "cu_seqlens_q": starts,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device="cuda"),
        "max_seqlen_q": num_new,
        **scales,
    }


def attend(layer, **options):
    query, dv = layer["query"], layer["v_pages"].shape[3]
    poisoned = torch.full((*query.shape[:2], dv), float("nan"), dtype=query.dtype, device="cuda")
    return fpa.attend(**{**layer, "out": poisoned, **options})


def exact(layer, seq=0):
    """One sequence's decode output in float64."""
    page_size = layer["k_pages"].shape[2]
    n = int(layer["seq_lens"][seq])
    pages = layer["block_table"][seq, : -(-n // page_size)].long()
    k, v = fpa.to_nhd(layer["k_pages"][pages], layer["v_pages"][pages])
    if k.dtype == torch.uint8:
        k, v = (
            fpa.dequantize(x, s, dtype=torch.float64)
            for x, s in ((k, layer["k_scale"]), (v, layer["v_scale"]))
        )
    k, v = (x.flatten(0, 1)[:n].double().transpose(0, 1) for x in (k, v))  # [Hkv, n, D]
    q = layer["query"][seq].double().unflatten(0, (k.shape[0], -1))
    scores = q @ k.transpose(1, 2) * layer["query"].shape[-1] ** -0.5
    return (scores.softmax(-1) @ v).flatten(0, 1)


@pytest.mark.parametrize(
    ("heads", "dims"),
    [
        *[((32, 8), (dim, dim)) for dim in (64, 80, 96, 112, 128, 256)],
        ((16, 16), (192, 128)),
        *[(heads, (128, 128)) for heads in ((64, 8), (16, 1), (9, 3), (8, 8), (64, 1))],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
def test_shapes(heads, dims, dtype):
    query_dtype = torch.bfloat16 if dtype == torch.uint8 else dtype
    layer = random_layer([700, 1, 129], heads, dims, 64, dtype, query_dtype=query_dtype)
    out = attend(layer)
    for seq in range(3):
        assert relative_error(out[seq], exact(layer, seq)) < ERROR["accurate"]


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("around", [128, 4096])
def test_c14_lengths_around_every_boundary(around, page_size):
    lengths = [around + d for d in (-65, -64, -63, -17, -16, -15, -1, 0, 1, 15, 16, 17, 63, 64)]
    layer = random_layer(lengths, page_size=page_size)
    out = attend(layer)
    errors = [relative_error(out[i], exact(layer, i)) for i in range(len(lengths))]
    assert max(errors) < ERROR["accurate"] and max(errors) < 2 * min(errors)


@pytest.mark.parametrize("length", [1_000, 131_072, 1_000_000])
def test_error_does_not_grow_with_length(length):
    layer = random_layer([length], heads=(4, 1))
    error = relative_error(attend(layer), exact(layer))
    assert error < ERROR["accurate"]


def test_fp8_arithmetic():
    layer = random_layer([4096, 1000, 8192])
    codes = fpa.quantize(layer["query"], torch.tensor([1 / 32], device="cuda"))
    layer["query"] = codes.view(fpa.E4M3.dtype)
    layer["q_scale"] = torch.full((8,), 1 / 32, device="cuda")
    out = attend(layer, arithmetic="fp8", out=torch.empty(3, 32, 128, device="cuda"))
    values = {**layer, "query": codes.view(fpa.E4M3.dtype).float() / 32}
    for seq in range(3):
        assert relative_error(out[seq], exact(values, seq)) < ERROR["fp8"]


def test_pool_of_more_than_2_to_the_31_entries():
    layer = random_layer([300_000] * 8, heads=(8, 8))  # 2.5e9 bytes of K
    assert layer["k_pages"].numel() > 2**31
    out = attend(layer)
    assert relative_error(out[7], exact(layer, 7)) < ERROR["accurate"]
    key = torch.randn(1, 8, 128, device="cuda", dtype=torch.bfloat16)
    last = layer["k_pages"].shape[0] * 128 - 1
    for tokens in (1, 2000):
        slots = torch.full((tokens,), -1, device="cuda", dtype=torch.int64)
        slots[-1] = last
        layer["k_pages"][-1].zero_()
        fpa.store(
            key.expand(tokens, -1, -1),
            key.expand(tokens, -1, -1),
            layer["k_pages"],
            layer["v_pages"],
            slots,
        )
        assert torch.equal(layer["k_pages"][-1, :, -1], fpa.quantize(key, None)[0])


def test_a_cuda_graph_follows_changing_lengths():
    for batch, longest, kind in ((4, 3000, "few"), (64, 700, "many"), (64, 700, "short")):
        layer = random_layer([longest] * batch)
        plan = fpa.DecodePlan(
            layer["k_pages"], layer["v_pages"], num_q_heads=32, max_num_seqs=batch
        )
        out = torch.empty_like(layer["query"])
        lens = layer["seq_lens"]

        bound = 1000 if kind == "short" else None

        def step(plan=plan, layer=layer, out=out, lens=lens, bound=bound):
            plan.update(lens, bound)
            fpa.attend(**{**layer, "out": out, "plan": plan})

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
            step()
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
        for lengths in (
            [longest] * batch,
            [1] * batch,
            [0, longest] * (batch // 2),
            [(i * 37) % longest + 1 for i in range(batch)],
        ):
            lens.copy_(torch.tensor(lengths, dtype=torch.int32))
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, attend(layer, plan=plan.update(lens, bound)))
            assert plan.kind == kind
            for seq in (0, 1, batch - 1):
                if lengths[seq]:
                    assert relative_error(out[seq], exact(layer, seq)) < ERROR["accurate"]
                else:
                    assert not out[seq].any()


@pytest.mark.parametrize("seq_lens", [[1, 127, 128, 129, 4001], [700] * 40], ids=["flat", "many"])
def test_same_bits_every_time(seq_lens):
    layer = random_layer(seq_lens)
    first = attend(layer)
    for _ in range(50):
        assert torch.equal(attend(layer), first)


def test_the_two_decode_kernels_agree(monkeypatch, decode_kernel):
    if decode_kernel != "gluon":
        return
    from fp8_paged_attention import triton_backend

    layer = random_layer([4001, 17, 640])
    gluon = attend(layer)
    monkeypatch.setattr(triton_backend, "USE_GLUON", False)
    assert relative_error(gluon, attend(layer)) < ERROR["accurate"]


def test_speculative_decoding():
    lengths, new = [1000, 64, 5, 4096], 4
    layer = random_layer(lengths, num_new=new)
    out = attend(layer, sliding_window=300)
    expected = fpa.attend(**{**layer, "sliding_window": 300, "backend": "torch"})
    assert relative_error(out, expected.double()) < 2 * ERROR["accurate"]


# --- prefill ---------------------------------------------------------------------------------


def chunk_layer(seq_lens, new_tokens, **options):
    """A batch of chunks: the last new tokens of each sequence."""
    layer = random_layer(seq_lens, **options)
    starts = torch.tensor([0, *new_tokens]).cumsum(0).int().cuda()
    generator = torch.Generator("cuda").manual_seed(1)
    query = layer["query"]
    query = 2 * torch.randn(
        int(starts[-1]), *query.shape[1:], device="cuda", generator=generator
    ).to(query.dtype)
    return {**layer, "query": query, "cu_seqlens_q": starts, "max_seqlen_q": max(new_tokens)}


def prefill_error(layer, out, seqs=None):
    """Relative error over some rows of some sequences, each against its decode in float64."""
    starts, lens = layer["cu_seqlens_q"].tolist(), layer["seq_lens"].tolist()
    got, wanted = [], []
    for seq in range(len(lens)) if seqs is None else seqs:
        new = starts[seq + 1] - starts[seq]
        for row in {0, new // 3, new - 2, new - 1} - {-1}:
            alone = {
                **layer,
                "query": layer["query"][starts[seq] + row][None].expand(seq + 1, -1, -1),
                "seq_lens": layer["seq_lens"] - (new - 1 - row),
            }
            got.append(out[starts[seq] + row])
            wanted.append(exact(alone, seq))
    return relative_error(torch.stack(got), torch.stack(wanted))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "dim", "page_size"),
    [
        *[((8, 2), 128, page_size) for page_size in (16, 32, 64, 128)],
        *[((8, 2), dim, 64) for dim in (64, 80, 256)],
        *[(heads, 128, 128) for heads in ((4, 4), (16, 1))],
    ],
    ids=str,
)
def test_prefill_shapes(heads, dim, page_size, dtype):
    layer = chunk_layer(
        [700, 300, 1, 129], [300, 300, 1, 40], heads=heads, dims=(dim, dim), page_size=page_size,
        dtype=dtype,
    )  # fmt: skip
    assert prefill_error(layer, attend(layer)) < ERROR["accurate"]


def test_c14_prefill_around_every_boundary():
    around = [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257]
    for cached in (0, 1, 64, 127, 128, 129):
        layer = chunk_layer([n + cached for n in around], around, heads=(4, 2))
        out = attend(layer)
        assert out.isfinite().all()
        assert prefill_error(layer, out) < ERROR["accurate"]


@pytest.mark.parametrize("length", [1_000, 32_768, 131_072])
def test_prefill_error_does_not_grow_with_length(length):
    layer = chunk_layer([length], [130], heads=(8, 2))
    assert prefill_error(layer, attend(layer)) < 0.7 * ERROR["accurate"]
    codes = fpa.quantize(layer["query"], torch.tensor([1 / 32], device="cuda"))
    layer["query"] = codes.view(fpa.E4M3.dtype)
    layer["q_scale"] = torch.full((2,), 1 / 32, device="cuda")
    out = attend(layer, arithmetic="fp8", out=torch.empty(130, 8, 128, device="cuda"))
    layer["query"] = codes.view(fpa.E4M3.dtype).float() / 32
    assert prefill_error(layer, out) < ERROR["fp8"]


def test_chunks_equal_one_prefill_and_a_chunk_of_one_token_equals_decode():
    whole = chunk_layer([1000], [1000], heads=(8, 2))
    expected = attend(whole)
    for start, end in ((0, 300), (300, 999), (999, 1000)):
        part = {
            **whole,
            "query": whole["query"][start:end],
            "cu_seqlens_q": torch.tensor([0, end - start], dtype=torch.int32, device="cuda"),
            "seq_lens": torch.tensor([end], dtype=torch.int32, device="cuda"),
            "max_seqlen_q": end - start,
        }
        for bound in {end - start, max(end - start, 128)}:  # over 8, even a single token prefills
            out = attend(part, max_seqlen_q=bound)
            assert relative_error(out, expected[start:end].double()) < 2 * ERROR["accurate"]


def test_decodes_among_chunks_are_decoded():
    layer = chunk_layer([900, 1, 4000, 700, 64], [1, 1, 1, 300, 64], heads=(8, 2))
    plan = fpa.DecodePlan(layer["k_pages"], layer["v_pages"], num_q_heads=8, max_num_seqs=4)
    plan.update(layer["seq_lens"][:3])
    for options in ({}, {"plan": plan}):
        out = attend(layer, num_decodes=3, **options)
        assert prefill_error(layer, out) < ERROR["accurate"]


def test_prefill_gives_the_same_bits_every_time():
    layer = chunk_layer([1500, 300, 129], [700, 300, 1], heads=(8, 2))
    for arithmetic in ("accurate", "fp8"):
        first = attend(layer, arithmetic=arithmetic)
        for _ in range(20):
            assert torch.equal(attend(layer, arithmetic=arithmetic), first)


def test_queries_before_the_first_token_see_nothing():
    layer = chunk_layer([0, 20, 0], [150, 150, 1], heads=(8, 2), page_size=16)
    out = attend(layer)
    assert not out[:150].any() and not out[150:280].any() and out[280:300].any(-1).all()
    assert not out[300:].any()


@pytest.mark.parametrize("new", [100, 700])
def test_prefill_on_cached_context(new):
    case = Case(
        [1500, new],
        [new, new],
        heads=(8, 2),
        dims=(128, 128),
        page_size=64,
        query_dtype=torch.bfloat16,
        device="cuda",
    )
    torch_out = case.attend(backend="torch", query=case.tensors["query"].float())
    assert relative_error(case.attend(), torch_out) < ERROR["accurate"]
