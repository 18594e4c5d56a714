"""Casts and sums: equal to torch's, and the same bits on every device."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from workers.arithmetic import NumpyArithmetic
from workers.dtypes import ELEMENT_TYPES
from workers.engines.gpu import TorchArithmetic
from workers.plan import WORKING_COPIES

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SPECIAL_F32 = np.array(
    [0, 0x80000000, 1, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x477FF000],
    dtype=np.uint32,
)
NANS_F32 = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF, 0x7F80FFFF], dtype=np.uint32)


def patterns(dtype: str) -> np.ndarray[Any, Any]:
    """Elements of a dtype: all of the 16-bit ones, many of the others, none of them NaN."""
    rng = np.random.default_rng(0)
    if dtype in ("BF16", "F16"):
        values = np.arange(1 << 16, dtype=np.uint16)
    elif dtype == "F32":
        values = np.concatenate((SPECIAL_F32, rng.integers(0, 2**32, 200_001, dtype=np.uint32)))
    else:
        values = rng.integers(0, 2**64, 50_001, dtype=np.uint64)
    numbers = torch.from_numpy(values.view(np.dtype(f"i{values.itemsize}"))).view(TORCH[dtype])
    return values[~torch.isnan(numbers).numpy()]


def cast(values: np.ndarray[Any, Any], source: str, target: str, arithmetic: Any) -> np.ndarray[Any, Any]:
    out = np.empty(values.shape, dtype=ELEMENT_TYPES[target].numpy_type)
    arithmetic.cast(values, source, out, target)
    return out


@pytest.mark.parametrize("target", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("source", sorted(TORCH))
def test_casts_round_as_torch_does(source: str, target: str) -> None:
    values = patterns(source)
    wanted = torch.from_numpy(values.view(np.dtype(f"i{values.itemsize}"))).view(TORCH[source]).to(TORCH[target])
    bits = wanted.view({2: torch.int16, 4: torch.int32}[wanted.element_size()]).numpy()
    found = cast(values, source, target, NumpyArithmetic())
    assert (found == bits.view(found.dtype)).all()


def test_a_nan_stays_a_quiet_nan_of_its_sign() -> None:
    found = cast(NANS_F32, "F32", "BF16", NumpyArithmetic())
    assert [hex(value) for value in found] == ["0x7fc0", "0xffc0", "0x7fc0", "0xffc0", "0x7fc0", "0x7fc0"]


def test_the_devices_agree_on_every_bit() -> None:
    values = np.concatenate((SPECIAL_F32, NANS_F32, np.random.default_rng(1).integers(0, 2**32, 100_000, np.uint32)))
    assert (
        cast(values, "F32", "BF16", TorchArithmetic("cpu")) == cast(values, "F32", "BF16", NumpyArithmetic())
    ).all()


def test_a_cast_fills_a_view_that_is_not_contiguous() -> None:
    values = patterns("F32")[:24].reshape(4, 6)
    out = np.zeros((6, 4), dtype=np.uint16).T
    NumpyArithmetic().cast(values, "F32", out, "BF16")
    assert (out == cast(values, "F32", "BF16", NumpyArithmetic())).all()


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
def test_every_float8_has_torchs_value(kind: str) -> None:
    values = np.arange(256, dtype=np.uint8)
    torch_type = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}[kind]
    wanted = torch.from_numpy(values).view(torch_type).float().numpy()
    np.testing.assert_array_equal(NumpyArithmetic().as_float32(values, kind), wanted)


@pytest.mark.parametrize("arithmetic", [NumpyArithmetic(), TorchArithmetic("cpu")], ids=["numpy", "torch"])
def test_a_lora_sum_is_within_the_stated_tolerance(arithmetic: Any) -> None:
    rng = np.random.default_rng(2)
    base, b, a = (rng.standard_normal(shape).astype(np.float32) for shape in [(96, 64), (96, 8), (8, 64)])
    out = np.empty((96, 64), dtype=np.uint32)
    operands = tuple((values.view(np.uint32), "F32") for values in (base, a, b))
    arithmetic.add_lora(operands, 3.0, out, "F32")
    exact = base.astype(np.float64) + 3.0 * (b.astype(np.float64) @ a.astype(np.float64))
    np.testing.assert_allclose(out.view(np.float32), exact, rtol=1e-5, atol=1e-5)


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that a call holds at most, beside what is there before it."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def planned(elements: int) -> int:
    """What a plan counts for a block, in elements of the widest type on the way, operands and result among them."""
    return WORKING_COPIES * 4 * elements + (1 << 20)


def test_a_lora_sum_holds_no_more_than_a_plan_counts() -> None:
    rows, columns, rank = 256, 4096, 8
    base = np.zeros((rows, columns), dtype=np.uint16)
    operands = (
        (base, "BF16"),
        (np.ones((rank, columns), dtype=np.float32).view(np.uint32), "F32"),
        (np.ones((rows, rank), dtype=np.float32).view(np.uint32), "F32"),
    )
    out = np.empty((rows, columns), dtype=np.uint16)
    peak = peak_of(lambda: NumpyArithmetic().add_lora(operands, 2.0, out, "BF16"))
    assert peak + base.nbytes + out.nbytes <= planned(base.size)


def test_a_product_holds_no_more_than_a_plan_counts_and_leaves_its_operands_alone() -> None:
    values = np.full((256, 4096), 0x38, dtype=np.uint8)  # 1.0
    factors = np.full(values.shape, 3, dtype=np.float32).view(np.uint32)
    out = np.empty(values.shape, dtype=np.uint16)
    peak = peak_of(lambda: NumpyArithmetic().multiply((values, "F8_E4M3"), (factors, "F32"), out, "BF16"))
    assert peak + values.nbytes + factors.nbytes + out.nbytes <= planned(values.size)
    assert (out == 0x4040).all()
    NumpyArithmetic().multiply((factors, "F32"), (factors, "F32"), out, "BF16")
    assert (factors.view(np.float32) == 3).all()
    assert (out == 0x4110).all()
