"""How to load what was pushed, as code for the card: plain transformers, with peft for an adapter."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trl_algos.hub.card import CardFacts


def loading_code(facts: "CardFacts", repo: str) -> str:
    """Python in a Markdown fence that loads model and tokenizer and uses them once.

    Args:
        facts: of the card.
        repo: id on the Hub.
    """
    scores = facts.kind == "reward_model"
    auto = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
    lines = ["from peft import PeftModel"] if facts.is_adapter else []
    lines += [f"from transformers import {auto}, AutoTokenizer"]
    if facts.is_adapter and facts.bundled:
        lines += ["from trl_algos.data import BUNDLED_MODELS"]
    lines += ["", f'tokenizer = AutoTokenizer.from_pretrained("{repo}")']
    head = ", num_labels=1" if scores else ""
    if facts.is_adapter:
        base = f'BUNDLED_MODELS["{facts.bundled}"]()' if facts.bundled else f'"{facts.base_model or _UNKNOWN}"'
        lines += [f"base = {auto}.from_pretrained({base}{head})"]
        if scores:
            lines += ["base.config.pad_token_id = tokenizer.pad_token_id"]
        lines += [f'model = PeftModel.from_pretrained(base, "{repo}")']
    else:
        lines += [f'model = {auto}.from_pretrained("{repo}")']
    lines += ["", *(_SCORE if scores else _GENERATE)]
    return "\n".join(["```python", *lines, "```", *([] if facts.base_model or not _lacks_base(facts) else _NO_BASE)])


_UNKNOWN = "path/to/the/base/model"

_NO_BASE = ["", "The model that training started from was a local one: the adapter fits that model alone."]

_GENERATE = [
    'inputs = tokenizer("1+2=", return_tensors="pt")',
    "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))",
]

_SCORE = [
    "# As trained: text without further special tokens, or messages through the tokenizer's chat template.",
    'inputs = tokenizer("1+2=3", return_tensors="pt", add_special_tokens=False)',
    "print(model(**inputs).logits[0, 0].item())",
]


def _lacks_base(facts: "CardFacts") -> bool:
    return facts.is_adapter and not facts.bundled
