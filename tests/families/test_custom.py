"""A user's own mapping: what a file may say, what is refused and in which words."""

from __future__ import annotations

import json
import string
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.families.runs import Run
from tests.test_expressions import Memory
from workers.errors import GeometryMismatch, IncompleteCheckpoint, InvalidOption, UnmappedTensor
from workers.families.custom import read_mapping
from workers.families.custom_file import LARGEST_BYTES
from workers.families.custom_vocabulary import OPERATIONS
from workers.families.operations import Facts
from workers.families.rules import Drop, Rule, apply_rules

FACTS = Facts({"hidden_size": 8, "bad": -3})


def read(*rules, **top):
    return read_mapping(json.dumps({"schema": 1, "rules": rules, **top}))


def refused(text):
    with pytest.raises(InvalidOption) as caught:
        read_mapping(text if isinstance(text, str) else json.dumps(text))
    return caught.value


def renamed(**more):
    return {"source": "a", "target": "b", **more}


def with_operation(op, sources=("a",), targets=("b",), **keys):
    return {"sources": list(sources), "targets": list(targets), "operations": [{"op": op, **keys}]}


# --- what a file says --------------------------------------------------------------------------------------


def test_a_mapping_has_its_rules_in_order_and_says_what_it_extends():
    mapping = read({"drop": "x.{rest}"}, {"keep": "y"}, renamed(), name="mine", extends="none", keep_float32=["norm"])
    assert mapping.rules == (Drop("x.{rest}", "left out by the mapping"), Rule(("y",), ("y",)), Rule(("a",), ("b",)))
    assert (mapping.name, mapping.extends, mapping.strict, mapping.keep_float32) == ("mine", "none", True, ("norm",))
    assert mapping.lossy == {0}


@pytest.mark.parametrize(("top", "strict"), [({}, False), ({"extends": "llama"}, False), ({"strict": True}, True)])
def test_strictness_is_asked_for_or_comes_with_no_family(top, strict):
    assert read(renamed(), **top).strict is strict
    assert read(renamed(), extends="none", strict=False).strict is False


def test_a_mapping_is_the_same_from_json_and_yaml_and_inline(tmp_path):
    text = json.dumps({"schema": 1, "rules": [renamed(comment="why")]})
    (tmp_path / "m.json").write_text(text, encoding="utf-8-sig")
    (tmp_path / "m.YAML").write_text("schema: 1\nrules:\n- {source: a, target: b, comment: why}\n")
    (tmp_path / "m.yml").write_text("{schema: 1, rules: [{source: a, target: b, comment: why}]}")
    found = {read_mapping(option) for option in (text, *map(str, tmp_path.iterdir()))}
    assert len(found) == 1
    assert found.pop().text == '{"schema":1,"rules":[{"source":"a","target":"b","comment":"why"}]}'


def test_rules_that_lose_something_are_marked():
    kept = with_operation("reshape", shape=[2, -1], **{"from": [4]})
    mapping = read(
        kept,
        {**with_operation("reshape", shape=[2, -1]), "sources": ["c"]},
        {**with_operation("trim", dim=0, size=2), "sources": ["d"]},
        {**with_operation("cast", dtype="float16"), "sources": ["e"]},
    )
    assert mapping.lossy == {1, 2, 3}
    with pytest.raises(InvalidOption, match=r"reshaping to \[2, -1\] has no way back") as caught:
        _ = mapping.rules[1].inverse
    assert "from" in caught.value.hint


# --- what is refused ---------------------------------------------------------------------------------------

