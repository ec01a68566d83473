"""Configs of `accelerate launch`: the shipped ones by accelerate's own loader, and recipes judged for them."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env

from trl_algos.cli import main
from trl_algos.errors import ConfigError
from trl_algos.recipe.checks import checked_recipe
from trl_algos.recipe.launch_file import launched_settings, read_launch

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "launch").glob("*.yaml"))
PROCESSES = {"single_gpu": 1, "cpu": 1, "cpu_ddp": 2, "cpu_zero2": 2, "cpu_zero3": 2, "multi_node": 16}
SHARES = {"zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "zero3_offload": "ZeRO-3", "fsdp2": "FSDP"}
RECIPE = """
algorithm: {algorithm}
model_name_or_path: arithmetic-lm
dataset_name: {data}
output_dir: runs/never
per_device_train_batch_size: 8
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a recipe of an algorithm with further settings; returns its path."""
    monkeypatch.chdir(tmp_path)

    def written(algorithm: str = "grpo", **settings: Any) -> str:
        pairs = algorithm == "dpo"
        text = RECIPE.format(algorithm=algorithm, data="arithmetic_preferences" if pairs else "arithmetic")
        own = {} if pairs else {"reward_funcs": ["exact_match"], "max_completion_length": 4}
        Path("recipe.yaml").write_text(text + yaml.safe_dump(own | settings))
        return "recipe.yaml"

    return written


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_starts_by_a_shipped_file_what_check_says(path: Path) -> None:
    config = load_config_from_file(str(path))  # refuses unknown keys
    assert isinstance(config, ClusterConfig)
    launch = read_launch(str(path))
    assert launch.num_processes == config.num_processes == PROCESSES.get(path.stem, 8)
    comment = path.read_text().partition("\ncompute_environment")[0]
    assert f"accelerate launch --config_file launch/{path.name}" in comment
    words = ["--config_file", str(path), "-m", "trl_algos"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert arguments.mixed_precision == "no"
    assert arguments.num_processes == launch.num_processes
    assert bool(launch.settings.get("deepspeed")) == arguments.use_deepspeed
    assert bool(launch.settings.get("fsdp")) == arguments.use_fsdp
    if arguments.use_deepspeed:
        zero = launch.settings["deepspeed"].value["zero_optimization"]
        assert zero["stage"] == arguments.zero_stage
        assert zero["offload_param"]["device"] == arguments.offload_param_device
        assert zero["offload_optimizer"]["device"] == arguments.offload_optimizer_device


@pytest.mark.parametrize("name", ["fsdp2", "multi_node"])
def test_accelerate_makes_fsdp2_of_what_it_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the environment that the launcher gives to each process, which needs no GPU."""
    words = ["--config_file", str(ROOT / "launch" / f"{name}.yaml"), "-m", "trl_algos"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    told = prepare_multi_gpu_env(arguments)
    for key in told.keys() - os.environ.keys():
        monkeypatch.setenv(key, told[key])
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing) == (2, True, False)
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)
    assert plugin.cpu_offload is False or "OffloadPolicy" in type(plugin.cpu_offload).__name__
    assert launched_settings(told)["fsdp_config"]["version"] == "2"


def test_fsdp_and_the_recipe_do_not_both_recompute(recipe: Any) -> None:
    Path("file.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {version: 2, fsdp_activation_checkpointing: true}\n"
    )
    launch = read_launch("file.yaml")
    with pytest.raises(ConfigError, match=r"^file.yaml:3: `fsdp_config`: activation_checkpointing and the recipe's"):
        checked_recipe(recipe(), [], launch=launch)
    checked_recipe(recipe(gradient_checkpointing=False), [], launch=launch)


