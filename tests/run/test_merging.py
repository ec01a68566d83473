"""`trl-algos merge`: the merged model says what base and adapter say, and a merge that cannot be leaves nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preference_pairs as pairs
import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
)

from trl_algos import load_reward_model
from trl_algos.cli import main
from trl_algos.models.weight_files import weight_shapes

IDS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of base models: plain, tied, bfloat16, GPT-2, and a reward model."""
    folder = tmp_path_factory.mktemp("bases")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tied = tiny.llama().config
    tied.tie_word_embeddings = True
    torch.manual_seed(0)
    models = {
        "plain": tiny.llama(),
        "other": tiny.llama(1),
        "tied": LlamaForCausalLM(tied),
        "gpt2": tiny.gpt2(),
        "bfloat16": tiny.llama().to(torch.bfloat16),
        "classifier": pairs.classifier(),
    }
    models["plain"].generation_config = GenerationConfig(temperature=0.5, do_sample=True, pad_token_id=9)
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def adapter(folder: Path, base: Path, **config: Any) -> Any:
    """Random weights in everything that an adapter trains, saved as a run saves them."""
    scores = config.get("task_type") == "SEQ_CLS"
    auto_class: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = auto_class.from_pretrained(base, **({"num_labels": 1} if scores else {}))
    config = {"r": 2, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | config
    model = get_peft_model(model, LoraConfig(**config))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return model.eval()


def outputs(model: Any) -> Tensor:
    """Log-probs of a language model, scores of a classifier."""
    with torch.no_grad():
        logits = model.eval()(IDS).logits.float()
    return logits.log_softmax(-1) if logits.dim() == 3 else logits


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("plain", {}),
    "rsLoRA": ("plain", {"use_rslora": True, "lora_alpha": 3}),
    "DoRA": ("plain", {"use_dora": True}),
    "ranks of their own": ("plain", {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"down_proj": 1}}),
    "saved whole": ("plain", {"modules_to_save": ["lm_head", "norm"]}),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "embedding and head": ("plain", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "tied, untouched": ("tied", {}),
    "tied, embedding saved": ("tied", {"modules_to_save": ["embed_tokens"]}),
    "tied, head saved": ("tied", {"modules_to_save": ["lm_head"]}),
    "tied, both saved as one": ("tied", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "tied, embedding adapted": ("tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied, head adapted": ("tied", {"target_modules": ["lm_head", "q_proj"]}),
    "reward model of a language model": ("plain", {"task_type": "SEQ_CLS"}),
    "reward model": ("classifier", {"task_type": "SEQ_CLS", "use_dora": True}),
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_says_what_base_and_adapter_say(kind: str, bases: Path, tmp_path: Path) -> None:
    base, config = KINDS[kind]
    adapted = adapter(tmp_path / "adapter", bases / base, **config)
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "out")]) == 0
    scores = config.get("task_type") == "SEQ_CLS"
    auto_class: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    merged = auto_class.from_pretrained(tmp_path / "out")
    told = outputs(adapted)
    with adapted.disable_adapter():
        assert (outputs(adapted) - told).abs().max() > 1e-2
    torch.testing.assert_close(outputs(merged), told, atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == tiny.tokenizer().get_vocab()
    # What other readers than transformers go by.
    names = weight_shapes(tmp_path / "out")
    apart = kind.startswith("tied, ") and kind not in ("tied, untouched", "tied, both saved as one")
    assert merged.config.tie_word_embeddings is ((base == "tied" and not apart) or base == "gpt2")
    assert ("lm_head.weight" in names) is (not merged.config.tie_word_embeddings and not scores)
    assert not [name for name in names if "lora" in name or "modules_to_save" in name]
    if scores:
        assert merged.config.num_labels == 1
        torch.testing.assert_close(outputs(load_reward_model(tmp_path / "adapter")), outputs(merged))


def test_files_beside_the_weights(bases: Path, tmp_path: Path) -> None:
    """Tokenizer and figures of the adapter, generation config of the base; the base's tokenizer where it has none."""
    adapter(tmp_path / "adapter", bases / "plain")
    (tmp_path / "adapter" / "reward_model.json").write_text('{"reward_mean": 0.5, "reward_std": 2.0}')
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "out")]) == 0
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.temperature, generation.pad_token_id) == (0.5, tiny.PAD)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is None
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["reward_mean"], config["reward_std"]) == (0.5, 2.0)
    for path in (tmp_path / "adapter").glob("*token*"):
        path.unlink()
    (tmp_path / "empty" / "out").mkdir(parents=True)
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "empty" / "out")]) == 0
    assert "m.content" in AutoTokenizer.from_pretrained(tmp_path / "empty" / "out").chat_template
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["out"]  # no temporary folder stays
    assert not list((tmp_path / "out").glob("*.bin"))
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "adapter").stat().st_mode


