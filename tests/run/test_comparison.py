import json
from pathlib import Path
from typing import Any

import pytest

from trl_algos.algorithms import ALGORITHMS
from trl_algos.errors import ConfigError
from trl_algos.run.comparison import PlotArguments, Run, grouped, plot_arguments, read_runs


def run(name: str, **settings: Any) -> Run:
    return Run(name, settings, [{"step": 1, "reward": 1.0}])


def labels(*runs: Run, **kwargs: Any) -> list[str]:
    return [group.label for group in grouped(runs, **kwargs)]


class TestPlotArguments:
    @pytest.mark.parametrize(
        ("words", "arguments"),
        [
            ("a", PlotArguments(["a"])),
            ("a b --metrics x y --output f.png c", PlotArguments(["a", "b", "c"], "f.png", ["x", "y"])),
            ("--output=f.png a --by seed", PlotArguments(["a"], "f.png", None, ["seed"])),
            ("--output f.png a b --metrics=x y", PlotArguments(["a", "b"], "f.png", ["x", "y"])),
        ],
    )
    def test_words(self, words: str, arguments: PlotArguments) -> None:
        assert plot_arguments(words.split()) == arguments

    @pytest.mark.parametrize(
        ("words", "problems"),
        [
            ("", ["`RUN`: name at least one run folder, before `--metrics` and `--by`."]),
            ("--metrics a", ["`RUN`: name at least one run folder, before `--metrics` and `--by`."]),
            (
                "a --ouput f --metrics",
                [
                    "`--ouput`: there is no such option, only --output, --metrics, --by. Did you mean '--output'?",
                    "`--metrics`: nothing follows it; name logged metrics.",
                ],
            ),
            ("a --output", ["`--output`: nothing follows it; give the file to write."]),
            ("a --by x --by y", ["`--by` is given twice."]),
        ],
    )
    def test_problems(self, words: str, problems: list[str]) -> None:
        with pytest.raises(ConfigError) as caught:
            plot_arguments(words.split())
        assert caught.value.problems == problems


class TestGroups:
    def test_seeds_run_names_and_folders_do_not_set_runs_apart(self) -> None:
        common = {"algorithm": "grpo", "beta": 0.1}
        first = run("a", **common, seed=1, data_seed=1, output_dir="a", run_name="x")
        second = run("b", **common, seed=2, data_seed=None, output_dir="b")
        other = run("c", algorithm="grpo", beta=0.2, seed=1)
        groups = grouped([first, other, second])
        assert [group.runs for group in groups] == [[first, second], [other]]
        assert [group.label for group in groups] == ["beta 0.1 (2 seeds: mean, min to max)", "beta 0.2"]

    def test_runs_without_settings_stand_alone_under_their_folders(self) -> None:
        assert labels(run("x/a"), run("x/b"), run("y/c", seed=1)) == ["a", "b", "c"]
        assert labels(run("x/a"), run("y/a")) == ["x/a", "y/a"]

    def test_one_group_is_named_by_its_folders(self) -> None:
        assert labels(run("x/a", seed=1), run("x/b", seed=2)) == ["a, b (2 seeds: mean, min to max)"]
        assert labels(run("x/a", seed=1), run("x/b", seed=1)) == ["a, b (2 runs: mean, min to max)"]

    def test_only_what_differs_is_named_the_algorithm_first(self) -> None:
        one = run("a", algorithm="grpo", adam_beta1=0.9, learning_rate=1e-6, seed=1, lora_r=4)
        two = run("b", algorithm="dapo", adam_beta1=0.0, learning_rate=3e-4, seed=1)
        assert labels(one, two) == [
            "algorithm grpo, adam_beta1 0.9, learning_rate 1e-06, lora_r 4",
            "algorithm dapo, adam_beta1 0, learning_rate 0.0003, lora_r unset",
        ]

    def test_what_an_algorithm_decides_is_not_named(self) -> None:
        gspo, grpo = ALGORITHMS["gspo"], ALGORITHMS["grpo"]
        assert gspo.defaults["epsilon"] != grpo.defaults["epsilon"]
        settings = [
            {
                "algorithm": row.key,
                "ratio_level": row.ratio_level,
                "epsilon": row.defaults["epsilon"],
                "kl_target": None,
            }
            for row in (gspo, grpo)
        ]
        assert labels(run("a", **settings[0]), run("b", **settings[1])) == ["algorithm gspo", "algorithm grpo"]
        changed = {**settings[1], "epsilon": 0.5}
        assert labels(run("a", **settings[0]), run("b", **changed))[1] == "algorithm grpo, epsilon 0.5"

    def test_what_differs_within_one_algorithm_is_named(self) -> None:
        runs = [
            run("a", algorithm="grpo", ratio_level="token"),
            run("b", algorithm="grpo", ratio_level="sequence"),
            run("c", algorithm="mine", ratio_level="token"),
        ]
        assert labels(*runs) == [
            "algorithm grpo, ratio_level token",
            "algorithm grpo, ratio_level sequence",
            "algorithm mine, ratio_level token",
        ]

    def test_many_differences_are_counted_and_folders_used_where_they_hide_what_matters(self) -> None:
        one, two = ({f"k{place}": place + change for place in range(6)} for change in (0, 1))
        assert labels(run("a", **one), run("b", **two)) == [
            "k0 0, k1 1, k2 2, k3 3, 2 more",
            "k0 1, k1 2, k2 3, k3 4, 2 more",
        ]
        assert labels(run("a", **one), run("b", **two), run("c", **{**one, "k5": 9})) == ["a", "b", "c"]

    def test_by_names_what_makes_a_group(self) -> None:
        runs = [run("a", beta=0.1, rate=1), run("b", beta=0.1, rate=2), run("c", beta=0.2, rate=1)]
        assert labels(*runs, by=["beta"]) == ["beta 0.1 (2 runs: mean, min to max)", "beta 0.2"]
        assert labels(run("a", beta=0.1, seed=1), run("b", beta=0.1, seed=2), by=["seed"]) == ["seed 1", "seed 2"]

    def test_by_refuses_what_is_no_setting(self) -> None:
        with pytest.raises(ConfigError, match=r"`by`: 'beat' is not a setting of these runs\. Did you mean 'beta'\?"):
            labels(run("a", beta=0.1), by=["beat"])


