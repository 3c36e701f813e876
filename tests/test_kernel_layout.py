"""The page layout: where a token's bytes are, and the way to vLLM's layout and back."""

import fp8_paged_attention as fpa
import pytest
import torch
from fp8_paged_attention import reference
from fp8_paged_attention.layout import GROUP, POSITION, TOKEN, v_to_tokens

DTYPES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32]


def random_pages(shape, dtype):
    """Random bits, NaN patterns included."""
    nbytes = shape[-1] * dtype.itemsize
    return torch.randint(0, 256, (*shape[:-1], nbytes), dtype=torch.uint8).view(dtype)


def bits(x):
    return x.contiguous().view(torch.uint8)


def test_positions_keep_a_matrix_instruction_threads_tokens_together():
    assert TOKEN == (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
    assert [TOKEN[p] for p in POSITION] == list(range(GROUP))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip_is_bitwise(dtype):
    k_nhd, v_nhd = random_pages((5, 48, 3, 8), dtype), random_pages((5, 48, 3, 24), dtype)
    k_pages, v_pages = fpa.from_nhd(k_nhd, v_nhd)
    assert k_pages.shape == fpa.k_page_shape(5, 3, 48, 8) == (5, 3, 48, 8)
    assert v_pages.shape == fpa.v_page_shape(5, 3, 48, 24) == (5, 3, 3, 24, 16)
    back = fpa.to_nhd(k_pages, v_pages)
    assert torch.equal(bits(back[0]), bits(k_nhd)) and torch.equal(bits(back[1]), bits(v_nhd))


def test_every_token_is_where_the_definition_says():
    k_nhd = torch.arange(2 * 32 * 2 * 4).view(2, 32, 2, 4).to(torch.uint8)
    k_pages, v_pages = fpa.from_nhd(k_nhd, k_nhd)
    for token in range(32):
        assert torch.equal(k_pages[1, :, token], k_nhd[1, token])
        assert torch.equal(v_pages[1, :, token // 16, :, POSITION[token % 16]], k_nhd[1, token])
    assert torch.equal(v_to_tokens(v_pages), k_nhd.transpose(1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_tokens_read_back_in_vllm_order(dtype):
    k_pages, v_pages = fpa.allocate(3, 2, 16, 8, 4, dtype)
    key, value = torch.randn(20, 2, 8), torch.randn(20, 2, 4)
    slots = torch.arange(20) + 16
    reference.store(key, value, k_pages, v_pages, slots)
    k_nhd, v_nhd = fpa.to_nhd(k_pages, v_pages)
    stored = [fpa.quantize(x, None) if dtype == torch.uint8 else x.to(dtype) for x in (key, value)]
    assert torch.equal(bits(k_nhd.flatten(0, 1)[16:36]), bits(stored[0]))
    assert torch.equal(bits(v_nhd.flatten(0, 1)[16:36]), bits(stored[1]))


def test_page_bytes_counts_what_allocate_allocates():
    pages = fpa.allocate(7, 3, 32, 192, 128, torch.uint8)
    assert fpa.page_bytes(3, 32, 192, 128, torch.uint8) * 7 == sum(p.nbytes for p in pages)
    assert fpa.page_bytes(8, 16, 128, 128, torch.bfloat16) == 8 * 16 * 256 * 2


@pytest.mark.parametrize("page_size", [0, 8, 24])
def test_page_size_must_be_a_multiple_of_16(page_size):
    with pytest.raises(ValueError, match=f"multiple of 16, got {page_size}"):
        fpa.allocate(1, 1, page_size, 8, 8, torch.uint8)


def test_pages_of_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        fpa.allocate(1, 1, 16, 8, 8, torch.float64)
