"""`BradleyTerryTrainer`: TRL's `RewardTrainer` for reward models of preference pairs."""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl import RewardTrainer, is_conversational
from trl.trainer.reward_trainer import DataCollatorForPreference

from trl_algos.core import PairCalibration, bradley_terry_loss
from trl_algos.errors import ConfigError
from trl_algos.models.reward_folder import write_adapter_figures
from trl_algos.preference_config import BradleyTerryConfig
from trl_algos.preference_rows import ID_SIDES, SIDES, SOURCE
from trl_algos.trainers.adapters import check_adapter
from trl_algos.trainers.packing.models import pack_classifier
from trl_algos.trainers.packing.start import start_packing
from trl_algos.trainers.preference.held_out_means import share_of_batch
from trl_algos.trainers.preference.held_out_pairs import HeldOutFigures, HeldOutPairs, Scores, joined
from trl_algos.trainers.preference.pairs import (
    check_vocabulary,
    checked_pairs,
    image_columns,
    score_judge,
    teaching_pairs,
    warn_of_dropped,
    without_limit,
)
from trl_algos.trainers.preference.resuming import ExactResume
from trl_algos.trainers.preference.reward_head import (
    check_head,
    check_place,
    keep_heads_precise,
    loaded_tokenizer,
    trained_heads,
    vocabulary_size,
    with_own_padding,
    with_trained_head,
)
from trl_algos.trainers.preference.sources import WithSources
from trl_algos.trainers.preference.steps import CheckedSteps
from trl_algos.trainers.processes import forget_evaluation
from trl_algos.trainers.public_uploads import PublicUploads
from trl_algos.trainers.reward_models import forget_figures, known_figures


@dataclass
class PairCollator(DataCollatorForPreference):
    """TRL's collator, which also hands on `preference`, (B,) probability that the chosen side is the better one."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Chosen rows first, then rejected ones, padded on the right."""
        output = super().torch_call(examples)
        if "preference" in examples[0]:
            output["preference"] = torch.tensor([row["preference"] for row in examples], dtype=torch.float)
        return output


