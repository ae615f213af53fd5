"""What is known of a message on its way."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Delivery(ABC):
    """A message on its way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when it was delivered; on CUDA the current stream may wait instead of the host."""

    @abstractmethod
    def is_delivered(self) -> bool:
        """Whether it was delivered, without waiting."""
