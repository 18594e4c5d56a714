"""Hostile pickles, put together opcode by opcode.

``CALLS`` would run something when executed and ``MENTIONS`` reach for something; both are refused by the name of a
global. ``NONSENSE`` tries to crash, exhaust or confuse the interpreter's unpickler.
"""

from __future__ import annotations

import struct


def glob(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def pickled(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def call(function: bytes, *args: bytes) -> bytes:
    return function + b"(" + b"".join(args) + b"tR"


def calls(command: str) -> dict[str, tuple[bytes, str]]:
    """By name: the pickle and the global that must be named; ``command`` is what a shell would run."""
    argument = text(command)
    code = text(f"__import__('os').system({command!r})")
    named = [
        ("posix", "system", argument),
        ("nt", "system", argument),
        ("os", "system", argument),
        ("os", "popen", argument),
        ("subprocess", "Popen", argument),
        ("subprocess", "getoutput", argument),
        ("builtins", "eval", code),
        ("builtins", "exec", code),
        ("builtins", "compile", code),
        ("builtins", "open", argument),
        ("builtins", "__import__", text("os")),
        ("importlib", "import_module", text("os")),
        ("runpy", "run_path", argument),
        ("shutil", "rmtree", argument),
        ("socket", "socket", b""),
        ("sys", "exit", b""),
        ("webbrowser", "open", argument),
        ("pickle", "loads", b""),
        ("_pickle", "loads", b""),
        ("ctypes", "CDLL", argument),
        ("pty", "spawn", argument),
        ("code", "interact", b""),
        ("timeit", "timeit", code),
        ("cProfile", "run", code),
        ("pdb", "run", code),
        ("functools", "partial", code),
        ("operator", "attrgetter", argument),
        ("operator", "methodcaller", argument),
        ("types", "FunctionType", b""),
        ("torch", "load", argument),
        ("torch.hub", "load", argument),
        ("torch.jit", "load", argument),
        ("torch.storage", "_load_from_bytes", b""),
        ("torch.serialization", "load", argument),
        ("torch._utils", "_import_dotted_name", text("os.system")),
        ("torch.utils.cpp_extension", "load_inline", argument),
        ("numpy", "load", argument),
        ("numpy.testing._private.utils", "runstring", code),
        ("copyreg", "_reconstructor", b""),
        ("pip", "main", argument),
        ("uuid", "_get_command_stdout", argument),
        ("someones.training", "Callback", argument),
        ("torch", "Tensor", argument),
        ("torch.distributed.tensor", "DTensor", argument),
        ("torch", "FloatStorage", argument),
    ]
    found = {f"{m}.{n}": (pickled(call(glob(m, n), args)), f"{m}.{n}") for m, n, args in named}
    found["__builtin__.eval"] = (pickled(call(glob("__builtin__", "eval"), code)), "builtins.eval")
    found["a stacked global"] = (
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + argument + b"\x85R.",
        "posix.system",
    )
    return found | _through_listed_functions(argument)


def _through_listed_functions(argument: bytes) -> dict[str, tuple[bytes, str]]:
    rebuild = glob("torch._tensor", "_rebuild_from_type_v2")
    tensor = glob("torch", "Tensor")
    foreign = glob("someones.training", "run")
    system = glob("posix", "system")
    return {
        "rebuild by system": (pickled(call(rebuild, system, tensor, argument + b"\x85", b"N")), "posix.system"),
        "rebuild by a foreign function": (
            pickled(call(rebuild, foreign, tensor, argument + b"\x85", b"N")),
            "someones.training.run",
        ),
        "rebuild by a listed function that is no tensor": (
            pickled(call(rebuild, glob("pathlib", "Path"), tensor, argument + b"\x85", b"N")),
            "pathlib.Path",
        ),
        "getattr of a listed class": (
            pickled(call(glob("builtins", "getattr"), tensor, text("__subclasses__"))),
            "builtins.getattr",
        ),
        "getattr of the right class and the wrong name": (
            pickled(
                call(
                    glob("__builtin__", "getattr"),
                    glob("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"),
                    text("__init__"),
                )
            ),
            "builtins.getattr",
        ),
    }


MENTIONS: dict[str, tuple[bytes, str]] = {
    "popped at once": (pickled(glob("posix", "system"), b"0N"), "posix.system"),
    "as a value": (pickled(glob("subprocess", "run")), "subprocess.run"),
    "dotted name": (b"\x80\x04\x8c\x05torch\x8c\x17serialization.os.system\x93.", "torch.serialization.os.system"),
    "dotted name below a listed class": (
        b"\x80\x04\x8c\x05torch\x8c\x0fTensor.__init__\x93.",
        "torch.Tensor.__init__",
    ),
    "as a class to make": (pickled(glob("subprocess", "Popen"), b")\x81"), "subprocess.Popen"),
    "as a class with a state": (pickled(glob("os", "_wrap_close"), b")\x81}b"), "os._wrap_close"),
    "as a factory": (pickled(call(glob("collections", "defaultdict"), glob("builtins", "eval"))), "builtins.eval"),
    "as a tensor's type": (
        pickled(
            call(
                glob("torch._tensor", "_rebuild_from_type_v2"),
                glob("torch._utils", "_rebuild_tensor_v2"),
                glob("pickle", "Unpickler"),
                b")",
                b"N",
            )
        ),
        "pickle.Unpickler",
    ),
    "INST": (b"\x80\x02(iposix\nsystem\n.", "INST"),
    "OBJ": (pickled(b"(", glob("torch", "Tensor"), b"o"), "OBJ"),
    "PERSID": (b"\x80\x02Pos.system\n.", "PERSID"),
    "EXT1": (pickled(b"\x82\x01"), "EXT1"),
    "EXT4": (pickled(b"\x84\x01\x00\x00\x00"), "EXT4"),
    "NEXT_BUFFER": (b"\x80\x05\x97.", "NEXT_BUFFER"),
    "READONLY_BUFFER": (b"\x80\x05N\x98.", "READONLY_BUFFER"),
    "DUP": (pickled(b"N2"), "DUP"),
    "text of protocol 0": (b"I5\n.", "INT"),
    "PUT of protocol 0": (b"\x80\x02Np4294967295\n.", "PUT"),
    "LONG4": (pickled(b"\x8b\x04\x00\x00\x00\x01\x02\x03\x04"), "LONG4"),
    "NEWOBJ_EX": (b"\x80\x04" + glob("torch", "Tensor") + b")}\x92.", "NEWOBJ_EX"),
}

_SHARD = glob("torch.distributed.tensor.placement_types", "Shard")
_SIZE = glob("torch", "Size")
_V2 = glob("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = glob("torch._utils", "_rebuild_parameter")
_ORDERED = glob("collections", "OrderedDict")


def storage(numel: bytes = b"K\x08", kind: bytes = glob("torch", "FloatStorage"), key: bytes = text("0")) -> bytes:
    return b"(" + text("storage") + kind + key + text("cpu") + numel + b"tQ"


def tensor(
    offset: bytes = b"K\x00", size: bytes = b"K\x08\x85", stride: bytes = b"K\x01\x85", of: bytes | None = None
) -> bytes:
    return call(_V2, storage() if of is None else of, offset, size, stride, b"\x89", call(_ORDERED))


NONSENSE: dict[str, bytes] = {
    "nothing": b"",
    "a tensor of 65 dimensions": pickled(tensor(size=b"(" + b"K\x01" * 65 + b"t", stride=b"(" + b"K\x01" * 65 + b"t")),
    "no stop": b"\x80\x02N",
    "not a pickle": b"\xfe\xff\x00",
    "an unknown opcode": pickled(b"\xff"),
    "an unknown protocol": b"\x80\x09N.",
    "an empty stack": pickled(b"0"),
    "no mark": pickled(b"t"),
    "a memo that fills memory": pickled(b"Nr\xff\xff\xff\xff"),
    "a memo beyond an honest one": pickled(b"Nr\x00\x00\x01\x00"),
    "a memo entry that is not there": pickled(b"h\x07"),
    "text longer than the data": pickled(b"X\xff\xff\xff\xffabc"),
    "text of 8 exabytes": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7fabc.",
    "bytes of 8 exabytes": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fabc.",
    "a byte array of 8 exabytes": b"\x80\x05\x96" + b"\xff" * 7 + b"\x7fabc.",
    "a negative string": pickled(b"T\xff\xff\xff\xffabc"),
    "a frame of 8 exabytes": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7fN.",
    "text that is not UTF-8": pickled(b"X\x02\x00\x00\x00\xff\xfe"),
    "a call of a number": pickled(b"K\x01)R"),
    "a call without a tuple": pickled(_SIZE, b"K\x01R"),
    "a call of a record": pickled(_SHARD, b")\x81)R"),
    "an instance of a number": pickled(b"K\x01)\x81"),
    "an instance of a function": pickled(_SIZE, b")\x81"),
    "a state for a class": pickled(_SHARD, b"}", text("dim"), b"K\x01sb"),
    "slots for a class": pickled(_SHARD, b"N}", text("kind"), text("evil"), b"s\x86b"),
    "a state for the dict class": pickled(_ORDERED, b"N}", text("get"), b"K\x01s\x86b"),
    "a state for a function": pickled(_V2, b"}", text("origin"), b"K\x01sb"),
    "slots for a function": pickled(_SIZE, b"N}", text("__call__"), _V2, b"s\x86b"),
    "a state for a number": pickled(b"K\x01}", text("real"), b"K\x02sb"),
    "a state for a tensor": pickled(tensor(), b"}", text("shape"), b"K\x02sb"),
    "slots for a tensor": pickled(tensor(), b"N}", text("shape"), b"K\x02s\x86b"),
    "a state for a dtype": pickled(glob("torch", "float32"), b"N}", text("name"), text("F64"), b"s\x86b"),
    "items for a record": pickled(_SHARD, b")\x81", text("dim"), b"K\x01s"),
    "members for a record": pickled(_SHARD, b")\x81", b"K\x01a"),
    "additions to a record": b"\x80\x04" + _SHARD + b")\x81(K\x01\x90.",
    "a list as a key": pickled(b"}]K\x01s"),
    "a persistent id that is text": pickled(text("storage"), b"Q"),
    "a persistent id that is a number": pickled(b"K\x01Q"),
    "a short persistent id": pickled(text("storage"), b"\x85Q"),
    "a module as a persistent id": pickled(
        b"(", text("module"), glob("someones", "Net"), text("a"), text("b"), b"NtQ"
    ),
    "a storage of no class": pickled(storage(kind=glob("torch", "Tensor"))),
    "a storage of an unhashable class": pickled(storage(kind=b"]")),
    "a storage of a negative size": pickled(storage(numel=b"J\xff\xff\xff\xff")),
    "a storage of a fractional size": pickled(storage(numel=b"G" + struct.pack(">d", 8.0))),
    "a storage with a path as its key": pickled(storage(key=b"N")),
    "a tensor without a storage": pickled(tensor(of=b"N")),
    "a tensor of an untyped storage without a dtype": pickled(
        tensor(of=storage(kind=glob("torch.storage", "UntypedStorage")))
    ),
    "a tensor with a negative offset": pickled(tensor(offset=b"J\xff\xff\xff\xff")),
    "a tensor with a negative size": pickled(tensor(size=b"J\xff\xff\xff\xff\x85")),
    "a tensor with a negative stride": pickled(tensor(stride=b"J\xff\xff\xff\xff\x85")),
    "a tensor with a boolean size": pickled(tensor(size=b"\x88\x85")),
    "a tensor with a fractional size": pickled(tensor(size=b"G" + struct.pack(">d", 8.0) + b"\x85")),
    "a tensor with a size of 72 bits": pickled(tensor(size=b"\x8a\x09" + b"\xff" * 8 + b"\x7f\x85")),
    "a tensor with a list as its size": pickled(tensor(size=b"]K\x08a")),
    "a tensor with more strides than sizes": pickled(tensor(stride=b"K\x01K\x01\x86")),
    "a tensor with too few arguments": pickled(call(_V2, storage())),
    "a tensor subclass alone": pickled(call(glob("torch._utils", "_rebuild_wrapper_subclass"), _SHARD)),
    "a parameter of nothing": pickled(call(_PARAMETER, b"N", b"\x88", call(_ORDERED))),
    "a shape of text": pickled(call(_SIZE, text("abc"))),
    "a set of a set": pickled(call(glob("builtins", "set"), call(glob("builtins", "set"), b"]") + b"\x85")),
    "bytes by an unknown codec": pickled(call(glob("_codecs", "encode"), text("abc"), text("rot13"))),
    "too many classes": pickled(*(glob("m", f"C{i}") + b"0" for i in range(10_001)), b"N"),
}


def nested_tuple_as_key(depth: int) -> bytes:
    """A tuple in a tuple in a tuple, used as a key: hashing it takes C stack for each level."""
    return pickled(b"})" + b"\x85" * depth + b"Ns")


def numbers_of_one_hash(count: int) -> bytes:
    """Keys that all collide: a dict of them takes time that grows with the square of their number."""
    modulus = (1 << 61) - 1
    return pickled(b"}(", *(b"\x8a\x0b" + (n * modulus).to_bytes(11, "little") + b"N" for n in range(count)), b"u")


def nested_tuple_through_the_memo(depth: int) -> bytes:
    """The same with each level fetched from the memo, where a look at neighbouring opcodes sees nothing."""
    return pickled(b"}", b")q\x00" + b"0h\x00\x85q\x00" * depth, b"Ns")
