"""Fixtures of the tests of loggers."""

import dataclasses

import pytest

from jaxdp.config import Config, Phase


@pytest.fixture
def with_tensorboard(tiny) -> Config:
    """A short run that writes TensorBoard events."""
    logging = dataclasses.replace(tiny.logging, tensorboard=True)
    return dataclasses.replace(tiny, epochs=1.5, batch=(Phase(16),), logging=logging)