class BradleyTerryTrainer(ExactResume, HeldOutFigures, CheckedSteps, PublicUploads, RewardTrainer):
    """Trains a reward model on preference pairs.

    Columns: `chosen` and `rejected`, with or without `prompt`, text or messages, or `chosen_ids` and `rejected_ids`;
    `margin`, reward units by which the preferred side should lead; `preference`, the probability that the chosen side
    is the better one (0.5 is a tie); `source`, the name of where a pair comes from. Plain text is read without special
    tokens, as a policy trainer has a reward model read it; a chat template writes its own.

    An evaluation logs accuracy, Brier score and expected calibration error over all pairs that are no ties, accuracy
    and margin of each source, and writes `reward_mean` and `reward_std` into the model's config, from where they are
    saved with the model or beside the adapter; `calibration` keeps the reliability curve. `dropped_pairs` has, for
    each set by name, reason -> number of pairs that were dropped for it.

    Args:
        model: sequence classifier with one label, or path of any model, as in TRL.
        args: settings; None for the defaults.
        data_collator: None for `PairCollator`.
        train_dataset: pairs.
        eval_dataset: held-out pairs, or several sets by name.
        processing_class: tokenizer; None for the model's own.
        peft_config: adapter; the head is trained and saved beside it, without being named.
        **kwargs: as in TRL's `RewardTrainer`.

    Raises:
        ConfigError: a row of the data is no preference pair, none is left, or the head would not train.
    """

    _signature_columns: Any
    _look_at = "A score or a `margin` is NaN or infinite: lower `learning_rate`, or look at data and dtype."

    def __init__(
        self,
        model: Any,
        args: BradleyTerryConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        args = BradleyTerryConfig("trainer_output") if args is None else args
        if not isinstance(args, BradleyTerryConfig):
            raise ConfigError([f"`args`: {type(args).__name__} must be a BradleyTerryConfig."])
        check_adapter(model, copied=False)
        _refuse_images(train_dataset, eval_dataset)
        tokenizer = with_own_padding(processing_class or loaded_tokenizer(model, args))
        self.calibration: PairCalibration | None = None
        self.dropped_pairs: dict[str, dict[str, int]] = {}
        self._several: list[Scores] | None = None
        heads = trained_heads(model)
        self._vocabulary = partial(vocabulary_size, model, args)  # before TRL has loaded the model
        super().__init__(
            model,
            args,
            data_collator or PairCollator(tokenizer.pad_token_id, args.pad_to_multiple_of),
            train_dataset,
            eval_dataset,
            tokenizer,
            peft_config=with_trained_head(peft_config),
            **kwargs,
        )
        self.data_collator: Any = WithSources(self.data_collator)
        check_head(self.model)
        if is_peft_model(self.model) and getattr(self.model, "is_quantized", False):
            keep_heads_precise(self.model, heads, self.is_deepspeed_enabled or self.is_fsdp_enabled)
        start_packing(self, args.padding_free, pack_classifier, {"model": self.model})

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, on all processes whatever was evaluated before."""
        forget_evaluation(self)
        forget_figures(self.model.config)
        result = super().train(*args, **kwargs)
        if self.args.process_index == 0:
            warn_of_dropped("train", self.train_dataset, self.dropped_pairs.get("train", {}))
        return result

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        tokenised = set(ID_SIDES) <= set(next(iter(dataset), {}))
        dataset = checked_pairs(dataset, dataset_name, ID_SIDES if tokenised else SIDES)
        if tokenised:
            dataset = check_vocabulary(dataset, dataset_name, self._vocabulary())
        elif not is_conversational(next(iter(dataset))):
            dataset = dataset.map(_ids, fn_kwargs={"tokenizer": processing_class})
        prepared = super()._prepare_dataset(dataset, processing_class, without_limit(args), dataset_name)
        judge = score_judge(args.max_length, processing_class.pad_token_id)
        kept, self.dropped_pairs[dataset_name] = teaching_pairs(prepared, dataset_name, judge, args.process_index == 0)
        return kept

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns: list[str] = self._signature_columns
        columns += [column for column in ("preference", SOURCE) if column not in columns]

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's forward pass and metrics, with the loss of `bradley_terry_loss` on the scores."""
        preference, source = inputs.pop("preference", None), inputs.pop(SOURCE, None)
        check_place(inputs, self.model.config.get_text_config().pad_token_id)
        _, outputs = super().compute_loss(model, inputs, return_outputs=True)
        chosen, rejected = outputs.logits.squeeze(-1).chunk(2)
        if self.model.training:
            loss = self._pair_loss(chosen, rejected, inputs.get("margin"), preference)
            self._check_loss(loss)
            if preference is not None:
                self._count_better_sides(chosen, rejected, preference)
        else:
            share = share_of_batch(self.accelerator, len(chosen))
            own: Any = [
                column if column is None else column[: share.own or None]  # of no pair it would be NaN
                for column in (chosen, rejected, inputs.get("margin"), preference)
            ]
            loss = self._pair_loss(*own)
            self._keep_loss(loss, share)
            self._held_out.add(chosen, rejected, preference, source, self.accelerator.gather_for_metrics)
        return (loss, outputs) if return_outputs else loss

    def _pair_loss(self, chosen: Tensor, rejected: Tensor, margin: Tensor | None, preference: Tensor | None) -> Tensor:
        """0-d mean over pairs; arguments (B,), as of `bradley_terry_loss`."""
        return bradley_terry_loss(
            chosen,
            rejected,
            margin=margin,
            center_coef=self.args.center_rewards_coefficient,
            label_smoothing=self.args.label_smoothing,
            preference=preference,
        )

    def _count_better_sides(self, chosen: Tensor, rejected: Tensor, preference: Tensor) -> None:
        """TRL's accuracy and margin of a batch, which take `chosen` for the better side, of the better side."""
        pairs = HeldOutPairs()
        pairs.add(chosen, rejected, preference, None, self.accelerator.gather_for_metrics)
        scores = cast(Scores, pairs.take())
        for name, value in (("accuracy", scores.accuracy()), ("margin", scores.margin())):
            values = self._metrics["train"][name]
            values.pop()
            if value is not None:
                values.append(value)
            elif not values:
                del self._metrics["train"][name]

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """TRL's evaluation, with the figures of all pairs; several sets count together in the model's config."""
        several = isinstance(self.eval_dataset if eval_dataset is None else eval_dataset, dict)
        if several:
            self._several = []
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if several:
            self._several = None
        return metrics

    def _figures(self, scores: Scores) -> dict[str, float | None]:
        """What the scores of one held-out set say; mean and spread of the rewards go into the model's config."""
        if self._several is not None:
            self._several.append(scores)
        mean, std = joined(self._several or [scores]).reward_mean_std()
        self.model.config.reward_mean, self.model.config.reward_std = mean, std
        own_mean, own_std = scores.reward_mean_std()
        figures: dict[str, float | None] = {"reward_mean": own_mean, "reward_std": own_std, **scores.reward_range()}
        figures |= {"accuracy": None, "margin": scores.margin()}  # not TRL's, which count ties and take `chosen` first
        self.calibration = scores.calibration()
        if self.calibration is not None:
            figures |= {"accuracy": self.calibration.accuracy, "brier": self.calibration.brier}
            figures["calibration_error"] = self.calibration.ece
        for name, (accuracy, lead) in scores.by_source().items():
            figures |= {f"accuracy/{name}": accuracy, f"margin/{name}": lead}
        return figures

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if is_peft_model(self.model) and self.args.should_save:  # ZeRO-3 comes here on all processes
            write_adapter_figures(output_dir or self.args.output_dir, known_figures(self.model.config))


def _refuse_images(*datasets: Any) -> None:
    columns = image_columns(datasets)
    if columns:
        raise ConfigError(
            [f"`train_dataset`: has images (column `{columns[0]}`), but a reward model here reads text alone."]
        )


def _ids(row: dict[str, Any], tokenizer: Any) -> dict[str, list[int]]:
    """Token ids of a plain pair; whatever special tokens the text itself spells stay in."""
    texts = [row.get("prompt", "") + row[side] for side in SIDES]
    chosen, rejected = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return {"chosen_ids": chosen, "rejected_ids": rejected}
