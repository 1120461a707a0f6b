"""Data sets that a user registers by name: a function that returns the training and the evaluation images."""

from collections.abc import Callable, Sequence

from jaxdp.config import Config
from jaxdp.data.datasets import Datasets, Source, stated_classes
from jaxdp.data.given import check_pair, open_pair
from jaxdp.data.loader import ItemSource
from jaxdp.errors import ConfigError, first_line
from jaxdp.imports import place_in_user_code


class Registered(Source):
    """A data set of `jaxdp.register_dataset`. factory: its function of the config's `data` section."""

    def __init__(self, factory: Callable) -> None:
        self.factory = factory

    def size(self, config: Config) -> tuple[int, int | None]:
        """See `Source.size`."""
        train, evaluation = self._pair(config)
        return len(train), max(stated_classes(train) or 0, stated_classes(evaluation) or 0) or None

    def open(self, config: Config, *, may_lack_classes: bool) -> Datasets:
        """See `Source.open`."""
        return open_pair(config, self._pair(config), may_lack_classes=may_lack_classes, source=config.data.source)

    def splits(self, config: Config) -> Sequence[tuple[str, ItemSource]]:
        """See `Source.splits`."""
        train, evaluation = self._pair(config)
        return [(config.data.train_split, train), (config.data.eval_split or "evaluation", evaluation)]

    def split(self, config: Config, name: str) -> ItemSource:
        """See `Source.split`."""
        return dict(self.splits(config))[name]

    def _pair(self, config: Config) -> tuple[ItemSource, ItemSource]:
        name = config.data.source
        try:
            return check_pair(self.factory(config.data))
        except ConfigError:
            raise
        except Exception as error:
            reason = f"its function fails{place_in_user_code(error)}: {type(error).__name__}: {first_line(error)}"
            hint = "it is called with the config's `data` section and returns (training, evaluation)"
            raise ConfigError("data.source", name, reason=reason, hint=hint) from error