def test_precisions(bases: Path, tmp_path: Path) -> None:
    """The base's own unless one is asked for; float32 adds before it rounds, which it then never does."""
    adapted = adapter(tmp_path / "adapter", bases / "bfloat16")
    words = ["merge", str(tmp_path / "adapter")]
    for dtype, wanted, stored in (
        (None, "bfloat16", "BF16"),
        ("float16", "float16", "F16"),
        ("float32", "float32", "F32"),
    ):
        out = tmp_path / str(dtype)
        assert main([*words, str(out), *(["--dtype", dtype] if dtype else [])]) == 0
        assert {kind for _, kind in weight_shapes(out).values()} == {stored}
        assert json.loads((out / "config.json").read_text())["dtype"] == wanted
    weight = "model.layers.0.self_attn.q_proj"
    layer = adapted.get_submodule(f"base_model.model.{weight}")
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("default").float()
    whole = load_file(tmp_path / "float32" / "model.safetensors")[f"{weight}.weight"]
    torch.testing.assert_close(whole, exact, atol=1e-7, rtol=1e-6)
    own = load_file(tmp_path / "None" / "model.safetensors")[f"{weight}.weight"]
    torch.testing.assert_close(own, exact.bfloat16(), atol=0.0, rtol=2**-8)


def test_another_base_by_name_and_an_adapter_beside_others(bases: Path, tmp_path: Path) -> None:
    """`--base` wins; of several adapters that in the folder itself is taken, or one that is named."""
    adapter(tmp_path / "adapter", bases / "plain")
    adapter(tmp_path / "adapter" / "ref", bases / "plain", r=4)
    shutil.copytree(bases / "other", tmp_path / "moved")
    words = ["merge", str(tmp_path / "adapter"), str(tmp_path / "out"), "--base", str(tmp_path / "moved")]
    assert main(words) == 0
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases / "other"), tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(outputs(merged), outputs(expected), atol=1e-5, rtol=1e-5)


