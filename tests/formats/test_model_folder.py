"""Which small files go with a model, and which never do."""

from __future__ import annotations

import pytest

from workers.errors import CorruptFile, IncompleteCheckpoint
from workers.formats import Listing, _model_folder
from workers.formats._model_folder import find_model_files, read_json
from workers.options import ConvertOptions
from workers.storage import open_folder

MODEL_FILES = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "configuration_custom.py",
    "generation_config.json",
    "merges.txt",
    "modeling_custom.py",
    "preprocessor_config.json",
    "processor_config.json",
    "qwen.tiktoken",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
]
TRAINING_FILES = [
    "model_world_size_1_rank_0.pt",
    "optim_world_size_1_rank_0.pt",
    "extra_state_world_size_1_rank_0.pt",
    "data.pt",
    "fsdp_config.json",
    "lora_train_meta.json",
    "latest_checkpointed_iteration.txt",
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "training_args.bin",
    "trainer_state.json",
    ".gitattributes",
]


def listing_of(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return Listing(open_folder(str(folder)))


def found(listing, places, **options):
    return find_model_files(listing, places, ConvertOptions(**options))


@pytest.mark.parametrize("only_model", [True, False])
def test_a_model_takes_its_small_files_and_nothing_of_the_training(tmp_path, only_model):
    listing = listing_of(tmp_path, "config.json", *MODEL_FILES, *TRAINING_FILES)
    files = found(listing, {"": only_model})
    assert [file.target_path for file in files.side_files] == MODEL_FILES
    assert files.config == {}


def test_a_folder_of_the_model_alone_takes_what_else_belongs_to_it(tmp_path):
    listing = listing_of(tmp_path, "hf/config.json", "hf/extra.json", "hf/LICENSE", "hf/README.md", "metrics.json")
    files = found(listing, {"hf": True, "": False})
    assert [(file.source_path, file.target_path) for file in files.side_files] == [
        ("hf/LICENSE", "LICENSE"),
        ("hf/README.md", "README.md"),
        ("hf/extra.json", "extra.json"),
    ]
    assert found(listing_of(tmp_path, "config.json"), {"": False}).side_files == ()


def test_further_chat_templates_keep_their_folder(tmp_path):
    name = "additional_chat_templates/tool_use.jinja"
    listing = listing_of(tmp_path, "config.json", name, "additional_chat_templates/x.pt", "other/y.jinja")
    assert [file.target_path for file in found(listing, {"": True}).side_files] == [name]


def test_the_first_place_with_a_config_counts(tmp_path):
    listing = listing_of(tmp_path, "huggingface/tokenizer.json", "config.json", "vocab.json")
    files = found(listing, {"huggingface": True, "": False})
    assert files.config_path == "config.json"
    assert [file.target_path for file in files.side_files] == ["vocab.json"]


def test_without_a_config_it_is_said_where_one_was_looked_for(tmp_path):
    files = found(listing_of(tmp_path, "huggingface/tokenizer.json"), {"huggingface": True, "": False})
    assert files.config is None
    assert files.looked_in == "huggingface/ and the folder itself"
    assert [file.target_path for file in files.side_files] == ["tokenizer.json"]


def test_a_folder_the_user_names_comes_before_all(tmp_path):
    listing = listing_of(tmp_path / "source", "config.json", "tokenizer.json")
    listing_of(tmp_path / "config", "config.json", "vocab.json")
    files = found(listing, {"": True}, config_dir=str(tmp_path / "config"))
    assert [file.target_path for file in files.side_files] == ["vocab.json"]
    assert files.side_files[0].folder.url == str(tmp_path / "config")
    with pytest.raises(IncompleteCheckpoint, match="config_dir"):
        found(listing, {"": True}, config_dir=str(tmp_path))


@pytest.mark.parametrize("content", ["", "[]", "nul", "version https://git-lfs.github.com/spec/v1", "[" * 100_000])
def test_what_is_no_json_object_is_corrupt(tmp_path, content):
    listing = listing_of(tmp_path, "config.json")
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CorruptFile) as caught:
        read_json(listing, "config.json")
    assert caught.value.file == "config.json"


def test_a_huge_json_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(_model_folder, "LARGEST_JSON_BYTES", 1)
    with pytest.raises(CorruptFile, match="2 bytes"):
        read_json(listing_of(tmp_path, "config.json"), "config.json")
