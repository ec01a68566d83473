"""`from trl_algos.core._torch import torch`: torch, loaded with the first use of it rather than with the import.

Loading torch takes a second or two, and commands that only read the table of algorithms need none of it. A stand-in
for the module is all there is to it. `importlib.util.LazyLoader` would put an unfinished torch where all packages look
for theirs: the next `import torch` finishes it, and an `import torch.nn` before that would run `torch.nn` twice.
"""

from typing import TYPE_CHECKING, Any

__all__ = ["torch"]

if TYPE_CHECKING:
    import torch
else:

    class _Torch:
        """Stands for torch: its attributes are torch's, looked up when they are used."""

        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()
