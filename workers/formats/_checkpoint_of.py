"""What every reader makes in the end: the ``Checkpoint`` of what it built and of the model's files beside it."""

from __future__ import annotations

from collections.abc import Callable

from workers.checkpoint import Checkpoint
from workers.checkpoint_builder import CheckpointBuilder
from workers.errors import IncompleteCheckpoint
from workers.formats._format import Listing
from workers.formats._model_folder import ModelFiles


def checkpoint_of(
    listing: Listing,
    builder: CheckpointBuilder,
    model: ModelFiles,
    names: tuple[str, str],
    explain: Callable[[IncompleteCheckpoint], IncompleteCheckpoint] = lambda gap: gap,
) -> Checkpoint:
    """A checkpoint of what ``builder`` holds; ``names`` are those of the format and of the tensors' naming.

    What a format knows beside it, it puts there by ``replace``. Raises what ``CheckpointBuilder.tables`` does.
    """
    storages, pieces, replicas = builder.tables(explain)
    return Checkpoint(
        address=listing.folder.address,
        format=names[0],
        naming=names[1],
        files=tuple(builder.files),
        tensors=tuple(builder.tensors),
        storages=storages,
        pieces=pieces,
        replicas=replicas,
        config=model.config,
        config_path=model.config_path,
        side_files=model.side_files,
        missing=model.missing,
    )
