"""Values of a batch: in the forward pass that trains, and before it, when the batch was sampled."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing

from trl_algos.trainers.processes import is_sharded
from trl_algos.trainers.rollout import loss_mask
from trl_algos.trainers.sampling.old_logps import known_old_logps, lacks_old_logps
from trl_algos.trainers.window.rows import Batch, whole_rows
from trl_algos.trainers.window.scoring import scored_in_parts

if TYPE_CHECKING:
    from trl_algos.trainers.ppo_trainer import PPOTrainer


class ValueRecorder:
    """Stands in for a model where its forward is called, asks it for values too, and keeps them.

    Args:
        model: the policy, wrapped or not.
        with_values: what the model is asked for: see `forms.py`.
    """

    def __init__(self, model: Any, with_values: str = "both") -> None:
        self._model, self._asked = model, with_values
        self._values: list[Tensor] = []

    def __call__(self, **inputs: Any) -> Any:
        """The model's output."""
        outputs, values = self._model(**inputs, with_values=self._asked)
        self._values.append(values)
        return outputs

    def before_tokens(self, width: int) -> Tensor:
        """(B, `width`) values before each completion token, of all calls."""
        return self.around_tokens(width)[:, :-1]

    def around_tokens(self, width: int) -> Tensor:
        """(B, `width` + 1): also those after the last token, which the model must have been asked for."""
        return torch.cat(self._values)[:, -width - 1 :]

    def zero(self) -> Tensor:
        """0-d sum of what came of all calls that were not to make values."""
        return torch.stack(self._values).sum()


def values_alone(trainer: "PPOTrainer", model: Any, inputs: dict[str, Any]) -> Tensor:
    """(B, T) values before each completion token of a micro-batch, for a step that trains the critic alone.

    The policy makes no pass, unless a backend shards it: that waits for a gradient of each shard, here of 0.
    """
    if is_sharded(trainer):
        scores = trainer.score(model, inputs)
        return cast(Tensor, scores.values) + 0.0 * scores.logps.sum()
    return _values(model, inputs)[:, :-1]


def sampling_values(trainer: "PPOTrainer", output: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Values of this rank's generated rows, of the critic as it is now.

    Where log-probs are asked for at once, of a policy on whose states the values are, they come from the same pass,
    and take the place of those that `output` lacks.

    Returns:
        (B, T) before each completion token, and (B,) after the last one, a tool's included; detached.
    """
    args, model = trainer.args, trainer.model
    rows = args.per_device_train_batch_size if model.training else args.per_device_eval_batch_size
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    batch = {name: output[name] for name in names}
    with_logps = trainer.scores_with_values and lacks_old_logps(output)

    def figures(part: Batch) -> list[Tensor]:
        if not with_logps:
            return [_values(model, part)]
        recorder = ValueRecorder(model, "all")
        logps = trainer.score(recorder, part).logps
        return [recorder.around_tokens(logps.shape[1]), logps]

    unchecked = disable_gradient_checkpointing(model, args.gradient_checkpointing_kwargs)
    with torch.no_grad(), trainer.accelerator.autocast(), unchecked if with_logps else nullcontext():
        values, *logps = scored_in_parts(trainer, batch, rows, trainer.critic.packs, figures)
    if with_logps:
        output["old_per_token_logps"] = known_old_logps(output, logps[0])
    return values[:, :-1], values.gather(1, output["completion_mask"].sum(1, keepdim=True)).squeeze(1)


def _values(model: Any, batch: Batch) -> Tensor:
    """(B, T + 1) values before each completion token, and after the last one."""
    input_ids, attention_mask = whole_rows(batch)
    values: Tensor = model(input_ids=input_ids, attention_mask=attention_mask, with_values="values")
    return values[:, -batch["completion_ids"].shape[1] - 1 :]


def cut_off(trainer: "PPOTrainer", output: dict[str, Any]) -> Tensor:
    """(B,) bool, the rows whose last token does not end a completion, as TRL tells them."""
    length = output["completion_mask"].sum(1, keepdim=True)
    last = output["completion_ids"].gather(1, (length - 1).clamp(min=0))
    ends = torch.tensor([*trainer.eos_token_ids, trainer._tokenizer.pad_token_id], device=last.device)
    return ~torch.isin(last, ends).squeeze(1)


def value_mask(inputs: dict[str, Any]) -> Tensor:
    """(B, T) bool, the tokens that the critic learns from: trained on, and of a row with a score."""
    return loss_mask(inputs).bool() & ~inputs["returns"].isnan()


def positive_mask(inputs: dict[str, Any]) -> Tensor:
    """(B, T) bool, the tokens trained on in rows with a reward above 0."""
    return loss_mask(inputs).bool() & inputs["positive"].bool()[:, None]
