"""A folder with a state dict in one torch file: ``*.pt``, ``*.pth`` or ``*.bin`` of ``torch.save``.

The most general of the torch formats: it yields to every other that recognises more than a file's ending.
"""

from __future__ import annotations

import re

from workers.checkpoint import Checkpoint
from workers.checkpoint_builder import CheckpointBuilder
from workers.errors import AmbiguousSource, UnknownFormat
from workers.formats import dcp, hf_bin
from workers.formats._format import Detection, Format, Listing
from workers.formats._state_dict import STATE_DICT_OPTIONS
from workers.formats._torch_state_dict import add_model, read_state_dicts
from workers.formats._weight_files import SAFETENSORS
from workers.options import ConvertOptions

SIGNS = "one state dict *.pt, *.pth or *.bin"

_STATE_DICT = re.compile(r".+\.(pt|pth|bin|ckpt)")
# What trainers save beside the weights, and what other formats are made of.
_OTHER = re.compile(
    r"""(optim|scheduler|lr_scheduler|rng_state|random_states|scaler|training_args|trainer_state|dataloader|sampler
    |extra_state|common|custom_checkpoint|tokenizer).* | .*optim(izer)?(_states?)?\.(pt|pth|bin)
    | .*_rank_?\d+\.(pt|pth|bin|ckpt) | .*mp_rank_\d+.* | layer_\d+-.*""",
    re.VERBOSE,
)


def detect(listing: Listing) -> Detection | None:
    """Recognise a folder that has a torch file which could be a state dict."""
    if (
        hf_bin.detect(listing)
        or dcp.detect(listing)
        or any(name.endswith(SAFETENSORS.end) for name in listing.files())
    ):
        return None
    names = _candidates(listing)
    return Detection((", ".join(names[:4]),), generic=True) if names else None


def open_torch_pt(listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open the only state dict of a folder by its pickle."""
    names = _candidates(listing)
    if not names:
        raise UnknownFormat(
            f"{listing.folder.address.url} has no state dict", expected=SIGNS, hint="Give the folder that holds it."
        )
    if len(names) > 1:
        raise AmbiguousSource(
            f"{listing.folder.address.url} holds several torch files: {', '.join(names[:8])}",
            expected="one state dict",
            found=", ".join(names[:8]),
            hint="Move the one that is wanted into a folder of its own; the option config_dir names its config.",
        )
    dicts = read_state_dicts(listing.folder, [listing.files()[names[0]]])
    builder = CheckpointBuilder()
    part = add_model(builder, dicts, options)
    return hf_bin.whole_model(listing, options, builder, "torch-pt", (names[0], part, ()))


def _candidates(listing: Listing) -> list[str]:
    return sorted(name for name in listing.files() if _STATE_DICT.fullmatch(name) and not _OTHER.fullmatch(name))


FORMAT = Format("torch-pt", "A state dict in one torch file", SIGNS, detect, open_torch_pt, STATE_DICT_OPTIONS)
