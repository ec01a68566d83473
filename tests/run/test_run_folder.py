import enum
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_algos.errors import ConfigError
from trl_algos.recipe import schema
from trl_algos.recipe.reading import read_recipe
from trl_algos.run.folder import (
    RECORDS,
    keep_previous,
    metrics_line,
    read_metrics,
    strict_json,
    take_folder,
    versions,
    write_recipe,
    write_text,
)
from trl_algos.settings.public import public_settings

ROOT = Path(__file__).parents[2]


class Strategy(enum.Enum):
    NO = "no"


@dataclass
class Entry:
    path: str
    api_key: str = "hidden"
    split: str | None = None


def written(folder: Path, settings: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    return yaml.safe_load(write_recipe(folder, settings, **kwargs).read_text())


class TestVersions:
    def test_names_this_package_python_and_what_is_installed(self) -> None:
        import torch

        import trl_algos

        found = versions()
        assert found["trl_algos"] == trl_algos.__version__
        assert found["python"] == ".".join(map(str, sys.version_info[:3]))
        assert found["torch"] == torch.__version__

    def test_leaves_out_what_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("trl_algos.run.folder._PACKAGES", ("yaml-that-is-not-there", "PyYAML"))
        assert versions().keys() == {"trl_algos", "python", "PyYAML"}


class TestPublicSettings:
    @pytest.mark.parametrize(
        "name",
        [
            "hub_token",
            "HF_TOKEN",
            "client_secret",
            "password",
            "DB_PASS",
            "WANDB_API_KEY",
            "apikey",
            "AWS_ACCESS_KEY_ID",
            "OPENAI_KEY",
            "Authorization",
            "credentials",
        ],
    )
    def test_a_name_of_a_secret_is_left_out_everywhere(self, name: str) -> None:
        settings = {name: "s3cret", "env": {name: "s3cret", "OMP_NUM_THREADS": "1"}, "list": [{name: "s3cret"}]}
        assert public_settings(settings) == {"env": {"OMP_NUM_THREADS": "1"}, "list": [{}]}

    @pytest.mark.parametrize(
        "name",
        ["max_tokens", "num_tokens", "tokenizer_name", "pad_token", "eos_token", "pass_k", "answer_key", "monkey"],
    )
    def test_a_count_of_tokens_is_no_secret(self, name: str) -> None:
        assert public_settings({name: "3"}) == {name: "3"}

    def test_a_number_can_be_a_secret_but_true_and_none_cannot(self) -> None:
        assert public_settings({"password": 1234, "use_auth_token": True, "hub_token": None}) == {
            "use_auth_token": True,
            "hub_token": None,
        }

    @pytest.mark.parametrize(
        ("url", "public"),
        [
            ("https://me:pa@ss@host.org:80/x@y", "https://host.org:80/x@y"),
            ("https://hf_abc@host.org", "https://host.org"),
            ("postgresql://me:pw@db/runs and http://a:b@c", "postgresql://db/runs and http://c"),
            ("https://host.org/x?a=1&access_token=abc&b=2", "https://host.org/x?a=1&access_token=***&b=2"),
            ("https://host.org?mail=me@x.org", "https://host.org?mail=me@x.org"),
            ("me@host.org", "me@host.org"),
        ],
    )
    def test_logins_are_taken_out_of_urls(self, url: str, public: str) -> None:
        assert public_settings({"a": url, "env": {"URL": url}}) == {"a": public, "env": {"URL": public}}

    def test_values_become_plain(self) -> None:
        settings = {"a": Strategy.NO, "b": (1, 2.5), "c": [Entry("x")], "d": Path("p/q"), "e": {1: None}}
        assert public_settings(settings) == {
            "a": "no",
            "b": [1, 2.5],
            "c": [{"path": "x", "split": None}],
            "d": "p/q",
            "e": {1: None},
        }


class TestWriteRecipe:
    def test_leaves_out_none_secrets_and_what_would_resume(self, tmp_path: Path) -> None:
        settings = {"b": None, "a": 1, "hub_token": "x", "resume_from_checkpoint": "true", "local_rank": 0}
        assert written(tmp_path / "new", {**settings, "c": [Entry("x")]}) == {"a": 1, "c": [{"path": "x"}]}

    def test_none_is_written_where_it_is_not_the_default(self, tmp_path: Path) -> None:
        settings = {"cap": None, "name": None, "zero": None}
        assert written(tmp_path, settings, defaults={"cap": 3.0, "name": None, "zero": 0}) == {
            "cap": None,
            "zero": None,
        }

    def test_the_two_names_of_the_generation_batch_are_not_written_together(self, tmp_path: Path) -> None:
        both = {"generation_batch_size": 64, "steps_per_generation": 2}
        assert written(tmp_path, both) == {"steps_per_generation": 2}
        assert written(tmp_path, {**both, "steps_per_generation": None}) == {"generation_batch_size": 64}

    def test_text_that_looks_like_a_number_stays_text_for_a_recipe(self, tmp_path: Path) -> None:
        from trl_algos.recipe.file import read_file

        env = {"A": "1e-6", "B": "1", "C": "no", "D": "nan", "E": "word", "F": ".5", "G": "1_0"}
        write_recipe(tmp_path, {"env": env, "rate": 1e-6, "wide": 1e10, "inf": math.inf})
        problems: list[str] = []
        values = {key: value.value for key, value in read_file(f"{tmp_path}/recipe.yaml", problems).items()}
        assert values == {"env": env, "rate": 1e-6, "wide": 1e10, "inf": math.inf}
        assert not problems

    @pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("recipes/*.yaml")))
    def test_every_recipe_comes_back_as_it_was_resolved(self, name: str, tmp_path: Path) -> None:
        words = ["--use_cpu", "--bf16=false", "--dataset_name=arithmetic", f"--output_dir={tmp_path}", "--dtype=null"]
        defaults = {key: setting.default for key, setting in schema.settings("policy").items()}
        first = read_recipe(f"{ROOT}/recipes/{name}.yaml", words).values
        write_recipe(tmp_path, {**first, "optim": "adamw_torch"}, defaults)
        again = read_recipe(f"{tmp_path}/recipe.yaml").values
        assert again == {**first, "optim": "adamw_torch"}
        assert first["dtype"] is None


