"""Scoring passes: the same log-probs, entropies and values as TRL's padded chunks give, from few tokens."""

from typing import Any

import pytest
import tiny
import torch
from token_counter import TokenCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trl import GRPOTrainer
from trl.kernels import chunked_logprob

from trl_algos import PolicyConfig, PolicyTrainer
from trl_algos.trainers import reference_kl
from trl_algos.trainers.sampling.groups import Completion, Group
from trl_algos.trainers.sampling.old_logps import add_old_logps
from trl_algos.trainers.window.bins import Row, packed_tokens
from trl_algos.trainers.window.rows import Batch, split_rows, whole_rows
from trl_algos.trainers.window.scoring import packed_parts

PROMPTS = (3, 7, 5)
COMPLETIONS = ((12, 1, 5, 3, 2, 2), (4, 4, 9, 1, 2, 6), (2, 3, 1, 1, 8, 1))
"""Tokens of each prompt, and of its completions."""
ROWS = [(p, size) for p, sizes in enumerate(COMPLETIONS) for size in sizes]


def batch() -> Batch:
    """The rows as TRL pads them."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 258, (size,), generator=generator) for size in PROMPTS]
    widths = max(PROMPTS), max(map(max, COMPLETIONS)) + 2  # wider than any row, as a gathered batch may be
    made = {
        f"{part}_{kind}": torch.zeros(len(ROWS), width, dtype=torch.long)
        for part, width in zip(("prompt", "completion"), widths, strict=True)
        for kind in ("ids", "mask")
    }
    for row, (p, size) in enumerate(ROWS):
        made["prompt_ids"][row, -PROMPTS[p] :], made["prompt_mask"][row, -PROMPTS[p] :] = prompts[p], 1
        made["completion_ids"][row, :size] = torch.randint(2, 258, (size,), generator=generator)
        made["completion_mask"][row, :size] = 1
    return made


def trainer(folder: Any, model: Any, **settings: Any) -> PolicyTrainer:
    config = {
        "output_dir": str(folder),
        "algorithm": "grpo",
        "beta": 0.0,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "num_generations": 6,
        "per_device_train_batch_size": 6,
    }
    return PolicyTrainer(
        model,
        lambda completions, **_: [0.0] * len(completions),
        PolicyConfig(**config | settings),
        train_dataset=tiny.prompts(2),
        processing_class=tiny.tokenizer(),
    )


def scored(made: PolicyTrainer, method: Any, rows: Batch, **others: Any) -> tuple[Any, TokenCounter]:
    width, counter = rows["completion_ids"].shape[1], TokenCounter(made.model)
    with torch.no_grad():
        found = method(made, made.model, *whole_rows(rows), width, batch_size=4, compute_entropy=True, **others)
    return found, counter


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "shared prompts": (tiny.llama, {"padding_free": True}),
    "packed": (tiny.llama, {"padding_free": True, "share_prompts": False}),
    "padded": (tiny.llama, {"padding_free": False}),
    "padded, learned positions": (lambda: tiny.gpt2(dropout=0.0), {"padding_free": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_padded_chunks(case: str, tmp_path: Any) -> None:
    make, settings = CASES[case]
    made, rows = trainer(tmp_path, make(), **settings), batch()
    mask = rows["completion_mask"].bool()
    found, ours = scored(made, PolicyTrainer._get_per_token_logps_and_entropies, rows)
    expected, theirs = scored(
        trainer(tmp_path, make(), padding_free=False), GRPOTrainer._get_per_token_logps_and_entropies, rows
    )
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert one.shape == other.shape == mask.shape
        torch.testing.assert_close(one[mask], other[mask], rtol=0, atol=1e-5)
        assert other[mask].abs().min() > 1e-4
        assert not one[~mask].any()
    assert found[2] is None
    real = int(mask.sum() + rows["prompt_mask"].sum())
    assert theirs.tokens == rows["prompt_ids"].numel() + rows["completion_ids"].numel()
    computed = {
        "shared prompts": sum(PROMPTS) - len(PROMPTS) + int(mask.sum()),  # a prompt's last token is each row's first
        "packed": real - len(ROWS),
    }
    # By length, four at a time, each cut to its longest; learned positions keep the prompts' padding.
    longest = sorted((size for _, size in ROWS), reverse=True)[::4]
    if case in computed:
        assert ours.tokens == computed[case]
    else:
        assert ours.tokens < theirs.tokens
        if "learned" in case:
            assert ours.tokens == len(ROWS) * max(PROMPTS) + sum(4 * w for w in longest[:-1]) + 2 * longest[-1]


def test_groups_stay_whole() -> None:
    """Groups of 6 in chunks of 4 rows: 3 passes, none with more tokens than a padded chunk."""
    rows = [Row(place, p, PROMPTS[p], size) for place, (p, size) in enumerate(ROWS)]
    parts = packed_parts(rows, 4, shared=True, fixed_count=False)
    assert sorted(place for part in parts for place in part) == list(range(len(rows)))
    for p in range(len(PROMPTS)):
        assert sum(any(rows[place].prompt == p for place in part) for part in parts) == 1
    assert max(packed_tokens([rows[place] for place in part], True) for part in parts) <= 4 * (7 + 12)


@pytest.mark.parametrize("lengths", [[5] * 12, [1] * 11 + [400], [400, 1] * 6, [300] * 6 + [399] * 6])
@pytest.mark.parametrize(("group", "size"), [(3, 4), (4, 4), (6, 4), (12, 1), (2, 8), (3, 5)])
def test_backends_that_shard_make_as_many_passes_whatever_the_rows(lengths: list[int], group: int, size: int) -> None:
    rows = [Row(place, place // group, 20, length) for place, length in enumerate(lengths)]
    for shared in (True, False):
        parts = packed_parts(rows, size, shared, fixed_count=True)
        assert len(parts) == -(-len(rows) // size)
        assert sorted(place for part in parts for place in part) == list(range(12))
        assert max(packed_tokens([rows[place] for place in part], shared) for part in parts) <= size * (
            20 + max(lengths)
        )


def test_empty_passes_are_made_where_a_backend_shards(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, rows = trainer(tmp_path, tiny.llama(), padding_free=True), batch()
    alone, counter = scored(made, PolicyTrainer._get_per_token_logps_and_entropies, rows)
    passes, tokens = counter.passes, counter.tokens
    monkeypatch.setattr(made, "is_fsdp_enabled", True)
    found, counter = scored(made, PolicyTrainer._get_per_token_logps_and_entropies, rows)
    assert (passes, counter.passes) == (2, 5)
    assert counter.tokens == tokens + 3
    torch.testing.assert_close(found[0], alone[0], rtol=0, atol=0)


def test_rows_with_gaps_go_padded(tmp_path: Any) -> None:
    """The flat row cannot take them, and more than four padded rows at a time would take more memory."""
    made, rows = trainer(tmp_path, tiny.llama(), padding_free=True), batch()
    rows["completion_mask"][0, 3] = 0
    mask = rows["completion_mask"].bool()
    found, ours = scored(made, PolicyTrainer._get_per_token_logps_and_entropies, rows)
    assert ours.passes == 5
    expected, _ = scored(made, GRPOTrainer._get_per_token_logps_and_entropies, rows)
    torch.testing.assert_close(found[0][mask], expected[0][mask], rtol=0, atol=1e-5)


def test_rows_are_split_as_they_are_joined() -> None:
    rows = batch()
    again = split_rows(*whole_rows(rows), rows["completion_ids"].shape[1])
    assert all(torch.equal(again[name], value) for name, value in rows.items())


@pytest.mark.parametrize("free", [True, False])
def test_groups_that_wait_are_scored_in_the_same_passes(free: bool, tmp_path: Any) -> None:
    made, rows = trainer(tmp_path, tiny.llama(), padding_free=free), batch()
    mask = rows["completion_mask"].bool()
    expected = scored(made, GRPOTrainer._get_per_token_logps_and_entropies, rows)[0][0]
    prompts = [rows["prompt_ids"][row][rows["prompt_mask"][row].bool()].tolist() for row in range(len(ROWS))]
    completions = [
        Completion("", prompts[row], rows["completion_ids"][row][mask[row]].tolist(), None, "", None)
        for row in range(len(ROWS))
    ]
    groups = [Group(p, {}, completions[6 * p : 6 * p + 6], [[0.0]] * 6) for p in range(3)]
    counter = TokenCounter(made.model)
    add_old_logps(made, groups)
    found = [logps for group in groups for logps in group.old_logps or ()]
    for row, logps in enumerate(found):
        torch.testing.assert_close(torch.tensor(logps), expected[row][mask[row]], rtol=0, atol=1e-5)
    longest = sorted((size for _, size in ROWS), reverse=True)[::6]
    shared, padded = sum(PROMPTS) - len(PROMPTS) + int(mask.sum()), 6 * sum(longest) + len(ROWS) * max(PROMPTS)
    assert counter.tokens == shared if free else counter.tokens <= padded


class Largest(TorchDispatchMode):
    """Tokens in each result of an operation whose last dimension is the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.tokens = vocabulary, [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary:
                self.tokens.append(tensor.numel() // self.vocabulary)
        return result


@pytest.mark.parametrize("free", [True, False])
def test_no_tensor_of_all_tokens_and_the_vocabulary_lives(
    free: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, in tiles of eight tokens; the weights of the head are 32 rows of the vocabulary."""
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", 8)
    made, rows = trainer(tmp_path, tiny.llama(), padding_free=free), batch()
    rows = {name: value.repeat(3, 1) for name, value in rows.items()}
    with Largest(258) as seen:
        scores = made.score(made.model, rows)
        (scores.logps.sum() + scores.entropies.sum()).backward()
    assert 8 <= max(seen.tokens) <= 32
    assert rows["completion_mask"].sum() > 5 * 32


def test_the_exact_kl_keeps_logits_alone_of_all_tokens(
    tmp_path: Any, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss terms and gradients are those of all tokens at once, and no other tensor is as large as the logits."""
    rows, found = batch(), []
    settings = {"kl_estimator": "full", "kl_placement": "loss", "beta": 0.1, "temperature": 0.7}
    for size in (10_000, 8):
        monkeypatch.setattr(reference_kl, "TOKENS_AT_A_TIME", size)
        model = tiny.llama(seed=1)
        model.config._name_or_path = model_folder
        made = trainer(tmp_path, model, **settings)
        with Largest(258) as seen:
            scores = made.score(made.model, rows)
            kl = reference_kl.loss_kl(made, rows, scores, scores.logps.detach(), rows["completion_mask"])
            weights = torch.linspace(0.5, 2.0, kl.numel()).view_as(kl)
            ((kl + scores.logps + 0.3 * scores.entropies) * weights * rows["completion_mask"]).sum().backward()
        tokens = rows["completion_ids"].numel()
        found.append((kl, scores.logps, scores.entropies, model.lm_head.weight.grad, model.model.norm.weight.grad))
        large = sum(count >= tokens for count in seen.tokens)
        assert large > 20 if size > 8 else large < 20
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(one.abs().max()))
    assert found[0][0].max() > 0.1
