"""ConfigError as one line with fields, and untrusted text before it is printed."""

import importlib
import pickle
import re
import sys
import traceback

import numpy as np
import pytest

from jaxdp.errors import (
    EXIT_STOPPED,
    ConfigError,
    StorageError,
    TrainingError,
    first_line,
    kind_of,
    nearest,
    not_imported,
    one_of,
    place_in_user_code,
    plural,
    print_safe,
    printable,
    printable_lines,
)


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
    assert [printable("xxxx", limit) for limit in range(5)] == ["", ".", "..", "...", "xxxx"]


def test_first_line_of_a_message_that_begins_with_an_empty_one_is_what_it_says():
    with pytest.raises(AssertionError) as error:
        np.testing.assert_allclose(1, 2)
    assert str(error.value).startswith("\n")
    assert first_line(error.value).startswith("Not equal to tolerance")
    assert first_line(ValueError("\n")) == "ValueError"


def test_print_safe_escapes_all_but_line_breaks_on_both_streams(capsys):
    print_safe("a\x1b[2J\nb\r")
    print_safe("\u202ec", sys.stderr)
    assert capsys.readouterr() == ("a\\x1b[2J\nb\\r\n", "\\u202ec\n")


def test_printable_lines_keeps_line_breaks_and_the_whole_text():
    assert printable_lines("a\x1b[2J\n" + "b" * 300) == r"a\x1b[2J" + "\n" + "b" * 300


def test_error_for_a_choice_suggests_the_nearest_and_lists_all():
    assert str(one_of("model.depth", 51, (18, 50))) == "model.depth=51: invalid choice; choose from 18, 50"
    assert str(one_of("a.b", "lras", ("sgd", "lars"))) == "a.b='lras': invalid choice; did you mean lars? choose from sgd, lars"


def test_exit_codes_are_the_documented_ones():
    assert (ConfigError.exit_code, StorageError.exit_code, TrainingError.exit_code, EXIT_STOPPED) == (2, 1, 1, 75)


def test_storage_error_is_one_line_with_its_url():
    assert [StorageError("gone", "s3://a/b", permanent=permanent).permanent for permanent in (False, True)] == [False, True]
    assert not StorageError("gone", "s3://a/b").permanent
    assert not TrainingError("it failed").says_how_to_continue
    assert str(StorageError("gone", "s3://a/b")) == "s3://a/b: gone"


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (int, "the class int"),
        (len, "the function len"),
        ("x".join, "the function join"),
        (None, "None"),
        (3, "an instance of int"),
    ],
)
def test_kind_of(thing, words):
    assert kind_of(thing) == words


@pytest.mark.parametrize(
    ("number", "noun", "spec", "words"),
    [
        (1, "device", "", "1 device"),
        (0, "device", "", "0 devices"),
        (2, "class", "", "2 classes"),
        (2, "batch", "", "2 batches"),
        (2, "epoch", "", "2 epochs"),
        (3, "mesh", "", "3 meshes"),
        (1.0, "hour", ".1f", "1.0 hours"),
        (1234, "step", ",", "1,234 steps"),
    ],
)
def test_plural(number, noun, spec, words):
    assert plural(number, noun, spec) == words


@pytest.mark.parametrize(
    ("code", "package"),
    [
        ("import absent_a.b", "absent_a"),
        ("1 / 0", "outer_h"),
        ("import json\njson.loads('')", "outer_h"),
        ("import inner_h.part", "inner_h"),
    ],
)
def test_not_imported_is_the_package_that_is_missing_or_whose_import_failed(code, package, tmp_path, monkeypatch):
    (tmp_path / "outer_h.py").write_text(code)
    (tmp_path / "inner_h").mkdir()
    (tmp_path / "inner_h/part.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Exception, match=r"absent_a|division|Expecting value") as error:
        importlib.import_module("outer_h")
    assert not_imported(error.value) == package
    assert not_imported(ZeroDivisionError()) is None


def test_place_in_user_code_is_the_innermost_line_outside_the_libraries():
    def fails():
        raise ConfigError("a", reason="b")

    with pytest.raises(ConfigError) as error:
        fails()
    line = fails.__code__.co_firstlineno + 1
    assert place_in_user_code(error.value) == f" at test_errors.py:{line}"
    with pytest.raises(ValueError, match="Invalid format specifier") as error:
        plural(1, "device", "of no kind")
    assert place_in_user_code(error.value).startswith(" at test_errors.py:")  # not jaxdp/errors.py, where it was raised
    assert place_in_user_code(ValueError("never raised")) == ""


def test_control_characters_of_an_error_are_escaped_in_its_first_line_and_in_a_notebook():
    text = "caf\u00e9 \x1b[2J\x07\u202e"
    assert first_line(ValueError(f"{text}\nsecond")) == "caf\u00e9 \\x1b[2J\\x07\\u202e"
    escaped = "caf\u00e9 \\x1b[2J\\x07\\u202e"
    for error in (ConfigError("a", reason=text), TrainingError(text), StorageError(text, f"s3://{text}")):
        assert escaped in str(error)
        assert str(error) == "".join(traceback.format_exception_only(error)).strip().partition(": ")[2]
        assert not re.search("[\x1b\x07\u202e]", str(error))
    assert TrainingError("use --resume never")._render_traceback_() == ['TrainingError: use resume="never"']
    assert TrainingError(f"{text}\nb")._render_traceback_() == ["TrainingError: caf\u00e9 \\x1b[2J\\x07\\u202e\nb"]
