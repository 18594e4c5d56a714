"""Compare two models by what they compute: logits on the same random tokens, through transformers.

Only ``verify --forward`` imports this; it needs the ``forward`` extra. Code that a model brings is not run.
"""

from __future__ import annotations

from typing import Any

from workers.errors import InvalidOption, VerificationFailed
from workers.verify import Report

TOKENS = 32
BATCH = 2
SEED = 20


def compare_logits(model_a: str, model_b: str, *, atol: float = 0.0) -> Report:
    """Run both models in float32 on the same tokens and compare the logits of every position.

    Both are paths of local folders. Raises ``VerificationFailed`` when one can't be loaded without missing weights.
    """
    try:
        import torch  # noqa: PLC0415 - an extra, and slow to import
        import transformers  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InvalidOption(
            "comparing logits needs transformers, which isn't installed", hint="pip install 'unshard[forward]'"
        ) from error
    quiet: Any = transformers.logging.set_verbosity_error
    quiet()
    quiet = transformers.logging.disable_progress_bar
    quiet()
    config = transformers.AutoConfig.from_pretrained(model_a)
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = int(config.get_text_config().vocab_size)
    tokens = torch.randint(vocabulary, (BATCH, TOKENS), generator=generator)
    results = []
    for path in (model_a, model_b):
        model = _load(path)
        with torch.inference_mode():
            results.append(model(input_ids=tokens).logits.float())
        del model
    a, b = results
    if a.shape != b.shape:
        return Report((f"logits have shapes {tuple(a.shape)} and {tuple(b.shape)}",), 1, 0, ("logits",))
    difference = float((a - b).abs().max())
    problems = () if difference <= atol else (f"logits differ by up to {difference:g} (allowed: {atol:g})",)
    return Report(
        problems=problems,
        tensors=1,
        bytes=a.numel() * 4,
        checks=(f"logits of {BATCH} x {TOKENS} random tokens",),
        details={"largest_difference": difference},
    )


def _load(path: str) -> Any:
    import torch  # noqa: PLC0415 - see compare_logits
    import transformers  # noqa: PLC0415 - see compare_logits

    config = transformers.AutoConfig.from_pretrained(path)
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None)
    if kind is None:
        raise VerificationFailed(
            f"{path}: this transformers has no class {name!r}", file=path, hint="Install the version the model needs."
        )
    try:
        model, loading = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    except ImportError as error:  # some quantised models need a library of their own
        raise InvalidOption(
            f"comparing logits needs a package that isn't installed: {error}",
            file=path,
            hint="Install it, or compare weights: leave --forward out.",
        ) from error
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise VerificationFailed(f"{path}: {name} lacks weights: {', '.join(missing[:5])}", file=path)
    model.eval()
    return model
