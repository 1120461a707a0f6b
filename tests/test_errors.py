"""ConfigError as one line with fields, and untrusted text before it is printed."""

import pickle

import numpy as np
import pytest

from jaxdp.errors import ConfigError, TrainingError, first_line, nearest, printable


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("epochs", -1, reason="must be positive"), "epochs=-1: must be positive"),
        (ConfigError("epochs", None, reason="required", hint="use 90"), "epochs=None: required; use 90"),
        (ConfigError("mesh", reason="too large", hint="omit it"), "mesh: too large; omit it"),
    ],
)
def test_config_error_is_one_line_and_keeps_its_fields_when_pickled(error, line):
    assert str(error) == line
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == line
    assert (copy.field, copy.value, copy.reason, copy.hint) == (error.field, error.value, error.reason, error.hint)


@pytest.mark.parametrize(
    ("word", "choice"),
    [("A100", "a100"), ("v100", "v100-16gb"), ("h10", "h100"), ("H20O", "h200"), ("--wandb", None), ("", None)],
)
def test_nearest_prefers_the_same_word_then_a_longer_one_then_a_similar_one(word, choice):
    assert nearest(word, ["v100-16gb", "a100-40gb", "a100", "h100", "h200", "--rank"]) == choice


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Ärger 画像.png", "Ärger 画像.png"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("two\nlines\r\tand\u2028three", r"two\nlines\r\tand\u2028three"),
        ("\x9b31m", r"\x9b31m"),  # the one-byte form of ESC [
        ("safe\u202egnp.exe", r"safe\u202egnp.exe"),  # right-to-left override
        ("caf\udce9", r"caf\udce9"),  # a file name that is not UTF-8
        (17, "17"),
    ],
)
def test_printable_escapes_characters_that_terminals_interpret(text, shown):
    assert printable(text) == shown
    assert printable(text).isprintable()
    printable(text).encode()


def test_printable_truncates_long_text():
    assert printable("x" * 200) == "x" * 200
    assert printable("x" * 201) == "x" * 197 + "..."
    assert printable("\x1b" * 10**6, 40) == (r"\x1b" * 10)[:37] + "..."
    assert len(printable("\n" * 30, 50)) == 50


def test_first_line_of_a_message_that_begins_with_an_empty_one_is_what_it_says():
    with pytest.raises(AssertionError) as error:
        np.testing.assert_allclose(1, 2)
    assert str(error.value).startswith("\n")
    assert first_line(error.value).startswith("Not equal to tolerance")
    assert first_line(ValueError("\n")) == "ValueError"


def test_control_characters_of_an_error_are_escaped_in_its_first_line_and_in_a_notebook():
    text = "caf\u00e9 \x1b[2J\x07\u202e"
    assert first_line(ValueError(f"{text}\nsecond")) == "caf\u00e9 \\x1b[2J\\x07\\u202e"
    assert TrainingError(f"{text}\nb")._render_traceback_() == ["TrainingError: caf\u00e9 \\x1b[2J\\x07\\u202e\nb"]
