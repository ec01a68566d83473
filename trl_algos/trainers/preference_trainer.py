"""`PreferenceTrainer`: TRL's `DPOTrainer` for the algorithms on preference pairs that train a policy."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import DPOTrainer

from trl_algos.core import nll_per_token
from trl_algos.errors import ConfigError
from trl_algos.preference_config import PreferenceConfig
from trl_algos.preference_rows import SOURCE
from trl_algos.settings.backends import precomputing_problems
from trl_algos.trainers.adapters import check_adapter, give_reference_adapter
from trl_algos.trainers.packing.models import pack_language_model
from trl_algos.trainers.packing.start import start_packing
from trl_algos.trainers.preference.held_out_means import over_all_pairs, own_pairs, share_of_batch
from trl_algos.trainers.preference.held_out_pairs import HeldOutFigures, Scores
from trl_algos.trainers.preference.pairs import (
    checked_pairs,
    image_columns,
    policy_judge,
    teaching_pairs,
    warn_of_dropped,
    without_limit,
)
from trl_algos.trainers.preference.precomputing import precomputing
from trl_algos.trainers.preference.resuming import ExactResume
from trl_algos.trainers.preference.sources import WithSources
from trl_algos.trainers.preference.steps import CheckedSteps
from trl_algos.trainers.processes import forget_evaluation
from trl_algos.trainers.public_uploads import PublicUploads


class PreferenceTrainer(ExactResume, HeldOutFigures, CheckedSteps, PublicUploads, DPOTrainer):
    """Trains a policy on preference pairs by the row that `args.algorithm` names.

    The loss is TRL's, but for the likelihood of the chosen completions, which TRL averages over the micro-batch:
    here each completion's is divided by its own tokens. The reference is what the run started from: with a loaded
    adapter that adapter, not the bare base. Passes compute real tokens alone, and the prompt of a pair once, wherever
    that is exact (`padding_free`). Where pairs have a column `source`, an evaluation tells the accuracies and margins
    of the implicit rewards of each, over all its pairs; `ld_alpha` is without effect there. `dropped_pairs` has, for
    each set by name, reason -> number of pairs that were dropped for it.

    Args:
        model: policy, or path of one, as in TRL.
        ref_model: reference policy; None for the start of the run.
        args: settings; None for those of DPO.
        **kwargs: as in TRL's `DPOTrainer`.

    Raises:
        ConfigError: a row of the data is no preference pair, none is left, or the adapter cannot be gone on from.
    """

    def __init__(self, model: Any, ref_model: Any = None, args: PreferenceConfig | None = None, **kwargs: Any) -> None:
        args = PreferenceConfig("trainer_output") if args is None else args
        if not isinstance(args, PreferenceConfig):
            raise ConfigError([f"`args`: {type(args).__name__} must be a PreferenceConfig."])
        check_adapter(model, copied=ref_model is None)
        _warn_of_images(kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        self.dropped_pairs: dict[str, dict[str, int]] = {}
        self._padding_free, self._packed = args.padding_free, False
        args.padding_free = False  # TRL would say that it cannot do it
        try:
            super().__init__(model, ref_model, args, **kwargs)
        finally:
            args.padding_free = self._padding_free
        give_reference_adapter(self.model)
        self._pack_models()
        self.data_collator: Any = WithSources(self.data_collator)
        # TRL's robust loss is cDPO's at another smoothing. The attribute alone changes: `args` says what was set.
        self.label_smoothing = args.row.smoothing_for_trl(args.label_smoothing)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, on all processes whatever was evaluated before."""
        forget_evaluation(self)
        result = super().train(*args, **kwargs)
        if self.args.process_index == 0:
            warn_of_dropped("train", self.train_dataset, self.dropped_pairs.get("train", {}))
        return result

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        pairs = checked_pairs(dataset, dataset_name)
        prepared = super()._prepare_dataset(pairs, processing_class, without_limit(args), dataset_name)
        judge = policy_judge(args.max_length, args.truncation_mode)
        kept, self.dropped_pairs[dataset_name] = teaching_pairs(prepared, dataset_name, judge, args.process_index == 0)
        return kept

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns: list[str] = self._signature_columns
        if SOURCE not in columns:
            columns.append(SOURCE)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        stage = 3 if is_deepspeed_zero3_enabled() else None
        problems = list(precomputing_problems(True, bool(getattr(self.model, "peft_config", None)), stage))
        if problems:
            raise ConfigError(problems)
        self._pack_models()  # TRL calls this from its `__init__`
        with precomputing(self, dataset, self._precompute_model_hash):
            return super()._precompute_ref_logps(dataset, name, batch_size)

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """TRL's, of a batch with or without sources."""
        return super().compute_ref_log_probs(model, {name: x for name, x in inputs.items() if name != SOURCE})

    def _pack_models(self) -> None:
        if self._packed:
            return
        models = {"model": self.model}
        if self.ref_model is not None:
            models["ref_model"] = self.accelerator.unwrap_model(self.ref_model)
        start_packing(self, self._padding_free, pack_language_model, models)
        self._packed = True

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if self.model.training:
            result = self._loss(model, inputs, return_outputs, inputs.pop(SOURCE, None))
            self._check_loss(result[0] if return_outputs else result)
            return result
        share = share_of_batch(self.accelerator, len(inputs["input_ids"]) // 2)
        # Logits are gathered by transformers, and pixels do not lie in rows of pairs.
        if share.own < share.size and not return_outputs and "pixel_values" not in inputs:
            inputs = own_pairs(inputs, share)
        with over_all_pairs(self, share):
            result = self._loss(model, inputs, return_outputs, inputs.pop(SOURCE, None))
        self._keep_loss(result[0] if return_outputs else result, share)
        return result

    def _loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool, source: Tensor | None) -> Any:
        if not self.args.nll_coef and (source is None or self.model.training):
            return super()._compute_loss(model, inputs, return_outputs)
        with _recorded_log_probs(self.model, self.ref_model) as log_probs:
            result = super()._compute_loss(model, inputs, return_outputs)
        if source is not None and not self.model.training:
            self._keep_rewards(log_probs, inputs, source)
        if not self.args.nll_coef:
            return result
        nll = self._chosen_nll(log_probs[0], inputs["completion_mask"])
        if return_outputs:
            return result[0] + self.args.nll_coef * nll, result[1]
        return result + self.args.nll_coef * nll

    def _keep_rewards(self, log_probs: list[Tensor], inputs: dict[str, Any], source: Tensor) -> None:
        """Keep the implicit rewards of an evaluated batch, from the passes of the policy and of the reference."""
        # Prompt learning puts virtual tokens in front.
        tokens = inputs["completion_mask"].shape[1] - 1
        policy, *passes = (each[:, -tokens:].sum(dim=1) for each in log_probs[:2])
        known = [inputs[name] for name in ("ref_chosen_logps", "ref_rejected_logps") if name in inputs]
        chosen, rejected = (self.beta * (policy - (torch.cat(known) if known else passes[0]))).chunk(2)
        self._held_out.add(chosen, rejected, None, source, self.accelerator.gather_for_metrics)

    def _figures(self, scores: Scores) -> dict[str, float | None]:
        figures: dict[str, float | None] = {}
        for name, (accuracy, margin) in scores.by_source(equal=0.0).items():  # TRL's, too, asks for a higher reward
            figures |= {f"rewards/accuracies/{name}": accuracy, f"rewards/margins/{name}": margin}
        return figures

    def _chosen_nll(self, log_probs: Tensor, completion_mask: Tensor) -> Tensor:
        """0-d; `log_probs` (2B, T' >= T - 1) and `completion_mask` (2B, T), chosen rows first."""
        mask = completion_mask[: completion_mask.shape[0] // 2, 1:]
        # Prompt learning puts virtual tokens in front.
        rows = log_probs[: mask.shape[0], -mask.shape[1] :]
        nll = torch.stack([nll_per_token(*row) for row in zip(rows.split(1), mask.split(1), strict=True)])
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["nll/chosen"].append(self.accelerator.gather(nll.detach()).mean().item())
        return nll.mean()


@contextmanager
def _recorded_log_probs(*models: nn.Module | None) -> Iterator[list[Tensor]]:
    """The log-probabilities (B, T') that the models gave in here, in order: the policy's, then the reference's."""
    found: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        log_probs = getattr(output, "log_probs", None)
        if log_probs is not None:
            found.append(log_probs)

    handles = [model.register_forward_hook(keep) for model in models if model is not None]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _warn_of_images(*datasets: Any) -> None:
    columns = image_columns(datasets)
    if columns:
        warnings.warn(
            f"The data has images (column {columns[0]}): TRL reads such pairs as they are trained on, so none is "
            "checked or dropped before.",
            UserWarning,
            stacklevel=3,
        )
