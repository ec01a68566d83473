"""Passes on real tokens alone: padded rows go through a model as one flat row, and come back padded."""
