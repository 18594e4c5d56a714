from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attacks import torch_files as attacks
from tests.attacks.pickles import calls, pickled, storage, tensor, text
from tests.attacks.torch_files import torch_zip
from workers import torch_file as torch_file_module
from workers.dtypes import BY_TORCH_NAME, ELEMENT_TYPES
from workers.errors import CorruptFile, GeometryMismatch, UnsafePickle, UnshardError
from workers.storage import open_folder
from workers.torch_file import TorchFile, open_torch_file, resolve
from workers.zip_directory import derive_data_offsets, find_directory

CASES = Path(__file__).parent / "cases" / "verl-fsdp"
WHOLE_FILES = sorted(path for path in CASES.rglob("model*.pt") if "error-" not in str(path))


def opened(path: Path, **where: int) -> TorchFile:
    size = where.pop("size", path.stat().st_size)
    return open_torch_file(open_folder(str(path.parent)), path.name, size, **where)


def written(folder: Path, data: bytes, name: str = "bad.pt") -> TorchFile:
    (folder / name).write_bytes(data)
    return opened(folder / name)


def saved(folder: Path, value: object, **options: object) -> TorchFile:
    torch.save(value, folder / "saved.pt", **options)
    return opened(folder / "saved.pt")


def read_back(folder: Path, file: TorchFile, name: str) -> torch.Tensor:
    """The tensor as its resolved place says, with nothing taken from torch's own reader."""
    record = file.root[name]
    place = resolve(file, record, name=name)
    element = ELEMENT_TYPES[record.dtype]
    raw = (folder / file.path).read_bytes()[place.stored.offset : place.stored.offset + place.stored.length_bytes]
    first, rest = divmod(place.offset - place.stored.offset, element.size_bytes)
    assert rest == 0
    whole = torch.frombuffer(bytearray(raw), dtype=getattr(torch, element.torch_name)) if raw else None
    if whole is None or 0 in record.shape:
        return torch.empty(record.shape, dtype=getattr(torch, element.torch_name))
    return torch.as_strided(whole, record.shape, place.strides, first)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    as_bytes = [value.detach().resolve_conj().contiguous().flatten().view(torch.uint8) for value in (left, right)]
    return torch.equal(*as_bytes)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = int(np.prod(shape))
    raw = torch.randint(0, 255, (count * dtype.itemsize,), dtype=torch.uint8)
    return (raw & 1 if dtype is torch.bool else raw).view(dtype).reshape(shape)


def every_kind_of_tensor() -> dict[str, torch.Tensor]:
    base = torch.arange(60, dtype=torch.float32)
    matrix = base.reshape(6, 10)
    return {
        "contiguous": matrix,
        "transposed": matrix.T,
        "strided": matrix[1:5:2, ::3],
        "a view with an offset": base[7:19].reshape(3, 4),
        "expanded": torch.ones(3, 1).expand(3, 5),
        "scalar": torch.tensor(2.5),
        "scalar view": base[5],
        "empty": torch.zeros(0, 4),
        "empty view": base[60:],
        "overlapping": base.as_strided((4, 5), (2, 3)),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }


@pytest.mark.parametrize("new_layout", [True, False], ids=["zip", "legacy"])
def test_tensors_lie_where_torch_reads_them(new_layout, tmp_path):
    tensors = every_kind_of_tensor()
    file = saved(tmp_path, tensors, _use_new_zipfile_serialization=new_layout)
    expected = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert list(file.root) == list(tensors)
    for name in tensors:
        assert same_bits(read_back(tmp_path, file, name), expected[name]), name
    for name in ("transposed", "strided", "a view with an offset", "overlapping"):
        assert file.root[name].storage == file.root["contiguous"].storage


