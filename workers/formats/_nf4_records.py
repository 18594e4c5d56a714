"""NF4 tensors of torchao in a pickle: what they consist of, checked.

Source: torchao ``dtypes/nf4tensor.py`` (``__tensor_flatten__``), torch ``_tensor.py`` (``_rebuild_from_type_v2``).
"""

from __future__ import annotations

from math import prod
from typing import NoReturn

from workers.checkpoint import PackedTensor
from workers.errors import CorruptFile
from workers.geometry import MOST_DIMENSIONS
from workers.nf4 import PARTS, VALUES
from workers.pickle_records import DType, Record, TensorRecord, is_count
from workers.shown import shown

KIND = "NF4Tensor"
_DTYPES = ("BF16", "F16", "F32")


def nf4_parts(record: Record, name: str, file: str) -> tuple[PackedTensor, dict[str, TensorRecord]]:
    """The tensor and its parts by their names. Raises ``CorruptFile`` where they don't fit together."""
    args = record.args
    dtype = next((value.name for value in args if type(value) is DType), None)
    shape = next((value for value in args if type(value) is tuple), None)
    block, scalers = record.get("block_size"), record.get("scaler_block_size")
    if dtype not in _DTYPES or shape is None or len(shape) > MOST_DIMENSIONS or not all(map(is_count, shape)):
        _refuse(name, file, "a dtype and a shape", f"{shown(dtype, 40)} {shown(shape, 40)}")
    if not is_count(block) or not is_count(scalers) or not block or not scalers:
        _refuse(
            name, file, "sizes of blocks", f"block_size {shown(block, 40)}, scaler_block_size {shown(scalers, 40)}"
        )
    parts = {part: record.get(part) for part in PARTS}
    blocks = -(-prod(shape) // block)
    expected: dict[str, tuple[tuple[int, ...], str]] = {
        "quantized_data": ((-(-prod(shape) // 2),), "U8"),
        "quantized_scalers": ((blocks,), "I8"),
        "quantization_factor": ((-(-blocks // scalers),), dtype),
        "scaler_mean": ((), dtype),
        "nf4": ((VALUES,), dtype),
    }
    for part, (wanted, kind) in expected.items():
        found = parts[part]
        if not isinstance(found, TensorRecord) or (found.shape, found.dtype) != (wanted, kind):
            told = f"{found.dtype} {list(found.shape)}" if isinstance(found, TensorRecord) else type(found).__name__
            _refuse(name, file, f"{part} as {kind} {list(wanted)}", told)
    return PackedTensor(name, dtype, shape, block, scalers), parts


def _refuse(name: str, file: str, expected: str, found: str) -> NoReturn:
    raise CorruptFile(
        f"{file}: the NF4 tensor {name} does not fit together: expected {expected}, found {found}",
        file=file,
        tensor=name,
        expected=expected,
        found=found,
        hint="Dequantise it with torchao in the training environment, and save it as a plain tensor.",
    )