FAULTS = [
    ({"rules": []}, "the key schema is missing"),
    ({"schema": 2, "rules": []}, "schema: this version of unshard reads mappings of schema 1"),
    ({"schema": True, "rules": []}, "schema: this version"),
    ({"schema": 1, "rules": {}}, "rules: expected a list, found an object"),
    ({"schema": 1, "rules": [], "extend": "x"}, "extend: there is no such key here"),
    ({"schema": 1, "rules": [], "strict": 1}, "strict: expected true or false, found a whole number"),
    ({"schema": 1, "rules": ["a"]}, r"rules[0]: expected an object, found a text"),
    ({"schema": 1, "rules": [{}]}, r"rules[0]: a rule has one of the keys"),
    ({"schema": 1, "rules": [{"keep": ""}]}, r"rules[0].keep: '' is no text for this"),
    ({"schema": 1, "rules": [{"keep": "a\x00"}]}, r"rules[0].keep: 'a\x00' is no text for this"),
    ({"schema": 1, "rules": [{"drop": "a", "why": "b"}]}, r"rules[0].why: there is no such key here"),
    ({"schema": 1, "rules": [{"source": "a"}]}, r"rules[0]: a rule has either target or targets"),
    ({"schema": 1, "rules": [{"source": "a", "sources": ["a"], "target": "b"}]}, "either source or sources"),
    ({"schema": 1, "rules": [{"sources": [], "target": "b"}]}, r"rules[0].sources: has 0 entries"),
    ({"schema": 1, "rules": [renamed(comment=1)]}, r"rules[0].comment: a comment is a text"),
    ({"schema": 1, "rules": [renamed(), {"drop": "a"}]}, r"rules[1]: a is read by rules[0] already"),
    ({"schema": 1, "rules": [{"source": "a", "targets": ["b", "b"]}]}, r"rules[0].targets[1]: b is there twice"),
    ({"schema": 1, "rules": [{"source": "a", "targets": ["b", "c"]}]}, "make 1 of the 1 sources, but there are 2"),
    (
        {"schema": 1, "rules": [{"source": "a.{x}", "target": "b"}]},
        r"the sources have {x}, and the other side doesn't",
    ),
    ({"schema": 1, "rules": [{"source": "a", "target": "{layer}.{expert}"}]}, "{expert}, {layer}, and the other side"),
    ({"schema": 1, "rules": [{"source": "a.{layer}", "target": "b"}]}, "make many tensors of each use of the rule"),
    ({"schema": 1, "rules": [{"source": "a", "target": "b.{layer}"}]}, "make one tensor of each use of the rule"),
    ({"schema": 1, "rules": [{"sources": ["{x}", "b"], "target": "{x}"}]}, r"rules[0].sources[1]: all sources of a"),
    ({"schema": 1, "rules": [{"keep": "a.{layer"}]}, r"rules[0].keep: the braces in 'a.{layer' are no placeholder"),
    ({"schema": 1, "rules": [{"keep": "a.{1x}"}]}, "are no placeholder"),
    ({"schema": 1, "rules": [{"keep": "a.{x}.{x}"}]}, "a placeholder is there twice"),
    ({"schema": 1, "rules": [{"keep": "a.{x+hidden_size}"}]}, "{x+hidden_size} is no number"),
    ({"schema": 1, "rules": [{"drop": "{a}.{b}.{c}.{d}"}]}, "fits names in too many ways"),
    ({"schema": 1, "rules": [{"drop": "{a}{b}"}]}, "fits names in too many ways"),
    ({"schema": 1, "rules": [renamed(operations=[])] * 10_001}, "rules: has 10001 entries"),
]


@pytest.mark.parametrize(("content", "words"), FAULTS)
def test_a_mistake_is_told_with_its_place(content, words):
    error = refused(content)
    assert words in error.message
    assert error.file == "mapping"
    assert error.expected
    assert error.found


