"""Recipes: read, typed, checked, explained, and made into the arguments of TRL's scripts.

Only `arguments.py` and `run_arguments.py` import torch or TRL; all else answers at once.
"""
