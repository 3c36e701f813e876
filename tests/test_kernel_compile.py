"""The kernels compile for GPUs that are not here, to the instructions they are written for."""

import pytest
from kernel_compile import compile_all

pytest.importorskip("triton", reason="CPU builds of torch come without triton")

WIDE = {"MODE": 2, "COLUMNS": 16, "TILE": 64}
PRE_FP8 = {"CAST": False, "PDL": False}
VARIANTS = [
    {"kernel": "decode_hopper", "arch": 90},
    {"kernel": "decode_hopper", "arch": 90, "MODE": 1, "Q_FP8": True, "Q_SCALE": True},
    {
        "kernel": "decode_hopper",
        "arch": 90,
        "PAGE": 16,
        "FORMAT": 2,
        "DK": 80,
        "DV": 80,
        "WINDOW": True,
        "SOFTCAP": True,
        "SINKS": True,
    },
    {
        "kernel": "decode_hopper",
        "arch": 90,
        **WIDE,
        "FORMAT": 0,
        "DOT": "bf16",
        "COLUMNS": 8,
        "K_SCALE": False,
        "V_SCALE": False,
    },
    {"kernel": "prefill_hopper", "arch": 90},
    {"kernel": "prefill_hopper", "arch": 90, "wide": False, "fp8_query": True, "q_scale": True},
    {
        "kernel": "prefill_hopper",
        "arch": 90,
        "fp8_pages": False,
        "k_scale": False,
        "v_scale": False,
        "window": True,
        "softcap": True,
        "sinks": True,
    },
    {"kernel": "decode", "arch": 80, **WIDE, **PRE_FP8},
    {"kernel": "decode", "arch": 80, **WIDE, **PRE_FP8, "FORMAT": 0, "DOT": "bf16"},
    {"kernel": "decode", "arch": 89, "TILE": 64, "PDL": False},
    {"kernel": "decode", "arch": 90, "TILE": 64},
    {"kernel": "decode", "arch": 100, "TILE": 64},
    *({"kernel": "prefill", "arch": arch, "CAST": arch > 80} for arch in (80, 89, 90, 100)),
    *(
        {"kernel": kernel, "arch": arch, "CAST": arch > 80}
        for kernel in ("store_tokens", "store_groups")
        for arch in (80, 90)
    ),
    {"kernel": "join", "arch": 80, "PDL": False},
    {"kernel": "join", "arch": 100},
    {"kernel": "plan", "arch": 80},
    {"kernel": "plan", "arch": 90, "MANY": True, "SEQS": 256},
]


@pytest.fixture(scope="module")
def reports():
    return compile_all(VARIANTS)


def test_all_variants_compile_without_spilling_much(reports):
    assert len(reports) == len(VARIANTS)
    for report in reports:
        # The copying warp of prefill_hopper has few registers, for work that is rare.
        most = 512 if report["kernel"] == "prefill_hopper" else 64
        assert report["local"] == 0 and report["stack"] <= most, report


def test_nothing_is_hit_by_the_fault_of_ptxas(reports):
    assert not [report for report in reports if report["faults"]]


def test_hopper_decodes_on_its_fp8_matrix_instruction(reports):
    for report in reports:
        if report["kernel"] == "decode_hopper":
            instruction = "HGMMA" if report.get("FORMAT") == 0 else "QGMMA"
            assert report[instruction] > 0 and "HMMA" not in report
            assert report["shared"] <= 113 << 10  # two programs on a multiprocessor


def test_hopper_prefills_on_matrix_instructions_and_the_copy_engine(reports):
    accurate, fp8, native = (r for r in reports if r["kernel"] == "prefill_hopper")
    assert fp8["QGMMA"] > 0 and "HGMMA" not in fp8  # both products in FP8
    assert accurate["QGMMA"] > 0 and accurate["HGMMA"] > 0  # Q K^T in FP8, P V in 16 bits
    assert native["HGMMA"] > 0 and "QGMMA" not in native
    for report in (accurate, fp8, native):
        assert "HMMA" not in report and report["UTMALDG"] >= 2
        assert report["shared"] <= 227 << 10


def test_copies_to_shared_memory_are_asynchronous(reports):
    for report in reports:
        if report["kernel"].startswith("decode"):
            assert report["LDGSTS"] >= 8, report