class TestWriteText:
    def test_makes_the_folder_and_replaces_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a" / "b.txt"
        write_text(path, "long old text")
        write_text(path, "nü")
        assert path.read_text(encoding="utf-8") == "nü"
        assert os.listdir(path.parent) == ["b.txt"]

    def test_a_failure_leaves_the_old_file_and_nothing_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(descriptor: int) -> None:
            raise OSError("disk full")

        write_text(tmp_path / "b.txt", "old")
        monkeypatch.setattr("trl_algos.run.folder.os.fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            write_text(tmp_path / "b.txt", "new")
        assert (tmp_path / "b.txt").read_text() == "old"
        assert os.listdir(tmp_path) == ["b.txt"]


class TestKeepPrevious:
    def test_records_move_and_the_rest_stays(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoint-5").mkdir()
        for name in (*RECORDS, "model.safetensors", "mine.png"):
            (tmp_path / name).write_text(name)
        assert keep_previous(tmp_path) == tmp_path / "previous" / "1"
        assert sorted(os.listdir(tmp_path)) == ["checkpoint-5", "mine.png", "model.safetensors", "previous"]
        assert {path.name: path.read_text() for path in (tmp_path / "previous/1").iterdir()} == {n: n for n in RECORDS}

    def test_the_number_is_one_more_than_the_highest(self, tmp_path: Path) -> None:
        for name in ("2", "10", "old"):
            (tmp_path / "previous" / name).mkdir(parents=True)
        (tmp_path / "metrics.jsonl").write_text("{}")
        assert keep_previous(str(tmp_path)) == tmp_path / "previous" / "11"

    def test_without_records_there_is_nothing_to_do(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_text("x")
        assert keep_previous(tmp_path) is None
        assert keep_previous(tmp_path / "missing") is None
        assert os.listdir(tmp_path) == ["model.safetensors"]


class TestMetricsFile:
    def test_lines_are_strict_json_and_come_back(self, tmp_path: Path) -> None:
        entry = {"step": 3, "a": math.inf, "b": -math.inf, "c": math.nan, "d": None, "e": 1e-7, "epoch": 0.5}
        line = metrics_line(entry)
        strict = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert strict == {**entry, "a": "Infinity", "b": "-Infinity", "c": "NaN"}
        assert line.endswith("}\n")
        assert line.count("\n") == 1
        (tmp_path / "m.jsonl").write_text(line)
        (back,) = read_metrics(tmp_path / "m.jsonl")
        assert math.isnan(back.pop("c"))
        assert back == {key: value for key, value in entry.items() if key != "c"}

    @pytest.mark.parametrize("torn", ["", "\n", '{"step": 2, "rew', '{"step"', "[1]", '{"step": 2, "a": "\udcc3'])
    def test_a_torn_last_line_is_left_out(self, tmp_path: Path, torn: str) -> None:
        path = tmp_path / "m.jsonl"
        path.write_bytes(b'{"step": 1}\n' + torn.encode(errors="surrogateescape"))
        assert read_metrics(path) == [{"step": 1}]

    def test_a_whole_last_line_without_its_end_counts(self, tmp_path: Path) -> None:
        (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"step": 2}')
        assert [entry["step"] for entry in read_metrics(tmp_path / "m.jsonl")] == [1, 2]

    @pytest.mark.parametrize("line", ['{"step": 2, "rew', "[1]", '{"a": 1}', '{"step": "2"}', "null"])
    def test_a_broken_line_before_the_last_is_named(self, tmp_path: Path, line: str) -> None:
        (tmp_path / "m.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
        with pytest.raises(ConfigError, match=r"m\.jsonl:2: is no log entry"):
            read_metrics(tmp_path / "m.jsonl")

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read: No such file"):
            read_metrics(tmp_path / "none.jsonl")


def test_what_the_check_command_needs_loads_nothing_heavy() -> None:
    code = (
        "import sys, trl_algos.run.folder, trl_algos.run.comparison, trl_algos.run.plots\n"
        "import trl_algos.settings.tracking\n"
        "trl_algos.settings.tracking.report_to_problems('trackio')\n"
        "sys.exit(' '.join({'torch', 'transformers', 'trl', 'datasets', 'matplotlib', 'trackio'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr.strip()) == (1, "")


def test_one_run_at_a_time_in_a_folder(tmp_path: Path) -> None:
    first = take_folder(tmp_path / "run")
    with pytest.raises(ConfigError, match="`output_dir`: another run is in"):
        take_folder(tmp_path / "run")
    assert first is not None
    first.close()
    assert take_folder(tmp_path / "run") is not None


def test_json_without_numbers_that_it_lacks() -> None:
    value = {"a": [float("nan"), 1.5], "b": {"c": float("-inf")}, "d": None}
    assert strict_json(value) == {"a": ["NaN", 1.5], "b": {"c": "-Infinity"}, "d": None}
