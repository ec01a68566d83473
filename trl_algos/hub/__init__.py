"""The Hub: what may leave a run folder, the model card, and the upload. Nothing here loads torch or TRL."""