@pytest.mark.parametrize("name", [*SHARES, "single_gpu", "ddp", "multi_node"])
def test_check_estimates_what_each_device_holds(name: str, recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "launch" / f"{name}.yaml")
    assert main(["check", recipe("ppo", critic="separate"), "--config_file", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    count = PROCESSES.get(name, 8)
    assert lines[1].startswith(f"  {count} process")
    shared = {line.split()[0] for line in lines if f"shared by {count} processes ({SHARES.get(name, 'FSDP')})" in line}
    everything = {"parameters", "critic", "gradients", "optimizer", "reference"}
    expected = {"zero1": {"optimizer"}, "zero2": {"optimizer", "gradients"}, "single_gpu": set(), "ddp": set()}
    assert shared == expected.get(name, everything)
    assert any("on the CPU" in line for line in lines) == (name == "zero3_offload")


def test_the_number_of_processes_can_be_given_and_must_divide_the_batch(
    recipe: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", recipe(num_generations=16), "--config_file", str(ROOT / "launch" / "zero3.yaml")]
    assert main([*words, "--num_processes", "6"]) == 0
    assert "  6 processes, 48 completions of 3 prompts" in capsys.readouterr().out
    assert main([*words, "--num_processes", "5"]) == 2
    assert "`num_generations`: 16 does not divide the 40 completions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "algorithm", "settings", "message"),
    [
        ("fsdp2", "grpo", {"use_cpu": True}, "`use_cpu`: true, but accelerate shards by FSDP on GPUs alone"),
        (
            "zero3",
            "dpo",
            {"precompute_ref_log_probs": True, "use_peft": True},
            "`precompute_ref_log_probs`: True cannot be had for an adapter under DeepSpeed ZeRO-3",
        ),
        (
            "zero2",
            "ppo",
            {"critic": "separate", "critic_max_grad_norm": 0.5},
            "`critic_max_grad_norm`: 0.5 differs from `max_grad_norm`",
        ),
        (
            "fsdp2",
            "ppo",
            {"critic": "separate", "critic_num_iterations": 3},
            "`critic_num_iterations`: 3 differs from `num_iterations`",
        ),
        (
            "zero1",
            "grpo",
            {
                "save_only_model": True,
                "load_best_model_at_end": True,
                "save_strategy": "best",
                "eval_strategy": "steps",
            },
            "`save_only_model`: true leaves `load_best_model_at_end` nothing",
        ),
        (
            "zero3",
            "ppo",
            {"critic": "separate", "use_peft": True, "critic_use_peft": False},
            "`critic_use_peft`: false beside a policy with LoRA is not supported where DeepSpeed or FSDP shards",
        ),
    ],
)
def test_what_a_launch_makes_impossible_is_said(
    name: str, algorithm: str, settings: dict[str, Any], message: str, recipe: Any
) -> None:
    path = recipe(algorithm, **settings)
    checked_recipe(path, [])  # possible on its own
    with pytest.raises(ConfigError) as caught:
        checked_recipe(path, [], launch=read_launch(str(ROOT / "launch" / f"{name}.yaml")))
    (problem,) = caught.value.problems
    assert message in problem
    assert not Path("runs").exists()


def test_a_backend_of_the_recipe_wins_over_the_launch(recipe: Any) -> None:
    own = {"zero_optimization": {"stage": 1}}
    launch = read_launch(str(ROOT / "launch" / "fsdp2.yaml"))
    checked = checked_recipe(recipe(deepspeed=own, use_cpu=True), [], launch=launch)
    assert (checked.values["deepspeed"], checked.values["fsdp"]) == (own, None)
    assert checked.num_processes == 8


def test_a_run_hears_of_it_from_its_launcher(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `accelerate launch` tells its processes; with the message of `check`, and nothing loaded or written."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert main(["train", recipe(use_cpu=True, bf16=False)]) == 2
    assert "`use_cpu`: true, but accelerate shards by FSDP on GPUs alone" in capsys.readouterr().err
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert main(["train", recipe("dpo", precompute_ref_log_probs=True, use_peft=True)]) == 2
    assert "cannot be had for an adapter under DeepSpeed ZeRO-3" in capsys.readouterr().err
    assert not Path("runs").exists()


GOOD = "distributed_type: DEEPSPEED\nnum_processes: 2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_processes: 2\n", "file.yaml: `distributed_type`: not set; give one of NO, MULTI_GPU"),
        ("distributed_type: MULTI_CPU\nnum_processes: 2\n", "file.yaml:1: `distributed_type`: MULTI_CPU starts one"),
        ("distributed_type: FDSP\nnum_processes: 2\n", "'FDSP' is not one of NO, MULTI_GPU"),
        ("distributed_type: FDSP\nnum_processes: 2\n", "Did you mean 'FSDP'?"),
        (GOOD + "num_proceses: 3\n", "file.yaml:3: `num_proceses`: accelerate knows no such key. Did you"),
        (GOOD + "deepspeed_config: {zero_stag: 3}\n", "knows no 'zero_stag' in it. Did you mean 'zero_stage'?"),
        (GOOD + "deepspeed_config: {zero_stage: 4}\n", "zero_stage 4 is not one of 0, 1, 2, 3."),
        (GOOD + "deepspeed_config: {offload_param_device: cpu}\n", "_param_device cpu is not used below zero_stage 3"),
        (GOOD + "deepspeed_config: {offload_param_device: gpu}\n", "'gpu' is not one of none, cpu, nvme."),
        (GOOD + "deepspeed_config: {deepspeed_config_file: none.json}\n", "none.json cannot be read"),
        ("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_versoin: 2}\n", "Did you mean 'fsdp_version'?"),
        ("distributed_type: FSDP\n", "`num_processes`: None must be a whole number of at least 1"),
        ("distributed_type: FSDP\nnum_processes: -1\n", "file.yaml:2: `num_processes`: -1 must be a whole number"),
        ("distributed_type: MULTI_GPU\nnum_processes: 1\n", "1 is refused with MULTI_GPU"),
        ("distributed_type: FSDP\nnum_machines: 2\nnum_processes: 3\n", "3 is no multiple of `num_machines`"),
        ("- a\n", "file.yaml: must hold `key: value` lines"),
    ],
)  # fmt: skip
def test_a_file_that_accelerate_could_not_use_is_refused(
    text: str, message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_launch("file.yaml")
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


def test_a_missing_file_is_named(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str], recipe: Any
) -> None:
    assert main(["check", recipe(), "--config_file", str(ROOT / "launch" / "zero4.yaml")]) == 2
    assert "zero4.yaml: cannot be read: No such file or directory. Did you mean" in capsys.readouterr().err
    assert main(["train", recipe(), "--config_file", "launch/zero3.yaml"]) == 2
    assert "`config_file`: belongs to the launcher" in capsys.readouterr().err


def test_one_process_is_not_several(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "launch" / "cpu.yaml")
    assert main(["check", recipe(), "--config_file", file, "--num_processes", "4"]) == 2
    assert "starts one process (`distributed_type: 'NO'`)" in capsys.readouterr().err


def test_a_precision_of_the_launch_that_would_win_is_refused(recipe: Any) -> None:
    Path("file.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\n")
    launch = read_launch("file.yaml")
    checked_recipe(recipe(), [], launch=launch)  # whose bf16 is TRL's default
    with pytest.raises(ConfigError, match=r"^file.yaml:3: `mixed_precision`: bf16 would hold although"):
        checked_recipe(recipe(bf16=False), [], launch=launch)


def test_deepspeed_reads_its_own_file(tmp_path: Path, recipe: Any) -> None:
    path = recipe("ppo", critic="separate")
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}')
    Path("file.yaml").write_text(GOOD + "deepspeed_config: {deepspeed_config_file: ds.json}\n")
    with pytest.raises(ConfigError, match="`deepspeed`: its config sets 'optimizer'"):
        checked_recipe(path, [], launch=read_launch("file.yaml"))
