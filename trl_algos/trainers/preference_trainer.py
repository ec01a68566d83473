"""`PreferenceTrainer`: TRL's `DPOTrainer` for the algorithms on preference pairs that train a policy."""

from typing import Any

from torch import Tensor
from trl import DPOTrainer

from trl_algos.core import nll_per_token
from trl_algos.errors import ConfigError
from trl_algos.preference_config import PreferenceConfig
from trl_algos.trainers.packing.models import pack_language_model
from trl_algos.trainers.packing.start import start_packing
from trl_algos.trainers.preference.adapters import refuse_adapter_path
from trl_algos.trainers.preference.pairs import checked_pairs, policy_judge, row_count, teaching_pairs
from trl_algos.trainers.processes import forget_evaluation


class PreferenceTrainer(DPOTrainer):
    """Trains a policy on preference pairs by the row that `args.algorithm` names.

    The loss is TRL's, but for the likelihood of the chosen completions, which TRL averages over the micro-batch:
    here each completion's is divided by its own tokens. The reference is what the run started from: with a loaded
    adapter that adapter, not the bare base. Passes compute real tokens alone, and the prompt of a pair once, wherever
    that is exact (`padding_free`).

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
        refuse_adapter_path(model)
        _check_adapter(model, ref_model)
        self._padding_free, self._packed = args.padding_free, False
        args.padding_free = False  # TRL would say that it cannot do it
        try:
            super().__init__(model, ref_model, args, **kwargs)
        finally:
            args.padding_free = self._padding_free
        self._pack_models()
        # TRL's robust loss is cDPO's at another smoothing. The attribute alone changes: `args` says what was set.
        self.label_smoothing = args.row.smoothing_for_trl(args.label_smoothing)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, on all processes whatever was evaluated before."""
        forget_evaluation(self)
        return super().train(*args, **kwargs)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        pairs = checked_pairs(dataset, dataset_name)
        prepared = super()._prepare_dataset(pairs, processing_class, args, dataset_name)
        filled = row_count(pairs) - row_count(prepared)
        earlier = {f"the prompt fills `max_length` ({args.max_length})": filled}
        judge = policy_judge(args.max_length, args.truncation_mode)
        return teaching_pairs(prepared, dataset_name, judge, earlier, warn=args.process_index == 0)

    def _pack_models(self) -> None:
        if self._packed:
            return
        models = {"model": self.model}
        if self.ref_model is not None:
            models["ref_model"] = self.accelerator.unwrap_model(self.ref_model)
        start_packing(self, self._padding_free, pack_language_model, models)
        self._packed = True

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        # TRL calls this from its `__init__`.
        self._pack_models()
        return super()._precompute_ref_logps(dataset, name, batch_size)

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if not self.args.nll_coef:
            return super()._compute_loss(model, inputs, return_outputs)
        recorded = _Recorded(model)
        result = super()._compute_loss(recorded, inputs, return_outputs)
        nll = self._chosen_nll(recorded.log_probs, inputs["completion_mask"])
        if return_outputs:
            return result[0] + self.args.nll_coef * nll, result[1]
        return result + self.args.nll_coef * nll

    def _chosen_nll(self, log_probs: Tensor, completion_mask: Tensor) -> Tensor:
        """0-d; `log_probs` (2B, T' >= T - 1) and `completion_mask` (2B, T), chosen rows first."""
        mask = completion_mask[: completion_mask.shape[0] // 2, 1:]
        # Prompt learning puts virtual tokens in front.
        nll = nll_per_token(log_probs[: mask.shape[0], -mask.shape[1] :], mask)
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["nll/chosen"].append(self.accelerator.gather(nll.detach()).mean().item())
        return nll


class _Recorded:
    """The model, which keeps the log-probabilities of its first call: those that TRL's loss is made of."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.log_probs: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.model(*args, **kwargs)
        if self.log_probs is None:
            self.log_probs = outputs.log_probs
        return outputs


def _check_adapter(model: Any, ref_model: Any) -> None:
    """Refuse an adapter that TRL could not copy as the reference, or that would not train."""
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        return
    if ref_model is None and "default" not in adapters:
        raise ConfigError([f"`model`: its adapter must be called default to be copied, but is {', '.join(adapters)}."])
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(["`model`: its adapter is frozen; load it with `is_trainable=True`."])
