"""The metric by which the best model is found, of a policy."""

from pathlib import Path

import pytest
from test_cases import config, trainer

from trl_algos.errors import ConfigError


def test_a_metric_that_there_is_not_is_named(tmp_path: Path) -> None:
    best = {"metric_for_best_model": "eval_rewad", "greater_is_better": True}
    run = trainer(config(tmp_path, algorithm="grpo", num_generations=2, beta=0.0, **best))
    metrics = {"eval_loss": 1.0, "eval_reward": 2.0, "eval_runtime": 3.0, "epoch": 1.0}
    message = (
        r"^`metric_for_best_model`: 'eval_rewad' is no metric of this evaluation, which has eval_loss, eval_reward\. "
        r"Did you mean 'eval_reward'\?$"
    )
    with pytest.raises(ConfigError, match=message):
        run._determine_best_metric(metrics, None)
    run.args.metric_for_best_model = "reward"
    assert run._determine_best_metric(metrics, None)