@pytest.mark.parametrize("new_layout", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", sorted(BY_TORCH_NAME))
def test_every_element_type_is_read(name, new_layout, tmp_path):
    dtype = getattr(torch, name)
    original = random_tensor(dtype, (5, 3))
    file = saved(tmp_path, {"w": original}, _use_new_zipfile_serialization=new_layout)
    assert file.root["w"].dtype == BY_TORCH_NAME[name].name
    assert same_bits(read_back(tmp_path, file, "w"), original)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_element_types_without_a_name_in_safetensors_are_refused_when_asked_for(dtype, tmp_path):
    file = saved(tmp_path, {"odd": torch.zeros(3, dtype=dtype), "even": torch.zeros(3)})
    resolve(file, file.root["even"])
    with pytest.raises(GeometryMismatch, match="odd") as caught:
        resolve(file, file.root["odd"], name="odd")
    assert str(dtype).removeprefix("torch.") in str(caught.value)


def test_modules_and_other_values_are_saved_beside_tensors(tmp_path):
    module = torch.nn.Linear(3, 4)
    file = saved(
        tmp_path, {"state": module.state_dict(), "step": 7, "dtype": torch.bfloat16, "device": torch.device("cpu")}
    )
    assert file.root["step"] == 7
    assert file.root["dtype"].name == "BF16"
    assert file.root["device"] == "cpu"
    assert list(file.root["state"]) == ["weight", "bias"]


def test_checksums_are_those_of_the_data(tmp_path):
    file = saved(tmp_path, every_kind_of_tensor())
    with zipfile.ZipFile(tmp_path / "saved.pt") as archive:
        crcs = {info.filename.split("/", 2)[2]: info.CRC for info in archive.infolist() if "/data/" in info.filename}
    assert {key: stored.crc32 for key, stored in file.storages.items()} == crcs


def test_files_saved_without_checksums_are_recognised(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        file = saved(tmp_path, {"w": torch.ones(4)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert {stored.crc32 for stored in file.storages.values()} == {None}
    assert same_bits(read_back(tmp_path, file, "w"), torch.ones(4))


@pytest.mark.parametrize("alignment", [64, 128, 4096])
def test_other_alignments_are_read_from_torchs_note(alignment, tmp_path):
    from torch.utils.serialization import config

    before = config.save.storage_alignment
    config.save.storage_alignment = alignment
    try:
        file = saved(tmp_path, every_kind_of_tensor())
    finally:
        config.save.storage_alignment = before
    expected = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert all(same_bits(read_back(tmp_path, file, name), expected[name]) for name in expected)


@pytest.mark.parametrize("path", WHOLE_FILES[:: max(1, len(WHOLE_FILES) // 25)], ids=lambda p: p.parts[-3])
def test_data_offsets_follow_from_the_directory_alone_for_every_torch_generation(path):
    data = path.read_bytes()
    directory = find_directory(data, len(data), lambda offset, length: data[offset : offset + length], "x")
    assert directory is not None
    offsets, known = derive_data_offsets(directory, 64)
    assert known.all()
    for header, offset in zip(directory.header_offsets.tolist(), offsets.tolist(), strict=True):
        name_bytes, extra_bytes = struct.unpack_from("<2H", data, header + 26)
        assert offset == header + 30 + name_bytes + extra_bytes


def test_records_beyond_four_gibibytes_are_found(tmp_path):
    """As torch writes them: sizes and offsets in zip64 fields, longer headers, longer data descriptors."""
    huge = (4 << 30) + 5
    head = torch_zip([("data.pkl", attacks.PICKLE)])
    first = head.index(b"PK\x01\x02")
    big_start = -(-(first + 30 + 13 + 4 + 20) // 64) * 64
    far = big_start + huge + 24
    far_start = -(-(far + 30 + 14 + 4 + 12) // 64) * 64
    end = far_start + 32 + 24
    path = tmp_path / "huge.pt"
    with path.open("wb") as file:
        file.write(head[:first])
        for offset, name, start in ((first, b"archive/data/9", big_start), (far, b"archive/data/0", far_start)):
            file.seek(offset)
            extra = start - offset - 30 - len(name)
            file.write(struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, 0x808, 0, 0, 0, 0, 0, 0, len(name), extra) + name)
        file.seek(end)
        sizes = struct.pack("<2H2Q", 1, 16, huge, huge)
        claims = [
            attacks.Claim(b"archive/data.pkl", 0, len(attacks.PICKLE), len(attacks.PICKLE), 0),
            attacks.Claim(b"archive/data/9", 0, attacks.WHOLE, attacks.WHOLE, first, extra=sizes),
            attacks.Claim(b"archive/data/0", 0, 32, 32, attacks.WHOLE, extra=struct.pack("<2HQ", 1, 8, far)),
        ]
        file.write(attacks.directory(claims, end))
    opened_file = opened(path)
    assert opened_file.storages["9"][:2] == (big_start, huge)
    assert opened_file.storages["0"][:2] == (far_start, 32)
    assert resolve(opened_file, opened_file.root["w"]).offset == far_start


def test_archives_packed_by_another_program_are_read_by_their_local_headers(tmp_path):
    torch.save(every_kind_of_tensor(), tmp_path / "saved.pt")
    with zipfile.ZipFile(tmp_path / "saved.pt") as source, zipfile.ZipFile(tmp_path / "again.pt", "w") as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    file = opened(tmp_path / "again.pt")
    expected = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert all(same_bits(read_back(tmp_path, file, name), expected[name]) for name in expected)


def test_a_file_inside_of_another_has_absolute_offsets(tmp_path):
    torch.save({"w": torch.arange(8.0)}, tmp_path / "saved.pt")
    data = (tmp_path / "saved.pt").read_bytes()
    (tmp_path / "outer").write_bytes(b"x" * 100 + data + b"after")
    inner = opened(tmp_path / "outer", size=len(data), offset=100)
    assert same_bits(read_back(tmp_path, inner, "w"), torch.arange(8.0))


@pytest.mark.parametrize("new_layout", [True, False], ids=["zip", "legacy"])
def test_opening_reads_no_weights(new_layout, tmp_path):
    tensors = {f"layer.{i}": torch.zeros(1 << 18) for i in range(8)}
    torch.save(tensors, tmp_path / "saved.pt", _use_new_zipfile_serialization=new_layout)
    folder = open_folder(str(tmp_path))
    open_torch_file(folder, "saved.pt", (tmp_path / "saved.pt").stat().st_size)
    assert folder.usage().bytes_read < 2 * 2**20
    assert folder.usage().gets <= (8 if new_layout else 16)


def test_the_digest_changes_with_the_content_and_not_with_the_place(tmp_path):
    first = saved(tmp_path, {"w": torch.ones(4)}).directory_digest
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "other.pt").write_bytes((tmp_path / "saved.pt").read_bytes())
    assert opened(tmp_path / "moved" / "other.pt").directory_digest == first
    assert saved(tmp_path, {"w": torch.zeros(4)}).directory_digest != first


@pytest.mark.parametrize("attack", attacks.BROKEN | attacks.BROKEN_LEGACY)
def test_a_broken_file_is_refused_with_what_is_wrong(attack, tmp_path):
    data, words = (attacks.BROKEN | attacks.BROKEN_LEGACY)[attack]
    with pytest.raises(CorruptFile) as caught:
        written(tmp_path, data)
    assert caught.value.file == "bad.pt"
    assert caught.value.hint
    for word in ("bad.pt", *words):
        assert word in str(caught.value) + caught.value.hint


def test_the_files_that_the_broken_ones_are_made_from_are_good(tmp_path):
    for data in (attacks.GOOD, attacks.legacy()):
        file = written(tmp_path, data)
        place = resolve(file, file.root["w"])
        assert data[place.offset : place.offset + 32] == bytes(range(32))


@pytest.mark.parametrize("wrap", [lambda p: torch_zip([("data.pkl", p)]), attacks.legacy], ids=["zip", "legacy"])
def test_a_malicious_pickle_is_refused_in_either_layout(wrap, tmp_path):
    marker = tmp_path / "executed"
    data, found = calls(f"touch {marker}")["posix.system"]
    with pytest.raises(UnsafePickle, match=found):
        written(tmp_path, wrap(data))
    assert not marker.exists()


def test_the_broken_cases_are_refused():
    for case, words in {
        "error-git-lfs-pointer": "Git LFS",
        "error-truncated-pt": "truncated",
        "error-malicious-pickle": "posix.system",
    }.items():
        with pytest.raises(UnshardError, match=words):
            opened(next((CASES / case / "input").rglob("model*rank_1.pt")))


BAD_TENSORS = {
    "a storage that is not there": (tensor(of=storage(key=text("7"))), "storage 7"),
    "a storage of another size": (tensor(of=storage(numel=b"K\x07"), size=b"K\x01\x85"), "28 bytes"),
    "a tensor beyond its storage": (tensor(size=b"K\x09\x85"), "9 elements"),
    "an offset beyond its storage": (tensor(offset=b"K\x01"), "9 elements"),
    "a stride beyond its storage": (tensor(size=b"K\x02\x85", stride=b"K\x08\x85"), "9 elements"),
    "sizes that overflow": (tensor(size=b"\x8a\x08" + b"\xff" * 7 + b"\x7f\x85"), "elements"),
}


@pytest.mark.parametrize("fault", BAD_TENSORS)
def test_a_tensor_that_its_storage_cannot_hold_is_refused_by_name(fault, tmp_path):
    record, words = BAD_TENSORS[fault]
    file = written(tmp_path, torch_zip([("data.pkl", pickled(record)), *attacks.RECORDS[1:]]))
    with pytest.raises(CorruptFile, match=words) as caught:
        resolve(file, file.root, name="layers.0.weight")
    assert caught.value.tensor == "layers.0.weight"
    assert "bad.pt" in str(caught.value)


def test_records_that_lie_about_their_padding_are_caught_by_the_sampled_headers(tmp_path):
    data = bytearray(attacks.GOOD)
    header = data.index(b"archive/data/0") - 30
    struct.pack_into("<H", data, header + 28, 4)
    file = written(tmp_path, bytes(data))
    offset = file.storages["0"].offset
    assert offset == header + 30 + 14 + 4


def test_a_pickle_too_large_to_be_one_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_file_module, "_LARGEST_PICKLE_BYTES", 10)
    with pytest.raises(CorruptFile, match=r"data\.pkl"):
        written(tmp_path, attacks.GOOD)


ORIGINALS = [attacks.GOOD, attacks.legacy(), WHOLE_FILES[0].read_bytes()]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(ORIGINALS),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4),
    st.booleans(),
)
def test_damage_gives_a_named_error_or_the_same_place(scratch, original, edits, near_end):
    data = bytearray(original)
    for position, value in edits:
        reach = min(len(data), 3000) if near_end else len(data)
        data[len(data) - 1 - int(position * (reach - 1))] = value
    error = None
    try:
        file = written(scratch, bytes(data))
        if isinstance(file.root, dict) and hasattr(file.root.get("w"), "storage"):
            assert resolve(file, file.root["w"], name="w").offset < len(data)
    except UnshardError as raised:
        error = raised
    assert error is None or error.file == "bad.pt"


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ORIGINALS), st.floats(0, 1))
def test_every_truncation_is_refused(scratch, original, part):
    with pytest.raises(CorruptFile, match=r"bad\.pt"):
        written(scratch, original[: int(part * (len(original) - 1))])
