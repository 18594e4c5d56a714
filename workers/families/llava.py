"""Vision-language and audio-language models that wrap a language model, as LLaVA does.

Since transformers 4.52 the wrapped parts are modules below ``model``; the hub's files keep the older names, which
pass unchanged. The hub keeps ``vision_model.`` in SigLIP and CLIP towers, which transformers 5 modules leave out:
transformers 5 reads both, transformers 4 and vLLM only the hub's.
Source: transformers 5 ``conversion_mapping.py`` ("llava", "llava_next", "video_llava", "fuyu", "mllama",
"qwen2_audio", "CLIPVisionModel").
"""

from __future__ import annotations

from workers.families.rules import Rule, Table, rename

MODEL_SINCE = (4, 52)
_LANGUAGE = (
    rename("model.language_model.{rest}", "language_model.model.{rest}", MODEL_SINCE),
    rename("lm_head.{rest}", "language_model.lm_head.{rest}", MODEL_SINCE),
)
# What both naming versions call the children of a CLIP or SigLIP tower, below or without "vision_model".
_TOWER = tuple(
    rename(f"model.vision_tower.{part}.{{rest}}", f"vision_tower.vision_model.{part}.{{rest}}", (5, 0))
    for part in ("embeddings", "encoder", "pre_layrnorm", "post_layernorm", "head")
)


def _below_model(*parts: str) -> tuple[Rule, ...]:
    """Rules that take the given children of ``model`` to the top, whole modules or single parameters."""
    return tuple(
        rename(f"model.{part}{rest}", f"{part}{rest}", MODEL_SINCE) for part in parts for rest in (".{rest}", "")
    )


TABLES = (
    Table(
        "llava",
        ("aya_vision", "gemma3", "got_ocr2", "llava", "mistral3", "paligemma", "pp_chart2table", "vipllava"),
        (*_LANGUAGE, *_TOWER, *_below_model("vision_tower", "multi_modal_projector")),
    ),
    Table("internvl", ("internvl",), (*_LANGUAGE, *_below_model("vision_tower", "multi_modal_projector"))),
    Table(
        "llava_next",
        ("llava_next", "llava_next_video", "llava_onevision"),
        (*_LANGUAGE, *_TOWER, *_below_model("vision_tower", "multi_modal_projector", "image_newline")),
    ),
    Table(
        "video_llava",
        ("video_llava",),
        (*_LANGUAGE, *_below_model("image_tower", "video_tower", "multi_modal_projector")),
    ),
    Table("fuyu", ("fuyu",), (*_LANGUAGE, *_below_model("vision_embed_tokens"))),
    Table("mllama", ("mllama",), (*_LANGUAGE, *_below_model("vision_model", "multi_modal_projector"))),
    Table(
        "qwen2_audio",
        ("audioflamingo3", "glmasr", "musicflamingo", "qwen2_audio", "voxtral", "voxtral_realtime"),
        (*_LANGUAGE, *_below_model("audio_tower", "multi_modal_projector")),
    ),
)
