"""What is closed at the end of its `with` block."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """`with` such an object ends with its `close`, whatever happens within."""

    @abstractmethod
    def close(self) -> None:
        """End it. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
