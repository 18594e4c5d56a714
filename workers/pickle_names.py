"""The closed lists of global names that a checkpoint's pickle may mention, and the names that always refuse it.

This module holds names and nothing else: it must not import what it names. ``pickles`` gives the names meaning.
Every entry is an exact (module, name) pair; a rule such as "everything below ``torch``" would reach ``os.system``
through ``torch.serialization.os``.
"""

from __future__ import annotations

Name = tuple[str, str]


def _pairs(table: dict[str, str]) -> frozenset[Name]:
    return frozenset((module, name) for module, names in table.items() for name in names.split())


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PLACEMENTS = "Shard Replicate Partial _StridedShard _Partial"
_SPEC = "DTensorSpec TensorMeta ShardOrderEntry"
_SHARDED = "torch.distributed._shard"

RECORDS = _pairs(
    {
        "torch": "Tensor ByteTensor Generator",
        "torch.nn": "Parameter Buffer",
        "torch.nn.parameter": "Parameter Buffer",
        "torch.distributed.tensor": f"DTensor {_PLACEMENTS}",
        "torch.distributed.tensor.api": "DTensor",
        "torch.distributed.tensor._api": "DTensor",
        "torch.distributed._tensor": f"DTensor {_PLACEMENTS}",
        "torch.distributed._tensor.api": "DTensor",
        "torch.distributed._tensor.placement_types": f"{_PLACEMENTS} {_SPEC}",
        "torch.distributed._tensor._dtensor_spec": _SPEC,
        "torch.distributed.tensor.placement_types": f"{_PLACEMENTS} {_SPEC}",
        "torch.distributed.tensor._dtensor_spec": _SPEC,
        "torch.distributed.device_mesh": "DeviceMesh",
        "torch.distributed._tensor.device_mesh": "DeviceMesh",
        "torch.distributed._mesh_layout": "_MeshLayout _FlatLayout",
        f"{_SHARDED}.sharded_tensor.api": "ShardedTensor",
        f"{_SHARDED}.sharded_tensor.shard": "Shard",
        f"{_SHARDED}.sharded_tensor.metadata": "ShardedTensorMetadata TensorProperties",
        f"{_SHARDED}.metadata": "ShardMetadata",
        f"{_SHARDED}.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
        f"{_SHARDED}.sharding_spec.api": "EnumerableShardingSpec",
        "torch.distributed.remote_device": "_remote_device",
        "torch.distributed.checkpoint.metadata": (
            "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata"
            " TensorProperties StorageMeta"
        ),
        f"{_SHARDED}.checkpoint.metadata": (
            "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties"
        ),
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        f"{_SHARDED}.checkpoint.filesystem": "_StorageInfo",
        "torch.distributed.checkpoint.planner": "SavePlan WriteItem TensorWriteData BytesIOWriteData",
        "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
        "torchao.dtypes.nf4tensor": "NF4Tensor",
        "torchao.quantization.quantize_.workflows.nf4.nf4_tensor": "NF4Tensor",
        "deepspeed.utils.tensor_fragment": "fragment_address",
        "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
        "argparse": "Namespace",
        "numpy": "ndarray",
        "_io": "BytesIO",
        "builtins": "object int float bool str list dict tuple",
    }
)
"""Classes whose instances are inert records: they may be made and given a state, never called."""

CALLED_RECORDS = _pairs(
    {
        "torch._utils": (
            "_rebuild_sparse_tensor _rebuild_nested_tensor _rebuild_qtensor _rebuild_meta_tensor_no_storage"
            " _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor"
        ),
        f"{_SHARDED}.sharded_tensor.metadata": "MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.metadata": "_MEM_FORMAT_ENCODING",
        f"{_SHARDED}.checkpoint.metadata": "_MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.planner": "WriteItemType",
        "deepspeed.runtime.zero.config": "ZeroStageEnum",
        "megatron.core.enums": "ModelType Fp8Recipe Fp4Recipe",
        "megatron.core.transformer.enums": (
            "ModelType LayerType AttnType AttnMaskType AttnBackend CudaGraphScope InferenceCudaGraphScope"
        ),
        "megatron.model.enums": "ModelType LayerType AttnType AttnMaskType PositionEmbeddingType",
        "megatron.legacy.model.enums": "ModelType LayerType AttnType AttnMaskType PositionEmbeddingType",
        "signal": "Signals",
        "numpy": "dtype",
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy._core.multiarray": "_reconstruct scalar",
        "numpy.core.numeric": "_frombuffer",
        "numpy._core.numeric": "_frombuffer",
        "datetime": "datetime date time timedelta timezone",
        "pathlib": "Path PurePath PosixPath PurePosixPath WindowsPath PureWindowsPath",
        "pathlib._local": "Path PurePath PosixPath PurePosixPath WindowsPath PureWindowsPath",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "uuid": "UUID SafeUUID",
    }
)
"""Names that a pickle may call: the call is written down as a record with its arguments, and is not made."""

