"""The main job, and what a run leaves behind: metrics, plots, held-out figures, its own recipe."""
