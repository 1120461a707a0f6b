"""Share of small faults in the code that the test command finds.

    python benchmarks/mutations.py [--only NAME ...] [--commit HEAD] [--near-only]

Each mutation replaces one text of one file: a flipped sign, a wrong axis, a dropped term, a removed check. It is found if a
test fails: first those that belong to the file, then, if they pass, those of README's whole test command. Writes
benchmarks/results/mutations.json, by commit and mutation, so that parts can be run on their own and two commits compared.
Prints the share and the survivors.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, arguments, commit_of, read, write

LIMIT = 1800  # seconds; a mutation that makes the tests hang is found
# File below jaxdp/ -> its tests below tests/, and (name, text that occurs once in it, replacement).
MUTATIONS = {
    "losses.py": (
        "test_losses.py training/test_step.py",
        ("smoothing-sign", "label_log_probability - label_smoothing *", "label_log_probability + label_smoothing *"),
        ("smoothing-of-label-dropped", "-(1.0 - label_smoothing) * label_log", "-1.0 * label_log"),
        ("mix-share-swapped", "share * loss + (1 - share) * cross_entropy(", "(1 - share) * loss + share * cross_entropy("),
        ("binary-target-smoothing", "targets + smoothing / classes", "targets + smoothing"),
        ("threshold-inclusive", "(targets > optimizer.target_threshold)", "(targets >= optimizer.target_threshold)"),
        ("rank-ties-for-model", "above = ~(logits < label_logits)", "above = (logits > label_logits)"),
        ("binary-sum-is-mean", "logits.shape[-1] * binary_cross_entropy(", "binary_cross_entropy("),
    ),
    "schedules.py": (
        "test_schedules.py test_planning.py",
        ("cosine-without-half", "* 0.5 * (1.0 + math.cos(", "* (1.0 + math.cos("),
        (
            "cosine-end-dropped",
            "schedule.end + (schedule.learning_rate - schedule.end) * 0",
            "(schedule.learning_rate - schedule.end) * 0",
        ),
        ("polynomial-power", "(1.0 - _progress(schedule, at)) ** schedule.power", "(1.0 - _progress(schedule, at)) ** 2"),
        ("goyal-batch", "at.global_batch / GOYAL_BATCH\n", "at.global_batch / (2 * GOYAL_BATCH)\n"),
        ("goyal-warm-up-start", "start=min(schedule.learning_rate, peak)", "start=schedule.learning_rate"),
        ("sony-b-from-warm-up", "1.0 - at.epoch / at.epochs)", "1.0 - (at.epoch - schedule.warmup_epochs) / at.epochs)"),
        ("boundary-exclusive", "at.epoch >= boundary", "at.epoch > boundary"),
        ("progress-with-warm-up", "(at.epochs - schedule.warmup_epochs), 1.0)", "at.epochs, 1.0)"),
        ("noise-scale-inverted", "(MOMENTUM_BATCH / batch)", "(batch / MOMENTUM_BATCH)"),
        ("warm-up-off-by-start", "start + (peak - start) * epoch /", "start + peak * epoch /"),
    ),
    "optim/lars.py": (
        "optim/test_optimizer.py optim",
        ("decay-outside-ratio", "bottom = gradient_norm + weight_decay * weight_norm + eps", "bottom = gradient_norm + eps"),
        ("eps-dropped", "+ weight_decay * weight_norm + eps", "+ weight_decay * weight_norm"),
        ("ratio-inverted", "trust_coefficient * weight_norm / bottom", "trust_coefficient * bottom / weight_norm"),
        ("zero-gradient-check", "(weight_norm > 0) & (gradient_norm > 0)", "(weight_norm > 0)"),
        ("decay-of-all", "g + weight_decay * w if masked else g", "g + weight_decay * w"),
        ("mask-one-dimension", "p.ndim > 1", "p.ndim > 0"),
        ("nesterov-ignored", "optax.trace(decay=momentum, nesterov=nesterov)", "optax.trace(decay=momentum, nesterov=False)"),
        ("lamb-ratio-of-biases", "u, t, masked: t * u if masked else u, updates", "u, t, masked: t * u, updates"),
        (
            "rate-after-velocity",
            "scale(learning_rate),\n            optax.trace(decay=momentum, nesterov=nesterov",
            "trace(decay=momentum, nesterov=nesterov),\n            optax.scale(learning_rate",
        ),
    ),
    "optim/adam.py": (
        "optim/test_optimizer.py optim",
        ("bias-correction-of-mean", "m / mean_weight / (jnp.sqrt", "m / (jnp.sqrt"),
        ("bias-correction-of-square", "jnp.sqrt(s / square_weight)", "jnp.sqrt(s)"),
        ("eps-inside-root", "(jnp.sqrt(s / square_weight) + eps)", "jnp.sqrt(s / square_weight + eps)"),
        ("betas-swapped", 'state["mean"], b1, order=1', 'state["mean"], b2, order=1'),
        ("lamb-without-ratio", "            scale_by_trust_ratio(),\n", ""),
    ),
    "optim/optimizer.py": (
        "optim/test_optimizer.py optim",
        ("clip-always", "jnp.minimum(1.0, config.clip_norm", "jnp.minimum(jnp.inf, config.clip_norm"),
        ("clip-without-squares", "squares.scale_gradient(factor)", "squares"),
        ("sgd-decays-biases", "mask=is_matrix_or_larger),\n        optax.trace", "mask=None),\n        optax.trace"),
        ("sgd-nesterov", "optax.trace(decay=momentum, nesterov=config.nesterov)", "optax.trace(decay=momentum)"),
        ("multipliers-inverted", "lambda u, k=k: k * u", "lambda u, k=k: u / k"),
        (
            "adamw-decay-sign",
            "eps=1e-8),  # PyTorch's default\n        optax.add_decayed_weights(config",
            "eps=1e-8),\n        optax.add_decayed_weights(-config",
        ),
    ),
    "optim/loss_scale.py": (
        "optim training/test_step.py",
        ("growth-late", "finite_steps >= GROWTH_STEPS", "finite_steps > GROWTH_STEPS"),
        ("no-maximum", "jnp.minimum(scale * 2, MAXIMUM)", "scale * 2"),
        ("skips-not-reset", "jnp.where(finite, 0, state.consecutive_skips + 1)", "state.consecutive_skips + 1"),
        ("finite-steps-kept", "finite_steps=jnp.where(finite, finite_steps, 0)", "finite_steps=finite_steps"),
    ),
    "optim/squares.py": (
        "optim",
        ("factor-not-squared", "factor**2 * square", "factor * square"),
    ),
    "parallel/allreduce.py": (
        "parallel/test_allreduce.py parallel/test_collectives.py test_strategies.py training/test_drop_path.py "
        "parallel/test_overlap.py training/test_step.py",
        ("ring-shard", "(device - step) % devices, keepdims", "(device + step) % devices, keepdims"),
        ("ring-gather-place", "(device + 1 - step) % devices, 0)", "(device - step) % devices, 0)"),
        ("ring-without-own", "lax.ppermute(partial_sum, AXES, to_next) + shard", "lax.ppermute(partial_sum, AXES, to_next)"),
        ("columns-are-rows", "(lax.optimization_barrier(vector), VERTICAL)", "(lax.optimization_barrier(vector), HORIZONTAL)"),
        ("torus-without-columns", "all_reduce_columns, all_gather_rows)", "all_gather_rows)"),
        ("server-forgets-last", "for sender in range(1, devices)", "for sender in range(1, devices - 1)"),
        ("mean-by-row", "local = divide(tree, lax.axis_size(AXES))", "local = divide(tree, lax.axis_size(HORIZONTAL))"),
        ("mean-is-sum", "lambda leaf: leaf / divisor", "lambda leaf: leaf"),
        ("wire-dtype-ignored", "astype(wire_dtype or leaves[index].dtype)", "astype(leaves[index].dtype)"),
        ("unpack-offset", "start += tensor.size\n", "start += tensor.size + 1\n"),
        ("shards-not-padded", "jnp.pad(vector, (0, -vector.size % lax.axis_size(HORIZONTAL)))", "vector"),
        ("integer-leaves-accepted", "if not jnp.issubdtype(leaf.dtype, jnp.floating):\n", "if False:\n"),
        ("params-not-varying", 'return lax.pcast(leaf, tuple(missing), to="varying") if missing else leaf', "return leaf"),
        ("overlap-without-divisor", "divide(gradient, self.divisor)", "gradient"),
        ("not-finished", "        for bucket in self.in_flight:\n            bucket.finish()\n", ""),
    ),
    "parallel/shards.py": (
        "parallel/test_shards.py parallel/test_reduce_scatter.py optim",
        ("wrong-column", "lax.axis_index(HORIZONTAL), keepdims=False", "0, keepdims=False"),
        ("squares-in-16-bits", "    leaves = [leaf.astype(jnp.float32) for leaf in leaves]\n", ""),
        ("squares-of-one-row", "= lax.psum(jnp.concatenate(partial_sums), HORIZONTAL)", "= jnp.concatenate(partial_sums)"),
        ("order-of-sums", "np.argsort(others + vectors)", "range(len(others + vectors))"),
    ),
    "parallel/mesh.py": (
        "parallel/test_mesh.py test_planning.py configs/test_published_recipes.py",
        ("sides-swapped", "return hosts, devices // hosts", "return devices // hosts, hosts"),
        ("published-grid", "3456: (48, 72)", "3456: (54, 64)"),
        ("devices-of-first-process", "devices[process * per_process + index]", "devices[process * used_per_process + index]"),
        ("uneven-side-accepted", "if devices % side:\n", "if False:\n"),
    ),
    "parallel/redundant_sum.py": (
        "callbacks/test_audit.py test_strategies.py",
        ("bound-of-one-sum", "(first + second) / (1 - second)", "first / (1 - second)"),
        ("nan-is-equal", "comparable & ~(difference <= bound)", "comparable & (difference > bound)"),
        ("roundoff-doubled", "float(jnp.finfo(dtype).eps) / 2", "float(jnp.finfo(dtype).eps)"),
    ),
    "parallel/buckets.py": (
        "test_strategies.py parallel/test_overlap.py parallel/test_allreduce.py parallel/test_shards.py",
        ("bucket-too-full", "filled + size > bucket_bytes", "filled > bucket_bytes"),
        ("shard-size-floor", "-(-math.prod(shape) // parts)", "max(1, math.prod(shape) // parts)"),
    ),
    "strategies.py": (
        "test_strategies.py analysis/test_cost_model.py callbacks/test_audit.py",
        ("torus-cost", "2 * columns / (vertical * horizontal)), along_rows]]", "2 * columns / vertical), along_rows]]"),
        ("additions", "return vertical + horizontal - 2 if", "return vertical + horizontal - 1 if"),
    ),
    "training/step.py": (
        "training/test_step.py training/test_mixed_precision.py models/test_finetune.py data/test_augment.py",
        ("scale-not-divided", "local_scale = scale if scaled else scale / lax.axis_size(AXES)", "local_scale = scale"),
        ("loss-scale-kept", "gradient = jax.tree.map(lambda g: g / scale, gradient)\n", "pass\n"),
        ("accumulation-is-sum", "jax.tree.map(lambda x: x / count, total)", "total"),
        ("frozen-trained", "x = lax.stop_gradient(x) if stop_gradient else x", "x = x"),
        ("variance-without-mean", 'new["square"] - new["mean"] ** 2', 'new["square"]'),
        (
            "decay-swapped",
            'decay * stats["mean"] + (1 - decay) * new["mean"]',
            '(1 - decay) * stats["mean"] + decay * new["mean"]',
        ),
        ("finite-loss-only", 'jnp.isfinite(gradient_norm) & jnp.isfinite(aux["loss"])', 'jnp.isfinite(aux["loss"])'),
        ("statistics-of-last-batch", "moments, config.model.norm_momentum)", "moments, 0.0)"),
        ("mixed-labels-of-own", "mixed_labels = labels[partner], share", "mixed_labels = labels, share"),
        ("accuracy-of-second", "(rank_of_label(x, labels) == 0)", "(rank_of_label(x, labels) <= 1)"),
        ("divisor-in-backward", "divisor = lax.axis_size(AXES) if scaled else 1", "divisor = 1"),
    ),
    "training/evaluation.py": (
        "training/test_evaluation.py",
        ("padding-counts", "weights * (rank < 1)", "(rank < 1)"),
        ("top5-is-top4", "weights * (rank < 5)", "weights * (rank < 4)"),
        ("smoothed-loss", "label_smoothing=0.0, target_threshold=None", "target_threshold=None"),
        ("count-unchecked", 'if totals["seen"] != len(source) or', "if"),
        ("loss-per-seen", 'totals["loss"] / count', 'totals["loss"] / totals["seen"]'),
    ),
    "models/batch_norm.py": (
        "models/test_batch_norm.py models/test_resnet.py training/test_step.py",
        ("epsilon", "EPSILON = 1e-5", "EPSILON = 1e-3"),
        ("gradient-without-mean", "(product - self.mean * total) * self.inverse_std", "product * self.inverse_std"),
        ("constant-sign", "(self.factor * total_mean + slope * self.mean)", "(self.factor * total_mean - slope * self.mean)"),
        ("slope-sign", "slope = -self.factor", "slope = self.factor"),
        ("moments-over-batch-only", "REDUCTION_AXES = (0, 1, 2)", "REDUCTION_AXES = (0, 1)"),
        ("not-synchronized", 'lax.pcast(lax.pmean(values, axes), axes, to="varying") if axes else values', "values"),
        ("bias-without-mean", "(self.norm.bias - self.norm.mean * factor)", "self.norm.bias"),
    ),
    "models/bn_relu.py": (
        "models/test_batch_norm.py",
        ("mask-inclusive", "masked = jnp.where(y > 0, cotangent, 0)", "masked = jnp.where(y >= 0, cotangent, 0)"),
        ("shortcut-without-gradient", "masked if has_shortcut else None", "0 * masked if has_shortcut else None"),
        ("total-in-16-bits", ".astype(jnp.float32).sum(REDUCTION_AXES)", ".sum(REDUCTION_AXES).astype(jnp.float32)"),
    ),
    "data/sampler.py": (
        "data/test_sampler.py data/test_prefetch.py",
        ("same-order-in-every-epoch", "key=[seed, epoch]", "key=[seed, 0]"),
        ("seed-ignored", "key=[seed, epoch]", "key=[0, epoch]"),
        ("repeats-order", "remainders + repeats * (offsets - starts[remainders])", "repeats * (offsets - starts[remainders])"),
    ),
    "data/prefetch.py": (
        "data/test_prefetch.py training/test_evaluation.py",
        ("rows-of-first-device", "local_device_indices(self.mesh) * self.rows", "local_device_indices(self.mesh) * 0"),
        ("padding-is-seen", "positions < min(first + batch_size, len(source))", "positions < first + batch_size"),
        ("ignored-labels-count", "(real & (labels >= 0))", "real"),
        ("positions-from-zero", "cls(first + offsets, repeated", "cls(offsets, repeated"),
    ),
    "data/augment.py": (
        "data/test_augment.py data/test_in_memory.py data/test_pixel_operations.py test_augmentations.py",
        ("std-not-applied", "(images.astype(jnp.float32) - means) * (1.0 / stds)", "(images.astype(jnp.float32) - means)"),
        ("one-key-for-all", "jax.random.key(seed)))(positions)", "jax.random.key(seed)))(0 * positions)"),
        ("crop-not-centered", "= down * (height - crop_height) + (rows + 0.5)", "= down * (height - crop_height) + rows"),
        ("flip-always", "crop[:, ::-1], crop)", "crop[:, ::-1], crop[:, ::-1])"),
        ("cutmix-area", "side = jnp.sqrt(1 - share)", "side = 1 - share"),
        ("mixup-share", "share * images + (1 - share) * partners", "(1 - share) * images + share * partners"),
    ),
    "checkpoint/checksums.py": (
        "checkpoint/test_checksums.py checkpoint/test_damage.py",
        ("one-checksum", "{google_crc32c.value(data):08x}{zlib.crc32(data):08x}", "{google_crc32c.value(data):08x}{0:08x}"),
        ("half-is-majority", "2 * count <= len(values)", "2 * count < len(values)"),
        ("not-finite-accepted", "if not all(report.finite for report in reports):\n", "if False:\n"),
    ),
    "checkpoint/manifest.py": (
        "checkpoint/test_manifest.py checkpoint/test_damage.py",
        ("manifest-unchecked", "if hashlib.sha256(body).hexdigest().encode() != digest:\n", "if False:\n"),
        ("sizes-only", "if actual != [size, checksum]:", "if actual[0] != size:"),
        ("other-checkpoint", "if is_checkpoint_name(path.name) and path.name != str(samples):", "if False:"),
        ("links-followed", "if file.is_symlink() or not (file.is_file() or file.is_dir()):\n", "if False:\n"),
    ),
    "checkpoint/listing.py": (
        "checkpoint/test_listing.py checkpoint/test_manager.py",
        ("worst-is-best", "(pair[0], pair[1].samples), reverse=True)", "(pair[0], pair[1].samples))"),
        ("keep-one-less", "manifests[: self.keep]", "manifests[: self.keep - 1]"),
        ("audited-expires", "kept = {self.audited, self.resumed,", "kept = {self.resumed,"),
    ),
    "checkpoint/manager.py": (
        "checkpoint/test_manager.py checkpoint/test_checksums.py callbacks/test_audit.py training/test_resume.py",
        ("replicas-unchecked", "report = StateReport([*map(str, diverged)], parts,", "report = StateReport([], parts,"),
        ("no-rejection", "                self._rejection = TrainingError(reason)\n", ""),
    ),
    "planning.py": (
        "test_planning.py test_schedules.py",
        ("hours-in-minutes", "/ images_per_second / 3600", "/ images_per_second / 60"),
        ("steps-after-floor", "-(-max(0, phase.end", "(max(0, phase.end"),
        ("phase-at-boundary", "if phase.first_sample <= samples)", "if phase.first_sample < samples)"),
        ("batch-above-data", "if phase.global_batch > examples:\n", "if False:\n"),
        ("fewest-devices", "used = max(usable)", "used = min(usable)"),
        ("rate-of-epochs", "samples / self.examples, epochs=", "samples // self.examples, epochs="),
    ),
    "distributed/verdict.py": (
        "distributed/test_verdict.py",
        ("left-is-silent", "if not record.left and self.silent_seconds", "if self.silent_seconds"),
        ("slow-writes", "clock - seen.changed - SLOW_WRITES * seen.record.write_seconds", "clock - seen.changed"),
        ("gone-at-once", "if confirmed := gone & self._gone:", "if confirmed := gone:"),
        ("few-reads", "if seen.reads < MIN_READS:\n", "if False:\n"),
        ("healthy-blamed", "if working := [record for record in late if record.work]:", "if working := late:"),
        ("lost-link", "if len(failed) == 1 and not lost_link:", "if len(failed) == 1:"),
    ),
    "training/request_flags.py": (
        "training/test_request_flags.py training/test_loop.py",
        ("smallest-request", "jnp.sum(total > 0, dtype=jnp.int32)", "jnp.sum(total >= 1, dtype=jnp.int32)"),
    ),
    "phases.py": (
        "test_schedules.py test_planning.py",
        ("interval-inclusive", "before * denominator // numerator < after", "before * denominator // numerator <= after"),
        ("samples-float", "math.ceil(Fraction(str(epoch)) * examples)", "math.ceil(epoch * examples)"),
        ("phase-steps-floor", "-(-(end - seen) // phase.global_batch)", "(end - seen) // phase.global_batch"),
    ),
}


def failed_test(checkout: Path, arguments: list[str]) -> str | None:
    """The first test that fails with these arguments of pytest, "time limit", or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    try:
        run = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return "time limit"
    if run.returncode in (0, 5):  # 5: there are no such tests
        return None
    return next(iter(re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)), run.stdout[-200:])


