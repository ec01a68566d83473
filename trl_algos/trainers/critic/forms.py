"""The forms of a critic, which all live inside the policy's module tree, and the one forward pass they share with it.

The forward of the policy takes one keyword more, `with_values`: absent or None, it is the policy's own; "both", it
returns the policy's output and the values, so that a wrapper such as DDP sees one forward for one backward; "all", the
same with the values after the last token of each row, on which the policy's pass need not spend a token; "values"
gives the values alone, for scoring and for a step that trains the critic alone; "policy" the policy's output and 0,
for a step that trains the policy alone. A wrapper waits for a gradient of every parameter: what a step does not train
gets 0.
Values are (B, L), of the state after each token of the input. A model that is packed (`packing_of`) computes those of
real tokens; others are 0 then, and so may be those after the last token of a row for "both".
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trl_algos.trainers.critic.adapters import NAME, adapter_holders, adapter_layers, only_adapter, wrap_checkpointing
from trl_algos.trainers.critic.head import ValueHead
from trl_algos.trainers.packing.flat_row import FlatRow
from trl_algos.trainers.packing.models import packing_of, pass_with_row
from trl_algos.trainers.packing.probe import hidden_states


class Critic:
    """What all forms have in common. One that has been made is part of the policy's module tree.

    Args:
        base: the policy without PEFT's wrapper.
        module: the critic's own module, put into `base` under `module_name`.
        head: the value head, within `module`.
    """

    form: ClassVar[str]
    module_name: ClassVar[str] = "value_head"

    def __init__(self, base: Any, module: nn.Module, head: ValueHead) -> None:
        self.base, self.module, self.head = base, module, head
        self.alone = False  # True while the critic alone is trained, whose loss then reaches no layer of the policy
        self._trained = trainable_places(module)
        setattr(base, self.module_name, module)
        policy_forward, self._run_policy = base.forward, pass_with_row(base)

        @functools.wraps(policy_forward)  # whose signature `generate` looks at
        def forward(*args: Any, with_values: str | None = None, **kwargs: Any) -> Any:
            if with_values is None:
                return policy_forward(*args, **kwargs)
            if with_values == "values":
                values = self.values(kwargs["input_ids"], kwargs["attention_mask"])
                return values + self._nothing(of_critic=False) if torch.is_grad_enabled() else values
            if with_values == "policy":
                return policy_forward(*args, **kwargs), self._nothing(of_critic=True)
            if with_values not in ("both", "all"):
                raise ValueError(f"`with_values`: {with_values!r} is not one of both, all, values, policy or None.")
            return self._with_policy(*args, keeps_last=with_values == "all", **kwargs)

        base.forward = forward

    def values(self, input_ids: Tensor, attention_mask: Tensor, row: FlatRow | None = None) -> Tensor:
        """(B, L) values of the states after each token.

        Args:
            input_ids: (B, L) long.
            attention_mask: (B, L), 1 at real tokens.
            row: the flat row of these tokens that the policy has just been given, for a critic that takes such rows.
        """
        packing, inputs = packing_of(self._trunk), {"input_ids": input_ids, "attention_mask": attention_mask}
        if packing is None:
            row = None
        elif row is None:
            row = packing.row(inputs, drop_last=False)
        return self._of_states(self._states(inputs, row), row)

    @property
    def packs(self) -> bool:
        """Whether values are computed on real tokens alone."""
        return packing_of(self._trunk) is not None

    def parameters(self) -> list[nn.Parameter]:
        """All that the critic's learning rate applies to, as it is now: a backend may exchange parameters."""
        return [getattr(module, name) for module, name in self._trained]

    def cast(self, dtype: torch.dtype) -> None:
        """Give all that is trained the precision `dtype`, before an optimizer or a backend knows it."""
        for parameter in self.parameters():
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)

    def restore(self) -> None:
        """Undo what a pass of the reference, which switches PEFT's adapters, did to the critic."""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the critic out of the module tree for as long as the policy's tensors are listed."""
        del self.base._modules[self.module_name]
        try:
            yield
        finally:
            setattr(self.base, self.module_name, self.module)

    @property
    def _trunk(self) -> Any:
        """The model without head whose states are valued."""
        return self.base.base_model

    def _states(self, inputs: dict[str, Tensor], row: FlatRow | None) -> Tensor:
        """Last hidden states of padded rows (B, L, width), or of their flat row (1, tokens, width)."""
        if row is not None:
            return hidden_states(self._trunk, row)
        states: Tensor = self._trunk(**inputs, use_cache=False).last_hidden_state
        return states

    def _of_states(self, states: Tensor, row: FlatRow | None) -> Tensor:
        values: Tensor = self.head(states)
        return values if row is None else row.per_token(values)

    def _nothing(self, of_critic: bool) -> Tensor:
        """0-d 0 whose gradient is 0 at all that the critic trains, or at all else that is trained."""
        own = {id(p) for p in self.parameters()}
        trained = [p for p in self.base.parameters() if p.requires_grad and (id(p) in own) == of_critic]
        return sum((0.0 * p.sum() for p in trained), self.head.weight.new_zeros(()))

    def _with_policy(self, *args: Any, keeps_last: bool, **kwargs: Any) -> tuple[Any, Tensor]:
        outputs, row = self._run_policy(*args, keeps_last=keeps_last, **kwargs)
        return outputs, self.values(kwargs["input_ids"], kwargs["attention_mask"], row)