OPERATION_FAULTS = [
    ({"dim": 0}, "rules[0].operations[0]: an operation is an object with the key op"),
    ({"op": "spilt"}, "rules[0].operations[0].op: 'spilt' is not one of: split, concatenate"),
    ({"op": "split", "dim": 0, "heads": 4}, "rules[0].operations[0].heads: there is no such key here"),
    ({"op": "split", "parts": 2}, "rules[0].operations[0]: the key dim is missing"),
    ({"op": "split", "dim": 0}, "rules[0].operations[0]: split is told either parts or sizes"),
    ({"op": "split", "dim": -1, "parts": 2}, "rules[0].operations[0].dim: this number is out of bounds"),
    ({"op": "split", "dim": 0, "parts": 1}, "rules[0].operations[0].parts: this number is out of bounds"),
    ({"op": "split", "dim": 0, "sizes": [2, 0]}, "rules[0].operations[0].sizes[1]: this number is out of bounds"),
    ({"op": "split", "dim": 0, "sizes": [2.5]}, "sizes[0]: expected a whole number or a key of config.json"),
    ({"op": "split", "dim": True, "parts": 2}, "dim: expected a whole number, found true or false"),
    (
        {"op": "concatenate", "dim": 0, "sizes": [1, 2]},
        "concatenate works on 2 tensors, and there are 1 at this place",
    ),
    ({"op": "stack", "dim": 0}, "there is nothing to stack"),
    ({"op": "transpose", "dims": [0, 0]}, "rules[0].operations[0].dims: the two are the same"),
    ({"op": "transpose", "dims": [0]}, "rules[0].operations[0].dims: has 1 entries"),
    ({"op": "reshape", "shape": [-1, -1]}, "only one dimension can be -1"),
    ({"op": "reshape", "shape": [0]}, "a dimension can't be 0"),
    ({"op": "join_heads"}, "join_heads works on 3 tensors, and there are 1 at this place"),
    ({"op": "split_groups", "num_attention_heads": 0}, "num_attention_heads: this number is out of bounds"),
    ({"op": "pairs_to_halves", "projection": "value"}, "projection: 'value' is not one of: query, key"),
    ({"op": "pad", "dim": 0, "size": 1 << 50}, "size: this number is out of bounds"),
    ({"op": "cast", "dtype": "int8"}, "dtype: 'int8' is not one of: float32, bfloat16, float16"),
]


@pytest.mark.parametrize(("operation", "words"), OPERATION_FAULTS)
def test_a_mistake_in_an_operation_is_told_with_its_place(operation, words):
    error = refused({"schema": 1, "rules": [renamed(operations=[operation])]})
    assert words in error.message


def test_a_slip_of_the_pen_is_told_with_what_may_be_meant():
    assert refused({"schema": 1, "rules": [renamed(operation=[])]}).hint == "Perhaps operations is meant."
    assert refused({"schema": 1, "rules": [with_operation("trimm")]}).hint == "Perhaps trim is meant."


def test_what_counts_already_cannot_be_unstacked():
    rule = {"source": "{layer}", "target": "{expert}", "operations": [{"op": "unstack", "dim": 0}]}
    assert "the tensors are one for each number already" in refused({"schema": 1, "rules": [rule]}).message


TEXTS = {
    "a list": ("x.json", "[]", "holds a list, not an object"),
    "not json": ("x.json", "{", "is not JSON"),
    "a key twice": ("x.json", '{"schema": 1, "schema": 1}', "has the key 'schema' twice"),
    "a key twice in yaml": ("x.yaml", "schema: 1\nrules: []\nrules: []", "has the key 'rules' twice"),
    "an infinity": ("x.json", '{"schema": 1, "rules": [], "name": 1e999}', "name: expected a text, found a number"),
    "half a character": ("x.json", '{"schema": 1, "rules": [], "comment": "\\ud800"}', "not valid Unicode at comment"),
    "depth": ("x.json", "[" * 100_000 + "]" * 100_000, "is nested too deeply"),
    "some depth": ("x.json", "[" * 40 + "]" * 40, "is nested too deeply"),
    "depth in yaml": ("x.yaml", "[" * 5_000 + "]" * 5_000, "is nested too deeply"),
    "an alias": ("x.yaml", "schema: 1\nname: &a x\nrules: [*a]", "has an alias in line 3"),
    "a billion laughs": ("x.yaml", "a: &a [x, x]\nb: &b [*a, *a]\n", "has an alias in line 2"),
    "a python tag": ("x.yaml", "schema: !!python/object/apply:os.system [x]", "is not YAML"),
    "a date": ("x.yaml", "schema: 1\nname: 2001-01-01", "has a date at name"),
    "an impossible date": ("x.yaml", "schema: 1\nname: 2001-99-99", "is not YAML"),
    "bytes": ("x.yaml", "schema: 1\nname: !!binary aGk=", "has a bytes at name"),
    "a number as key": ("x.yaml", "1: 2", "has the key '1', which is no text"),
    "a list as key": ("x.yaml", "? [a]\n: b", "is not YAML"),
    "no yaml": ("x.yaml", "a: b: c", "is not YAML"),
    "nothing": ("x.yaml", "", "holds a NoneType, not an object"),
    "too much": ("x.json", " " * (LARGEST_BYTES + 1), f"has {LARGEST_BYTES + 1} bytes"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_text_that_is_no_mapping_is_refused_with_the_files_name(case, tmp_path):
    name, text, words = TEXTS[case]
    (tmp_path / name).write_text(text)
    error = refused(str(tmp_path / name))
    assert words in error.message
    assert name in error.message


def test_files_that_are_not_there_or_no_text_are_refused(tmp_path):
    assert "there is no file" in refused(str(tmp_path / "x.json")).message
    assert "is a folder" in refused(str(tmp_path)).message
    (tmp_path / "x.json").write_bytes(b"\xff\xfe{")
    assert "is not UTF-8 text" in refused(str(tmp_path / "x.json")).message
    assert "has more than" in refused("{" + " " * LARGEST_BYTES).message


PLAIN = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["a", "{layer}", "{x}.y", "{", ""])
)
_RULE_KEYS = ["source", "sources", "target", "targets", "operations", "keep", "drop", "reason"]
_OPERATION_KEYS = ["op", "dim", "dims", "parts", "sizes", "shape", "from", "size", "dtype", "projection"]
KEYS = st.sampled_from(["schema", "rules", "name", "strict", "extends", *_RULE_KEYS, *_OPERATION_KEYS])
DOCUMENTS = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4))
OPERATION = st.fixed_dictionaries(
    {"op": st.sampled_from(list(OPERATIONS))},
    optional=dict.fromkeys(
        ("dim", "parts", "size", "from", "sizes", "shape", "dims", "dtype", "projection", "head_dim"),
        st.integers(-1, 3)
        | st.lists(st.integers(-1, 3), max_size=3)
        | st.sampled_from(["hidden_size", "bad", "query", "float16"]),
    ),
)
RULE = st.fixed_dictionaries(
    {
        "sources": st.lists(st.sampled_from(["a", "b", "c", "{layer}.d", "{m}.e"]), min_size=1, max_size=3),
        "targets": st.lists(st.sampled_from(["f", "g", "h", "{layer}.i", "{m}.j"]), min_size=1, max_size=3),
        "operations": st.lists(OPERATION, max_size=3),
    }
)