def found_by(path: Path, old: str, new: str, *, checkout: Path, near: list[str], near_only: bool) -> str | None:
    """The test that fails with a mutation of the file at `path`, or None."""
    text = path.read_text()
    path.write_text(text.replace(old, new))
    try:
        return failed_test(checkout, ["-n", "0", *near]) or (None if near_only else failed_test(checkout, []))
    finally:
        path.write_text(text)


def main() -> None:
    names = [name for _, *mutations in MUTATIONS.values() for name, *_ in mutations]
    given = arguments(__doc__, only=names, commit="HEAD", near_only=False)
    commit = commit_of(ROOT, given.commit)
    records = read("mutations", {})
    of_commit = records.setdefault(commit, {})
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder)
        subprocess.run(["git", "clone", "-q", ROOT, checkout], check=True)
        subprocess.run(["git", "-C", checkout, "checkout", "-q", commit], check=True)
        for file, (tests, *mutations) in MUTATIONS.items():
            path = checkout / "jaxdp" / file
            near = [f"tests/{test}" for test in tests.split() if (checkout / "tests" / test).exists()]
            for name, old, new in mutations:
                if name not in given.only or not path.exists() or path.read_text().count(old) != 1:
                    continue
                began = time.monotonic()
                by = found_by(path, old, new, checkout=checkout, near=near, near_only=given.near_only)
                of_commit[name] = {"found": by is not None, "by": by, "seconds": round(time.monotonic() - began)}
                write("mutations", records)
                print(file, name, by or "NOT FOUND", flush=True)
    survivors = [name for name, record in of_commit.items() if not record["found"]]
    print(f"{commit}: {len(of_commit) - len(survivors)} of {len(of_commit)} found; survivors: {', '.join(survivors) or 'none'}")


if __name__ == "__main__":
    main()
