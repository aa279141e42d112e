"""Random numbers: seeds, global generators and named streams."""

from runtime_di.providers.rng.service import Rng, open_rng
from runtime_di.providers.rng.settings import RngSettings, StreamSettings
from runtime_di.providers.rng.streams import RandomStreams

__all__ = [
    "RandomStreams",
    "Rng",
    "RngSettings",
    "StreamSettings",
    "open_rng",
]