class TestReadRuns:
    def test_metrics_come_before_checkpoints_and_the_newest_of_these(self, tmp_path: Path) -> None:
        (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1}]}))
        assert read_runs([str(tmp_path)])[0].log == [{"step": 1}]
        for step in (9, 10):
            (tmp_path / f"checkpoint-{step}").mkdir()
            state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
            state.write_text(json.dumps({"log_history": [{"step": step}]}))
        (tmp_path / "checkpoint-11").mkdir()
        (tmp_path / "checkpoint-best").mkdir()
        assert read_runs([str(tmp_path / "checkpoint-9")])[0].log == [{"step": 9}]
        (tmp_path / "trainer_state.json").unlink()
        assert read_runs([str(tmp_path)])[0].log == [{"step": 10}]
        (tmp_path / "metrics.jsonl").write_text('{"step": 3, "reward": 0.5}\n{"st')
        assert read_runs([str(tmp_path)])[0].log == [{"step": 3, "reward": 0.5}]

    def test_settings_come_from_the_recipe(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
        assert read_runs([str(tmp_path)])[0].settings == {}
        (tmp_path / "recipe.yaml").write_text("# comment\nbeta: 0.5\n")
        assert read_runs([str(tmp_path)])[0].settings == {"beta": 0.5}

    def test_every_bad_folder_is_told(self, tmp_path: Path) -> None:
        for name in ("good", "empty", "torn", "list", "state"):
            (tmp_path / name).mkdir()
            if name != "empty":
                (tmp_path / name / "metrics.jsonl").write_text('{"step": 3}\n')
        (tmp_path / "torn/recipe.yaml").write_text("a: [")
        (tmp_path / "list/recipe.yaml").write_text("- a")
        (tmp_path / "state/metrics.jsonl").unlink()
        (tmp_path / "state/trainer_state.json").write_text("{}")
        names = [f"{tmp_path}/{name}" for name in ("good", "empty", "goood", "good/", "torn", "list", "state")]
        with pytest.raises(ConfigError) as caught:
            read_runs(names)
        empty, misspelt, twice, torn, no_mapping, no_state = caught.value.problems
        assert empty.startswith(f"`runs`: '{tmp_path}/empty' has neither metrics.jsonl with entries nor")
        assert misspelt == f"`runs`: '{tmp_path}/goood' is not a folder. Did you mean '{tmp_path}/good'?"
        assert twice == f"`runs`: '{tmp_path}/good/' is given twice."
        assert torn.startswith(f"{tmp_path}/torn/recipe.yaml: is not valid YAML: ")
        assert no_mapping == f"{tmp_path}/list/recipe.yaml: must hold `key: value` lines, but holds ['a']."
        assert no_state.startswith(f"{tmp_path}/state/trainer_state.json: is no state of a trainer: ")

    def test_no_folder_at_all_is_told(self) -> None:
        with pytest.raises(ConfigError, match="`runs`: none given"):
            read_runs([])