@given(DOCUMENTS, st.booleans())
def test_any_document_is_read_or_refused(content, whole):
    document = content if isinstance(content, dict) and not whole else {"schema": 1, "rules": [content]}
    with suppress(InvalidOption):
        assert read_mapping(json.dumps(document)).text


@given(st.text(alphabet=string.printable, max_size=60))
def test_any_yaml_is_read_or_refused(scratch, text):
    path = scratch / "fuzz.yaml"
    path.write_text(text)
    with pytest.raises(InvalidOption):
        read_mapping(str(path))


@given(
    st.lists(RULE, min_size=1, max_size=3), st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=6, max_size=6)
)
def test_any_rule_that_is_read_makes_tensors_or_says_what_does_not_fit(rules, shapes):
    try:
        mapping = read(*rules)
    except InvalidOption:
        return
    memory = Memory()
    names = ("a", "b", "c", "0.d", "1.d", "x.e")
    entries = [(name, memory.source(tuple(shape))) for name, shape in zip(names, shapes, strict=True)]
    with suppress(GeometryMismatch, UnmappedTensor, IncompleteCheckpoint):
        for _, expression in apply_rules(mapping.rules, entries, FACTS).entries:
            assert all(size > 0 for size in expression.shape)
            list(expression.requires((0,) * len(expression.shape), expression.shape))


def test_two_tensors_that_are_one_part_are_refused():
    memory = Memory()
    entries = [(name, memory.source((2,))) for name in ("0.d", "1.d", "01.d")]
    mapping = read({"source": "{expert}.d", "target": "d", "operations": [{"op": "stack", "dim": 0}]})
    with pytest.raises(GeometryMismatch, match=r"1\.d and 01\.d"):
        apply_rules(mapping.rules, entries, FACTS)


# --- what becomes of a checkpoint --------------------------------------------------------------------------

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}


def run_with(tmp_path, names, config=LLAMA):
    return Run(tmp_path, {name: torch.arange(6.0).reshape(2, 3) + number for number, name in enumerate(names)}, config)


def converted(run, *rules, **top):
    return run.convert(mapping=json.dumps({"schema": 1, "rules": rules, **top}))


