"""The command line knows flags of other trainers and names jaxdp's flags with the same purpose."""

import re
import shlex
from pathlib import Path

import pytest

from jaxdp import load_config
from jaxdp.cli import main
from jaxdp.foreign_flags import COUNTERPARTS, NO_COUNTERPART

PAGE = (Path(__file__).parents[2] / "docs/coming_from.md").read_text()


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        ("--mixup 0.2", "--data.mix mixup --data.mix-alpha 0.2"),
        ("--model=resnet50.a1_in1k", "--model.depth 50"),
        ("--model resnet50d.ra2_in1k", "--model.depth 50 --model.stem deep --model.shortcut pooled"),
        ("--model resnetblur50", "--model.depth, for example --model.depth 50"),
        ("--model resnet34c", "--model.depth 34 --model.stem deep"),
        ("--model seresnet152d", "--model.depth, for example --model.depth 50"),
        ("--model vit_base_patch16_224", "--model.depth, for example --model.depth 50"),
        ("-a resnet20", "--model.depth, for example --model.depth 50"),
        ("--opt adamw", "--optimizer.name adamw"),
        ("--lr-scheduler cosineannealinglr", "--schedule.name cosine"),
        ("--sched step", "--schedule.name, for example --schedule.name goyal"),
        ("--milestones 3 6", "--schedule.boundaries 3 6"),
        ("--batch-size 256", "--batch.0.global-batch 256"),
        ("--amp", "--model.dtype bfloat16"),
        ("--fp16", "--model.dtype float16 --optimizer.loss-scale dynamic"),
        ("--amp-dtype float16", "--model.dtype float16 --optimizer.loss-scale dynamic"),
        ("--amp-dtype bfloat16", "--model.dtype bfloat16"),
        ("--bn-momentum 0.01", "--model.norm-momentum 0.99"),
        ("--bn-momentum low", "--model.norm-momentum, for example --model.norm-momentum 0.9"),
        ("--nproc-per-node 2", "jaxdp launch --processes 2 -- jaxdp train"),
        ("--nproc-per-node gpu", "jaxdp launch --processes, for example jaxdp launch --processes 2 -- jaxdp train"),
        ("--model.ema", "--optimizer.average-decay, for example --optimizer.average-decay 0.9999"),
        ("--optimizer.lr 0.1", "--schedule.learning-rate 0.1"),
        ("--model-ema-warmup", "--optimizer.average-start warmup --optimizer.average-decay 0.9999"),
        ("--dataset tfds/cifar10", "--data.source cifar10"),
        ("--dataset cifar10", "--data.source cifar10"),
        ("--dataset torch/mnist", "--data.source, for example --data.source imagenet2012"),
        ("--crop-pct 0.95", "--data.eval-resize 0.95"),
        ("--crop-pct 95", "--data.eval-resize, for example --data.eval-resize 0.95"),
        ("--hflip 0.5", "--augment.flip"),
        ("--auto-augment ta_wide", "--data.auto-augment trivial_augment"),
        ("--aa rand-m6-mstd0.5-inc1", "--data.auto-augment rand_augment_increasing --augment.magnitude 6"),
        ("--aa rand-mstd0.5-inc1", "--data.auto-augment rand_augment_increasing --augment.magnitude 10"),
        ("--aa rand-n2-inc1-m6-mstd0.5", "--data.auto-augment rand_augment_increasing --augment.magnitude 6"),
        *[
            (f"--aa rand-{words}", "--data.auto-augment, for example --data.auto-augment rand_augment")
            for words in ("m6-inc1", "m6-mstd0.5", "m6-n3-mstd0.5-inc1", "m6-mstd0.5-inc1-p1")
        ],
        ("--output 'my runs'", "--workdir 'my runs'"),
        ("--workers many", "--data.threads"),
        ("--trainer.gradient_clip_val 0.5", "--optimizer.clip-norm 0.5"),
        ("--per_device_train_batch_size 64", "--batch.0.global-batch, for example --batch.0.global-batch 256"),
        ("--warmup_ratio 0.1", "--schedule.warmup-epochs, for example --schedule.warmup-epochs 5"),
        ("--metric_for_best_model accuracy", "--stop.metric eval_accuracy"),
        ("--monitor val_loss", "--stop.metric eval_loss"),
        ("--monitor mine", "--stop.metric, for example --stop.metric eval_accuracy"),
        ("--opt-betas 0.9 0.98", "--optimizer.beta2, for example --optimizer.name adamw --optimizer.beta2 0.98"),
    ],
)
def test_suggestion_has_the_form_of_jaxdps_flag(words, suggestion, failing):
    assert re.search(r"did you mean (.*?)(?: \(.*\))?\?$", failing("train", *shlex.split(words)))[1] == suggestion


@pytest.mark.parametrize("command", ["doctor", "evaluate", "checkpoints", "watch"])
def test_directory_of_the_output_is_not_that_of_the_run_that_a_command_reads(command, failing):
    assert re.search(r"--output: unknown flag; `jaxdp \w+ --help.*` lists all flags$", failing(command, "--output", "x"))


def test_flag_without_counterpart_is_explained(failing):
    name, reason = next(iter(NO_COUNTERPART.items()))
    assert failing("train", f"--{name}", "1") == f"--{name}: unknown flag; {reason}"
    assert failing("train", "--trainer.accumulate_grad_batches", "4").endswith("devices x --batch.0.per-worker-batch")
    assert "--batch-size: unknown flag; not needed: a run evaluates as many" in failing("evaluate", "--batch-size", "8")
    assert "did you mean --data.threads 8 " in failing("evaluate", "--workers", "8")


WITH_EXAMPLE = [each for each in dict.fromkeys(COUNTERPARTS.values()) if (each.example or each.form) and not each.command]


@pytest.mark.parametrize("counterpart", WITH_EXAMPLE)
def test_every_example_is_a_valid_flag(counterpart):
    words = (counterpart.form or f"{counterpart.flag} {{}}").format(counterpart.example)
    recipe = "imagenet_goyal_256" if counterpart.flag.startswith(("--augment", "--data.eval-")) else "digits"
    load_config(recipe, words.split())


def test_every_flag_in_the_notes_and_of_every_counterpart_exists(capsys):
    with pytest.raises(SystemExit):
        main.main(["train", "--help", "all"])
    known = set(re.findall(r"--[\w.-]+", capsys.readouterr().out))
    codes = [code for code in re.findall(r"`([^`\n]*)`", PAGE) if "torchrun" not in code]
    named = {flag for code in codes for flag in re.findall(r"--[\w.-]+", code)}
    others = {"--config.x", "--section.field", "--lr"}  # of Flax, a placeholder, and an example of a flag that is explained
    assert len(named) > 20
    assert named - others <= known
    assert {counterpart.flag for counterpart in COUNTERPARTS.values()} <= known
