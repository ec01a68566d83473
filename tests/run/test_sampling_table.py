"""The table of what was sampled that a run prints at its end."""

from rich.console import Console

from trl_algos.run.sampling_table import sampling_table
from trl_algos.trainers.sampling.accounts import Accounts, Sampled


def lines(accounts: Accounts) -> list[list[str]]:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(sampling_table(accounts.table()))
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capture.get().splitlines()]
    return [row for row in cells if row]


def test_with_dynamic_sampling() -> None:
    accounts = Accounts()
    verdicts = ["informative", "all_wrong", "all_wrong", "constant"]
    accounts.sampled(Sampled(verdicts, [0.5, 0.0, 0.0, 0.3], [400, 300, 300, 1000], 8, seconds=30.0, retried=1))
    accounts.trained(1, 8, 400, rounds=3, missing=2)
    assert lines(accounts) == [
        ["prompts", "3", "and 1 tried again"],
        ["completions", "32", "trained on: 8"],
        ["tokens", "2,000", "of groups that teach nothing: 1,600"],
        ["groups that teach", "1", "25% of all"],
        ["others", "3", "all wrong 2, constant 1"],
        ["seconds of generation", "30", "of groups that teach nothing: 24"],
        ["rounds per batch", "3.00", "at most 3; groups missing: 2"],
    ]


def test_without_groups() -> None:
    accounts = Accounts()
    accounts.sampled(Sampled((), [0.5, 0.0], [4, 6], 1, seconds=1.0))
    accounts.trained(2, 2, 10)
    assert lines(accounts) == [
        ["prompts", "2", ""],
        ["completions", "2", "trained on: 2"],
        ["tokens", "10", ""],
        ["seconds of generation", "1", ""],
    ]