def test_an_adapter_of_the_hub(bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its id, from the client's cache, where a push of it would lie."""
    cached = tmp_path / "cache" / "models--me--adapter"
    revision = "0" * 40
    adapted = adapter(cached / "snapshots" / revision, bases / "plain")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert main(["merge", "me/adapter", "out"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(outputs(merged), outputs(adapted), atol=1e-5, rtol=1e-5)


def test_a_merge_that_breaks_off_leaves_nothing(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter(tmp_path / "adapter", bases / "plain")

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "new" / "out")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def config_with(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def weights_with(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})

    return write


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def in_folders(folder: Path) -> None:
    for name in ("adapter_config.json", WEIGHTS):
        (folder / "mine").mkdir(exist_ok=True)
        (folder / name).rename(folder / "mine" / name)


def a_critic(folder: Path) -> None:
    (folder / "critic.json").write_text("{}")


WEIGHTS = "adapter_model.safetensors"
Q1 = "base_model.model.model.layers.1.self_attn.q_proj"
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no adapter": (without("adapter_config.json"), "holds no adapter: it has no adapter_config.json."),
    "in folders": (in_folders, "Did you mean '{folder}/mine'?"),
    "a critic": (a_critic, "is a critic, which has no whole model; `load_critic` reads"),
    "no weights": (without(WEIGHTS), f"{WEIGHTS} is missing."),
    "a pickle": (pickled, "adapter_model.bin is a pickle, which can run code and is not read"),
    "cut short": (cut(WEIGHTS), f"{WEIGHTS} is not whole"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json is not valid JSON"),
    "no base": (config_with(base_model_name_or_path=None), "does not name its base model; give it by `--base`."),
    "base gone": (config_with(base_model_name_or_path="/gone"), "If it lies elsewhere now, give it by `--base`."),
    "wider": (
        config_with(base_model_name_or_path="{bases}/wide"),
        "down_proj has 64 x 64 there, and 32 is a side of it",
    ),
    "shallower": (config_with(base_model_name_or_path="{bases}/shallow"), "is of another base model than"),
    "deeper": (config_with(base_model_name_or_path="{bases}/deep"), "is a layer of the model alone"),
    "pickled base": (
        config_with(base_model_name_or_path="{bases}/pickled"),
        "has no weights: neither model.safetensors",
    ),
    "quantised base": (
        config_with(base_model_name_or_path="{bases}/nf4"),
        "is stored quantised, into which nothing can",
    ),
    "unknown kind": (config_with(peft_type="ODD"), "cannot be loaded on"),
    "layer missing": (
        weights_with(lambda w: {k: v for k, v in w.items() if Q1 not in k}),
        f"{Q1}.lora_A.weight is a layer of the model alone",
    ),
    "not finite": (weights_with(lambda w: {k: v * torch.nan for k, v in w.items()}), "is not finite."),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "the tokenizer in"),
}


@pytest.fixture(scope="module")
def odd_bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    for name, change in {
        "wide": {"hidden_size": 64, "head_dim": 32},
        "shallow": {"num_hidden_layers": 1},
        "deep": {"num_hidden_layers": 3},
        "pickled": {},
        "nf4": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    }.items():
        config = tiny.llama().config
        for key, value in change.items():
            setattr(config, key, value)
        LlamaForCausalLM(config).save_pretrained(folder / name)
    weights = load_file(folder / "pickled" / "model.safetensors")
    torch.save(weights, folder / "pickled" / "pytorch_model.bin")
    (folder / "pickled" / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_merged_is_one_message_and_no_folder(
    case: str, bases: Path, odd_bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "adapter"
    adapter(folder, bases / "plain")
    spoil, message = BAD[case]
    spoil(folder)
    path = folder / "adapter_config.json"
    if path.is_file():
        path.write_text(path.read_text().replace("{bases}", str(odd_bases)))
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert main(["merge", str(folder), str(tmp_path / "new" / "out")]) == 2
    told = capsys.readouterr().err.splitlines()
    told = told[told.index("trl-algos: cannot run:") :]
    assert len(told) == 2
    assert told[1].startswith("  merge: ")
    assert message.format(folder=folder, bases=odd_bases) in told[1]
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_overwritten(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter(tmp_path / "adapter", bases / "plain")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name in ("file", "full", "link", "adapter", "file/under"):
        assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / name)]) == 2, name
    told = capsys.readouterr().err
    assert told.count("is there already, and nothing is overwritten; name another folder.") == 4
    assert "cannot be made" in told
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "file", "full", "link"]


def test_an_adapter_that_is_no_change_of_weights(
    bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(bases / "plain")
    get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).save_pretrained(
        tmp_path / "prompt"
    )
    assert main(["merge", str(tmp_path / "prompt"), str(tmp_path / "out")]) == 2
    assert "holds an adapter of PROMPT_TUNING, which is no change of weights." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "merge: name the folder of a run or adapter, and a folder to write."),
        (["a"], "merge: name the folder"),
        (["a", "b", "c"], "merge: name the folder"),
        (["a", "b", "--dtyp", "float32"], "'--dtyp' is no option, or lacks its value; .* Did you mean '--dtype'?"),
        (["a", "b", "--dtype"], "'--dtype' is no option, or lacks its value"),
        (["a", "b", "--dtype", "float8"], "`--dtype`: 'float8' is not one of bfloat16, float16, float32."),
        (["./gone", "b"], "merge: there is no folder 'gone'."),
        (["someone/something", "b"], "merge: 'someone/something' is no folder here, and no adapter on the Hub"),
    ],
)
def test_words_that_make_no_merge(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", *words]) == 2
    first, *rest = message.split(" .* ")
    told = capsys.readouterr().err
    assert first in told
    assert all(part in told for part in rest)