def test_the_users_rules_come_first_and_the_family_after(tmp_path):
    run = run_with(tmp_path, ["x", "v_head.weight", "model.norm.weight"])
    found = converted(run, {"source": "x", "target": "y"})
    assert [target.name for target in found.mapping.targets] == ["y", "v_head.weight", "model.norm.weight"]
    assert found.mapping.family.startswith("mapping (mapping)")


def test_strict_refuses_what_no_rule_fits_and_names_the_nearest(tmp_path):
    run = run_with(tmp_path, ["blocks.0.norm", "blocks.0.nrom"])
    with pytest.raises(UnmappedTensor) as caught:
        converted(run, {"source": "blocks.{layer}.norm", "target": "n.{layer}"}, extends="none", name="mine")
    assert caught.value.tensor == "blocks.0.nrom"
    assert caught.value.expected == "blocks.{layer}.norm"
    assert "mine has no rule for the tensor blocks.0.nrom" in caught.value.message
    assert "option mapping" in caught.value.hint


def test_what_is_kept_or_dropped_on_purpose_is_covered(tmp_path):
    run = run_with(tmp_path, ["a", "b"])
    found = converted(run, {"keep": "a"}, {"drop": "b", "reason": "why not"}, extends="none")
    assert [target.name for target in found.mapping.targets] == ["a"]
    assert [(dropped.name, dropped.reason) for dropped in found.mapping.dropped] == [("b", "why not")]


def test_a_rule_that_no_tensor_fits_is_a_note(tmp_path):
    found = converted(run_with(tmp_path, ["a"]), {"source": "z.{m}", "target": "y.{m}"}, {"keep": "a"})
    assert "no tensor fits rules[0] (z.{m}) of the mapping" in found.mapping.notes


def test_two_tensors_of_one_name_are_refused_with_the_rule(tmp_path):
    with pytest.raises(GeometryMismatch, match=r"come to have the name b, one of them by rules\[0\] \(a\)"):
        converted(run_with(tmp_path, ["a", "b"]), {"source": "a", "target": "b"})


def test_what_is_cut_off_is_listed_and_what_needs_no_cut_is_not(tmp_path):
    rules = [{**with_operation("trim", dim=1, size=size), "sources": [name]} for name, size in (("a", 2), ("b", 3))]
    rules[1]["targets"] = ["c"]
    found = converted(run_with(tmp_path, ["a", "b"]), *rules)
    assert found.dropped == ["b, beyond 2 in dimension 1"]
    assert [tuple(target.expression.shape) for target in found.mapping.targets] == [(2, 2), (2, 3)]


def test_a_cast_is_of_one_tensor_and_ends_of_names_escape_the_option(tmp_path):
    rules = [with_operation("cast", targets=["a"], dtype="float16"), {"keep": "b"}, {"keep": "c"}]
    run = run_with(tmp_path, "abc")
    found = converted(run, *rules)
    assert [tensor.dtype for tensor in found.tensors().values()] == [torch.float16, torch.float32, torch.float32]
    text = json.dumps({"schema": 1, "rules": rules, "keep_float32": ["b"]})
    after = run.convert(mapping=text, dtype="bfloat16").tensors()
    assert [tensor.dtype for tensor in after.values()] == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_the_option_family_and_the_mapping_must_agree(tmp_path):
    text = json.dumps({"schema": 1, "extends": "none", "rules": [{"keep": "a"}]})
    with pytest.raises(InvalidOption, match="family says llama, but the mapping extends none"):
        run_with(tmp_path, ["a"]).convert(mapping=text, family="llama")


def test_shapes_that_do_not_fit_are_told_with_tensor_expected_and_found(tmp_path):
    run = run_with(tmp_path, ["a"])
    with pytest.raises(GeometryMismatch) as caught:
        converted(run, with_operation("expect", shape=[3, -1]))
    assert (caught.value.tensor, caught.value.expected, caught.value.found) == ("a", "[3, any]", "[2, 3]")


def test_the_finished_names_are_checked_against_the_config(tmp_path):
    config = {**LLAMA, "hidden_size": 8}
    with pytest.raises(GeometryMismatch, match=r"hidden_size is 8, but tensor model\.embed_tokens\.weight \[2, 3\]"):
        converted(
            run_with(tmp_path, ["a"], config), {"source": "a", "target": "model.embed_tokens.weight"}, extends="none"
        )
