"""The rows of an optimizer step: which of them are computed, and which of them together."""
