"""Tied embeddings: one tensor that a model uses twice, and that training saves twice.

Hugging Face keeps it once and says so in the config. Whether the two are equal needs a look at the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from workers.errors import GeometryMismatch, InvalidOption
from workers.expressions import Expression, Slice, Source
from workers.families.registry import text_config, transformers_version
from workers.families.rules import Entry
from workers.mapping import Dropped, Probe

FLAG = "tie_word_embeddings"

Doubt = Literal["correct", "refuse", "weights"]
"""Config and tensors contradict each other: correct the config and say so, refuse, or believe the weights that are
there but miss no head that the config asks for."""

_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "thinker.lm_head.weight", "embed_out.weight")
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "language_model.embed_tokens.weight",
    "thinker.model.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "transformer.wte.weight",
    "transformer.word_embeddings.weight",
    "backbone.embeddings.weight",
    "gpt_neox.embed_in.weight",
)


@dataclass(slots=True)
class Tying:
    """The model's tensors after tying, and what that changes in the config."""

    entries: list[Entry]
    dropped: list[Dropped] = field(default_factory=list)
    flag: bool | None = None
    """What ``tie_word_embeddings`` must say; None leaves it as it is."""
    notes: list[str] = field(default_factory=list)


def tie(
    entries: list[Entry], config: Mapping[str, Any], probe: Probe, *, wanted: bool | None, doubt: Doubt = "correct"
) -> Tying:
    """Leave out an output head that only repeats the embedding, or write one where it is ``wanted`` apart.

    Where the config says tied and the tensors differ, both stay and the config is corrected. ``wanted`` is what the
    user asks for; a wish that would lose weights is a ``GeometryMismatch``. ``doubt`` says what happens where config
    and tensors contradict each other and the user says nothing.
    """
    tensors = dict(entries)
    head = next((name for name in _HEADS if name in tensors), None)
    embedding = next((name for name in _EMBEDDINGS if name in tensors), None)
    if embedding is None:
        if wanted is not None:
            raise _nothing_to_tie(wanted)
        return Tying(entries)
    if head is None:
        if doubt != "correct" and wanted is None and _flag(config) is False and _may_generate(config):
            raise _contradiction("false", "there is no output head", embedding)
        return _without_head(entries, embedding, config, wanted=wanted)
    if doubt == "weights" and wanted is None and _flag(config) is None:
        wanted = _equal(tensors[head], tensors[embedding], probe)
    if not (_says_tied(config) if wanted is None else wanted):
        return Tying(entries, flag=wanted)
    if _equal(tensors[head], tensors[embedding], probe):
        kept = [entry for entry in entries if entry[0] != head]
        return Tying(kept, [Dropped(head, f"tied: equal to {embedding}")], flag=True)
    if wanted:
        raise GeometryMismatch(
            f"the option {FLAG} says true, but {head} and {embedding} differ",
            tensor=head,
            expected=f"equal to {embedding}",
            found="other values",
            hint="Leave the option out: both tensors are then written, and the config says that they are not tied.",
        )
    if doubt == "refuse" and wanted is None and _flag(config) and tensors[head].shape == tensors[embedding].shape:
        raise _contradiction("true", f"{head} and {embedding} differ", head)
    note = f"config.json said that {head} is tied to {embedding}, but they differ: both are kept and it says false"
    return Tying(entries, flag=False, notes=[note])


def _nothing_to_tie(wanted: bool) -> InvalidOption:  # noqa: FBT001 - the value of an option
    return InvalidOption(
        f"the option {FLAG} says {str(wanted).lower()}, but no tensor has the name of an embedding that could be tied",
        expected=_EMBEDDINGS[0],
        found="no embedding",
        hint="Leave the option out, or map the names to Hugging Face's (options family and mapping).",
    )


def _contradiction(told: str, found: str, tensor: str) -> GeometryMismatch:
    other = "false" if told == "true" else "true"
    return GeometryMismatch(
        f"config.json says that {FLAG} is {told}, but {found}",
        file="config.json",
        tensor=tensor,
        expected=f"{FLAG} = {told}",
        found=found,
        hint=f"The config belongs to another model, or the model was trained otherwise: set the option {FLAG} to "
        f"{other} if the weights are right.",
    )


def _without_head(entries: list[Entry], embedding: str, config: Mapping[str, Any], *, wanted: bool | None) -> Tying:
    """Only the embedding is there: nothing to leave out, but perhaps a head to write or a flag to raise."""
    generates = any(_is_generative(name) for name in config.get("architectures") or ())
    if wanted is False and generates:
        place = next(index for index, (name, _) in enumerate(entries) if name == embedding)
        head = _head_for(embedding)
        note = f"{head} is written as a copy of {embedding}, as the option {FLAG} asks"
        return Tying([*entries, (head, entries[place][1])], flag=False, notes=[note])
    if generates and _says_tied(config) and config.get(FLAG) is None and FLAG in text_config(config):
        return Tying(entries, flag=True)
    if generates and wanted is None and not _says_tied(config):
        return Tying(
            entries, notes=[f"there is no output head, and config.json does not say that {embedding} is tied"]
        )
    return Tying(entries, flag=wanted)


def _head_for(embedding: str) -> str:
    for prefix in ("language_model.model.", "thinker."):
        if embedding.startswith(prefix):
            return f"{prefix.partition('.')[0]}.lm_head.weight"
    return "embed_out.weight" if embedding.startswith("gpt_neox.") else "lm_head.weight"


def _may_generate(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures") or ()
    return not architectures or any(map(_is_generative, architectures))


def _is_generative(architecture: Any) -> bool:
    return isinstance(architecture, str) and architecture.endswith(("ForCausalLM", "ForConditionalGeneration"))


def _says_tied(config: Mapping[str, Any]) -> bool:
    """What the config says: at the top, else in its language model, else by leaving it out.

    transformers 4 writes only what differs from its defaults, so that a missing flag means tied there.
    """
    flag = _flag(config)
    return transformers_version(config)[0] == 4 if flag is None else flag


def _flag(config: Mapping[str, Any]) -> bool | None:
    """What the config says in so many words, None when nothing."""
    for part in (config, text_config(config)):
        if isinstance(part.get(FLAG), bool):
            return bool(part[FLAG])
    return None


def _equal(head: Expression, embedding: Expression, probe: Probe) -> bool:
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return False
    while isinstance(head, Slice) and isinstance(embedding, Slice):  # both without their padding
        if (head.dim, head.start, head.stop) != (embedding.dim, embedding.start, embedding.stop):
            return False
        head, embedding = head.inner, embedding.inner
    if not isinstance(head, Source) or not isinstance(embedding, Source):
        return False  # an adapter was added to one of them
    return head.tensor == embedding.tensor or probe.equal(head.tensor, embedding.tensor)
