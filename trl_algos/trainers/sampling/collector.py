"""Dynamic sampling: prompts are drawn and sampled until a generation batch is full of groups that teach.

Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, section 3.2. All ranks decide alike, from gathered rewards: every
rank holds all kept groups, and trains on its share of them. TRL's method for a batch is entered twice: once per round
for what is sampled, and left again before it scores; once for the batch that was found, where it finds everything
generated and rewarded already. So no log-prob, reference or value is computed for a rejected group.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor
from transformers.trainer_utils import SaveStrategy

from trl_algos.errors import ConfigError, SamplingError, counted
from trl_algos.trainers.rollout import gather_rows
from trl_algos.trainers.sampling.accounts import Sampled, sampling_metrics
from trl_algos.trainers.sampling.ending import save_before_end
from trl_algos.trainers.sampling.groups import Completion, Group, blank, row_fields, split, unsavable
from trl_algos.trainers.sampling.old_logps import add_old_logps
from trl_algos.trainers.sampling.prompts import Drawn, Prompts
from trl_algos.trainers.sampling.verdicts import CAUSES, INFORMATIVE, group_verdicts

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer

logger = get_logger(__name__)

MEMORY = 0.9
"""What is left of the acceptance counts after each round: some ten rounds are remembered."""


class PromptsEnded(Exception):  # noqa: N818 - the end of a run, not a fault
    """The data ended, and no group that teaches was left."""


class Collector:
    """Finds the groups to train on.

    Args:
        trainer: whose generation and reward functions are used.
        prompts: where prompts come from.
    """

    def __init__(self, trainer: "PolicyTrainer", prompts: Prompts) -> None:
        self._trainer, self._prompts = trainer, prompts
        self.waiting: list[Group] = []
        """Informative groups that no batch had room for."""
        self._handed_out: list[Group] = []  # to the optimizer step that is being prepared
        self._last: Group | None = None
        self._counted: list[dict[str, int]] = []  # for the accounts, once the step is sure to be taken
        # One accepted group of one, so that the first round asks for what is missing.
        self._accepted = self._judged = 1.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the groups sampled lately that teach."""
        return self._accepted / self._judged

    def begin_step(self) -> None:
        """An optimizer step begins: what was handed out before has been trained on."""
        self._handed_out, self._counted = [], []

    def count_step(self) -> None:
        """The optimizer step is prepared, and will be taken."""
        for batch in self._counted:
            self._trainer.accounts.trained(**batch)
        self._counted = []

    def collect(self, alone: bool) -> list[Group]:
        """The groups of the next generation batch, over all ranks; blank ones where some could not be found.

        Args:
            alone: whether the optimizer step has nothing else to learn from.

        Raises:
            PromptsEnded: no group is left, and `alone`.
            SamplingError: the rounds are over, and no group was found, or too few and that is to be an error.
        """
        trainer, args = self._trainer, self._trainer.args
        needed = args.generation_batch_size // trainer.num_generations
        rounds: list[Sampled] = []
        while len(self.waiting) < needed and len(rounds) < args.dynamic_sampling_max_rounds:
            drawn = self._prompts.draw(self._round_size(needed - len(self.waiting), needed))
            if not drawn:
                break
            rounds.append(self._round(drawn))
        missing = max(needed - len(self.waiting), 0)
        if missing:
            self._judge_shortage(needed, rounds, alone)
        batch, self.waiting = self.waiting[:needed], self.waiting[needed:]
        self._handed_out += batch
        add_old_logps(trainer, self.waiting)
        trainer.append_metrics(sampling_metrics(rounds, len(self.waiting), missing))
        trainer.append_metrics({"sampling/epoch": self._prompts.passes})
        tokens = sum(c.generated_tokens for group in batch for c in group.completions)
        completions = sum(len(group.completions) for group in batch)
        self._counted.append(
            {
                "groups": len(batch),
                "completions": completions,
                "tokens": tokens,
                "rounds": len(rounds),
                "missing": missing,
            }
        )
        self._last = batch[-1] if batch else self._last
        return batch + self._blanks(missing)

    def _round_size(self, missing: int, most: int) -> int:
        """Prompts to sample next: as many as should give `missing` groups, but no more than a whole batch has.

        So generation never takes more memory than without dynamic sampling. An engine lays out its memory by itself:
        it may be asked for two batches, since each round more costs it the time of the longest completion. The rows
        lie evenly on the ranks.
        """
        unit = self._unit
        bound = 2 * most if self._trainer.use_vllm else most
        asked = math.ceil(missing / max(self.acceptance_rate, missing / bound))
        return -(-asked // unit) * unit

    @property
    def _unit(self) -> int:
        """Fewest prompts whose completions lie evenly on the ranks."""
        ranks = self._trainer.accelerator.num_processes
        return ranks // math.gcd(ranks, self._trainer.num_generations)

    def _round(self, drawn: list[Drawn]) -> Sampled:
        """Sample, judge and keep or reject one group per prompt."""
        trainer, size = self._trainer, self._trainer.num_generations
        padded = drawn + [drawn[-1]] * (-len(drawn) % self._unit)  # at the end of the data alone
        rows = [(group, dict(padded[group].row)) for group in range(len(padded)) for _ in range(size)]
        share = len(rows) // trainer.accelerator.num_processes
        first = trainer.accelerator.process_index * share
        own = rows[first : first + share]
        completions, rewards = self._sampled([row for _, row in own])
        device = rewards.device
        lengths = torch.tensor([c.generated_tokens for c in completions], device=device)
        learned = torch.tensor([self._is_learned(c) for c in completions], device=device)
        lengths, learned = (gather_rows(trainer.accelerator, x).view(-1, size) for x in (lengths, learned))
        judged = trainer.judged_rewards(rewards).view(-1, size)
        count = len(drawn)
        verdicts = self._verdicts(judged, learned)[:count]
        keeps = [verdict == INFORMATIVE for verdict in verdicts] + [False] * (len(padded) - count)
        kept = gather_object([c for (group, _), c in zip(own, completions, strict=True) if keeps[group]])
        sampled = Sampled(
            verdicts,
            judged.nanmean(1).tolist()[:count],
            lengths.sum(1).tolist()[:count],
            size,
            trainer.generation_seconds,
            sum(prompt.retried for prompt in drawn),
            trainer.weighted_scores(rewards)[: count * size].nanmean().item(),
        )
        self._sort_out(drawn, keeps, kept, rewards.view(-1, size, rewards.shape[1]).tolist())
        self._accepted = MEMORY * self._accepted + sampled.informative
        self._judged = MEMORY * self._judged + count
        trainer.accounts.sampled(sampled)
        return sampled

    def _sampled(self, inputs: list[dict[str, Any]]) -> tuple[list[Completion], Tensor]:
        """This rank's completions, and the (N, F) rewards of all ranks."""
        trainer = self._trainer
        prompts, generated = trainer.generate_only(inputs)
        *_, extra, images, tool_images = generated
        if images is not None or any(tool_images):
            raise ValueError("`dynamic_sampling`: true is not supported with images; set it to false.")
        for i, row in enumerate(inputs):
            row |= row_fields(extra, i)
        rewards = trainer._calculate_rewards(inputs, prompts, generated[3], generated[1])
        columns = dict(trainer._pending_extra_logs)
        trainer._pending_extra_logs.clear()
        return split(prompts, generated, columns), rewards

    def _verdicts(self, rewards: Tensor, learned: Tensor) -> list[str]:
        args = self._trainer.args
        interval = args.dynamic_sampling_range
        return group_verdicts(
            rewards, learned, args.dynamic_sampling_tolerance, None if interval is None else (interval[0], interval[1])
        )

    def _is_learned(self, completion: Completion) -> bool:
        """Whether a completion has tokens to train on."""
        trainer = self._trainer
        ends = (*trainer.eos_token_ids, trainer._tokenizer.pad_token_id)
        left_out = trainer.args.mask_truncated_completions and completion.completion_ids[-1] not in ends
        return completion.generated_tokens > 0 and not left_out

    def _sort_out(
        self, drawn: list[Drawn], keeps: list[bool], kept: list[Completion], rewards: list[list[list[float]]]
    ) -> None:
        """Put groups that teach in the queue, and hand the other prompts back."""
        size, taken = self._trainer.num_generations, 0
        for group, prompt in enumerate(drawn):
            if keeps[group]:
                completions = kept[taken : taken + size]
                taken += size
                self._keep(Group(prompt.place, prompt.row, completions, rewards[group]))
            else:
                self._prompts.reject(prompt)

    def _keep(self, group: Group) -> None:
        """Put a group in the queue, if a checkpoint can hold it."""
        args = self._trainer.args
        saves = args.save_strategy != SaveStrategy.NO and not args.save_only_model
        stranger = unsavable(self._group_state(group), "row") if saves else None
        if stranger:
            raise ConfigError(
                [
                    f"`dynamic_sampling`: groups that wait for the next step could not be saved: {stranger} is not "
                    "text, a number, a list or a tensor. Drop the column or the field, or set `save_strategy` to no."
                ]
            )
        self.waiting.append(group)

    # Too few

    def _judge_shortage(self, needed: int, rounds: list[Sampled], alone: bool) -> None:
        """Go on with a batch that is not full, or raise."""
        trainer, args, found = self._trainer, self._trainer.args, len(self.waiting)
        step, nothing = trainer.state.global_step, alone and not self.waiting
        if self._prompts.ended and (trainer.accounts.trained_groups or not nothing):
            if nothing:
                logger.warning(f"The data ended: the run is over after step {step} of {trainer.state.max_steps}.")
                raise PromptsEnded
            logger.warning(f"The data ended: step {step + 1} trains on {found} of {needed} groups.")
            return
        message = _shortage(found, needed, rounds, args.dynamic_sampling_max_rounds)
        if nothing or args.dynamic_sampling_on_exhausted == "raise":
            # The step is not taken, so its groups wait again.
            self.waiting, self._handed_out = self._handed_out + self.waiting, []
            raise SamplingError(f"{message} {save_before_end(trainer)}")
        logger.warning(f"{message} Step {step + 1} trains on what there is.")

    def _blanks(self, count: int) -> list[Group]:
        if not count:
            return []
        if self._last is None:
            raise RuntimeError("A batch without any group, before there was one, should have been refused.")
        return [blank(self._last, self._trainer._tokenizer.eos_token_id)] * count

    # State

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "prompts": self._prompts.state_dict(),
            "waiting": [self._group_state(group) for group in self.waiting],
            "last": None if self._last is None else self._group_state(self._last),
            "accepted": self._accepted,
            "judged": self._judged,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` stood."""
        self._prompts.load_state_dict(state["prompts"])
        self.waiting = [self._group(group) for group in state["waiting"]]
        self._last = None if state["last"] is None else self._group(state["last"])
        self._accepted, self._judged = state["accepted"], state["judged"]

    def _group_state(self, group: Group) -> dict[str, Any]:
        return group.state_dict(keep_row=self._prompts.streamed)

    def _group(self, state: dict[str, Any]) -> Group:
        group = Group.from_state(state)
        if not self._prompts.streamed:
            group.row = self._prompts.row(group.place)
        return group


def _shortage(found: int, needed: int, rounds: list[Sampled], most: int) -> str:
    """What was looked for, and what was found instead."""
    verdicts = [verdict for sampled in rounds for verdict in sampled.verdicts]
    causes = ", ".join(f"{cause} {verdicts.count(cause)}" for cause in CAUSES if cause in verdicts)
    return (
        f"`dynamic_sampling`: {found} of {needed} groups that teach were found in {counted(len(rounds), 'round')} "
        f"(`dynamic_sampling_max_rounds`: {most}) and {counted(len(verdicts), 'prompt')}; the others: "
        f"{causes or 'none'}."
    )
