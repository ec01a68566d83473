"""What was sampled over a run, what of it was trained on, and where the rest went; the same for every run."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trl_algos.trainers.sampling.verdicts import CAUSES, INFORMATIVE

DECILES = 10


@dataclass(frozen=True)
class Sampled:
    """One call of the generation, over all ranks.

    Args:
        verdicts: one per group; see `group_verdicts`. Empty where prompts have one completion each, which are told
            apart by nothing.
        means: mean reward of each group; NaN where nothing was scored.
        tokens: generated tokens of each group.
        completions: of each group.
        seconds: that the generation took.
        retried: prompts that had been rejected before.
        reward: mean of the weighted rewards of all completions, without length shaping; NaN where nothing was scored.
    """

    verdicts: Sequence[str]
    means: Sequence[float]
    tokens: Sequence[int]
    completions: int
    seconds: float
    retried: int = 0
    reward: float = math.nan

    @property
    def prompts(self) -> int:
        """Prompts, one per group."""
        return len(self.tokens)

    @property
    def informative(self) -> int:
        """Groups that teach."""
        return sum(verdict == INFORMATIVE for verdict in self.verdicts)

    @property
    def wasted_seconds(self) -> float:
        """Seconds spent on groups that teach nothing: their share of the tokens."""
        return self.seconds * self.wasted_tokens / max(sum(self.tokens), 1)

    @property
    def wasted_tokens(self) -> int:
        """Tokens of the groups that teach nothing."""
        judged = zip(self.tokens, self.verdicts, strict=True) if self.verdicts else ()
        return sum(tokens for tokens, verdict in judged if verdict != INFORMATIVE)


@dataclass
class Accounts:
    """Totals since the start of the run; those of a resumed one go on."""

    prompts: int = 0
    retried_prompts: int = 0
    completions: int = 0
    tokens: int = 0
    seconds: float = 0.0
    wasted_seconds: float = 0.0
    wasted_tokens: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    by_decile: dict[int, list[int]] = field(default_factory=dict)
    trained_groups: int = 0
    trained_completions: int = 0
    trained_tokens: int = 0
    batches: int = 0
    rounds: int = 0
    most_rounds: int = 0
    short_batches: int = 0
    missing_groups: int = 0

    def sampled(self, sampled: Sampled) -> None:
        """Count one call of the generation."""
        self.prompts += sampled.prompts - sampled.retried
        self.retried_prompts += sampled.retried
        self.completions += sampled.prompts * sampled.completions
        self.tokens += sum(sampled.tokens)
        self.seconds += sampled.seconds
        self.wasted_seconds += sampled.wasted_seconds
        self.wasted_tokens += sampled.wasted_tokens
        self.verdicts = dict(Counter(self.verdicts) + Counter(sampled.verdicts))
        for verdict, mean in zip(sampled.verdicts, sampled.means, strict=False):
            if not math.isnan(mean):
                counts = self.by_decile.setdefault(decile(mean), [0, 0])
                counts[0] += 1
                counts[1] += verdict == INFORMATIVE

    def trained(self, groups: int, completions: int, tokens: int, rounds: int = 1, missing: int = 0) -> None:
        """Count one generation batch that goes into training.

        Args:
            groups: prompts in it.
            completions: in it.
            tokens: generated ones in it.
            rounds: calls of the generation that it took.
            missing: groups that it lacks, since none were found.
        """
        self.trained_groups += groups
        self.trained_completions += completions
        self.trained_tokens += tokens
        self.batches += 1
        self.rounds += rounds
        self.most_rounds = max(self.most_rounds, rounds)
        self.short_batches += missing > 0
        self.missing_groups += missing

    def table(self, carried: int = 0) -> dict[str, Any]:
        """The totals for `training_summary.json`.

        Args:
            carried: informative groups that wait for the next step.
        """
        groups = sum(self.verdicts.values())
        informative = self.verdicts.get(INFORMATIVE, 0)
        return {
            "prompts": self.prompts,
            "retried_prompts": self.retried_prompts,
            "completions": self.completions,
            "tokens": self.tokens,
            "informative_groups": informative,
            "acceptance_rate": informative / max(groups, 1),
            "uninformative_groups": {cause: self.verdicts.get(cause, 0) for cause in CAUSES},
            "uninformative_tokens": self.wasted_tokens,
            "completions_per_informative_group": self.completions / informative if informative else None,
            "trained": {
                "groups": self.trained_groups,
                "completions": self.trained_completions,
                "tokens": self.trained_tokens,
            },
            "carried_groups": carried,
            "rounds_per_batch": {"mean": self.rounds / max(self.batches, 1), "most": self.most_rounds},
            "short_batches": self.short_batches,
            "missing_groups": self.missing_groups,
            "generation_seconds": round(self.seconds, 2),
            "generation_seconds_on_uninformative": round(self.wasted_seconds, 2),
            "by_mean_reward": [
                {"from": d / DECILES, "to": (d + 1) / DECILES, "groups": counts[0], "informative": counts[1]}
                for d, counts in sorted(self.by_decile.items())
            ],
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def decile(mean: float) -> int:
    """Tenth of [0, 1] that a mean reward lies in, the last one closed; rewards beyond count as 0 and 1."""
    return min(int(min(max(mean, 0.0), 1.0) * DECILES), DECILES - 1)


def sampling_metrics(rounds: Sequence[Sampled], carried: int = 0, missing: int = 0) -> dict[str, float]:
    """Metrics of one generation batch, by name.

    Args:
        rounds: the calls of the generation that it took.
        carried: informative groups left for the next one.
        missing: groups that it lacks.
    """
    verdicts = Counter(verdict for sampled in rounds for verdict in sampled.verdicts)
    groups = verdicts.total()
    rewards = [(sampled.reward, sampled.prompts) for sampled in rounds if not math.isnan(sampled.reward)]
    values: dict[str, float] = {
        "sampling/rounds": len(rounds),
        "sampling/generated_tokens": sum(sum(sampled.tokens) for sampled in rounds),
        "sampling/generation_seconds": sum(sampled.seconds for sampled in rounds),
        "sampling/carried_groups": carried,
        "sampling/missing_groups": missing,
    }
    if rewards:
        values["sampling/reward"] = sum(reward * n for reward, n in rewards) / sum(n for _, n in rewards)
    if groups:
        values["sampling/acceptance_rate"] = verdicts[INFORMATIVE] / groups
        values["sampling/uninformative_seconds"] = sum(sampled.wasted_seconds for sampled in rounds)
        values |= {f"sampling/{cause}": verdicts[cause] / groups for cause in CAUSES}
    return values