GETATTR: Name = ("builtins", "getattr")
GETATTR_PAIR: tuple[Name, str] = ((f"{_SHARDED}.sharded_tensor.api", "ShardedTensor"), "ProcessGroupState")
"""The one pair for which ``getattr`` is understood: how protocol 2 spells a nested class of torch's."""

KINDS: dict[Name, str] = {
    (f"{_SHARDED}.sharded_tensor.shard", "Shard"): "LocalShard",
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): "MEM_FORMAT_ENCODING",
    (f"{_SHARDED}.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): "MEM_FORMAT_ENCODING",
    ("numpy", "dtype"): "numpy.dtype",
    ("numpy.core.multiarray", "_reconstruct"): "ndarray",
    ("numpy._core.multiarray", "_reconstruct"): "ndarray",
    ("numpy.core.multiarray", "scalar"): "numpy.scalar",
    ("numpy._core.multiarray", "scalar"): "numpy.scalar",
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): "Metadata",
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): "SavePlan",
    **{
        (module, "_Partial"): "Partial"
        for module in (
            "torch.distributed._tensor",
            "torch.distributed.tensor",
            "torch.distributed._tensor.placement_types",
            "torch.distributed.tensor.placement_types",
        )
    },
}
"""Kinds of records that are not simply the name of their class."""

STORAGE_DTYPES: dict[str, str | None] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": None,
}
"""torch's storage classes and their dtypes by torch's names; an untyped storage is counted in bytes."""

STORAGE_MODULES = ("torch", "torch.storage", "torch.cuda")

DTYPES = _words(
    "float64 double float32 float float16 half bfloat16 int64 long int32 int int16 short int8 uint8 bool uint16 uint32"
    " uint64 complex32 complex64 cfloat complex128 cdouble float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz"
    " float8_e5m2fnuz float4_e2m1fn_x2 qint8 quint8 qint32 quint4x2 quint2x4"
)
"""Attributes of ``torch`` that are dtypes."""

DTYPE_SYNONYMS = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "cfloat": "complex64",
    "cdouble": "complex128",
}

_DENIED_MODULES = _words(
    "os posix nt posixpath ntpath subprocess _posixsubprocess sys importlib _frozen_importlib imp runpy shutil socket"
    " _socket ssl webbrowser pickle _pickle cPickle cloudpickle dill joblib marshal shelve ctypes _ctypes cffi pty tty"
    " code codeop commands platform popen2 multiprocessing _multiprocessing threading _thread asyncio concurrent"
    " functools _functools operator _operator itertools types inspect timeit pdb bdb doctest cProfile profile trace"
    " signal _signal tempfile io _io fileinput linecache urllib urllib2 http httplib requests ftplib smtplib telnetlib"
    " xmlrpc poplib imaplib nntplib pip setuptools distutils site zipimport pkgutil gc atexit copyreg copy_reg"
    " antigravity idlelib lib2to3 pydoc mmap fcntl resource pwd sqlite3 logging venv ensurepip builtins __builtin__"
    " codecs _codecs _pyrepl turtle tkinter"
)

_DENIED = {
    "torch": "load hub jit compile classes ops package os sys",
    "torch.storage": "_load_from_bytes",
    "torch.serialization": "load os sys pickle _load _legacy_load",
    "torch._utils": "_import_dotted_name",
    "torch.multiprocessing.reductions": "rebuild_storage_fd rebuild_storage_filename rebuild_cuda_tensor",
    "torch._inductor.codecache": "compile_file",
    "torch.testing._internal.common_utils": "shell",
    "numpy": "load loadtxt fromfile memmap genfromtxt frompyfunc vectorize",
}
_DENIED_PAIRS = _pairs(_DENIED)
_DENIED_PACKAGES = (
    "torch.hub",
    "torch.jit",
    "torch.package",
    "torch.utils",
    "torch._dynamo",
    "torch.fx",
    "torch.onnx",
    "torch.testing",
    "numpy.testing",
    "numpy.f2py",
    "numpy.distutils",
)


def is_denied(module: str, name: str) -> bool:
    """Whether the mere mention of a global refuses the pickle. Ask only for names that are on none of the lists."""
    if "." in name or (module, name) in _DENIED_PAIRS or module.partition(".")[0] in _DENIED_MODULES:
        return True
    return any(module == package or module.startswith(package + ".") for package in _DENIED_PACKAGES)
