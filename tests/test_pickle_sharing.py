from __future__ import annotations

import collections
import pickle
import pickletools
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attacks import shared_parts
from tests.attacks.pickles import glob, pickled, tensor, text
from workers import pickle_scan, pickle_sharing
from workers.errors import UnsafePickle
from workers.pickles import TensorRecord, load

MOST_S = 20.0
"""Far more than reading all attacks takes, on any machine; one that gets through would take centuries."""


def test_parts_that_share_each_other_for_ever_are_refused_at_once():
    # In a process that is killed when one gets through: what the interpreter does then cannot be interrupted.
    script = (
        "import sys, time, faulthandler\n"
        "from tests.attacks.shared_parts import KEYS\n"
        "from workers.errors import UnsafePickle\n"
        "from workers.pickles import load\n"
        f"faulthandler.dump_traceback_later({MOST_S}, exit=True)\n"
        "for name, data in KEYS.items():\n"
        "    began = time.process_time()\n"
        "    print(name, flush=True)\n"
        "    try:\n"
        "        load(data, file='bad.pt')\n"
        "    except UnsafePickle as error:\n"
        "        assert str(error).startswith('bad.pt: '), error\n"
        "        assert error.file == 'bad.pt' and 'a tuple of' in error.found and error.hint, error\n"
        "    else:\n"
        "        raise AssertionError(f'{name} was read')\n"
        "    assert time.process_time() - began < 1, name\n"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == len(shared_parts.KEYS)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_checkpoints_share_is_read_as_it_is(protocol):
    shape, names = (4096, 1024), tuple(f"layers.{n}.weight" for n in range(500))
    frozen = frozenset(("a", "b"))
    texts = ["weight", "bias", "data", "t\x94", "q\x85", "\u0394" * 40]
    value = {
        "shapes": [shape] * 1000 + [(shape, shape)] * 1000,
        "names": [names, names, (names, names)],
        "keys": {shape: 1, (shape, "x"): 2, (0, 1): 3, names: 4, frozen: 5},
        "sets": [{shape, frozen}, frozen, frozen],
        "texts": texts * 50,
        "numbers": [148, 0x9494, 0x94949494, 0x949494949494, 1.5, -0x94] * 100,
        "ordered": collections.OrderedDict(a=shape, b=shape),
        "bytes": [b"\x94" * 300, b"tq\x00" * 100, bytearray(b"h\x00\x86q\x00")],
    }
    loaded = load(pickle.dumps(value, protocol), file="x")
    assert loaded == value
    assert loaded["names"][0] is loaded["names"][1]


@pytest.mark.parametrize("protocol", [2, 4])
def test_where_a_value_is_put_into_the_memo_is_found_whatever_is_around(protocol):
    chance = random.Random(94)
    values: list[object] = []
    for n in range(3000):
        long = "".join(
            chr(chance.choice((0x68, 0x6A, 0x71, 0x72, 0x74, 0x94, 0x86))) for _ in range(chance.randrange(9))
        )
        values.append(
            chance.choice((long, chance.randrange(1 << 40), (n, long), (n, (n, long)), [n, (n,)], "u" * 200))
        )
        if chance.random() < 0.2:
            values.append(chance.choice(values))
    data = pickle.dumps(values, protocol)
    found = pickle_scan.scan(data, "x")
    assert found.end == len(data)
    wanted = {place for place, _ in found.shared}
    assert wanted >= tuples_fetched_again(data)
    assert load(data, file="x") == values


def tuples_fetched_again(data: bytes) -> set[int]:
    """Where tuples get an index that is fetched later, by the interpreter's own reading of the opcodes."""
    put: dict[int, int] = {}
    fetched: set[int] = set()
    before = ""
    for opcode, argument, place in pickletools.genops(data):
        assert place is not None
        if opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            index = len(put) if argument is None else argument
            put[index] = place if before.startswith("TUPLE") else -1
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            fetched.add(put[argument])
        before = opcode.name
    return fetched - {-1}


def test_places_are_found_across_the_borders_of_blocks(monkeypatch):
    plain = pickle.dumps([("a", (n,)) for n in range(40)] * 2, 2)
    usual = pickle_scan.scan(plain, "x")
    for size in (7, 8, 9, 64, 65, len(plain) - 3, len(plain)):
        monkeypatch.setattr(pickle_sharing, "_BLOCK_BYTES", size)
        assert pickle_scan.scan(plain, "x") == usual
        assert pickle_sharing._Times(plain).fetched(5) == plain.count(b"h\x05")


def test_a_value_is_counted_with_its_parts_as_often_as_a_walk_meets_them():
    counted = pickle_sharing.SharedParts(b"")
    pair = (1, "a")
    assert counted.parts(pair) == 3
    assert counted.parts((pair, pair, [pair] * 100, frozenset((pair,)))) == 1 + 3 + 3 + 1 + 4


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"\x80\x04)q\x00.", "BINPUT"),
        (b"\x80\x05)r\x00\x01\x00\x00.....", "LONG_BINPUT"),
        (b"\x80\x02)\x94.", "MEMOIZE"),
    ],
)
def test_ways_to_fill_the_memo_are_not_mixed(data, found):
    with pytest.raises(UnsafePickle, match=found):
        load(data, file="x")


def test_the_persistent_ids_that_are_added_change_no_tensor():
    both = tensor(size=b"K\x08\x85q\x07", stride=b"K\x01\x85")
    again = tensor(size=b"h\x07", stride=b"K\x01\x85")
    first, second = load(pickled(b"(", both, again, b"t"), file="x")
    assert first == second
    assert type(first) is TensorRecord


@pytest.mark.parametrize("kind", ["set", "frozenset", "OrderedDict", "deque", "defaultdict"])
def test_a_list_makes_one_collection_and_not_any_number(kind):
    module = "builtins" if "set" in kind else "collections"
    items = b"]q\x00(" + b"".join(text(f"k{n}") + b"N\x86" for n in range(3)) + b"e"
    made = glob(module, kind) + (b"N" if kind == "defaultdict" else b"")
    end = b"\x86R" if kind == "defaultdict" else b"\x85R"
    whole, none = load(pickled(b"(", made, items, end, made, b"h\x00", end, b"t"), file="x")
    assert (len(whole), len(none)) == (3, 0)
