"""`jaxdp doctor`: check this machine, or with --verify that its devices train correctly."""

import contextlib
import dataclasses
import json
import os
import signal
import sys

from jaxdp.cli.options import ConfigFields, Launch, LaunchFields, Switch, stdout_for_the_document
from jaxdp.config import Config
from jaxdp.errors import EXIT_FAILURE, ConfigError, StorageError, print_safe
from jaxdp.files import is_url
from jaxdp.flags import parse
from jaxdp.recipes import load_recipe
from jaxdp.validation import validate


def run(arguments: list[str], program: str) -> None:
    recipe = load_recipe(arguments, default="digits").config

    @dataclasses.dataclass(frozen=True)
    class Doctor:
        """Check whether this machine can run a recipe: devices, drivers, variables, object storage.
        Exits with 1 if a check reports an error.

        With --verify: check that its devices train correctly. Compares the gradient of every strategy with one device's,
        repeats steps to the bit, and checks exact sums of messages as large as the recipe's and exact resume. If it is
        stopped, the results so far are printed.

        Examples:
          jaxdp doctor --config imagenet_goyal_8k
          jaxdp doctor --check-images --data.source folder --data.directory ~/pictures
          jaxdp doctor --verify --json
          jaxdp doctor --verify --thorough --mesh.cpu-devices 8
          jaxdp launch --processes 2 -- jaxdp doctor --verify
        """

        run: ConfigFields = dataclasses.field(default_factory=lambda: recipe)
        config: str = "digits"
        """Recipe to check for: a name in configs/, a .py file with config(), or a saved config.json"""
        workdir: str | None = None
        """URL of a run, which is checked; with --verify on several processes, a directory that they share"""
        check_images: Switch = False
        """Decoding of every image of the data set, which reports those that cannot be used"""
        verify: Switch = False
        """Proofs of correct training instead of checks, on all processes; splits a CPU into --mesh.cpu-devices, or 4"""
        thorough: Switch = False
        """Proofs of --verify on every mesh, not only on the recipe's"""
        json: Switch = False
        """Output as one JSON document on stdout; of --verify with machine, versions and commit"""
        launch: LaunchFields = dataclasses.field(default_factory=Launch)

    options = parse(Doctor, arguments, program)
    config = validate(options.run)
    if options.verify:
        if is_url(options.workdir):
            reason = "the processes of --verify need a directory that they share"
            raise ConfigError("--workdir", options.workdir, reason=reason, hint="use a directory")
        if options.check_images:
            raise ConfigError("--check-images", reason="has no effect with --verify")
        _verify(config, options.workdir, launch=options.launch, as_json=options.json, thorough=options.thorough)
        return
    if options.thorough:
        raise ConfigError("--thorough", reason="requires --verify", hint="add it")
    if options.launch != Launch():
        raise ConfigError("--coordinator", reason="flags of several processes require --verify", hint="add it")
    if options.workdir is not None and not is_url(options.workdir):
        hint = "give a URL in object storage, which is checked, or use --verify"
        raise ConfigError("--workdir", options.workdir, reason="a directory is not checked", hint=hint)
    _check(config, options.workdir, images=options.check_images, as_json=options.json)


def _check(config: Config, url: str | None, *, images: bool, as_json: bool) -> None:
    with contextlib.redirect_stdout(sys.stderr):  # packages may print while they are imported
        from jaxdp.doctor import checks
    from jaxdp.loggers.console import Screen

    results = checks.run_checks(config, url)
    if images:
        result = checks.CheckResult("images")
        try:
            checks.check_images(result, config, Screen(sys.stderr).info)
        except (ConfigError, StorageError) as error:
            result.error(str(error), "see docs/data.md for the layout of a data set")
        results.append(result)
    if as_json:
        print_safe(json.dumps(checks.to_dict(results, config.name), indent=2))
    else:
        screen = Screen()
        screen.info(f"checks for the recipe {config.name}")
        screen.table(checks.make_table(results))
        screen.info(checks.summarize(results))
    code = EXIT_FAILURE if any(result.status == checks.ERROR for result in results) else 0
    if checks.any_running():
        sys.stdout.flush()
        os._exit(code)
    if code:
        sys.exit(code)


def _verify(config: Config, workdir: str | None, *, launch: Launch, as_json: bool, thorough: bool) -> None:
    """Run the checks on all processes; exits with 1 if one fails. Several processes share a directory beside `workdir`."""
    from jaxdp.distributed import runtime
    from jaxdp.doctor import verify
    from jaxdp.loggers.console import Screen
    from jaxdp.setup import run_dir

    document = stdout_for_the_document() if as_json else sys.stdout
    run_path = run_dir.resolve_workdir(workdir, config)
    shared_dir = run_path.with_name(f"{run_path.name}-verify")
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: one line, temporary files removed
    try:
        group = runtime.join(
            launch.cluster,
            guard=config.guard,
            directory=shared_dir,
            coordinator=launch.coordinator,
            processes=launch.processes,
            rank=launch.rank,
        )
        with runtime.fail_together(group):
            if workdir is not None and group.num_processes == 1:
                raise ConfigError("--workdir", workdir, reason="has no effect with --verify in a single process")
            info = Screen(sys.stderr if as_json else None, quiet=not group.is_rank0).info
            shared = shared_dir if group.num_processes > 1 else None
            if shared and group.is_rank0:
                shared.mkdir(parents=True, exist_ok=True)
            record = verify.run(config, info, group=group, shared_dir=shared, thorough=thorough)
            if group.is_rank0:
                text = json.dumps(record, indent=1, allow_nan=False) if as_json else verify.summarize(record)
                print_safe(text, document)
            if record["stopped"]:
                raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGTERM, handler)
    runtime.exit_together(group, EXIT_FAILURE if record["failed"] else 0, directory=shared_dir)
