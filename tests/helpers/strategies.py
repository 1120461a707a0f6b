"""Changes to the table of all-reduce strategies that end with a test."""

import dataclasses

from jaxdp.strategies import STRATEGIES, Strategy


def set_stages(monkeypatch, name, *stages):
    """Give a strategy other stages, or add one with these stages."""
    strategy = STRATEGIES.get(name) or Strategy(name=name, stages=(), builtin=False)
    monkeypatch.setitem(STRATEGIES, name, dataclasses.replace(strategy, stages=stages))


def keep_only(monkeypatch, *names):
    """Remove all other strategies from the table."""
    for name in [*STRATEGIES]:
        if name not in names:
            monkeypatch.delitem(STRATEGIES, name)


def replace_strategies(monkeypatch, stages):
    """Let the table hold only these strategies: name -> stages."""
    keep_only(monkeypatch, *stages)
    for name, functions in stages.items():
        set_stages(monkeypatch, name, *functions)


def remove_registered():
    """Remove the strategies that `jaxdp.register_strategy` has added."""
    for name in [strategy.name for strategy in STRATEGIES.values() if not strategy.builtin]:
        del STRATEGIES[name]
