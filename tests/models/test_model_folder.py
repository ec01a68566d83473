import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import save_file

from trl_algos.data import bundled_model_path
from trl_algos.errors import ConfigError
from trl_algos.models.folder import model_problems, read_json
from trl_algos.models.weight_files import parameter_count, weight_shapes

BUNDLED = ["arithmetic-lm"]


def problems(name: object, **options: bool) -> list[str]:
    return model_problems("model_name_or_path", str(name), BUNDLED, **options)


def the_problem(name: object, **options: bool) -> str:
    found = problems(name, **options)
    assert len(found) == 1, found
    assert found[0].startswith("`model_name_or_path`: ")
    return found[0].removeprefix("`model_name_or_path`: ")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model folder: the bundled one, copied."""
    return Path(shutil.copytree(bundled_model_path(), tmp_path / "model"))


@pytest.fixture
def shards(folder: Path) -> Path:
    """A folder whose weights are two files and an index."""
    (folder / "model.safetensors").unlink()
    save_file({"a.weight": torch.zeros(3, 2)}, folder / "model-1.safetensors")
    save_file({"b.weight": torch.zeros(5, dtype=torch.bfloat16)}, folder / "model-2.safetensors")
    index(folder, {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"})
    return folder


def index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def set_config(folder: Path, **changes: object) -> None:
    config = read_json(folder / "config.json") | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_whole_folders_have_no_problem(folder: Path, tmp_path: Path) -> None:
    assert problems(folder) == problems(bundled_model_path()) == []
    assert problems(folder, trust_remote_code=True, quantized=True) == []
    tiny.gpt2().save_pretrained(tmp_path / "gpt2", max_shard_size="20KB")
    tiny.tokenizer().save_pretrained(tmp_path / "gpt2")
    assert (tmp_path / "gpt2" / "model.safetensors.index.json").is_file()
    assert problems(tmp_path / "gpt2") == []


@pytest.mark.parametrize(
    "name", ["arithmetic-lm", "gpt2", "Qwen/Qwen2.5-0.5B-Instruct", "org/arithmetic-ml", "a/b_c.d-1"]
)
def test_bundled_names_and_hub_ids_have_no_problem(name: str) -> None:
    assert problems(name) == []


def test_a_near_miss_of_a_bundled_name_gets_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "'arithmetic-ml' is neither a folder nor a bundled model. Did you mean 'arithmetic-lm'?"
    assert the_problem("arithmetic-ml") == message
    monkeypatch.chdir(tmp_path)
    shutil.copytree(bundled_model_path(), "arithmetic-ml")
    assert problems("arithmetic-ml") == []


def test_a_bundled_name_wins_over_a_file_but_not_over_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("arithmetic-lm").touch()
    assert problems("arithmetic-lm") == []
    Path("arithmetic-lm").unlink()
    Path("arithmetic-lm").mkdir()
    assert "has no config.json" in the_problem("arithmetic-lm")


@pytest.mark.parametrize(
    "name", ["", " ", "my model", "org/my model", "-x", "a--b", "a..b", "x.git", "a/", "é è", "a\x00b"]
)
def test_names_that_are_no_hub_id_are_refused(name: str) -> None:
    assert the_problem(name).startswith(f"{name!r} is neither a folder nor a Hub id")


def test_paths_to_nothing_name_the_nearest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/quickstart/checkpoint-10").mkdir(parents=True)
    Path("runs/quickstort").touch()
    assert (
        the_problem("./runs/quickstrat") == "there is no folder './runs/quickstrat'. Did you mean 'runs/quickstart'?"
    )
    assert "Did you mean 'runs'?" in the_problem("rnus/quickstart/checkpoint-10")
    assert "Did you mean 'runs/quickstart/checkpoint-10'?" in the_problem("runs/quickstart/checkpoint-1")
    assert the_problem(f"{tmp_path}/zzz") == f"there is no folder '{tmp_path}/zzz'."
    assert "there is no folder 'a/b/c/d'" in the_problem("a/b/c/d")
    assert "there is no folder '../runs/x/y'" in the_problem("../runs/x/y")


def test_a_name_below_a_folder_of_here_is_a_hub_id_only_if_it_was_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    Path("Qwen/Qwen2.5-1.5B").mkdir(parents=True)
    message = the_problem("Qwen/Qwen2.5-0.5B")
    assert "Did you mean 'Qwen/Qwen2.5-1.5B'?" in message
    assert "`hf download Qwen/Qwen2.5-0.5B`" in message
    Path("cache/models--Qwen--Qwen2.5-0.5B").mkdir(parents=True)
    assert problems("Qwen/Qwen2.5-0.5B") == []


def test_addresses_and_tildes_are_told_how_to_be_written() -> None:
    message = the_problem("https://huggingface.co/Qwen/Qwen2.5-0.5B/tree/main")
    assert message.endswith("give the id alone, 'Qwen/Qwen2.5-0.5B'.")
    assert the_problem("~/nowhere").endswith(f"write {str(Path.home() / 'nowhere')!r}.")


def test_a_file_is_no_folder(folder: Path) -> None:
    assert f"is a file; give the folder of config.json, weights and tokenizer: {str(folder)!r}" in the_problem(
        folder / "model.safetensors"
    )


def test_a_folder_without_config_names_models_inside(folder: Path) -> None:
    assert the_problem(folder.parent).endswith(f"is not the folder of a model. Did you mean {str(folder)!r}?")
    (folder / "config.json").unlink()
    assert the_problem(folder).endswith("is not the folder of a model.")


def test_an_adapter_is_told_from_a_model(folder: Path) -> None:
    (folder / "config.json").unlink()
    adapter = folder / "adapter_config.json"
    adapter.write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}))
    message = the_problem(folder)
    assert "holds a PEFT adapter, not a model. Give its base model, 'Qwen/Qwen2.5-0.5B', or make one" in message
    adapter.write_text("{")
    assert "adapter_config.json is not valid JSON" in the_problem(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is not valid JSON: "),
        ("\xff", "config.json is not valid JSON: "),
        ("[" * 100_000, "config.json is not valid JSON: "),
        ("[]", "config.json must hold a JSON object, but holds a list."),
        ("{}", "config.json has no `model_type`"),
        (
            '{"model_type": "lama"}',
            "`model_type` 'lama' is not one that the installed transformers knows. Did you mean",
        ),
        ('{"model_type": 3}', "`model_type` 3 is not one"),
        ('{"model_type": "x", "auto_map": {"AutoConfig": "c.C"}}', "only with `trust_remote_code: true`."),
    ],
)
def test_a_config_that_says_nothing_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert message in the_problem(folder)


def test_own_code_runs_if_it_is_trusted_or_not_needed(folder: Path) -> None:
    set_config(folder, model_type="x", auto_map={"AutoConfig": "c.C"})
    assert problems(folder, trust_remote_code=True) == []
    set_config(folder, model_type=None)
    assert problems(folder, trust_remote_code=True) == []
    assert len(problems(folder)) == 1
    set_config(folder, model_type="llama")
    assert problems(folder) == []


def test_what_is_stored_quantised_is_not_quantised_again(folder: Path) -> None:
    set_config(folder, quantization_config={"quant_method": "gptq"})
    assert problems(folder) == []
    assert "is stored quantised (gptq)" in the_problem(folder, quantized=True)
    set_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert problems(folder, quantized=True) == []


def test_every_model_type_of_transformers_is_known(folder: Path) -> None:
    from transformers import CONFIG_MAPPING

    from trl_algos.models.folder import _model_types

    assert set(CONFIG_MAPPING) <= _model_types()


def test_weights_in_pickles_are_let_through_but_not_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no weights: neither model.safetensors nor model.safetensors.index.json." in the_problem(folder)
    (folder / "pytorch_model.bin").touch()
    assert problems(folder) == []
    with pytest.raises(ConfigError, match="has no weights"):
        weight_shapes(folder)


def test_shards_without_an_index_are_told_so(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "pytorch_model.bin").touch()
    assert the_problem(folder).endswith("Its .safetensors files need model.safetensors.index.json.")


def test_shapes_and_types_are_those_of_the_tensors(folder: Path, shards: Path) -> None:
    assert weight_shapes(shards) == {"a.weight": ((3, 2), "F32"), "b.weight": ((5,), "BF16")}
    assert parameter_count(shards) == 11
    assert problems(shards) == []


def test_the_bundled_model_counts_tied_weights_once() -> None:
    # 17·64 embedding; two layers of 4·64² attention, 3·64·128 MLP and two norms; the last norm.
    assert parameter_count(bundled_model_path()) == 17 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    assert weight_shapes(bundled_model_path())["model.layers.1.mlp.down_proj.weight"] == ((64, 128), "F32")


def test_empty_tensors_and_single_numbers_have_shapes_too(folder: Path) -> None:
    save_file({"none": torch.zeros(0, 3), "one": torch.tensor(1.0)}, folder / "model.safetensors")
    assert weight_shapes(folder) == {"none": ((0, 3), "F32"), "one": ((), "F32")}
    assert parameter_count(folder) == 1


def test_a_single_file_wins_over_an_index(shards: Path) -> None:
    save_file({"c": torch.zeros(1)}, shards / "model.safetensors")
    assert weight_shapes(shards) == {"c": ((1,), "F32")}


def test_every_missing_or_broken_shard_is_named(shards: Path) -> None:
    (shards / "model-1.safetensors").unlink()
    (shards / "model-2.safetensors").write_bytes(b"")
    found = problems(shards)
    assert [message.rpartition("/")[2].split(" ")[0] for message in found] == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]
    assert found[0].endswith("is missing.")
    assert "cut short: 0 bytes" in found[1]


def test_an_index_that_lists_what_no_shard_holds_is_refused(shards: Path) -> None:
    index(shards, {"a.weight": "model-1.safetensors", "z": "model-2.safetensors"})
    assert "lists 'z' in model-2.safetensors, which does not hold it" in the_problem(shards)


@pytest.mark.parametrize("weight_map", [[], None, 3, {"a": 3}, {"a": None}])
def test_a_broken_index_is_refused(shards: Path, weight_map: object) -> None:
    index(shards, weight_map)
    assert "is not an index of weights" in the_problem(shards)


def test_an_index_that_is_no_json_is_refused(shards: Path) -> None:
    for text in ("{", "[]", "3"):
        (shards / "model.safetensors.index.json").write_text(text)
        assert "is not an index of weights" in the_problem(shards)


def test_a_download_that_broke_off_is_seen(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert f"is not whole: it has {len(whole) - 1} bytes and should have {len(whole)}." in the_problem(folder)
    path.write_bytes(whole + b"x")
    assert "is not whole" in the_problem(folder)
    path.write_bytes(whole[:100])
    assert "cut short: 100 bytes" in the_problem(folder)


def test_a_git_lfs_pointer_is_seen(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "is a Git LFS pointer, not the weights; run `git lfs pull`" in the_problem(folder)


def with_header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


@pytest.mark.parametrize(
    "content",
    [
        with_header(b"{}", length=2**63),
        with_header(b"{}", length=3),
        with_header(b"", length=0),
        with_header(b"[]"),
        with_header(b"{{"),
        with_header(b"\xff\xff"),
        with_header(b'{"a": 3}'),
        with_header(b'{"a": {"shape": [1], "dtype": "F32"}}'),
        with_header(b'{"a": {"shape": [1], "dtype": "F32", "data_offsets": [0]}}'),
        with_header(b'{"a": {"shape": ["1"], "dtype": "F32", "data_offsets": [0, 0]}}'),
        with_header(b'{"a": {"shape": [-1], "dtype": "F32", "data_offsets": [0, 0]}}'),
        with_header(b'{"a": {"shape": [1], "dtype": "F32", "data_offsets": [0, "x"]}}'),
        with_header(b"[" * 100_000),
    ],
)
def test_what_is_no_safetensors_file_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert "is not a safetensors file" in the_problem(folder)


def test_a_file_without_tensors_is_whole(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(with_header(b"{}"))
    assert weight_shapes(folder) == {}
    assert problems(folder) == []


def test_a_header_longer_than_safetensors_allows_is_not_read(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:  # a sparse file: nothing is written
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(200_000_000)
    assert "header 100000001" in the_problem(folder)


@pytest.mark.parametrize(
    "files", [["tokenizer.json"], ["vocab.json", "merges.txt"], ["tokenizer.model"], ["vocab.txt"], ["tekken.json"]]
)
def test_any_kind_of_vocabulary_will_do(folder: Path, files: list[str]) -> None:
    (folder / "tokenizer.json").unlink()
    for name in files:
        assert "has no tokenizer: none of tokenizer.json, vocab.json with merges.txt, " in the_problem(folder)
        (folder / name).write_text("{}")
    assert problems(folder) == []


@pytest.mark.parametrize(
    "settings", [{"auto_map": {"AutoTokenizer": ["t.T", None]}}, {"tokenizer_class": "ByT5Tokenizer"}]
)
def test_tokenizers_without_a_vocabulary_need_none(folder: Path, settings: dict[str, object]) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert problems(folder) == []


def test_broken_tokenizer_files_are_seen(folder: Path) -> None:
    for text in ("version https://git-lfs", '{"a": 1', ""):
        (folder / "tokenizer.json").write_text(text)
        assert "tokenizer.json is not a whole JSON object." in the_problem(folder)
    shutil.copy(Path(bundled_model_path()) / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json is not valid JSON" in the_problem(folder)


def test_all_problems_of_a_folder_are_reported(folder: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).unlink()
    set_config(folder, model_type=None)
    found = problems(folder)
    assert ["model_type" in found[0], "weights" in found[1], "tokenizer" in found[2]] == [True] * 3


def test_checks_load_nothing_heavy() -> None:
    code = (
        "import sys; from trl_algos.data import bundled_model_path as path\n"
        "from trl_algos.models.memory import describe, estimate; from trl_algos.models.folder import model_problems\n"
        "model_problems('m', path(), []); describe(estimate(path(), {'use_peft': True}))\n"
        "print(' '.join(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "trl", "peft", "datasets", "accelerate", "safetensors"} & set(loaded)
