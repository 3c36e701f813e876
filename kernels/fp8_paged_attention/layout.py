"""The page layout: where the bytes of a token's K and V lie.

What
    A layer's cache is two tensors of pages. A *page* holds ``page_size`` consecutive tokens of
    one sequence; a block table maps a sequence's pages to page numbers; the *slot* of a token is
    ``page_number * page_size + offset``.

    ======= ======================================================== ===========================
    tensor  shape                                                    fastest axis
    ======= ======================================================== ===========================
    K pages `[num_pages, num_kv_heads, page_size, head_dim_k]`       dims of one token
    V pages `[num_pages, num_kv_heads, page_size/16, head_dim_v, 16]` 16 tokens of one dim
    ======= ======================================================== ===========================

    FP8 pages are uint8, native pages bfloat16, float16 or float32; the layout is the same.

How V is laid out
    1. Each run of 16 tokens of a page is a *group*; a group is stored transposed, `[head_dim, 16]`.
    2. Inside a group, token ``8j + 2q + e`` (j, e in 0..1, q in 0..3) lies at position
       ``4q + 2j + e``: 0 1 8 9 | 2 3 10 11 | 4 5 12 13 | 6 7 14 15.

Why
    Hopper's FP8 matrix instruction takes operands from shared memory only if the summed axis is
    contiguous. Scores sum over dims, so K wants its dims contiguous, which is how tokens arrive.
    The output sums over *tokens*, so V wants its tokens contiguous: stored token-major it would
    have to be transposed byte by byte on every read, which is three times slower in decode. Pages
    are read thousands of times for each time they are written, so the writer transposes.

    Why groups of 16 and not whole pages: the bytes that one decode step writes lie in
    ``16 * head_dim`` consecutive bytes instead of being spread over the page, and the next 15 steps
    write beside them. Each write is one byte, what costs is the 32-byte sector around it: appending
    is ten times cheaper than into a page transposed as a whole. Reading loses nothing: a group is
    contiguous, and its 8 x 16-byte pieces are what ``ldmatrix`` takes from shared memory.

    Why the order inside a group: after Q K^T a thread of a matrix instruction holds, of each 16
    tokens, the pairs ``2q, 2q+1`` and ``8+2q, 8+2q+1``. As FP8 operand of the next instruction it
    must hold four consecutive positions. Storing those four tokens next to each other makes the
    probabilities usable in place; the sum over tokens does not care about order.

Left out
    Interleaving K with V in one tensor (heads of different sizes would then need padding), and
    layouts with the head axis outside (a page would no longer be one transfer).
"""

import torch

GROUP = 16
"""Tokens in a transposed group of V; page sizes are multiples of it."""

DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)

# TOKEN[p] is the token at position p of a group, POSITION[t] the position of token t.
TOKEN = tuple(8 * ((p >> 1) & 1) + 2 * (p >> 2) + (p & 1) for p in range(GROUP))
POSITION = tuple(TOKEN.index(t) for t in range(GROUP))


def k_page_shape(num_pages: int, num_kv_heads: int, page_size: int, head_dim: int) -> tuple:
    """Shape of the tensor of K pages."""
    _check_page_size(page_size)
    return num_pages, num_kv_heads, page_size, head_dim


def v_page_shape(num_pages: int, num_kv_heads: int, page_size: int, head_dim: int) -> tuple:
    """Shape of the tensor of V pages."""
    _check_page_size(page_size)
    return num_pages, num_kv_heads, page_size // GROUP, head_dim, GROUP


def page_bytes(
    num_kv_heads: int,
    page_size: int,
    head_dim_k: int,
    head_dim_v: int,
    dtype: torch.dtype,
    v_dtype: torch.dtype | None = None,
) -> int:
    """Bytes of one page, K and V together; `v_dtype` where V's differs."""
    _check_page_size(page_size)
    bytes_k, bytes_v = dtype.itemsize, (v_dtype or dtype).itemsize
    return num_kv_heads * page_size * (head_dim_k * bytes_k + head_dim_v * bytes_v)


def allocate(
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim_k: int,
    head_dim_v: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    v_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeroed K and V pages of one layer.

    Args:
        num_pages: pages in the pool.
        num_kv_heads: KV heads of the layer.
        page_size: tokens a page; a multiple of 16.
        head_dim_k, head_dim_v: sizes of a K and of a V head.
        dtype: ``torch.uint8`` for FP8, else bfloat16, float16 or float32.
        device: where the pages live.
        v_dtype: of V pages, where it differs from that of K pages.

    Returns:
        K pages `[num_pages, num_kv_heads, page_size, head_dim_k]` and
        V pages `[num_pages, num_kv_heads, page_size / 16, head_dim_v, 16]`.

    Raises:
        ValueError: the page size is no multiple of 16, or pages cannot have this dtype.
    """
    v_dtype = v_dtype or dtype
    for kind in (dtype, v_dtype):
        if kind not in DTYPES:
            raise ValueError(f"pages must be one of {', '.join(map(str, DTYPES))}, got {kind}")
    k_shape = k_page_shape(num_pages, num_kv_heads, page_size, head_dim_k)
    v_shape = v_page_shape(num_pages, num_kv_heads, page_size, head_dim_v)
    return (
        torch.zeros(k_shape, dtype=dtype, device=device),
        torch.zeros(v_shape, dtype=v_dtype, device=device),
    )


def v_to_tokens(v_pages: torch.Tensor) -> torch.Tensor:
    """V pages as `[..., num_kv_heads, page_size, head_dim]` with tokens in order (a copy)."""
    # Positions 4q + 2j + e become tokens 8j + 2q + e.
    *lead, groups, head_dim, _ = v_pages.shape
    v = v_pages.reshape(*lead, groups, head_dim, 4, 2, 2)
    n = len(lead)
    v = v.permute(*range(n), n, n + 3, n + 2, n + 4, n + 1)
    return v.reshape(*lead, groups * GROUP, head_dim)


def from_nhd(k_nhd: torch.Tensor, v_nhd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages in vLLM's NHD layout as ours; the bytes of every value are kept.

    Args:
        k_nhd: `[num_pages, page_size, num_kv_heads, head_dim_k]`.
        v_nhd: `[num_pages, page_size, num_kv_heads, head_dim_v]`.

    Returns:
        New tensors of K pages and V pages in the layout above.

    Raises:
        ValueError: the page size is no multiple of 16.
    """
    num_pages, page_size, num_kv_heads, head_dim = v_nhd.shape
    _check_page_size(page_size)
    v = v_nhd.reshape(num_pages, page_size // GROUP, 2, 4, 2, num_kv_heads, head_dim)
    v = v.permute(0, 5, 1, 6, 3, 2, 4)
    return (
        k_nhd.transpose(1, 2).contiguous(),
        v.reshape(v_page_shape(num_pages, num_kv_heads, page_size, head_dim)),
    )


def to_nhd(k_pages: torch.Tensor, v_pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Our pages in vLLM's NHD layout: the inverse of :func:`from_nhd`."""
    return k_pages.transpose(1, 2).contiguous(), v_to_tokens(v_pages).transpose(1, 2).contiguous()


def _check_page_size(page_size: int) -> None:
    if page_size < GROUP or page_size % GROUP:
        raise ValueError(f"page_size must be a multiple of {GROUP}, got {page_size}")
