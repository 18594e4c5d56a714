"""What tests share that compare with transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' own bars and notes out of the tests' output."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()
