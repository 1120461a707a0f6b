"""Mutations drawn from the syntax tree."""

import ast
import itertools
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def mutations(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import mutations

    return mutations


@pytest.mark.parametrize(
    ("kind", "code", "others"),
    [
        ("operator", "a + b", ["a - b"]),
        ("operator", "x = a // b ** c", ["x = a * b ** c", "x = a // (b * c)"]),
        ("operator", "a and b and c", ["a or b or c"]),
        ("operator", "total /= -count", ["total *= -count", "total /= count"]),
        ("operator", "if not done: pass", ["if done: pass"]),
        ("operator", "'%d' % n + name", ["'%d' % n - name"]),
        ("comparison", "'é' if a <= b else c is None", ["'é' if a < b else c is None", "'é' if a <= b else c is not None"]),
        ("comparison", "k not in x", ["k in x"]),
        ("constant", "True, 2, 0.5", ["False, 2, 0.5", "True, 3, 0.5", "True, 1, 0.5", "True, 2, 1.0"]),
        ("constant", "0.0", ["1.0"]),
        ("axis", "x.sum(axis=0)", ["x.sum(axis=1)"]),
        ("axis", "x.sum(axis=-1)", ["x.sum(axis=0)"]),
        ("axis", "x.sum(axis=(0, 1, 2))", ["x.sum(axis=(0, 1))"]),
        ("axis", "x.shape[-1]", ["x.shape[0]"]),
        ("axis", "f(x, AXES) + VERTICAL", ["f(x, HORIZONTAL) + VERTICAL", "f(x, AXES) + HORIZONTAL"]),
        ("dropped call", "x.close(now)", ["pass"]),
        ("dropped call", "import os\nos.remove(x)", ["import os\npass"]),
        ("dropped call", "y = x.astype(d)", ["y = x"]),
        ("dropped call", "from jax import lax\ny = lax.pmean(x, a)", ["from jax import lax\ny = x"]),
        ("dropped call", "y = self.scaled(x)", ["y = x"]),
        ("dropped call", "y = self.items.copy()", ["y = self.items"]),
        ("dropped call", "y = now()", []),
    ],
)
def test_changes_of_each_kind(mutations, kind, code, others):
    found = [mutations.changed(code, change) for change in mutations.changes(ast.parse(code)) if change.kind == kind]
    assert sorted(ast.dump(ast.parse(one)) for one in found) == sorted(ast.dump(ast.parse(one)) for one in others)


@pytest.mark.parametrize(
    "code",
    [
        '"""1 + 1."""',
        "x: Literal[1] | None",
        "def f(x: tuple[int, 2], y: a | b) -> c | d: pass",
        "raise ConfigError('a', 1 + n, reason=f'{n - 1}')",
        "problems = [ConfigError('a', len(x))]",
        "warnings.warn(text(1), stacklevel=2)",
        "f'{a + 1}'",
        "'runs/' + name",
        "@dataclass(frozen=True)\nclass A: pass",
        "if TYPE_CHECKING:\n    x = 1",
        "__all__ = ['a']",
    ],
)
def test_what_no_test_can_find_is_not_changed(mutations, code):
    assert [*mutations.changes(ast.parse(code))] == []


def test_a_seed_draws_the_same_distinct_programs_of_the_chosen_folders(mutations):
    def drawn(seed: int, folders: list[str]) -> list[str]:
        changes = itertools.islice(mutations.draw(seed, folders), 40)
        return [mutations.changed(path.read_text(), change) for path, change in changes]

    first = drawn(1, ["core", "optim"])
    assert first == drawn(1, ["core", "optim"])
    assert first != drawn(2, ["core", "optim"])
    assert len({*first}) == 40
    for text in first:
        compile(text, "", "exec")
    changes = itertools.islice(mutations.draw(1, ["core", "optim"]), 40)
    assert {mutations.folder_of(mutations.module_of(path)) for path, _ in changes} == {"core", "optim"}


def test_near_tests_are_those_of_the_module(mutations):
    def names(module: str) -> list[str]:
        return mutations.near_tests(mutations.ROOT / "jaxdp" / module)

    own, *others = names("models/convolution.py")
    assert own == "tests/models/test_convolution.py"
    assert others
    assert all("convolution" in (mutations.ROOT / name).read_text() for name in others)
    assert all(name.startswith("tests/models/") for name in others)
    assert names("published.py") == ["tests/configs/test_published_recipes.py"]
    assert "tests/data/test_policies_vs_torchvision.py" in names("data/policies.py")


@pytest.mark.parametrize(
    ("code", "by"),
    [
        ("def test_sum(): assert 1 + 1 == 2", None),
        ("import pytest\n@pytest.mark.parametrize('n', ['a b'])\ndef test_sum(n): assert not n", "test_sums.py::test_sum"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("import nothing_of_this_name", "test_sums.py"), ("", None))),
        ("import time\ndef test_sum(): time.sleep(10_000)", "time limit"),
    ],
)
def test_first_failure(mutations, tmp_path, monkeypatch, code, by):
    monkeypatch.setattr(mutations, "LIMIT", 2 if by == "time limit" else 300)
    (tmp_path / "test_sums.py").write_text(code)
    assert mutations.first_failure(tmp_path, ["test_sums.py"]) == by
