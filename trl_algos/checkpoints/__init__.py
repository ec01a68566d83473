"""Checkpoints as folders: which is the latest whole one, what it was made with, how it gets there; loads no torch."""
