"""How often a reward model is right when it is so sure: the reliability diagram of its verdicts on pairs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Reliability:
    """A reliability curve, over bins of confidence of equal width in [1/2, 1].

    Args:
        confidence: mean confidence of the pairs in each bin; NaN where there is none.
        right: share of right verdicts in each bin; NaN where there is none.
        pairs: number of pairs in each bin.
    """

    confidence: Sequence[float]
    right: Sequence[float]
    pairs: Sequence[int]

    def table(self) -> dict[str, Any]:
        """As the run's summary has it: the bins that hold pairs."""
        kept = [place for place, count in enumerate(self.pairs) if count]
        return {name: [values[place] for place in kept] for name, values in asdict(self).items()}


def draw_reliability(axis: "Axes", curves: Mapping[str, Reliability]) -> None:
    """Draw curves with the number of pairs beside each point; a calibrated model's points lie on the diagonal.

    Args:
        axis: an empty panel.
        curves: name -> curve, such as before and after training.
    """
    axis.plot([0.5, 1], [0.5, 1], color="grey", linewidth=0.8, linestyle="--")
    for place, (name, curve) in enumerate(curves.items()):
        found = [point for point in zip(curve.confidence, curve.right, curve.pairs, strict=True) if point[2]]
        axis.plot(
            [x for x, _, _ in found], [y for _, y, _ in found], marker="o", markersize=3, color=f"C{place}", label=name
        )
        for x, y, count in found:
            if not math.isnan(x):
                above = (2, 4 if place else -9)
                axis.annotate(str(count), (x, y), above, textcoords="offset points", fontsize=6, color=f"C{place}")
    axis.set_xlabel("confidence", fontsize=9)
    axis.set_xlim(0.48, 1.04)
    axis.set_ylim(-0.02, 1.08)
    axis.legend(fontsize=8, loc="lower right")
