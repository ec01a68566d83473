"""The forms of a critic, which all live inside the policy's module tree, and the one forward pass they share with it.

The forward of the policy takes one keyword more, `with_values`: absent or None, it is the policy's own; "both", it
returns the policy's output and the values, so that a wrapper such as DDP sees one forward for one backward; "values"
gives the values alone, for scoring and for a step that trains the critic alone; "policy" the policy's output and 0,
for a step that trains the policy alone. A wrapper waits for a gradient of every parameter: what a step does not train
gets 0.
Values are (B, L), of the state after each token of the input.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trl_algos.trainers.critic.adapters import NAME, adapter_holders, adapter_layers, only_adapter, wrap_checkpointing
from trl_algos.trainers.critic.head import ValueHead


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
        policy_forward = base.forward

        @functools.wraps(policy_forward)  # whose signature `generate` looks at
        def forward(*args: Any, with_values: str | None = None, **kwargs: Any) -> Any:
            if with_values is None:
                return policy_forward(*args, **kwargs)
            if with_values == "values":
                values = self.values(kwargs["input_ids"], kwargs["attention_mask"])
                return values + self._nothing(of_critic=False) if torch.is_grad_enabled() else values
            if with_values == "policy":
                return policy_forward(*args, **kwargs), self._nothing(of_critic=True)
            if with_values != "both":
                raise ValueError(f"`with_values`: {with_values!r} is not one of both, values, policy or None.")
            return self._with_policy(policy_forward, *args, **kwargs)

        base.forward = forward

    def values(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, L) values of the states after each token."""
        return self.head(self._hidden(input_ids, attention_mask))

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

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return _last_hidden(self.base.base_model, input_ids, attention_mask)

    def _nothing(self, of_critic: bool) -> Tensor:
        """0-d 0 whose gradient is 0 at all that the critic trains, or at all else that is trained."""
        own = {id(p) for p in self.parameters()}
        trained = [p for p in self.base.parameters() if p.requires_grad and (id(p) in own) == of_critic]
        return sum((0.0 * p.sum() for p in trained), self.head.weight.new_zeros(()))

    def _with_policy(self, policy_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        return policy_forward(*args, **kwargs), self.values(kwargs["input_ids"], kwargs["attention_mask"])


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

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        with torch.no_grad():  # values alone are asked for where the policy's weights are not trained
            return super()._hidden(input_ids, attention_mask)

    def _with_policy(self, policy_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        seen: list[Tensor] = []
        hook = self.base.base_model.register_forward_hook(lambda _, __, output: seen.append(output.last_hidden_state))
        try:
            outputs = policy_forward(*args, **kwargs)
        finally:
            hook.remove()
        reaches_trunk = self._trunk_gradient and not self.alone
        return outputs, self.head(seen[-1] if reaches_trunk else seen[-1].detach())


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

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        with self._inside():
            return super()._hidden(input_ids, attention_mask)

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

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return _last_hidden(self.trunk, input_ids, attention_mask)


def places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Each parameter of `model` as the module that holds it and its name there."""
    return [(module, name) for module in model.modules() for name, _ in module.named_parameters(recurse=False)]


def trainable_places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The `places` of what is not frozen."""
    return [(module, name) for module, name in places(model) if getattr(module, name).requires_grad]


def _last_hidden(trunk: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    return trunk(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