class SharedCritic(Critic):
    """A value head on the policy's last hidden states.

    Args:
        base: the policy without PEFT's wrapper.
        head: the value head.
        trunk_gradient: whether the value loss trains the policy's layers too.
    """

    form = "shared"

    def __init__(self, base: Any, head: ValueHead, trunk_gradient: bool) -> None:
        super().__init__(base, head, head)
        self._trunk_gradient = trunk_gradient

    def _states(self, inputs: dict[str, Tensor], row: FlatRow | None) -> Tensor:
        with torch.no_grad():  # values alone are asked for where the policy's weights are not trained
            return super()._states(inputs, row)

    def _with_policy(self, *args: Any, keeps_last: bool, **kwargs: Any) -> tuple[Any, Tensor]:
        seen: list[Tensor] = []
        hook = self.base.base_model.register_forward_hook(lambda _, __, output: seen.append(output.last_hidden_state))
        try:
            outputs, row = self._run_policy(*args, keeps_last=keeps_last, **kwargs)
        finally:
            hook.remove()
        reaches_trunk = self._trunk_gradient and not self.alone
        return outputs, self._of_states(seen[-1] if reaches_trunk else seen[-1].detach(), row)


class AdapterCritic(Critic):
    """A second LoRA adapter on the policy's frozen base, and a value head: policy, critic and reference share weights.

    Args:
        policy: the policy, with PEFT's wrapper.
        head: the value head.
        config: of the critic's adapter.
    """

    form = "adapter"

    def __init__(self, policy: Any, head: ValueHead, config: Any) -> None:
        before = set(policy.parameters())
        policy.add_adapter(NAME, config)
        adapter = [(module, name) for module, name in places(policy) if getattr(module, name) not in before]
        super().__init__(policy.get_base_model(), head, head)
        self._trained = [*adapter, *self._trained]
        self.policy, self._layers, self._entered = policy, adapter_layers(self.base), False
        wrap_checkpointing(self.base, self._remembering)
        self.restore()

    def restore(self) -> None:
        """PEFT leaves every adapter but the active one without gradient."""
        for parameter in self.parameters():
            parameter.requires_grad_(True)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take head and adapter out of the module tree, and the adapter out of PEFT's list."""
        config = self.policy.peft_config.pop(NAME)
        holders = [holder for holder in adapter_holders(self._layers) if NAME in holder]
        parts = [holder.pop(NAME) for holder in holders]
        try:
            with super().hidden():
                yield
        finally:
            for holder, part in zip(holders, parts, strict=True):
                holder[NAME] = part
            self.policy.peft_config[NAME] = config

    def _states(self, inputs: dict[str, Tensor], row: FlatRow | None) -> Tensor:
        with self._inside():
            return super()._states(inputs, row)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        entered, self._entered = self._entered, True
        try:
            with only_adapter(self._layers, NAME):
                yield
        finally:
            self._entered = entered

    def _remembering(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """`checkpoint`, for functions that run again in the backward pass, when the policy's adapter is active."""

        def in_critic(function: Callable[..., Any], *args: Any) -> Any:
            with self._inside():
                return function(*args)

        def checkpoint_with_adapter(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return checkpoint(functools.partial(in_critic, function) if self._entered else function, *args, **kwargs)

        return checkpoint_with_adapter


class SeparateCritic(Critic):
    """A model of its own, with a value head.

    Args:
        base: the policy without PEFT's wrapper.
        trunk: a model without LM head, with a LoRA adapter called `NAME` or to be trained whole.
        head: the value head.
    """

    form = "separate"
    module_name = "critic"

    def __init__(self, base: Any, trunk: Any, head: ValueHead) -> None:
        super().__init__(base, nn.ModuleDict({"trunk": trunk, "value_head": head}), head)
        self.trunk, self._layers = trunk, adapter_layers(trunk)

    def restore(self) -> None:
        """PEFT walks over all adapters of the tree, those of the critic included."""
        for layer in self._layers:
            layer._active_adapter, layer._disable_adapters = [NAME], False
        for parameter in self.parameters():
            parameter.requires_grad_(True)

    @property
    def _trunk(self) -> Any:
        return self.trunk


def places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Each parameter of `model` as the module that holds it and its name there."""
    return [(module, name) for module in model.modules() for name, _ in module.named_parameters(recurse=False)]


def trainable_places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The `places` of what is not frozen."""
    return [(module, name) for module, name in places(model) if getattr(module, name).requires_grad]
