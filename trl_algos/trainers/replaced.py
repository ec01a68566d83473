"""An object that is another one but for some attributes."""

from typing import Any


class Replaced:
    """Stands in for `original`, with the attributes given in the place of its own; it is never changed."""

    def __init__(self, original: Any, **attributes: Any) -> None:
        self._original = original
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
