"""The model card of a run: what was trained, how, with what outcome, and how to load it."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import ModelCardData

from trl_algos.hub.loading import loading_code
from trl_algos.hub.privacy import Privacy
from trl_algos.settings.kinds import kind_of, row_of

CARD_FILE = "README.md"

_ARXIV = re.compile(r"(?<![\w/.])\d{4}\.\d{4,5}\b")

_TAG_OF_KIND = {
    "policy": "reinforcement-learning",
    "preference": "preference-learning",
    "reward_model": "reward-model",
}

_CITATION_OF_TRL = """@software{vonwerra2020trl,
  title   = {{TRL: Transformers Reinforcement Learning}},
  author  = {von Werra, Leandro and Belkada, Younes and Tunstall, Lewis and Beeching, Edward and Thrush, Tristan and
             Lambert, Nathan and Huang, Shengyi and Rasul, Kashif and Gallouédec, Quentin},
  license = {Apache-2.0},
  url     = {https://github.com/huggingface/trl},
  year    = {2020}
}"""


@dataclass(frozen=True)
class CardFacts:
    """What a card tells, as it is here; the card itself has of it what may leave.

    Args:
        settings: every setting as resolved, `algorithm` among them.
        defaults: the library's default of each setting, which tells those apart that were chosen.
        objective: the objective as `explain` prints it, a line each.
        not_used: parts that the objective does not use.
        references: papers.
        base_model: id of the Hub of the model that training started from; None for any other model.
        bundled: name of that model among the bundled ones.
        is_adapter: whether the weights are an adapter's alone.
        datasets: ids of the Hub of the training data.
        rewards: name and weight of each reward function.
        summary: what `training_summary.json` says, as far as there is one.
        versions: package -> version.
        plots: names of pictures in the same folder.
        places: values of settings that were paths where the run was made.
    """

    settings: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    objective: Sequence[str] = ()
    not_used: Sequence[str] = ()
    references: Sequence[str] = ()
    base_model: str | None = None
    bundled: str | None = None
    is_adapter: bool = False
    datasets: Sequence[str] = ()
    rewards: Sequence[tuple[str, float]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    plots: Sequence[str] = ()
    places: Sequence[str] = ()

    @property
    def privacy(self) -> Privacy:
        """What of all this must not leave."""
        return Privacy(tuple(self.places))

    @property
    def kind(self) -> str:
        """policy, preference or reward_model."""
        return kind_of(self.settings["algorithm"])


def model_card(facts: CardFacts, repo: str) -> str:
    """The text of a `README.md` for the Hub.

    Args:
        facts: what there is to tell.
        repo: id that the model is to be loaded by.
    """
    privacy = facts.privacy
    sections = [
        ("How to load", loading_code(facts, repo)),
        ("Objective", _fenced(map(privacy.text, facts.objective))),
        ("Divisor", _divisor(facts, privacy)),
        ("Not used", _listed(map(privacy.text, facts.not_used))),
        ("Rewards", _rewards(facts, privacy)),
        ("What was trained on", _accounts(facts.summary)),
        ("Held-out figures", _held_out(facts.summary, privacy)),
        ("Curves", "\n\n".join(f"![{name}]({name})" for name in facts.plots)),
        ("Settings", _settings(facts, privacy)),
        ("Versions", _listed(f"{package} {version}" for package, version in facts.versions.items())),
        ("Citation", _citation(facts)),
    ]
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections if text)
    metadata = _metadata(facts).to_yaml()
    return f"---\n{metadata}\n---\n\n# {repo.rpartition('/')[2]}\n\n{_opening(facts)}\n\n{body}\n"


def _metadata(facts: CardFacts) -> ModelCardData:
    tags = ["trl", "trl_algos", facts.settings["algorithm"], _TAG_OF_KIND[facts.kind]]
    return ModelCardData(
        base_model=facts.base_model,
        datasets=list(facts.datasets) or None,
        library_name="peft" if facts.is_adapter else "transformers",
        pipeline_tag="text-classification" if facts.kind == "reward_model" else "text-generation",
        tags=[*tags, "lora"] if facts.is_adapter else tags,
    )


def _opening(facts: CardFacts) -> str:
    row = row_of(facts.settings["algorithm"])
    what = "A reward model" if facts.kind == "reward_model" else "A language model"
    start = facts.base_model or facts.bundled
    of = f" of `{start}`" if start else ""
    form = f"{what}, an adapter{of}," if facts.is_adapter else f"{what}{of and f', fine-tuned from `{start}`,'}"
    steps = facts.summary.get("steps")
    trained = f" in {steps:,} optimizer steps" if steps else ""
    text = (
        f"{form} trained{trained} by **{row.key}** ({row.title}; {_linked(row.paper)}) with "
        "[TRL](https://github.com/huggingface/trl) and its plugin `trl_algos`."
    )
    return text if row.differs in ("", "none") else f"{text} Apart from the paper: {row.differs}."


def _divisor(facts: CardFacts, privacy: Privacy) -> str:
    """What a step's loss is divided by: the objective's own lines on it."""
    parts = ("aggregation: ",) if facts.kind == "policy" else ("objective: ", "pairs: ")
    return _listed(privacy.text(line) for line in facts.objective if line.startswith(parts))


def _rewards(facts: CardFacts, privacy: Privacy) -> str:
    return _table(("reward", "weight"), [(f"`{privacy.text(name)}`", f"{w:g}") for name, w in facts.rewards])


def _accounts(summary: Mapping[str, Any]) -> str:
    """What was sampled and rejected, or which pairs were used and dropped."""
    rows: list[tuple[str, str]] = []
    for name, value in _flat({key: summary[key] for key in ("sampling", "pairs") if key in summary}):
        if not name.startswith("sampling / generation seconds"):
            rows.append((name.partition(" / ")[2], _number(value)))
    return _table(("what", "number"), rows)


def _held_out(summary: Mapping[str, Any], privacy: Privacy) -> str:
    held_out = summary.get("held_out") or {}
    before, after = (
        {privacy.text(name): value for name, value in _flat(held_out.get(when) or {})} for when in ("before", "after")
    )
    rows = [(name, _number(before[name]), _number(after.get(name))) for name in before]
    count = next((f"{held_out[what]} held-out {what}" for what in ("prompts", "pairs") if held_out.get(what)), "")
    return f"{count}:\n\n{_table(('figure', 'before', 'after'), rows)}" if rows else ""


def _settings(facts: CardFacts, privacy: Privacy) -> str:
    public = privacy.settings(facts.settings)
    chosen = {name for name in public if name == "algorithm" or facts.settings[name] != facts.defaults.get(name)}
    others = "\n".join(
        ("<details><summary>Defaults of TRL, transformers and trl_algos</summary>", "", "{}", "", "</details>")
    )
    texts = [_fenced(_lines(public, chosen), "yaml")]
    if chosen != set(public):
        texts.append(others.replace("{}", _fenced(_lines(public, set(public) - chosen), "yaml")))
    return "\n\n".join(texts)


def _lines(settings: Mapping[str, Any], names: set[str]) -> Iterator[str]:
    for name in sorted(names):
        yield f"{name}: {json.dumps(settings[name], ensure_ascii=False, default=str)}"


def _citation(facts: CardFacts) -> str:
    row = row_of(facts.settings["algorithm"])
    ids = _ARXIV.findall(row.paper)
    papers = "; ".join([_ARXIV.sub(lambda found: f"arXiv:{found[0]}", row.paper)])
    url = f",\n  url  = {{https://arxiv.org/abs/{ids[0]}}}" if ids else ""
    own = f"@misc{{{row.key},\n  note = {{{row.title}. {papers}}}{url}\n}}"
    return f"{_listed(map(_linked, facts.references))}\n\n{_fenced([own, '', _CITATION_OF_TRL], 'bibtex')}".lstrip()


def _linked(text: str) -> str:
    return _ARXIV.sub(lambda found: f"[{found[0]}](https://arxiv.org/abs/{found[0]})", text)


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Numbers in nested blocks, by the names of what they stand in; lists such as curves are left to the summary."""
    for name, value in values.items():
        path = f"{before}{name.replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path} / ")
        elif value is None or isinstance(value, int | float):
            yield path, value


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _listed(lines: Any) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _fenced(lines: Any, language: str = "text") -> str:
    """A block in which nothing is Markdown; a value that holds a fence of its own does not end it."""
    text = "\n".join(lines)
    return f"~~~~~{language}\n{text}\n~~~~~" if text else ""
