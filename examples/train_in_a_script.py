"""Train in your own script, as with TRL's trainers: one key of the config picks the algorithm.

Run: python examples/train_in_a_script.py
"""

from trl_algos import PolicyConfig, PolicyTrainer
from trl_algos.data import arithmetic, bundled_model_path


def right_answer(completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    """1 for the right sum, 0 for any other text; `answer` is the data set's column."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


trainer = PolicyTrainer(
    model=bundled_model_path(),
    reward_funcs=right_answer,
    args=PolicyConfig(
        output_dir="runs/script",
        algorithm="gspo",
        learning_rate=2e-4,
        max_steps=20,
        per_device_train_batch_size=128,
        max_completion_length=4,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    ),
    train_dataset=arithmetic("train"),
)
trainer.train()
trainer.save_model()
